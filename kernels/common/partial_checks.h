/// What every entry of `merge` and `init_partial` requires of shapes. What the arrays hold is not
/// looked at: they may be device memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "kernels/common/view_checks.h"
#include "sparse_mla/error.h"
#include "sparse_mla/partials.h"

namespace sparse_mla {

/// Rows of the result that MergeProblem::output names.
inline std::int64_t merged_rows(OutputType type, const MergeCall& call) {
  if (type == OutputType::f32) return call.out_f32.extent(0);
  if (type == OutputType::bf16) return call.out_bf16.extent(0);
  return call.out_fp8.extent(0);
}

inline const void* merged_data(OutputType type, const MergeCall& call) {
  if (type == OutputType::f32) return call.out_f32.data_handle();
  if (type == OutputType::bf16) return call.out_bf16.data_handle();
  return call.out_fp8.data_handle();
}

inline void check_shapes(const MergeProblem& problem, const MergeCall& call) {
  const std::int64_t rows = call.b.out.extent(0);
  const std::string row_shape = "[rows, " + std::to_string(problem.num_heads) + ", " +
                                std::to_string(problem.v_head_dim) + "]";
  require(rows <= problem.max_rows, "b.out", rows,
          "at most the problem's " + std::to_string(problem.max_rows) + " rows");
  for (const auto& [name, partial] : {std::pair{"a", &call.a}, std::pair{"b", &call.b}}) {
    const bool absent = partial->out.extent(0) == 0;
    require(absent || (partial->out.extent(1) == problem.num_heads &&
                       partial->out.extent(2) == problem.v_head_dim),
            std::string(name) + ".out", shape_text(partial->out), row_shape);
    require(absent || (partial->lse.extent(0) == problem.num_heads &&
                       partial->lse.extent(1) >= partial->out.extent(0)),
            std::string(name) + ".lse", partial->lse.extent(1), "[num_heads, rows] of its out");
  }
  require(call.a.out.extent(0) <= rows, "a.out", call.a.out.extent(0),
          "at most b's " + std::to_string(rows) + " rows");
  require(call.sink.data_handle() == nullptr || call.sink.extent(0) == problem.num_heads, "sink",
          call.sink.extent(0), "one per head (" + std::to_string(problem.num_heads) + ")");
  if (rows == 0) return;
  const int given = (call.out_f32.data_handle() != nullptr) +
                    (call.out_bf16.data_handle() != nullptr) +
                    (call.out_fp8.data_handle() != nullptr);
  require(given == 1, "out", std::to_string(given) + " of out_f32, out_bf16 and out_fp8", "one");
  require(merged_data(problem.output, call) != nullptr, "out", "another type",
          to_string(problem.output));
  require(problem.output != OutputType::fp8 || (call.out_scale > 0 && call.out_scale < HUGE_VALF),
          "out_scale", call.out_scale, "a finite value above 0");
  const auto check_width = [&](const auto& out) {
    require(out.extent(1) == problem.num_heads && out.extent(2) == problem.v_head_dim, "out",
            "[rows, " + std::to_string(out.extent(1)) + ", " + std::to_string(out.extent(2)) + "]",
            row_shape);
  };
  if (problem.output == OutputType::f32) check_width(call.out_f32);
  if (problem.output == OutputType::bf16) check_width(call.out_bf16);
  if (problem.output == OutputType::fp8) check_width(call.out_fp8);
  require(call.lse.extent(0) == problem.num_heads, "lse", call.lse.extent(0),
          "num_heads (" + std::to_string(problem.num_heads) + ") rows");
  const std::int64_t out_rows = merged_rows(problem.output, call);
  require(call.lse.extent(1) >= out_rows, "lse", call.lse.extent(1), "a column per row of out");
  require(call.out_tokens != nullptr || out_rows >= rows, "out", out_rows,
          "at least " + std::to_string(rows) + " rows");
}

inline void check_shapes(const InitPartialProblem& problem, const InitPartialCall& call) {
  const Partial& running = call.running;
  const std::int64_t rows = running.out.extent(0);
  require(rows <= problem.max_rows, "running.out", rows,
          "at most the problem's " + std::to_string(problem.max_rows) + " rows");
  require(rows == 0 || (running.out.extent(1) == problem.num_heads &&
                        running.out.extent(2) == problem.v_head_dim),
          "running.out",
          "[rows, " + std::to_string(running.out.extent(1)) + ", " +
              std::to_string(running.out.extent(2)) + "]",
          "[rows, " + std::to_string(problem.num_heads) + ", " +
              std::to_string(problem.v_head_dim) + "]");
  require(
      rows == 0 || (running.lse.extent(0) == problem.num_heads && running.lse.extent(1) >= rows),
      "running.lse", running.lse.extent(1), "[num_heads, rows] of its out");
}

}  // namespace sparse_mla
