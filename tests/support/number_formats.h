/// bf16 and e4m3 bit patterns, decoded and encoded here on their own so that a fault in the
/// library's conversions cannot hide.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace sparse_mla::support {

inline double decode_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// To nearest, ties to even; NaN stays NaN.
inline std::uint16_t encode_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (value != value) return 0x7FC0;
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

/// e4m3 "fn": sign, 4 exponent bits with bias 7, 3 mantissa bits; no infinity, S.1111.111 is NaN.
inline double decode_e4m3(std::uint8_t bits) {
  static const std::array<double, 256> kValues = [] {
    std::array<double, 256> values{};
    for (int code = 0; code < 256; ++code) {
      const int exponent = (code >> 3) & 15, mantissa = code & 7;
      double magnitude =
          exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
      if (exponent == 15 && mantissa == 7) magnitude = std::numeric_limits<double>::quiet_NaN();
      values[static_cast<std::size_t>(code)] = code < 128 ? magnitude : -magnitude;
    }
    return values;
  }();
  return kValues[bits];
}

/// To nearest, ties to even, saturating at ±448; −0 is kept, NaN becomes 0x7F.
inline std::uint8_t encode_e4m3(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint8_t>((bits >> 24) & 0x80u);
  if (value != value) return 0x7F;
  const float magnitude = std::min(std::fabs(value), 448.0f);
  std::uint32_t code = 0;
  if (magnitude < 0x1p-6f) {
    // Subnormal: a multiple of 2^-9. Adding 2^14 leaves exactly nine fraction bits, rounded to
    // even; a carry into 8 is the code of the smallest normal number.
    code = std::bit_cast<std::uint32_t>(magnitude + 0x1p14f) & 0xFu;
  } else {
    const auto rounded = std::bit_cast<std::uint32_t>(magnitude);
    code = ((rounded + 0x7FFFFu + ((rounded >> 20) & 1u)) >> 20) - ((127u - 7u) << 3);
  }
  return static_cast<std::uint8_t>(sign | code);
}

}  // namespace sparse_mla::support
