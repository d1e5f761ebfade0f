/// Exact selection by one thread block among keys that its threads hold in registers, V of each of
/// T threads: the part that all of our own CUDA selectors end in.
///
/// Keys are ordered_key()'s. Thread t's keys are the positions t·V … t·V + V − 1; of equal keys the
/// lower position wins. A thread without enough keys holds 0 (the key of NaN) in its last places,
/// and so do all threads behind it: such keys rank behind every other.
///
/// Method: the bounds of the finite values; a histogram over kBins equal parts of *that* range, so
/// that narrow data spread as well as wide; the part with the k-th key. It holds a few keys as a
/// rule: those are ranked against each other. Many keys there (heavy tails, ties): their own
/// bounds, and a histogram over equal parts of the range of their keys as integers, which takes 10
/// bits off the range each time whatever the data; equal bounds mean ties. (Radix selection: Alabi
/// et al., JEA 17, 2012; binning by the range of the data is bucket select of the same paper.)
#pragma once

#include <cfloat>
#include <cstdint>

#include <cuda/std/bit>

#include "topk/ordered_key.h"

namespace sparse_mla::cuda {

/// Parts of a histogram: 1,024 leave some 20 of 8,192 normal keys in the k-th key's part, and every
/// thread sums one or two of them.
inline constexpr int kBins = 1024;
/// Keys that are ranked by comparing each with all: their threads make that many comparisons.
inline constexpr int kMaxRanked = 128;

/// A block's scratch in shared memory.
struct BlockShared {
  std::uint32_t histogram[kBins];
  std::uint64_t ranked[kMaxRanked];
  std::uint32_t of_warp[2][2][32];  // partial results of sums and bounds; calls take turns
  std::uint32_t bin, above, in_bin, num_ranked;
};

/// Sums and bounds over a block of T threads. One barrier a call: who writes a turn's words again
/// has passed the barrier that followed their last reading.
template <int T>
class Block {
 public:
  static constexpr int kWarps = T / 32;

  __device__ explicit Block(BlockShared& shared)
      : shared(shared), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {}

  /// The sum over the threads before this one; `total` over all.
  __device__ std::uint32_t exclusive_sum(std::uint32_t value, std::uint32_t& total) {
    const std::uint32_t inclusive = inclusive_in_warp(value);
    const std::uint32_t before = sum_of_warps(__shfl_sync(~0u, inclusive, 31), total);
    return before + inclusive - value;
  }

  /// `of_this`: a sum over this warp's threads, the same in all of them. The sum over the warps
  /// before this one; `total` over all.
  __device__ std::uint32_t sum_of_warps(std::uint32_t of_this, std::uint32_t& total) {
    std::uint32_t* const sums = next_turn()[0];
    if (lane == 0) sums[warp] = of_this;
    __syncthreads();
    const std::uint32_t sum = lane < kWarps ? sums[lane] : 0;
    total = __reduce_add_sync(~0u, sum);
    return __reduce_add_sync(~0u, lane < warp ? sum : 0);
  }

  /// The least `low` and the greatest `high` of all threads.
  __device__ void bounds(std::uint32_t& low, std::uint32_t& high) {
    const auto turn = next_turn();
    low = __reduce_min_sync(~0u, low);
    high = __reduce_max_sync(~0u, high);
    if (lane == 0) {
      turn[0][warp] = low;
      turn[1][warp] = high;
    }
    __syncthreads();
    low = __reduce_min_sync(~0u, lane < kWarps ? turn[0][lane] : ~0u);
    high = __reduce_max_sync(~0u, lane < kWarps ? turn[1][lane] : 0);
  }

  __device__ std::uint32_t inclusive_in_warp(std::uint32_t value) const {
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2) {
      const std::uint32_t other = __shfl_up_sync(~0u, value, step);
      if (lane >= step) value += other;
    }
    return value;
  }

  BlockShared& shared;
  const unsigned lane, warp;

 private:
  using Turn = std::uint32_t (*)[32];
  __device__ Turn next_turn() {
    turn_ ^= 1;
    return shared.of_warp[turn_];
  }
  int turn_ = 0;
};

/// The float of a key; a NaN for kNanKey.
__device__ inline float float_of(std::uint32_t key) {
  return __uint_as_float(key >> 31 != 0 ? key ^ 0x80000000u : ~key);
}

/// The part of the range of finite values that a key's value lies in. Rounding keeps the order: a
/// greater value never has a lesser part.
struct ValueBins {
  float low, scale;

  /// Of the finite keys' bounds; there may be none (low > high).
  __device__ ValueBins(std::uint32_t low_key, std::uint32_t high_key) {
    low = low_key <= high_key ? float_of(low_key) : 0;
    const float width = low_key <= high_key ? float_of(high_key) - low : 0;
    scale = fminf(static_cast<float>(kBins) / width, FLT_MAX);  // 0 where the width overflows
  }
  __device__ std::uint32_t operator()(std::uint32_t key) const {
    // Conversion saturates: −inf is in the first part, +inf in the last, and NaN gives 0.
    return min(__float2uint_rz((float_of(key) - low) * scale), kBins - 1u);
  }
};

/// The part of [low, low + 2^(10 + shift)) that a key lies in.
struct KeyBins {
  std::uint32_t low;
  int shift;

  __device__ KeyBins(std::uint32_t low_key, std::uint32_t high_key)
      : low(low_key), shift(max(22 - ::cuda::std::countl_zero(high_key - low_key), 0)) {}
  __device__ std::uint32_t operator()(std::uint32_t key) const { return (key - low) >> shift; }
};

/// What is known of the k-th key: keys of `part` are those in play, of which the first `wanted` in
/// order are selected; all keys ranking before them are selected.
struct InPlay {
  std::uint32_t part, wanted, count;
};

/// Clears the histogram; a barrier has to follow before histogram_of().
template <int T>
__device__ void clear_histogram(BlockShared& shared) {
#pragma unroll
  for (int bin = 0; bin < kBins / T; ++bin) shared.histogram[bin * T + threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.num_ranked = 0;
}

/// Finds the part of the wanted-th of the keys that `counts(key)` counts. False, with the number of
/// those keys in `counted`, where they are fewer. The histogram has to be clear.
template <int T, int V, class Bins, class Counts>
__device__ bool find_part(Block<T>& block, const std::uint32_t (&key)[V], const Bins& bins,
                          Counts counts, std::uint32_t wanted, InPlay& in_play,
                          std::uint32_t& counted) {
  BlockShared& shared = block.shared;
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (counts(key[i])) atomicAdd(&shared.histogram[bins(key[i])], 1u);
  __syncthreads();
  constexpr int kOwn = kBins / T;  // thread 0 has the highest
  const std::uint32_t* const own = shared.histogram + (T - 1 - threadIdx.x) * kOwn;
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += own[i];
  std::uint32_t above = block.exclusive_sum(sum, counted);
  if (counted < wanted) return false;
  if (above < wanted && wanted <= above + sum) {
    int i = kOwn - 1;
    while (wanted > above + own[i]) above += own[i--];
    shared.bin = (T - 1 - threadIdx.x) * kOwn + static_cast<unsigned>(i);
    shared.above = above;
    shared.in_bin = own[i];
  }
  __syncthreads();
  in_play = {shared.bin, wanted - shared.above, shared.in_bin};
  return true;
}

/// A thread's selected keys: those of `above`, and of all threads' keys of `ties` the `wanted` with
/// the lowest positions. Bit i stands for key[i].
struct Selected {
  unsigned above = 0, ties = 0;
  std::uint32_t wanted = 0;
};

/// Bounds of the keys for which in(key); the block's.
template <int T, int V, class In>
__device__ void bounds_of(Block<T>& block, const std::uint32_t (&key)[V], In in, std::uint32_t& low,
                          std::uint32_t& high) {
  low = ~0u;
  high = 0;
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (in(key[i])) {
      low = min(low, key[i]);
      high = max(high, key[i]);
    }
  block.bounds(low, high);
}

__device__ inline bool is_finite_key(std::uint32_t key) {
  return key > topk::kNegativeInfinityKey && key < topk::kPositiveInfinityKey;
}

/// Ranks the keys in play, at most kMaxRanked, against each other: the bits of those selected.
template <int T, int V, class In>
__device__ unsigned rank_in_play(Block<T>& block, const std::uint32_t (&key)[V], In in,
                                 const InPlay& in_play) {
  BlockShared& shared = block.shared;
  const auto rank_of = [&](int i) { return topk::packed_rank(key[i], threadIdx.x * V + i); };
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (in(key[i])) shared.ranked[atomicAdd(&shared.num_ranked, 1u)] = rank_of(i);
  __syncthreads();
  unsigned selected = 0;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (!in(key[i])) continue;
    const std::uint64_t own = rank_of(i);
    std::uint32_t before = 0;
    for (std::uint32_t j = 0; j < in_play.count; ++j) before += shared.ranked[j] < own;
    if (before < in_play.wanted) selected |= 1u << i;
  }
  return selected;
}

/// Selects `wanted` (1 … T·V) of the block's keys. Begins and ends without a barrier: what the
/// scratch held before must not be read any more, and it may be in use still.
template <int T, int V>
__device__ Selected select_in_block(Block<T>& block, const std::uint32_t (&key)[V],
                                    std::uint32_t wanted) {
  BlockShared& shared = block.shared;
  Selected selected;
  const auto mask_of = [&](auto in) {
    unsigned mask = 0;
#pragma unroll
    for (int i = 0; i < V; ++i) mask |= static_cast<unsigned>(in(key[i])) << i;
    return mask;
  };
  clear_histogram<T>(shared);
  std::uint32_t low, high;
  bounds_of(block, key, is_finite_key, low, high);
  const ValueBins values(low, high);
  InPlay in_play;
  std::uint32_t counted;
  const auto is_number = [](std::uint32_t k) { return k != topk::kNanKey; };
  if (!find_part(block, key, values, is_number, wanted, in_play, counted)) {
    selected.above = mask_of(is_number);
    selected.ties = ~selected.above & ((1u << V) - 1);
    selected.wanted = wanted - counted;
    return selected;
  }
  const auto in_part = [&](std::uint32_t k) { return is_number(k) && values(k) == in_play.part; };
  const auto above_part = [&](std::uint32_t k) { return is_number(k) && values(k) > in_play.part; };
  if (in_play.count == in_play.wanted) {
    selected.above = mask_of([&](std::uint32_t k) { return in_part(k) || above_part(k); });
    return selected;
  }
  if (in_play.count <= kMaxRanked) {
    selected.above = mask_of(above_part) | rank_in_play(block, key, in_part, in_play);
    return selected;
  }
  bounds_of(block, key, in_part, low, high);
  // Keys in [low, high] are in play, greater ones are selected.
  for (;;) {
    if (low == high || in_play.count == in_play.wanted) break;
    if (in_play.count <= kMaxRanked) break;
    clear_histogram<T>(shared);
    __syncthreads();
    const KeyBins keys(low, high);
    const auto in_range = [&](std::uint32_t k) { return k >= low && k <= high; };
    find_part(block, key, keys, in_range, in_play.wanted, in_play, counted);
    // Their part's bounds: `low` and `high` are still those of the range before.
    std::uint32_t part_low, part_high;
    bounds_of(
        block, key, [&](std::uint32_t k) { return in_range(k) && keys(k) == in_play.part; },
        part_low, part_high);
    low = part_low;
    high = part_high;
  }
  const auto in_range = [&](std::uint32_t k) { return k >= low && k <= high; };
  selected.above = mask_of([&](std::uint32_t k) { return k > high; });
  if (low == high || in_play.count == in_play.wanted) {
    selected.ties = mask_of(in_range);
    selected.wanted = in_play.wanted;
  } else {
    selected.above |= rank_in_play(block, key, in_range, in_play);
  }
  return selected;
}

/// A key that at least `wanted` of the block's keys reach, and not many more: the least key of the
/// wanted-th's part. kNanKey where fewer than `wanted` are numbers.
template <int T, int V>
__device__ std::uint32_t threshold_in_block(Block<T>& block, const std::uint32_t (&key)[V],
                                            std::uint32_t wanted) {
  clear_histogram<T>(block.shared);
  std::uint32_t low, high;
  bounds_of(block, key, is_finite_key, low, high);
  const ValueBins values(low, high);
  InPlay in_play;
  std::uint32_t counted;
  const auto is_number = [](std::uint32_t k) { return k != topk::kNanKey; };
  if (!find_part(block, key, values, is_number, wanted, in_play, counted)) return topk::kNanKey;
  bounds_of(
      block, key, [&](std::uint32_t k) { return is_number(k) && values(k) == in_play.part; }, low,
      high);
  // Heavy tails leave most keys in one part: then once more, by their keys.
  while (in_play.count > kMaxRanked + in_play.wanted && low != high) {
    clear_histogram<T>(block.shared);
    __syncthreads();
    const KeyBins keys(low, high);
    const auto in_range = [&](std::uint32_t k) { return k >= low && k <= high; };
    find_part(block, key, keys, in_range, in_play.wanted, in_play, counted);
    std::uint32_t part_low, part_high;
    bounds_of(
        block, key, [&](std::uint32_t k) { return in_range(k) && keys(k) == in_play.part; },
        part_low, part_high);
    low = part_low;
    high = part_high;
  }
  return low;
}

/// Calls sink(place, i) for each selected key[i]: places 0 … wanted − 1 by ascending position.
template <int T, class Sink>
__device__ void compact(Block<T>& block, const Selected& selected, Sink sink) {
  std::uint32_t total;
  const std::uint32_t before =
      block.exclusive_sum(static_cast<std::uint32_t>(__popc(selected.above)) |
                              static_cast<std::uint32_t>(__popc(selected.ties)) << 16,
                          total);
  std::uint32_t above = before & 0xFFFFu, ties = before >> 16;
  for (unsigned left = selected.above | selected.ties; left != 0; left &= left - 1) {
    const int i = __ffs(static_cast<int>(left)) - 1;
    const bool is_tie = selected.ties >> i & 1;
    if (!is_tie || ties < selected.wanted) sink(above + min(ties, selected.wanted), i);
    above += !is_tie;
    ties += is_tie;
  }
}

}  // namespace sparse_mla::cuda
