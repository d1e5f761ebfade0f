/// The producers of `sparse_mqa` decode on Hopper: rows of the cache into swizzled tiles of bf16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/sm90/sparse_mqa_decode/tile.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace sparse_mla::sm90 {

/// The producers' walk over the pairs of blocks of all of the CTA's items.
struct DecodeWalk {
  int item, position = 0, end = 0;  ///< first slot of the pair; end of the CTA's share
  int ended = 0;                    ///< items that ended since the pair before

  __device__ explicit DecodeWalk(const DecodeArguments& args)
      : item(first_item(args) - args.clusters) {
    next(args);
    --ended;  // the one before the first
  }
  __device__ void next(const DecodeArguments& args) {
    ended = 0;
    position += DecodeShape::kPairKeys;
    while (position >= end) {
      item += args.clusters;
      ++ended;
      if (item >= args.items) return;
      const Share share(slots_of(args, item), args.splits);
      position = share.begin;
      end = share.end;
    }
  }
  __device__ bool done(const DecodeArguments& args) const { return item >= args.items; }
  /// The slot of the pair's key number `key`; −1 = do not read.
  __device__ std::int32_t slot(const DecodeArguments& args, int key) const {
    if (done(args) || position + key >= end) return -1;
    const int token =
        static_cast<int>(static_cast<unsigned>(item) / static_cast<unsigned>(args.head_tiles));
    return args.call.slots(token, position + key);
  }
};

/// Where the row at `slot` lies, null = it is not to be read.
__device__ inline const std::byte* row_of_slot(const DecodeArguments& args, std::int32_t slot) {
  const LatentCache& cache = args.call.cache;
  if (slot < 0 || slot >= cache.num_slots()) return nullptr;
  const std::uint32_t block = args.page.quotient(static_cast<std::uint32_t>(slot));
  const std::uint32_t offset = static_cast<std::uint32_t>(slot) - block * args.page.page;
  return cache.data + std::int64_t{block} * cache.block_stride +
         std::int64_t{offset} * cache.row_stride;
}

/// Bits of the warp's eight rows, of which four lanes each have one.
__device__ inline std::uint8_t valid_bits(bool valid) {
  const int of_row = __shfl_sync(~0u, static_cast<int>(valid), threadIdx.x % 8 * 4);
  return static_cast<std::uint8_t>(__ballot_sync(~0u, of_row != 0));
}

/// Eight warps gather rows: cp.async of 16 bytes, eight lanes to 128 bytes of a row. Warp w serves
/// rows 8w … 8w + 7 of both blocks, four lanes to a row, which know their row's slot two pairs
/// ahead and its address one pair ahead.
__device__ __forceinline__ void produce(const DecodeArguments& args, DecodeShared& shared,
                                        const DecodeAddresses& at) {
  using Shape = DecodeShape;
  const LatentCache& cache = args.call.cache;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = 8 * warp + lane / 4;

  // At the end of an item all threads of a cluster meet twice; what the consumers do in between
  // takes the place of the keys, so there is nothing that producers could do meanwhile.
  const auto meet = [&](int items) {
    if (args.splits == 1) return;
#pragma unroll 1
    for (int i = 0; i < 2 * items; ++i) {
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
  };

  DecodeWalk walk(args);
  const std::byte* from[2];
  std::int32_t slot[2];  // of the next pair
  const auto load_slots = [&] {
#pragma unroll
    for (int block = 0; block < 2; ++block)
      slot[block] = walk.slot(args, block * Shape::kKeys + row);
  };
  load_slots();
  from[0] = row_of_slot(args, slot[0]);
  from[1] = row_of_slot(args, slot[1]);
  bool live = !walk.done(args);
  int ended = walk.ended;  // items, with the pair before
  const auto next_pair = [&] {
    live = !walk.done(args);
    ended = walk.ended;
    walk.next(args);
    load_slots();
  };
  walk.next(args);
  load_slots();
  meet(ended);

  std::uint32_t use = 0;
  // The consumers fence off what comes after: a fence here would wait for the loads under way.
  const auto finish = [&](int quarter) {
    ptx::mbarrier_arrive_after_copies(at.full(quarter));
    __syncwarp();
    if (lane == 0) ptx::block_mbarrier_arrive(at.full(quarter));
  };
  const auto begin_quarter = [&](int quarter) {
    ptx::block_mbarrier_wait(at.empty(quarter), use % 2 ^ 1);
  };
  const auto write_valid = [&](int block) {
    const std::uint8_t bits = valid_bits(from[block] != nullptr);
    if (lane == 0) shared.valid[block][warp] = bits;
  };

  // The warp's eight rows in two passes of four.
  const int chunk = lane % 8;
  const auto copy_quarter = [&](int block, int half, bool rope) {
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
      const int in_warp = 4 * pass + lane / 8;
      const auto begin = reinterpret_cast<const std::byte*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(from[block]), 4 * in_warp));
      const bool valid = begin != nullptr;
      const std::byte* chunks = (valid ? begin : cache.data) + 16 * chunk;
      const std::uint32_t to =
          at.keys(block) + (8 * warp + in_warp) * 128 + ((chunk ^ in_warp) << 4);
#pragma unroll
      for (int s = 0; s < Shape::kHalfSlabs; ++s) {
        const int slab = half * Shape::kHalfSlabs + s;
        ptx::cp_async_16(to + slab * Shape::kSlabBytes, chunks + slab * 128, valid);
      }
      if (rope)
        ptx::cp_async_16(to + Shape::kRopeSlab * Shape::kSlabBytes, chunks + Shape::kRopeSlab * 128,
                         valid);
    }
  };
  for (; live; ++use) {
    begin_quarter(kFirstLow);
    write_valid(0);
    copy_quarter(0, 0, false);
    finish(kFirstLow);
    begin_quarter(kFirstHigh);
    copy_quarter(0, 1, true);
    finish(kFirstHigh);
    begin_quarter(kSecondHigh);
    write_valid(1);
    copy_quarter(1, 1, false);
    finish(kSecondHigh);
    begin_quarter(kSecondLow);
    copy_quarter(1, 0, true);
    finish(kSecondLow);
    from[0] = row_of_slot(args, slot[0]);
    from[1] = row_of_slot(args, slot[1]);
    next_pair();
    meet(ended);
  }
}

/// Arrivals that fill a quarter: a lane of each producer warp, and each producer's copies.
constexpr int kFullArrivals = DecodeShape::kProducerWarps + DecodeShape::kProducerThreads;

}  // namespace sparse_mla::sm90
#endif
