/// `attend` on Hopper's warpgroup products: MHA of 128 query rows × one head per work item, 128
/// keys at a time. (The schedule inside a warpgroup is FlashAttention-3's: Shah et al., 2024.)
#pragma once

#include <cfloat>
#include <cstddef>
#include <cstdint>

#include <cuda.h>

#include "kernels/cuda/attend_plan.cuh"
#include "kernels/cuda/attend_tile.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace sparse_mla::sm90 {

using cuda::AttendArguments;
using cuda::AttendPlan;
using cuda::AttendWork;
using cuda::KeyRange;

/// Widths of DeepSeek-V3.2 and the tile that follows from them.
struct MhaShape {
  static constexpr int kNope = 128, kRope = 64, kQk = kNope + kRope, kValue = 128;
  /// Warpgroups that compute, 64 query rows each (the rows of one wgmma). Two of them: 64 sums of
  /// the output, 64 scores and 32 registers of weights per thread leave no room for a third.
  static constexpr int kGroups = 2, kGroupRows = 64, kRows = kGroups * kGroupRows;
  /// 128 keys: with 64, the 64 rows of Q that a product reads beside K would keep shared memory
  /// busy for as long as the product takes.
  static constexpr int kKeys = 128;
  /// Blocks of K and of V that are on their way or in use.
  static constexpr int kStages = 2;
  static constexpr int kGroupThreads = 128, kThreads = (1 + kGroups) * kGroupThreads;
  /// Steps of S (16 of the head width's columns each) whose part of Q is kept in registers: each
  /// spares a warpgroup 2 KB of the 6 that its product would read from shared memory. All twelve do
  /// not fit beside the scores, the weights and the output.
  static constexpr int kHeldSteps = 8;
  /// Blocks before the end of an item at which the next one is looked up.
  static constexpr int kAskAhead = 6;
  /// Registers per thread: 40 · 128 + 232 · 256 = 64,512 of 65,536.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  // Shared memory, bytes: slabs of 64 columns, 128 rows of 128 bytes each, swizzled.
  static constexpr int kSlabColumns = 64, kSlabBytes = 128 * 128;
  static constexpr int kQueryBytes = kQk / kSlabColumns * kSlabBytes;
  static constexpr int kKeyBytes = kQk / kSlabColumns * kSlabBytes;
  static constexpr int kValueBytes = kValue / kSlabColumns * kSlabBytes;
  /// A slab starts at a multiple of the swizzle's 1,024 bytes; so much may be lost before the
  /// first.
  static constexpr int kAlignment = 1024;
  static constexpr int kSharedBytes =
      kQueryBytes + kStages * (kKeyBytes + kValueBytes) + kAlignment;
  static_assert(kRows == 128 && kKeys == 128, "a slab is 128 rows");
};

struct MhaMaps {
  CUtensorMap q, k_nope, k_pe, v;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// A work item on its way from the scheduler to the producer and the consumers.
struct MhaItem {
  AttendWork work;
  ChunkMember member;
  MaskMember mask;  // mode masked only
  KeyRange keys;
  std::int32_t first_key;  // of the first block; keys.end where its rows see nothing
  std::uint32_t lists[MhaShape::kGroups];  // KeyWalk's, that a group's rows touch; masked only
  bool none;                               // there is no more work
};
/// Block of 128 keys in a stage.
struct alignas(16) MhaBlock {
  std::int32_t key;        // the first, request-local
  std::int32_t following;  // the next block's; no key of the item: this is the last
  std::uint32_t groups;    // bit g: warpgroup g attends it; at least one does
  std::uint32_t last;      // of the work item
};
/// Phases of a stage are counted by the uses of all stages before.
struct StageUse {
  std::uint32_t use;
  __device__ int stage() const { return static_cast<int>(use % MhaShape::kStages); }
  __device__ std::uint32_t parity() const { return use / MhaShape::kStages % 2; }
};

/// Everything in shared memory but the tiles.
struct MhaShared {
  // "full": the producer's arrival and the bytes of the copies; "empty": every consumer warp's.
  std::uint64_t full_q, empty_q;
  std::uint64_t full_k[MhaShape::kStages], empty_k[MhaShape::kStages];
  std::uint64_t full_v[MhaShape::kStages], empty_v[MhaShape::kStages];
  std::uint64_t wanted, ready;  // the next item: by the producer; for it
  MhaBlock blocks[MhaShape::kStages];
  MhaItem items[3];        // the next one's, the producer's, the consumers'
  cuda::KeyWalk walks[2];  // the next item's, the producer's; masked only
};
static_assert(sizeof(MhaBlock) == 16);
/// Where its barriers and blocks lie: shared-memory addresses.
struct MhaBarriers {
  std::uint32_t base;
  __device__ std::uint32_t full_q() const { return base + offsetof(MhaShared, full_q); }
  __device__ std::uint32_t empty_q() const { return base + offsetof(MhaShared, empty_q); }
  __device__ std::uint32_t full_k(int stage) const {
    return of(offsetof(MhaShared, full_k), stage);
  }
  __device__ std::uint32_t empty_k(int stage) const {
    return of(offsetof(MhaShared, empty_k), stage);
  }
  __device__ std::uint32_t full_v(int stage) const {
    return of(offsetof(MhaShared, full_v), stage);
  }
  __device__ std::uint32_t empty_v(int stage) const {
    return of(offsetof(MhaShared, empty_v), stage);
  }
  __device__ std::uint32_t wanted() const { return base + offsetof(MhaShared, wanted); }
  __device__ std::uint32_t ready() const { return base + offsetof(MhaShared, ready); }
  __device__ MhaBlock block(int stage) const {
    const uint4 four = ptx::load_shared_16(
        base + static_cast<std::uint32_t>(offsetof(MhaShared, blocks)) + stage * 16);
    return {static_cast<std::int32_t>(four.x), static_cast<std::int32_t>(four.y), four.z, four.w};
  }

 private:
  __device__ std::uint32_t of(std::size_t first, int stage) const {
    return base + static_cast<std::uint32_t>(first) + stage * 8;
  }
};

/// Request-local end of the keys that a query row of the member can see, masks aside.
__device__ inline int visible_end(const AttendArguments& args, const ChunkMember& member,
                                  const KeyRange& keys, int row) {
  if (!args.causal) return keys.end;
  return static_cast<int>(min(std::int64_t{keys.end}, std::int64_t{member.context_len} + row + 1));
}

/// Where the tiles lie: shared-memory addresses.
struct MhaTiles {
  std::uint32_t q;
  __device__ std::uint32_t k(int stage) const {
    return q + MhaShape::kQueryBytes + stage * MhaShape::kKeyBytes;
  }
  __device__ std::uint32_t v(int stage) const {
    return q + MhaShape::kQueryBytes + MhaShape::kStages * MhaShape::kKeyBytes +
           stage * MhaShape::kValueBytes;
  }
};

/// The scheduler warp: takes work from the common counter and looks up where it lies, while the
/// producer is at the last blocks of the item before it. That chain of dependent reads takes longer
/// than the two stages last.
template <bool kMasked>
__device__ __forceinline__ void schedule(const AttendArguments& args, const AttendPlan& plan,
                                         MhaShared& shared, const MhaBarriers& barriers) {
  using Shape = MhaShape;
  const int lane = threadIdx.x % 32;
  for (std::uint32_t count = 0;; ++count) {
    // The producer has begun with the item before this one: consumers are done with what its slot
    // held.
    if (count > 0) ptx::block_mbarrier_wait(barriers.wanted(), (count - 1) % 2);
    MhaItem& item = shared.items[count % 3];
    AttendWork work = {};
    const bool any = cuda::next_work(plan, args.num_heads, work);
    if (lane == 0) {
      item.none = !any;
      if (any) {
        item.work = work;
        item.member = args.members[work.item.member];
        if constexpr (kMasked) item.mask = args.mask_members[work.item.member];
        item.keys = cuda::piece_keys<Shape::kKeys>(
            args, item.member, min(work.item.row + Shape::kRows, item.member.query_len), work.item);
        item.first_key = item.keys.begin;
      }
    }
    __syncwarp();
    if constexpr (kMasked)
      if (any && item.keys.begin < item.keys.end) {
        cuda::KeyWalk& walk = shared.walks[count % 2];
        const int row = work.item.row, row_end = min(row + Shape::kRows, item.member.query_len);
        walk.start(args, item.mask, row, row_end, item.keys.begin);
        const int first_key = walk.next(args, item.keys.begin);
        if (lane < Shape::kGroups) {
          const int begin = row + lane * Shape::kGroupRows;
          const int end = min(begin + Shape::kGroupRows, row_end);
          const int first = row / args.mask_tile.queries;
          const int low = begin / args.mask_tile.queries - first;
          const int high = (end - 1) / args.mask_tile.queries - first;
          // Where there are more than 32 lists every block counts as on all of them.
          item.lists[lane] = begin >= end ? 0u
                             : high >= 31 ? ~0u
                                          : ((2u << high) - 1) & (~0u << low);
        }
        if (lane == 0) item.first_key = first_key;
        ptx::cp_async_wait<0>();
        __syncwarp();
      }
    if (lane == 0) ptx::block_mbarrier_arrive(barriers.ready());
    if (!any) return;
  }
}

/// The producer warp: walks the key blocks of one item after the other and starts all copies. K of
/// a block is asked for before V of the block in front of it, in the order in which they are
/// needed.
template <bool kMasked>
__device__ __forceinline__ void produce(const MhaMaps& maps, const AttendArguments& args,
                                        MhaShared& shared, const MhaBarriers& barriers,
                                        const MhaTiles& tiles) {
  using Shape = MhaShape;
  constexpr int kSlabs = Shape::kSlabBytes, kColumns = Shape::kSlabColumns;
  const int lane = threadIdx.x % 32;
  StageUse block{0};
  for (std::uint32_t count = 0;; ++count) {
    ptx::block_mbarrier_wait(barriers.ready(), count % 2);
    const MhaItem& item = shared.items[count % 3];
    ptx::block_mbarrier_wait(barriers.empty_q(), count % 2 ^ 1);
    if (item.none) {
      if (lane == 0) ptx::block_mbarrier_arrive(barriers.full_q());
      return;
    }
    const int key_end = item.keys.end, head = item.work.head, row = item.work.item.row;
    const int row_end = min(row + Shape::kRows, item.member.query_len);
    int key = item.first_key;
    if (lane == 0) {
      if (key < key_end) {
        ptx::block_mbarrier_arrive_expecting(barriers.full_q(), Shape::kQueryBytes);
#pragma unroll
        for (int slab = 0; slab < Shape::kQk / kColumns; ++slab)
          ptx::copy_box_3d(tiles.q + slab * kSlabs, &maps.q, barriers.full_q(), slab * kColumns,
                           head, item.member.query_start + row);
      } else {
        ptx::block_mbarrier_arrive(barriers.full_q());
        ptx::block_mbarrier_arrive(barriers.wanted());
      }
    }
    if (key >= key_end) continue;

    cuda::KeyWalk& walk = shared.walks[count % 2];
    // The groups that attend the block at `key`.
    const auto groups_at = [&](int key) {
      std::uint32_t groups = 0;
      [[maybe_unused]] unsigned visitors = 0;
      if constexpr (kMasked) visitors = walk.visitors(args, key + Shape::kKeys);
#pragma unroll
      for (int g = 0; g < Shape::kGroups; ++g) {
        const int begin = row + g * Shape::kGroupRows;
        const int end = min(begin + Shape::kGroupRows, row_end);
        const bool sees =
            kMasked ? (visitors & item.lists[g]) != 0
                    : begin < end && key < visible_end(args, item.member, item.keys, end - 1);
        groups |= sees ? 1u << g : 0u;
      }
      return groups;
    };
    const int key_row = item.member.key_row - item.member.first_key;  // row of K and V of key 0
    const auto copy_values = [&](const StageUse& use, int key) {
      const int stage = use.stage();
      ptx::block_mbarrier_wait(barriers.empty_v(stage), use.parity() ^ 1);
      if (lane == 0) {
        ptx::block_mbarrier_arrive_expecting(barriers.full_v(stage), Shape::kValueBytes);
#pragma unroll
        for (int slab = 0; slab < Shape::kValue / kColumns; ++slab)
          ptx::copy_box_3d(tiles.v(stage) + slab * kSlabs, &maps.v, barriers.full_v(stage),
                           slab * kColumns, head, key_row + key);
      }
    };
    int before = -1;  // the block whose V is still to be copied
    bool asked = false;
    while (key < key_end) {
      const std::uint32_t groups = groups_at(key);
      int following = key + Shape::kKeys;
      if constexpr (kMasked) {
        following = walk.next(args, following);
        ptx::cp_async_wait<0>();
        __syncwarp();
      }
      const bool last = following >= key_end;
      if (!asked && (last || key + Shape::kAskAhead * Shape::kKeys >= key_end)) {
        asked = true;
        if (lane == 0) ptx::block_mbarrier_arrive(barriers.wanted());
      }
      const int stage = block.stage();
      ptx::block_mbarrier_wait(barriers.empty_k(stage), block.parity() ^ 1);
      if (lane == 0) {
        shared.blocks[stage] = {key, following, groups, last};
        ptx::block_mbarrier_arrive_expecting(barriers.full_k(stage), Shape::kKeyBytes);
#pragma unroll
        for (int slab = 0; slab < Shape::kNope / kColumns; ++slab)
          ptx::copy_box_3d(tiles.k(stage) + slab * kSlabs, &maps.k_nope, barriers.full_k(stage),
                           slab * kColumns, head, key_row + key);
#pragma unroll
        for (int slab = 0; slab < Shape::kRope / kColumns; ++slab)
          ptx::copy_box_2d(tiles.k(stage) + (Shape::kNope / kColumns + slab) * kSlabs, &maps.k_pe,
                           barriers.full_k(stage), slab * kColumns, key_row + key);
      }
      if (before >= 0) copy_values({block.use - 1}, before);
      before = key;
      key = following;
      ++block.use;
    }
    copy_values({block.use - 1}, before);
  }
}

/// `x`, the same in all lanes, in a way that tells the compiler so: descriptors are then computed
/// in uniform registers.
__device__ inline std::uint32_t uniform(std::uint32_t x) { return __shfl_sync(~0u, x, 0); }

/// What `sum`, which is not negative, is made from stays in front of what follows: else the
/// compiler computes the exponentials where their results are needed, behind the wait for the
/// product that they are to run beside. A branch that is never taken, which only `sum` tells.
__device__ __forceinline__ void stay_in_front(float sum) {
  if (__any_sync(~0u, sum < 0)) asm volatile("nanosleep.u32 0;");
}

/// What a thread knows of its rows g and g + 8 of its warp's sixteen.
struct RowSums {
  float maximum[2];  // of the logits so far, times log2 e; finite from the start
  float sum[2];      // the thread's share of the weights' sum
};

/// A warpgroup's 64 rows of Q as the A operand of S, 16 columns a step: the first steps' in
/// registers, read once per work item, the others in shared memory.
struct QueryRows {
  static constexpr int kSteps = MhaShape::kQk / 16, kHeld = MhaShape::kHeldSteps;
  std::uint32_t held[kHeld][4];
  std::uint32_t operand;

  /// Reads the held steps. `rows`: shared address of the warp's first row in the first slab.
  __device__ void load(std::uint32_t rows) {
    const int lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
    for (int s = 0; s < kHeld; ++s) {
      const int chunk = s % 4 * 2 + lane / 16;  // of 16 bytes, in its row of the slab
      ptx::ldmatrix_x4(held[s],
                       rows + s / 4 * MhaShape::kSlabBytes + row * 128 + ((chunk ^ row % 8) << 4));
    }
  }
};

/// S = Q · Kᵀ for a warpgroup's 64 rows, started.
__device__ __forceinline__ void start_scores(float (&score)[64], const QueryRows& q,
                                             std::uint32_t k) {
#pragma unroll
  for (int s = 0; s < QueryRows::kSteps; ++s) {
    const int bytes = s / 4 * MhaShape::kSlabBytes + s % 4 * 32;
    const std::uint32_t b = ptx::advance(k, bytes);
    if (s < QueryRows::kHeld) {
      const std::uint32_t(&a)[4] = q.held[s % QueryRows::kHeld];
      if (s == 0)
        ptx::wgmma_m64n128k16<false, false>(score, a[0], a[1], a[2], a[3], b);
      else
        ptx::wgmma_m64n128k16<true, false>(score, a[0], a[1], a[2], a[3], b);
    } else {
      ptx::wgmma_m64n128k16(score, ptx::advance(q.operand, bytes), b);
    }
  }
  ptx::wgmma_commit();
}
/// O += P · V, started.
__device__ __forceinline__ void start_output(float (&out)[64], const std::uint32_t (&weights)[32],
                                             std::uint32_t v) {
#pragma unroll
  for (int s = 0; s < MhaShape::kKeys / 16; ++s)
    ptx::wgmma_m64n128k16<true, true>(out, weights[4 * s], weights[4 * s + 1], weights[4 * s + 2],
                                      weights[4 * s + 3], ptx::advance(v, s * 16 * 128));
  ptx::wgmma_commit();
}

/// Scores become weights; `factor`: what the sums so far are to be multiplied with.
__device__ __forceinline__ void weigh(float (&score)[64], RowSums& rows, float scale,
                                      float (&factor)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = score[2 * h];
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) top = fmaxf(top, score[4 * n + 2 * h + i]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float maximum = fmaxf(rows.maximum[h], top * scale);
    factor[h] = ptx::ex2(rows.maximum[h] - maximum);
    rows.maximum[h] = maximum;
    float sum[2] = {};
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = score[4 * n + 2 * h + i];
        x = ptx::ex2(fmaf(x, scale, -maximum));
        sum[i] += x;
      }
    rows.sum[h] = fmaf(rows.sum[h], factor[h], sum[0] + sum[1]);
  }
}
__device__ __forceinline__ void rescale(float (&out)[64], const float (&factor)[2]) {
  if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 64; ++i) out[i] *= factor[i / 2 % 2];
}
/// Weights as the A operand of O += P · V: two neighbouring accumulators, one register.
__device__ __forceinline__ void round_weights(const float (&score)[64],
                                              std::uint32_t (&weights)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) weights[i] = ptx::pack_bf16(score[2 * i], score[2 * i + 1]);
}

/// The mask's words that a lane brings for its quad: of a block the 32 keys from 32 · (lane % 4)
/// on, of rows g and g + 8.
class QuadMask {
 public:
  /// `row`: g's row of the member. Rows from `row_end` on are not read and count as selected.
  __device__ void start(const AttendArguments& args, const MhaItem& item, int row, int row_end) {
    const int quarter = threadIdx.x % 4;
    first_key_ = item.mask.first_key;
    end_ = item.keys.end - quarter * 32;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      words_[h] = row + 8 * h < row_end
                      ? args.mask_words + item.mask.word_offset +
                            std::int64_t{row + 8 * h} * item.mask.row_words + quarter
                      : nullptr;
  }
  /// Starts to read the words of the block at `key`.
  __device__ void fetch(int key) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      pair_[h][0] = pair_[h][1] = words_[h] == nullptr ? ~0u : 0u;
      if (words_[h] == nullptr || key >= end_) continue;
      const std::uint32_t* words = words_[h] + ((key - first_key_) >> 5);
      pair_[h][0] = __ldg(words);
      pair_[h][1] = __ldg(words + 1);
    }
  }
  /// Their bits, of row h, those past the end cleared.
  __device__ std::uint32_t bits(int h, int key) const {
    const std::uint32_t bits = __funnelshift_r(pair_[h][0], pair_[h][1], (key - first_key_) & 31);
    const int left = end_ - key;
    if (left >= 32 || words_[h] == nullptr) return bits;
    return left <= 0 ? 0u : bits & ((1u << left) - 1);
  }

 private:
  const std::uint32_t* words_[2];
  std::int32_t first_key_, end_;
  std::uint32_t pair_[2][2];
};

/// Scores that the mask's bits leave out become −inf.
__device__ __forceinline__ void hide_unselected(float (&score)[64], const QuadMask& mask, int key) {
  const int lane = threadIdx.x % 32;
  const std::uint32_t mine[2] = {mask.bits(0, key), mask.bits(1, key)};
  if (__all_sync(~0u, (mine[0] & mine[1]) == ~0u)) return;
#pragma unroll
  for (int w = 0; w < 4; ++w)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::uint32_t bits = __shfl_sync(~0u, mine[h], (lane & ~3) | w) >> lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if ((bits >> (8 * n + i) & 1) == 0) score[16 * w + 4 * n + 2 * h + i] = -HUGE_VALF;
    }
}
/// Scores of keys from `end[h]` on, counted from the block's first, become −inf in row h.
__device__ __forceinline__ void hide_behind(float (&score)[64], const int (&end)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int left = end[h] - static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (8 * n + i >= left) score[4 * n + 2 * h + i] = -HUGE_VALF;
  }
}

/// A warp's finished rows: to the piece's partials, or written to or merged into the running one.
__device__ __forceinline__ void finish(const AttendArguments& args, const AttendPlan& plan,
                                       const MhaItem& item, int row, int row_end, RowSums& rows,
                                       const float (&out)[64]) {
  using Shape = MhaShape;
  constexpr float kLn2 = 0.69314718055994531f, kInfinity = HUGE_VALF;
  const int lane = threadIdx.x % 32, pair = lane % 4;
  const int tile_row = row - item.work.item.row;
  const bool partial = item.work.item.slot >= 0;
  const std::int64_t part =
      partial
          ? (std::int64_t{item.work.item.slot} * args.num_heads + item.work.head) * Shape::kRows +
                tile_row
          : 0;
  const std::int64_t running_row = std::int64_t{item.member.packed_token} + row;
  float before[2];
  bool merges[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    merges[h] = !partial && row + 8 * h < row_end && running_row + 8 * h < args.merge_row_end;
    before[h] = merges[h] ? *address(args.lse, item.work.head, running_row + 8 * h) : -kInfinity;
  }
  __syncwarp();  // the quad has read it
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = rows.sum[h];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const bool empty = total == 0;
    const float inverse = empty ? 0.0f : 1.0f / total;
    const float lse = empty ? -kInfinity : rows.maximum[h] * kLn2 + logf(total);
    // A merged row that saw nothing stays as it is.
    const bool writes = row + 8 * h < row_end && !(merges[h] && empty);
    MergeWeights weights;
    weights.lse = lse;
    if (merges[h] && !empty) weights = merge_weights(before[h], lse);
    if (pair == 0 && writes)
      *(partial ? plan.part_lse + part + 8 * h
                : address(args.lse, item.work.head, running_row + 8 * h)) = weights.lse;
    float* place = partial ? plan.part_out + (part + 8 * h) * Shape::kValue
                           : args.out.data_handle() + (running_row + 8 * h) * args.out.stride(0) +
                                 item.work.head * args.out.stride(1);
    // Neighbouring lanes swap halves of two tiles, so that each has four columns on end.
    const bool odd = pair % 2 != 0;
    auto* const target = reinterpret_cast<float4*>(place + odd * 8 + pair / 2 * 4);
    float4 values[Shape::kValue / 16];
#pragma unroll
    for (int m = 0; m < Shape::kValue / 16; ++m) {
      const float a0 = out[8 * m + 2 * h] * inverse, a1 = out[8 * m + 2 * h + 1] * inverse;
      const float b0 = out[8 * m + 4 + 2 * h] * inverse, b1 = out[8 * m + 4 + 2 * h + 1] * inverse;
      const float c0 = __shfl_xor_sync(~0u, odd ? a0 : b0, 1);
      const float c1 = __shfl_xor_sync(~0u, odd ? a1 : b1, 1);
      values[m] = odd ? make_float4(c0, c1, b0, b1) : make_float4(a0, a1, c0, c1);
    }
    if (!writes) continue;
    if (merges[h]) {
      float4 old[Shape::kValue / 16];
#pragma unroll
      for (int m = 0; m < Shape::kValue / 16; ++m) old[m] = target[4 * m];
#pragma unroll
      for (int m = 0; m < Shape::kValue / 16; ++m)
        values[m] = make_float4(merge_value(weights, old[m].x, values[m].x),
                                merge_value(weights, old[m].y, values[m].y),
                                merge_value(weights, old[m].z, values[m].z),
                                merge_value(weights, old[m].w, values[m].w));
    }
#pragma unroll
    for (int m = 0; m < Shape::kValue / 16; ++m) target[4 * m] = values[m];
  }
}

/// A consumer warpgroup: 64 query rows of every work item.
template <bool kMasked>
__device__ __forceinline__ void consume(const AttendArguments& args, const AttendPlan& plan,
                                        const MhaShared& shared, const MhaBarriers& barriers,
                                        const MhaTiles& tiles, int group) {
  using Shape = MhaShape;
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr int kGroupBytes = Shape::kGroupRows * 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const float scale = args.softmax_scale * kLog2e;
  QueryRows q;
  q.operand = uniform(ptx::swizzled_operand(tiles.q + group * kGroupBytes));
  const auto keys_of = [&](const StageUse& use) {
    return uniform(ptx::swizzled_operand(tiles.k(use.stage())));
  };
  const auto values_of = [&](const StageUse& use) {
    return uniform(ptx::swizzled_operand(tiles.v(use.stage()), Shape::kSlabBytes));
  };
  const auto arrive = [&](std::uint32_t mbarrier) {
    __syncwarp();
    if (lane == 0) ptx::block_mbarrier_arrive(mbarrier);
  };

  StageUse block{0};
  for (std::uint32_t count = 0;; ++count) {
    ptx::block_mbarrier_wait(barriers.full_q(), count % 2);
    const MhaItem& item = shared.items[count % 3];
    if (item.none) return;
    const int group_row = item.work.item.row + group * Shape::kGroupRows;
    const int row = group_row + warp * 16 + lane / 4;
    const int row_end = min(item.work.item.row + Shape::kRows, item.member.query_len);

    float out[64], score[64], factor[2];
    std::uint32_t weights[32];
    RowSums rows = {{-FLT_MAX, -FLT_MAX}, {0, 0}};
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = 0;
    // Of the group's rows the first sees least: up to here every row sees every key.
    const int all_end = visible_end(args, item.member, item.keys, group_row);
    [[maybe_unused]] QuadMask mask;
    if constexpr (kMasked) mask.start(args, item, row, row_end);
    const auto hide = [&](int key) {
      if constexpr (kMasked) {
        hide_unselected(score, mask, key);
      } else if (key + Shape::kKeys > all_end) {
        const int end[2] = {visible_end(args, item.member, item.keys, row) - key,
                            visible_end(args, item.member, item.keys, row + 8) - key};
        hide_behind(score, end);
      }
    };
    if (item.first_key < item.keys.end) q.load(tiles.q + group * kGroupBytes + warp * 16 * 128);
    const bool has_blocks = item.first_key < item.keys.end;
    bool more = has_blocks;
    while (more) {
      // The next block that concerns this group, with no product of it under way.
      MhaBlock at;
      while (true) {
        ptx::block_mbarrier_wait(barriers.full_k(block.stage()), block.parity());
        at = barriers.block(block.stage());
        if ((at.groups >> group & 1) != 0) break;
        arrive(barriers.empty_k(block.stage()));
        // Not before V is there: the other group may still hold the stage's V before this one.
        ptx::block_mbarrier_wait(barriers.full_v(block.stage()), block.parity());
        arrive(barriers.empty_v(block.stage()));
        ++block.use;
        if (at.last) break;
      }
      if ((at.groups >> group & 1) == 0) break;
      ptx::pin(score);
      ptx::wgmma_fence();
      start_scores(score, q, keys_of(block));
      if constexpr (kMasked) mask.fetch(at.key);
      ptx::wgmma_wait<0>();
      ptx::pin(score);
      arrive(barriers.empty_k(block.stage()));
      hide(at.key);
      if constexpr (kMasked) mask.fetch(at.following);
      weigh(score, rows, scale, factor);
      rescale(out, factor);
      round_weights(score, weights);
      StageUse values = block;
      ++block.use;

      // S of a block and O of the one before it are under way together; the softmax of S runs
      // while O does.
      while (!at.last) {
        ptx::block_mbarrier_wait(barriers.full_k(block.stage()), block.parity());
        const MhaBlock following = barriers.block(block.stage());
        if ((following.groups >> group & 1) == 0) break;
        ptx::pin(score);
        ptx::pin(out);
        ptx::wgmma_fence();
        start_scores(score, q, keys_of(block));
        ptx::block_mbarrier_wait(barriers.full_v(values.stage()), values.parity());
        ptx::wgmma_fence();
        start_output(out, weights, values_of(values));
        ptx::wgmma_wait<1>();
        ptx::pin(score);
        arrive(barriers.empty_k(block.stage()));
        hide(following.key);
        if constexpr (kMasked) mask.fetch(following.following);
        weigh(score, rows, scale, factor);
        ptx::pin(score);
        stay_in_front(rows.sum[0] + rows.sum[1]);
        ptx::wgmma_wait<0>();
        ptx::pin(out);
        arrive(barriers.empty_v(values.stage()));
        rescale(out, factor);
        round_weights(score, weights);
        at = following;
        values = block;
        ++block.use;
      }
      more = !at.last;
      if (!more) arrive(barriers.empty_q());

      ptx::block_mbarrier_wait(barriers.full_v(values.stage()), values.parity());
      // Only a last block can reach past the end. What lies there may be anything, and 0 · NaN is
      // NaN. Each group clears the rows for itself: for the other one they are 0 already or not yet
      // read.
      if (const int valid = item.keys.end - at.key; valid < Shape::kKeys) {
        constexpr int kChunksPerRow = 8;
        const std::uint32_t zeros[4] = {};
#pragma unroll 1
        for (int c = valid * kChunksPerRow + static_cast<int>(threadIdx.x) % Shape::kGroupThreads;
             c < Shape::kKeys * kChunksPerRow; c += Shape::kGroupThreads)
#pragma unroll
          for (int slab = 0; slab < Shape::kValue / Shape::kSlabColumns; ++slab)
            ptx::store_shared_16(tiles.v(values.stage()) + slab * Shape::kSlabBytes + c * 16,
                                 zeros);
        ptx::fence_shared_to_async();
        ptx::named_barrier(1 + group, Shape::kGroupThreads);
      }
      ptx::pin(out);
      ptx::wgmma_fence();
      start_output(out, weights, values_of(values));
      ptx::wgmma_wait<0>();
      ptx::pin(out);
      arrive(barriers.empty_v(values.stage()));
    }
    if (more || !has_blocks) arrive(barriers.empty_q());  // not done so with the last product
    finish(args, plan, item, row, row_end, rows, out);
  }
}

#endif

/// The tile product of one work item, per block of 128 keys:
///   S[128, 128] = Q[128, P+R] · K[128, P+R]ᵀ   both operands from shared memory
///   online softmax in base 2, fp32, a quad of lanes per row
///   O[128, V] += P[128, 128] · V[128, V]       P from registers as bf16, V as it lies, N-major
/// One CTA per SM that stays: a warpgroup of which one warp schedules and one produces, and
/// two consumer warpgroups of 64 rows each. CTAs take (item, head) from a common counter, longest
/// items first (attend_plan.cuh); two stages of K and V, one of Q.
template <bool kMasked>
__global__ void __launch_bounds__(MhaShape::kThreads, 1)
    masked_mha_kernel(const __grid_constant__ MhaMaps maps,
                      const __grid_constant__ AttendArguments args,
                      const __grid_constant__ AttendPlan plan) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = MhaShape;
  extern __shared__ std::byte shared_memory[];
  __shared__ MhaShared shared;
  const MhaTiles tiles{
      cuda::not_hoisted((ptx::shared_address(shared_memory) + Shape::kAlignment - 1) /
                        Shape::kAlignment * Shape::kAlignment)};
  const MhaBarriers barriers{cuda::not_hoisted(ptx::shared_address(&shared))};
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = Shape::kGroups * Shape::kGroupThreads / 32;
    ptx::mbarrier_init(&shared.full_q, 1);
    ptx::mbarrier_init(&shared.empty_q, kConsumerWarps);
    ptx::mbarrier_init(&shared.wanted, 1);
    ptx::mbarrier_init(&shared.ready, 1);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full_k[stage], 1);
      ptx::mbarrier_init(&shared.empty_k[stage], kConsumerWarps);
      ptx::mbarrier_init(&shared.full_v[stage], 1);
      ptx::mbarrier_init(&shared.empty_v[stage], kConsumerWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  // From one lane, so that the compiler takes what follows from it as uniform.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / Shape::kGroupThreads, 0);
  if (group == 0) {
    ptx::release_registers<Shape::kProducerRegisters>();
    if (threadIdx.x < 32)
      produce<kMasked>(maps, args, shared, barriers, tiles);
    else if (threadIdx.x < 64)
      schedule<kMasked>(args, plan, shared, barriers);
  } else {
    ptx::claim_registers<Shape::kConsumerRegisters>();
    consume<kMasked>(args, plan, shared, barriers, tiles, group - 1);
  }
#endif
}

}  // namespace sparse_mla::sm90
