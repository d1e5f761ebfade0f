/// What an entry of `sparse_mqa` rounds beside fp32's own arithmetic, for the tests' bounds.
#pragma once

#include <string>

#include "sparse_mla/cache.h"

namespace sparse_mla::support {

/// Largest relative errors of a softmax weight and of a number of a cached row.
struct SparseMqaErrors {
  double weight = 0, number = 0;
};

/// Tensor cores take weights rounded to bf16. Hopper's take dequantised numbers rounded to fp16, as
/// what they are multiplied by was before.
inline SparseMqaErrors sparse_mqa_errors(const std::string& entry, CacheFormat format) {
  constexpr double kHalfUlp = 0x1p-8, kHalfUlpOfF16 = 0x1p-11;
  const bool hopper = entry.starts_with("sm90_"), quantised = format != CacheFormat::bf16;
  return {hopper || entry == "cuda_mma" ? kHalfUlp : 0,
          hopper && quantised ? 2 * kHalfUlpOfF16 : 0};
}

}  // namespace sparse_mla::support
