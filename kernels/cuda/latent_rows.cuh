/// Rows of a latent cache on the device: what `gather` and `sparse_mqa` read of them and
/// `write_cache` writes, bit for bit what the CPU backend does. Nothing here looks at bounds.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_fp8.h>

#include "kernels/common/ptx.cuh"
#include "sparse_mla/cache.h"
#include "sparse_mla/types.h"

namespace sparse_mla::cuda {

/// Byte of a fp8_ds_mla row at which its scales, its rope part begin.
__host__ __device__ constexpr int ds_mla_scale_offset(int lora) { return lora; }
__host__ __device__ constexpr int ds_mla_rope_offset(int lora) {
  return lora + lora / kLatentScaleGroup * 4;
}

/// The row at `slot`, which lies in the cache. With 32-bit divisions: LatentCache::row() divides
/// 64-bit numbers, which is a function call on a device.
__device__ inline const std::byte* cached_row(const LatentCache& cache, std::int32_t slot) {
  const auto number = static_cast<std::uint32_t>(slot);
  const auto size = static_cast<std::uint32_t>(cache.block_size);
  return cache.data + std::int64_t{number / size} * cache.block_stride +
         std::int64_t{number % size} * cache.row_stride;
}

/// Bytes at any address.
__device__ inline bfloat16 load_bf16_bytes(const std::byte* from) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(from);
  return __ushort_as_bfloat16(static_cast<unsigned short>(bytes[0] | bytes[1] << 8));
}
__device__ inline float load_float_bytes(const std::byte* from) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(from);
  return __uint_as_float(bytes[0] | bytes[1] << 8 | bytes[2] << 16 |
                         static_cast<std::uint32_t>(bytes[3]) << 24);
}
__device__ inline void store_bf16_bytes(std::byte* to, bfloat16 value) {
  const unsigned bits = __bfloat16_as_ushort(value);
  to[0] = static_cast<std::byte>(bits & 0xFF);
  to[1] = static_cast<std::byte>(bits >> 8);
}
__device__ inline void store_float_bytes(std::byte* to, float value) {
  const std::uint32_t bits = __float_as_uint(value);
  for (int i = 0; i < 4; ++i) to[i] = static_cast<std::byte>((bits >> (8 * i)) & 0xFF);
}

__device__ inline float e4m3_to_float(std::uint8_t code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));  // both steps are exact
}

/// Two e4m3 numbers · factor, each rounded once to bf16.
__device__ inline std::uint32_t scale_e4m3x2_to_bf16x2(std::uint32_t codes, float factor) {
  const float2 values = __half22float2(__half2(
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xFFFF), __NV_E4M3)));
  return ptx::pack_bf16(values.x * factor, values.y * factor);
}

/// Eight neighbouring numbers of a row as they are stored: 16 bytes of bf16, or 8 of e4m3 and what
/// they are multiplied by. Loading and decoding are apart so that a thread has several loads in
/// flight.
struct RowUnit {
  static constexpr int kNumbers = 8;
  uint2 low, high;  ///< high: bf16 only
  float factor;     ///< e4m3 only
};

/// Number 8·unit … of `row`; its parts have to be aligned to 8 bytes (bf16: the row to 16).
template <CacheFormat kFormat>
__device__ RowUnit load_unit(const std::byte* row, int unit, int lora, float cache_scale) {
  RowUnit loaded{};
  const int element = unit * RowUnit::kNumbers;
  if constexpr (kFormat == CacheFormat::bf16) {
    const uint4 numbers = __ldg(reinterpret_cast<const uint4*>(row) + unit);
    loaded.low = {numbers.x, numbers.y};
    loaded.high = {numbers.z, numbers.w};
  } else if constexpr (kFormat == CacheFormat::fp8_ds_mla) {
    const bool latent = element < lora;
    const std::byte* from =
        row + (latent ? element : ds_mla_rope_offset(lora) + 2 * (element - lora));
    loaded.low = __ldg(reinterpret_cast<const uint2*>(from));
    if (latent)
      loaded.factor = __ldg(reinterpret_cast<const float*>(row + ds_mla_scale_offset(lora)) +
                            element / kLatentScaleGroup);
    else
      loaded.high = __ldg(reinterpret_cast<const uint2*>(from) + 1);
  } else {
    loaded.low = __ldg(reinterpret_cast<const uint2*>(row + element));
    loaded.factor = element < lora ? 1.0f : cache_scale;  // see gathered_latent_scale()
  }
  return loaded;
}

/// What `gather` promises of it: eight bf16 numbers.
template <CacheFormat kFormat>
__device__ uint4 decode_unit(const RowUnit& loaded, int unit, int lora) {
  const bool quantised = kFormat == CacheFormat::fp8 ||
                         (kFormat == CacheFormat::fp8_ds_mla && unit * RowUnit::kNumbers < lora);
  if (!quantised) return {loaded.low.x, loaded.low.y, loaded.high.x, loaded.high.y};
  return {scale_e4m3x2_to_bf16x2(loaded.low.x, loaded.factor),
          scale_e4m3x2_to_bf16x2(loaded.low.x >> 16, loaded.factor),
          scale_e4m3x2_to_bf16x2(loaded.low.y, loaded.factor),
          scale_e4m3x2_to_bf16x2(loaded.low.y >> 16, loaded.factor)};
}

/// Number `i` of a row at any address, as `gather` promises it.
template <CacheFormat kFormat>
__device__ bfloat16 decode_number(const std::byte* row, int i, int lora, float cache_scale) {
  if constexpr (kFormat == CacheFormat::bf16) return load_bf16_bytes(row + 2 * i);
  if (kFormat == CacheFormat::fp8_ds_mla && i >= lora)
    return load_bf16_bytes(row + ds_mla_rope_offset(lora) + 2 * (i - lora));
  float factor = i < lora ? 1.0f : cache_scale;
  if constexpr (kFormat == CacheFormat::fp8_ds_mla)
    factor = load_float_bytes(row + ds_mla_scale_offset(lora) + i / kLatentScaleGroup * 4);
  return __float2bfloat16_rn(e4m3_to_float(static_cast<std::uint8_t>(row[i])) * factor);
}

/// The scale of a fp8_ds_mla group whose largest magnitude is `amax`, NaN passed over.
__device__ inline float group_scale(float amax, bool power_of_two) {
  constexpr float kLargestE4m3 = 448, kLargestBf16 = 0x1.FEp127f;
  constexpr float kSmallestScale = 1e-4f;  // so that a group of zeros can be divided by it
  const float scale = fmaxf(__fdiv_rn(fminf(amax, kLargestBf16), kLargestE4m3), kSmallestScale);
  if (!power_of_two) return scale;
  // A normal number above 0: where its mantissa is not 0, the next exponent is the power above it.
  constexpr std::uint32_t kMantissa = (1u << 23) - 1;
  const std::uint32_t bits = __float_as_uint(scale);
  return (bits & kMantissa) == 0 ? scale : __uint_as_float((bits & ~kMantissa) + kMantissa + 1);
}

/// e4m3(value / scale): nearest, ties to even, saturating at ±448.
__device__ inline std::uint8_t quantise(bfloat16 value, float scale) {
  return __nv_cvt_float_to_fp8(__fdiv_rn(__bfloat162float(value), scale), __NV_SATFINITE,
                               __NV_E4M3);
}

}  // namespace sparse_mla::cuda
