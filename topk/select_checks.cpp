#include "topk/select_checks.h"

#include <limits>
#include <string>

#include "sparse_mla/error.h"

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

void validate_slot_map(const SlotMap& map, std::int64_t num_rows, int k) {
  validate_output(map.slots, "slot_map.slots", num_rows, k);
  require(map.block_tables.data_handle() != nullptr || map.block_tables.size() == 0,
          "slot_map.block_tables", "null", "a [num_requests, max_blocks] view");
  require(map.request_of_row != nullptr || map.block_tables.extent(0) >= num_rows,
          "slot_map.block_tables rows", map.block_tables.extent(0),
          "at least num_rows = " + std::to_string(num_rows) + ", as request_of_row is null");
  require(map.block_size >= 1, "slot_map.block_size", map.block_size, "at least 1");
  constexpr std::int64_t kMaxSlots = std::int64_t{1} << 31;
  require(map.num_blocks >= 0 && map.num_blocks <= kMaxSlots / map.block_size,
          "slot_map.num_blocks", map.num_blocks, "a cache of at most 2^31 slots");
}

void validate_hints(const View2<const std::int32_t>& hints, std::int64_t num_rows) {
  require(hints.data_handle() != nullptr, "hints", "null",
          "a [num_rows, any] view, as the problem says");
  require(hints.extent(0) >= num_rows, "hints rows", hints.extent(0),
          "at least num_rows = " + std::to_string(num_rows));
  require(hints.extent(1) >= 1, "hints columns", hints.extent(1), "at least 1");
  require(hints.extent(1) == 1 || hints.stride(1) == 1, "hints stride of the last axis",
          hints.stride(1), "1");
}

}  // namespace

void validate(const SelectProblem& problem) {
  require(problem.k >= 1, "k", problem.k, "at least 1");
  require(problem.max_rows >= 0, "max_rows", problem.max_rows, "at least 0");
  require(problem.max_row_len >= 0, "max_row_len", problem.max_row_len, "at least 0");
  require(problem.max_row_len <= std::numeric_limits<std::int32_t>::max(), "max_row_len",
          problem.max_row_len, "at most 2147483647, as indices are 32-bit");
}

void validate_shapes(const SelectProblem& problem, const SelectCall& call) {
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
  if (call.slot_map.slots.data_handle())
    validate_slot_map(call.slot_map, scores.num_rows, problem.k);
  if (problem.hinted) validate_hints(call.hints, scores.num_rows);
}

}  // namespace sparse_mla::topk
