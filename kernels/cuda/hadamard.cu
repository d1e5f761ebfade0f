// Operation `hadamard` on CUDA.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/rotation_checks.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {
namespace {

constexpr int kThreads = 256;
/// The indexer's head width, for which a warp holds a whole vector.
constexpr int kWarpDims = 128, kPerLane = kWarpDims / 32;
/// Vectors that share a block of the general kernel where they are short.
constexpr int kBlockNumbers = 1024;
/// Above, vectors lie in the workspace: 64 KB of shared memory is what every card gives.
constexpr int kMaxSharedDims = 16384;
/// Blocks that have a vector in the workspace.
constexpr int kWorkspaceBlocks = 64;

struct HadamardArguments {
  View3<const bfloat16> in;  ///< [rows, heads, dims]
  View3<bfloat16> out;       ///< [rows, heads, dims]
  int log2_dims;
  float norm;     ///< dims^-1/2
  float* values;  ///< [blocks, dims] where shared memory is too small
};

// Tile: one vector of 128 for each warp, four neighbours in each lane. Rounds of distance 1 and 2
// stay in a lane, those of 4 … 64 exchange with the lane that is distance/4 away. A vector moves
// 512 bytes for 7 · 64 butterflies. The sums are the CPU's, in the CPU's order: the same bits.
__global__ void __launch_bounds__(kThreads) hadamard_warp_kernel(const HadamardArguments a) {
  const std::int64_t item =
      std::int64_t{blockIdx.x} * (kThreads / 32) + static_cast<int>(threadIdx.x / 32);
  const std::int64_t heads = a.in.extent(1);
  if (item >= a.in.extent(0) * heads) return;
  const std::int64_t row = item / heads, head = item - row * heads;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint2 packed = *reinterpret_cast<const uint2*>(address(a.in, row, head, kPerLane * lane));
  float values[kPerLane] = {
      __uint_as_float(packed.x << 16), __uint_as_float(packed.x & 0xFFFF0000u),
      __uint_as_float(packed.y << 16), __uint_as_float(packed.y & 0xFFFF0000u)};
#pragma unroll
  for (int distance = 1; distance < kPerLane; distance *= 2)
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if ((i & distance) == 0) {
        const float low = values[i], high = values[i + distance];
        values[i] = low + high;
        values[i + distance] = low - high;
      }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float other = __shfl_xor_sync(~0u, values[i], distance);
      values[i] = (lane & distance) == 0 ? values[i] + other : other - values[i];
    }
  const auto rounded = [&](int i) {
    return static_cast<unsigned>(
        __bfloat16_as_ushort(__float2bfloat16_rn(__fmul_rn(values[i], a.norm))));
  };
  *reinterpret_cast<uint2*>(address(a.out, row, head, kPerLane * lane)) = {
      rounded(0) | rounded(1) << 16, rounded(2) | rounded(3) << 16};
}

// Tile: a power of two of vectors, one behind the other in shared memory (kShared) or one vector in
// the block's part of the workspace; butterflies below dims never leave their vector. Any width,
// any stride; a round reads and writes each number once.
template <bool kShared>
__global__ void __launch_bounds__(kThreads)
    hadamard_kernel(const HadamardArguments a, int log2_numbers) {
  extern __shared__ float shared_values[];
  const std::int64_t dims = std::int64_t{1} << a.log2_dims;
  const std::int64_t numbers = std::int64_t{1} << log2_numbers;
  const std::int64_t items_per_block = numbers >> a.log2_dims;
  const std::int64_t heads = a.in.extent(1), items = a.in.extent(0) * heads;
  float* values = kShared ? shared_values : a.values + blockIdx.x * dims;
  for (std::int64_t first = blockIdx.x * items_per_block; first < items;
       first += gridDim.x * items_per_block) {
    for (std::int64_t i = threadIdx.x; i < numbers; i += kThreads) {
      const std::int64_t item = first + (i >> a.log2_dims), row = item / heads;
      if (item < items)
        values[i] = __bfloat162float(*address(a.in, row, item - row * heads, i & (dims - 1)));
    }
    for (std::int64_t distance = 1; distance < dims; distance *= 2) {
      __syncthreads();
      for (std::int64_t i = threadIdx.x; i < numbers / 2; i += kThreads) {
        const std::int64_t at = (i & ~(distance - 1)) * 2 + (i & (distance - 1));
        if (first + (at >> a.log2_dims) >= items) continue;
        const float low = values[at], high = values[at + distance];
        values[at] = low + high;
        values[at + distance] = low - high;
      }
    }
    __syncthreads();
    for (std::int64_t i = threadIdx.x; i < numbers; i += kThreads) {
      const std::int64_t item = first + (i >> a.log2_dims), row = item / heads;
      if (item < items)
        *address(a.out, row, item - row * heads, i & (dims - 1)) =
            __float2bfloat16_rn(__fmul_rn(values[i], a.norm));
    }
    __syncthreads();  // before the next vectors are loaded
  }
}

std::size_t workspace_bytes(const HadamardProblem& problem) {
  WorkspaceCarver carver;
  carver.take<float>("hadamard_vectors", problem.dims > kMaxSharedDims
                                             ? std::int64_t{kWorkspaceBlocks} * problem.dims
                                             : 0);
  return carver.bytes();
}

template <class T>
bool vector_rows(const View3<T>& view) {
  return view.stride(2) == 1 && aligned(view.data_handle(), 8, {view.stride(0), view.stride(1)});
}

void run(const HadamardProblem& problem, const HadamardCall& call, std::span<std::byte> workspace,
         Stream stream) {
  check_shapes(problem, call);
  const std::int64_t items = call.in.extent(0) * call.in.extent(1);
  if (items == 0) return;
  HadamardArguments arguments{call.in, call.out,
                              std::countr_zero(static_cast<unsigned>(problem.dims)),
                              1.0f / std::sqrt(static_cast<float>(problem.dims)), nullptr};
  if (problem.dims == kWarpDims && vector_rows(call.in) && vector_rows(call.out)) {
    constexpr int kWarps = kThreads / 32;
    const auto blocks = static_cast<unsigned>((items + kWarps - 1) / kWarps);
    hadamard_warp_kernel<<<blocks, kThreads, 0, stream>>>(arguments);
  } else if (problem.dims <= kMaxSharedDims) {
    const int numbers = std::max(problem.dims, kBlockNumbers);
    const int bytes = numbers * static_cast<int>(sizeof(float));
    allow_shared(hadamard_kernel<true>, bytes);
    const std::int64_t items_per_block = numbers / problem.dims;
    const auto blocks = static_cast<unsigned>((items + items_per_block - 1) / items_per_block);
    hadamard_kernel<true><<<blocks, kThreads, static_cast<std::size_t>(bytes), stream>>>(
        arguments, std::countr_zero(static_cast<unsigned>(numbers)));
  } else {
    WorkspaceCarver carver(workspace);
    arguments.values =
        carver.take<float>("hadamard_vectors", std::int64_t{kWorkspaceBlocks} * problem.dims);
    const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(items, kWorkspaceBlocks));
    hadamard_kernel<false><<<blocks, kThreads, 0, stream>>>(arguments, arguments.log2_dims);
  }
  check_launch("hadamard_kernel");
}

std::string why_not(const HadamardProblem& problem) {
  const std::string reason = why_no_device();
  return reason.empty() ? why_not_power_of_two(problem) : reason;
}

}  // namespace

std::vector<Entry<HadamardProblem, HadamardCall>> hadamard_entries() {
  return {{"cuda", Backend::cuda, "fp32 butterflies, in a warp's registers (128 wide) or shared",
           why_not, workspace_bytes, run}};
}

}  // namespace sparse_mla::cuda
