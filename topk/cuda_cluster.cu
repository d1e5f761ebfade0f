// Selector "cuda_cluster": few long rows, a thread block cluster per row over distributed shared
// memory, each score read once.
//
// Tile: 512 × 128 bytes of its part of the row per block at a time, one block per SM, two tiles in
// flight. How: see cluster_select.cuh.
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"
#include "topk/choice.h"
#include "topk/cluster_select.cuh"
#include "topk/cuda_algorithms.h"
#include "topk/select_checks.h"
#include "topk/why_rather_not.h"

namespace sparse_mla::cuda {
namespace {

template <class Element>
__global__ void __launch_bounds__(kClusterThreads, 1)
    cluster_kernel(const __grid_constant__ SelectCall call,
                   const __grid_constant__ StreamSettings settings, int blocks_per_row) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) std::byte dynamic[];
  __shared__ ClusterShared cluster;
  cluster_row<Element>(
      call, settings, blockIdx.x / static_cast<unsigned>(blocks_per_row), cluster, dynamic,
      [&](Block<kClusterThreads>& block, const DeviceRow&, const RowVectors<Element>& vectors,
          auto prefetch) {
        const auto sample =
            Sample::take<kClusterThreads>(vectors, static_cast<std::uint32_t>(settings.k));
        prefetch();
        return sample.threshold(block, ClusterShape<Element>::kCapacity);
      });
#endif
}

std::string why_not(const SelectProblem& problem) {
  return why_no_clusters(problem, reinterpret_cast<const void*>(cluster_kernel<topk::Float32>));
}

void run(const SelectProblem& problem, const SelectCall& call, std::span<std::byte>,
         Stream stream) {
  run_clusters(cluster_kernel<topk::Float32>, cluster_kernel<topk::BFloat16>, problem, call,
               stream);
}

}  // namespace
}  // namespace sparse_mla::cuda

namespace sparse_mla::topk {

SelectEntry cuda_cluster_entry() {
  return {"cuda_cluster",
          Backend::cuda,
          "a cluster per row over distributed shared memory",
          cuda::why_not,
          cuda::no_workspace,
          cuda::run,
          why_rather_not<Selector::cluster>};
}

}  // namespace sparse_mla::topk
