/// What happens to an attention row after its last merge, defined once for every path, backend and
/// epilogue: the attention sink, then the result's element type.
#pragma once

#include <cmath>

#include "sparse_mla/host_device.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

/// The sink is one more key of logit `sink` whose value is 0: out ·= 1 / (1 + exp(sink − lse)).
/// −inf = no sink, +inf → out 0. A row without keys is not touched; a NaN lse propagates.
SPARSE_MLA_HOST_DEVICE inline float sink_factor(float sink, float lse) {
  const float infinity = HUGE_VALF;
  if (sink == -infinity || lse == -infinity) return 1.0f;
  return 1.0f / (1.0f + expf(sink - lse));
}

/// value / scale as e4m3: to nearest, ties to even, saturating at ±448 (infinity too), NaN stays
/// NaN. A division, not a product with 1 / scale, so that every backend rounds the same quotient.
SPARSE_MLA_HOST_DEVICE inline fp8_e4m3 quantise_output(float value, float scale) {
  return fp8_e4m3(value / scale);
}

}  // namespace sparse_mla
