// Operation `merge` on the CPU: rows × heads in parallel, one weight pair per (row, head).
#include <limits>
#include <string>

#include "kernels/common/finished_row.h"
#include "kernels/common/merge_weights.h"
#include "kernels/common/partial_checks.h"
#include "kernels/cpu/entries.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

void check(const MergeProblem& problem, const MergeCall& call) {
  check_shapes(problem, call);
  const std::int64_t rows = call.b.out.extent(0), out_rows = merged_rows(problem.output, call);
  if (call.out_tokens == nullptr) return;
  for (std::int64_t row = 0; row < rows; ++row)
    require(call.out_tokens[row] >= 0 && call.out_tokens[row] < out_rows,
            "out_tokens[" + std::to_string(row) + "]", call.out_tokens[row],
            "a token below " + std::to_string(out_rows));
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
