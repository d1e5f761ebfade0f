/// Numbers as fp16 and a power of two: what the products of quantised rows are made of. Fp16 has
/// three bits more than bf16, and one instruction makes two numbers of it from e4m3; but it has not
/// the range of rows and queries. So these are divided by powers of two, which costs no bit: a
/// query by one of its own, sixteen rows by one for all of them. (A row 2^28 times smaller than
/// another of its sixteen keeps 11 bits of its greatest number, and loses all that is 2^11 times
/// smaller.)
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/common/ptx.cuh"

namespace sparse_mla::sm90 {

/// 2^n, −60 ≤ n ≤ 115.
class PowerOfTwo {
 public:
  /// The one that divides `most` (≥ 0) to 2^13 … 2^14: a quarter of fp16's range, and numbers down
  /// to 2^−27 of it lose nothing. Where it is less than 2^−47 more is lost.
  __device__ static PowerOfTwo that_fits(float most) {
    const auto exponent = static_cast<int>(__float_as_uint(most) >> 23);
    return PowerOfTwo(static_cast<std::uint32_t>(max(exponent - kTarget, kLeast)));
  }
  __device__ float value() const { return __uint_as_float(biased_ << 23); }
  __device__ float inverse() const { return __uint_as_float((2 * kBias - biased_) << 23); }

 private:
  static constexpr int kBias = 127, kTarget = 13, kLeast = kBias - 60;
  __device__ explicit PowerOfTwo(std::uint32_t biased) : biased_(biased) {}
  std::uint32_t biased_;  // n + 127
};

/// Of a power of two: its exponent is what is left to twice the bias.
__device__ inline float inverse_of(float power) {
  return __uint_as_float(0x7F000000u - __float_as_uint(power));
}

/// Two bf16 numbers · factor.
__device__ inline std::uint32_t bf16x2_to_f16x2(std::uint32_t pair, float factor) {
  return ptx::pack_f16(__uint_as_float(pair << 16) * factor,
                       __uint_as_float(pair & 0xFFFF0000u) * factor);
}

/// Four e4m3 numbers · factor, each rounded once; `factor`: twice the same.
__device__ inline void scale_e4m3x4(std::uint32_t codes, std::uint32_t factor, std::uint32_t& low,
                                    std::uint32_t& high) {
  asm("{\n\t.reg .b16 a, b;\n\t.reg .b32 c, d;\n\tmov.b32 {a, b}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 c, a;\n\tcvt.rn.f16x2.e4m3x2 d, b;\n\t"
      "mul.rn.f16x2 %0, c, %3;\n\tmul.rn.f16x2 %1, d, %3;\n\t}"
      : "=r"(low), "=r"(high)
      : "r"(codes), "r"(factor));
}

}  // namespace sparse_mla::sm90
