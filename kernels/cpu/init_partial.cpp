// Operation `init_partial` on the CPU.
#include <limits>
#include <string>

#include "kernels/cpu/entries.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

void check(const InitPartialProblem& problem, const InitPartialCall& call) {
  const Partial& running = call.running;
  const std::int64_t rows = running.out.extent(0);
  require(rows <= problem.max_rows, "running.out", rows,
          "at most the problem's " + std::to_string(problem.max_rows) + " rows");
  require(rows == 0 || (running.out.extent(1) == problem.num_heads &&
                        running.out.extent(2) == problem.v_head_dim),
          "running.out",
          "[rows, " + std::to_string(running.out.extent(1)) + ", " +
              std::to_string(running.out.extent(2)) + "]",
          "[rows, " + std::to_string(problem.num_heads) + ", " +
              std::to_string(problem.v_head_dim) + "]");
  require(
      rows == 0 || (running.lse.extent(0) == problem.num_heads && running.lse.extent(1) >= rows),
      "running.lse", running.lse.extent(1), "[num_heads, rows] of its out");
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
