/// Selection from long rows by a cluster of blocks over distributed shared memory: what the
/// selectors "cuda_cluster" and "cuda_hinted" are made of, on top of stream_select.cuh.
///
/// Roles: every block streams its part of the row against the same threshold (each computes it from
/// the same sample or hints: nothing is exchanged for it) and counts its survivors over
/// kSharedParts equal parts of the range above the threshold. Then two exchanges of asynchronous
/// stores, each waited for at an mbarrier, without a barrier of the cluster:
///   1. histograms and counts: all blocks find the same part, the one with the k-th score;
///   2. the scores of that part, a few dozen: all blocks rank them all.
/// Now each knows which of its survivors are picks and where they stand, and writes its own.
///
/// Where that part holds too many (ties, narrow tails) or picks are wanted by value, survivors go
/// to the leader (rank 0), which selects alone; those that do not fit its buffer are streamed
/// through it. Every path gives the same picks in the same order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/ptx.cuh"
#include "kernels/cuda/device.h"
#include "topk/stream_select.cuh"

namespace sparse_mla::cuda {

/// One block has an SM for itself.
inline constexpr int kClusterThreads = 1024;
inline constexpr unsigned kMaxBlocks = 16;  // of a cluster: what the hardware can do
/// Parts of the histogram that blocks exchange: one kilobyte from each to each. Normal rows have
/// some 50 of 131,072 scores in the k-th's.
inline constexpr int kSharedParts = 256;
/// Scores of that part that can be ranked.
inline constexpr std::uint32_t kMaxShared = 128;

/// What blocks of a cluster tell each other.
struct ClusterShared {
  StreamShared stream;
  std::uint64_t counted[2], pushed, ranked;  // mbarriers: what has come from other blocks
  std::uint32_t counts[2][kMaxBlocks];       // survivors of each block, by attempt
  std::uint32_t above_and_in[kMaxBlocks];    // of each block: above the part, in it << 16
  std::uint32_t histograms[kMaxBlocks][kSharedParts];
  std::uint32_t totals[kSharedParts];
  std::uint32_t selected[kMaxShared / 32];  // bits
};

#if __CUDA_ARCH__ >= 900

/// A block's address of something in every block's ClusterShared.
class Everywhere {
 public:
  __device__ explicit Everywhere(const void* here) : here_(ptx::shared_address(here)) {}
  __device__ std::uint32_t in_block(std::uint32_t rank) const {
    return ptx::map_to_block(here_, rank);
  }

 private:
  std::uint32_t here_;
};

/// Part of the wanted-th in a histogram of kSharedParts, by every warp for itself.
__device__ inline InPlay find_shared_part(const std::uint32_t* histogram, unsigned lane,
                                          std::uint32_t wanted) {
  constexpr int kOwn = kSharedParts / 32;  // lane 0 has the highest
  std::uint32_t own[kOwn], sum = 0;
  const unsigned first = kSharedParts - kOwn * (lane + 1);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += own[i] = histogram[first + static_cast<unsigned>(i)];
  std::uint32_t above = sum;
#pragma unroll
  for (unsigned step = 1; step < 32; step *= 2) {
    const std::uint32_t other = __shfl_up_sync(~0u, above, step);
    if (lane >= step) above += other;
  }
  above -= sum;
  InPlay in_play{0, 0, 0};
#pragma unroll
  for (int i = kOwn - 1; i >= 0; --i) {
    if (above < wanted && wanted <= above + own[i])
      in_play = {first + static_cast<unsigned>(i), wanted - above, own[i]};
    above += own[i];
  }
  const int owner = __ffs(static_cast<int>(__ballot_sync(~0u, in_play.wanted != 0))) - 1;
  in_play.part = __shfl_sync(~0u, in_play.part, owner);
  in_play.wanted = __shfl_sync(~0u, in_play.wanted, owner);
  in_play.count = __shfl_sync(~0u, in_play.count, owner);
  return in_play;
}

/// Bits [0, n) of a row of words, of which this is the w-th.
__device__ inline std::uint32_t bits_below(std::uint32_t n, std::uint32_t w) {
  return n <= 32 * w ? 0 : n >= 32 * w + 32 ? ~0u : (1u << (n - 32 * w)) - 1;
}

/// Every block's own picks. `in_play` is the same in all of them; its part has at most kMaxShared
/// scores, or all are wanted.
template <class Element, int T>
__device__ void finish_together(const SelectCall& call, std::int64_t r, const DeviceRow& row,
                                Block<T>& block, ClusterShared& cluster, unsigned rank,
                                unsigned blocks, const ValueParts<kSharedParts>& parts,
                                const InPlay& in_play, const Survivors& survivors,
                                std::uint32_t filled, std::byte* dynamic) {
  constexpr int V = kSurvivorsPerThread<T>;
  // Where vectors were in flight, in every block.
  auto* const positions = reinterpret_cast<std::uint16_t*>(dynamic + 8 * kMaxSurvivors<T>);
  auto* const ranks = reinterpret_cast<std::uint64_t*>(positions + kMaxSurvivors<T>);
  block.idle = (threadIdx.x - threadIdx.x % 32) * V >= filled;
  unsigned above = 0, in = 0;
  float score[V];
  if (!block.idle) {
    load_survivors<T>(survivors, filled, score);
    const float edge = parts.edge(in_play.part), edge_above = parts.edge_above(in_play.part);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float place = parts.place(score[i]);
      if (place >= edge) in |= 1u << i;
      if (place > edge_above) above |= 1u << i;
    }
    in &= ~above;
  }
  std::uint32_t total;
  const std::uint32_t before = block.exclusive_sum(
      static_cast<std::uint32_t>(__popc(above)) | static_cast<std::uint32_t>(__popc(in)) << 16,
      total);
  const std::uint32_t in_before = before >> 16, in_here = total >> 16;
  const Everywhere ranked(&cluster.ranked), to_ranks(ranks + rank * kMaxShared),
      to_counts(&cluster.above_and_in[rank]);
  const bool all = in_play.count == in_play.wanted;
  if (in != 0 && !all) {
    std::uint32_t n = in_before;
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (in >> i & 1) {
        const std::uint64_t own =
            topk::packed_rank(key_of(score[i]), survivors.indices[threadIdx.x * V + i]);
        for (unsigned b = 0; b < blocks; ++b)
          ptx::store_async_8(to_ranks.in_block(b) + 8 * n, own, ranked.in_block(b));
        ++n;
      }
  }
  if (threadIdx.x < blocks)
    ptx::store_async_4(to_counts.in_block(threadIdx.x), total, ranked.in_block(threadIdx.x));
  if (threadIdx.x == 0)
    ptx::mbarrier_arrive_expecting(&cluster.ranked, 4 * blocks + (all ? 0 : 8 * in_play.count));
  ptx::mbarrier_wait(&cluster.ranked, 0);

  const std::uint32_t counts = block.lane < blocks ? cluster.above_and_in[block.lane] : 0;
  const std::uint32_t before_this = __reduce_add_sync(~0u, block.lane < rank ? counts : 0);
  const std::uint32_t in_before_this = before_this >> 16;
  // Those in play are numbered through, block by block. Which of them are selected?
  if (block.warp < kMaxShared / 32) {
    bool wins = threadIdx.x < in_play.count && all;
    if (threadIdx.x < in_play.count && !all) {
      std::uint64_t own = 0;
      std::uint32_t first = 0, better = 0;
      for (unsigned b = 0; b < blocks; ++b) {
        const std::uint32_t count = cluster.above_and_in[b] >> 16;
        if (threadIdx.x - first < count) own = ranks[b * kMaxShared + threadIdx.x - first];
        first += count;
      }
      for (unsigned b = 0; b < blocks; ++b) {
        const std::uint32_t count = cluster.above_and_in[b] >> 16;
#pragma unroll 8
        for (std::uint32_t j = 0; j < count; ++j) better += ranks[b * kMaxShared + j] < own;
      }
      wins = better < in_play.wanted;
    }
    const std::uint32_t bits = __ballot_sync(~0u, wins);
    if (block.lane == 0) cluster.selected[block.warp] = bits;
  }
  __syncthreads();
  const auto selected_before = [&](std::uint32_t n) {
    if (all) return n;
    std::uint32_t sum = 0;
#pragma unroll
    for (std::uint32_t w = 0; w < kMaxShared / 32; ++w)
      sum += static_cast<std::uint32_t>(__popc(cluster.selected[w] & bits_below(n, w)));
    return sum;
  };
  const std::uint32_t selected_before_this = selected_before(in_before_this);
  if ((above | in) != 0) {
    std::uint32_t n = in_before_this + in_before;
    std::uint32_t place = (before & 0xFFFFu) + selected_before(n) - selected_before_this;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      bool selected = (above >> i & 1) != 0;
      if (in >> i & 1) {
        selected = all || (cluster.selected[n / 32] >> (n % 32) & 1) != 0;
        ++n;
      }
      if (selected) positions[place++] = static_cast<std::uint16_t>(threadIdx.x * V + i);
    }
  }
  __syncthreads();
  const PickWriter writer(call, r, row.out_row);
  put_survivors<Element, T>(
      writer, false, survivors, positions,
      static_cast<std::int32_t>((before_this & 0xFFFFu) + selected_before_this),
      static_cast<std::int32_t>((total & 0xFFFFu) + selected_before(in_before_this + in_here) -
                                selected_before_this));
}

/// Selects from row r with the cluster. `find_threshold(block, vectors)` gives a Threshold, the
/// same in all blocks.
template <class Element, int T, class FindThreshold>
__device__ void cluster_row(const SelectCall& call, const StreamSettings& settings, std::int64_t r,
                            ClusterShared& cluster, std::byte* dynamic,
                            FindThreshold find_threshold) {
  const DeviceRow row = row_of<Element>(call, settings.max_row_len, r);
  if (row.out_row < 0) return;
  const unsigned rank = ptx::cluster_rank(), blocks = ptx::cluster_size();
  if (row.len <= settings.k) {  // the same for all blocks
    if (rank == 0) put_whole_row<Element, T>(call, settings, r, row, dynamic);
    return;
  }
  if (threadIdx.x == 0) {
    for (std::uint64_t* barrier :
         {&cluster.counted[0], &cluster.counted[1], &cluster.pushed, &cluster.ranked})
      ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_arrive_relaxed();  // waited for before the first remote access

  const auto k = static_cast<std::uint32_t>(settings.k);
  const Survivors survivors{reinterpret_cast<float*>(dynamic),
                            reinterpret_cast<std::int32_t*>(dynamic) + kMaxSurvivors<T>};
  const RowVectors<Element> vectors(row.scores, row.len);
  const Part part(vectors.count, rank, blocks);
  Block<T> block(cluster.stream.block);
  RowStream<Element, T> stream(block, cluster.stream, survivors, dynamic + 8 * kMaxSurvivors<T>, k);
  stream.prefetch(vectors, part.begin, part.end);
  const Threshold threshold = find_threshold(block, row, vectors);
  stream.set_threshold(threshold.least);
  const ValueParts<kSharedParts> parts(threshold.least, threshold.greatest);
  const bool together =
      blocks > 1 && !settings.by_value && threshold.least <= threshold.greatest;  // no NaN either

  std::uint32_t total = 0, before = 0;
  InPlay in_play{0, 0, ~0u};
  bool again;
#pragma unroll 1
  for (again = false;; again = true) {
    add_part(stream, vectors, part);
    const bool with_histogram = together && !again;
    std::uint32_t* const histogram = cluster.stream.block.histogram;
    if (with_histogram) {
      clear_histogram<T>(cluster.stream.block);
      __syncthreads();
      for (std::uint32_t j = threadIdx.x; j < stream.filled(); j += T)
        atomicAdd(&histogram[min(parts.part(survivors.scores[j]), kSharedParts - 1u)], 1u);
    }
    if (!again) ptx::cluster_wait();
    const Everywhere counted(&cluster.counted[again]), counts(&cluster.counts[again][rank]),
        histograms(cluster.histograms[rank]);
    if (threadIdx.x < blocks)
      ptx::store_async_4(counts.in_block(threadIdx.x), stream.filled(),
                         counted.in_block(threadIdx.x));
    if (with_histogram) {
      __syncthreads();
      const std::uint32_t bin = threadIdx.x % kSharedParts;
      for (unsigned b = threadIdx.x / kSharedParts; b < blocks; b += T / kSharedParts)
        ptx::store_async_4(histograms.in_block(b) + 4 * bin, histogram[bin], counted.in_block(b));
    }
    if (threadIdx.x == 0)
      ptx::mbarrier_arrive_expecting(&cluster.counted[again],
                                     blocks * (4 + (with_histogram ? 4 * kSharedParts : 0)));
    ptx::mbarrier_wait(&cluster.counted[again], 0);
    const std::uint32_t count = block.lane < blocks ? cluster.counts[again][block.lane] : 0;
    total = __reduce_add_sync(~0u, count);
    before = __reduce_add_sync(~0u, block.lane < rank ? count : 0);
    if (total >= k && with_histogram) {
      if (threadIdx.x < kSharedParts) {
        std::uint32_t sum = 0;
        for (unsigned b = 0; b < blocks; ++b) sum += cluster.histograms[b][threadIdx.x];
        cluster.totals[threadIdx.x] = sum;
      }
      __syncthreads();
      in_play = find_shared_part(cluster.totals, block.lane, k);
    }
    if (total >= k || again) break;  // the same for all blocks
    stream.restart();
    stream.prefetch(vectors, part.begin, part.end);
  }

  if (in_play.count <= kMaxShared) {
    finish_together<Element, T>(call, r, row, block, cluster, rank, blocks, parts, in_play,
                                survivors, stream.filled(), dynamic);
    return;
  }
  if (total <= kMaxSurvivors<T>) {
    if (rank != 0) {
      __syncthreads();  // survivors are pushed by other threads than wrote them
      const std::uint32_t leader = Everywhere(survivors.scores).in_block(0),
                          pushed = Everywhere(&cluster.pushed).in_block(0);
      for (std::uint32_t j = threadIdx.x; j < stream.filled(); j += T) {
        const std::uint32_t to = leader + 4 * (before + j);
        ptx::store_async_4(to, __float_as_uint(survivors.scores[j]), pushed);
        ptx::store_async_4(to + 4 * kMaxSurvivors<T>,
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
  finish_row<Element, T>(call, settings, r, row, block, survivors, stream.filled(), dynamic);
}

#endif  // __CUDA_ARCH__ >= 900

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

/// Launches a kernel (call, settings, blocks per row) with a cluster for each row.
template <class Kernel>
void launch_clusters(Kernel* kernel, const SelectProblem& problem, const SelectCall& call,
                     Stream stream) {
  const StreamSettings settings{problem.k, problem.max_row_len,
                                problem.order == SelectOrder::by_value};
  const std::int64_t rows = call.scores.num_rows;
  const int blocks = cluster_size(rows, std::min(call.scores.row_len, problem.max_row_len),
                                  current_device().num_sms);
  constexpr int kBytes = kStreamBytes<kClusterThreads>;
  allow_shared(kernel, kBytes);
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

/// Entry::why_not of the selectors that use clusters.
inline std::string why_no_clusters(const SelectProblem& problem) {
  if (problem.k > max_streamed_k())
    return "k: got " + std::to_string(problem.k) + ", expected at most " +
           std::to_string(max_streamed_k()) + ", half of a block's survivors";
  constexpr std::int64_t kMaxRows = 1 << 26;  // of 16 blocks
  if (problem.max_rows > kMaxRows)
    return "max_rows: got " + std::to_string(problem.max_rows) + ", expected at most " +
           std::to_string(kMaxRows);
  const std::string reason = why_no_device(90);
  if (!reason.empty()) return reason;
  constexpr int kBytes = kStreamBytes<kClusterThreads> + static_cast<int>(sizeof(ClusterShared));
  const int most = current_device().max_shared_bytes;
  if (kBytes <= most) return "";
  return "needs " + std::to_string(kBytes) +
         " bytes of shared memory per block, the device gives " + std::to_string(most);
}

}  // namespace sparse_mla::cuda
