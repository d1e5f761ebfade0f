/// Bytes of random caches for benchmarks: numbers of moderate size, no NaN.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparse_mla/cache.h"
#include "sparse_mla/random.h"

namespace sparse_mla::bench {

/// Byte `at` (0 … 3) of the fp32 number 1/64: every scale of a random cache.
__device__ inline std::byte scale_byte(std::int64_t at) {
  return static_cast<std::byte>(0x3C800000u >> (at % 4 * 8) & 0xFFu);
}

/// Byte i of contiguous latent rows: bf16 below 1, e4m3 below 2.
struct MakeRowByte {
  CacheFormat format;
  int kv_lora_rank;
  std::int64_t row_bytes;
  __device__ std::byte operator()(std::int64_t i) const {
    const auto bits = static_cast<unsigned>(random_bits(3, 1, static_cast<std::uint64_t>(i)));
    const std::int64_t at = i % row_bytes;
    const std::int64_t scale_bytes = kv_lora_rank / kLatentScaleGroup * 4;
    const bool ds_mla = format == CacheFormat::fp8_ds_mla;
    if (ds_mla && at >= kv_lora_rank && at < kv_lora_rank + scale_bytes) return scale_byte(at);
    if (format == CacheFormat::fp8 || (ds_mla && at < kv_lora_rank))
      return static_cast<std::byte>(bits & 0xBFu);
    return static_cast<std::byte>(at % 2 == 0 ? bits & 0xFFu : (bits & 0x80u) | 0x3Eu);
  }
};

/// Byte i of contiguous pages of indexer keys: e4m3 below 2.
struct MakeIndexByte {
  std::int64_t key_bytes;   ///< of a page's keys
  std::int64_t page_bytes;  ///< of its keys and scales
  __device__ std::byte operator()(std::int64_t i) const {
    const std::int64_t at = i % page_bytes;
    if (at >= key_bytes) return scale_byte(at);
    return static_cast<std::byte>(random_bits(3, 2, static_cast<std::uint64_t>(i)) & 0xBFu);
  }
};

}  // namespace sparse_mla::bench
