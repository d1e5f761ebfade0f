/// The arithmetic of joining two partials, defined once for every path, backend and epilogue.
#pragma once

#include <cmath>

#include "sparse_mla/host_device.h"

namespace sparse_mla {

struct MergeWeights {
  float a = 0, b = 0;  ///< out = a · out_a + b · out_b, a term with weight 0 left out
  float lse = 0;       ///< natural logarithm of the joint denominator
};

/// −inf and +inf are both read as "no keys". A NaN on either side propagates.
SPARSE_MLA_HOST_DEVICE inline MergeWeights merge_weights(float lse_a, float lse_b) {
  const float infinity = HUGE_VALF;
  if (lse_a == infinity) lse_a = -infinity;
  if (lse_b == infinity) lse_b = -infinity;
  if (lse_a == -infinity && lse_b == -infinity) return {0.0f, 0.0f, -infinity};
  const float top = lse_a > lse_b ? lse_a : lse_b;
  const float weight_a = expf(lse_a - top), weight_b = expf(lse_b - top);
  const float sum = weight_a + weight_b;
  return {weight_a / sum, weight_b / sum, top + logf(sum)};
}

/// x · a + y · b, rounded after every step on every backend: where a compiler may fuse as it likes,
/// two kernels (or two paths of one) would differ in the last bit.
SPARSE_MLA_HOST_DEVICE inline float weighted_sum(float x, float a, float y, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(__fmul_rn(x, a), __fmul_rn(y, b));
#else
  return x * a + y * b;
#endif
}

/// One output element. Weight 0 contributes nothing, whatever the value; weight 1 alone returns the
/// value bit for bit.
SPARSE_MLA_HOST_DEVICE inline float merge_value(const MergeWeights& weights, float value_a,
                                                float value_b) {
  if (weights.a == 0.0f) return weights.b == 0.0f ? 0.0f : weights.b * value_b;
  if (weights.b == 0.0f) return weights.a * value_a;
  return weighted_sum(weights.a, value_a, weights.b, value_b);
}

}  // namespace sparse_mla
