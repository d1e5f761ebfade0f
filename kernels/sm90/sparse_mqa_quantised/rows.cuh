/// The producers of the `sparse_mqa` prefill kernel over fp8_ds_mla rows: rows as they are stored
/// into shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/sm90/sparse_mqa_prefill/quantised_tile.cuh"
#include "kernels/sm90/wgmma.cuh"
#include "kernels/sm90/zero_row.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace sparse_mla::sm90 {

/// The producers: half of a block, 32 rows, is asked for as soon as both consumer groups have what
/// lay there in registers, eight rows by one lane of each warp. Lane 16b + 8h + r of warp w looks
/// up row 32h + 8w + r of block b of every pair.
template <bool kPacked>
__device__ __forceinline__ void copy_quantised_rows(const PrefillArguments& args,
                                                    QuantisedShared& shared,
                                                    const QuantisedAddresses& at) {
  using Tile = QuantisedTile;
  constexpr int kRows = 8;  // of a half and a warp
  const LatentCache& cache = args.call.cache;
  const auto lane = static_cast<int>(threadIdx.x & 31);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0);
  const int row = (lane >> 3 & 1) * (Tile::kKeys / 2) + kRows * warp + (lane & 7);

  StageWalk to;
  // Of the pair whose picks are asked for next: item, its picks, the first of the pair's. (A
  // PairWalk keeps more than 24 registers have room for.)
  int item = static_cast<int>(blockIdx.x), first = 0, count = picks_of<kPacked>(args, item);
  const auto skip_ended = [&] {
    while (first >= count && item < args.items) {
      item += static_cast<int>(gridDim.x);
      first = 0;
      count = picks_of<kPacked>(args, item);
    }
  };
  std::int32_t slot;  // −1 = do not read
  std::uint32_t tokens;
  const auto load_next_pick = [&] {
    const int key = first + (lane >> 4) * Tile::kKeys + row;
    slot = -1;
    tokens = 0;
    if (key < count) load_pick<kPacked>(args, item, key, slot, tokens);
  };
  skip_ended();
  load_next_pick();
#pragma unroll 1
  for (bool more = item < args.items; more;) {
    first += 2 * Tile::kKeys;
    skip_ended();
    more = item < args.items;
#pragma unroll 1
    for (int block = 0; block < 2; ++block) {
      const bool is_row = slot >= 0 && slot < cache.num_slots();
      __syncwarp();
      if (lane >> 4 == block) {
        const std::byte* from = row_or_zeros(nullptr);
        if (is_row) {
          const auto of = static_cast<std::uint32_t>(slot);
          const std::uint32_t page = args.page.quotient(of), in_page = of - page * args.page.page;
          from = cache.data + page * cache.block_stride + in_page * cache.row_stride;
        }
        shared.sources[row] = from;
      }
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t full = at.full(to.stage);
        ptx::block_mbarrier_wait(at.empty(to.stage, half), to.parity ^ 1);
        if (lane >> 3 == 2 * block + half) {
          shared.tokens[to.stage][row] = static_cast<std::uint8_t>(is_row ? tokens : 0);
          ptx::block_mbarrier_arrive(full);
        }
        __syncwarp();
        if (ptx::elect_one()) {
          const int first_row = half * (Tile::kKeys / 2) + kRows * warp;
          const std::uint32_t place = at.rows(to.stage) + first_row * Tile::kRowBytes;
          ptx::block_mbarrier_arrive_expecting(full, kRows * Tile::kRowBytes);
          const void* from[kRows];
#pragma unroll
          for (int r = 0; r < kRows; ++r) from[r] = shared.sources[first_row + r];
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            ptx::copy_bytes(place + r * Tile::kRowBytes, from[r], Tile::kRowBytes, full);
        }
      }
      if (lane >> 4 == block) load_next_pick();
      to.next();
    }
  }
}

}  // namespace sparse_mla::sm90
#endif
