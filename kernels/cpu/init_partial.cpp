// Operation `init_partial` on the CPU.
#include <limits>
#include <string>

#include "kernels/common/partial_checks.h"
#include "kernels/cpu/entries.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

void check(const InitPartialProblem& problem, const InitPartialCall& call) {
  check_shapes(problem, call);
  const std::int64_t rows = call.running.out.extent(0);
  for (const TokenRange& range : call.ranges)
    require(0 <= range.begin && range.begin <= range.end && range.end <= rows, "ranges",
            "[" + std::to_string(range.begin) + ", " + std::to_string(range.end) + ")",
            "rows of running (" + std::to_string(rows) + ")");
}

void run(const InitPartialProblem& problem, const InitPartialCall& call, std::span<std::byte>,
         Stream) {
  check(problem, call);
  const Partial& running = call.running;
  for (const TokenRange& range : call.ranges)
    for (std::int64_t row = range.begin; row < range.end; ++row)
      for (int head = 0; head < problem.num_heads; ++head) {
        running.lse(head, row) = -std::numeric_limits<float>::infinity();
        for (int i = 0; i < problem.v_head_dim; ++i) running.out(row, head, i) = 0.0f;
      }
}

}  // namespace

std::vector<Entry<InitPartialProblem, InitPartialCall>> init_partial_entries() {
  return {{"cpu", Backend::cpu, "a row at a time",
           [](const InitPartialProblem&) { return std::string(); },
           [](const InitPartialProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cpu
