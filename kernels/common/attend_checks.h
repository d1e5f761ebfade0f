/// What every entry of `attend` requires of shapes. What the members and the masks hold is not
/// looked at: they may be device memory.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/common/mask_checks.h"
#include "kernels/common/view_checks.h"
#include "sparse_mla/attention.h"
#include "sparse_mla/error.h"

namespace sparse_mla {

inline void check_shapes(const AttendProblem& problem, const AttendCall& call) {
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
  if (problem.mode == AttendMode::masked) check_mask_shapes(call.mask, call.members.size());
}

}  // namespace sparse_mla
