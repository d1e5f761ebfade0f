/// `attend` for any widths: plain fp32 arithmetic, a query row and head per CTA at a time. Right
/// everywhere, fast nowhere.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_plan.cuh"

namespace sparse_mla::cuda {

/// Threads of a CTA and keys that it attends at a time (one each); CTAs per SM, enough of them to
/// hide each other's latency; rows of a work item.
SPARSE_MLA_HOST_DEVICE constexpr int rows_kernel_threads() { return 128; }
SPARSE_MLA_HOST_DEVICE constexpr int rows_kernel_ctas_per_sm() { return 8; }
SPARSE_MLA_HOST_DEVICE constexpr int rows_kernel_tile() { return 16; }

/// The kernel's own arrays in shared memory, rounded up.
SPARSE_MLA_HOST_DEVICE constexpr int rows_kernel_static_bytes() { return 1024; }
/// Dynamic shared memory: the query row (scaled) and the sums of the value, fp32.
inline std::int64_t rows_kernel_shared_bytes(const AttendProblem& problem) {
  return std::int64_t{4} *
         (problem.qk_nope_head_dim + problem.qk_rope_head_dim + problem.v_head_dim);
}

/// The largest or the sum of one value per thread, for all threads.
template <bool kMaximum>
__device__ inline float reduce_block(float value, float* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(~0u, value, offset);
    value = kMaximum ? fmaxf(value, other) : value + other;
  }
  __syncthreads();  // the last reduction's scratch has been read
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[0];
  for (int warp = 1; warp < rows_kernel_threads() / 32; ++warp)
    value = kMaximum ? fmaxf(value, scratch[warp]) : value + scratch[warp];
  return value;
}

/// Per 128 keys: a thread computes one key's logit, the CTA the new maximum, then a thread adds up
/// its columns of the value. What a row does not see is not read.
static __global__ void __launch_bounds__(rows_kernel_threads(), rows_kernel_ctas_per_sm())
    attend_rows_kernel(const __grid_constant__ AttendArguments args,
                       const __grid_constant__ AttendPlan plan, const int nope, const int rope,
                       const int value_dim) {
  constexpr int kThreads = rows_kernel_threads();
  extern __shared__ float shared_rows[];
  float* query = shared_rows;              // [P+R]
  float* out = shared_rows + nope + rope;  // [V], not yet divided by `sum`
  __shared__ float weights[kThreads], scratch[kThreads / 32];
  __shared__ AttendWork work;
  __shared__ bool done;

  while (true) {
    __syncthreads();  // everyone is through with the last work
    if (threadIdx.x < 32) {
      AttendWork found = {};
      const bool any = next_work(plan, args.num_heads, found);
      if (threadIdx.x == 0) {
        done = !any;
        if (any) work = found;
      }
    }
    __syncthreads();
    if (done) return;
    const ChunkMember member = args.members[work.item.member];
    const int row_end = min(work.item.row + rows_kernel_tile(), member.query_len);
    for (int row = work.item.row; row < row_end; ++row) {
      __syncthreads();  // the last row's sums have been read
      const bfloat16* q = address(args.q, std::int64_t{member.query_start} + row, work.head, 0);
      for (int d = threadIdx.x; d < nope + rope; d += kThreads)
        query[d] = __bfloat162float(q[d]) * args.softmax_scale;
      for (int d = threadIdx.x; d < value_dim; d += kThreads) out[d] = 0;
      __syncthreads();

      const int num_keys = visible_keys(args, member, row + 1);
      const MaskMember* mask = nullptr;
      const std::uint32_t* words = nullptr;
      if (args.mask_members != nullptr) {
        mask = args.mask_members + work.item.member;
        words = args.mask_words + mask->word_offset + std::int64_t{row} * mask->row_words;
      }
      float maximum = -HUGE_VALF, sum = 0;
      for (int first = 0; first < num_keys; first += kThreads) {
        const int i = first + static_cast<int>(threadIdx.x);
        bool seen = i < num_keys;
        if (seen && words != nullptr) {
          const std::int64_t key = std::int64_t{member.first_key} + i;
          seen = mask_word(words, *mask, key, key + 1) != 0;
        }
        float logit = -HUGE_VALF;
        if (seen) {
          const std::int64_t key_row = std::int64_t{member.key_row} + i;
          const bfloat16* k_nope = address(args.k_nope, key_row, work.head, 0);
          const bfloat16* k_pe = address(args.k_pe, key_row, 0);
          float dot = 0;
          for (int d = 0; d < nope; ++d) dot = fmaf(query[d], __bfloat162float(k_nope[d]), dot);
          for (int d = 0; d < rope; ++d)
            dot = fmaf(query[nope + d], __bfloat162float(k_pe[d]), dot);
          logit = dot;
        }
        const float top = fmaxf(maximum, reduce_block<true>(logit, scratch));
        const float base = top == -HUGE_VALF ? 0.0f : top;
        const float weight = seen ? expf(logit - base) : 0.0f;
        const float factor = expf(maximum - base);
        maximum = top;
        weights[threadIdx.x] = weight;
        sum = sum * factor + reduce_block<false>(weight, scratch);  // also: weights are there
        const int count = min(kThreads, num_keys - first);
        for (int d = threadIdx.x; d < value_dim; d += kThreads) {
          float total = out[d] * factor;
          for (int j = 0; j < count; ++j) {
            if (weights[j] == 0) continue;
            const std::int64_t key_row = std::int64_t{member.key_row} + first + j;
            total =
                fmaf(weights[j], __bfloat162float(*address(args.v, key_row, work.head, d)), total);
          }
          out[d] = total;
        }
        __syncthreads();  // the weights have been read
      }

      const bool empty = sum == 0;
      const float inverse = empty ? 0.0f : 1.0f / sum;
      const float lse = empty ? -HUGE_VALF : maximum + logf(sum);
      const std::int64_t running_row = std::int64_t{member.packed_token} + row;
      float* running_lse = address(args.lse, work.head, running_row);
      const float lse_before = running_row < args.merge_row_end ? *running_lse : 0.0f;
      __syncthreads();  // all threads have read it
      const RowEpilogue epilogue(args, running_row, work.head, lse, lse_before);
      if (epilogue.stays()) continue;
      if (threadIdx.x == 0) *running_lse = epilogue.lse();
      for (int d = threadIdx.x; d < value_dim; d += kThreads) epilogue.put(d, out[d] * inverse);
    }
  }
}

}  // namespace sparse_mla::cuda
