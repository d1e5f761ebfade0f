/// Top-k index selection: exact, deterministic, any k, any row length.
///
/// Set: exactly the k largest. NaN ranks below −inf and is selected only when nothing else is left;
/// −0 equals +0. Tie: the lower index wins (default). Order: unspecified unless asked.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "sparse_mla/operation.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

enum class ScoreType { f32, bf16 };

/// Which of several equal scores is selected when not all fit.
enum class TieBreak {
  lowest_index,  ///< deterministic: the same on every backend, run, stream and launch shape
  any,           ///< the caller does not care; an entry may be faster
};

enum class SelectOrder {
  unspecified,
  by_index,  ///< ascending index
  by_value,  ///< descending score, equal scores by ascending index, NaN last
};

struct SelectProblem {
  std::int64_t max_rows = 0;
  std::int64_t max_row_len = 0;  ///< bound of every row's length
  int k = 0;                     ///< ≥ 1
  ScoreType score_type = ScoreType::f32;
  TieBreak tie = TieBreak::lowest_index;
  SelectOrder order = SelectOrder::unspecified;
};

/// Rows of scores. Row r starts at data + (row_offsets ? row_offsets[r] : r · row_stride) elements.
struct ScoreRows {
  const void* data = nullptr;  ///< fp32 or bf16, as the problem says; any element alignment
  ScoreType type = ScoreType::f32;
  std::int64_t num_rows = 0;
  std::int64_t row_len = 0;                   ///< elements of a row that may be read
  std::int64_t row_stride = 0;                ///< elements
  const std::int64_t* row_offsets = nullptr;  ///< [num_rows] elements; null: row_stride
};

struct SelectCall {
  ScoreRows scores;
  /// [num_rows] the candidates of row r are [starts[r], ends[r]) clamped to [0, row_len); a
  /// negative or inverted range is empty. null: 0 and row_len.
  const std::int32_t* starts = nullptr;
  const std::int32_t* ends = nullptr;
  /// [num_rows, k] ← min(k, len) indices relative to the row's (clamped) start, then −1. Every
  /// element is written.
  View2<std::int32_t> indices;
  View2<float> values;  ///< optional [num_rows, k] ← the scores, padded with −inf
  /// [num_rows] row of `indices` (and `values`) that row r writes, all distinct; null: row r
  const std::int32_t* out_rows = nullptr;
};

const Operation<SelectProblem, SelectCall>& select_operation();

/// The problem that bounds exactly this call. Throws std::invalid_argument for bad shapes.
SelectProblem problem_of(const SelectCall& call, TieBreak tie = TieBreak::lowest_index,
                         SelectOrder order = SelectOrder::unspecified);

}  // namespace sparse_mla
