#include <cstdio>
#include <vector>

#include "sparse_mla/planner.h"
#include "sparse_mla/select.h"
#include "sparse_mla/workspace.h"

int main() {
  using namespace sparse_mla;
  // A long request and three short ones share a workspace of 4,096 rows.
  const std::vector<std::int32_t> query_lens{513, 64, 64, 64}, context_lens{6000, 16, 700, 16};
  const PlannerOptions options{.row_budget = 4096, .alignment = 64};
  const ContextPlan plan = plan_context_chunks(query_lens, context_lens, options);
  for (const ContextChunk& chunk : plan.chunks)
    std::printf("requests %d-%d: %d rows\n", chunk.request_begin, chunk.request_end - 1,
                chunk.num_rows);
  // The 3 best of 8 scores: exact, equal scores by lower index.
  const std::vector<float> scores{0.5f, 2.0f, -1.0f, 2.0f, 0.0f, 7.0f, 2.0f, 1.0f};
  std::vector<std::int32_t> picks(3);
  SelectCall call;
  call.scores = {.data = scores.data(), .num_rows = 1, .row_len = 8, .row_stride = 8};
  call.indices = contiguous(picks.data(), 1, 3);
  const SelectProblem problem = problem_of(call, TieBreak::lowest_index, SelectOrder::by_value);
  const Dispatch on_cpu{.backend = Backend::cpu};
  const HostWorkspace workspace(select_operation().workspace_bytes(problem, on_cpu));
  select_operation().run(problem, call, workspace.span(), on_cpu, nullptr);
  std::printf("picks %d %d %d\n", picks[0], picks[1], picks[2]);
}
