/// What the tensor-core kernels of `attend` are built from: tile shapes, copies into shared memory,
/// the walk over a mask's key tiles, the way out of a finished row.
#pragma once

#include <climits>
#include <cstdint>

#include "kernels/common/ptx.cuh"
#include "kernels/cuda/attend_plan.cuh"

namespace sparse_mla::cuda {

/// Widths, and the tile that follows from them. Four warps own 16 · kRowTiles query rows each.
template <int kNope_, int kRope_, int kValue_, int kRowTiles_>
struct AttendShape {
  static constexpr int kNope = kNope_, kRope = kRope_, kValue = kValue_;
  static constexpr int kQk = kNope + kRope;
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16 * kRowTiles, kRows = kWarps * kWarpRows;
  static constexpr int kKeys = key_block();
  // A tile of at most this many rows is attended by attend_few_rows; 0: none is.
  static constexpr int kFewRows = few_rows(kQk, kValue, kRows);
  // Shared memory, bytes: rows of whole 128-byte lines, so that a row's swizzle stays inside them.
  static constexpr int kQkRowBytes = kQk * 2, kValueRowBytes = kValue * 2;
  static constexpr int kQueryBytes = kRows * kQkRowBytes;
  static constexpr int kKeyBytes = kKeys * kQkRowBytes;
  static constexpr int kValueBytes = kKeys * kValueRowBytes;
  static constexpr int kSharedBytes = kQueryBytes + kKeyBytes + kValueBytes;
  static_assert(kNope % 64 == 0 && kRope % 64 == 0 && kValue % 64 == 0);
};
/// Two row tiles per warp: 128 + 64 fp32 accumulators per thread, and every K and V fragment that
/// is read from shared memory serves 32 rows. 88 KB, two CTAs per SM.
using DeepSeekShape = AttendShape<128, 64, 128, 2>;
/// The value's accumulators alone are 128 registers for 16 rows. 96 KB, two CTAs per SM.
using Glm5Shape = AttendShape<192, 64, 256, 1>;

/// `x`, with what follows from it computed after this point: else the compiler keeps every swizzled
/// variant of an address in a register of its own from loop to loop.
__device__ inline std::uint32_t not_hoisted(std::uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Copies `kRows` rows of `kColumns` elements into shared memory, 16-byte chunk c of row r to chunk
/// c ^ (r % 8) of the row (the low three bits), which makes the eight rows that an ldmatrix reads
/// together lie in different banks. Rows at or past `valid_rows` become 0 and are not read.
/// `shared`: where column 0 of row 0 goes; eight threads per row, 128 bytes of it at a time.
template <int kThreads, int kRows, int kColumns, int kRowBytes>
__device__ inline void load_rows(std::uint32_t shared, const bfloat16* global, std::int64_t stride,
                                 int valid_rows, bool vector_loads) {
  constexpr int kRowsAtOnce = kThreads / 8;
  static_assert(kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0);
  const auto thread = static_cast<int>(not_hoisted(threadIdx.x));
  const int first = thread / 8, chunk = thread % 8;
  const bfloat16* source = global + first * stride + chunk * 8;
  const std::uint32_t target = shared + first * kRowBytes + ((chunk ^ (first % 8)) << 4);
  if (vector_loads) {
#pragma unroll
    for (int pass = 0; pass < kRows / kRowsAtOnce; ++pass) {
      const bool valid = first + pass * kRowsAtOnce < valid_rows;
      const bfloat16* row = valid ? source : global;
#pragma unroll
      for (int line = 0; line < kColumns / 64; ++line)
        ptx::cp_async_16(target + pass * kRowsAtOnce * kRowBytes + line * 128, row + line * 64,
                         valid);
      source += kRowsAtOnce * stride;
    }
    return;
  }
#pragma unroll 1
  for (int pass = 0; pass < kRows / kRowsAtOnce; ++pass) {
    const bool valid = first + pass * kRowsAtOnce < valid_rows;
#pragma unroll 1
    for (int line = 0; line < kColumns / 64; ++line) {
      std::uint32_t words[4] = {};
      if (valid) {
        const auto* bits = reinterpret_cast<const std::uint16_t*>(source + line * 64);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = bits[2 * i] | std::uint32_t{bits[2 * i + 1]} << 16;
      }
      ptx::store_shared_16(target + pass * kRowsAtOnce * kRowBytes + line * 128, words);
    }
    source += kRowsAtOnce * stride;
  }
}

/// Walks the keys that a query tile visits under a mask, in ascending order. One warp does it; lane
/// i holds the i-th of the lists of the mask's query tiles that the rows touch, and their union is
/// visited. Rows that touch more than 32 of them visit every key. Lives in shared memory; a list's
/// next tile but one travels by cp.async, so that no step waits for it.
struct KeyWalk {
  std::int64_t place[32];      ///< of `tile` in mask_tile_ids
  std::int32_t left[32];       ///< tiles from there on
  std::int32_t tile[32];       ///< where left ≥ 1
  std::int32_t following[32];  ///< the tile after it, where left ≥ 2
  bool every_key;

  /// For query rows [row, row_end) and keys from `begin` on.
  __device__ void start(const AttendArguments& args, const MaskMember& mask, int row, int row_end,
                        int begin) {
    const int lane = threadIdx.x % 32;
    const int first = row / args.mask_tile.queries;
    const int lists = (row_end - 1) / args.mask_tile.queries - first + 1;
    if (lane == 0) every_key = lists > 32;
    __syncwarp();
    left[lane] = 0;
    if (lists > 32 || lane >= lists) return;
    const std::int64_t list = first + lane;
    const std::int32_t* ids = args.mask_tile_ids + mask.tile_offset + list * mask.max_tiles;
    const int count = args.mask_tile_counts[mask.tile_count_offset + list];
    // Skip the tiles that end at or before `begin`: a global mask lists the whole sequence.
    const int begin_tile = begin / args.mask_tile.keys;
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ids[middle] < begin_tile)
        low = middle + 1;
      else
        high = middle;
    }
    place[lane] = ids + low - args.mask_tile_ids;
    left[lane] = count - low;
    if (low < count) tile[lane] = ids[low];
    if (low + 1 < count) following[lane] = ids[low + 1];
  }

  /// The first key at or past `from` that is to be visited. `from` never falls from call to call,
  /// and the caller waits for its cp.async copies between two calls.
  __device__ int next(const AttendArguments& args, int from) {
    if (every_key) return from;
    const int lane = threadIdx.x % 32;
    std::int64_t nearest = INT_MAX;
    int remaining = left[lane], steps = 0;
    std::int32_t here = tile[lane];
    while (remaining > 0 && (std::int64_t{here} + 1) * args.mask_tile.keys <= from) {
      if (--remaining > 0)
        here = steps == 0 ? following[lane] : args.mask_tile_ids[place[lane] + steps + 1];
      ++steps;
    }
    if (remaining > 0) nearest = max(std::int64_t{from}, std::int64_t{here} * args.mask_tile.keys);
    if (steps > 0) {
      place[lane] += steps;
      left[lane] = remaining;
      tile[lane] = here;
      if (remaining > 1) ptx::cp_async_4(&following[lane], args.mask_tile_ids + place[lane] + 1);
    }
    ptx::cp_async_commit();
    return static_cast<int>(__reduce_min_sync(~0u, static_cast<unsigned>(nearest)));
  }

  /// After next() returned a key below `end`: the lists, a bit each, that visit keys from it up to
  /// `end`.
  __device__ unsigned visitors(const AttendArguments& args, int end) const {
    if (every_key) return ~0u;
    const int lane = threadIdx.x % 32;
    return __ballot_sync(~0u,
                         left[lane] > 0 && std::int64_t{tile[lane]} * args.mask_tile.keys < end);
  }
};

/// The words that hold a row's mask bits of one block of keys, on their way from memory.
struct BlockWords {
  std::uint32_t word[3];

  /// Row `words` and keys [key, min(key + 64, end)); what lies past them is not read.
  __device__ void fetch(const std::uint32_t* words, const MaskMember& mask, int key, int end) {
    const std::uint32_t* first = words + ((key - mask.first_key) >> 5);
    word[0] = first[0];
    word[1] = first[1];
    word[2] = end - key > 32 ? first[2] : 0;
  }
  __device__ uint2 bits(const MaskMember& mask, int key, int end) const {
    const unsigned shift = (key - mask.first_key) & 31;
    const unsigned last = end - key;  // ≥ 1
    uint2 bits = make_uint2(__funnelshift_r(word[0], word[1], shift),
                            __funnelshift_r(word[1], word[2], shift));
    if (last < 64) {
      bits.x &= last >= 32 ? ~0u : (1u << last) - 1;
      bits.y &= last > 32 ? (1u << (last - 32)) - 1 : 0u;
    }
    return bits;
  }
};

/// What a lane knows of the finished row lane / 4 of eight.
struct FinishedRow {
  float lse = 0, lse_before = 0;
};

/// Where a lane leaves columns 8n + 2 · (lane % 4), +1 of row lane / 4 among eight rows of V
/// floats: 16-byte chunk c of row r lies at c ^ r, so that neither side meets bank conflicts.
template <int kValue>
__device__ inline float2* staged_pair(float* staged, int n) {
  const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
  return reinterpret_cast<float2*>(staged + row * kValue + (((2 * n + pair / 2) ^ row) * 4)) +
         pair % 2;
}
/// Writes `count` ≤ 8 finished rows of a warp, `row` … of their tile: to the piece's partials, or
/// to the running partial. `staged`: 8 × V floats of the warp's own shared memory, filled through
/// staged_pair. From there a warp writes whole rows: few instructions, and full lines of memory.
template <int kValue, int kTileRows>
__device__ __forceinline__ void finish_rows(const AttendArguments& args, const AttendPlan& plan,
                                            const ChunkMember& member, const AttendWork& work,
                                            int row, int count, const FinishedRow& mine,
                                            const float* staged, bool vector_stores) {
  const int lane = threadIdx.x % 32;
  const bool partial = work.item.slot >= 0;
  const std::int64_t part =
      partial ? (std::int64_t{work.item.slot} * args.num_heads + work.head) * kTileRows + row : 0;
  const std::int64_t running_row = std::int64_t{member.packed_token} + work.item.row + row;
  const bool mine_merges = !partial && running_row + lane / 4 < args.merge_row_end;
  const bool mine_stays = mine_merges && mine.lse == -HUGE_VALF;
  MergeWeights weights;
  weights.lse = mine.lse;
  if (mine_merges && !mine_stays) weights = merge_weights(mine.lse_before, mine.lse);
  if (lane % 4 == 0 && lane / 4 < count && !mine_stays)
    *(partial ? plan.part_lse + part + lane / 4
              : address(args.lse, work.head, running_row + lane / 4)) = weights.lse;
  if (!partial && !vector_stores) {
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      MergeWeights row_weights;
      row_weights.a = __shfl_sync(~0u, weights.a, 4 * r);
      row_weights.b = __shfl_sync(~0u, weights.b, 4 * r);
      if (__shfl_sync(~0u, mine_stays, 4 * r)) continue;
      const bool merges = running_row + r < args.merge_row_end;
#pragma unroll 1
      for (int column = lane; column < kValue; column += 32) {
        float& place = *address(args.out, running_row + r, work.head, column);
        const float value = staged[r * kValue + ((column / 4) ^ r) * 4 + column % 4];
        place = merges ? merge_value(row_weights, place, value) : value;
      }
    }
    return;
  }
  // Four rows at a time, what they are merged with read before the first is written.
  constexpr int kTogether = 4, kChunks = kValue / 128;
  float* const first_out =
      partial ? plan.part_out + part * kValue : address(args.out, running_row, work.head, 0);
  const std::int64_t row_stride = partial ? kValue : args.out.stride(0);
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kTogether) {
    float4 before[kTogether][kChunks];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int r = begin + j;
      const auto* place = reinterpret_cast<const float4*>(first_out + r * row_stride) + lane;
      const bool reads = !partial && r < count && running_row + r < args.merge_row_end;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        before[j][c] = reads ? place[32 * c] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int r = begin + j;
      MergeWeights row_weights;
      row_weights.a = __shfl_sync(~0u, weights.a, 4 * r % 32);
      row_weights.b = __shfl_sync(~0u, weights.b, 4 * r % 32);
      const bool stays = __shfl_sync(~0u, mine_stays, 4 * r % 32);
      if (r >= count || stays) continue;
      const bool merges = !partial && running_row + r < args.merge_row_end;
      auto* place = reinterpret_cast<float4*>(first_out + r * row_stride) + lane;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float4 value =
            *reinterpret_cast<const float4*>(staged + r * kValue + (((32 * c + lane) ^ r) * 4));
        if (merges) {
          value.x = merge_value(row_weights, before[j][c].x, value.x);
          value.y = merge_value(row_weights, before[j][c].y, value.y);
          value.z = merge_value(row_weights, before[j][c].z, value.z);
          value.w = merge_value(row_weights, before[j][c].w, value.w);
        }
        place[32 * c] = value;
      }
    }
  }
}

}  // namespace sparse_mla::cuda
