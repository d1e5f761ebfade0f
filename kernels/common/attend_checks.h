/// What every entry of `attend` requires of shapes. What the members and the masks hold is not
/// looked at: they may be device memory.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/cpu/view_checks.h"
#include "sparse_mla/attention.h"
#include "sparse_mla/error.h"

namespace sparse_mla {

inline void check_shapes(const AttendProblem& problem, const AttendCall& call) {
  using namespace cpu;
  const std::int64_t heads = call.q.extent(1);
  require(heads <= problem.num_heads, "q", shape_text(call.q),
          "at most the problem's " + std::to_string(problem.num_heads) + " heads");
  require_extent("q", call.q, 2, problem.qk_nope_head_dim + problem.qk_rope_head_dim, "P+R");
  require_extent("k_nope", call.k_nope, 1, heads, "q's heads");
  require_extent("k_nope", call.k_nope, 2, problem.qk_nope_head_dim, "P");
  require_extent("k_pe", call.k_pe, 1, problem.qk_rope_head_dim, "R");
  require_extent("v", call.v, 1, heads, "q's heads");
  require_extent("v", call.v, 2, problem.v_head_dim, "V");
  require_extent("running.out", call.running.out, 1, heads, "q's heads");
  require_extent("running.out", call.running.out, 2, problem.v_head_dim, "V");
  require_extent("running.lse", call.running.lse, 0, heads, "q's heads");
  require_contiguous_rows("q", call.q);
  require_contiguous_rows("k_nope", call.k_nope);
  require_contiguous_rows("k_pe", call.k_pe);
  require_contiguous_rows("v", call.v);
  if (problem.mode != AttendMode::masked) return;
  require(call.mask.members.size() == call.members.size(), "mask.members", call.mask.members.size(),
          std::to_string(call.members.size()) + ", as members");
  require(call.mask.tile.queries >= 1, "mask.tile.queries", call.mask.tile.queries, "at least 1");
  require(call.mask.tile.keys >= 32 && call.mask.tile.keys % 32 == 0, "mask.tile.keys",
          call.mask.tile.keys, "a multiple of 32");
}

/// A mask that is to be read has all of its parts.
inline void check_mask_arrays(const MaskView& mask) {
  require(mask.words != nullptr && mask.tile_counts != nullptr && mask.tile_ids != nullptr, "mask",
          "null", "words, tile_counts and tile_ids");
}

}  // namespace sparse_mla
