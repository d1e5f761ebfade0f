// Operation `select_from_indexer`, default entry: `indexer_scores` into the workspace, then
// `select`, each with the entry that its own registry chooses.
#include <cstdint>
#include <string>

#include "kernels/common/composed_selection.h"
#include "kernels/common/indexer_checks.h"
#include "kernels/cpu/entries.h"
#include "sparse_mla/error.h"
#include "sparse_mla/workspace.h"

namespace sparse_mla::cpu {
namespace {

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
  return why_no_composed_parts(problem, problem.dispatch);
}

std::size_t workspace_bytes(const SelectFromIndexerProblem& problem) {
  return composed_workspace_bytes(problem, choose_composed_parts(problem, problem.dispatch));
}

void run(const SelectFromIndexerProblem& problem, const SelectFromIndexerCall& call,
         std::span<std::byte> workspace, Stream stream) {
  check_shapes(problem, call);
  for (const std::int32_t token : call.whole_tokens)
    require(token >= 0 && token < call.picks.extent(0), "whole_tokens", token,
            "a row of picks, below " + std::to_string(call.picks.extent(0)));
  pick_everything(call);
  if (call.piece.num_rows == 0) return;
  WorkspaceCarver carver(workspace);
  const ComposedBuffers buffers = carve_composed(problem, carver);

  std::int64_t row = 0;
  for (const ScoreMember& member : call.indexer.members)
    for (std::int64_t j = 0; j < member.num_rows; ++j, ++row) {
      buffers.row_offsets[row] = member.score_offset + j * member.row_keys;
      buffers.row_ends[row] = static_cast<std::int32_t>(member.first_position + j + 1);
      buffers.out_rows[row] = static_cast<std::int32_t>(member.query_start + j);
    }
  run_composed_parts(problem, call, choose_composed_parts(problem, problem.dispatch), buffers, row,
                     stream);
}

}  // namespace

std::vector<Entry<SelectFromIndexerProblem, SelectFromIndexerCall>> select_from_indexer_entries() {
  return {{"composed", Backend::cpu, "indexer_scores, then select, scores in the workspace",
           why_not, workspace_bytes, run}};
}

}  // namespace sparse_mla::cpu
