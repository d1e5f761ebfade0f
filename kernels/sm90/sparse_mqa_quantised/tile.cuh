/// The tile of the `sparse_mqa` kernel over fp8_ds_mla rows, its shared memory and barriers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <cuda_fp16.h>

#include "kernels/cuda/latent_rows.cuh"
#include "kernels/sm90/sparse_mqa_parts.cuh"
#include "kernels/sm90/sparse_mqa_prefill/prefill_tile.cuh"

namespace sparse_mla::sm90 {

struct QuantisedTile {
  static constexpr int kKeys = PrefillShape::kBlockKeys;
  // Bytes of a row as it is stored, at which its parts begin.
  static constexpr int kScales = cuda::ds_mla_scale_offset(PrefillShape::kLatent);
  static constexpr int kRopePart = cuda::ds_mla_rope_offset(PrefillShape::kLatent);
  /// 41 times 16: 16 bytes at the same place of eight rows touch each bank once.
  static constexpr int kRowBytes = kRopePart + 2 * PrefillShape::kRope;
  static constexpr int kStageBytes = kKeys * kRowBytes;
  static constexpr int kWeightBytes = kKeys * PrefillShape::kRows * 2;
  static_assert(kKeys == kShareKeys);
  /// Shared memory beside the tiles, at most.
  static constexpr int kDeclaredBytes = 14336;
  /// A warpgroup asks for rows and two compute.
  static constexpr int kThreads = 3 * PrefillShape::kGroupThreads;
  /// Registers per thread: together no more than a CTA starts with, 168 · 384, or it would wait for
  /// them in vain.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
};

/// Columns of the products where a tile holds the heads of one token.
constexpr int quantised_columns(int num_heads) {
  return num_heads <= 16 ? 16 : PrefillShape::kRows;
}

/// Shared memory of products of kColumns columns.
template <int kColumns>
struct QuantisedMemory {
  static constexpr int kQuerySlabBytes = kColumns * 128;
  static constexpr int kQueryBytes = PrefillShape::kSlabs * kQuerySlabBytes;
  /// Blocks in shared memory: a pair that is multiplied, and the next one's first, or where there
  /// is room all of it.
  static constexpr int kStages = kColumns == 64 ? 3 : 4;
  static constexpr int kBytes = kQueryBytes + 2 * QuantisedTile::kWeightBytes +
                                kStages * QuantisedTile::kStageBytes + PrefillShape::kAlignment;
  static_assert(kColumns * kPartRowBytes <=
                2 * QuantisedTile::kWeightBytes + kStages * QuantisedTile::kStageBytes);
};
/// What a device has to have for any number of columns.
constexpr int kQuantisedSharedBytes =
    std::max(QuantisedMemory<16>::kBytes, QuantisedMemory<64>::kBytes) +
    QuantisedTile::kDeclaredBytes;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Everything in shared memory but the tiles. Rows of the tile are columns of the products here.
template <int kColumns>
struct QuantisedShared {
  static constexpr int kRows = PrefillShape::kRows, kKeys = QuantisedTile::kKeys;
  static constexpr int kStages = QuantisedMemory<kColumns>::kStages;
  std::uint64_t full_q;             ///< the item's queries are there
  std::uint64_t ready_q;            ///< they have been divided
  std::uint64_t full[kStages];      ///< the block's rows are there
  std::uint64_t empty[kStages][2];  ///< [stage][half] both groups have its rows in registers
  /// [block] Its weights are there, what they are relative to, and what its values are multiplied
  /// by; and its group is done with the weights of the block before.
  std::uint64_t weighed[2];
  std::uint64_t summed;  ///< both groups' sums of weights are there
  /// What a key's codes are multiplied by, fp16, [stage][128 columns][key]: as a lane takes them,
  /// keys 16s + 8h + 2t, +1 at 16t + 4s + 2h.
  alignas(16) __half value_factors[kStages][4][kKeys];
  const void* sources[2][kKeys];        ///< the producers': where a pair's rows are, [block][key]
  std::uint8_t tokens[kStages][kKeys];  ///< bits: those that picked the key
  int raised[2];                        ///< [block] the reference has changed
  int incomplete[2];                    ///< [parity of the item] not every row has had a key
  float query_factor[kRows];            ///< what queries were divided by · the logits' scale
  /// What the exponents of the weights are relative to, −inf before the first key; the same, 0
  /// before: [parity of the item].
  float reference[2][kRows], base[2][kRows];
  float factor[2][kRows];                    ///< [block] what earlier weights are multiplied by
  float tops[2][4][kRows];                   ///< [group][warp]
  float sum[2][2][4][kRows];                 ///< [parity of the item][group][warp]
  float share[2][kRows];                     ///< [group] what sums are multiplied by at the end
  bfloat16* to[2][kRows];                    ///< [group] where they go, null = nowhere
  float part_sum[kRows], part_scale[kRows];  ///< of the part of an item (PartScale)
  float largest_divisor[2][4];  ///< [group][warp] of what keys of the item were divided by
};

/// Where it lies: shared-memory addresses.
template <int kColumns>
struct QuantisedAddresses {
  using Shared = QuantisedShared<kColumns>;
  std::uint32_t tiles, shared;

  __device__ std::uint32_t q() const { return tiles; }
  __device__ std::uint32_t weights(int block) const {
    return tiles + QuantisedMemory<kColumns>::kQueryBytes + block * QuantisedTile::kWeightBytes;
  }
  __device__ std::uint32_t rows(int stage) const {
    return weights(2) + stage * QuantisedTile::kStageBytes;
  }
  /// The CTA's part of an item takes the place of weights and rows when all of them are done with.
  __device__ std::uint32_t part() const { return weights(0); }
  __device__ std::uint32_t full_q() const { return shared + offsetof(Shared, full_q); }
  __device__ std::uint32_t ready_q() const { return shared + offsetof(Shared, ready_q); }
  __device__ std::uint32_t full(int stage) const {
    return shared + offsetof(Shared, full) + 8 * stage;
  }
  __device__ std::uint32_t empty(int stage, int half) const {
    return shared + offsetof(Shared, empty) + 8 * (2 * stage + half);
  }
  __device__ std::uint32_t weighed(int block) const {
    return shared + offsetof(Shared, weighed) + 8 * block;
  }
  __device__ std::uint32_t summed() const { return shared + offsetof(Shared, summed); }
};

/// Named barriers, of a consumer group's threads and of both groups'.
enum QuantisedBarrier : int { kFirstGroup = 1, kBothGroups = 3 };

/// The item that the CTA begins with; it goes on by `step_items`.
template <bool kShared>
__device__ inline int first_item(const PrefillArguments& args) {
  return kShared ? static_cast<int>(blockIdx.x / static_cast<unsigned>(args.splits))
                 : static_cast<int>(blockIdx.x);
}
template <bool kShared>
__device__ inline int step_items(const PrefillArguments& args) {
  return kShared ? args.clusters : static_cast<int>(gridDim.x);
}

/// The ring of stages, block after block.
template <int kStages>
struct StageWalk {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ StageWalk previous() const {
    if (stage == 0) return {kStages - 1, parity ^ 1};
    return {stage - 1, parity};
  }
};

#endif

}  // namespace sparse_mla::sm90
