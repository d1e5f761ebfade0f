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
  /// Calls bring hints. A hint never changes what is selected, only how fast.
  bool hinted = false;
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

/// Cache slots beside the indices, in the same launch. Pick p of row r (relative to the row's
/// start, as in `indices`) becomes block_tables[request_of_row[r], p / block_size] · block_size +
/// p % block_size, and −1 where the table has no such column or names no block of [0, num_blocks).
struct SlotMap {
  View2<const std::int32_t> block_tables;  ///< [num_requests, max_blocks]
  /// [num_rows]; −1 or beyond the table: every slot −1. null: row r belongs to request r
  const std::int32_t* request_of_row = nullptr;
  std::int32_t block_size = 0;  ///< tokens, ≥ 1
  std::int64_t num_blocks = 0;  ///< of the cache: num_blocks · block_size ≤ 2^31
  View2<std::int32_t> slots;    ///< [num_rows, k] ← the slot of each index, then −1
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
  SlotMap slot_map;     ///< optional: used where slot_map.slots has data
  /// [num_rows] row of `indices` (and `values`, `slots`, `hints`) that belongs to row r, all
  /// distinct; null: row r
  const std::int32_t* out_rows = nullptr;
  /// [num_rows, any] where the problem is hinted: indices that are likely to be selected, such as
  /// the previous decode step's. May hold anything, −1 and indices outside of the row included, and
  /// may be `indices` itself.
  View2<const std::int32_t> hints;
};

const Operation<SelectProblem, SelectCall>& select_operation();

/// The problem that bounds exactly this call. Throws std::invalid_argument for bad shapes.
SelectProblem problem_of(const SelectCall& call, TieBreak tie = TieBreak::lowest_index,
                         SelectOrder order = SelectOrder::unspecified);

}  // namespace sparse_mla
