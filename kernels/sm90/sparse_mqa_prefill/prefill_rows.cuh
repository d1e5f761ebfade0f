/// The producers of the `sparse_mqa` prefill kernel: rows of the cache into shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/latent_rows.cuh"
#include "kernels/sm90/scaled_f16.cuh"
#include "kernels/sm90/sparse_mqa_prefill/prefill_tile.cuh"

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

/// Producer groups of quantised rows: of the four warps of a group three decode, and one copies for
/// them.
constexpr int kDecoders = kDecodingWarps / 2;
constexpr int kCopiedKeys = kDecoders * PrefillBlock<CacheFormat::fp8_ds_mla>::kFillerKeys;

/// A group's copying warp: cp.async of 16 bytes brings the rows of a decoding warp to their places
/// as soon as those of the block before have been read; picks are known a pair ahead. Lane r has
/// row r of the group's 24.
template <bool kPacked>
__device__ __forceinline__ void copy_quantised_rows(
    const PrefillArguments& args, PrefillShared& shared,
    const PrefillAddresses<CacheFormat::fp8_ds_mla>& at, int group) {
  using Shape = PrefillShape;
  using Block = PrefillBlock<CacheFormat::fp8_ds_mla>;
  constexpr int kRowChunks = (cuda::ds_mla_rope_offset(Shape::kLatent) + 2 * Shape::kRope) / 16;
  constexpr int kRowsAtOnce = 2, kPasses = Block::kFillerKeys / kRowsAtOnce;
  const LatentCache& cache = args.call.cache;
  const int lane = threadIdx.x % 32, in_pass = lane / 16, chunk = lane % 16;
  const int first_row = group * kCopiedKeys;
  // Memory is seen in lines of 128 bytes: a row begins in its place where it begins in its line.
  const auto odd = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(cache.data) % 128);
  const std::byte* const lines = cache.data - odd + 16 * chunk;
  const std::uint32_t place = at.stored_row(first_row + in_pass) + 16 * chunk;

  PairWalk<CacheFormat::fp8_ds_mla, kPacked> walk(args);
  std::int32_t slot[2];  // of a pair's blocks
  std::uint32_t tokens[2];
  const auto load_picks = [&] {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      slot[block] = -1;
      if (lane < kCopiedKeys)
        walk.pick(args, block * Block::kKeys + first_row + lane, slot[block], tokens[block]);
    }
  };
  bool is_pair;
  std::uint32_t offset[2];  // of the row behind the first line, in 16 bytes
  std::uint32_t rows[2];    // that are read, bits
  std::uint32_t picked[2];  // of token lane % 8 by decoding warp lane / 8
  const auto find_rows = [&] {
    is_pair = walk.item < args.items;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const bool is_row = slot[block] >= 0 && slot[block] < cache.num_slots();
      const auto of = static_cast<std::uint32_t>(slot[block]);
      const std::uint32_t page = args.page.quotient(of), in_page = of - page * args.page.page;
      offset[block] = static_cast<std::uint32_t>(
          (is_row ? odd + page * cache.block_stride + in_page * cache.row_stride : odd) / 16);
      rows[block] = __ballot_sync(~0u, is_row);
      std::uint32_t bits = rows[block];
      if constexpr (kPacked) {
#pragma unroll
        for (int token = 0; token < PickUnion::kMaxTokens; ++token) {
          const std::uint32_t of_token =
              __ballot_sync(~0u, is_row && (tokens[block] >> token & 1) != 0);
          if (token == lane % 8) bits = of_token;
        }
      }
      picked[block] = (bits >> (lane / 8 * 8) & 0xFF) | PrefillShared::kIsBlock |
                      offset[block] % 8 << PrefillShared::kBeginShift;
      if (!is_pair) picked[block] = 0;
    }
  };
  const auto next_picks = [&] {
    find_rows();
    if (is_pair) walk.next(args);
    load_picks();
  };
  load_picks();
  next_picks();
#pragma unroll 1
  for (bool more = true; more;) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      more = is_pair;
#pragma unroll
      for (int d = 0; d < kDecoders; ++d) {
        const int warp = group * kDecoders + d;
        ptx::block_mbarrier_wait(at.taken(warp), block ^ 1);
        if (lane / 8 == d) {
          shared.picked[warp][lane % 8] = static_cast<std::uint16_t>(picked[block]);
          ptx::block_mbarrier_arrive(at.stored(warp));
        }
        if (more) {
          // Sixteen lanes to a row, two rows at once, two lines of each at a time, but for what
          // lies before and behind the row.
#pragma unroll
          for (int pass = 0; pass < kPasses; ++pass) {
            const int row = 8 * d + pass * kRowsAtOnce + in_pass;
            const std::uint32_t of_row = __shfl_sync(~0u, offset[block], row);
            const int first = static_cast<int>(of_row % 8);
            const std::byte* from = lines + std::uint64_t{of_row / 8} * 128;
            const std::uint32_t to = place + (8 * d + pass * kRowsAtOnce) * Block::kStoredBytes;
            const bool is_read = (rows[block] >> row & 1) != 0;
            ptx::cp_async_16_if(to, from, is_read, chunk >= first);
            ptx::cp_async_16(to + 256, from + 256, is_read);
            ptx::cp_async_16_if(to + 512, from + 512, is_read, chunk < kRowChunks - 32 + first);
          }
        }
        ptx::mbarrier_arrive_after_copies(at.stored(warp));
      }
      if (!more) break;
      if (block == 1) next_picks();
    }
  }
}

/// A decoding warp: rows 8w … 8w + 7 of both blocks to fp16, all divided by one power of two
/// (scaled_f16.cuh). It takes its rows of a block to registers, so that the next come in meanwhile,
/// and decodes them into the quarters as soon as those are free. Sixteen lanes to a row have 16
/// numbers of each half. Half of the lanes load and store the second eight of them first, so that
/// every bank is touched once.
template <bool kPacked>
__device__ __forceinline__ void decode_rows(PrefillShared& shared,
                                            const PrefillAddresses<CacheFormat::fp8_ds_mla>& at,
                                            int warp) {
  using Shape = PrefillShape;
  using Block = PrefillBlock<CacheFormat::fp8_ds_mla>;
  constexpr int kRowsAtOnce = 2, kPasses = Block::kFillerKeys / kRowsAtOnce;
  constexpr int kScales = cuda::ds_mla_scale_offset(Shape::kLatent);
  constexpr int kRopePart = cuda::ds_mla_rope_offset(Shape::kLatent);
  const int lane = threadIdx.x % 32;
  const int in_pass = lane / 16, unit = lane % 16, second = (unit / 4 ^ unit / 8) & 1;
  const int first_row = Block::kFillerKeys * warp + in_pass;  // of the first pass
  const std::uint32_t place = at.stored_row(Block::kFillerKeys * warp);
  const std::uint32_t place_of_codes =
      place + in_pass * Block::kStoredBytes + 16 * unit + 8 * second;
  // Row `first_row` of a slab; passes further on are at `of_pass`. The warp's rows are eight of a
  // swizzle's period.
  const std::uint32_t to_codes = (unit / 4) * Block::kSlabBytes + first_row * 128 +
                                 (((2 * (unit % 4) + second) ^ in_pass) << 4);
  const std::uint32_t to_rope = Shape::kRopeSlab * Block::kSlabBytes +
                                (Block::kFillerKeys * warp + lane / 4) * 128 +
                                ((2 * (lane % 4) ^ lane / 4) << 4);
  const auto of_pass = [](std::uint32_t address, int pass) {
    return (address ^ static_cast<std::uint32_t>(pass * kRowsAtOnce << 4)) +
           static_cast<std::uint32_t>(pass * kRowsAtOnce * 128);
  };

#pragma unroll 1  // for fewer instructions
  for (std::uint32_t number = 0;; ++number) {
    const int block = static_cast<int>(number % 2);
    std::uint32_t picked = 0;    // by token `lane` of the item
    uint2 codes[2][kPasses][2];  // by side of the block, that is by half of the row
    ptx::block_mbarrier_wait(at.stored(warp), block);
    if (lane < PickUnion::kMaxTokens) picked = shared.picked[warp][lane];
    if ((__shfl_sync(~0u, picked, 0) & PrefillShared::kIsBlock) == 0) return;
    // Where row r of the warp lies behind its place, in bytes.
    const auto begin = [&](int r) {
      return (__shfl_sync(~0u, picked, r) >> PrefillShared::kBeginShift) * 16;
    };
    const auto load_codes = [&](auto pass) {
      constexpr int kPass = decltype(pass)::value;
      constexpr int kBehind = kPass * kRowsAtOnce * Block::kStoredBytes;
      const std::uint32_t from = place_of_codes + begin(kPass * kRowsAtOnce + in_pass);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const std::uint32_t of_half = Shape::kHalfColumns * (side ^ block);
        codes[side][kPass][0] = ptx::load_shared_8<kBehind>(from + of_half);
        codes[side][kPass][1] = ptx::load_shared_8<kBehind>((from ^ 8) + of_half);
      }
    };
    load_codes(std::integral_constant<int, 0>{});
    load_codes(std::integral_constant<int, 1>{});
    load_codes(std::integral_constant<int, 2>{});
    load_codes(std::integral_constant<int, 3>{});
    static_assert(kPasses == 4);
    // Four lanes to a row.
    const std::uint32_t rest = place + lane / 4 * Block::kStoredBytes + begin(lane / 4);
    const float scale = ptx::load_shared_float(rest + kScales + 4 * (lane % 4));
    uint4 rope[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      rope[i] = ptx::load_shared_16(rest + kRopePart + 32 * (lane % 4) + 16 * i);
    __syncwarp();
    if (lane < PickUnion::kMaxTokens) ptx::block_mbarrier_arrive(at.taken(warp));
    constexpr float kLargestE4m3 = 448;
    // Numbers that are not negative are in the order of their bits.
    const std::uint32_t most = __reduce_max_sync(~0u, __float_as_uint(fabsf(scale)));
    const PowerOfTwo divisor = PowerOfTwo::that_fits(kLargestE4m3 * __uint_as_float(most));
    const __half2 scaled = __float2half2_rn(scale * divisor.inverse());
    // One register for both: a power of two has an exponent alone.
    picked = (picked & 0xFF) | __float_as_uint(divisor.value());

#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int quarter = 2 * block + side, half = side ^ block;
      ptx::block_mbarrier_wait(at.empty(quarter), number / 2 % 2 ^ 1);
      if (side == 0) {
        if (lane < (kPacked ? PickUnion::kMaxTokens : 1))
          reinterpret_cast<std::uint8_t*>(&shared.valid[block][lane])[warp] =
              static_cast<std::uint8_t>(picked);
        if (lane == 0) shared.key_divisor[block][warp] = __uint_as_float(picked & ~0xFFu);
      }
      const std::uint32_t to = at.keys(block) + half * Shape::kHalfSlabs * Block::kSlabBytes;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const std::uint32_t to_pass = of_pass(to + to_codes, pass);
        // Of the lane's codes, twice.
        const __half2 factor =
            __shfl_sync(~0u, scaled, 4 * (pass * kRowsAtOnce + in_pass) + 2 * half + unit / 8);
        const std::uint32_t by = *reinterpret_cast<const std::uint32_t*>(&factor);
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
          const uint2 word = codes[side][pass][chunk];
          std::uint32_t numbers[4];
          scale_e4m3x4(word.x, by, numbers[0], numbers[1]);
          scale_e4m3x4(word.y, by, numbers[2], numbers[3]);
          ptx::store_shared_16(chunk == 0 ? to_pass : to_pass ^ 16, numbers);
        }
      }
      if (side == 1) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::uint32_t numbers[4] = {rope[i].x, rope[i].y, rope[i].z, rope[i].w};
          ptx::store_shared_16(at.keys(block) + (i == 0 ? to_rope : to_rope ^ 16), numbers);
        }
      }
      ptx::fence_shared_to_async();
      __syncwarp();
      // By those who wrote what belongs to the block.
      if (lane < (side == 0 && kPacked ? PickUnion::kMaxTokens : 1))
        ptx::block_mbarrier_arrive(at.full(quarter));
    }
  }
}

/// The two warpgroups that gather quantised rows.
template <bool kPacked>
__device__ __forceinline__ void quantised_rows(
    const PrefillArguments& args, PrefillShared& shared,
    const PrefillAddresses<CacheFormat::fp8_ds_mla>& at) {
  const int in_group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 % 4, 0);
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (in_group == kDecoders)
    copy_quantised_rows<kPacked>(args, shared, at, group);
  else
    decode_rows<kPacked>(shared, at, group * kDecoders + in_group);
}

}  // namespace sparse_mla::sm90
#endif
