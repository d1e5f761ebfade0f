// Links everything: the planner, and the registry with every backend that it names.
#include <cstdint>
#include <iostream>
#include <vector>

#include <sparse_mla/operation.h>
#include <sparse_mla/planner.h>

int main() {
  // One request with 60,000 cached tokens among 31 with 16.
  const std::vector<std::int32_t> query_lens(32, 513);
  std::vector<std::int32_t> context_lens(32, 16);
  context_lens[0] = 60000;
  const sparse_mla::PlannerOptions options{.row_budget = 65536, .alignment = 16};
  const auto plan = sparse_mla::plan_context_chunks(query_lens, context_lens, options);
  const auto passes = sparse_mla::equal_split_passes(context_lens, options);
  const auto operations = sparse_mla::known_operations();
  std::cout << plan.chunks.size() << " chunk against " << passes << " passes, " << operations.size()
            << " operations\n";
  return plan.chunks.size() == 1 && passes == 30 && !operations.empty() ? 0 : 1;
}
