/// What the kernels of `sparse_mqa` share: the online softmax of a wgmma score tile of 64 keys, a
/// quad of lanes to a row.
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
constexpr float kLn2 = 0.693147180559945309f;

__device__ inline float rescaling(float from, float to) {
  return from == to ? 1.0f : ptx::ex2(from - to);  // −inf to −inf: 1
}
/// What is taken off the exponents of a row's weights: `reference`, nothing before the first key.
__device__ inline float base_of(float reference) {
  return reference == -HUGE_VALF ? 0.0f : reference;
}

/// The maximum of a row's scores, of all four lanes. Those of keys that are not valid become −inf.
__device__ __forceinline__ void find_tops(float (&score)[32], uint2 valid, float (&top)[2]) {
  if ((valid.x & valid.y) != ~0u) {
    const int shift = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const std::uint32_t two = (n < 4 ? valid.x : valid.y) >> (8 * (n % 4) + shift);
      if ((two & 1) == 0) score[4 * n] = score[4 * n + 2] = -HUGE_VALF;
      if ((two & 2) == 0) score[4 * n + 1] = score[4 * n + 3] = -HUGE_VALF;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h] = -HUGE_VALF;
#pragma unroll
    for (int n = 0; n < 8; ++n)
      top[h] = fmaxf(top[h], fmaxf(score[4 * n + 2 * h], score[4 * n + 2 * h + 1]));
    top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
    top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
  }
}

/// Scores · scale = logits, base 2, to weights, in the order of a product's operand a. `top`: of
/// the rows' scores; `factor`: of earlier weights.
__device__ __forceinline__ void weigh(const float (&score)[32], const float (&top)[2], float scale,
                                      RowState& rows, float (&factor)[2],
                                      std::uint32_t (&weights)[16]) {
  float base[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float before = rows.reference[h];
    if (top[h] * scale > before + kSlack) rows.reference[h] = top[h] * scale;
    factor[h] = rescaling(before, rows.reference[h]);
    rows.sum[h] *= factor[h];
    base[h] = base_of(rows.reference[h]);
  }
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float low = ptx::ex2(fmaf(score[4 * n + 2 * h], scale, -base[h]));
      const float high = ptx::ex2(fmaf(score[4 * n + 2 * h + 1], scale, -base[h]));
      rows.sum[h] += low + high;
      weights[2 * n + h] = ptx::pack_bf16(low, high);
    }
}
__device__ __forceinline__ void weigh(float (&score)[32], uint2 valid, float scale, RowState& rows,
                                      float (&factor)[2], std::uint32_t (&weights)[16]) {
  float top[2];
  find_tops(score, valid, top);
  weigh(score, top, scale, rows, factor, weights);
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

/// Four registers of each of four lanes that lie kStride apart: register i of lane j to register j
/// of lane i.
template <int kStride>
__device__ inline void transpose_four(std::uint32_t (&r)[4]) {
  const int lane = threadIdx.x / kStride % 4;
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      const bool upper = (lane & step) != 0;
      const std::uint32_t other = __shfl_xor_sync(~0u, upper ? r[i] : r[i + step], step * kStride);
      (upper ? r[i] : r[i + step]) = other;
    }
}

}  // namespace sparse_mla::sm90
#endif
