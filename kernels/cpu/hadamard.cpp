// Operation `hadamard` on the CPU: butterflies over one row in a thread's scratch.
#include <cmath>
#include <string>

#include "kernels/common/rotation_checks.h"
#include "kernels/cpu/entries.h"
#include "kernels/cpu/thread_scratch.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

struct Scratch {
  float* row;  ///< [dims]
  Scratch(WorkspaceCarver& carver, const HadamardProblem& problem) {
    row = carver.take<float>("hadamard_row", problem.dims);
  }
};

/// values [dims] ← H · values, not yet normalised.
void butterflies(float* values, std::int64_t dims) {
  for (std::int64_t distance = 1; distance < dims; distance *= 2)
    for (std::int64_t block = 0; block < dims; block += 2 * distance)
      for (std::int64_t i = block; i < block + distance; ++i) {
        const float a = values[i], b = values[i + distance];
        values[i] = a + b;
        values[i + distance] = a - b;
      }
}

void run(const HadamardProblem& problem, const HadamardCall& call, std::span<std::byte> workspace,
         Stream) {
  check_shapes(problem, call);
  const std::int64_t dims = problem.dims, heads = call.in.extent(1);
  const std::int64_t items = call.in.extent(0) * heads;
  if (items == 0) return;
  const float norm = 1.0f / std::sqrt(static_cast<float>(dims));
#pragma omp parallel num_threads(scratch_threads <Scratch>(problem, workspace, items))
  {
    float* values = thread_scratch<Scratch>(problem, workspace).row;
#pragma omp for schedule(static)
    for (std::int64_t item = 0; item < items; ++item) {
      const std::int64_t row = item / heads, head = item % heads;
      for (std::int64_t i = 0; i < dims; ++i) values[i] = __bfloat162float(call.in(row, head, i));
      butterflies(values, dims);
      for (std::int64_t i = 0; i < dims; ++i)
        call.out(row, head, i) = __float2bfloat16_rn(values[i] * norm);
    }
  }
}

}  // namespace

std::vector<Entry<HadamardProblem, HadamardCall>> hadamard_entries() {
  return {{"cpu", Backend::cpu, "fp32 butterflies, a row at a time", why_not_power_of_two,
           scratch_bytes<Scratch>, run}};
}

}  // namespace sparse_mla::cpu
