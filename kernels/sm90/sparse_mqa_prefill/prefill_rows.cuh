/// The producers of the `sparse_mqa` prefill kernel: bf16 rows of the cache into shared memory.
#pragma once

#include <cstdint>

#include "kernels/cuda/latent_rows.cuh"
#include "kernels/sm90/sparse_mqa_prefill/prefill_tile.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace sparse_mla::sm90 {

/// The producer warpgroup copies bf16 rows, 16 bytes a thread, 8 lanes to 128 bytes of a row. Warp
/// w serves rows 16w … 16w + 15 of both blocks, of which lane l knows row l % 16 of block l / 16.
template <bool kPacked>
__device__ __forceinline__ void copy_rows(const PrefillArguments& args, PrefillShared& shared,
                                          const PrefillAddresses& at) {
  using Shape = PrefillShape;
  using Block = PrefillBlock;
  const LatentCache& cache = args.call.cache;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int key = lane / 16 * Block::kKeys + warp * 16 + lane % 16;
  const int row = lane / 8, chunk = lane % 8;  // row + 4 · pass of the warp's sixteen
  const std::uint32_t target = (16 * warp + row) * 128 + ((chunk ^ row) << 4);
  const std::int64_t num_slots = cache.num_slots();

  PairWalk<kPacked> walk(args);
  std::int32_t slot;
  std::uint32_t tokens;
  walk.pick(args, key, slot, tokens);
  for (std::uint32_t use = 0; walk.item < args.items; ++use) {
    const bool is_row = slot >= 0 && slot < num_slots;
    const std::int64_t offset = is_row ? cuda::cached_row(cache, slot) - cache.data : 0;
    const std::uint32_t rows = __ballot_sync(~0u, is_row);
    std::uint32_t picked = rows;  // by token `lane` of the item
    if constexpr (kPacked)
#pragma unroll
      for (int token = 0; token < PickUnion::kMaxTokens; ++token) {
        const std::uint32_t bits = __ballot_sync(~0u, is_row && (tokens >> token & 1) != 0);
        if (token == lane) picked = bits;
      }
    walk.next(args);
    walk.pick(args, key, slot, tokens);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const std::byte* from[4];
      bool valid[4];
#pragma unroll
      for (int pass = 0; pass < 4; ++pass) {
        const int source = 16 * block + 4 * pass + row;
        from[pass] = cache.data + __shfl_sync(~0u, offset, source) + 16 * chunk;
        valid[pass] = (rows >> source & 1) != 0;
      }
      // Slabs `slab` … of half of the columns, and the rope part. A row's lines come one behind the
      // other: its address is translated once then (rows lie on pages all over the cache).
      const auto copy = [&](int slab, bool rope) {
#pragma unroll
        for (int pass = 0; pass < 4; ++pass) {
          const std::uint32_t to = at.keys(block) + pass * 4 * 128 +
                                   (pass % 2 == 0 ? target : target ^ 64);  // rows 4 … 7 of eight
#pragma unroll
          for (int s = slab; s < slab + Shape::kHalfSlabs; ++s)
            ptx::cp_async_16(to + s * Block::kSlabBytes, from[pass] + s * 128, valid[pass]);
          if (rope)
            ptx::cp_async_16(to + Shape::kRopeSlab * Block::kSlabBytes,
                             from[pass] + Shape::kRopeSlab * 128, valid[pass]);
        }
      };
      const int first = block == 0 ? kFirstLow : kSecondHigh, second = first + 1;
      ptx::block_mbarrier_wait(at.empty(first), use % 2 ^ 1);
      if (lane < (kPacked ? PickUnion::kMaxTokens : 1)) {
        reinterpret_cast<std::uint16_t*>(&shared.valid[block][lane])[warp] =
            static_cast<std::uint16_t>(picked >> 16 * block);
        ptx::block_mbarrier_arrive(at.full(first));
      }
      copy(block == 0 ? 0 : Shape::kHalfSlabs, false);
      ptx::mbarrier_arrive_after_copies(at.full(first));
      ptx::block_mbarrier_wait(at.empty(second), use % 2 ^ 1);
      copy(block == 0 ? Shape::kHalfSlabs : 0, true);
      ptx::mbarrier_arrive_after_copies(at.full(second));
    }
  }
}

}  // namespace sparse_mla::sm90
#endif
