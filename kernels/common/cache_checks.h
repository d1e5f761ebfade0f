/// What every entry of `write_cache`, `gather` and `map_slots` requires of shapes. What the arrays
/// hold is not looked at: they may be device memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "kernels/common/view_checks.h"
#include "sparse_mla/cache.h"
#include "sparse_mla/error.h"

namespace sparse_mla {

inline bool with_index_keys(const WriteCacheProblem& problem, const WriteCacheCall& call) {
  return problem.index_head_dim > 0 && call.index_k.data_handle() != nullptr;
}

inline void check_shapes(const WriteCacheProblem& problem, const WriteCacheCall& call) {
  const std::int64_t tokens = call.slot_mapping.extent(0);
  require(tokens <= problem.max_tokens, "slot_mapping", tokens,
          "at most the problem's " + std::to_string(problem.max_tokens) + " tokens");
  if (tokens == 0) return;
  const int latent_dim = problem.kv_lora_rank + problem.qk_rope_head_dim;
  require(call.latent.extent(0) == tokens && call.latent.extent(1) == latent_dim, "latent",
          shape_text(call.latent),
          "[" + std::to_string(tokens) + ", " + std::to_string(latent_dim) + "]");
  require(call.latent.stride(1) == 1, "latent", call.latent.stride(1),
          "contiguous rows (last stride 1)");
  validate(call.latent_cache, problem.format, problem.kv_lora_rank, problem.qk_rope_head_dim,
           "latent_cache");
  const float scale = call.latent_cache.scale;
  require(problem.format != CacheFormat::fp8 || (scale > 0 && std::isfinite(scale)),
          "latent_cache.scale", scale, "a positive number");
  if (!with_index_keys(problem, call)) return;
  require(call.index_k.extent(0) == tokens && call.index_k.extent(1) == problem.index_head_dim,
          "index_k", shape_text(call.index_k),
          "[" + std::to_string(tokens) + ", " + std::to_string(problem.index_head_dim) + "]");
  require(call.index_k.stride(1) == 1, "index_k", call.index_k.stride(1),
          "contiguous rows (last stride 1)");
  require(call.index_k_scale.extent(0) == tokens, "index_k_scale", call.index_k_scale.extent(0),
          std::to_string(tokens) + " entries");
  require(call.index_cache.head_dim == problem.index_head_dim, "index_cache.head_dim",
          call.index_cache.head_dim, std::to_string(problem.index_head_dim));
  require(call.index_cache.num_slots() == call.latent_cache.num_slots(), "index_cache",
          call.index_cache.num_slots(),
          "as many slots as latent_cache (" + std::to_string(call.latent_cache.num_slots()) + ")");
}

inline void check_shapes(const GatherProblem& problem, const GatherCall& call) {
  const int latent_dim = problem.kv_lora_rank + problem.qk_rope_head_dim;
  validate(call.cache, problem.format, problem.kv_lora_rank, problem.qk_rope_head_dim, "cache");
  require(call.rows.extent(1) == latent_dim, "rows", call.rows.extent(1),
          "L+R (" + std::to_string(latent_dim) + ") columns");
  require(call.rows.extent(0) == 0 || call.rows.stride(1) == 1, "rows", call.rows.stride(1),
          "contiguous rows (last stride 1)");
}

inline void check_shapes(const MapSlotsProblem& problem, const MapSlotsCall& call) {
  const std::int64_t rows = call.slots.extent(0);
  require(rows <= problem.max_tokens, "slots", rows,
          "at most the problem's " + std::to_string(problem.max_tokens) + " rows");
  require(call.block_size >= 1, "block_size", call.block_size, "at least 1");
  require(call.num_blocks >= 0 &&
              call.num_blocks * call.block_size <= std::numeric_limits<std::int32_t>::max(),
          "num_blocks", call.num_blocks, "a cache of at most 2^31-1 slots");
  if (rows == 0) return;
  require(call.slots.extent(1) == problem.topk && call.picks.extent(1) == problem.topk, "picks",
          call.picks.extent(1), "topk (" + std::to_string(problem.topk) + ") columns, like slots");
  require(call.tokens != nullptr || call.picks.extent(0) == rows, "picks", call.picks.extent(0),
          "as many rows as slots (" + std::to_string(rows) + ")");
  require(call.request_of_token != nullptr && call.keys_of_token != nullptr, "request_of_token",
          "null", "request and key count of every token");
}

}  // namespace sparse_mla
