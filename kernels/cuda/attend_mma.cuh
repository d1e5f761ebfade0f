/// `attend` on tensor cores through mma.sync: MHA of 64 · kRowTiles query rows × one head per work
/// item, 64 keys at a time. (The method: Dao, "FlashAttention-2", 2023.)
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/common/ptx.cuh"
#include "kernels/cuda/attend_few_rows.cuh"
#include "kernels/cuda/attend_plan.cuh"
#include "kernels/cuda/attend_tile.cuh"

namespace sparse_mla::cuda {

/// The ends of the keys that all and that any of a warp's rows can see.
struct VisibleEnds {
  std::int32_t all_rows, any_row;
};

/// The tile product of one work item, per block of 64 keys:
///   S[rows, 64] = Q[rows, P+R] · K[64, P+R]ᵀ   fragments of Q and K by ldmatrix
///   online softmax in base 2, fp32, a quad of lanes per row
///   O[rows, V] += P[rows, 64] · V[64, V]       P from registers as bf16, V by transposing ldmatrix
/// Every warp does all of it for its own rows. K and V have one buffer each: V of the block travels
/// while S is computed, K of the next block during softmax and O, and two CTAs per SM fill each
/// other's gaps. CTAs stay and take (item, head) from a common counter, longest items first.
template <class Shape, bool kMasked, bool kTwoTerm>
__global__ void __launch_bounds__(Shape::kThreads, 2)
    attend_mma_kernel(const __grid_constant__ AttendArguments args,
                      const __grid_constant__ AttendPlan plan, const bool vector_loads,
                      const bool vector_stores) {
  constexpr int kRowTiles = Shape::kRowTiles, kThreads = Shape::kThreads, kKeys = Shape::kKeys;
  constexpr int kQkRowBytes = Shape::kQkRowBytes, kValueRowBytes = Shape::kValueRowBytes;
  constexpr int kScoreTiles = kKeys / 8, kValueTiles = Shape::kValue / 8;
  constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.69314718055994531f;
  constexpr float kInfinity = HUGE_VALF;
  // A row's maximum before it has seen a key: finite, so that differences with it are no NaN.
  constexpr float kLowest = -FLT_MAX;

  extern __shared__ __align__(128) std::byte shared_memory[];
  // The work at hand. Read from here where it is needed: registers are scarce.
  __shared__ AttendWork work;
  __shared__ ChunkMember member;
  __shared__ MaskMember mask;  // mode masked only
  __shared__ KeyWalk walk;     // mode masked only; warp 0's
  __shared__ KeyRange keys;
  // A lane's share of its rows' sums, beside the registers, which are all taken.
  __shared__ __align__(16) float sums[Shape::kThreads][2 * kRowTiles];
  __shared__ VisibleEnds visible[Shape::kWarps];
  __shared__ int next_key;
  __shared__ bool done;
  const std::uint32_t shared_q = ptx::shared_address(shared_memory);
  const std::uint32_t shared_k = shared_q + Shape::kQueryBytes;
  const std::uint32_t shared_v = shared_k + Shape::kKeyBytes;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * Shape::kWarpRows;

  // Chunk 2s of a row, given where its chunk 0 lies: 2s is even and its low three bits are what the
  // swizzle changes.
  const auto chunk_row = [](std::uint32_t start, int s) {
    return (start ^ (2 * s % 8 << 4)) + 2 * s / 8 * 128;
  };

  while (true) {
    __syncthreads();  // everyone is through with the last work
    if (threadIdx.x < 32) {
      AttendWork found = {};
      const bool any = next_work(plan, args.num_heads, found);
      if (lane == 0) {
        done = !any;
        if (any) {
          work = found;
          member = args.members[found.item.member];
          if constexpr (kMasked) mask = args.mask_members[found.item.member];
          keys = piece_keys(args, member, min(found.item.row + Shape::kRows, member.query_len),
                            found.item);
        }
      }
    }
    __syncthreads();
    if (done) return;
    const int key_begin = keys.begin, key_end = keys.end;
    const int row_end = min(work.item.row + Shape::kRows, member.query_len);

    const auto load_keys = [&](std::uint32_t shared_k, int key) {
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
    const auto load_values = [&](std::uint32_t shared_v, int key) {
      const std::int64_t row = std::int64_t{member.key_row} + key - member.first_key;
      load_rows<kThreads, kKeys, Shape::kValue, kValueRowBytes>(
          shared_v, address(args.v, row, work.head, 0), args.v.stride(0), keys.end - key,
          vector_loads);
      ptx::cp_async_commit();
    };

    if constexpr (Shape::kFewRows > 0)
      if (row_end - work.item.row <= Shape::kFewRows) {
        attend_few_rows<Shape, kMasked, kTwoTerm>(args, plan, member, work, keys, mask, walk,
                                                  shared_memory, load_keys, load_values,
                                                  vector_loads, vector_stores);
        continue;
      }

    float out[kRowTiles][kValueTiles][4] = {};
    float maximum[kRowTiles][2];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        maximum[t][h] = kLowest;
        sums[threadIdx.x][2 * t + h] = 0;
      }

    const auto visible_end = [&](int row) {
      return args.causal ? static_cast<int>(min(std::int64_t{keys.end},
                                                std::int64_t{member.context_len} + row + 1))
                         : keys.end;
    };
    // Keys that all and that any of the warp's rows can see, counted as positions of the request.
    if (lane == 0) {
      const int first_row = work.item.row + warp_row;
      visible[warp_row / Shape::kWarpRows] = {
          visible_end(first_row),
          first_row < row_end ? visible_end(first_row + Shape::kWarpRows - 1) : key_begin};
    }
    __syncwarp();

    int key = key_begin;
    [[maybe_unused]] BlockWords words = {};  // of row lane % kWarpRows of the warp
    const auto fetch_words = [&](int from) {
      const int row = work.item.row + warp_row + lane % Shape::kWarpRows;
      if (row < member.query_len)
        words.fetch(args.mask_words + mask.word_offset + std::int64_t{row} * mask.row_words, mask,
                    from, keys.end);
    };
    // Where the member has no keys it may have no masks and lists either.
    if (kMasked && key_begin < key_end) {
      if (threadIdx.x < 32) {
        walk.start(args, mask, work.item.row, row_end, key_begin);
        const int first_key = walk.next(args, key_begin);
        if (lane == 0) next_key = first_key;
      }
      __syncthreads();
      key = next_key;
      if (key < keys.end) fetch_words(key);
    }
    if (key < keys.end) {
      load_rows<kThreads, Shape::kRows, Shape::kQk, kQkRowBytes>(
          shared_q, address(args.q, std::int64_t{member.query_start} + work.item.row, work.head, 0),
          args.q.stride(0), row_end - work.item.row, vector_loads);
      load_keys(shared_k, key);
    }

    while (key < keys.end) {
      bool active = key < visible[not_hoisted(threadIdx.x) / 32].any_row;
      uint2 mask_bits = {};       // of row lane % kWarpRows of the warp
      bool all_selected = false;  // by every row of the warp
      if constexpr (kMasked) {
        mask_bits = words.bits(mask, key, keys.end);
        active = __any_sync(~0u, (mask_bits.x | mask_bits.y) != 0);
        all_selected = __all_sync(~0u, (mask_bits.x & mask_bits.y) == ~0u);
      }

      ptx::cp_async_wait<0>();
      __syncthreads();  // K (and Q) have arrived; the last block's V has been read
      load_values(shared_v, key);
      if (kMasked && threadIdx.x < 32) {
        const int following = walk.next(args, key + kKeys);
        if (lane == 0) next_key = following;
      }

      float score[kRowTiles][kScoreTiles][4];
      if (active) {
        // Rows of the lane's ldmatrix addresses; lanes 16 … 31 (of K: every other eight) take the
        // odd chunk.
        const std::uint32_t l = not_hoisted(lane);
        const std::uint32_t lane_q =
            shared_q + (warp_row + l % 16) * kQkRowBytes + ((l / 16 ^ l % 8) << 4);
        const std::uint32_t lane_k =
            shared_k + (l % 8 + l / 16 * 8) * kQkRowBytes + ((l / 8 % 2 ^ l % 8) << 4);
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
          for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) score[t][n][i] = 0;
#pragma unroll unrolled_score_steps()
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
      }

      // Before the softmax: K of the next block then has its time and O's to arrive.
      ptx::cp_async_wait<0>();
      __syncthreads();  // V has arrived; K has been read
      const int block_key = key;
      key = kMasked ? next_key : key + kKeys;
      if (key < keys.end) {
        load_keys(shared_k, key);
        if constexpr (kMasked) fetch_words(key);
      }

      if (active) {
        // Logits in base 2; what a row does not see becomes −inf. Scaled before the difference
        // with the maximum is taken: the largest weight is then exactly 1 at any scale.
        const float scale = args.softmax_scale * kLog2e;
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
          for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) score[t][n][i] *= scale;
        if (kMasked ? !all_selected
                    : block_key + kKeys > visible[not_hoisted(threadIdx.x) / 32].all_rows) {
          const int l = static_cast<int>(not_hoisted(threadIdx.x)) % 32, pair = l % 4;
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int row = t * 16 + h * 8 + l / 4;
              const int left = visible_end(work.item.row + warp_row + row) - block_key - 2 * pair;
              std::uint32_t bits[2] = {};
              if constexpr (kMasked) {
                bits[0] = __shfl_sync(~0u, mask_bits.x, row) >> 2 * pair;
                bits[1] = __shfl_sync(~0u, mask_bits.y, row) >> 2 * pair;
              }
#pragma unroll
              for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                  const bool seen =
                      kMasked ? (bits[n / 4] >> (n % 4 * 8 + i) & 1) != 0 : n * 8 + i < left;
                  if (!seen) score[t][n][2 * h + i] = -kInfinity;
                }
            }
        }
        float factor[kRowTiles][2], row_sum[kRowTiles][2];
        bool rescale = false;
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float top = maximum[t][h];
#pragma unroll
            for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
              for (int i = 0; i < 2; ++i) top = fmaxf(top, score[t][n][2 * h + i]);
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            factor[t][h] = ptx::ex2(maximum[t][h] - top);
            rescale = rescale || factor[t][h] != 1.0f;
            maximum[t][h] = top;
            row_sum[t][h] = 0;
          }
        if (__any_sync(~0u, rescale)) {
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) sums[threadIdx.x][2 * t + h] *= factor[t][h];
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
            for (int n = 0; n < kValueTiles; ++n)
#pragma unroll
              for (int i = 0; i < 4; ++i) out[t][n][i] *= factor[t][i / 2];
        }

        // O 16 keys at a time, the exponentials of the next 16 between the products of these. Two
        // neighbouring 16×8 accumulator tiles are one 16×16 fragment of P.
        constexpr int kPairs = kRowTiles * 4;  // of a lane and 16 keys
        std::uint32_t weights[kRowTiles][4], next_weights[kRowTiles][4];
        // What the rounding to bf16 took from P, the second term.
        [[maybe_unused]] std::uint32_t rest[kRowTiles][4], next_rest[kRowTiles][4];
        const auto weigh = [&](int s, int begin, int end) {
#pragma unroll
          for (int p = begin; p < end; ++p) {
            const int t = p / 4, i = p % 4, h = i % 2;
            const float* logits = &score[t][2 * s + i / 2][2 * h];
            const float a = ptx::ex2(logits[0] - maximum[t][h]);
            const float b = ptx::ex2(logits[1] - maximum[t][h]);
            row_sum[t][h] += a + b;
            next_weights[t][i] = ptx::pack_bf16(a, b);
            if constexpr (kTwoTerm) next_rest[t][i] = ptx::pack_bf16_rest(a, b);
          }
        };
        if constexpr (!kTwoTerm) weigh(0, 0, kPairs);
        const std::uint32_t l = not_hoisted(lane);
        const std::uint32_t lane_v = shared_v + l % 16 * kValueRowBytes + ((l / 16 ^ l % 8) << 4);
#pragma unroll
        for (int s = 0; s < kKeys / 16; ++s) {
          if constexpr (kTwoTerm) weigh(s, 0, kPairs);  // no registers to be a step ahead
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              weights[t][i] = next_weights[t][i];
              if constexpr (kTwoTerm) rest[t][i] = next_rest[t][i];
            }
#pragma unroll
          for (int n = 0; n < kValueTiles / 2; ++n) {
            std::uint32_t v[4];  // columns 16n … +7: v[0], v[1]; the next eight: v[2], v[3]
            ptx::ldmatrix_x4_transposed(v, chunk_row(lane_v, n) + s * 16 * kValueRowBytes);
            if (!kTwoTerm && s + 1 < kKeys / 16)
              weigh(s + 1, kPairs * n / (kValueTiles / 2), kPairs * (n + 1) / (kValueTiles / 2));
#pragma unroll
            for (int t = 0; t < kRowTiles; ++t) {
              ptx::mma_m16n8k16_bf16(out[t][2 * n], weights[t], v[0], v[1]);
              ptx::mma_m16n8k16_bf16(out[t][2 * n + 1], weights[t], v[2], v[3]);
              if constexpr (kTwoTerm) {
                ptx::mma_m16n8k16_bf16(out[t][2 * n], rest[t], v[0], v[1]);
                ptx::mma_m16n8k16_bf16(out[t][2 * n + 1], rest[t], v[2], v[3]);
              }
            }
          }
        }
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
          for (int h = 0; h < 2; ++h) sums[threadIdx.x][2 * t + h] += row_sum[t][h];
      }
    }

    // Epilogue: a quad of lanes holds a row, two neighbouring columns per tile and lane. The rows
    // go into shared memory, eight after eight: into the warp's own rows of Q, which nobody else
    // reads, and into its share of K, which everybody has read. Then nothing is left in registers.
    constexpr int kHalves = 2 * kRowTiles, kHalfBytes = 8 * Shape::kValue * 4;
    constexpr int kHalvesInQ = Shape::kWarpRows * kQkRowBytes / kHalfBytes;
    constexpr int kWarpKeyBytes = Shape::kKeyBytes / Shape::kWarps;
    static_assert((kHalves - kHalvesInQ) * kHalfBytes <= kWarpKeyBytes);
    const auto staged_rows = [&](int half) {
      const int place = half < kHalvesInQ
                            ? warp_row * kQkRowBytes + half * kHalfBytes
                            : Shape::kQueryBytes + warp_row / Shape::kWarpRows * kWarpKeyBytes +
                                  (half - kHalvesInQ) * kHalfBytes;
      return reinterpret_cast<float*>(shared_memory + place);
    };
    __syncwarp();  // all lanes have read Q
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float total = sums[threadIdx.x][2 * t + h];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const bool empty = total == 0;
        const float inverse = empty ? 0.0f : 1.0f / total;
        sums[threadIdx.x][2 * t + h] = empty ? -kInfinity : maximum[t][h] * kLn2 + logf(total);
        float* staged = staged_rows(2 * t + h);
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n)
          *staged_pair<Shape::kValue>(staged, n) =
              make_float2(out[t][n][2 * h] * inverse, out[t][n][2 * h + 1] * inverse);
      }
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half) {
      const int row = warp_row + half * 8;
      const int count = min(8, member.query_len - work.item.row - row);
      if (count <= 0) break;
      FinishedRow finished;
      finished.lse = sums[threadIdx.x][half];
      const std::int64_t running_row =
          std::int64_t{member.packed_token} + work.item.row + row + lane / 4;
      if (lane / 4 < count && work.item.slot < 0 && running_row < args.merge_row_end)
        finished.lse_before = *address(args.lse, work.head, running_row);
      __syncwarp();  // the quad has read it; the rows are staged
      finish_rows<Shape::kValue, Shape::kRows>(args, plan, member, work, row, count, finished,
                                               staged_rows(half), vector_stores);
    }
  }
}

}  // namespace sparse_mla::cuda
