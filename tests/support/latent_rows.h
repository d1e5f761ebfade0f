/// Cached latent rows in every format, quantised and decoded here on their own so that a fault in
/// the library's writers and readers cannot hide.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparse_mla/cache.h"

namespace sparse_mla::support {

struct LatentRowFormat {
  CacheFormat format = CacheFormat::bf16;
  int kv_lora_rank = 512;
  int qk_rope_head_dim = 64;
  float scale = 1;                   ///< of format fp8
  bool power_of_two_scales = false;  ///< how fp8_ds_mla is written

  std::int64_t latent_dim() const { return std::int64_t{kv_lora_rank} + qk_rope_head_dim; }
  std::int64_t row_bytes() const;
};

/// As in meta.json and on the command line.
const char* name_of(CacheFormat format);

/// `values` [L+R]; `bytes` of any alignment.
void encode_latent_row(const LatentRowFormat& format, const bfloat16* values, std::byte* bytes);
void decode_latent_row(const LatentRowFormat& format, const std::byte* bytes, double* values);

}  // namespace sparse_mla::support
