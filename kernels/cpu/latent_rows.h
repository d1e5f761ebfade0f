/// Rows of a latent cache, of any format, read as fp32 or, as `gather` promises, as bf16, and
/// written from bf16. Bytewise: a row may start at any address. The classes look at no bound:
/// callers have validated the cache.
#pragma once

#include <cstdint>

#include "kernels/cpu/tile_kernels.h"
#include "sparse_mla/cache.h"
#include "sparse_mla/types.h"

namespace sparse_mla::cpu {

/// With a table of tile kernels.
class LatentRows {
 public:
  LatentRows(const LatentCache& cache, int kv_lora_rank, int qk_rope_head_dim,
             const TileKernels& kernels)
      : cache_(cache), kernels_(kernels), lora_(kv_lora_rank), rope_(qk_rope_head_dim) {}

  void read(std::int64_t slot, float* out) const;                                      ///< [L+R]
  void gather(std::int64_t slot, bfloat16* out) const;                                 ///< [L+R]
  void write(std::int64_t slot, const bfloat16* row, bool power_of_two_scales) const;  ///< [L+R]

 private:
  LatentCache cache_;
  const TileKernels& kernels_;
  std::int64_t lora_, rope_;
};

/// A number at a time with the toolkit's conversions: for the scalar reference entries.
class ScalarLatentRows {
 public:
  ScalarLatentRows(const LatentCache& cache, int kv_lora_rank, int qk_rope_head_dim)
      : cache_(cache), lora_(kv_lora_rank), rope_(qk_rope_head_dim) {}

  void read(std::int64_t slot, float* out) const;
  void gather(std::int64_t slot, bfloat16* out) const;
  void write(std::int64_t slot, const bfloat16* row, bool power_of_two_scales) const;

 private:
  float element(const std::byte* row, std::int64_t i) const;

  LatentCache cache_;
  std::int64_t lora_, rope_;
};

}  // namespace sparse_mla::cpu
