/// What every entry of `sparse_mqa` requires of shapes. What slots, counts and lse_tokens hold is
/// not looked at: they may be device memory.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/common/view_checks.h"
#include "sparse_mla/attention.h"
#include "sparse_mla/error.h"

namespace sparse_mla {

inline void check_shapes(const SparseMqaProblem& problem, const SparseMqaCall& call) {
  const std::int64_t tokens = call.q.extent(0), heads = problem.num_heads;
  require(tokens <= problem.max_tokens, "q", shape_text(call.q),
          "at most the problem's " + std::to_string(problem.max_tokens) + " tokens");
  require_extent("q", call.q, 1, heads, "num_heads");
  require_extent("q", call.q, 2, std::int64_t{problem.kv_lora_rank} + problem.qk_rope_head_dim,
                 "L+R");
  require_extent("slots", call.slots, 0, tokens, "q's tokens");
  require(call.slots.extent(1) <= problem.topk, "slots", shape_text(call.slots),
          "at most topk (" + std::to_string(problem.topk) + ") columns");
  require_extent("out", call.out, 0, tokens, "q's tokens");
  require_extent("out", call.out, 1, heads, "num_heads");
  require_extent("out", call.out, 2, problem.kv_lora_rank, "L");
  require_extent("lse", call.lse, 0, heads, "num_heads");
  require_contiguous_rows("q", call.q);
  require_contiguous_rows("out", call.out);
  validate(call.cache, problem.format, problem.kv_lora_rank, problem.qk_rope_head_dim, "cache");
  require(call.lse_tokens != nullptr || call.lse.extent(1) >= tokens, "lse", shape_text(call.lse),
          "a column for each of the " + std::to_string(tokens) + " tokens");
  require(call.sink.data_handle() == nullptr || call.sink.extent(0) == heads, "sink",
          shape_text(call.sink), "one per head (" + std::to_string(heads) + ")");
}

}  // namespace sparse_mla
