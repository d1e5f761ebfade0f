/// The work items of the `sparse_mqa` prefill kernel, its shared memory and barriers.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda.h>

#include "kernels/sm90/page_divisor.h"
#include "kernels/sm90/sparse_mqa_prefill/pick_union.h"
#include "kernels/sm90/sparse_mqa_quarters.h"
#include "kernels/sm90/wgmma.cuh"
#include "sparse_mla/attention.h"

namespace sparse_mla::sm90 {

/// DeepSeek's row and the tile that follows from it.
struct PrefillShape {
  static constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
  /// Query rows: those of one wgmma. The sums of 64 rows × 512 columns fill half of the register
  /// file.
  static constexpr int kRows = 64;
  // Shared memory: slabs of 64 columns, rows of 128 bytes each, swizzled.
  static constexpr int kSlabs = kWidth / 64, kQuerySlabBytes = kRows * 128;
  static constexpr int kQueryBytes = kSlabs * kQuerySlabBytes;
  /// Slabs of a warpgroup's half of the value columns; slab of the rope part.
  static constexpr int kHalfSlabs = kLatent / 64 / 2, kRopeSlab = kLatent / 64;
  static constexpr int kHalfColumns = kLatent / 2;
  static constexpr int kBlockKeys = 64, kPairKeys = 2 * kBlockKeys;
  static constexpr int kGroupThreads = 128;
  /// A slab starts at a multiple of the swizzle's 1,024 bytes; so much may be lost before the
  /// first.
  static constexpr int kAlignment = 1024;
};

/// A pair of blocks of bf16 rows, and the CTA that multiplies it.
struct PrefillBlock {
  /// Keys of a block: two blocks and the queries are all that shared memory holds.
  static constexpr int kKeys = PrefillShape::kBlockKeys;
  static constexpr int kSlabBytes = kKeys * 128;
  static constexpr int kBytes = PrefillShape::kSlabs * kSlabBytes;
  static constexpr int kSharedBytes =
      PrefillShape::kQueryBytes + 2 * kBytes + PrefillShape::kAlignment;
  /// A warpgroup gathers and two compute.
  static constexpr int kThreads = 3 * PrefillShape::kGroupThreads;
  /// Registers per thread: together no more than a CTA starts with, 168 · 384, or it would wait for
  /// them in vain.
  static constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;
};

struct PrefillArguments {
  SparseMqaCall call;
  PageDivisor page;
  int num_heads;
  int head_tiles;            ///< tiles of 64 heads; 1 where tokens are packed
  int items;                 ///< of this launch: tokens · head_tiles, or groups of tokens
  std::int64_t first_token;  ///< of this launch
  PickUnion picks;           ///< of the groups, packed only
  float logit_scale;         ///< softmax scale · log2(e)
  /// CTAs that share an item, which are a cluster; clusters of the grid. Quantised rows only.
  int splits, clusters;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Everything in shared memory but the tiles.
struct PrefillShared {
  std::uint64_t full_q;
  std::uint64_t full[kQuarters], empty[kQuarters];
  std::uint64_t scored[2];  ///< every warp of the group has its scores: the rope slab may change
  /// The block's weights are there for the other group, and what they are relative to.
  std::uint64_t weighed[2];
  std::uint64_t summed;  ///< both groups' sums of weights are there
  /// [block][token of the item], bits: 16 of each producer warp.
  std::uint64_t valid[2][PickUnion::kMaxTokens];
  /// What the exponents of the weights are relative to after a block: [group][row]
  float reference[2][PrefillShape::kRows];
  float sum[2][2][PrefillShape::kRows];  ///< sums of weights: [parity of the item][group][row]
};

/// Named barriers, 256 threads but the first.
enum PrefillBarrier : int { kSecondGroup = 1, kFirstScores };

/// Where it lies: shared-memory addresses.
struct PrefillAddresses {
  using Block = PrefillBlock;
  std::uint32_t tiles, shared;

  __device__ std::uint32_t q() const { return tiles; }
  __device__ std::uint32_t keys(int block) const {
    return tiles + PrefillShape::kQueryBytes + block * Block::kBytes;
  }
  /// Weights take the place of the rope part.
  __device__ std::uint32_t weights(int block) const {
    return keys(block) + PrefillShape::kRopeSlab * Block::kSlabBytes;
  }
  __device__ std::uint32_t full_q() const { return shared + offsetof(PrefillShared, full_q); }
  __device__ std::uint32_t full(int quarter) const {
    return shared + offsetof(PrefillShared, full) + 8 * quarter;
  }
  __device__ std::uint32_t empty(int quarter) const {
    return shared + offsetof(PrefillShared, empty) + 8 * quarter;
  }
  __device__ std::uint32_t scored(int group) const {
    return shared + offsetof(PrefillShared, scored) + 8 * group;
  }
  __device__ std::uint32_t weighed(int group) const {
    return shared + offsetof(PrefillShared, weighed) + 8 * group;
  }
  __device__ std::uint32_t summed() const { return shared + offsetof(PrefillShared, summed); }
};

/// Where an item lies: row r of its tile is head `head + r / tokens` of token `token + r % tokens`.
struct PrefillItem {
  std::int64_t token;
  int head;
};
template <bool kPacked>
__device__ inline PrefillItem item_at(const PrefillArguments& args, int item) {
  if constexpr (kPacked) return {args.first_token + (std::int64_t{item} << args.picks.shift), 0};
  const auto number = static_cast<unsigned>(item), tiles = static_cast<unsigned>(args.head_tiles);
  return {args.first_token + number / tiles,
          static_cast<int>(number % tiles) * PrefillShape::kRows};
}
/// Picks of an item that are looked at; 0 past the last item.
template <bool kPacked>
__device__ inline int picks_of(const PrefillArguments& args, int item) {
  if (item >= args.items) return 0;
  if constexpr (kPacked) return args.picks.counts[item];
  const int all = static_cast<int>(args.call.slots.extent(1));
  if (args.call.counts == nullptr) return all;
  return max(0, min(all, args.call.counts[item_at<false>(args, item).token]));
}
__device__ inline int pairs_of(int count) {
  return (count + PrefillShape::kPairKeys - 1) / PrefillShape::kPairKeys;
}

/// The item's queries, kRows rows, to `q` in shared memory; they count at `full_q`. One thread
/// calls it.
template <bool kPacked, int kRows = PrefillShape::kRows>
__device__ inline void load_queries(const CUtensorMap& q_map, const PrefillArguments& args,
                                    int item, std::uint32_t q, std::uint32_t full_q) {
  if (item >= args.items) return;
  constexpr int kSlabBytes = kRows * 128;
  ptx::block_mbarrier_arrive_expecting(full_q, PrefillShape::kSlabs * kSlabBytes);
  const PrefillItem to = item_at<kPacked>(args, item);
#pragma unroll
  for (int slab = 0; slab < PrefillShape::kSlabs; ++slab)
    ptx::copy_box_3d(q + slab * kSlabBytes, &q_map, full_q, 64 * slab, static_cast<int>(to.token),
                     to.head);
}
/// Pick number `at` of an item: its slot and the tokens that picked it, bits.
template <bool kPacked>
__device__ inline void load_pick(const PrefillArguments& args, int item, int at, std::int32_t& slot,
                                 std::uint32_t& tokens) {
  if constexpr (kPacked) {
    const std::int64_t from = item * args.picks.row + at;
    slot = args.picks.slots[from];
    tokens = args.picks.tokens[from];
  } else {
    slot = args.call.slots(item_at<false>(args, item).token, at);
    tokens = 1;
  }
}

/// The producers' walk over the pairs of blocks of all of the CTA's items.
template <bool kPacked>
struct PairWalk {
  int item, pair, pairs, count, next_count;

  __device__ explicit PairWalk(const PrefillArguments& args)
      : item(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x)),
        pair(0),
        pairs(0),
        count(0),
        next_count(picks_of<kPacked>(args, static_cast<int>(blockIdx.x))) {
    next(args);
  }
  __device__ void next(const PrefillArguments& args) {
    ++pair;
    while (pair >= pairs) {
      item += static_cast<int>(gridDim.x);
      if (item >= args.items) return;
      pair = 0;
      count = next_count;
      pairs = pairs_of(count);
      next_count = picks_of<kPacked>(args, item + static_cast<int>(gridDim.x));
    }
  }
  /// The pair's pick number `key`: slot, −1 = do not read, and the tokens that picked it, bits.
  __device__ void pick(const PrefillArguments& args, int key, std::int32_t& slot,
                       std::uint32_t& tokens) const {
    const int at = pair * PrefillShape::kPairKeys + key;
    slot = -1;
    tokens = 0;
    if (item >= args.items || at >= count) return;
    load_pick<kPacked>(args, item, at, slot, tokens);
  }
};

#endif

}  // namespace sparse_mla::sm90
