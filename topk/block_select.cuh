/// Exact selection by one thread block among scores that its threads hold in registers, V of each
/// of T threads: the part that all of our own CUDA selectors end in.
///
/// Thread t's scores are the positions t·V … t·V + V − 1; of equal ones the lower position wins. A
/// thread without enough scores holds NaN in its last places, and so do all threads behind it:
/// those rank behind every other.
///
/// Method: the bounds of the finite scores; a histogram over kParts equal parts of *that* range, so
/// that narrow data spread as well as wide; the part with the k-th score. It holds a few scores as
/// a rule: those are ranked against each other. Many there (heavy tails, ties): the bounds of their
/// keys, and a histogram over equal parts of that range of integers, which takes 10 bits off the
/// range each time whatever the data; equal bounds mean ties. (Radix selection and, by the range of
/// the data, bucket selection: Alabi, Blanchard, Gordon, Steinbach, "Fast k-selection algorithms
/// for graphics processing units", JEA 17, 2012.)
///
/// What counts at a few thousand scores is instructions: some 15 per score, and the barriers.
#pragma once

#include <cfloat>
#include <cstdint>

#include <cuda/std/bit>

#include "topk/ordered_key.h"

namespace sparse_mla::cuda {

/// Parts of a histogram: 1,024 leave some 20 of 8,192 normal keys in the k-th key's part, and every
/// thread sums one or two of them.
inline constexpr int kParts = 1024;
/// Keys that are ranked by comparing each with all: their threads make that many comparisons.
inline constexpr int kMaxRanked = 64;

/// A block's scratch in shared memory.
struct BlockShared {
  std::uint32_t histogram[kParts];
  std::uint64_t ranked[kMaxRanked];
  std::uint32_t of_warp[2][2][32];   // partial results of sums and bounds; calls take turns
  std::uint32_t ranked_selected[2];  // bits of the kMaxRanked
  std::uint32_t part, above, in_part;
};

/// Sums and bounds over a block of T threads. One barrier a call: who writes a turn's words again
/// has passed the barrier that followed their last reading.
template <int T>
class Block {
 public:
  static constexpr int kWarps = T / 32;

  /// A warp none of whose threads has a score is idle: it only comes to the barriers.
  __device__ explicit Block(BlockShared& scratch, bool has_no_scores = false)
      : shared(scratch), lane(threadIdx.x % 32), warp(threadIdx.x / 32), idle(has_no_scores) {}

  /// The sum over the threads before this one; `total` over all.
  __device__ std::uint32_t exclusive_sum(std::uint32_t value, std::uint32_t& total) {
    const std::uint32_t own[1] = {value};
    std::uint32_t sum[1];
    inclusive_in_warp(own, sum);
    const std::uint32_t inclusive = sum[0];
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

  /// kSums sums over the lanes up to this one.
  template <int kSums>
  __device__ void inclusive_in_warp(const std::uint32_t (&value)[kSums],
                                    std::uint32_t (&sum)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] = value[i];
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2)
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const std::uint32_t other = __shfl_up_sync(~0u, sum[i], step);
        if (lane >= step) sum[i] += other;
      }
  }

  BlockShared& shared;
  const unsigned lane, warp;
  bool idle;

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
__device__ inline std::uint32_t key_of(float score) {
  return topk::ordered_key(__float_as_uint(score));
}

/// What stands for a score that is not there: a NaN.
__device__ inline float no_score() { return __uint_as_float(0x7FFFFFFFu); }

/// A score that some share of a row reaches, no_score() for none, and what hardly any exceeds.
struct Threshold {
  float least, greatest;
};

/// Bounds of the scores for which in(i), as keys: the block's. low > high where there are none.
template <int T, int V, class In>
__device__ void bounds_of(Block<T>& block, const float (&score)[V], In in, std::uint32_t& low,
                          std::uint32_t& high) {
  low = ~0u;
  high = 0;
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (in(i)) {
      low = min(low, key_of(score[i]));
      high = max(high, key_of(score[i]));
    }
  block.bounds(low, high);
}

/// Equal parts of the range of the finite scores. The part of a score is a number in the mantissa
/// of a float, kFirst + part: one rounding of a product that grows with the score, so that a
/// greater score never has a lesser part. +inf has the last part; −inf and NaN have none.
class ValueParts {
 public:
  /// Of the range that is `known`, else of the finite scores' bounds. With a barrier.
  template <int T, int V>
  __device__ ValueParts(Block<T>& block, const float (&score)[V], const Threshold* known) {
    if (known != nullptr && known->least >= -FLT_MAX && known->greatest <= FLT_MAX &&
        known->least <= known->greatest) {
      set(known->least, known->greatest);
      __syncthreads();
      return;
    }
    float least = __int_as_float(0x7F800000), greatest = -least;
    if (!block.idle) {
#pragma unroll
      for (int i = 0; i < V; ++i) {  // NaNs do not count
        least = fminf(least, score[i]);
        greatest = fmaxf(greatest, score[i]);
      }
    }
    std::uint32_t low = key_of(least), high = key_of(greatest);
    block.bounds(low, high);
    if (low <= topk::kNegativeInfinityKey || high >= topk::kPositiveInfinityKey)
      bounds_of(
          block, score, [&](int i) { return fabsf(score[i]) <= FLT_MAX; }, low, high);
    set(low <= high ? float_of(low) : 0, low <= high ? float_of(high) : 0);
  }
  __device__ float high() const { return low_ + width_; }
  __device__ float place(float score) const { return fmaf(score - low_, scale_, kFirst); }
  /// Its part; at least kParts for a score without one.
  __device__ std::uint32_t part(float score) const {
    const std::uint32_t part = __float_as_uint(place(score)) - __float_as_uint(kFirst);
    return score >= low_ ? min(part, kParts - 1u) : ~0u;
  }
  /// place() of the part's scores is at least this …
  __device__ static float edge(std::uint32_t part) { return kFirst + static_cast<float>(part); }
  /// … and of those above the part greater than this.
  __device__ static float edge_above(std::uint32_t part) {
    return part == kParts - 1 ? __int_as_float(0x7F800000) : edge(part);
  }
  /// A score that all of the part and of those above it reach, and few below it.
  __device__ float threshold(std::uint32_t part) const {
    const float parts = static_cast<float>(max(part, 2u) - 2);  // rounding is less than that
    return fmaf(parts, width_ * (1.0f / (kParts - 1)), low_);
  }

 private:
  __device__ void set(float low, float high) {
    low_ = low;
    width_ = high - low;
    // Neither 0, which times +inf is NaN (a width that overflows), nor +inf (none).
    scale_ = fminf(fmaxf(__fdividef(kParts - 1, width_), FLT_MIN), FLT_MAX);
  }

  static constexpr float kFirst = 8388608.0f;  // 2^23: from here on floats are whole numbers
  float low_, width_, scale_;
};

/// What is known of the k-th score: of the scores of `part` those in play, of which the first
/// `wanted` in order are selected; all that rank before them are selected.
struct InPlay {
  std::uint32_t part, wanted, count;
};

/// Clears the histogram; a barrier has to follow before find_part().
template <int T>
__device__ void clear_histogram(BlockShared& shared) {
#pragma unroll
  for (int part = 0; part < kParts / T; ++part) shared.histogram[part * T + threadIdx.x] = 0;
}

/// Finds the part of the wanted-th of the scores i = 0 … V − 1 of each thread that have one,
/// part_of(i) < kParts. False, with their number in `counted`, where they are fewer. The histogram
/// has to be clear.
template <int T, int V, class PartOf>
__device__ bool find_part(Block<T>& block, PartOf part_of, std::uint32_t wanted, InPlay& in_play,
                          std::uint32_t& counted) {
  BlockShared& shared = block.shared;
  if (!block.idle) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const std::uint32_t part = part_of(i);
      if (part < kParts) atomicAdd(&shared.histogram[part], 1u);
    }
  }
  __syncthreads();
  constexpr int kOwn = kParts / T;  // thread 0 has the highest
  const std::uint32_t* const own = shared.histogram + (T - 1 - threadIdx.x) * kOwn;
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += own[i];
  std::uint32_t above = block.exclusive_sum(sum, counted);
  if (counted < wanted) return false;
  if (above < wanted && wanted <= above + sum) {
    int i = kOwn - 1;
    while (wanted > above + own[i]) above += own[i--];
    shared.part = (T - 1 - threadIdx.x) * kOwn + static_cast<unsigned>(i);
    shared.above = above;
    shared.in_part = own[i];
  }
  __syncthreads();
  in_play = {shared.part, wanted - shared.above, shared.in_part};
  return true;
}

/// A range of keys in play, whose bounds are keys in play themselves: greater ones are selected.
struct KeyRange {
  std::uint32_t low, high;

  __device__ bool has(float score) const {
    const std::uint32_t key = key_of(score);
    return key >= low && key <= high;
  }
  /// The part of a score in [low, low + 2^(10 + shift)) that holds the range.
  __device__ std::uint32_t part(float score) const {
    const std::uint32_t key = key_of(score);
    return key >= low && key <= high ? (key - low) >> shift() : ~0u;
  }
  __device__ int shift() const { return max(22 - ::cuda::std::countl_zero(high - low), 0); }
};

/// Narrows a range of keys until at most `enough` are in play or they are equal.
template <int T, int V>
__device__ void narrow(Block<T>& block, const float (&score)[V], std::uint32_t enough,
                       KeyRange& range, InPlay& in_play) {
  while (in_play.count > enough && in_play.count != in_play.wanted && range.low != range.high) {
    clear_histogram<T>(block.shared);
    __syncthreads();
    std::uint32_t counted;
    find_part<T, V>(
        block, [&](int i) { return range.part(score[i]); }, in_play.wanted, in_play, counted);
    KeyRange part;
    bounds_of(
        block, score, [&](int i) { return range.part(score[i]) == in_play.part; }, part.low,
        part.high);
    range = part;
  }
}

/// A thread's part of a selection: all scores of `above`, and `wanted` of all threads' scores of
/// `in`, of which there are `count`: the best, or where they are `equal` (or all are wanted) the
/// first. Bit i stands for score[i].
struct Selection {
  unsigned above, in;
  std::uint32_t wanted, count;
  bool equal;
};

/// The selection from a range of keys.
template <int T, int V>
__device__ Selection select_in_range(Block<T>& block, const float (&score)[V], KeyRange range,
                                     InPlay in_play) {
  narrow(block, score, kMaxRanked, range, in_play);
  Selection selection{0, 0, in_play.wanted, in_play.count, range.low == range.high};
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (range.has(score[i])) selection.in |= 1u << i;
    if (key_of(score[i]) > range.high) selection.above |= 1u << i;
  }
  return selection;
}

/// Selects `wanted` (1 … T·V) of the block's scores. Begins and ends without a barrier: what the
/// scratch held before must not be read any more, and it may be in use still. `known`: no score but
/// NaN is below `least`; `greatest` need not be exact.
template <int T, int V>
__device__ Selection select_in_block(Block<T>& block, const float (&score)[V], std::uint32_t wanted,
                                     const Threshold* known = nullptr) {
  clear_histogram<T>(block.shared);
  const ValueParts parts(block, score, known);
  InPlay in_play;
  std::uint32_t counted;
  if (!find_part<T, V>(
          block, [&](int i) { return parts.part(score[i]); }, wanted, in_play, counted)) {
    // All finite scores and +inf, then −inf, then NaN.
    KeyRange range;
    const auto rest = [&](int i) { return !(score[i] >= -FLT_MAX); };
    bounds_of(block, score, rest, range.low, range.high);
    return select_in_range(block, score, range, {0, wanted - counted, T * V - counted});
  }
  const float edge = parts.edge(in_play.part), edge_above = parts.edge_above(in_play.part);
  unsigned at_or_above = 0, above = 0;
  if (!block.idle) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float place = parts.place(score[i]);
      if (place >= edge) at_or_above |= 1u << i;
      if (place > edge_above) above |= 1u << i;
    }
  }
  const unsigned in = at_or_above & ~above;
  if (in_play.count <= kMaxRanked || in_play.count == in_play.wanted)
    return {above, in, in_play.wanted, in_play.count, false};
  KeyRange range;
  bounds_of(
      block, score, [&](int i) { return (in >> i & 1) != 0; }, range.low, range.high);
  return select_in_range(block, score, range, in_play);
}

/// A score that at least about `wanted` of the block's scores reach, and not many more; none where
/// fewer than `wanted` are finite or +inf.
template <int T, int V>
__device__ Threshold threshold_in_block(Block<T>& block, const float (&score)[V],
                                        std::uint32_t wanted) {
  clear_histogram<T>(block.shared);
  const ValueParts parts(block, score, nullptr);
  InPlay in_play;
  std::uint32_t counted;
  if (!find_part<T, V>(
          block, [&](int i) { return parts.part(score[i]); }, wanted, in_play, counted))
    return {no_score(), 0};
  if (in_play.count <= kMaxRanked + in_play.wanted)
    return {parts.threshold(in_play.part), parts.high()};
  KeyRange range;  // heavy tails leave most scores in one part
  bounds_of(
      block, score, [&](int i) { return parts.part(score[i]) == in_play.part; }, range.low,
      range.high);
  narrow(block, score, kMaxRanked + in_play.wanted, range, in_play);
  return {float_of(range.low), parts.high()};
}

/// Calls sink(place, i) for each selected score[i]: places ascend with the positions.
template <int T, int V, class Sink>
__device__ void for_each_selected(Block<T>& block, const float (&score)[V],
                                  const Selection& selection, Sink sink) {
  static_assert(T * V < 1 << 16, "two counts share a word");
  BlockShared& shared = block.shared;
  std::uint32_t total;
  const std::uint32_t before =
      block.exclusive_sum(static_cast<std::uint32_t>(__popc(selection.above)) |
                              static_cast<std::uint32_t>(__popc(selection.in)) << 16,
                          total);
  const std::uint32_t in_before = before >> 16;
  std::uint32_t place = before & 0xFFFFu;
  unsigned selected = selection.above;
  if (selection.equal || selection.count == selection.wanted) {
    place += min(in_before, selection.wanted);
    std::uint32_t left = selection.wanted - min(in_before, selection.wanted);
    for (unsigned in = selection.in; in != 0 && left != 0; in &= in - 1, --left)
      selected |= in & (0u - in);
  } else {
    // Ranked against each other, one a thread; they stand by position, the tie's order.
    std::uint32_t n = in_before;
    if (selection.in != 0) {
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (selection.in >> i & 1) {
          shared.ranked[n] = topk::packed_rank(key_of(score[i]), n);
          ++n;
        }
    }
    __syncthreads();
    if (block.warp < kMaxRanked / 32) {
      bool wins = false;
      if (threadIdx.x < selection.count) {
        const std::uint64_t own = shared.ranked[threadIdx.x];
        std::uint32_t better = 0;
#pragma unroll 8
        for (std::uint32_t j = 0; j < selection.count; ++j) better += shared.ranked[j] < own;
        wins = better < selection.wanted;
      }
      const std::uint32_t bits = __ballot_sync(~0u, wins);
      if (block.lane == 0) shared.ranked_selected[block.warp] = bits;
    }
    __syncthreads();
    const std::uint64_t bits = shared.ranked_selected[0] | std::uint64_t{shared.ranked_selected[1]}
                                                               << 32;
    std::uint64_t own = 0;  // bit i: the i-th of this thread's is selected
    if (in_before < kMaxRanked) {
      own = bits >> in_before;
      place += static_cast<std::uint32_t>(__popcll(bits & ((std::uint64_t{1} << in_before) - 1)));
    } else {
      place += selection.wanted;  // all of them
    }
    for (unsigned in = selection.in; in != 0; in &= in - 1, own >>= 1)
      if (own & 1) selected |= in & (0u - in);
  }
  if (selected == 0) return;
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (selected >> i & 1) sink(place++, i);
}

/// Lists the positions of the selected scores, ascending. A barrier is still to come.
template <int T, int V>
__device__ void list_selected(Block<T>& block, const float (&score)[V], const Selection& selection,
                              std::uint16_t* positions) {
  for_each_selected(block, score, selection, [&](std::uint32_t place, int i) {
    positions[place] = static_cast<std::uint16_t>(threadIdx.x * V + static_cast<unsigned>(i));
  });
}

}  // namespace sparse_mla::cuda
