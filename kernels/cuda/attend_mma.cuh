/// `attend` on tensor cores through mma.sync: MHA of 64 · kRowTiles query rows × one head per work
/// item, 64 keys at a time. (The method: Dao, "FlashAttention-2", 2023.)
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>
#include <utility>

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
  const int first = threadIdx.x / 8, chunk = threadIdx.x % 8;
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
/// visited. Rows that touch more than 32 of them visit every key.
struct KeyWalk {
  std::int64_t next_id[32];  ///< place in mask_tile_ids
  std::int32_t left[32];     ///< tiles from there on
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
    const std::int64_t ids = mask.tile_offset + list * mask.max_tiles;
    const int count = args.mask_tile_counts[mask.tile_count_offset + list];
    // Skip the tiles that end at or before `begin`: a global mask lists the whole sequence.
    const int tile = begin / args.mask_tile.keys;
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (args.mask_tile_ids[ids + middle] < tile)
        low = middle + 1;
      else
        high = middle;
    }
    next_id[lane] = ids + low;
    left[lane] = count - low;
  }

  /// The first key at or past `from` that is to be visited.
  __device__ int next(const AttendArguments& args, int from) {
    if (every_key) return from;
    const int lane = threadIdx.x % 32;
    std::int64_t nearest = INT_MAX;
    for (; left[lane] > 0; ++next_id[lane], --left[lane]) {
      const std::int64_t begin =
          std::int64_t{args.mask_tile_ids[next_id[lane]]} * args.mask_tile.keys;
      if (begin + args.mask_tile.keys <= from) continue;
      nearest = max(std::int64_t{from}, min(begin, nearest));
      break;
    }
    return static_cast<int>(__reduce_min_sync(~0u, static_cast<unsigned>(nearest)));
  }
};

/// Writes a finished row, `row` of its tile: to the piece's partial, or to the running partial. A
/// quad of lanes per row; the lane holds columns 8n + 2 · (lane % 4) + i of it in out[n][i].
template <class Shape>
__device__ __forceinline__ void finish_row(const AttendArguments& args, const AttendPlan& plan,
                                           const ChunkMember& member, const AttendWork& work,
                                           int row, float lse, float lse_before,
                                           const float (&out)[Shape::kValue / 8][2],
                                           bool pair_stores) {
  constexpr int kTiles = Shape::kValue / 8;
  const int pair = threadIdx.x % 4;
  if (work.item.slot >= 0) {
    const std::int64_t part =
        (std::int64_t{work.item.slot} * args.num_heads + work.head) * Shape::kRows + row;
    auto* place = reinterpret_cast<float2*>(plan.part_out + part * Shape::kValue) + pair;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) place[n * 4] = make_float2(out[n][0], out[n][1]);
    if (pair == 0) plan.part_lse[part] = lse;
    return;
  }
  const std::int64_t running_row = std::int64_t{member.packed_token} + work.item.row + row;
  const RowEpilogue epilogue(args, running_row, work.head, lse, lse_before);
  if (epilogue.stays()) return;
  if (pair == 0) *address(args.lse, work.head, running_row) = epilogue.lse();
  if (pair_stores) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) epilogue.put_pair(n * 8 + 2 * pair, out[n][0], out[n][1]);
  } else {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) epilogue.put(n * 8 + 2 * pair + i, out[n][i]);
  }
}

/// The tile product of one work item, per block of 64 keys:
///   S[rows, 64] = Q[rows, P+R] · K[64, P+R]ᵀ   fragments of Q and K by ldmatrix
///   online softmax in base 2, fp32, a quad of lanes per row
///   O[rows, V] += P[rows, 64] · V[64, V]       P from registers as bf16, V by transposing ldmatrix
/// Every warp does all of it for its own rows. K and V have one buffer each: V of the block travels
/// while S is computed, K of the next block while O is, and two CTAs per SM fill each other's gaps.
/// CTAs stay and take (item, head) from a common counter, longest items first.
template <class Shape, bool kMasked>
__global__ void __launch_bounds__(Shape::kThreads, 2)
    attend_mma_kernel(const __grid_constant__ AttendArguments args,
                      const __grid_constant__ AttendPlan plan, const bool vector_loads,
                      const bool pair_stores) {
  constexpr int kRowTiles = Shape::kRowTiles, kThreads = Shape::kThreads, kKeys = Shape::kKeys;
  constexpr int kQkRowBytes = Shape::kQkRowBytes, kValueRowBytes = Shape::kValueRowBytes;
  constexpr int kScoreTiles = kKeys / 8, kValueTiles = Shape::kValue / 8;
  constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.69314718055994531f;
  constexpr float kInfinity = HUGE_VALF;

  extern __shared__ __align__(128) std::byte shared_memory[];
  // The work at hand. Read from here where it is needed: registers are scarce.
  __shared__ AttendWork work;
  __shared__ ChunkMember member;
  __shared__ MaskMember mask;                             // mode masked only
  __shared__ KeyWalk walk;                                // mode masked only; warp 0's
  __shared__ uint2 row_bits[kMasked ? Shape::kRows : 1];  // of the block's keys
  __shared__ KeyRange keys;
  __shared__ int next_key;
  __shared__ bool done;
  const std::uint32_t shared_q = ptx::shared_address(shared_memory);
  const std::uint32_t shared_k = shared_q + Shape::kQueryBytes;
  const std::uint32_t shared_v = shared_k + Shape::kKeyBytes;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * Shape::kWarpRows;
  const int group = lane / 4, pair = lane % 4;  // of an accumulator: its row, its two columns

  // Chunk 2s of a row, given where its chunk 0 lies: 2s is even and its low three bits are what the
  // swizzle changes.
  const auto chunk_row = [](std::uint32_t start, int s) {
    return (start ^ (2 * s % 8 << 4)) + 2 * s / 8 * 128;
  };

  while (true) {
    __syncthreads();  // everyone is through with the last work
    if (threadIdx.x == 0) {
      done = !find_work(plan, args.num_heads, atomicAdd(&plan.counts->next, 1), work);
      if (!done) {
        member = args.members[work.item.member];
        if constexpr (kMasked) mask = args.mask_members[work.item.member];
        keys = piece_keys(args, member, min(work.item.row + Shape::kRows, member.query_len),
                          work.item);
      }
    }
    __syncthreads();
    if (done) return;
    const int key_begin = keys.begin, key_end = keys.end;
    const int row_end = min(work.item.row + Shape::kRows, member.query_len);

    const auto load_keys = [&](int key) {
      const std::int64_t row = std::int64_t{member.key_row} + key - member.first_key;
      const int valid = keys.end - key;
      load_rows<kThreads, kKeys, Shape::kNope, kQkRowBytes>(
          shared_k, address(args.k_nope, row, work.head, 0), args.k_nope.stride(0), valid,
          vector_loads);
      load_rows<kThreads, kKeys, Shape::kRope, kQkRowBytes>(
          shared_k + Shape::kNope * 2, address(args.k_pe, row, 0), args.k_pe.stride(0), valid,
          vector_loads);
      ptx::cp_async_commit();
    };
    const auto load_values = [&](int key) {
      const std::int64_t row = std::int64_t{member.key_row} + key - member.first_key;
      load_rows<kThreads, kKeys, Shape::kValue, kValueRowBytes>(
          shared_v, address(args.v, row, work.head, 0), args.v.stride(0), keys.end - key,
          vector_loads);
      ptx::cp_async_commit();
    };

    float out[kRowTiles][kValueTiles][4] = {};
    float maximum[kRowTiles][2], sum[kRowTiles][2];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        maximum[t][h] = -kInfinity;
        sum[t][h] = 0;
      }

    // Keys that the warp's first and last row can see, counted as positions of the request.
    const auto visible_end = [&](int row) {
      return args.causal ? static_cast<int>(min(std::int64_t{key_end},
                                                std::int64_t{member.context_len} + row + 1))
                         : key_end;
    };
    const int first_row = work.item.row + warp_row;
    const int all_visible = visible_end(first_row);
    const int any_visible =
        first_row < row_end ? visible_end(first_row + Shape::kWarpRows - 1) : key_begin;

    int key = key_begin;
    // Where the member has no keys it may have no masks and lists either.
    if (kMasked && key_begin < key_end) {
      if (threadIdx.x < 32) {
        walk.start(args, mask, work.item.row, row_end, key_begin);
        const int first_key = walk.next(args, key_begin);
        if (lane == 0) next_key = first_key;
      }
      __syncthreads();
      key = next_key;
    }
    if (key < keys.end) {
      load_rows<kThreads, Shape::kRows, Shape::kQk, kQkRowBytes>(
          shared_q, address(args.q, std::int64_t{member.query_start} + work.item.row, work.head, 0),
          args.q.stride(0), row_end - work.item.row, vector_loads);
      load_keys(key);
    }

    while (key < keys.end) {
      bool active = key < any_visible;
      if constexpr (kMasked) {
        // A lane fetches the bits of one of the warp's rows.
        const int warp_lane_row = warp_row + lane % Shape::kWarpRows;
        const int row = work.item.row + warp_lane_row;
        uint2 bits = {};
        if (row < member.query_len) {
          const std::uint32_t* words =
              args.mask_words + mask.word_offset + std::int64_t{row} * mask.row_words;
          bits = make_uint2(mask_word(words, mask, key, keys.end),
                            mask_word(words, mask, std::int64_t{key} + 32, keys.end));
        }
        if (lane < Shape::kWarpRows) row_bits[warp_lane_row] = bits;
        active = __any_sync(~0u, (bits.x | bits.y) != 0);
        __syncwarp();
      }

      ptx::cp_async_wait<0>();
      __syncthreads();  // K (and Q) have arrived; the last block's V has been read
      load_values(key);

      std::uint32_t weights[kRowTiles][kScoreTiles / 2][4];
      if (active) {
        // Rows of the lane's ldmatrix addresses; lanes 16 … 31 (of K: every other eight) take the
        // odd chunk.
        const std::uint32_t l = not_hoisted(lane);
        const std::uint32_t lane_q =
            shared_q + (warp_row + l % 16) * kQkRowBytes + ((l / 16 ^ l % 8) << 4);
        const std::uint32_t lane_k =
            shared_k + (l % 8 + l / 16 * 8) * kQkRowBytes + ((l / 8 % 2 ^ l % 8) << 4);
        float score[kRowTiles][kScoreTiles][4] = {};
#pragma unroll 4  // 128 bytes of a row: the swizzle's period
        for (int s = 0; s < Shape::kQk / 16; ++s) {
          std::uint32_t q[kRowTiles][4];
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t)
            ptx::ldmatrix_x4(q[t], chunk_row(lane_q, s) + t * 16 * kQkRowBytes);
#pragma unroll
          for (int n = 0; n < kScoreTiles / 2; ++n) {
            std::uint32_t k[4];  // keys 16n … +7: k[0], k[1]; the next eight: k[2], k[3]
            ptx::ldmatrix_x4(k, chunk_row(lane_k, s) + n * 16 * kQkRowBytes);
#pragma unroll
            for (int t = 0; t < kRowTiles; ++t) {
              ptx::mma_m16n8k16_bf16(score[t][2 * n], q[t], k[0], k[1]);
              ptx::mma_m16n8k16_bf16(score[t][2 * n + 1], q[t], k[2], k[3]);
            }
          }
        }

        // Logits in base 2; what a row does not see becomes −inf. Scaled before the difference
        // with the maximum is taken: the largest weight is then exactly 1 at any scale.
        const float scale = args.softmax_scale * kLog2e;
        const bool cut_off = !kMasked && key + kKeys > all_visible;
        float factor[kRowTiles][2];
        bool rescale = false;
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int row = t * 16 + h * 8 + group;
            uint2 bits = {};
            if constexpr (kMasked) {
              bits = row_bits[warp_row + row];
              bits = make_uint2(bits.x >> 2 * pair, bits.y >> 2 * pair);
            }
            const int visible = visible_end(first_row + row) - key - 2 * pair;
            float top = maximum[t][h];
#pragma unroll
            for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                float& logit = score[t][n][2 * h + i];
                logit *= scale;
                if constexpr (kMasked) {
                  if (((n < 4 ? bits.x : bits.y) >> (n % 4 * 8 + i) & 1) == 0) logit = -kInfinity;
                } else {
                  if (cut_off && n * 8 + i >= visible) logit = -kInfinity;
                }
                top = fmaxf(top, logit);
              }
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float base = top == -kInfinity ? 0.0f : top;
            factor[t][h] = ptx::ex2(maximum[t][h] - base);
            rescale = rescale || factor[t][h] != 1.0f;
            maximum[t][h] = top;
            float row_sum = 0;
#pragma unroll
            for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                float& weight = score[t][n][2 * h + i];
                weight = ptx::ex2(weight - base);
                row_sum += weight;
              }
            sum[t][h] = sum[t][h] * factor[t][h] + row_sum;
          }
        if (__any_sync(~0u, rescale)) {
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
            for (int n = 0; n < kValueTiles; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i) out[t][n][i] *= factor[t][i / 2];
        }
        // Two neighbouring 16×8 accumulator tiles are one 16×16 fragment of P.
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
          for (int n = 0; n < kScoreTiles / 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              weights[t][n][i] = ptx::pack_bf16(score[t][2 * n + i / 2][i % 2 * 2],
                                                score[t][2 * n + i / 2][i % 2 * 2 + 1]);
      }
      if (kMasked && threadIdx.x < 32) {
        const int following = walk.next(args, key + kKeys);
        if (lane == 0) next_key = following;
      }

      ptx::cp_async_wait<0>();
      __syncthreads();  // V has arrived; K has been read
      key = kMasked ? next_key : key + kKeys;
      if (key < keys.end) load_keys(key);

      if (active) {
        const std::uint32_t l = not_hoisted(lane);
        const std::uint32_t lane_v = shared_v + l % 16 * kValueRowBytes + ((l / 16 ^ l % 8) << 4);
#pragma unroll
        for (int s = 0; s < kKeys / 16; ++s)
#pragma unroll
          for (int n = 0; n < kValueTiles / 2; ++n) {
            std::uint32_t v[4];  // columns 16n … +7: v[0], v[1]; the next eight: v[2], v[3]
            ptx::ldmatrix_x4_transposed(v, chunk_row(lane_v, n) + s * 16 * kValueRowBytes);
#pragma unroll
            for (int t = 0; t < kRowTiles; ++t) {
              ptx::mma_m16n8k16_bf16(out[t][2 * n], weights[t][s], v[0], v[1]);
              ptx::mma_m16n8k16_bf16(out[t][2 * n + 1], weights[t][s], v[2], v[3]);
            }
          }
      }
    }

    // Epilogue: a quad of lanes holds a row, two neighbouring columns per tile and lane. All of the
    // quad read a merged row's running lse before one of them replaces it.
    float lse_before[kRowTiles][2];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[t][h] += __shfl_xor_sync(~0u, sum[t][h], 1);
        sum[t][h] += __shfl_xor_sync(~0u, sum[t][h], 2);
        const int row = first_row + t * 16 + h * 8 + group;
        const std::int64_t running_row = std::int64_t{member.packed_token} + row;
        const bool merges = row < member.query_len && running_row < args.merge_row_end;
        lse_before[t][h] = merges ? *address(args.lse, work.head, running_row) : 0.0f;
      }
    __syncwarp();
    // Not a loop: nvcc leaves one of this size rolled, whatever the pragma, and then keeps the
    // accumulators in local memory.
    const auto finish = [&]<int kHalf>(std::integral_constant<int, kHalf>) {
      constexpr int t = kHalf / 2, h = kHalf % 2;
      const bool empty = sum[t][h] == 0;
      const float inverse = empty ? 0.0f : 1.0f / sum[t][h];
      float row_out[kValueTiles][2];
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) row_out[n][i] = out[t][n][2 * h + i] * inverse;
      const int row = warp_row + t * 16 + h * 8 + group;
      if (work.item.row + row < member.query_len)
        finish_row<Shape>(args, plan, member, work, row,
                          empty ? -kInfinity : maximum[t][h] * kLn2 + logf(sum[t][h]),
                          lse_before[t][h], row_out, pair_stores);
    };
    [&]<int... kHalf>(std::integer_sequence<int, kHalf...>) {
      (finish(std::integral_constant<int, kHalf>()), ...);
    }
    (std::make_integer_sequence<int, 2 * kRowTiles>());
  }
}

}  // namespace sparse_mla::cuda
