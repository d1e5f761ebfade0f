/// Selection from long rows in one reading: what the selectors "cuda_stream" (a block per row),
/// "cuda_cluster" and "cuda_hinted" (a cluster of blocks per row) are made of.
///
///   sample of the row, or hints ──▶ threshold
///   row (global) ──stream, score ≥ threshold──▶ survivors (shared memory)
///   survivors ──select_in_block──▶ picks
///
/// The threshold is a score that some more than k of the row are expected to reach. A block streams
/// its contiguous part of the row, a tile of T × 64 or 128 bytes at a time, the next tile's loads
/// in flight; one block-wide sum per tile gives survivors their places, so that they lie in order
/// of index whatever the timing.
///
/// No score can be lost. A full buffer is cut back to its k best, and from then on only scores
/// above the worst of those get in (equal ones come later in the row and lose the tie). Fewer than
/// k survivors – the sample or the hints misled –: the row is streamed once more without a
/// threshold. Once k have come in, an equal of the threshold would lose the tie, so it rises by one
/// step: rows with thousands of equal scores do not fill the buffer.
///
/// Sampling a threshold and filtering by it goes back to Floyd and Rivest, "Expected time bounds
/// for selection" (CACM 1975).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/ptx.cuh"
#include "kernels/cuda/device.h"
#include "topk/block_select.cuh"
#include "topk/choice.h"
#include "topk/device_rows.cuh"
#include "topk/order_by_value.cuh"
#include "topk/select_checks.h"

namespace sparse_mla::cuda {

/// A streaming block. `V`: survivors that it can hold for each of its T threads, 8 bytes each.
/// `kLoadsPerTile`: 16-byte vectors that each thread looks at together, a tile's; `kTilesInFlight`:
/// of these on their way at a time. 64 KB per SM all the time are what memory needs at a latency of
/// a microsecond to be read at 8 TB/s, more than it can give.
template <int T, int V, int kLoadsPerTile, int kTilesInFlight>
struct StreamShape {
  static constexpr int kThreads = T, kOwn = V, kCapacity = T * V;
  static constexpr int kLoads = kLoadsPerTile, kTiles = kTilesInFlight;
  static constexpr int kTileBytes = 16 * kLoads * T;
  /// Of dynamic shared memory: survivors' scores, their indices, tiles in flight.
  static constexpr int kBytes = 8 * kCapacity + kTiles * kTileBytes;
  static_assert(V % 4 == 0 && (kTiles == 1 || kTiles == 2));
};

/// Sampled scores of each thread.
inline constexpr int kSampled = 8;

struct StreamSettings {
  int k;
  std::int64_t max_row_len;
  bool by_value;
};

/// Scores that pass: those of at least a threshold, or all of them, NaN included.
class Filter {
 public:
  /// NaN: all.
  __device__ explicit Filter(float least) { set(least); }

  __device__ void set(float least) {
    least_ = least;
    all_ = least == least ? 0u : ~0u;
  }
  /// From now on those that rank before `score` whatever their index.
  __device__ void set_above(float score) {
    least_ = float_of(max(key_of(score) + 1, topk::kNegativeInfinityKey));
    all_ = 0;
  }
  __device__ float least() const { return least_; }
  __device__ bool passes(float score) const { return score >= least_; }
  /// Or'ed to the bits of passes().
  __device__ std::uint32_t all() const { return all_; }

 private:
  std::uint32_t all_;
  float least_;
};

/// A row as 16-byte vectors of memory, with a few scores before the first and behind the last. Rows
/// that are not aligned to their elements have no vectors.
template <class Element>
struct RowVectors {
  static constexpr int kVector = static_cast<int>(16 / Element::kBytes);
  const std::byte* row;
  std::int32_t len;
  std::int32_t head;   // index of the first vector's first score
  std::int32_t count;  // vectors

  __device__ RowVectors(const std::byte* scores, std::int32_t num_scores)
      : row(scores), len(num_scores) {
    const auto odd = static_cast<std::int32_t>(reinterpret_cast<std::uintptr_t>(row) % 16);
    const bool aligned = odd % Element::kBytes == 0;
    head = aligned ? min((16 - odd) % 16 / static_cast<std::int32_t>(Element::kBytes), len) : len;
    count = (len - head) / kVector;
  }
  __device__ std::int32_t tail() const { return head + count * kVector; }
  __device__ std::int32_t index(std::int32_t v) const { return head + v * kVector; }
  __device__ const uint4* address(std::int32_t v) const {
    return reinterpret_cast<const uint4*>(row + head * Element::kBytes) + v;
  }
  /// The bits of element i of a vector, as of a float.
  __device__ static std::uint32_t bits(const uint4& raw, int i) {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    if constexpr (kVector == 4)
      return words[i];
    else
      return i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000u;
  }
};

/// A block's survivors, by ascending index.
struct Survivors {
  float* scores;          // [kCapacity]
  std::int32_t* indices;  // [kCapacity], right behind the scores
};

/// A streaming block's scratch in shared memory.
struct StreamShared {
  BlockShared block;
  std::uint32_t cut_index;  // of the first survivor that found the buffer full
};

/// A thread's scores of a buffer with `filled` of them, NaN behind the last.
template <int kOwn>
__device__ void load_survivors(const Survivors& survivors, std::uint32_t filled,
                               float (&score)[kOwn]) {
  const std::uint32_t first = threadIdx.x * kOwn;
#pragma unroll
  for (int i = 0; i < kOwn; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(survivors.scores + first + i);
    const float scores[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) score[i + j] = first + i + j < filled ? scores[j] : no_score();
  }
}

/// Cuts a full buffer back to its k best, by ascending index; the worst one. Not inlined: it
/// is rare, and its registers would be everyone's. Begins and ends with a barrier.
template <class Shape>
__device__ __noinline__ float cut_survivors(BlockShared& shared, Survivors survivors,
                                            std::uint32_t k) {
  constexpr int T = Shape::kThreads, kOwn = Shape::kOwn;
  __syncthreads();
  Block<T> block(shared);
  float score[kOwn];
  load_survivors(survivors, Shape::kCapacity, score);
  const Selection selection = select_in_block(block, score, k);
  std::int32_t index[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) index[i] = survivors.indices[threadIdx.x * kOwn + i];
  std::uint32_t least = ~0u, greatest = 0;
  // All threads have read theirs before the sum that gives places.
  for_each_selected(block, score, selection, [&](std::uint32_t place, int i) {
    survivors.scores[place] = score[i];
    survivors.indices[place] = index[i];
    least = min(least, key_of(score[i]));
  });
  block.bounds(least, greatest);
  __syncthreads();  // the caller's Block may be at the same turn
  return float_of(least);
}

/// Streams scores through a filter into a buffer of survivors.
template <class Element, class Shape>
class RowStream {
 public:
  static constexpr int T = Shape::kThreads, kCapacity = Shape::kCapacity;
  static constexpr int kLoads = Shape::kLoads, kTiles = Shape::kTiles;
  static constexpr int kTileBytes = Shape::kTileBytes;
  using Vectors = RowVectors<Element>;

  /// `in_flight`: [kTiles, kLoads, T] 16-byte vectors.
  __device__ RowStream(Block<T>& block, StreamShared& shared, const Survivors& survivors,
                       const std::byte* in_flight, std::uint32_t k)
      : block_(block),
        cut_index_(shared.cut_index),
        survivors_(survivors),
        scores_(ptx::shared_address(survivors.scores)),
        in_flight_(ptx::shared_address(in_flight) + threadIdx.x * 16),
        k_(k),
        filter_(no_score()) {}

  /// Scores below `least` are left out; NaN: none. Before anything is added.
  __device__ void set_threshold(float least) { filter_.set(least); }

  __device__ std::uint32_t filled() const { return filled_; }
  __device__ void set_filled(std::uint32_t filled) { filled_ = filled; }
  /// Starts again, with a filter that lets everything pass.
  __device__ void restart() {
    filled_ = 0;
    strict_ = false;
    filter_.set(no_score());
  }

  /// Sends for the first tiles of vectors [begin, end) of a row. Their way to registers leads
  /// through shared memory, which each thread uses for itself alone: loads in flight hold no
  /// registers, and no barrier is needed.
  __device__ void prefetch(const Vectors& row, std::int32_t begin, std::int32_t end) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      load(row, begin + t * kLoads * T, end, in_flight_ + t * kTileBytes);
  }

  /// Vectors [begin, end) of a row, which have been prefetched.
  __device__ void add_vectors(const Vectors& row, std::int32_t begin, std::int32_t end) {
    constexpr int kVector = Vectors::kVector;
    std::uint32_t slot = in_flight_;
    std::int32_t done = -1;  // indices up to this one have been dealt with
    for (std::int32_t tile = begin; tile < end;) {
      raise_when_full();
      ptx::cp_async_wait<kTiles - 1>();
      uint4 raw[kLoads];
      std::uint32_t mask = 0;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        raw[j] = ptx::load_shared_16(slot + j * T * 16);
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          if (filter_.passes(__uint_as_float(Vectors::bits(raw[j], i)))) bits |= 1u << i;
        bits = (bits | filter_.all()) & ((1u << kVector) - 1);
        mask |= (vector_of(tile, j) < end ? bits : 0) << (j * kVector);
      }
      load(row, tile + kTiles * kLoads * T, end, slot);
      if (done >= 0) {
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
#pragma unroll
          for (int i = 0; i < kVector; ++i)
            if (row.index(vector_of(tile, j)) + i <= done) mask &= ~(1u << (j * kVector + i));
      }
      const bool fits = append<kLoads, kVector>(mask, [&](int j, int i) {
        return Survivor{__uint_as_float(Vectors::bits(raw[j], i)),
                        row.index(vector_of(tile, j)) + i};
      });
      if (fits) {
        tile += kLoads * T;
        if (kTiles == 2) slot = slot == in_flight_ ? in_flight_ + kTileBytes : in_flight_;
        done = -1;
      } else {  // the rest of the tile, once there is room
        done = make_room();
        ptx::cp_async_wait<0>();
        prefetch(row, tile, end);
        slot = in_flight_;
      }
    }
    ptx::cp_async_wait<0>();  // nothing is left to come
  }

  /// Scores [begin, end) of a row, one a thread at a time.
  __device__ void add_scores(const std::byte* row, std::int32_t begin, std::int32_t end) {
    add_each(end - begin, [&](std::int32_t i) {
      return Survivor{__uint_as_float(Element::bits(row, begin + i)), begin + i};
    });
  }
#if __CUDA_ARCH__ >= 900
  /// Another block's survivors, `count` of them, whose scores lie at `from` in distributed shared
  /// memory.
  __device__ void add_survivors(std::uint32_t from, std::uint32_t count) {
    add_each(static_cast<std::int32_t>(count), [&](std::int32_t i) {
      const std::uint32_t at = from + 4 * static_cast<std::uint32_t>(i);
      return Survivor{__uint_as_float(ptx::load_cluster_4(at)),
                      static_cast<std::int32_t>(ptx::load_cluster_4(at + 4 * kCapacity))};
    });
  }
#endif

 private:
  struct Survivor {
    float score;
    std::int32_t index;
  };

  /// The tile of vectors from `tile` on, as far as there are any before `end`.
  __device__ void load(const Vectors& row, std::int32_t tile, std::int32_t end,
                       std::uint32_t slot) const {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const std::int32_t v = vector_of(tile, j);
      if (v < end) ptx::cp_async_16(slot + j * T * 16, row.address(v));
    }
    ptx::cp_async_commit();
  }

  /// get(0) … get(count − 1), by ascending index.
  template <class Get>
  __device__ void add_each(std::int32_t count, Get get) {
    std::int32_t done = -1;
    for (std::int32_t tile = 0; tile < count;) {
      raise_when_full();
      const std::int32_t own = tile + static_cast<std::int32_t>(threadIdx.x);
      Survivor survivor{0, -1};
      if (own < count) survivor = get(own);
      const unsigned mask = own < count && (filter_.passes(survivor.score) || filter_.all() != 0) &&
                            survivor.index > done;
      if (append<1, 1>(mask, [&](int, int) { return survivor; })) {
        tile = count - tile > T ? tile + T : count;
        done = -1;
      } else {
        done = make_room();
      }
    }
  }

  /// A warp's vectors are neighbours: load j of it stands behind all of load j − 1.
  __device__ std::int32_t vector_of(std::int32_t tile, int j) const {
    return tile + static_cast<std::int32_t>((block_.warp * kLoads + static_cast<unsigned>(j)) * 32 +
                                            block_.lane);
  }

  __device__ void raise_when_full() {
    if (filled_ < k_ || strict_) return;
    filter_.set_above(filter_.least());
    strict_ = true;
  }

  /// Puts the survivors of `mask` – bit j·kVector + i stands for get(j, i) – behind those that are
  /// there, in the order of (warp, j, lane, i). False where not all fit: then the buffer is full
  /// and cut_index is the index of the first that is not in it. Begins without, ends with a barrier
  /// only in that case.
  template <int kTileLoads, int kVector, class Get>
  __device__ bool append(std::uint32_t mask, Get get) {
    static_assert(kTileLoads * kVector <= 32);
    // A byte of a word for each load: a warp has at most 256 survivors of one, and those before a
    // lane are at most 248. Sums modulo 2^32: whatever carries out of a byte at the last lane is
    // taken back by `own`.
    constexpr int kWords = (kTileLoads + 3) / 4;
    std::uint32_t own[kWords] = {}, before[kWords];
#pragma unroll
    for (int j = 0; j < kTileLoads; ++j)
      own[j / 4] |= static_cast<std::uint32_t>(
                        __popc(mask >> (j * kVector) & ((std::uint32_t{1} << kVector) - 1)))
                    << (j % 4 * 8);
    block_.inclusive_in_warp(own, before);
    std::uint32_t place[kTileLoads], of_warp = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      before[w] -= own[w];
      const std::uint32_t last_before = __shfl_sync(~0u, before[w], 31),
                          last_own = __shfl_sync(~0u, own[w], 31);
#pragma unroll
      for (int j = 4 * w; j < 4 * w + 4 && j < kTileLoads; ++j) {
        const int byte = j % 4 * 8;
        place[j] = of_warp + (before[w] >> byte & 0xFF);
        of_warp += (last_before >> byte & 0xFF) + (last_own >> byte & 0xFF);
      }
    }
    std::uint32_t total;
    const std::uint32_t base = filled_ + block_.sum_of_warps(of_warp, total);
    const bool fits = total <= kCapacity - filled_;
    if (fits) {
      filled_ += total;
      if (mask == 0) return true;
#pragma unroll
      for (int j = 0; j < kTileLoads; ++j) {
        std::uint32_t at = scores_ + (base + place[j]) * 4;
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          if (mask >> (j * kVector + i) & 1) {
            const Survivor survivor = get(j, i);
            ptx::store_shared_4(at, __float_as_uint(survivor.score));
            ptx::store_shared_4(at + 4 * kCapacity, static_cast<std::uint32_t>(survivor.index));
            at += 4;
          }
      }
      return true;
    }
#pragma unroll
    for (int j = 0; j < kTileLoads; ++j) {
      std::uint32_t at = base + place[j];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if ((mask >> (j * kVector + i) & 1) == 0) continue;
        const Survivor survivor = get(j, i);
        if (at < kCapacity) {
          survivors_.scores[at] = survivor.score;
          survivors_.indices[at] = survivor.index;
        } else if (at == kCapacity) {
          cut_index_ = static_cast<std::uint32_t>(survivor.index);
        }
        ++at;
      }
    }
    filled_ = kCapacity;
    __syncthreads();
    return false;
  }

  /// Cuts the full buffer back to its k best; later only greater keys than the worst of them pass.
  /// Returns the last index that append() has dealt with.
  __device__ std::int32_t make_room() {
    const auto done = static_cast<std::int32_t>(cut_index_) - 1;
    filter_.set_above(cut_survivors<Shape>(block_.shared, survivors_, k_));
    filled_ = k_;
    strict_ = true;
    return done;
  }

  Block<T>& block_;
  std::uint32_t& cut_index_;
  const Survivors survivors_;
  const std::uint32_t scores_;     // survivors_.scores in shared memory, indices right behind
  const std::uint32_t in_flight_;  // this thread's, in shared memory
  const std::uint32_t k_;
  Filter filter_;
  std::uint32_t filled_ = 0;
  bool strict_ = false;  // equals of the last k-th are kept out
};

__device__ inline int log2_of(std::uint32_t power_of_two) {
  return __ffs(static_cast<int>(power_of_two)) - 1;
}

/// How many of a sample have to reach a score for k of the row to do so, almost surely: the
/// `expected` number of the row's k best in the sample and five standard deviations (it is nearly
/// Poisson's), with some more where that is small. In long rows, of which a sample is a small part,
/// so many would not fit the buffer: down to three deviations there, rather than more than `most`.
__device__ inline std::uint32_t sample_rank(float expected, float most) {
  const float deviation = sqrtf(expected);
  return static_cast<std::uint32_t>(
      ceilf(fminf(expected + 5 * deviation + 4, fmaxf(expected + 3 * deviation + 4, most))));
}

/// 8 scores of a row for each thread, 4,096, in chunks of 64 bytes, each somewhere in its stratum
/// of the row. All blocks of a cluster read the same. Single scores would be better samples of rows
/// whose neighbours are alike, but memory gives no less than such a chunk.
struct Sample {
  float score[kSampled];
  std::uint32_t size;  // of all threads' scores
  float expected;      // of the row's k best, so many are in the sample
  float of_row;        // the sample's part of the row

  template <int T, class Element>
  static __device__ Sample take(const RowVectors<Element>& row, std::uint32_t k) {
    constexpr int kVector = RowVectors<Element>::kVector, kLoads = kSampled / kVector;
    constexpr std::uint32_t kChunk = 4;  // vectors
    constexpr std::uint32_t kStrata = kLoads * T / kChunk;
    Sample sample;
    const std::uint32_t num_chunks = static_cast<std::uint32_t>(row.count) / kChunk;
#pragma unroll
    for (int i = 0; i < kSampled; ++i) sample.score[i] = no_score();
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const std::uint32_t stratum = (static_cast<unsigned>(j) * T + threadIdx.x) / kChunk;
      const auto begin = static_cast<std::uint32_t>(std::uint64_t{num_chunks} * stratum / kStrata);
      const auto end =
          static_cast<std::uint32_t>(std::uint64_t{num_chunks} * (stratum + 1) / kStrata);
      if (begin == end) continue;
      const std::uint32_t scattered = stratum * 2654435769u;  // 2^32 / the golden ratio
      const std::uint32_t chunk = begin + __umulhi(scattered, end - begin);
      const uint4 raw =
          __ldg(row.address(static_cast<std::int32_t>(chunk * kChunk + threadIdx.x % kChunk)));
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        sample.score[j * kVector + i] = __uint_as_float(RowVectors<Element>::bits(raw, i));
    }
    sample.size = min(num_chunks, kStrata) * kChunk * kVector;
    sample.of_row = __fdividef(static_cast<float>(sample.size), static_cast<float>(row.len));
    sample.expected = static_cast<float>(k) * sample.of_row;
    return sample;
  }

  /// A score that k of the row reach, almost surely, and not many more than 70 % of `capacity`.
  template <int T>
  __device__ Threshold threshold(Block<T>& block, int capacity) const {
    const std::uint32_t rank = sample_rank(expected, 0.7f * static_cast<float>(capacity) * of_row);
    if (rank > size / 2) return {no_score(), 0};  // nothing worth leaving out
    return threshold_in_block(block, score, rank);
  }
};

/// The row's scores from `begin` on, of a cluster of blocks or of one: which are a block's.
struct Part {
  std::int32_t begin, end;  // vectors
  bool first, last;         // has the scores before and behind the vectors

  /// Parts of equal length, the last ones shorter. `blocks` is a power of two.
  __device__ Part(std::int32_t count, unsigned rank, unsigned blocks) {
    const auto length = static_cast<std::int32_t>(
        (static_cast<std::uint32_t>(count) + blocks - 1) >> log2_of(blocks));
    begin = min(static_cast<std::int32_t>(rank) * length, count);
    end = min(begin + length, count);
    first = rank == 0;
    last = rank == blocks - 1;
  }
};

/// Streams a block's part of a row, whose vectors have been prefetched.
template <class Element, class Shape>
__device__ void add_part(RowStream<Element, Shape>& stream, const RowVectors<Element>& row,
                         const Part& part) {
#pragma unroll 1  // the code of add_scores once
  for (int piece = 0; piece < 3; ++piece) {
    if (piece == 1)
      stream.add_vectors(row, part.begin, part.end);
    else if (piece == 0 && part.first)
      stream.add_scores(row.row, 0, row.head);
    else if (piece == 2 && part.last)
      stream.add_scores(row.row, row.tail(), row.len);
  }
}

/// Writes picks [place, place + count) of row r, all of them survivors at `positions`.
template <class Element, class Shape>
__device__ void put_survivors(const PickWriter& writer, bool indices_only,
                              const Survivors& survivors, const std::uint16_t* positions,
                              std::int32_t place, std::int32_t count) {
  for (std::int32_t j = static_cast<int>(threadIdx.x); j < count; j += Shape::kThreads) {
    const std::uint16_t at = positions[j];
    const std::int32_t index = survivors.indices[at];
    if (indices_only)
      writer.indices()[place + j] = index;
    else
      writer.put(place + j, index, __float_as_uint(survivors.scores[at]));
  }
}

/// Lists the positions of the k best of `filled` survivors, at most V a thread.
template <int V, int T>
__device__ void list_best(Block<T>& block, const Survivors& survivors, std::uint32_t filled,
                          std::uint32_t k, const Threshold& threshold, std::uint16_t* positions) {
  block.idle = (threadIdx.x - threadIdx.x % 32) * V >= filled;
  float score[V];
  load_survivors(survivors, filled, score);
  list_selected(block, score, select_in_block(block, score, k, &threshold), positions);
}

/// Selects the k best of `filled` survivors and writes them as the picks of row r: all of its
/// picks. `dynamic` holds the survivors. Begins with a barrier.
template <class Element, class Shape>
__device__ void finish_row(const SelectCall& call, const StreamSettings& settings, std::int64_t r,
                           const DeviceRow& row, Block<Shape::kThreads>& block,
                           const Survivors& survivors, std::uint32_t filled,
                           const Threshold& threshold, std::byte* dynamic) {
  // Where vectors were in flight.
  auto* const positions = reinterpret_cast<std::uint16_t*>(dynamic + 8 * Shape::kCapacity);
  const auto k = static_cast<std::uint32_t>(settings.k);
  __syncthreads();
  constexpr int kUsual = 8;  // a good threshold lets some 3,400 through: they keep most warps busy
  if (filled <= kUsual * Shape::kThreads)
    list_best<kUsual>(block, survivors, filled, k, threshold, positions);
  else
    list_best<Shape::kOwn>(block, survivors, filled, k, threshold, positions);
  __syncthreads();
  const PickWriter writer(call, r, row.out_row);
  put_survivors<Element, Shape>(writer, settings.by_value, survivors, positions, 0, settings.k);
  if (!settings.by_value) return;
  order_by_value<Element>(row.scores, writer.indices(), settings.k,
                          reinterpret_cast<std::uint64_t*>(dynamic));
  put_extras<Element>(writer, row.scores, settings.k);
}

/// Writes the picks of a row that has no more than k scores.
template <class Element, class Shape>
__device__ void put_whole_row(const SelectCall& call, const StreamSettings& settings,
                              std::int64_t r, const DeviceRow& row, std::byte* dynamic) {
  const PickWriter writer(call, r, row.out_row);
  for (std::int32_t j = static_cast<int>(threadIdx.x); j < row.len; j += Shape::kThreads)
    if (settings.by_value)  // the rest when the picks are in order
      writer.indices()[j] = j;
    else
      writer.put(j, j, writer.wants_values() ? Element::bits(row.scores, j) : 0);
  if (settings.by_value) {
    order_by_value<Element>(row.scores, writer.indices(), row.len,
                            reinterpret_cast<std::uint64_t*>(dynamic));
    put_extras<Element>(writer, row.scores, row.len);
  }
  writer.pad(row.len, settings.k, static_cast<int>(threadIdx.x), Shape::kThreads);
}

/// Why a selector that streams cannot serve a problem, if its blocks need that compute capability
/// and so much shared memory. A cut has to free a part of the buffer: a third of the smaller one.
inline std::string why_no_streams(const SelectProblem& problem, int capability, int shared_bytes) {
  if (problem.k > topk::kMaxStreamedPicks)
    return "k: got " + std::to_string(problem.k) + ", expected at most " +
           std::to_string(topk::kMaxStreamedPicks) + ", what a block keeps when its buffer is full";
  const std::string reason = why_no_device(capability);
  return reason.empty() ? why_no_shared(shared_bytes) : reason;
}

/// Entry::workspace_bytes of the selectors that stream.
inline std::size_t no_workspace(const SelectProblem& problem) {
  topk::validate(problem);
  return 0;
}

}  // namespace sparse_mla::cuda
