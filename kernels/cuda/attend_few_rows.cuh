/// `attend` for a query tile of at most 16 rows: the last tile of 513 rows, or a short request.
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/common/ptx.cuh"
#include "kernels/cuda/attend_plan.cuh"
#include "kernels/cuda/attend_tile.cuh"

namespace sparse_mla::cuda {

/// Each of the four warps takes 16 of a block's 64 keys for all rows, with a maximum, a sum and an
/// output of its own; at the end they are joined in the order of the warps. The rows of Q stay in
/// registers as fragments, and the shared memory that a full tile's queries would need holds a
/// second block of K and V: copies, which bound this path, are two blocks ahead.
/// `load_keys`, `load_values`: (shared address, key) → copies of one block, one commit group each.
template <class Shape, bool kMasked, bool kTwoTerm, class LoadKeys, class LoadValues>
__device__ __forceinline__ void attend_few_rows(const AttendArguments& args, const AttendPlan& plan,
                                                const ChunkMember& member, const AttendWork& work,
                                                const KeyRange& keys, const MaskMember& mask,
                                                KeyWalk& walk, std::byte* shared_memory,
                                                const LoadKeys& load_keys,
                                                const LoadValues& load_values, bool vector_loads,
                                                bool vector_stores) {
  constexpr int kRows = Shape::kFewRows, kWarps = Shape::kWarps, kThreads = Shape::kThreads;
  constexpr int kKeys = Shape::kKeys, kWarpKeys = kKeys / kWarps;
  constexpr int kQkRowBytes = Shape::kQkRowBytes, kValueRowBytes = Shape::kValueRowBytes;
  constexpr int kValue = Shape::kValue, kValueTiles = kValue / 8, kSteps = Shape::kQk / 16;
  constexpr int kStageBytes = Shape::kKeyBytes + Shape::kValueBytes;
  constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.69314718055994531f;
  constexpr float kInfinity = HUGE_VALF;
  // A row's maximum before it has seen a key: finite, so that differences with it are no NaN.
  constexpr float kLowest = -FLT_MAX;
  static_assert(kRows == 16 && kWarpKeys == 16, "one 16×16 fragment of P per warp and block");
  static_assert(kRows * kQkRowBytes + 2 * kStageBytes <= Shape::kSharedBytes);

  __shared__ int planned_key[2];  // mode masked only: the next two blocks at the start, then [0]
  __shared__ float warp_maximum[kWarps][kRows], warp_sum[kWarps][kRows];
  const std::uint32_t shared_q = ptx::shared_address(shared_memory);
  const std::uint32_t stages = shared_q + kRows * kQkRowBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = lane / 4, pair = lane % 4;
  const int row0 = work.item.row, num_rows = member.query_len - row0;  // ≤ kRows
  const int key_end = keys.end;
  const auto chunk_row = [](std::uint32_t start, int s) {
    return (start ^ (2 * s % 8 << 4)) + 2 * s / 8 * 128;
  };
  const auto visible_end = [&](int row) {
    return args.causal ? static_cast<int>(
                             min(std::int64_t{key_end}, std::int64_t{member.context_len} + row + 1))
                       : key_end;
  };

  // The two blocks under way; at or past key_end: none.
  int key = keys.begin, following = keys.begin + kKeys;
  if (kMasked && key < key_end) {
    if (warp == 0) {
      walk.start(args, mask, row0, row0 + num_rows, key);
      const int first = walk.next(args, key);
      const int second = first < key_end ? walk.next(args, first + kKeys) : first;
      if (lane == 0) {
        planned_key[0] = first;
        planned_key[1] = second;
      }
    }
    __syncthreads();
    key = planned_key[0];
    following = planned_key[1];
  }
  // Mask words of row lane % 16 and the warp's keys of the next block, on their way.
  [[maybe_unused]] std::uint32_t words[2] = {};
  const auto fetch_words = [&](int block) {
    const int from = block + warp * kWarpKeys;
    if (from >= key_end || lane % kRows >= num_rows) return;
    const std::uint32_t* word = args.mask_words + mask.word_offset +
                                std::int64_t{row0 + lane % kRows} * mask.row_words +
                                ((from - mask.first_key) >> 5);
    words[0] = word[0];
    words[1] = word[1];
  };
  const auto load_block = [&](int stage, int block) {
    const std::uint32_t place = stages + stage * kStageBytes;
    if (block < key_end) {
      load_keys(place, block);
      load_values(place + Shape::kKeyBytes, block);
    } else {  // as many groups
      ptx::cp_async_commit();
      ptx::cp_async_commit();
    }
  };

  float out[kValueTiles][4] = {};
  float maximum[2] = {kLowest, kLowest}, sum[2] = {};
  if (key < key_end) {
    load_rows<kThreads, kRows, Shape::kQk, kQkRowBytes>(
        shared_q, address(args.q, std::int64_t{member.query_start} + row0, work.head, 0),
        args.q.stride(0), num_rows, vector_loads);
    ptx::cp_async_commit();
    load_block(0, key);
    load_block(1, following);
    if constexpr (kMasked) fetch_words(key);
    ptx::cp_async_wait<4>();
    __syncthreads();  // Q has arrived
    std::uint32_t q[kSteps][4];
    const std::uint32_t lane_q = shared_q + lane % 16 * kQkRowBytes + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) ptx::ldmatrix_x4(q[s], chunk_row(lane_q, s));

#pragma unroll 1
    for (int stage = 0; key < key_end; stage ^= 1) {
      ptx::cp_async_wait<2>();
      __syncthreads();  // the block has arrived
      const int warp_key = key + warp * kWarpKeys;
      bool active = warp_key < visible_end(row0 + num_rows - 1);
      std::uint32_t mask_bits = 0;  // of row lane % 16
      if constexpr (kMasked) {
        if (warp_key < key_end && lane % kRows < num_rows) {
          const int left = key_end - warp_key;
          mask_bits = __funnelshift_r(words[0], words[1], (warp_key - mask.first_key) & 31) &
                      (left >= kWarpKeys ? (1u << kWarpKeys) - 1 : (1u << left) - 1);
        }
        active = __any_sync(~0u, mask_bits != 0);
        if (warp == 0) {
          const int next = following < key_end ? walk.next(args, following + kKeys) : following;
          if (lane == 0) planned_key[0] = next;
        }
        if (following < key_end) fetch_words(following);
      }
      if (active) {
        const std::uint32_t place = stages + stage * kStageBytes;
        const std::uint32_t lane_k = place +
                                     (warp * kWarpKeys + lane % 8 + lane / 16 * 8) * kQkRowBytes +
                                     ((lane / 8 % 2 ^ lane % 8) << 4);
        // Two sums per tile, so that twice as many products are in flight.
        float score[2][4] = {}, other[2][4] = {};
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          std::uint32_t k[4];
          ptx::ldmatrix_x4(k, chunk_row(lane_k, s));
          ptx::mma_m16n8k16_bf16(s % 2 == 0 ? score[0] : other[0], q[s], k[0], k[1]);
          ptx::mma_m16n8k16_bf16(s % 2 == 0 ? score[1] : other[1], q[s], k[2], k[3]);
        }
        const float scale = args.softmax_scale * kLog2e;
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = h * 8 + group;
          const std::uint32_t bits = kMasked ? __shfl_sync(~0u, mask_bits, row) >> 2 * pair : 0;
          const int visible = visible_end(row0 + row) - warp_key - 2 * pair;
          float top = maximum[h];
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float& logit = score[n][2 * h + i];
              logit = (logit + other[n][2 * h + i]) * scale;
              const bool seen = kMasked ? (bits >> (n * 8 + i) & 1) != 0 : n * 8 + i < visible;
              if (!seen) logit = -kInfinity;
              top = fmaxf(top, logit);
            }
          top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
          top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
          factor[h] = ptx::ex2(maximum[h] - top);
          maximum[h] = top;
          float row_sum = 0;
#pragma unroll
          for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float& weight = score[n][2 * h + i];
              weight = ptx::ex2(weight - top);
              row_sum += weight;
            }
          sum[h] = sum[h] * factor[h] + row_sum;
        }
        if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
          for (int n = 0; n < kValueTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[n][i] *= factor[i / 2];
        }
        std::uint32_t weights[4], rest[4];  // P, and what the rounding to bf16 took from it
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float a = score[i / 2][i % 2 * 2], b = score[i / 2][i % 2 * 2 + 1];
          weights[i] = ptx::pack_bf16(a, b);
          rest[i] = ptx::pack_bf16_rest(a, b);
        }
        const std::uint32_t lane_v = place + Shape::kKeyBytes +
                                     (warp * kWarpKeys + lane % 16) * kValueRowBytes +
                                     ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
        for (int n = 0; n < kValueTiles / 2; ++n) {
          std::uint32_t v[4];
          ptx::ldmatrix_x4_transposed(v, chunk_row(lane_v, n));
          ptx::mma_m16n8k16_bf16(out[2 * n], weights, v[0], v[1]);
          ptx::mma_m16n8k16_bf16(out[2 * n + 1], weights, v[2], v[3]);
          if constexpr (kTwoTerm) {
            ptx::mma_m16n8k16_bf16(out[2 * n], rest, v[0], v[1]);
            ptx::mma_m16n8k16_bf16(out[2 * n + 1], rest, v[2], v[3]);
          }
        }
      }
      __syncthreads();  // the stage has been read
      key = following;
      following = kMasked ? planned_key[0] : following + kKeys;
      load_block(stage, following);
    }
  }

  // The warps' parts, [warp, row, V] as finish_rows takes rows, lie where the stages were.
  auto* parts = reinterpret_cast<float*>(shared_memory + kRows * kQkRowBytes);
  static_assert(kWarps * kRows * kValue * 4 <= 2 * kStageBytes);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    if (pair == 0) {
      warp_maximum[warp][h * 8 + group] = maximum[h];
      warp_sum[warp][h * 8 + group] = sum[h];
    }
    float* part = parts + (warp * kRows + h * 8) * kValue;
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n)
      *staged_pair<kValue>(part, n) = make_float2(out[n][2 * h], out[n][2 * h + 1]);
  }
  __syncthreads();
  if (warp * 8 >= num_rows) return;  // eight rows for each of the first two warps
  const int row = warp * 8, count = min(8, num_rows - row);
  FinishedRow finished;
  // The quad of row `group` weighs its parts.
  float top = kLowest, total = 0, factor[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, warp_maximum[w][row + group]);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    factor[w] = ptx::ex2(warp_maximum[w][row + group] - top);
    total += warp_sum[w][row + group] * factor[w];
  }
  const bool empty = total == 0;
  const float inverse = empty ? 0.0f : 1.0f / total;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) factor[w] *= inverse;
  finished.lse = empty ? -kInfinity : top * kLn2 + logf(total);
  const std::int64_t running_row = std::int64_t{member.packed_token} + row0 + row + group;
  if (group < count && work.item.slot < 0 && running_row < args.merge_row_end)
    finished.lse_before = *address(args.lse, work.head, running_row);
#pragma unroll 1
  for (int n = 0; n < kValueTiles; ++n) {
    float2 joint = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 part = *staged_pair<kValue>(parts + (w * kRows + row) * kValue, n);
      joint.x = fmaf(part.x, factor[w], joint.x);
      joint.y = fmaf(part.y, factor[w], joint.y);
    }
    *staged_pair<kValue>(parts + row * kValue, n) = joint;
  }
  __syncwarp();
  finish_rows<kValue, Shape::kRows>(args, plan, member, work, row, count, finished,
                                    parts + row * kValue, vector_stores);
}

}  // namespace sparse_mla::cuda
