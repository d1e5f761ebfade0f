// Operation `merge` on the CPU: rows × heads in parallel, one weight pair per (row, head).
#include <limits>
#include <string>

#include "kernels/common/merge_weights.h"
#include "kernels/cpu/entries.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

std::string shape(const View3<const float>& view) {
  return "[" + std::to_string(view.extent(0)) + ", " + std::to_string(view.extent(1)) + ", " +
         std::to_string(view.extent(2)) + "]";
}

void check(const MergeProblem& problem, const MergeCall& call) {
  const std::int64_t rows = call.b.out.extent(0);
  require(rows <= problem.max_rows, "b.out", rows,
          "at most the problem's " + std::to_string(problem.max_rows) + " rows");
  for (const auto& [name, partial] : {std::pair{"a", &call.a}, std::pair{"b", &call.b}}) {
    const bool absent = partial->out.extent(0) == 0;
    require(absent || (partial->out.extent(1) == problem.num_heads &&
                       partial->out.extent(2) == problem.v_head_dim),
            std::string(name) + ".out", shape(partial->out),
            "[rows, " + std::to_string(problem.num_heads) + ", " +
                std::to_string(problem.v_head_dim) + "]");
    require(absent || (partial->lse.extent(0) == problem.num_heads &&
                       partial->lse.extent(1) >= partial->out.extent(0)),
            std::string(name) + ".lse", partial->lse.extent(1), "[num_heads, rows] of its out");
  }
  require(call.a.out.extent(0) <= rows, "a.out", call.a.out.extent(0),
          "at most b's " + std::to_string(rows) + " rows");
  const bool to_bf16 = call.out_bf16.data_handle() != nullptr;
  require(to_bf16 != (call.out_f32.data_handle() != nullptr) || rows == 0, "out", "both or neither",
          "one of out_f32 and out_bf16");
  require(to_bf16 == problem.bf16_out || rows == 0, "out", to_bf16 ? "bf16" : "fp32",
          problem.bf16_out ? "bf16" : "fp32");
  const auto check_width = [&](const auto& out) {
    require(
        rows == 0 || (out.extent(1) == problem.num_heads && out.extent(2) == problem.v_head_dim),
        "out",
        "[rows, " + std::to_string(out.extent(1)) + ", " + std::to_string(out.extent(2)) + "]",
        "[rows, " + std::to_string(problem.num_heads) + ", " + std::to_string(problem.v_head_dim) +
            "]");
  };
  to_bf16 ? check_width(call.out_bf16) : check_width(call.out_f32);
  require(rows == 0 || call.lse.extent(0) == problem.num_heads, "lse", call.lse.extent(0),
          "num_heads (" + std::to_string(problem.num_heads) + ") rows");
  const std::int64_t out_rows = to_bf16 ? call.out_bf16.extent(0) : call.out_f32.extent(0);
  require(call.lse.extent(1) >= out_rows || rows == 0, "lse", call.lse.extent(1),
          "a column per row of out");
  if (call.out_tokens == nullptr) {
    require(out_rows >= rows, "out", out_rows, "at least " + std::to_string(rows) + " rows");
  } else {
    for (std::int64_t row = 0; row < rows; ++row)
      require(call.out_tokens[row] >= 0 && call.out_tokens[row] < out_rows,
              "out_tokens[" + std::to_string(row) + "]", call.out_tokens[row],
              "a token below " + std::to_string(out_rows));
  }
}

void run(const MergeProblem& problem, const MergeCall& call, std::span<std::byte>, Stream) {
  check(problem, call);
  const std::int64_t rows = call.b.out.extent(0), rows_a = call.a.out.extent(0);
  const bool to_bf16 = call.out_bf16.data_handle() != nullptr;
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t token = call.out_tokens == nullptr ? row : call.out_tokens[row];
    const bool in_a = row < rows_a;
    for (int head = 0; head < problem.num_heads; ++head) {
      const float lse_a = in_a ? call.a.lse(head, row) : -std::numeric_limits<float>::infinity();
      const MergeWeights weights = merge_weights(lse_a, call.b.lse(head, row));
      call.lse(head, token) = weights.lse;
      for (int i = 0; i < problem.v_head_dim; ++i) {
        const float value =
            merge_value(weights, in_a ? call.a.out(row, head, i) : 0.0f, call.b.out(row, head, i));
        if (to_bf16)
          call.out_bf16(token, head, i) = __float2bfloat16_rn(value);
        else
          call.out_f32(token, head, i) = value;
      }
    }
  }
}

}  // namespace

std::vector<Entry<MergeProblem, MergeCall>> merge_entries() {
  return {{"cpu", Backend::cpu, "fp32 log-sum-exp merge, a row at a time",
           [](const MergeProblem&) { return std::string(); },
           [](const MergeProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cpu
