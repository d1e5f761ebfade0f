/// Work on its way through a CTA of masked_mha.cuh: the shape of its tiles, what lies in shared
/// memory, and the two warps that fetch work, keys and values.
#pragma once

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
  /// Beside them, MhaShared, at most.
  static constexpr int kStaticSharedBytes = 2048;
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
static_assert(sizeof(MhaBlock) == 16 && sizeof(MhaShared) <= MhaShape::kStaticSharedBytes);
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

#endif

}  // namespace sparse_mla::sm90
