// Selector "cuda_cluster": few long rows, a thread block cluster per row over distributed shared
// memory, each score read once.
//
// Tile: 1,024 × 64 bytes of its part of the row per block at a time, one block per SM; rows of
// parts as long as a tile or shorter are in flight as a whole while the threshold is found. Two
// cluster barriers: after the counts, after the survivors. How: see stream_select.cuh.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/cuda/device.h"
#include "topk/cluster_select.cuh"
#include "topk/cuda_algorithms.h"
#include "topk/select_checks.h"

namespace sparse_mla::cuda {
namespace {

constexpr int kThreads = 1024;

/// Blocks per row: the most that find an SM each and at least 8,192 scores; below that the exchange
/// costs more than it saves. A cluster lies within one of the card's groups of 16 or 18 SMs: 132
/// SMs hold 66 clusters of two and 32 of four, but of the larger ones fewer for sure than their
/// SMs, and one cluster that has to wait for another doubles the time.
constexpr int cluster_size(std::int64_t rows, std::int64_t row_len, int num_sms) {
  constexpr std::int64_t kLeastPart = 8192;
  int blocks = 1;
  while (blocks < 16 && 2 * blocks * kLeastPart <= row_len &&
         2 * blocks * rows <= (2 * blocks <= 4 ? num_sms : num_sms * 3 / 4))
    blocks *= 2;
  return blocks;
}

template <class Element>
__global__ void __launch_bounds__(kThreads, 1)
    cluster_kernel(const __grid_constant__ SelectCall call,
                   const __grid_constant__ StreamSettings settings, int blocks_per_row) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) std::byte dynamic[];
  __shared__ ClusterShared cluster;
  cluster_row<Element, kThreads>(
      call, settings, blockIdx.x / static_cast<unsigned>(blocks_per_row), cluster, dynamic,
      [&](Block<kThreads>& block, const DeviceRow&, const RowVectors<Element>& vectors) {
        return Sample::take<kThreads>(vectors, static_cast<std::uint32_t>(settings.k))
            .threshold(block);
      });
#endif
}

template <class Element>
void launch(const SelectProblem& problem, const SelectCall& call, Stream stream) {
  const StreamSettings settings{problem.k, problem.max_row_len,
                                problem.order == SelectOrder::by_value};
  const std::int64_t rows = call.scores.num_rows;
  const int blocks = cluster_size(rows, std::min(call.scores.row_len, problem.max_row_len),
                                  current_device().num_sms);
  const auto kernel = cluster_kernel<Element>;
  allow_shared(kernel, kStreamBytes<kThreads>);
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
        "cudaFuncSetAttribute(NonPortableClusterSizeAllowed)");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(rows * blocks), 1, 1};
  config.blockDim = {kThreads, 1, 1};
  config.dynamicSmemBytes = kStreamBytes<kThreads>;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, call, settings, blocks), "cudaLaunchKernelEx");
}

void run(const SelectProblem& problem, const SelectCall& call, std::span<std::byte>,
         Stream stream) {
  topk::validate_shapes(problem, call);
  if (call.scores.num_rows == 0) return;
  if (problem.score_type == ScoreType::f32)
    launch<topk::Float32>(problem, call, stream);
  else
    launch<topk::BFloat16>(problem, call, stream);
}

std::string why_not(const SelectProblem& problem) {
  if (problem.k > max_streamed_k())
    return "k: got " + std::to_string(problem.k) + ", expected at most " +
           std::to_string(max_streamed_k()) + ", half of a block's survivors";
  constexpr std::int64_t kMaxRows = 1 << 26;  // of 16 blocks
  if (problem.max_rows > kMaxRows)
    return "max_rows: got " + std::to_string(problem.max_rows) + ", expected at most " +
           std::to_string(kMaxRows);
  return why_no_device(90);
}

std::size_t workspace_bytes(const SelectProblem& problem) {
  topk::validate(problem);
  return 0;
}

}  // namespace
}  // namespace sparse_mla::cuda

namespace sparse_mla::topk {

SelectEntry cuda_cluster_entry() {
  return {"cuda_cluster", Backend::cuda,         "a cluster per row over distributed shared memory",
          cuda::why_not,  cuda::workspace_bytes, cuda::run};
}

}  // namespace sparse_mla::topk
