/// What every entry of `rotary` and `hadamard` requires of shapes. What the arrays hold is not
/// looked at: they may be device memory.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/view_checks.h"
#include "sparse_mla/error.h"
#include "sparse_mla/hadamard.h"
#include "sparse_mla/rotary.h"

namespace sparse_mla {

inline void check_shapes(const RotaryProblem& problem, const RotaryCall& call) {
  const std::int64_t rows = call.in.extent(0);
  require(problem.dims >= 2 && problem.dims % 2 == 0, "dims", problem.dims,
          "an even number from 2 on");
  require(rows <= problem.max_rows, "in", shape_text(call.in),
          "at most the problem's " + std::to_string(problem.max_rows) + " rows");
  require_extent("in", call.in, 2, problem.dims, "dims");
  for (std::size_t axis = 0; axis < 3; ++axis)
    require_extent("out", call.out, axis, call.in.extent(axis), "in's");
  require_extent("positions", call.positions, 0, rows, "in's rows");
  require_extent("table", call.table, 1, problem.dims, "dims");
}

inline bool is_power_of_two(int dims) {
  return dims >= 1 && std::has_single_bit(static_cast<unsigned>(dims));
}

/// For Entry::why_not.
inline std::string why_not_power_of_two(const HadamardProblem& problem) {
  if (is_power_of_two(problem.dims)) return "";
  return "dims: got " + std::to_string(problem.dims) + ", expected a power of two";
}

inline void check_shapes(const HadamardProblem& problem, const HadamardCall& call) {
  require(is_power_of_two(problem.dims), "dims", problem.dims, "a power of two");
  require(call.in.extent(0) <= problem.max_rows, "in", shape_text(call.in),
          "at most the problem's " + std::to_string(problem.max_rows) + " rows");
  require_extent("in", call.in, 2, problem.dims, "dims");
  for (std::size_t axis = 0; axis < 3; ++axis)
    require_extent("out", call.out, axis, call.in.extent(axis), "in's");
}

}  // namespace sparse_mla
