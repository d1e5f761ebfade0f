#include "tests/support/latent_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "tests/support/number_formats.h"

namespace sparse_mla::support {
namespace {

constexpr std::int64_t kGroup = 128;

double bf16_at(const std::byte* bytes) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, bytes, 2);
  return decode_bf16(bits);
}
float value_of(bfloat16 element) {
  return static_cast<float>(decode_bf16(std::bit_cast<std::uint16_t>(element)));
}

float scale_of_group(const bfloat16* values, bool power_of_two) {
  float amax = 0;
  for (std::int64_t i = 0; i < kGroup; ++i) {
    const float magnitude = std::fabs(value_of(values[i]));
    if (magnitude == magnitude) amax = std::max(amax, magnitude);
  }
  if (std::isinf(amax)) amax = std::bit_cast<float>(0x7F7F0000u);  // the largest bf16
  const float scale = std::max(amax / 448.0f, 1e-4f);
  if (!power_of_two) return scale;
  // Up to the next exponent unless there is no fraction to round.
  const auto bits = std::bit_cast<std::uint32_t>(scale);
  return std::bit_cast<float>((bits + 0x007FFFFFu) & 0xFF800000u);
}

}  // namespace

std::int64_t LatentRowFormat::row_bytes() const {
  switch (format) {
    case CacheFormat::bf16:
      return 2 * latent_dim();
    case CacheFormat::fp8_ds_mla:
      return kv_lora_rank + kv_lora_rank / kGroup * 4 + 2 * std::int64_t{qk_rope_head_dim};
    case CacheFormat::fp8:
      return latent_dim();
  }
  return 0;
}

const char* name_of(CacheFormat format) {
  switch (format) {
    case CacheFormat::bf16:
      return "bf16";
    case CacheFormat::fp8_ds_mla:
      return "fp8_ds_mla";
    case CacheFormat::fp8:
      return "fp8";
  }
  return "?";
}

void encode_latent_row(const LatentRowFormat& format, const bfloat16* values, std::byte* bytes) {
  const std::int64_t lora = format.kv_lora_rank, width = format.latent_dim();
  switch (format.format) {
    case CacheFormat::bf16:
      std::memcpy(bytes, values, static_cast<std::size_t>(2 * width));
      return;
    case CacheFormat::fp8_ds_mla: {
      std::byte* scales = bytes + lora;
      for (std::int64_t i = 0; i < lora; ++i) {
        const std::int64_t group = i / kGroup;
        float scale = 0;
        if (i % kGroup == 0) {
          scale = scale_of_group(values + i, format.power_of_two_scales);
          std::memcpy(scales + 4 * group, &scale, 4);
        }
        std::memcpy(&scale, scales + 4 * group, 4);
        bytes[i] = std::byte{encode_e4m3(value_of(values[i]) / scale)};
      }
      std::memcpy(scales + 4 * (lora / kGroup), values + lora,
                  2 * static_cast<std::size_t>(format.qk_rope_head_dim));
      return;
    }
    case CacheFormat::fp8:
      for (std::int64_t i = 0; i < width; ++i) {
        bytes[i] = std::byte{encode_e4m3(value_of(values[i]) / format.scale)};
      }
      return;
  }
}

void decode_latent_row(const LatentRowFormat& format, const std::byte* bytes, double* values) {
  const std::int64_t lora = format.kv_lora_rank, width = format.latent_dim();
  switch (format.format) {
    case CacheFormat::bf16:
      for (std::int64_t i = 0; i < width; ++i) values[i] = bf16_at(bytes + 2 * i);
      return;
    case CacheFormat::fp8_ds_mla: {
      const std::byte* scales = bytes + lora;
      for (std::int64_t first = 0; first < lora; first += kGroup) {
        float scale = 0;
        std::memcpy(&scale, scales + first / kGroup * 4, 4);
        for (std::int64_t i = first; i < first + kGroup; ++i) {
          values[i] = decode_e4m3(std::to_integer<std::uint8_t>(bytes[i])) * scale;
        }
      }
      const std::byte* rope = scales + lora / kGroup * 4;
      for (std::int64_t i = lora; i < width; ++i) values[i] = bf16_at(rope + 2 * (i - lora));
      return;
    }
    case CacheFormat::fp8:
      for (std::int64_t i = 0; i < width; ++i) {
        values[i] = decode_e4m3(std::to_integer<std::uint8_t>(bytes[i])) * format.scale;
      }
      return;
  }
}

}  // namespace sparse_mla::support
