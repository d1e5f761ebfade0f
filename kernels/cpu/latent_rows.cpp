#include "kernels/cpu/latent_rows.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "kernels/cpu/bf16_bits.h"
#include "kernels/cpu/e4m3_values.h"

namespace sparse_mla::cpu {
namespace {

constexpr float kLargestE4m3 = 448;
/// A group of zeros, too, gets a scale that can be divided by.
constexpr float kSmallestScale = 1e-4f;

/// The scale of a group whose largest magnitude is `amax`.
float group_scale(float amax, bool power_of_two) {
  const float scale = std::max(amax / kLargestE4m3, kSmallestScale);
  if (!power_of_two) return scale;
  int exponent = 0;
  const float fraction = std::frexp(scale, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

const std::uint16_t* bf16_bits(const std::byte* bytes) {
  return reinterpret_cast<const std::uint16_t*>(bytes);
}
const std::uint8_t* e4m3_bits(const std::byte* bytes) {
  return reinterpret_cast<const std::uint8_t*>(bytes);
}
std::uint8_t* e4m3_bits(std::byte* bytes) { return reinterpret_cast<std::uint8_t*>(bytes); }

/// Where the parts of a fp8_ds_mla row begin, in bytes.
std::int64_t scale_offset(std::int64_t lora, std::int64_t group) { return lora + 4 * group; }
std::int64_t rope_offset(std::int64_t lora) { return scale_offset(lora, lora / kLatentScaleGroup); }

float read_scale(const std::byte* row, std::int64_t lora, std::int64_t group) {
  float scale = 0;
  std::memcpy(&scale, row + scale_offset(lora, group), sizeof scale);
  return scale;
}

std::size_t bf16_bytes(std::int64_t count) { return static_cast<std::size_t>(count) * 2; }

}  // namespace

void LatentRows::read(std::int64_t slot, float* out) const {
  const std::byte* row = cache_.row(slot);
  switch (cache_.format) {
    case CacheFormat::bf16:
      kernels_.bf16_to_float(bf16_bits(row), out, lora_ + rope_);
      return;
    case CacheFormat::fp8_ds_mla:
      for (std::int64_t i = 0; i < lora_; i += kLatentScaleGroup)
        kernels_.scale_e4m3_to_float(e4m3_bits(row + i),
                                     read_scale(row, lora_, i / kLatentScaleGroup), out + i,
                                     kLatentScaleGroup);
      kernels_.bf16_to_float(bf16_bits(row + rope_offset(lora_)), out + lora_, rope_);
      return;
    case CacheFormat::fp8:
      kernels_.scale_e4m3_to_float(e4m3_bits(row), cache_.scale, out, lora_ + rope_);
      return;
  }
}

void LatentRows::gather(std::int64_t slot, bfloat16* out) const {
  const std::byte* row = cache_.row(slot);
  const auto dequantise = [&](std::int64_t begin, std::int64_t end, float scale) {
    for (std::int64_t i = begin; i < end; i += kLatentScaleGroup) {
      float values[kLatentScaleGroup];
      const std::int64_t count = std::min<std::int64_t>(kLatentScaleGroup, end - i);
      kernels_.scale_e4m3_to_float(e4m3_bits(row + i), scale, values, count);
      kernels_.float_to_bf16(values, bits(out + i), count);
    }
  };
  switch (cache_.format) {
    case CacheFormat::bf16:
      std::memcpy(out, row, bf16_bytes(lora_ + rope_));
      return;
    case CacheFormat::fp8_ds_mla:
      for (std::int64_t i = 0; i < lora_; i += kLatentScaleGroup)
        dequantise(i, i + kLatentScaleGroup, read_scale(row, lora_, i / kLatentScaleGroup));
      std::memcpy(out + lora_, row + rope_offset(lora_), bf16_bytes(rope_));
      return;
    case CacheFormat::fp8:
      dequantise(0, lora_, 1);
      dequantise(lora_, lora_ + rope_, cache_.scale);
      return;
  }
}

void LatentRows::write(std::int64_t slot, const bfloat16* row, bool power_of_two_scales) const {
  std::byte* out = cache_.row(slot);
  switch (cache_.format) {
    case CacheFormat::bf16:
      std::memcpy(out, row, bf16_bytes(lora_ + rope_));
      return;
    case CacheFormat::fp8_ds_mla:
      for (std::int64_t i = 0; i < lora_; i += kLatentScaleGroup) {
        const float scale = group_scale(
            kernels_.max_magnitude_bf16(bits(row + i), kLatentScaleGroup), power_of_two_scales);
        kernels_.bf16_to_e4m3(bits(row + i), scale, e4m3_bits(out + i), kLatentScaleGroup);
        std::memcpy(out + scale_offset(lora_, i / kLatentScaleGroup), &scale, sizeof scale);
      }
      std::memcpy(out + rope_offset(lora_), row + lora_, bf16_bytes(rope_));
      return;
    case CacheFormat::fp8:
      kernels_.bf16_to_e4m3(bits(row), cache_.scale, e4m3_bits(out), lora_ + rope_);
      return;
  }
}

float ScalarLatentRows::element(const std::byte* row, std::int64_t i) const {
  const bool quantised =
      cache_.format == CacheFormat::fp8 || (cache_.format == CacheFormat::fp8_ds_mla && i < lora_);
  if (quantised) {
    const float scale = cache_.format == CacheFormat::fp8
                            ? cache_.scale
                            : read_scale(row, lora_, i / kLatentScaleGroup);
    return e4m3_values()[std::to_integer<std::uint8_t>(row[i])] * scale;
  }
  const std::byte* from =
      cache_.format == CacheFormat::bf16 ? row + 2 * i : row + rope_offset(lora_) + 2 * (i - lora_);
  bfloat16 value;
  std::memcpy(&value, from, sizeof value);
  return __bfloat162float(value);
}

void ScalarLatentRows::read(std::int64_t slot, float* out) const {
  for (std::int64_t i = 0; i < lora_ + rope_; ++i) out[i] = element(cache_.row(slot), i);
}

void ScalarLatentRows::gather(std::int64_t slot, bfloat16* out) const {
  const std::byte* row = cache_.row(slot);
  for (std::int64_t i = 0; i < lora_ + rope_; ++i)
    out[i] = __float2bfloat16_rn(cache_.format == CacheFormat::fp8 && i < lora_
                                     ? e4m3_values()[std::to_integer<std::uint8_t>(row[i])]
                                     : element(row, i));
}

void ScalarLatentRows::write(std::int64_t slot, const bfloat16* row,
                             bool power_of_two_scales) const {
  std::byte* out = cache_.row(slot);
  const auto quantise = [&](std::int64_t first, std::int64_t count, float scale) {
    for (std::int64_t i = first; i < first + count; ++i)
      out[i] = std::byte{
          __nv_cvt_float_to_fp8(__bfloat162float(row[i]) / scale, __NV_SATFINITE, __NV_E4M3)};
  };
  switch (cache_.format) {
    case CacheFormat::bf16:
      std::memcpy(out, row, bf16_bytes(lora_ + rope_));
      return;
    case CacheFormat::fp8_ds_mla:
      for (std::int64_t first = 0; first < lora_; first += kLatentScaleGroup) {
        float amax = 0;
        for (std::int64_t i = first; i < first + kLatentScaleGroup; ++i) {
          const float magnitude = std::fabs(__bfloat162float(row[i]));
          if (magnitude > amax) amax = magnitude;  // false for NaN
        }
        const float scale = group_scale(std::min(amax, 0x1.FEp127f), power_of_two_scales);
        quantise(first, kLatentScaleGroup, scale);
        std::memcpy(out + scale_offset(lora_, first / kLatentScaleGroup), &scale, sizeof scale);
      }
      std::memcpy(out + rope_offset(lora_), row + lora_, bf16_bytes(rope_));
      return;
    case CacheFormat::fp8:
      quantise(0, lora_ + rope_, cache_.scale);
      return;
  }
}

}  // namespace sparse_mla::cpu
