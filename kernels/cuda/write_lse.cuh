/// Where the kernels of `sparse_mqa` leave a row's log-sum-exp.
#pragma once

#include <cstdint>

#include "sparse_mla/attention.h"

namespace sparse_mla::cuda {

/// lse[head, column] of the token; the columns may be permuted, and one out of range is none.
__device__ inline void write_lse(const SparseMqaCall& call, std::int64_t token, int head,
                                 float lse) {
  const std::int64_t column = call.lse_tokens == nullptr ? token : call.lse_tokens[token];
  if (column >= 0 && column < call.lse.extent(1)) call.lse(head, column) = lse;
}

}  // namespace sparse_mla::cuda
