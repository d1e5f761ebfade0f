/// Sparse MQA on tensor cores: S = q'·latentᵀ, P = softmax(S), out = P·latent[:, :512], for rows
/// that a token's slots name.
///
/// CTA = (token, tile of 16, 32 or 64 heads, share of the token's keys), 8 warps, 64 keys at a
/// time:
///   gather  64 rows → shared memory, cp.async of 16 bytes, 8 lanes to a row. bf16: the next tile's
///           rows fly into the second buffer during the whole step. Quantised: their bytes fly into
///           a buffer of their own; at the start of a step they become bf16 in the key buffer,
///           exactly (e4m3 has fewer bits).
///   QK      a warp takes 16 heads × 64 · units / 8 keys, depth 576.
///   softmax online, fp32, base 2; the row's maximum goes through shared memory to all warps.
///   PV      a warp takes all heads × 64 of the 512 columns: 32 · units registers of sums. Weights
///           P come from shared memory as bf16, values are the keys' own rows (ldmatrix.trans).
/// A row that is not to be read becomes zeros, its score −inf.
///
/// Scales of fp8_ds_mla never touch the numbers: the 4 groups' parts of a score are multiplied by
/// their scales in fp32, and PV has a matrix P for each group, weight · scale / reference, rounded
/// once to bf16; the reference is the first valid key's scale and returns at the end. (So one key
/// alone gives back its row's numbers exactly.) The one scale of fp8 is part of the softmax scale
/// and of the result's factor.
///
/// Rows in shared memory are swizzled: 16-byte piece c of row r lies at c ^ (r % 8), so that the 8
/// rows of an ldmatrix and the pieces of a gathered row touch every bank once.
#pragma once

#include <cstdint>

#include "kernels/common/finished_row.h"
#include "kernels/common/ptx.cuh"
#include "kernels/cuda/latent_rows.cuh"
#include "kernels/cuda/sparse_mqa_shape.h"
#include "kernels/cuda/write_lse.cuh"
#include "sparse_mla/attention.h"

namespace sparse_mla::cuda {

struct MqaArguments {
  SparseMqaCall call;
  int num_heads, lora, rope;  ///< H, L ≤ 512, R ≤ 64
  int head_tiles, splits, stages;
  bool vector_rows, vector_q, paired_out;  ///< 16-byte rows and queries, 4-byte results?
  float logit_scale;                       ///< softmax scale · log2(e) [· fp8's scale]
  float value_scale;                       ///< fp8's scale, else 1
  float* part_out;                         ///< [tokens, splits, heads, 512], splits > 1
  float* part_lse;                         ///< [tokens, splits, heads]
};

/// 8 e4m3 numbers as bf16: exact.
__device__ inline uint4 bf16_of_e4m3(uint2 numbers) {
  return {scale_e4m3x2_to_bf16x2(numbers.x, 1), scale_e4m3x2_to_bf16x2(numbers.x >> 16, 1),
          scale_e4m3x2_to_bf16x2(numbers.y, 1), scale_e4m3x2_to_bf16x2(numbers.y >> 16, 1)};
}

/// Byte offset of 16-byte piece `piece` in row `row` of a swizzled tile.
__device__ inline int swizzled(int row, int row_bytes, int piece) {
  return row * row_bytes + ((piece ^ (row & 7)) << 4);
}

/// One CTA's gather: a thread serves rows r and r + 32 of every tile together with 7 others.
template <CacheFormat kFormat>
class MqaGather {
 public:
  __device__ MqaGather(const MqaArguments& arguments, char* shared, const MqaShared& layout,
                       std::int64_t token, int begin, int end)
      : args_(arguments),
        keys_(shared + layout.keys),
        raw_(shared + layout.raw),
        valid_(reinterpret_cast<std::uint8_t*>(shared + layout.valid)),
        token_(token),
        end_(end) {
    num_slots_ = args_.call.cache.num_slots();
    read_slots(begin);
  }

  /// Starts tile number `tile`, whose first key is the one of the last read_slots, into stage
  /// `stage` (or the raw buffer), then reads the next tile's slots.
  __device__ void start(int tile, int stage, int next_key) {
    const LatentCache& cache = args_.call.cache;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row() + 32 * half;
      const bool valid = slots_[half] >= 0;
      const std::byte* from = valid ? cached_row(cache, slots_[half]) : cache.data;
      if (lane8() == 0) valid_[(tile & 1) * kTileKeys + row] = valid;
      if (args_.vector_rows)
        start_row(row, stage, from, valid);
      else
        copy_row(row, stage, from, valid);
    }
    ptx::cp_async_commit();
    read_slots(next_key);
  }

 private:
  __device__ static int lane8() { return static_cast<int>(threadIdx.x) % 8; }
  __device__ static int first_row() { return static_cast<int>(threadIdx.x) / 8; }

  /// The slots of this thread's rows in the tile that starts with key `first`; −1 = do not read.
  __device__ void read_slots(int first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first + first_row() + 32 * half;
      const std::int32_t slot = key < end_ ? args_.call.slots(token_, key) : -1;
      slots_[half] = slot < num_slots_ ? slot : -1;
    }
  }

  __device__ void start_row(int row, int stage, const std::byte* from, bool valid) {
    if constexpr (kFormat == CacheFormat::bf16) {
      char* to = keys_ + stage * kTileKeys * kTileRowBytes + swizzled(row, kTileRowBytes, lane8());
#pragma unroll
      for (int j = 0; j < kTileRowBytes / 128; ++j)
        ptx::cp_async_16(to + 128 * j, from + (valid ? 128 * j + 16 * lane8() : 0), valid);
    } else {
      constexpr int kPieces = raw_row_bytes(kFormat) / 16;
      static_assert(raw_row_bytes(kFormat) % 16 == 0);
      char* to = raw_ + row * raw_row_bytes(kFormat);
#pragma unroll
      for (int j = 0; j < (kPieces + 7) / 8; ++j) {
        const int piece = 8 * j + lane8();
        if (piece < kPieces)
          ptx::cp_async_16(to + 16 * piece, from + (valid ? 16 * piece : 0), valid);
      }
    }
  }

  /// Any address, any width up to the tile's: byte by byte, zeros where there is nothing.
  __device__ void copy_row(int row, int stage, const std::byte* from, bool valid) {
    const int lora = args_.lora, rope = args_.rope;
    if constexpr (kFormat == CacheFormat::bf16) {
      char* tile = keys_ + stage * kTileKeys * kTileRowBytes;
#pragma unroll 1
      for (int d = lane8(); d < kTileWidth; d += 8) {
        const int element = d < kTileLatent ? d : lora + (d - kTileLatent);
        const bool present = valid && (d < kTileLatent ? d < lora : d - kTileLatent < rope);
        *reinterpret_cast<bfloat16*>(tile + swizzled(row, kTileRowBytes, d / 8) + d % 8 * 2) =
            present ? load_bf16_bytes(from + 2 * element) : bfloat16(0.0f);
      }
    } else {
      const int scale_bytes = kFormat == CacheFormat::fp8_ds_mla ? lora / kLatentScaleGroup * 4 : 0;
      const int rope_bytes = kFormat == CacheFormat::fp8_ds_mla ? 2 * rope : rope;
      constexpr int kRopeBegin =
          kTileLatent + (kFormat == CacheFormat::fp8_ds_mla ? 4 * kScaleGroups : 0);
      char* to = raw_ + row * raw_row_bytes(kFormat);
#pragma unroll 1
      for (int b = lane8(); b < raw_row_bytes(kFormat); b += 8) {
        int byte = b;  // of the cache's row
        bool present = b < lora;
        if (b >= kRopeBegin) {
          byte = lora + scale_bytes + (b - kRopeBegin);
          present = b - kRopeBegin < rope_bytes;
        } else if (b >= kTileLatent) {
          byte = lora + (b - kTileLatent);
          present = b - kTileLatent < scale_bytes;
        }
        to[b] = present && valid ? static_cast<char>(from[byte]) : char{0};
      }
    }
  }

  const MqaArguments& args_;
  char* keys_;
  char* raw_;
  std::uint8_t* valid_;
  std::int64_t token_, num_slots_;
  int end_;
  std::int32_t slots_[2];
};

/// The raw buffer's 64 rows → bf16 in the key buffer; fp8_ds_mla: the scales, too. 16 lanes to a
/// row: whole 128-byte lines are read and whole 256-byte ones written.
template <CacheFormat kFormat>
__device__ void dequantise_tile(const char* raw, char* keys, float* scales) {
  constexpr int kRaw = raw_row_bytes(kFormat);
  const int thread = static_cast<int>(threadIdx.x);
  const auto convert = [&](int row, int piece) {
    const uint2 numbers = *reinterpret_cast<const uint2*>(raw + row * kRaw + 8 * piece);
    *reinterpret_cast<uint4*>(keys + swizzled(row, kTileRowBytes, piece)) = bf16_of_e4m3(numbers);
  };
#pragma unroll 2
  for (int row = thread / 16; row < kTileKeys; row += kMqaThreads / 16)
#pragma unroll
    for (int j = 0; j < kTileLatent / 128; ++j) convert(row, 16 * j + thread % 16);
#pragma unroll
  for (int i = thread; i < kTileKeys * 8; i += kMqaThreads) {
    const int row = i / 8, piece = kTileLatent / 8 + i % 8;
    if constexpr (kFormat == CacheFormat::fp8_ds_mla)
      *reinterpret_cast<uint4*>(keys + swizzled(row, kTileRowBytes, piece)) =
          *reinterpret_cast<const uint4*>(raw + row * kRaw + kTileLatent + 4 * kScaleGroups +
                                          i % 8 * 16);
    else
      convert(row, piece);
  }
  if constexpr (kFormat == CacheFormat::fp8_ds_mla) {
    static_assert(kTileKeys * kScaleGroups == kMqaThreads);
    const int row = thread / kScaleGroups, group = thread % kScaleGroups;
    scales[thread] = *reinterpret_cast<const float*>(raw + row * kRaw + kTileLatent + 4 * group);
  }
}

/// The queries of heads [first_head, first_head + 16 · units) → swizzled shared memory, zeros
/// where there is no head or no column.
template <int kUnits>
__device__ void load_queries(const MqaArguments& args, char* q, std::int64_t token,
                             int first_head) {
  constexpr int kPieces = kTileRowBytes / 16;
  const int thread = static_cast<int>(threadIdx.x);
  if (args.vector_q) {
    for (int i = thread; i < 16 * kUnits * kPieces; i += kMqaThreads) {
      const int row = i / kPieces, piece = i % kPieces, head = first_head + row;
      const bool valid = head < args.num_heads;
      ptx::cp_async_16(q + swizzled(row, kTileRowBytes, piece),
                       address(args.call.q, token, valid ? head : 0, 8 * piece), valid);
    }
    return;
  }
#pragma unroll 1
  for (int i = thread; i < 16 * kUnits * kTileWidth; i += kMqaThreads) {
    const int row = i / kTileWidth, d = i % kTileWidth, head = first_head + row;
    const int element = d < kTileLatent ? d : args.lora + (d - kTileLatent);
    const bool present =
        head < args.num_heads && (d < kTileLatent ? d < args.lora : d - kTileLatent < args.rope);
    *reinterpret_cast<bfloat16*>(q + swizzled(row, kTileRowBytes, d / 8) + d % 8 * 2) =
        present ? *address(args.call.q, token, head, element) : bfloat16(0.0f);
  }
}

/// Warp (unit, part) of QK: sums[n] += 16 heads × 8 keys (n-th of the warp's) over the columns
/// [64 · first, 64 · last).
template <int kKeyTiles>
__device__ void multiply_keys(float (&sums)[kKeyTiles][4], const char* q, const char* keys,
                              int first, int last) {
  // q: the lane's row of the A fragment; keys: its row of the first B fragment (see below).
  const int lane = static_cast<int>(threadIdx.x) % 32, low = lane & 7;
#pragma unroll 1
  for (int c = first; c < last; ++c) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {  // 32 columns: two MMA steps
      std::uint32_t a[2][4];
#pragma unroll
      for (int k = 0; k < 2; ++k)
        ptx::ldmatrix_x4(a[k], q + 128 * c + (((4 * pair + 2 * k + (lane >> 4)) ^ low) << 4));
      if constexpr (kKeyTiles == 1) {
        // Matrices: 8 keys × columns 0-7, 8-15, 16-23, 24-31.
        std::uint32_t b[4];
        ptx::ldmatrix_x4(b, keys + 128 * c + (((4 * pair + (lane >> 3)) ^ low) << 4));
        ptx::mma_m16n8k16_bf16(sums[0], a[0], b[0], b[1]);
        ptx::mma_m16n8k16_bf16(sums[0], a[1], b[2], b[3]);
      } else {
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
          for (int n = 0; n < kKeyTiles; n += 2) {
            // Matrices: keys 0-7 × columns 0-7, 8-15, then keys 8-15.
            std::uint32_t b[4];
            ptx::ldmatrix_x4(b, keys + 8 * n * kTileRowBytes + 128 * c +
                                    (((4 * pair + 2 * k + ((lane >> 3) & 1)) ^ low) << 4));
            ptx::mma_m16n8k16_bf16(sums[n], a[k], b[0], b[1]);
            ptx::mma_m16n8k16_bf16(sums[n + 1], a[k], b[2], b[3]);
          }
      }
    }
  }
}

template <int kUnits, CacheFormat kFormat>
__global__ void __launch_bounds__(kMqaThreads, 1)
    sparse_mqa_mma_kernel(const __grid_constant__ MqaArguments args) {
  constexpr int kHeads = 16 * kUnits;
  constexpr int kKeyWarps = kMqaWarps / kUnits;         // warps that share a unit's keys
  constexpr int kKeyTiles = kTileKeys / kKeyWarps / 8;  // of 8 keys, per warp
  constexpr int kWeightBytes = kHeads * kTileKeys * 2;  // one matrix P
  constexpr bool kGrouped = kFormat == CacheFormat::fp8_ds_mla;
  constexpr bool kQuantised = kFormat != CacheFormat::bf16;
  const float infinity = HUGE_VALF;

  extern __shared__ __align__(128) char shared[];
  const MqaShared layout(kUnits, kFormat, args.stages);
  char* const q_tile = shared + layout.q;
  char* const weights = shared + layout.weights;
  float* const scales = reinterpret_cast<float*>(shared + layout.scales);
  float* const reference = reinterpret_cast<float*>(shared + layout.reference);
  float* const reduce = reinterpret_cast<float*>(shared + layout.reduce);
  float* const factors = reinterpret_cast<float*>(shared + layout.factor);
  const auto* const valid = reinterpret_cast<const std::uint8_t*>(shared + layout.valid);

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, t = lane % 4;                        // as in mma_m16n8k16_bf16
  const int unit = warp / kKeyWarps, part = warp % kKeyWarps;  // in QK and softmax

  const unsigned head_tiles = static_cast<unsigned>(args.head_tiles);
  const unsigned splits = static_cast<unsigned>(args.splits);
  const int first_head = static_cast<int>(blockIdx.x % head_tiles) * kHeads;
  const int split = static_cast<int>(blockIdx.x / head_tiles % splits);
  const std::int64_t token = blockIdx.x / head_tiles / splits;

  // This CTA's keys: whole tiles, evenly shared out over the splits.
  int count = static_cast<int>(args.call.slots.extent(1));
  if (args.call.counts != nullptr) count = max(0, min(count, args.call.counts[token]));
  const int tiles = (count + kTileKeys - 1) / kTileKeys;
  const int share = (tiles + args.splits - 1) / args.splits;
  const int first_tile = min(split * share, tiles);
  const int num_tiles = min(share, tiles - first_tile);
  const int first_key = first_tile * kTileKeys;

  load_queries<kUnits>(args, q_tile, token, first_head);
  MqaGather<kFormat> gather(args, shared, layout, token, first_key, count);
  const bool prefetch = kQuantised || args.stages == 2;
  ptx::cp_async_commit();
  if (prefetch && num_tiles > 0) gather.start(0, 0, first_key + kTileKeys);

  float sums[kUnits][8][4] =
      {};  // PV: heads 16 · [.] + g, + 8; columns 64 · warp + 8 · [.] + 2t, + 1
  float top[2] = {-infinity, -infinity}, total[2] = {0, 0};  // of QK's heads g, g + 8
  bool has_reference = false;

  for (int tile = 0; tile < num_tiles; ++tile) {
    const int next_key = first_key + (tile + 2) * kTileKeys;
    if (!prefetch) {
      __syncthreads();  // everybody is done with the only buffer
      gather.start(tile, 0, next_key - kTileKeys);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // the tile is there; everybody is done with the one before
    const int stage = kQuantised || args.stages == 1 ? 0 : tile & 1;
    char* const keys = shared + layout.keys + stage * kTileKeys * kTileRowBytes;
    const std::uint8_t* const tile_valid = valid + (tile & 1) * kTileKeys;
    if constexpr (kQuantised) {
      dequantise_tile<kFormat>(shared + layout.raw, keys, scales);
      __syncthreads();  // the raw buffer is free, the keys are complete
    }
    if (prefetch && tile + 1 < num_tiles)
      gather.start(tile + 1, kQuantised ? 0 : (tile + 1) & 1, next_key);
    if constexpr (kGrouped) {
      // Read after the next barrier.
      if (!has_reference) {
        int key = 0;
        while (key < kTileKeys && tile_valid[key] == 0) ++key;
        has_reference = key < kTileKeys;
        if (thread < kScaleGroups) {
          float scale = has_reference ? scales[key * kScaleGroups + thread] : 1.0f;
          // One that has no inverse to multiply with: 0, NaN, the ends of the range.
          if (!(fabsf(scale) > 0x1p-100f && fabsf(scale) < 0x1p100f)) scale = 1;
          reference[thread] = scale;
          reference[kScaleGroups + thread] = 1 / scale;
        }
      }
    }

    // ---- S = q'·latentᵀ. Lane's rows: A row lane % 16; B key lane % 8, upper half keys 8-15.
    float scores[kKeyTiles][4] = {};
    {
      const char* q = q_tile + (16 * unit + (lane & 15)) * kTileRowBytes;
      const int upper = kKeyTiles == 1 ? 0 : (lane >> 4) * 8;
      const char* from = keys + (8 * kKeyTiles * part + (lane & 7) + upper) * kTileRowBytes;
      if constexpr (kGrouped) {
#pragma unroll 1
        for (int group = 0; group < kScaleGroups; ++group) {
          float group_sums[kKeyTiles][4] = {};
          multiply_keys<kKeyTiles>(group_sums, q, from, 2 * group, 2 * group + 2);
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            const float* scale =
                scales + (8 * (kKeyTiles * part + n) + 2 * t) * kScaleGroups + group;
            scores[n][0] = fmaf(group_sums[n][0], scale[0], scores[n][0]);
            scores[n][1] = fmaf(group_sums[n][1], scale[kScaleGroups], scores[n][1]);
            scores[n][2] = fmaf(group_sums[n][2], scale[0], scores[n][2]);
            scores[n][3] = fmaf(group_sums[n][3], scale[kScaleGroups], scores[n][3]);
          }
        }
        multiply_keys<kKeyTiles>(scores, q, from, kTileLatent / 64, kTileWidth / 64);
      } else {
        multiply_keys<kKeyTiles>(scores, q, from, 0, kTileWidth / 64);
      }
    }

    // ---- the new maximum of each head
    float part_top[2] = {-infinity, -infinity};
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool seen = tile_valid[8 * (kKeyTiles * part + n) + 2 * t + i % 2] != 0;
        scores[n][i] = seen ? scores[n][i] * args.logit_scale : -infinity;
        part_top[i / 2] = fmaxf(part_top[i / 2], scores[n][i]);
      }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      part_top[i] = fmaxf(part_top[i], __shfl_xor_sync(~0u, part_top[i], 1));
      part_top[i] = fmaxf(part_top[i], __shfl_xor_sync(~0u, part_top[i], 2));
      if (t == 0) reduce[part * kHeads + 16 * unit + g + 8 * i] = part_top[i];
    }
    __syncthreads();

    // ---- P = 2^(S − maximum), in bf16; sums stay fp32
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 16 * unit + g + 8 * i;
      float new_top = top[i];
#pragma unroll
      for (int p = 0; p < kKeyWarps; ++p) new_top = fmaxf(new_top, reduce[p * kHeads + head]);
      base[i] = new_top == -infinity ? 0.0f : new_top;  // no key yet: 2^(−inf − 0) = 0
      const float factor = ptx::ex2(top[i] - base[i]);
      top[i] = new_top;
      total[i] *= factor;
      if (part == 0 && t == 0) factors[head] = factor;
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const int key = 8 * (kKeyTiles * part + n) + 2 * t;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = ptx::ex2(scores[n][2 * i] - base[i]);
        const float high = ptx::ex2(scores[n][2 * i + 1] - base[i]);
        total[i] += low + high;
        char* to = weights + swizzled(16 * unit + g + 8 * i, 2 * kTileKeys, key / 8) + 4 * t;
        if constexpr (kGrouped) {
#pragma unroll
          for (int group = 0; group < kScaleGroups; ++group) {
            const float inverse = reference[kScaleGroups + group];
            *reinterpret_cast<std::uint32_t*>(to + group * kWeightBytes) =
                ptx::pack_bf16(low * (scales[key * kScaleGroups + group] * inverse),
                               high * (scales[(key + 1) * kScaleGroups + group] * inverse));
          }
        } else {
          *reinterpret_cast<std::uint32_t*>(to) = ptx::pack_bf16(low, high);
        }
      }
    }
    __syncthreads();

    // ---- out = factor · out + P·latent[:, 64 · warp …]
#pragma unroll
    for (int m = 0; m < kUnits; ++m) {
      const float low = factors[16 * m + g], high = factors[16 * m + g + 8];
      if (__any_sync(~0u, low != 1.0f || high != 1.0f))
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          sums[m][n][0] *= low;
          sums[m][n][1] *= low;
          sums[m][n][2] *= high;
          sums[m][n][3] *= high;
        }
    }
    const char* const p_tile = weights + (kGrouped ? warp / 2 * kWeightBytes : 0);
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k) {
      std::uint32_t p[kUnits][4];
#pragma unroll
      for (int m = 0; m < kUnits; ++m)
        ptx::ldmatrix_x4(
            p[m], p_tile + swizzled(16 * m + (lane & 15), 2 * kTileKeys, 2 * k + (lane >> 4)));
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        // Matrices: keys 0-7 and 8-15 × columns 0-7, then × columns 8-15; transposed on the way.
        std::uint32_t v[4];
        ptx::ldmatrix_x4_transposed(
            v, keys + swizzled(16 * k + (lane & 15), kTileRowBytes, 8 * warp + n + (lane >> 4)));
#pragma unroll
        for (int m = 0; m < kUnits; ++m) {
          ptx::mma_m16n8k16_bf16(sums[m][n], p[m], v[0], v[1]);
          ptx::mma_m16n8k16_bf16(sums[m][n + 1], p[m], v[2], v[3]);
        }
      }
    }
  }
  ptx::cp_async_wait<0>();  // of no tile at all: the queries

  // ---- the heads' sums over all warps; `factors` becomes the maximum
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    total[i] += __shfl_xor_sync(~0u, total[i], 1);
    total[i] += __shfl_xor_sync(~0u, total[i], 2);
  }
  __syncthreads();
  if (t == 0)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 16 * unit + g + 8 * i;
      reduce[part * kHeads + head] = total[i];
      if (part == 0) factors[head] = top[i];
    }
  __syncthreads();
  const auto denominator = [&](int head) {
    float sum = 0;
    for (int p = 0; p < kKeyWarps; ++p) sum += reduce[p * kHeads + head];
    return sum;
  };
  const auto log_sum = [&](int head, float sum) {  // natural
    constexpr float kLn2 = 0.693147180559945309f;
    return sum == 0.0f ? -infinity : (factors[head] + log2f(sum)) * kLn2;
  };
  const SparseMqaCall& call = args.call;
  const std::int64_t part_row = (token * args.splits + split) * args.num_heads + first_head;
  if (thread < kHeads && first_head + thread < args.num_heads) {
    const float lse = log_sum(thread, denominator(thread));
    if (args.splits > 1) {
      args.part_lse[part_row + thread] = lse;
    } else {
      write_lse(call, token, first_head + thread, lse);
    }
  }
  if (args.splits > 1 && num_tiles <= 0) return;  // the join does not look at a part without keys

  float group_reference = 1;
  if constexpr (kGrouped)
    if (has_reference) group_reference = reference[warp / 2];
#pragma unroll
  for (int m = 0; m < kUnits; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * m + g + 8 * i, head = first_head + row;
      if (head >= args.num_heads) continue;
      const float sum = denominator(row);
      float factor = sum == 0.0f ? 0.0f : args.value_scale / sum;
      if (args.splits == 1 && call.sink.data_handle() != nullptr)
        factor *= sink_factor(call.sink(head), log_sum(row, sum));
      bfloat16* const out = address(call.out, token, head, 0);
      float* const part_out = args.part_out + (part_row + row) * kTileLatent;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int column = 64 * warp + 8 * n + 2 * t;
        const float low = sum == 0.0f ? 0.0f : sums[m][n][2 * i] * group_reference * factor;
        const float high = sum == 0.0f ? 0.0f : sums[m][n][2 * i + 1] * group_reference * factor;
        if (args.splits > 1) {
          *reinterpret_cast<float2*>(part_out + column) = make_float2(low, high);
        } else if (args.paired_out && column + 1 < args.lora) {
          *reinterpret_cast<std::uint32_t*>(out + column) = ptx::pack_bf16(low, high);
        } else {
          if (column < args.lora) out[column] = __float2bfloat16_rn(low);
          if (column + 1 < args.lora) out[column + 1] = __float2bfloat16_rn(high);
        }
      }
    }
}

}  // namespace sparse_mla::cuda
