/// The producers of the `sparse_mqa` kernel over fp8_ds_mla rows: rows as they are stored into
/// shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/sm90/sparse_mqa_quantised/tile.cuh"
#include "kernels/sm90/wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace sparse_mla::sm90 {

/// The same number, of which the compiler does not know that: what follows from it is computed anew
/// and not kept in registers.
__device__ __forceinline__ int anew(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

/// Nothing is copied where there is no row, and what lies there counts nothing; but it must be
/// numbers. (All copying one row of zeros would have all SMs wait for a few lines of L2.)
__device__ __forceinline__ void clear_row(std::uint32_t row) {
  const std::uint32_t zeros[4] = {};
#pragma unroll 1
  for (int i = 0; i < QuantisedTile::kRowBytes / 16; ++i) ptx::store_shared_16(row + 16 * i, zeros);
  ptx::fence_shared_to_async();  // rows will be copied there
}

/// The producers: half of a block, 32 rows, is asked for as soon as both consumer groups have what
/// lay there in registers, eight rows by one lane of each warp. Lane 16b + 8h + r of warp w looks
/// up row 32h + 8w + r of block b of every pair. Where a cluster shares items, its threads meet
/// twice at the end of one; rows of the next one would take the place of the part.
template <bool kPacked, bool kShared, int kColumns>
__device__ __forceinline__ void copy_quantised_rows(const PrefillArguments& args,
                                                    QuantisedShared<kColumns>& shared,
                                                    const QuantisedAddresses<kColumns>& at) {
  using Tile = QuantisedTile;
  constexpr int kRows = 8;  // of a half and a warp
  const LatentCache& cache = args.call.cache;
  const auto lane = static_cast<int>(threadIdx.x & 31);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x >> 5), 0);
  // Of the lane's block.
  const auto row_of_lane = [&] {
    const int l = anew(lane);
    return (l >> 3 & 1) * (Tile::kKeys / 2) + kRows * warp + (l & 7);
  };

  StageWalk<QuantisedMemory<kColumns>::kStages> to;
  // Of the pair whose picks are asked for next: item, its picks, the first of the pair's. (A
  // PairWalk keeps more than 24 registers have room for.)
  int item = first_item<kShared>(args), first, count;
  const auto begin_item = [&] {
    first = 0;
    count = picks_of<kPacked>(args, item);
    if constexpr (kShared) {
      const Share share(count, args.splits);
      first = share.begin;
      count = share.end;
    }
  };
  begin_item();
  int ended = 0;  // items, with the pair before
  const auto skip_ended = [&] {
    while (first >= count && item < args.items) {
      item += step_items<kShared>(args);
      ++ended;
      begin_item();
    }
  };
  const auto meet = [&] {
#pragma unroll 1
    for (int i = 0; kShared && i < 2 * ended; ++i) {
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
    ended = 0;
  };
  std::int32_t slot;  // −1 = do not read
  std::uint32_t tokens;
  const auto load_next_picks = [&] {
    const int key = first + (lane >> 4) * Tile::kKeys + row_of_lane();
    slot = -1;
    tokens = 0;
    if (key < count) load_pick<kPacked>(args, item, key, slot, tokens);
  };
  skip_ended();
  meet();
  load_next_picks();
#pragma unroll 1
  for (bool more = item < args.items; more;) {
    const bool is_row = slot >= 0 && slot < cache.num_slots();
    const std::uint32_t pair_rows = __ballot_sync(~0u, is_row);
    const auto row_tokens = static_cast<std::uint8_t>(is_row ? tokens : 0);
    __syncwarp();
    if (is_row) {
      const auto of = static_cast<std::uint32_t>(slot);
      const std::uint32_t page = args.page.quotient(of), in_page = of - page * args.page.page;
      shared.sources[lane >> 4][row_of_lane()] =
          cache.data + page * cache.block_stride + in_page * cache.row_stride;
    }
    __syncwarp();
    // Of the next pair: a whole pair before they are needed.
    first += 2 * Tile::kKeys;
    skip_ended();
    more = item < args.items;
    load_next_picks();
#pragma unroll 1
    for (int part = 0; part < 4; ++part) {  // halves of both blocks
      const int half = part & 1;
      const std::uint32_t full = at.full(to.stage);
      const int first_row = half * (Tile::kKeys / 2) + kRows * warp;
      const std::uint32_t place = at.rows(to.stage) + first_row * Tile::kRowBytes;
      constexpr std::uint32_t kAll = (1u << kRows) - 1;
      const std::uint32_t rows = pair_rows >> kRows * part & kAll;
      const void* from[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) from[r] = shared.sources[part >> 1][first_row + r];
      ptx::block_mbarrier_wait(at.empty(to.stage, half), to.parity ^ 1);
      // Consumers wait for what lies between here and the copies: so these come first.
      if (rows == kAll) {
        if (ptx::elect_one()) {
          ptx::block_mbarrier_arrive_expecting(full, kRows * Tile::kRowBytes);
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            ptx::copy_bytes(place + r * Tile::kRowBytes, from[r], Tile::kRowBytes, full);
        }
      } else if (ptx::elect_one()) {
        ptx::block_mbarrier_arrive_expecting(full, __popc(rows) * Tile::kRowBytes);
#pragma unroll 1
        for (int r = 0; r < kRows; ++r)
          if ((rows >> r & 1) != 0)
            ptx::copy_bytes(place + r * Tile::kRowBytes, shared.sources[part >> 1][first_row + r],
                            Tile::kRowBytes, full);
      }
      if (lane >> 3 == part) {
        if (!is_row) clear_row(place + (lane & 7) * Tile::kRowBytes);
        shared.tokens[to.stage][first_row + (lane & 7)] = row_tokens;
        ptx::block_mbarrier_arrive(full);
      }
      if (half == 1) to.next();
    }
    meet();
  }
}

}  // namespace sparse_mla::sm90
#endif
