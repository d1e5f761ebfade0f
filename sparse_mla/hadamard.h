/// The Walsh–Hadamard transform that stands before the indexer's quantisation: it spreads outliers
/// over all channels and leaves scores alone, since it is orthogonal.
#pragma once

#include <cstdint>

#include "sparse_mla/operation.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

/// Operation `hadamard`: out[r, h, i] = dims^-1/2 · Σ_j (−1)^popcount(i & j) · in[r, h, j], the
/// normalised transform in natural (Sylvester) order, its own inverse. fp32 arithmetic on bf16
/// data, log2(dims) rounds of butterflies. `out` may be `in` itself, but not overlap it in another
/// way. Throws std::invalid_argument when dims is no power of two.
struct HadamardProblem {
  int dims = 128;  ///< a power of two
  std::int64_t max_rows = 0;
};
struct HadamardCall {
  View3<const bfloat16> in;  ///< [rows, heads, dims], any strides
  View3<bfloat16> out;       ///< [rows, heads, dims]
};
const Operation<HadamardProblem, HadamardCall>& hadamard_operation();

}  // namespace sparse_mla
