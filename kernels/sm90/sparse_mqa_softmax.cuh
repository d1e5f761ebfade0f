/// What the kernels of `sparse_mqa` share: the online softmax of a wgmma score tile of 64 or 48
/// keys, a quad of lanes to a row.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/sm90/wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace sparse_mla::sm90 {

/// Rows g and g + 8 of a warp's sixteen, of which a thread has every fourth pair of columns.
struct RowState {
  /// Base-2 logarithm that the weights are relative to: a maximum so far, −inf before the first
  /// key. It follows the maximum only when that has grown by kSlack: weights up to 2^kSlack lose
  /// nothing, and sums are rarely rescaled.
  float reference[2];
  float sum[2];
};
constexpr float kSlack = 8;

__device__ inline float rescaling(float from, float to) {
  return from == to ? 1.0f : ptx::ex2(from - to);  // −inf to −inf: 1
}

/// Products of keys that were divided by powers of two, and of such queries, · those. `keys`: of
/// eight keys each; `query`: by row.
template <int kKeys>
__device__ __forceinline__ void multiply_back(float (&score)[kKeys / 2],
                                              const float (&keys)[kKeys / 8],
                                              const float (&query)[2]) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float factor = keys[n] * query[h];
      score[4 * n + 2 * h] *= factor;
      score[4 * n + 2 * h + 1] *= factor;
    }
}

/// Scores to base-2 logarithms of weight · what the keys were divided by: weights times divided
/// keys are right then.
template <int kKeys>
__device__ __forceinline__ void logits_of_divided(float (&score)[kKeys / 2],
                                                  const float (&keys)[kKeys / 8], float scale) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    const float log2 = static_cast<float>(static_cast<int>(__float_as_uint(keys[n]) >> 23) - 127);
#pragma unroll
    for (int i = 0; i < 4; ++i) score[4 * n + i] = fmaf(score[4 * n + i], scale, log2);
  }
}

/// The maximum of a row's scores, of all four lanes. Those of keys that are not valid become −inf;
/// bits of `valid` behind the last key are set.
template <int kKeys>
__device__ __forceinline__ void find_tops(float (&score)[kKeys / 2], uint2 valid, float (&top)[2]) {
  if ((valid.x & valid.y) != ~0u) {
    const int shift = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const std::uint32_t two = (n < 4 ? valid.x : valid.y) >> (8 * (n % 4) + shift);
      if ((two & 1) == 0) score[4 * n] = score[4 * n + 2] = -HUGE_VALF;
      if ((two & 2) == 0) score[4 * n + 1] = score[4 * n + 3] = -HUGE_VALF;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h] = -HUGE_VALF;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
      top[h] = fmaxf(top[h], fmaxf(score[4 * n + 2 * h], score[4 * n + 2 * h + 1]));
    top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
    top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
  }
}

/// Scores · scale = logits, base 2, to weights, in the order of a product's operand a: bf16, or
/// where keys were divided by `keys`, fp16 and · that, so that the sum takes them by its inverse.
/// `top`: of the rows' scores; `factor`: of earlier weights.
template <int kKeys, bool kDivided>
__device__ __forceinline__ void weigh(const float (&score)[kKeys / 2], const float (&top)[2],
                                      float scale, const float (&keys)[kKeys / 8], RowState& rows,
                                      float (&factor)[2], std::uint32_t (&weights)[kKeys / 4]) {
  float base[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float before = rows.reference[h];
    if (top[h] * scale > before + kSlack) rows.reference[h] = top[h] * scale;
    factor[h] = rescaling(before, rows.reference[h]);
    rows.sum[h] *= factor[h];
    base[h] = rows.reference[h] == -HUGE_VALF ? 0.0f : rows.reference[h];
  }
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    // Of a power of two: its exponent is what is left to twice the bias.
    const float inverse = __uint_as_float(0x7F000000u - __float_as_uint(keys[n]));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float low = ptx::ex2(fmaf(score[4 * n + 2 * h], scale, -base[h]));
      const float high = ptx::ex2(fmaf(score[4 * n + 2 * h + 1], scale, -base[h]));
      if constexpr (kDivided) {
        rows.sum[h] = fmaf(low + high, inverse, rows.sum[h]);
        weights[2 * n + h] = ptx::pack_f16(low, high);
      } else {
        rows.sum[h] += low + high;
        weights[2 * n + h] = ptx::pack_bf16(low, high);
      }
    }
  }
}

/// Of keys as they are.
template <int kKeys>
__device__ __forceinline__ void weigh(float (&score)[kKeys / 2], uint2 valid, float scale,
                                      RowState& rows, float (&factor)[2],
                                      std::uint32_t (&weights)[kKeys / 4]) {
  const float keys[kKeys / 8] = {};
  float top[2];
  find_tops<kKeys>(score, valid, top);
  weigh<kKeys, false>(score, top, scale, keys, rows, factor, weights);
}

// Who arrives at an mbarrier for a warp is who made the accesses that this orders, and values reach
// the other lanes by shuffles. (To arrive for them behind __syncwarp() would be as right, but
// racecheck follows each thread's accesses to that thread's own arrivals only.)

/// Validity bits of a block's 64 keys, which lane `source` alone reads.
__device__ inline uint2 load_valid(const void* bits, int source) {
  uint2 valid{0, 0};
  if (static_cast<int>(threadIdx.x % 32) == source)
    valid = make_uint2(static_cast<const volatile std::uint32_t*>(bits)[0],
                       static_cast<const volatile std::uint32_t*>(bits)[1]);
  return {__shfl_sync(~0u, valid.x, source), __shfl_sync(~0u, valid.y, source)};
}
/// A row's value, which the first lane of its quad alone reads.
__device__ inline float load_by_quad(const float& shared) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const float value = lane % 4 == 0 ? shared : 0.0f;
  return __shfl_sync(~0u, value, lane & ~3);
}

/// Four registers per row and lane of a quad: [8-column group j][lane's two columns] to [lane's
/// 8-column group][two columns j].
__device__ inline void transpose_quad(std::uint32_t (&r)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      const bool upper = (lane & step) != 0;
      const std::uint32_t other = __shfl_xor_sync(~0u, upper ? r[i] : r[i + step], step);
      (upper ? r[i] : r[i + step]) = other;
    }
}

}  // namespace sparse_mla::sm90
#endif
