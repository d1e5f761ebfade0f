/// Selection from long rows by a cluster of blocks over distributed shared memory: what the
/// selectors "cuda_cluster" and "cuda_hinted" are made of, on top of stream_select.cuh.
///
/// Roles: every block streams its part of the row against the same threshold; each computes it from
/// the same sample or hints, so that nothing is exchanged for it. Then blocks tell each other how
/// many survivors they have and push them behind those of the leader (rank 0), which selects among
/// them. Both are asynchronous stores that count at an mbarrier of the receiver: no barrier of the
/// cluster, whose fences take longer, is on the way.
///
/// Survivors of all blocks that do not fit the leader's buffer are streamed through it, as a row
/// is: a full buffer is cut back to its k best.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/ptx.cuh"
#include "kernels/cuda/device.h"
#include "topk/select_checks.h"
#include "topk/stream_select.cuh"

namespace sparse_mla::cuda {

/// With 1,024 threads, whatever each warp does once – sums, bounds, places – took twice the time.
inline constexpr int kClusterThreads = 512;
/// A tile takes the time of its sums and barrier, whatever its length: 32 scores of each thread.
/// Two tiles are in flight, so that one is on its way while the other is looked at.
template <class Element>
using ClusterShape = StreamShape<kClusterThreads, 16, 32 / RowVectors<Element>::kVector, 2>;
inline constexpr int kClusterBytes = ClusterShape<topk::Float32>::kBytes;
inline constexpr unsigned kMaxBlocks = 16;  // of a cluster: what the hardware can do

/// What blocks of a cluster tell each other.
struct ClusterShared {
  StreamShared stream;
  std::uint64_t counted[2], pushed;     // mbarriers: what has come from other blocks
  std::uint32_t counts[2][kMaxBlocks];  // survivors of each block, by attempt
};

#if __CUDA_ARCH__ >= 900

/// Addresses, in the shared memory of every block of the cluster, of what lies at one place in it.
class Everywhere {
 public:
  __device__ explicit Everywhere(const void* here) : here_(ptx::shared_address(here)) {}
  __device__ std::uint32_t in_block(std::uint32_t rank) const {
    return ptx::map_to_block(here_, rank);
  }

 private:
  std::uint32_t here_;
};

/// Selects from row r with the cluster. `find_threshold(block, row, vectors, prefetch)` gives a
/// Threshold, the same in all blocks, and calls prefetch() as soon as its own loads are on their
/// way: behind a part of the row they would arrive late.
template <class Element, class FindThreshold>
__device__ void cluster_row(const SelectCall& call, const StreamSettings& settings, std::int64_t r,
                            ClusterShared& cluster, std::byte* dynamic,
                            FindThreshold find_threshold) {
  using Shape = ClusterShape<Element>;
  const DeviceRow row = row_of<Element>(call, settings.max_row_len, r);
  if (row.out_row < 0) return;
  const unsigned rank = ptx::cluster_rank(), blocks = ptx::cluster_size();
  if (row.len <= settings.k) {  // the same for all blocks
    if (rank == 0) put_whole_row<Element, Shape>(call, settings, r, row, dynamic);
    return;
  }
  const bool alone = blocks == 1;  // has no distributed shared memory
  if (!alone) {
    if (threadIdx.x == 0) {
      for (std::uint64_t* barrier : {&cluster.counted[0], &cluster.counted[1], &cluster.pushed})
        ptx::mbarrier_init(barrier, 1);
      ptx::mbarrier_init_fence();
    }
    ptx::cluster_arrive_relaxed();  // waited for before the first remote access
  }

  const auto k = static_cast<std::uint32_t>(settings.k);
  const Survivors survivors{reinterpret_cast<float*>(dynamic),
                            reinterpret_cast<std::int32_t*>(dynamic) + Shape::kCapacity};
  const RowVectors<Element> vectors(row.scores, row.len);
  const Part part(vectors.count, rank, blocks);
  Block<kClusterThreads> block(cluster.stream.block);
  RowStream<Element, Shape> stream(block, cluster.stream, survivors, dynamic + 8 * Shape::kCapacity,
                                   k);
  Threshold threshold =
      find_threshold(block, row, vectors, [&] { stream.prefetch(vectors, part.begin, part.end); });
  stream.set_threshold(threshold.least);
  std::uint32_t total = 0, before = 0;
  bool again;
#pragma unroll 1
  for (again = false;; again = true) {
    add_part(stream, vectors, part);
    total = stream.filled();
    if (!alone) {
      if (!again) ptx::cluster_wait();
      const Everywhere counted(&cluster.counted[again]), counts(&cluster.counts[again][rank]);
      if (threadIdx.x < blocks)
        ptx::store_async_4(counts.in_block(threadIdx.x), total, counted.in_block(threadIdx.x));
      if (threadIdx.x == 0) ptx::mbarrier_arrive_expecting(&cluster.counted[again], 4 * blocks);
      ptx::mbarrier_wait(&cluster.counted[again], 0);
      const std::uint32_t count = block.lane < blocks ? cluster.counts[again][block.lane] : 0;
      total = __reduce_add_sync(~0u, count);
      before = __reduce_add_sync(~0u, block.lane < rank ? count : 0);
    }
    if (total >= k || again) break;  // the same for all blocks
    stream.restart();
    threshold.least = no_score();
    stream.prefetch(vectors, part.begin, part.end);
  }
  if (alone) {
    // All of them are here.
  } else if (total <= Shape::kCapacity) {
    if (rank != 0) {
      __syncthreads();  // survivors are pushed by other threads than wrote them
      const std::uint32_t leader = Everywhere(survivors.scores).in_block(0),
                          pushed = Everywhere(&cluster.pushed).in_block(0);
      for (std::uint32_t j = threadIdx.x; j < stream.filled(); j += kClusterThreads) {
        const std::uint32_t to = leader + 4 * (before + j);
        ptx::store_async_4(to, __float_as_uint(survivors.scores[j]), pushed);
        ptx::store_async_4(to + 4 * Shape::kCapacity,
                           static_cast<std::uint32_t>(survivors.indices[j]), pushed);
      }
      return;
    }
    if (threadIdx.x == 0)
      ptx::mbarrier_arrive_expecting(&cluster.pushed, 8 * (total - stream.filled()));
    ptx::mbarrier_wait(&cluster.pushed, 0);
    stream.set_filled(total);
  } else {  // through the leader's buffer, one block after the other
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (rank == 0)
      for (unsigned b = 1; b < blocks; ++b)
        stream.add_survivors(Everywhere(survivors.scores).in_block(b), cluster.counts[again][b]);
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (rank != 0) return;
  }
  finish_row<Element, Shape>(call, settings, r, row, block, survivors, stream.filled(), threshold,
                             dynamic);
}

#endif  // __CUDA_ARCH__ >= 900

/// Blocks per row: the most that find an SM each and at least 8,192 scores; below that the exchange
/// costs more than it saves. A cluster lies within one of the card's groups of SMs: the 132 SMs of
/// an H200 hold 66 clusters of two, but 30 of four, 15 of eight and 7 of sixteen, and one cluster
/// that has to wait for another doubles the time.
constexpr int cluster_size(std::int64_t rows, std::int64_t row_len, const Device& device) {
  constexpr std::int64_t kLeastPart = 8192;
  constexpr int kEverywhere = 8;  // compute capability 9.0 is known to make clusters of sixteen
  const int most = device.compute_capability == 90 ? static_cast<int>(kMaxBlocks) : kEverywhere;
  int blocks = 1;
  while (blocks < most && 2 * blocks * kLeastPart <= row_len &&
         2 * blocks * rows <= (blocks == 1 ? device.num_sms : device.num_sms * 10 / 11))
    blocks *= 2;
  return blocks;
}

/// Entry::run over a kernel (call, settings, blocks per row) for each type of scores: a cluster for
/// each row.
template <class Kernel>
void run_clusters(Kernel* of_f32, Kernel* of_bf16, const SelectProblem& problem,
                  const SelectCall& call, Stream stream) {
  topk::validate_shapes(problem, call);
  if (call.scores.num_rows == 0) return;
  Kernel* const kernel = problem.score_type == ScoreType::f32 ? of_f32 : of_bf16;
  const StreamSettings settings{problem.k, problem.max_row_len,
                                problem.order == SelectOrder::by_value};
  const std::int64_t rows = call.scores.num_rows;
  const int blocks =
      cluster_size(rows, std::min(call.scores.row_len, problem.max_row_len), current_device());
  constexpr int kBytes = kClusterBytes;
  allow_shared(kernel, kBytes);
  constexpr int kPortable = 8;
  if (blocks > kPortable)
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
          "cudaFuncSetAttribute(NonPortableClusterSizeAllowed)");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(rows * blocks), 1, 1};
  config.blockDim = {kClusterThreads, 1, 1};
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, call, settings, blocks), "cudaLaunchKernelEx");
}

/// Entry::why_not of the selectors that use clusters, of which `kernel` is one: its body is empty
/// where it was compiled for less than compute capability 9.0, for whatever device that runs on.
inline std::string why_no_clusters(const SelectProblem& problem, const void* kernel) {
  constexpr std::int64_t kMaxRows = 1 << 26;  // of 16 blocks
  if (problem.max_rows > kMaxRows)
    return "max_rows: got " + std::to_string(problem.max_rows) + ", expected at most " +
           std::to_string(kMaxRows);
  constexpr int kCapability = 90;
  if (std::string reason = why_no_streams(problem, kCapability,
                                          kClusterBytes + static_cast<int>(sizeof(ClusterShared)));
      !reason.empty())
    return reason;
  return why_no_code(kernel, kCapability);
}

}  // namespace sparse_mla::cuda
