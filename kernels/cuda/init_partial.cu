// Operation `init_partial` on CUDA.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/partial_checks.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {
namespace {

constexpr int kThreads = 256;
/// Blocks for each SM, shared by the ranges: enough to keep its memory busy.
constexpr int kBlocksPerSm = 4;

struct InitArguments {
  const TokenRange* ranges;  ///< [num_ranges]
  Partial running;
  int num_heads, v_head_dim;
  unsigned blocks_per_range;
};

// Tile: one row. `blocks_per_range` blocks share the rows of one range; only the device knows how
// many there are. kWidth numbers per store.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) init_partial_kernel(const InitArguments a) {
  const TokenRange range = a.ranges[blockIdx.x / a.blocks_per_range];
  const std::int64_t begin = max(range.begin, 0);
  const std::int64_t end = min(std::int64_t{range.end}, a.running.out.extent(0));
  const unsigned vectors = static_cast<unsigned>(a.v_head_dim) / kWidth;
  const unsigned total = static_cast<unsigned>(a.num_heads) * vectors;
  for (std::int64_t row = begin + blockIdx.x % a.blocks_per_range; row < end;
       row += a.blocks_per_range) {
    for (unsigned index = threadIdx.x; index < total; index += kThreads) {
      const unsigned head = index / vectors;
      float* to = address(a.running.out, row, head, (index - head * vectors) * kWidth);
      if constexpr (kWidth == 4)
        *reinterpret_cast<float4*>(to) = {0.0f, 0.0f, 0.0f, 0.0f};
      else
        *to = 0.0f;
    }
    for (int head = static_cast<int>(threadIdx.x); head < a.num_heads; head += kThreads)
      *address(a.running.lse, head, row) = -HUGE_VALF;
  }
}

void run(const InitPartialProblem& problem, const InitPartialCall& call, std::span<std::byte>,
         Stream stream) {
  check_shapes(problem, call);
  const View3<float>& out = call.running.out;
  if (call.ranges.empty() || out.extent(0) == 0) return;
  const auto ranges = static_cast<std::int64_t>(call.ranges.size());
  const std::int64_t blocks_per_range = std::clamp<std::int64_t>(
      std::int64_t{kBlocksPerSm} * current_device().num_sms / ranges, 1, out.extent(0));
  const InitArguments arguments{call.ranges.data(), call.running, problem.num_heads,
                                problem.v_head_dim, static_cast<unsigned>(blocks_per_range)};
  const auto blocks = static_cast<unsigned>(ranges * blocks_per_range);
  if (problem.v_head_dim % 4 == 0 && aligned_rows(out, 16))
    init_partial_kernel<4><<<blocks, kThreads, 0, stream>>>(arguments);
  else
    init_partial_kernel<1><<<blocks, kThreads, 0, stream>>>(arguments);
  check_launch("init_partial_kernel");
}

}  // namespace

std::vector<Entry<InitPartialProblem, InitPartialCall>> init_partial_entries() {
  return {{"cuda", Backend::cuda, "a row per block and turn",
           [](const InitPartialProblem&) { return why_no_device(); },
           [](const InitPartialProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cuda
