// Operation `merge` on the CPU: rows × heads in parallel, one weight pair per (row, head).
#include <cmath>
#include <limits>
#include <string>

#include "kernels/common/finished_row.h"
#include "kernels/common/merge_weights.h"
#include "kernels/cpu/entries.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

std::string shape(const View3<const float>& view) {
  return "[" + std::to_string(view.extent(0)) + ", " + std::to_string(view.extent(1)) + ", " +
         std::to_string(view.extent(2)) + "]";
}

const void* data_of(OutputType type, const MergeCall& call) {
  if (type == OutputType::f32) return call.out_f32.data_handle();
  if (type == OutputType::bf16) return call.out_bf16.data_handle();
  return call.out_fp8.data_handle();
}
std::int64_t rows_of(OutputType type, const MergeCall& call) {
  if (type == OutputType::f32) return call.out_f32.extent(0);
  if (type == OutputType::bf16) return call.out_bf16.extent(0);
  return call.out_fp8.extent(0);
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
  require(call.sink.data_handle() == nullptr || call.sink.extent(0) == problem.num_heads, "sink",
          call.sink.extent(0), "one per head (" + std::to_string(problem.num_heads) + ")");
  if (rows == 0) return;
  const int given = (call.out_f32.data_handle() != nullptr) +
                    (call.out_bf16.data_handle() != nullptr) +
                    (call.out_fp8.data_handle() != nullptr);
  require(given == 1, "out", std::to_string(given) + " of out_f32, out_bf16 and out_fp8", "one");
  require(data_of(problem.output, call) != nullptr, "out", "another type",
          to_string(problem.output));
  require(problem.output != OutputType::fp8 || (call.out_scale > 0 && call.out_scale < HUGE_VALF),
          "out_scale", call.out_scale, "a finite value above 0");
  const auto check_width = [&](const auto& out) {
    require(out.extent(1) == problem.num_heads && out.extent(2) == problem.v_head_dim, "out",
            "[rows, " + std::to_string(out.extent(1)) + ", " + std::to_string(out.extent(2)) + "]",
            "[rows, " + std::to_string(problem.num_heads) + ", " +
                std::to_string(problem.v_head_dim) + "]");
  };
  if (problem.output == OutputType::f32) check_width(call.out_f32);
  if (problem.output == OutputType::bf16) check_width(call.out_bf16);
  if (problem.output == OutputType::fp8) check_width(call.out_fp8);
  require(call.lse.extent(0) == problem.num_heads, "lse", call.lse.extent(0),
          "num_heads (" + std::to_string(problem.num_heads) + ") rows");
  const std::int64_t out_rows = rows_of(problem.output, call);
  require(call.lse.extent(1) >= out_rows, "lse", call.lse.extent(1), "a column per row of out");
  if (call.out_tokens == nullptr) {
    require(out_rows >= rows, "out", out_rows, "at least " + std::to_string(rows) + " rows");
  } else {
    for (std::int64_t row = 0; row < rows; ++row)
      require(call.out_tokens[row] >= 0 && call.out_tokens[row] < out_rows,
              "out_tokens[" + std::to_string(row) + "]", call.out_tokens[row],
              "a token below " + std::to_string(out_rows));
  }
}

/// store(token, head, i, value) rounds and writes one element of the result.
template <class Store>
void merge_rows(const MergeProblem& problem, const MergeCall& call, Store store) {
  const std::int64_t rows = call.b.out.extent(0), rows_a = call.a.out.extent(0);
  const bool with_sink = call.sink.data_handle() != nullptr;
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t token = call.out_tokens == nullptr ? row : call.out_tokens[row];
    const bool in_a = row < rows_a;
    for (int head = 0; head < problem.num_heads; ++head) {
      const float lse_a = in_a ? call.a.lse(head, row) : -std::numeric_limits<float>::infinity();
      const MergeWeights weights = merge_weights(lse_a, call.b.lse(head, row));
      const float factor = with_sink ? sink_factor(call.sink(head), weights.lse) : 1.0f;
      call.lse(head, token) = weights.lse;
      for (int i = 0; i < problem.v_head_dim; ++i)
        store(token, head, i,
              factor * merge_value(weights, in_a ? call.a.out(row, head, i) : 0.0f,
                                   call.b.out(row, head, i)));
    }
  }
}

void run(const MergeProblem& problem, const MergeCall& call, std::span<std::byte>, Stream) {
  check(problem, call);
  switch (problem.output) {
    case OutputType::f32:
      return merge_rows(problem, call, [&](std::int64_t token, int head, int i, float value) {
        call.out_f32(token, head, i) = value;
      });
    case OutputType::bf16:
      return merge_rows(problem, call, [&](std::int64_t token, int head, int i, float value) {
        call.out_bf16(token, head, i) = __float2bfloat16_rn(value);
      });
    case OutputType::fp8:
      return merge_rows(problem, call, [&](std::int64_t token, int head, int i, float value) {
        call.out_fp8(token, head, i) = quantise_output(value, call.out_scale);
      });
  }
}

}  // namespace

std::vector<Entry<MergeProblem, MergeCall>> merge_entries() {
  return {{"cpu", Backend::cpu, "fp32 log-sum-exp merge, a row at a time",
           [](const MergeProblem&) { return std::string(); },
           [](const MergeProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cpu
