// Operation `hadamard` on CUDA.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/ptx.cuh"
#include "kernels/common/rotation_checks.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {
namespace {

constexpr int kThreads = 256;
/// The indexer's head width, for which eight lanes of a warp hold a vector: two pieces of eight
/// neighbours each, so that 32 bytes a thread are in flight and shuffles are few.
constexpr int kWarpDims = 128, kVectorLanes = 8, kPiece = 8;
constexpr int kBlockVectors = kThreads / kVectorLanes;
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

/// Adds and subtracts the numbers of `values` that are `kDistance` apart.
template <int kDistance, int kCount>
__device__ void butterflies(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if ((i & kDistance) == 0) {
      const float low = values[i], high = values[i + kDistance];
      values[i] = low + high;
      values[i + kDistance] = low - high;
    }
}

// Tile: one vector of 128 for each eight lanes, lane l of them having numbers 8·l … and 64 + 8·l …
// . Rounds of distance 1, 2 and 4 stay in a lane, those of 8, 16 and 32 exchange with the lane that
// is distance/8 away, that of 64 is between a lane's two pieces. A vector moves 512 bytes for 7 ·
// 64 butterflies and 12 shuffles of a warp. The sums are the CPU's, in the CPU's order: the same
// bits.
__global__ void __launch_bounds__(kThreads) hadamard_warp_kernel(const HadamardArguments a) {
  const std::int64_t item =
      std::int64_t{blockIdx.x} * kBlockVectors + static_cast<int>(threadIdx.x) / kVectorLanes;
  const std::int64_t heads = a.in.extent(1), items = a.in.extent(0) * heads;
  const bool exists = item < items;  // every lane takes part in the shuffles
  const std::int64_t row = exists ? item / heads : 0, head = exists ? item - row * heads : 0;
  const int lane = static_cast<int>(threadIdx.x) % kVectorLanes;
  const bfloat16* from = address(a.in, row, head, kPiece * lane);
  const uint4 packed[2] = {*reinterpret_cast<const uint4*>(from),
                           *reinterpret_cast<const uint4*>(from + kWarpDims / 2)};
  float values[2 * kPiece];
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const std::uint32_t pairs[4] = {packed[p].x, packed[p].y, packed[p].z, packed[p].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[kPiece * p + 2 * i] = __uint_as_float(pairs[i] << 16);
      values[kPiece * p + 2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000u);
    }
  }
  butterflies<1>(values);
  butterflies<2>(values);
  butterflies<4>(values);
#pragma unroll
  for (int distance = 1; distance < kVectorLanes; distance *= 2) {
    const float sign = (lane & distance) == 0 ? 1.0f : -1.0f;
#pragma unroll
    for (int i = 0; i < 2 * kPiece; ++i) {  // the product is exact: a sum or a difference
      const float other = __shfl_xor_sync(~0u, values[i], distance);
      values[i] = __fmaf_rn(sign, values[i], other);
    }
  }
  butterflies<kPiece>(values);
  if (!exists) return;
  bfloat16* to = address(a.out, row, head, kPiece * lane);
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const auto rounded = [&](int i) {
      return ptx::pack_bf16(__fmul_rn(values[kPiece * p + i], a.norm),
                            __fmul_rn(values[kPiece * p + i + 1], a.norm));
    };
    *reinterpret_cast<uint4*>(to + kWarpDims / 2 * p) = {rounded(0), rounded(2), rounded(4),
                                                         rounded(6)};
  }
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

void run(const HadamardProblem& problem, const HadamardCall& call, std::span<std::byte> workspace,
         Stream stream) {
  check_shapes(problem, call);
  const std::int64_t items = call.in.extent(0) * call.in.extent(1);
  if (items == 0) return;
  HadamardArguments arguments{call.in, call.out,
                              std::countr_zero(static_cast<unsigned>(problem.dims)),
                              1.0f / std::sqrt(static_cast<float>(problem.dims)), nullptr};
  if (problem.dims == kWarpDims && aligned_rows(call.in, 16) && aligned_rows(call.out, 16)) {
    const auto blocks = static_cast<unsigned>((items + kBlockVectors - 1) / kBlockVectors);
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
