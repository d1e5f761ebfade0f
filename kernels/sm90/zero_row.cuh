/// What a quantised row that is not to be read is read from.
#pragma once

#include "kernels/cuda/latent_rows.cuh"

namespace sparse_mla::sm90 {

/// A row of fp8_ds_mla of DeepSeek's widths: 0 · 0 are the zeros that stand for a row that is not
/// to be read, and loads of it need no predicate, behind which ptxas would wait for them.
__device__ const uint4 kZeroRow[(cuda::ds_mla_rope_offset(512) + 2 * 64) / 16] = {};

__device__ inline const std::byte* row_or_zeros(const std::byte* row) {
  return row != nullptr ? row : reinterpret_cast<const std::byte*>(kZeroRow);
}

}  // namespace sparse_mla::sm90
