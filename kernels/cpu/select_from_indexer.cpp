// Operation `select_from_indexer`, default entry: `indexer_scores` into the workspace, then
// `select`, each with the entry that its own registry chooses.
#include <algorithm>
#include <string>

#include "kernels/common/indexer_checks.h"
#include "kernels/cpu/entries.h"
#include "sparse_mla/error.h"
#include "sparse_mla/workspace.h"

namespace sparse_mla::cpu {
namespace {

SelectProblem select_problem(const SelectFromIndexerProblem& problem) {
  SelectProblem select;
  select.max_rows = problem.indexer.max_rows;
  select.max_row_len = problem.indexer.max_keys;
  select.k = problem.topk;
  select.order = SelectOrder::by_index;  // ascending picks: a gather walks the cache forwards
  return select;
}

struct Parts {
  const Entry<IndexerProblem, IndexerCall>* scores;
  const Entry<SelectProblem, SelectCall>* select;
};

Parts choose_parts(const SelectFromIndexerProblem& problem) {
  return {&indexer_scores_operation().choose(problem.indexer, problem.dispatch),
          &select_operation().choose(select_problem(problem), problem.dispatch)};
}

struct Buffers {
  float* scores;                 // [max_scores]
  std::int64_t* row_offsets;     // [max_rows] first score of each row
  std::int32_t* row_ends;        // [max_rows] keys that the row may see
  std::int32_t* out_rows;        // [max_rows] token
  std::span<std::byte> scratch;  // of the two parts, one after the other: all that is left
};

Buffers carve(const SelectFromIndexerProblem& problem, WorkspaceCarver& carver) {
  Buffers buffers;
  buffers.scores = carver.take<float>("scores", problem.max_scores);
  buffers.row_offsets = carver.take<std::int64_t>("score_row_offsets", problem.indexer.max_rows);
  buffers.row_ends = carver.take<std::int32_t>("score_row_ends", problem.indexer.max_rows);
  buffers.out_rows = carver.take<std::int32_t>("score_row_tokens", problem.indexer.max_rows);
  buffers.scratch = carver.rest();
  return buffers;
}

void pick_everything(const SelectFromIndexerCall& call) {
#pragma omp parallel for schedule(static)
  for (std::size_t i = 0; i < call.whole_tokens.size(); ++i) {
    const std::int32_t token = call.whole_tokens[i];
    for (std::int64_t pick = 0; pick < call.picks.extent(1); ++pick)
      call.picks(token, pick) =
          pick < call.keys_of_token[token] ? static_cast<std::int32_t>(pick) : -1;
  }
}

std::string why_not(const SelectFromIndexerProblem& problem) {
  try {
    choose_parts(problem);
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

std::size_t workspace_bytes(const SelectFromIndexerProblem& problem) {
  WorkspaceCarver carver;
  carve(problem, carver);
  const Parts parts = choose_parts(problem);
  carver.take_span("scratch", std::max(parts.scores->workspace_bytes(problem.indexer),
                                       parts.select->workspace_bytes(select_problem(problem))));
  return carver.bytes();
}

void run(const SelectFromIndexerProblem& problem, const SelectFromIndexerCall& call,
         std::span<std::byte> workspace, Stream stream) {
  check_shapes(problem, call);
  for (const std::int32_t token : call.whole_tokens)
    require(token >= 0 && token < call.picks.extent(0), "whole_tokens", token,
            "a row of picks, below " + std::to_string(call.picks.extent(0)));
  pick_everything(call);
  if (call.piece.num_rows == 0) return;
  const Parts parts = choose_parts(problem);
  WorkspaceCarver carver(workspace);
  const Buffers buffers = carve(problem, carver);

  std::int64_t row = 0;
  for (const ScoreMember& member : call.indexer.members)
    for (std::int64_t j = 0; j < member.num_rows; ++j, ++row) {
      buffers.row_offsets[row] = member.score_offset + j * member.row_keys;
      buffers.row_ends[row] = static_cast<std::int32_t>(member.first_position + j + 1);
      buffers.out_rows[row] = static_cast<std::int32_t>(member.query_start + j);
    }
  IndexerCall indexer = call.indexer;
  indexer.scores = buffers.scores;
  parts.scores->run(problem.indexer, indexer, buffers.scratch, stream);

  SelectCall select;
  select.scores.data = buffers.scores;
  select.scores.num_rows = row;
  select.scores.row_len = call.piece.max_keys;
  select.scores.row_offsets = buffers.row_offsets;
  select.ends = buffers.row_ends;
  select.indices = call.picks;
  select.out_rows = buffers.out_rows;
  parts.select->run(select_problem(problem), select, buffers.scratch, stream);
}

}  // namespace

std::vector<Entry<SelectFromIndexerProblem, SelectFromIndexerCall>> select_from_indexer_entries() {
  return {{"composed", Backend::cpu, "indexer_scores, then select, scores in the workspace",
           why_not, workspace_bytes, run}};
}

}  // namespace sparse_mla::cpu
