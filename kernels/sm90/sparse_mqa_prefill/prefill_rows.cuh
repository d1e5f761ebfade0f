/// The producers of the `sparse_mqa` prefill kernel: rows of the cache into shared memory.
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
  const LatentCache& cache = args.call.cache;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int key = lane / 16 * Shape::kKeys + warp * 16 + lane % 16;
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
      const auto copy = [&](int slab) {
#pragma unroll
        for (int pass = 0; pass < 4; ++pass)
          ptx::cp_async_16(at.keys(block) + slab * Shape::kSlabBytes + pass * 4 * 128 +
                               (pass % 2 == 0 ? target : target ^ 64),  // rows 4 … 7 of eight
                           from[pass] + slab * 128, valid[pass]);
      };
      const int first = block == 0 ? kFirstLow : kSecondHigh, second = first + 1;
      ptx::block_mbarrier_wait(at.empty(first), use % 2 ^ 1);
      if (lane < (kPacked ? PickUnion::kMaxTokens : 1))
        shared.valid[block][lane][warp] = static_cast<std::uint16_t>(picked >> 16 * block);
      if constexpr (kPacked) __syncwarp();
      if (lane == 0) ptx::block_mbarrier_arrive(at.full(first));
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

/// The producer warpgroup decodes rows of fp8_ds_mla (e4m3 · scale, rounded once to bf16: what
/// `gather` promises). Rows are served as by copy_rows(). A thread decodes 8 × 16 numbers of a
/// quarter, of every second row of the warp's sixteen: as soon as a piece of registers is stored,
/// that of the quarter after the next, the other block's, is loaded into it. Lanes 8s … 8s + 7
/// write slab s of the quarter, chunks 2c, then 2c + 1, of rows r and r + 1: every bank once.
template <bool kPacked>
__device__ __forceinline__ void decode_rows(const PrefillArguments& args, PrefillShared& shared,
                                            const PrefillAddresses& at) {
  using Shape = PrefillShape;
  constexpr int kPieces = 8;
  constexpr int kScales = cuda::ds_mla_scale_offset(Shape::kLatent);
  constexpr int kRopePart = cuda::ds_mla_rope_offset(Shape::kLatent);
  const LatentCache& cache = args.call.cache;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int key = lane / 16 * Shape::kKeys + warp * 16 + lane % 16;
  const int odd = lane / 4 % 2, chunk = lane % 4, slab = lane / 8;  // row odd + 2 · piece
  // Chunk 2c of row `odd`; piece p lies 2 rows further per p and, swizzled, at its chunk ^ 2p.
  const std::uint32_t target =
      slab * Shape::kSlabBytes + (16 * warp + odd) * 128 + ((2 * chunk ^ odd) << 4);
  const int from_row = 64 * slab + 16 * chunk;
  const std::int64_t num_slots = cache.num_slots();

  PairWalk<kPacked> walk(args);
  std::int32_t slot;  // of the pair after the one whose rows are loaded
  std::uint32_t tokens;
  walk.pick(args, key, slot, tokens);

  // Of the pair whose rows are loaded: which of the warp's are read (bits of 16 per block), which
  // of them token `lane` of the item picked, where they lie. Loads do not depend on the former:
  // another of the rows serves for one that is not read, the queries where there is none, and
  // decode() puts zeros.
  std::uint32_t rows, picked;
  const std::byte* base;
  std::uint32_t offset;  // of the lane's row behind `base`, in 16 bytes
  const auto next_pair = [&] {
    const bool is_row = slot >= 0 && slot < num_slots;
    rows = __ballot_sync(~0u, is_row);
    picked = rows;
    if constexpr (kPacked) {
#pragma unroll
      for (int token = 0; token < PickUnion::kMaxTokens; ++token) {
        const std::uint32_t bits = __ballot_sync(~0u, is_row && (tokens >> token & 1) != 0);
        if (token == lane) picked = bits;
      }
    }
    const std::int64_t bytes = is_row ? cuda::cached_row(cache, slot) - cache.data : 0;
    offset = static_cast<std::uint32_t>(bytes / 16);
    const std::uint32_t any = __shfl_sync(~0u, offset, __ffs(static_cast<int>(rows)) - 1);
    if (!is_row && rows != 0) offset = any;
    base = rows != 0 ? cache.data : reinterpret_cast<const std::byte*>(args.call.q.data_handle());
    if (walk.item < args.items) walk.next(args);
    walk.pick(args, key, slot, tokens);
  };
  const auto row_of = [&](int source) {
    return base + std::int64_t{__shfl_sync(~0u, offset, source)} * 16;
  };

  // Of a row that is not read, instead of its scale: no scale is −0.
  constexpr float kSkipped = -0.0f;
  uint4 piece[2][kPieces];  // of a block's two quarters
  float scale[2] = {};      // of row l % 16, lanes 16 … 31 of the quarter's second 128 columns
  const auto load = [&](int block, int side, int p) {
    piece[side][p] = ptx::load_16_once(row_of(16 * block + 2 * p + odd) +
                                       Shape::kHalfColumns * (block ^ side) + from_row);
  };
  const auto load_scale = [&](int block, int side) {
    return ptx::load_4_once(row_of(16 * block + lane % 16) + kScales +
                            4 * (2 * (block ^ side) + lane / 16));
  };
  const auto scale_or_skipped = [&](float loaded, int block) {
    return (rows >> (16 * block + lane % 16) & 1) != 0 ? loaded : kSkipped;
  };
  const auto decode = [&](std::uint32_t quarter, int side, int p) {
    const float factor = __shfl_sync(~0u, scale[side], 16 * (slab / 2) + 2 * p + odd);
    const bool skips = __float_as_uint(factor) == __float_as_uint(kSkipped);
    if (__any_sync(~0u, skips) && skips) piece[side][p] = {0, 0, 0, 0};
    const std::uint32_t to = quarter + ((target ^ p % 4 << 5) + p * 2 * 128);
    const auto half = [&](std::uint32_t shared_to, std::uint32_t low, std::uint32_t high) {
      const std::uint32_t numbers[4] = {cuda::scale_e4m3x2_to_bf16x2(low, factor),
                                        cuda::scale_e4m3x2_to_bf16x2(low >> 16, factor),
                                        cuda::scale_e4m3x2_to_bf16x2(high, factor),
                                        cuda::scale_e4m3x2_to_bf16x2(high >> 16, factor)};
      ptx::store_shared_16(shared_to, numbers);
    };
    half(to, piece[side][p].x, piece[side][p].y);
    half(to ^ 16, piece[side][p].z, piece[side][p].w);
  };
  // What copy_rope() needs of the pair that is stored, after those of the next are there.
  const std::byte* rope_base;
  std::uint32_t rope_offset, rope_rows;
  const auto copy_rope = [&](int block) {
#pragma unroll
    for (int pass = 0; pass < 4; ++pass) {
      const int row = 4 * pass + lane / 8, source = 16 * block + row;
      ptx::cp_async_16(at.keys(block) + Shape::kRopeSlab * Shape::kSlabBytes +
                           (16 * warp + row) * 128 + ((lane % 8 ^ row % 8) << 4),
                       rope_base + std::int64_t{__shfl_sync(~0u, rope_offset, source)} * 16 +
                           kRopePart + 16 * (lane % 8),
                       (rope_rows >> source & 1) != 0);
    }
  };

  bool more = walk.item < args.items;
  if (!more) return;
  next_pair();
#pragma unroll
  for (int side = 0; side < 2; ++side) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) load(0, side, p);
    scale[side] = scale_or_skipped(load_scale(0, side), 0);
  }
  for (std::uint32_t use = 0; more; ++use) {
    rope_base = base;
    rope_offset = offset;
    rope_rows = rows;
#pragma unroll 1  // for fewer registers
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int quarter = 2 * block + side;
        // ptxas moves instructions between branches only. Those of a wait that is over keep it
        // from working on all pieces at once, with more registers than there are, and from loading
        // a piece before its registers are free.
        const auto split = [&] { ptx::block_mbarrier_wait(at.empty(quarter), use % 2 ^ 1); };
        split();
        if (side == 0) {
          if (lane < (kPacked ? PickUnion::kMaxTokens : 1))
            shared.valid[block][lane][warp] = static_cast<std::uint16_t>(picked >> 16 * block);
          if (block == 1) {
            more = walk.item < args.items;
            next_pair();
          }
        } else {
          copy_rope(block);
          ptx::mbarrier_arrive_after_copies(at.full(quarter));
        }
        const float next_scale = load_scale(block ^ 1, side);
        const std::uint32_t to =
            at.keys(block) + (block ^ side) * Shape::kHalfSlabs * Shape::kSlabBytes;
#pragma unroll
        for (int p = 0; p < kPieces; p += 2) {
          decode(to, side, p);
          decode(to, side, p + 1);
          if (p + 2 < kPieces) {
            load(block ^ 1, side, p);
            load(block ^ 1, side, p + 1);
            split();
          }
        }
        __syncwarp();
        if (lane == 0) ptx::block_mbarrier_arrive(at.full(quarter));
        load(block ^ 1, side, kPieces - 2);
        load(block ^ 1, side, kPieces - 1);
        scale[side] = scale_or_skipped(next_scale, block ^ 1);
      }
    }
  }
}

}  // namespace sparse_mla::sm90
#endif
