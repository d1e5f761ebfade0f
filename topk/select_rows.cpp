#include "topk/select_rows.h"

#include <bit>
#include <limits>
#include <string>

namespace sparse_mla::topk {
namespace {

std::string describe(ScoreType type) { return type == ScoreType::f32 ? "fp32" : "bf16"; }

template <class T>
void validate_output(const View2<T>& view, const std::string& name, std::int64_t num_rows, int k) {
  require(view.data_handle() != nullptr, name, "null", "a [num_rows, k] view");
  require(view.extent(0) >= num_rows, name + " rows", view.extent(0),
          "at least num_rows = " + std::to_string(num_rows));
  require(view.extent(1) == k, name + " columns", view.extent(1), "k = " + std::to_string(k));
  require(k == 1 || view.stride(1) == 1, name + " stride of the last axis", view.stride(1), "1");
}

}  // namespace

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

void validate(const SelectProblem& problem) {
  require(problem.k >= 1, "k", problem.k, "at least 1");
  require(problem.max_rows >= 0, "max_rows", problem.max_rows, "at least 0");
  require(problem.max_row_len >= 0, "max_row_len", problem.max_row_len, "at least 0");
  require(problem.max_row_len <= std::numeric_limits<std::int32_t>::max(), "max_row_len",
          problem.max_row_len, "at most 2147483647, as indices are 32-bit");
}

void validate(const SelectProblem& problem, const SelectCall& call) {
  validate(problem);
  const ScoreRows& scores = call.scores;
  require(scores.type == problem.score_type, "scores.type", describe(scores.type),
          describe(problem.score_type) + ", as the problem says");
  require(scores.num_rows >= 0, "scores.num_rows", scores.num_rows, "at least 0");
  require(scores.row_len >= 0, "scores.row_len", scores.row_len, "at least 0");
  require(scores.num_rows <= problem.max_rows, "scores.num_rows", scores.num_rows,
          "at most max_rows = " + std::to_string(problem.max_rows));
  if (scores.num_rows == 0) return;
  require(scores.data != nullptr || scores.row_len == 0, "scores.data", "null", "a pointer");
  validate_output(call.indices, "indices", scores.num_rows, problem.k);
  if (call.values.data_handle()) validate_output(call.values, "values", scores.num_rows, problem.k);
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
