// Operation `write_cache` on the CPU: checks every slot, then writes row by row.
#include <cstring>
#include <string>

#include "kernels/common/cache_checks.h"
#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/entries.h"
#include "kernels/cpu/latent_rows.h"
#include "kernels/cpu/tile_kernels.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

void check(const WriteCacheProblem& problem, const WriteCacheCall& call) {
  check_shapes(problem, call);
  const bool index = with_index_keys(problem, call);
  for (std::int64_t token = 0; token < call.slot_mapping.extent(0); ++token) {
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

template <class Rows>
void run(const WriteCacheProblem& problem, const WriteCacheCall& call, const Rows& rows) {
  check(problem, call);
  for (std::int64_t token = 0; token < call.slot_mapping.extent(0); ++token) {
    const std::int64_t slot = call.slot_mapping(token);
    if (slot < 0) continue;
    rows.write(slot, address(call.latent, token, 0), call.power_of_two_scales);
    if (!with_index_keys(problem, call)) continue;
    std::memcpy(call.index_cache.key(slot), address(call.index_k, token, 0),
                static_cast<std::size_t>(problem.index_head_dim));
    const float scale = call.index_k_scale(token);
    std::memcpy(call.index_cache.scale(slot), &scale, sizeof scale);
  }
}

template <const TileKernels& (*kKernels)()>
void run_vectorised(const WriteCacheProblem& problem, const WriteCacheCall& call,
                    std::span<std::byte>, Stream) {
  run(problem, call,
      LatentRows(call.latent_cache, problem.kv_lora_rank, problem.qk_rope_head_dim, kKernels()));
}

void run_reference(const WriteCacheProblem& problem, const WriteCacheCall& call,
                   std::span<std::byte>, Stream) {
  run(problem, call,
      ScalarLatentRows(call.latent_cache, problem.kv_lora_rank, problem.qk_rope_head_dim));
}

std::string usable(const WriteCacheProblem&) { return ""; }
std::string usable_avx2(const WriteCacheProblem&) { return why_not_avx2_fma(); }
std::size_t no_workspace(const WriteCacheProblem&) { return 0; }

}  // namespace

std::vector<Entry<WriteCacheProblem, WriteCacheCall>> write_cache_entries() {
  return {
      {"cpu_avx2", Backend::cpu, "a row at a time, quantised in AVX2 registers", usable_avx2,
       no_workspace, run_vectorised<avx2_tile_kernels>},
      {"cpu_baseline", Backend::cpu, "a row at a time, quantised in SSE2 registers", usable,
       no_workspace, run_vectorised<baseline_tile_kernels>},
      {"cpu_reference", Backend::cpu, "a number at a time", usable, no_workspace, run_reference}};
}

}  // namespace sparse_mla::cpu
