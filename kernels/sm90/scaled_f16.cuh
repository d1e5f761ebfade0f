/// Numbers as fp16 and a power of two: what the products of quantised rows are made of. Fp16 has
/// three bits more than bf16, and one instruction makes two numbers of it from e4m3; but it has not
/// the range of rows and queries. So these are divided by powers of two, which costs no bit: a
/// query by one of its own, eight rows by one for all of them. (A row 2^28 times smaller than
/// another of its eight keeps 11 bits of its greatest number, and loses all that is 2^11 times
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

/// Two bf16 numbers · factor.
__device__ inline std::uint32_t bf16x2_to_f16x2(std::uint32_t pair, float factor) {
  return ptx::pack_f16(__uint_as_float(pair << 16) * factor,
                       __uint_as_float(pair & 0xFFFF0000u) * factor);
}

/// The latent part of 64 rows of queries, in slabs of 64 columns, bf16, in place to fp16, each row
/// divided by a power of two of its own so that it stays within the range: `divisor`, [64]. For all
/// threads of both consumer warpgroups, four to a row.
template <int kLatent>
__device__ __forceinline__ void queries_to_f16(std::uint32_t q, int rows, int thread,
                                               float* divisor) {
  constexpr int kChunks = kLatent / 8 / 4, kSlabBytes = 64 * 128;
  const int row = thread / 4;
  if (row / 8 * 8 >= rows) {  // none of the warp's
    if (thread % 4 == 0) divisor[row] = 1;
    return;
  }
  // Sixteen bytes of half a slab, halves by turns of the row's parity, so that eight lanes touch
  // each bank once.
  const auto place = [&](int i) {
    const int chunk = thread % 4 + 4 * ((i ^ row) & 1);
    return q + i / 2 * kSlabBytes + row * 128 + ((chunk ^ row % 8) << 4);
  };
  uint4 chunks[kChunks];
  __nv_bfloat162 top{};
  const auto as_pair = [](std::uint32_t bits) {
    return *reinterpret_cast<const __nv_bfloat162*>(&bits);
  };
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunks[i] = ptx::load_shared_16(place(i));
    const std::uint32_t words[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
    for (const std::uint32_t word : words) top = __hmax2(top, __habs2(as_pair(word)));
  }
  float most = fmaxf(__low2float(top), __high2float(top));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  const PowerOfTwo power = PowerOfTwo::that_fits(most);
  if (thread % 4 == 0) divisor[row] = power.value();
  const float factor = power.inverse();
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const std::uint32_t numbers[4] = {
        bf16x2_to_f16x2(chunks[i].x, factor), bf16x2_to_f16x2(chunks[i].y, factor),
        bf16x2_to_f16x2(chunks[i].z, factor), bf16x2_to_f16x2(chunks[i].w, factor)};
    ptx::store_shared_16(place(i), numbers);
  }
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
