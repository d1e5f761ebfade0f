#include "topk/select_rows.h"

#include <bit>
#include <limits>
#include <string>

namespace sparse_mla::topk {

std::int64_t row_offset(const ScoreRows& scores, std::int64_t r) {
  return scores.row_offsets ? scores.row_offsets[r] : r * scores.row_stride;
}

RowScores row_scores(const SelectCall& call, std::int64_t r) {
  const ScoreRows& scores = call.scores;
  const std::int64_t first =
      call.starts ? std::clamp<std::int64_t>(call.starts[r], 0, scores.row_len) : 0;
  const std::int64_t last =
      call.ends ? std::clamp<std::int64_t>(call.ends[r], 0, scores.row_len) : scores.row_len;
  if (last <= first) return {nullptr, 0, scores.type};
  const std::int64_t bytes = scores.type == ScoreType::f32 ? Float32::kBytes : BFloat16::kBytes;
  return {static_cast<const std::byte*>(scores.data) + (row_offset(scores, r) + first) * bytes,
          last - first, scores.type};
}

void validate(const SelectProblem& problem, const SelectCall& call) {
  validate_shapes(problem, call);
  const ScoreRows& scores = call.scores;
  if (scores.row_len > problem.max_row_len)
    for (std::int64_t r = 0; r < scores.num_rows; ++r) {
      const std::int64_t len = row_scores(call, r).len;
      require(len <= problem.max_row_len, "length of row " + std::to_string(r), len,
              "at most max_row_len = " + std::to_string(problem.max_row_len));
    }
  if (call.out_rows) {
    std::int64_t limit = call.indices.extent(0);
    if (call.values.data_handle()) limit = std::min<std::int64_t>(limit, call.values.extent(0));
    for (std::int64_t r = 0; r < scores.num_rows; ++r)
      require(call.out_rows[r] >= 0 && call.out_rows[r] < limit,
              "out_rows[" + std::to_string(r) + "]", call.out_rows[r],
              "a row of the outputs, below " + std::to_string(limit));
  }
}

int num_threads(const SelectProblem& problem) {
  return static_cast<int>(
      std::clamp<std::int64_t>(problem.max_rows, 1, std::max(1, omp_get_max_threads())));
}

std::uint64_t* carve_ranks(const SelectProblem& problem, int threads, WorkspaceCarver& carver) {
  if (problem.order != SelectOrder::by_value) return nullptr;
  return carver.take<std::uint64_t>("select ranks", std::int64_t{threads} * problem.k);
}

void finish_row(const RowScores& row, SelectOrder order, bool ascending, std::int64_t count, int k,
                std::uint64_t* ranks, std::int32_t* picks, float* values) {
  if (order == SelectOrder::by_index && !ascending) std::sort(picks, picks + count);
  if (order == SelectOrder::by_value) {
    for (std::int64_t i = 0; i < count; ++i)
      ranks[i] = packed_rank(ordered_key(row.bits(picks[i])), picks[i]);
    std::sort(ranks, ranks + count);
    for (std::int64_t i = 0; i < count; ++i) picks[i] = packed_index(ranks[i]);
  }
  std::fill(picks + count, picks + k, -1);
  if (values == nullptr) return;
  for (std::int64_t i = 0; i < count; ++i) values[i] = std::bit_cast<float>(row.bits(picks[i]));
  std::fill(values + count, values + k, -std::numeric_limits<float>::infinity());
}

}  // namespace sparse_mla::topk
