// Operation `rotary` on the CPU: a row of pairs at a time.
#include <string>

#include "kernels/common/rotation_checks.h"
#include "kernels/cpu/entries.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

void check(const RotaryProblem& problem, const RotaryCall& call) {
  check_shapes(problem, call);
  for (std::int64_t row = 0; row < call.in.extent(0); ++row)
    require(call.positions(row) >= 0 && call.positions(row) < call.table.extent(0),
            "positions[" + std::to_string(row) + "]", call.positions(row),
            "0 … " + std::to_string(call.table.extent(0) - 1) + ", a row of the table");
}

void run(const RotaryProblem& problem, const RotaryCall& call, std::span<std::byte>, Stream) {
  check(problem, call);
  const std::int64_t half = problem.dims / 2;
  const bool split = problem.layout == RotaryLayout::half_split;
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < call.in.extent(0); ++row) {
    const std::int64_t position = call.positions(row);
    for (std::int64_t head = 0; head < call.in.extent(1); ++head) {
      for (std::int64_t i = 0; i < half; ++i) {
        const std::int64_t first = split ? i : 2 * i, second = split ? half + i : 2 * i + 1;
        const float x = __bfloat162float(call.in(row, head, first));
        const float y = __bfloat162float(call.in(row, head, second));
        const float cosine = call.table(position, i), sine = call.table(position, half + i);
        call.out(row, head, first) = __float2bfloat16_rn(x * cosine - y * sine);
        call.out(row, head, second) = __float2bfloat16_rn(y * cosine + x * sine);
      }
    }
  }
}

}  // namespace

std::vector<Entry<RotaryProblem, RotaryCall>> rotary_entries() {
  return {{"cpu", Backend::cpu, "fp32, a pair at a time",
           [](const RotaryProblem&) { return std::string(); },
           [](const RotaryProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cpu
