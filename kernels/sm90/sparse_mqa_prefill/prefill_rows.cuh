/// The producers of the `sparse_mqa` prefill kernel: rows of the cache into shared memory.
#pragma once

#include <cstdint>

#include "kernels/cuda/latent_rows.cuh"
#include "kernels/sm90/sparse_mqa_prefill/prefill_tile.cuh"
#include "kernels/sm90/zero_row.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace sparse_mla::sm90 {

/// The producer warpgroup copies bf16 rows, 16 bytes a thread, 8 lanes to 128 bytes of a row. Warp
/// w serves rows 16w … 16w + 15 of both blocks, of which lane l knows row l % 16 of block l / 16.
template <bool kPacked>
__device__ __forceinline__ void copy_rows(const PrefillArguments& args, PrefillShared& shared,
                                          const PrefillAddresses<CacheFormat::bf16>& at) {
  using Shape = PrefillShape;
  using Block = PrefillBlock<CacheFormat::bf16>;
  const LatentCache& cache = args.call.cache;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int key = lane / 16 * Block::kKeys + warp * 16 + lane % 16;
  const int row = lane / 8, chunk = lane % 8;  // row + 4 · pass of the warp's sixteen
  const std::uint32_t target = (16 * warp + row) * 128 + ((chunk ^ row) << 4);
  const std::int64_t num_slots = cache.num_slots();

  PairWalk<CacheFormat::bf16, kPacked> walk(args);
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
      const auto copy = [&](int slab) {
#pragma unroll
        for (int pass = 0; pass < 4; ++pass)
          ptx::cp_async_16(at.keys(block) + slab * Block::kSlabBytes + pass * 4 * 128 +
                               (pass % 2 == 0 ? target : target ^ 64),  // rows 4 … 7 of eight
                           from[pass] + slab * 128, valid[pass]);
      };
      const int first = block == 0 ? kFirstLow : kSecondHigh, second = first + 1;
      ptx::block_mbarrier_wait(at.empty(first), use % 2 ^ 1);
      if (lane < (kPacked ? PickUnion::kMaxTokens : 1)) {
        reinterpret_cast<std::uint16_t*>(&shared.valid[block][lane])[warp] =
            static_cast<std::uint16_t>(picked >> 16 * block);
        ptx::block_mbarrier_arrive(at.full(first));
      }
#pragma unroll
      for (int s = 0; s < Shape::kHalfSlabs; ++s) copy(block == 0 ? s : Shape::kHalfSlabs + s);
      ptx::mbarrier_arrive_after_copies(at.full(first));
      ptx::block_mbarrier_wait(at.empty(second), use % 2 ^ 1);
#pragma unroll
      for (int s = 0; s < Shape::kHalfSlabs; ++s) copy(block == 0 ? Shape::kHalfSlabs + s : s);
      copy(Shape::kRopeSlab);
      ptx::mbarrier_arrive_after_copies(at.full(second));
    }
  }
}

/// Two producer warpgroups decode rows of fp8_ds_mla (e4m3 · scale, rounded once to bf16: what
/// `gather` promises). Warp w serves rows 6w … 6w + 5 of both blocks. cp.async brings what a
/// quarter takes of them to the warp's own place in shared memory; the warp takes it from there to
/// registers, starts the copies of what the next block's quarter takes, and decodes into the
/// quarter as soon as that is free. Sixteen lanes to a row have 16 numbers each. Half of the lanes
/// load and store the second eight of them first, so that every bank is touched once.
template <bool kPacked>
__device__ __forceinline__ void decode_rows(const PrefillArguments& args, PrefillShared& shared,
                                            const PrefillAddresses<CacheFormat::fp8_ds_mla>& at) {
  using Shape = PrefillShape;
  using Block = PrefillBlock<CacheFormat::fp8_ds_mla>;
  constexpr int kRowsAtOnce = 2, kPasses = Block::kWarpKeys / kRowsAtOnce;
  constexpr int kScales = cuda::ds_mla_scale_offset(Shape::kLatent);
  constexpr int kRopePart = cuda::ds_mla_rope_offset(Shape::kLatent);
  constexpr int kRopeChunks = 2 * Shape::kRope / 16;
  const LatentCache& cache = args.call.cache;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int in_pass = lane / 16, unit = lane % 16, second = (unit / 4 ^ unit / 8) & 1;
  const int first_row = Block::kWarpKeys * warp;
  const std::uint32_t place = at.stored_rows() + first_row * Block::kStoredBytes;
  const std::uint32_t lane_row = place + in_pass * Block::kStoredBytes;  // of the first pass

  PairWalk<CacheFormat::fp8_ds_mla, kPacked> walk(args);
  if (walk.item >= args.items) return;
  // Of a pair: lane 16b + r has row r of block b.
  std::int32_t slot;
  std::uint32_t tokens;
  const auto load_picks = [&] {
    slot = -1;
    if (unit < Block::kWarpKeys)
      walk.pick(args, in_pass * Block::kKeys + first_row + unit, slot, tokens);
  };
  std::uint32_t offset;  // of the row behind the cache's first byte, in 16 bytes
  std::uint32_t rows;    // the warp's that are read, bits 16b + r
  std::uint32_t picked;  // by token `lane` of the item
  const auto find_rows = [&] {
    const bool is_row = slot >= 0 && slot < cache.num_slots();
    const std::uint32_t page = args.page.quotient(static_cast<std::uint32_t>(slot));
    const std::uint32_t in_page = static_cast<std::uint32_t>(slot) - page * args.page.page;
    offset = static_cast<std::uint32_t>(
        is_row ? (page * cache.block_stride + in_page * cache.row_stride) / 16 : 0);
    rows = __ballot_sync(~0u, is_row);
    picked = rows;
    if constexpr (kPacked) {
#pragma unroll
      for (int token = 0; token < PickUnion::kMaxTokens; ++token) {
        const std::uint32_t bits = __ballot_sync(~0u, is_row && (tokens >> token & 1) != 0);
        if (token == lane) picked = bits;
      }
    }
  };
  // Of the block whose rows are copied: where the lane begins, in the rows of each pass.
  const std::byte* to_copy[kPasses];
  const auto find_block = [&](int block) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int source = 16 * block + pass * kRowsAtOnce + in_pass;
      const std::byte* row = cache.data + std::int64_t{__shfl_sync(~0u, offset, source)} * 16;
      to_copy[pass] = row_or_zeros((rows >> source & 1) != 0 ? row : nullptr) + 16 * unit;
    }
  };
  // What a block's quarter takes of its rows: half a row's codes, scales and with the second
  // quarter the rope part.
  const auto start_copies = [&](int block, int side) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::uint32_t to = lane_row + pass * kRowsAtOnce * Block::kStoredBytes +
                               side * Block::kFirstBytes + 16 * unit;
      ptx::cp_async_16(to, to_copy[pass] + Shape::kHalfColumns * (side ^ block));
      if (unit < (side == 0 ? 1 : 1 + kRopeChunks))
        ptx::cp_async_16(to + Shape::kHalfColumns, to_copy[pass] + kScales);
    }
    ptx::mbarrier_arrive_after_copies(at.stored(side, warp));
  };
  static_assert(kRopePart == kScales + 16);

  load_picks();
  find_rows();
  find_block(0);
  start_copies(0, 0);
  start_copies(0, 1);
  walk.next(args);
  load_picks();
  bool is_next = true;  // a block after the one that is decoded
#pragma unroll 1        // for fewer instructions
  for (std::uint32_t number = 0; is_next; ++number) {
    const int block = static_cast<int>(number % 2);
    const std::uint32_t decoded = picked >> 16 * block;
    if (block == 1) {
      is_next = walk.item < args.items;
      find_rows();
      walk.next(args);
      load_picks();
    }
    find_block(block ^ 1);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int quarter = 2 * block + side, half = side ^ block;
      ptx::block_mbarrier_wait(at.stored(side, warp), block);
      uint2 codes[kPasses][2];
      float scale[kPasses];
      const std::uint32_t from = lane_row + side * Block::kFirstBytes;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const std::uint32_t row = from + pass * kRowsAtOnce * Block::kStoredBytes;
        codes[pass][0] = ptx::load_shared_8(row + 16 * unit + 8 * second);
        codes[pass][1] = ptx::load_shared_8(row + 16 * unit + 8 - 8 * second);
        scale[pass] = ptx::load_shared_float(row + Shape::kHalfColumns + 8 * half + 4 * (unit / 8));
      }
      // Eight lanes to a row: four rows, then two.
      const int rope_row = lane / kRopeChunks, rope_chunk = lane % kRopeChunks;
      uint4 rope[2];
      if (side == 1) {
        const std::uint32_t rope_from = place + rope_row * Block::kStoredBytes +
                                        Block::kStoredBytes - 2 * Shape::kRope + 16 * rope_chunk;
        rope[0] = ptx::load_shared_16(rope_from);
        if (lane < 16) rope[1] = ptx::load_shared_16(rope_from + 4 * Block::kStoredBytes);
      }
      __syncwarp();
      if (is_next) start_copies(block ^ 1, side);

      ptx::block_mbarrier_wait(at.empty(quarter), number / 2 % 2 ^ 1);
      if (side == 0) {
        if (lane < (kPacked ? PickUnion::kMaxTokens : 1))
          reinterpret_cast<std::uint8_t*>(&shared.valid[block][lane])[warp] =
              static_cast<std::uint8_t>(decoded);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::uint32_t row = first_row + rope_row + 4 * i;
          const std::uint32_t chunk[4] = {rope[i].x, rope[i].y, rope[i].z, rope[i].w};
          if (i == 0 || lane < 16)
            ptx::store_shared_16(at.keys(block) + Shape::kRopeSlab * Block::kSlabBytes + row * 128 +
                                     ((rope_chunk ^ row % 8) << 4),
                                 chunk);
        }
      }
      const std::uint32_t slab =
          at.keys(block) + (half * Shape::kHalfSlabs + unit / 4) * Block::kSlabBytes;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const std::uint32_t row = first_row + pass * kRowsAtOnce + in_pass;
        const std::uint32_t to = slab + row * 128 + (((2 * (unit % 4) + second) ^ row % 8) << 4);
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          const uint2 word = codes[pass][chunk];
          const std::uint32_t numbers[4] = {
              cuda::scale_e4m3x2_to_bf16x2(word.x, scale[pass]),
              cuda::scale_e4m3x2_to_bf16x2(word.x >> 16, scale[pass]),
              cuda::scale_e4m3x2_to_bf16x2(word.y, scale[pass]),
              cuda::scale_e4m3x2_to_bf16x2(word.y >> 16, scale[pass])};
          ptx::store_shared_16(chunk == 0 ? to : to ^ 16, numbers);
        }
      }
      __syncwarp();
      // By those who wrote validity bits.
      if (lane < (kPacked && side == 0 ? PickUnion::kMaxTokens : 1))
        ptx::block_mbarrier_arrive(at.full(quarter));
    }
  }
}

}  // namespace sparse_mla::sm90
#endif
