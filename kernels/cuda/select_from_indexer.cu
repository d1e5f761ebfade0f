// Operation `select_from_indexer` on CUDA: `indexer_scores` into the workspace, then `select`, each
// with the CUDA entry that its own registry chooses. The table of score rows (where each starts,
// ends and goes) is written here, from the members' device records.
#include <algorithm>
#include <cstdint>
#include <string>

#include "kernels/common/composed_selection.h"
#include "kernels/common/indexer_checks.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"
#include "kernels/cuda/members.cuh"
#include "sparse_mla/workspace.h"

namespace sparse_mla::cuda {
namespace {

constexpr int kThreads = 256;

/// Row r of the piece: its first score, the keys that it sees, its token. A row that no member has
/// goes to row −1, which `select` leaves alone.
__global__ void __launch_bounds__(kThreads)
    list_rows_kernel(const ScoreMember* members,  // [num_members]
                     int num_members, std::int64_t num_rows,
                     std::int64_t* row_offsets,  // [num_rows]
                     std::int32_t* row_ends, std::int32_t* out_rows) {
  const std::int64_t r = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (r >= num_rows) return;
  const ScoreMember member = members[find_record(members, num_members, &ScoreMember::first_row, r)];
  const std::int64_t j = r - member.first_row;
  if (j < 0 || j >= member.num_rows) {
    row_offsets[r] = 0;
    row_ends[r] = 0;
    out_rows[r] = -1;
    return;
  }
  const std::int64_t seen = member.first_position + j + 1;
  row_offsets[r] = member.score_offset + j * member.row_keys;
  row_ends[r] = static_cast<std::int32_t>(seen < member.row_keys ? seen : member.row_keys);
  out_rows[r] = static_cast<std::int32_t>(member.query_start + j);
}

/// A CTA per token: picks 0 … keys − 1, then −1.
__global__ void __launch_bounds__(kThreads)
    pick_everything_kernel(const std::int32_t* tokens,         // [num_listed]
                           const std::int32_t* keys_of_token,  // [num_tokens]
                           View2<std::int32_t> picks) {        // [num_tokens, topk]
  const std::int32_t token = tokens[blockIdx.x];
  if (token < 0 || token >= picks.extent(0)) return;  // the CPU throws
  const std::int32_t keys = keys_of_token[token];
  for (std::int64_t pick = threadIdx.x; pick < picks.extent(1); pick += kThreads)
    *address(picks, token, pick) = pick < keys ? static_cast<std::int32_t>(pick) : -1;
}

/// The call's own dispatch, on this backend.
Dispatch cuda_dispatch(const SelectFromIndexerProblem& problem) {
  Dispatch dispatch = problem.dispatch;
  dispatch.backend = Backend::cuda;
  return dispatch;
}

std::string why_not(const SelectFromIndexerProblem& problem) {
  if (const std::string reason = why_no_device(); !reason.empty()) return reason;
  return why_no_composed_parts(problem, cuda_dispatch(problem));
}

std::size_t workspace_bytes(const SelectFromIndexerProblem& problem) {
  return composed_workspace_bytes(problem, choose_composed_parts(problem, cuda_dispatch(problem)));
}

void run(const SelectFromIndexerProblem& problem, const SelectFromIndexerCall& call,
         std::span<std::byte> workspace, Stream stream) {
  check_shapes(problem, call);
  const std::int64_t rows = call.piece.num_rows;
  if (rows > 0) check_shapes(problem.indexer, call.indexer);
  if (!call.whole_tokens.empty()) {
    pick_everything_kernel<<<static_cast<unsigned>(call.whole_tokens.size()), kThreads, 0,
                             stream>>>(call.whole_tokens.data(), call.keys_of_token, call.picks);
    check_launch("pick_everything_kernel");
  }
  if (rows == 0 || call.indexer.members.empty()) return;
  WorkspaceCarver carver(workspace);
  const ComposedBuffers buffers = carve_composed(problem, carver);
  list_rows_kernel<<<static_cast<unsigned>((rows + kThreads - 1) / kThreads), kThreads, 0,
                     stream>>>(call.indexer.members.data(),
                               static_cast<int>(call.indexer.members.size()), rows,
                               buffers.row_offsets, buffers.row_ends, buffers.out_rows);
  check_launch("list_rows_kernel");
  run_composed_parts(problem, call, choose_composed_parts(problem, cuda_dispatch(problem)), buffers,
                     rows, stream);
}

}  // namespace

std::vector<Entry<SelectFromIndexerProblem, SelectFromIndexerCall>> select_from_indexer_entries() {
  return {{"cuda_composed", Backend::cuda, "indexer_scores, then select, scores in the workspace",
           why_not, workspace_bytes, run}};
}

}  // namespace sparse_mla::cuda
