// Operation `write_cache` on the CPU: checks every slot, then writes row by row.
#include <cmath>
#include <cstring>
#include <string>

#include "kernels/cpu/entries.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

bool with_index(const WriteCacheProblem& problem, const WriteCacheCall& call) {
  return problem.index_head_dim > 0 && call.index_k.data_handle() != nullptr;
}

void check(const WriteCacheProblem& problem, const WriteCacheCall& call) {
  const std::int64_t tokens = call.slot_mapping.extent(0);
  require(tokens <= problem.max_tokens, "slot_mapping", tokens,
          "at most the problem's " + std::to_string(problem.max_tokens) + " tokens");
  if (tokens == 0) return;
  require(call.latent.extent(0) == tokens && call.latent.extent(1) == problem.latent_dim, "latent",
          "[" + std::to_string(call.latent.extent(0)) + ", " +
              std::to_string(call.latent.extent(1)) + "]",
          "[" + std::to_string(tokens) + ", " + std::to_string(problem.latent_dim) + "]");
  require(call.latent.stride(1) == 1, "latent", call.latent.stride(1),
          "contiguous rows (last stride 1)");
  require(call.latent_cache.format == problem.format, "latent_cache.format",
          to_string(call.latent_cache.format), to_string(problem.format));
  const bool index = with_index(problem, call);
  if (index) {
    require(call.index_k.extent(0) == tokens && call.index_k.extent(1) == problem.index_head_dim,
            "index_k",
            "[" + std::to_string(call.index_k.extent(0)) + ", " +
                std::to_string(call.index_k.extent(1)) + "]",
            "[" + std::to_string(tokens) + ", " + std::to_string(problem.index_head_dim) + "]");
    require(call.index_k.stride(1) == 1, "index_k", call.index_k.stride(1),
            "contiguous rows (last stride 1)");
    require(call.index_k_scale.extent(0) == tokens, "index_k_scale", call.index_k_scale.extent(0),
            std::to_string(tokens) + " entries");
    require(call.index_cache.head_dim == problem.index_head_dim, "index_cache.head_dim",
            call.index_cache.head_dim, std::to_string(problem.index_head_dim));
    require(
        call.index_cache.num_slots() == call.latent_cache.num_slots(), "index_cache",
        call.index_cache.num_slots(),
        "as many slots as latent_cache (" + std::to_string(call.latent_cache.num_slots()) + ")");
  }
  for (std::int64_t token = 0; token < tokens; ++token) {
    const std::int64_t slot = call.slot_mapping(token);
    require(slot >= -1 && slot < call.latent_cache.num_slots(),
            "slot_mapping[" + std::to_string(token) + "]", slot,
            "-1 or a slot below " + std::to_string(call.latent_cache.num_slots()));
    if (slot < 0 || !index) continue;
    // A negative scale would turn relu(q·k)·scale into something that no kernel computes.
    require(!(call.index_k_scale(token) < 0), "index_k_scale[" + std::to_string(token) + "]",
            call.index_k_scale(token), "at least 0");
  }
}

void run(const WriteCacheProblem& problem, const WriteCacheCall& call, std::span<std::byte>,
         Stream) {
  check(problem, call);
  const std::size_t row_bytes = 2 * static_cast<std::size_t>(problem.latent_dim);
  for (std::int64_t token = 0; token < call.slot_mapping.extent(0); ++token) {
    const std::int64_t slot = call.slot_mapping(token);
    if (slot < 0) continue;
    std::memcpy(call.latent_cache.row(slot), address(call.latent, token, 0), row_bytes);
    if (!with_index(problem, call)) continue;
    std::memcpy(call.index_cache.key(slot), address(call.index_k, token, 0),
                static_cast<std::size_t>(problem.index_head_dim));
    const float scale = call.index_k_scale(token);
    std::memcpy(call.index_cache.scale(slot), &scale, sizeof scale);
  }
}

}  // namespace

std::vector<Entry<WriteCacheProblem, WriteCacheCall>> write_cache_entries() {
  return {{"cpu", Backend::cpu, "a row at a time, all slots checked first",
           [](const WriteCacheProblem&) { return std::string(); },
           [](const WriteCacheProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cpu
