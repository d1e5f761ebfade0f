/// The tile of `sparse_mqa` decode on Hopper: its shape, shared memory and barriers, and which
/// blocks of keys a CTA takes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/sm90/page_divisor.h"
#include "kernels/sm90/sparse_mqa_parts.cuh"
#include "kernels/sm90/sparse_mqa_quarters.h"
#include "kernels/sm90/wgmma.cuh"
#include "sparse_mla/attention.h"

namespace sparse_mla::sm90 {

/// DeepSeek's row and the tile that follows from it.
struct DecodeShape {
  static constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
  /// Rows of one wgmma. The sums of 64 heads × 512 columns fill half of the register file.
  static constexpr int kHeads = 64;
  /// Keys of a block. Two blocks and the queries are all that shared memory holds.
  static constexpr int kKeys = 64, kPairKeys = 2 * kKeys;
  // Shared memory: slabs of 64 columns, 64 rows of 128 bytes each, swizzled.
  static constexpr int kSlabs = kWidth / 64, kSlabBytes = 64 * 128;
  static constexpr int kTileBytes = kSlabs * kSlabBytes;  // of the queries, of a block of keys
  /// Slabs of a warpgroup's half of the value columns; slab of the rope part.
  static constexpr int kHalfSlabs = kLatent / 64 / 2, kRopeSlab = kLatent / 64;
  static constexpr int kHalfColumns = kLatent / 2;
  static constexpr int kGroupThreads = 128;
  /// Two warpgroups that gather and two that compute.
  static constexpr int kProducerThreads = 2 * kGroupThreads, kThreads = 4 * kGroupThreads;
  static constexpr int kProducerWarps = kProducerThreads / 32;
  /// Registers per thread: 256 · both = 65,536, all that there are.
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 256 - kProducerRegisters;
  /// A slab starts at a multiple of the swizzle's 1,024 bytes; so much may be lost before the
  /// first.
  static constexpr int kAlignment = 1024;
  static constexpr int kSharedBytes = 3 * kTileBytes + kAlignment;
  static_assert(kHeads * kPartRowBytes <= 2 * kTileBytes);
};

struct DecodeArguments {
  SparseMqaCall call;
  PageDivisor page;
  int num_heads, head_tiles;  ///< tiles of 64 heads
  int items;                  ///< tokens · head_tiles
  int splits, clusters;       ///< CTAs of an item = of a cluster; clusters of the grid
  float logit_scale;          ///< softmax scale · log2(e)
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Everything in shared memory but the tiles.
struct DecodeShared {
  std::uint64_t full_q;
  std::uint64_t full[kQuarters], empty[kQuarters];
  std::uint64_t scored[2];  ///< every warp of the group has its scores: the rope slab may change
  /// The block's weights are there for the other group, and what they are relative to.
  std::uint64_t weighed[2];
  std::uint64_t summed;                 ///< both groups' sums of weights are there
  alignas(8) std::uint8_t valid[2][8];  ///< [block][64 keys], bits
  /// What the exponents of the weights are relative to after a block: [group][row]
  float reference[2][DecodeShape::kHeads];
  float sum[2][2][DecodeShape::kHeads];  ///< sums of weights: [parity of the item][group][row]
  float most[2][DecodeShape::kHeads];    ///< largest sum of a row, [group][row]
};

/// Named barriers, of a group's 128 threads and of both groups'.
enum DecodeBarrier : int { kSecondDecodeGroup = 1, kBothDecodeGroups };

/// Where it lies: shared-memory addresses.
struct DecodeAddresses {
  std::uint32_t tiles, shared;

  __device__ std::uint32_t q() const { return tiles; }
  __device__ std::uint32_t keys(int block) const {
    return tiles + (1 + block) * DecodeShape::kTileBytes;
  }
  /// Weights take the place of the rope part.
  __device__ std::uint32_t weights(int block) const {
    return keys(block) + DecodeShape::kRopeSlab * DecodeShape::kSlabBytes;
  }
  /// The CTA's part of an item takes the place of keys when all of them are done with.
  __device__ std::uint32_t part() const { return keys(0); }
  __device__ std::uint32_t full_q() const { return shared + offsetof(DecodeShared, full_q); }
  __device__ std::uint32_t full(int quarter) const {
    return shared + offsetof(DecodeShared, full) + 8 * quarter;
  }
  __device__ std::uint32_t empty(int quarter) const {
    return shared + offsetof(DecodeShared, empty) + 8 * quarter;
  }
  __device__ std::uint32_t scored(int group) const {
    return shared + offsetof(DecodeShared, scored) + 8 * group;
  }
  __device__ std::uint32_t weighed(int group) const {
    return shared + offsetof(DecodeShared, weighed) + 8 * group;
  }
  __device__ std::uint32_t summed() const { return shared + offsetof(DecodeShared, summed); }
};

/// Slots of an item's token that are looked at; 0 past the last item.
__device__ inline int slots_of(const DecodeArguments& args, int item) {
  if (item >= args.items) return 0;
  const int all = static_cast<int>(args.call.slots.extent(1));
  if (args.call.counts == nullptr) return all;
  return max(
      0,
      min(all,
          args.call.counts[static_cast<unsigned>(item) / static_cast<unsigned>(args.head_tiles)]));
}

/// The item that the CTA's cluster begins with; it goes on by the number of clusters.
__device__ inline int first_item(const DecodeArguments& args) {
  return static_cast<int>(blockIdx.x / static_cast<unsigned>(args.splits));
}

#endif

}  // namespace sparse_mla::sm90
