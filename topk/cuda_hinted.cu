// Selector "cuda_hinted": decode steps, whose picks are much the same as the step before. As
// "cuda_cluster", but the threshold comes from the hints.
//
// The least score of 512 of the hints is a threshold that nearly k of the row still reach where the
// hints have aged well: it costs a gather and one exchange within the block instead of a selection
// among a sample. Whether it is a good one is what a sample of the row says, by counting alone: if
// fewer of it pass than k of the row would send, or far more, the hints misled, and the sample
// gives the threshold as it does without hints. Picks are those of any other selector whatever the
// hints.
//
// On an H200 it is no faster than cuda_cluster (docs/kernels/select_stream.md): the gather waits
// for two loads in turn, as long as a selection among the sample takes. It is taken only where it
// is forced.
#include <cstddef>
#include <cstdint>
#include <string>

#include "topk/cluster_select.cuh"
#include "topk/cuda_algorithms.h"
#include "topk/select_checks.h"

namespace sparse_mla::cuda {
namespace {

#if __CUDA_ARCH__ >= 900

/// Hints that are looked at, one a thread.
constexpr int kHints = kClusterThreads;

/// One of row `out_row`'s hints, −1 where there are no more.
__device__ std::int32_t hint_of(const SelectCall& call, const DeviceRow& row) {
  const std::int64_t width = call.hints.extent(1);
  const std::int64_t column = width <= kHints ? threadIdx.x : threadIdx.x * width / kHints;
  if (column >= width || row.out_row >= call.hints.extent(0)) return -1;
  return *address(call.hints, row.out_row, column);
}

template <class Element, int T, class Prefetch>
__device__ Threshold hinted_threshold(Block<T>& block, const SelectCall& call, const DeviceRow& row,
                                      const RowVectors<Element>& vectors, std::uint32_t k,
                                      Prefetch prefetch) {
  constexpr int kCapacity = ClusterShape<Element>::kCapacity;
  const std::int32_t hint = hint_of(call, row);
  const Sample sample = Sample::take<T>(vectors, k);  // on its way while the hint is
  float hinted = no_score();
  if (hint >= 0 && hint < row.len) hinted = __uint_as_float(Element::bits(row.scores, hint));
  prefetch();
  std::uint32_t low = hinted == hinted ? key_of(hinted) : ~0u,
                high = hinted == hinted ? key_of(hinted) : 0u;
  block.bounds(low, high);
  if (low <= high) {  // there are hints
    const Threshold threshold{float_of(low), float_of(high)};
    std::uint32_t passing = 0, total;
#pragma unroll
    for (int i = 0; i < kSampled; ++i) passing += sample.score[i] >= threshold.least;
    block.sum_of_warps(__reduce_add_sync(~0u, passing), total);
    const float few = sample.expected + 3 * sqrtf(sample.expected) + 4,
                many = 0.7f * kCapacity * sample.of_row;
    const auto passed = static_cast<float>(total);
    if (passed >= few && passed <= many) return threshold;
  }
  return sample.threshold(block, kCapacity);
}

#endif

template <class Element>
__global__ void __launch_bounds__(kClusterThreads, 1)
    hinted_kernel(const __grid_constant__ SelectCall call,
                  const __grid_constant__ StreamSettings settings, int blocks_per_row) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) std::byte dynamic[];
  __shared__ ClusterShared cluster;
  cluster_row<Element>(call, settings, blockIdx.x / static_cast<unsigned>(blocks_per_row), cluster,
                       dynamic,
                       [&](Block<kClusterThreads>& block, const DeviceRow& row,
                           const RowVectors<Element>& vectors, auto prefetch) {
                         return hinted_threshold(block, call, row, vectors,
                                                 static_cast<std::uint32_t>(settings.k), prefetch);
                       });
#endif
}

void run(const SelectProblem& problem, const SelectCall& call, std::span<std::byte>,
         Stream stream) {
  run_clusters(hinted_kernel<topk::Float32>, hinted_kernel<topk::BFloat16>, problem, call, stream);
}

std::string why_not(const SelectProblem& problem) {
  if (!problem.hinted) return "hinted: got false, expected a problem whose calls bring hints";
  return why_no_clusters(problem, reinterpret_cast<const void*>(hinted_kernel<topk::Float32>));
}

}  // namespace
}  // namespace sparse_mla::cuda

namespace sparse_mla::topk {

SelectEntry cuda_hinted_entry() {
  return {
      "cuda_hinted",
      Backend::cuda,
      "a cluster per row, its threshold from the last picks",
      cuda::why_not,
      cuda::no_workspace,
      cuda::run,
      [](const SelectProblem&) -> std::string { return "cuda_cluster is as fast without hints"; }};
}

}  // namespace sparse_mla::topk
