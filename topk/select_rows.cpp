#include "topk/select_rows.h"

#include <bit>
#include <limits>
#include <string>

#include "kernels/common/request_pages.h"

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

std::int64_t output_row(const SelectCall& call, std::int64_t r) {
  return call.out_rows ? call.out_rows[r] : r;
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
    const auto also_below = [&limit](const auto& view) {
      limit = std::min<std::int64_t>(limit, view.extent(0));
    };
    if (call.values.data_handle()) also_below(call.values);
    if (call.slot_map.slots.data_handle()) also_below(call.slot_map.slots);
    if (problem.hinted) also_below(call.hints);
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

void finish_row(const SelectProblem& problem, const SelectCall& call, std::int64_t r,
                const RowScores& row, bool ascending, std::uint64_t* ranks) {
  const std::int64_t out_row = output_row(call, r);
  const std::int64_t k = problem.k, count = std::min(row.len, k);
  std::int32_t* const picks = address(call.indices, out_row, 0);
  if (problem.order == SelectOrder::by_index && !ascending) std::sort(picks, picks + count);
  if (problem.order == SelectOrder::by_value) {
    for (std::int64_t i = 0; i < count; ++i)
      ranks[i] = packed_rank(ordered_key(row.bits(picks[i])), picks[i]);
    std::sort(ranks, ranks + count);
    for (std::int64_t i = 0; i < count; ++i) picks[i] = packed_index(ranks[i]);
  }
  std::fill(picks + count, picks + k, -1);
  if (call.values.data_handle()) {
    float* const values = address(call.values, out_row, 0);
    for (std::int64_t i = 0; i < count; ++i) values[i] = std::bit_cast<float>(row.bits(picks[i]));
    std::fill(values + count, values + k, -std::numeric_limits<float>::infinity());
  }
  const SlotMap& map = call.slot_map;
  if (map.slots.data_handle()) {
    std::int32_t* const slots = address(map.slots, out_row, 0);
    const RequestPages pages(map.block_tables, map.request_of_row ? map.request_of_row[r] : r,
                             map.block_size, map.num_blocks);
    for (std::int64_t i = 0; i < count; ++i) slots[i] = pages.slot_of(picks[i]);
    std::fill(slots + count, slots + k, -1);
  }
}

}  // namespace sparse_mla::topk
