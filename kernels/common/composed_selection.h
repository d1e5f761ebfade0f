/// What the composed entries of `select_from_indexer` share: `indexer_scores` into the workspace,
/// then `select` on the rows there. A backend adds how the table of rows is written and where.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "sparse_mla/error.h"
#include "sparse_mla/indexer.h"
#include "sparse_mla/workspace.h"

namespace sparse_mla {

inline SelectProblem composed_select_problem(const SelectFromIndexerProblem& problem) {
  SelectProblem select;
  select.max_rows = problem.indexer.max_rows;
  select.max_row_len = problem.indexer.max_keys;
  select.k = problem.topk;
  select.order = SelectOrder::by_index;  // ascending picks: a gather walks the cache forwards
  return select;
}

/// The two parts' entries, each chosen by its own registry.
struct ComposedParts {
  const Entry<IndexerProblem, IndexerCall>* scores;
  const Entry<SelectProblem, SelectCall>* select;
};

inline ComposedParts choose_composed_parts(const SelectFromIndexerProblem& problem,
                                           const Dispatch& dispatch) {
  return {&indexer_scores_operation().choose(problem.indexer, dispatch),
          &select_operation().choose(composed_select_problem(problem), dispatch)};
}

/// Why no parts can be chosen; empty = they can.
inline std::string why_no_composed_parts(const SelectFromIndexerProblem& problem,
                                         const Dispatch& dispatch) {
  try {
    choose_composed_parts(problem, dispatch);
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

struct ComposedBuffers {
  float* scores;                 // [max_scores]
  std::int64_t* row_offsets;     // [max_rows] first score of each row
  std::int32_t* row_ends;        // [max_rows] keys that the row may see
  std::int32_t* out_rows;        // [max_rows] token
  std::span<std::byte> scratch;  // of the two parts, one after the other: all that is left
};

inline ComposedBuffers carve_composed(const SelectFromIndexerProblem& problem,
                                      WorkspaceCarver& carver) {
  ComposedBuffers buffers;
  buffers.scores = carver.take<float>("scores", problem.max_scores);
  buffers.row_offsets = carver.take<std::int64_t>("score_row_offsets", problem.indexer.max_rows);
  buffers.row_ends = carver.take<std::int32_t>("score_row_ends", problem.indexer.max_rows);
  buffers.out_rows = carver.take<std::int32_t>("score_row_tokens", problem.indexer.max_rows);
  buffers.scratch = carver.rest();
  return buffers;
}

inline std::size_t composed_workspace_bytes(const SelectFromIndexerProblem& problem,
                                            const ComposedParts& parts) {
  WorkspaceCarver carver;
  carve_composed(problem, carver);
  carver.take_span("scratch",
                   std::max(parts.scores->workspace_bytes(problem.indexer),
                            parts.select->workspace_bytes(composed_select_problem(problem))));
  return carver.bytes();
}

/// Scores, then selects `num_rows` rows; their table is in the buffers, or will be in stream order.
inline void run_composed_parts(const SelectFromIndexerProblem& problem,
                               const SelectFromIndexerCall& call, const ComposedParts& parts,
                               const ComposedBuffers& buffers, std::int64_t num_rows,
                               Stream stream) {
  IndexerCall indexer = call.indexer;
  indexer.scores = buffers.scores;
  // The piece's own bounds, not those of the largest one: a launch is laid out by them.
  IndexerProblem bounds = problem.indexer;
  bounds.max_rows = std::min(bounds.max_rows, num_rows);
  bounds.max_keys = std::min<std::int64_t>(bounds.max_keys, call.piece.max_keys);
  parts.scores->run(bounds, indexer, buffers.scratch, stream);

  SelectCall select;
  select.scores.data = buffers.scores;
  select.scores.num_rows = num_rows;
  select.scores.row_len = call.piece.max_keys;
  select.scores.row_offsets = buffers.row_offsets;
  select.ends = buffers.row_ends;
  select.indices = call.picks;
  select.out_rows = buffers.out_rows;
  parts.select->run(composed_select_problem(problem), select, buffers.scratch, stream);
}

}  // namespace sparse_mla
