#include "kernels/cpu/entries.h"

#include "topk/algorithms.h"
#include "topk/select_rows.h"

namespace sparse_mla {

SelectProblem problem_of(const SelectCall& call, TieBreak tie, SelectOrder order) {
  SelectProblem problem;
  problem.max_rows = call.scores.num_rows;
  problem.max_row_len = call.scores.row_len;
  require(call.indices.extent(1) >= 1 &&
              call.indices.extent(1) <= std::numeric_limits<std::int32_t>::max(),
          "k (columns of indices)", call.indices.extent(1), "1 … 2147483647");
  problem.k = static_cast<int>(call.indices.extent(1));
  problem.score_type = call.scores.type;
  problem.tie = tie;
  problem.order = order;
  problem.hinted = call.hints.data_handle() != nullptr;
  topk::validate(problem, call);
  return problem;
}

namespace cpu {

std::vector<Entry<SelectProblem, SelectCall>> select_entries() {
  return {topk::cpu_threshold_avx2_entry(), topk::cpu_threshold_entry(),   topk::cpu_radix_entry(),
          topk::cpu_nth_element_entry(),    topk::cpu_thrust_sort_entry(), topk::cpu_sort_entry()};
}

}  // namespace cpu
}  // namespace sparse_mla
