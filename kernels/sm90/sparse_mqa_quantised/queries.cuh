/// The queries of the `sparse_mqa` kernel over fp8_ds_mla rows, as its products take them.
#pragma once

#include <cstdint>

#include "kernels/sm90/scaled_f16.cuh"
#include "kernels/sm90/sparse_mqa_quantised/tile.cuh"
#include "kernels/sm90/wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace sparse_mla::sm90 {

/// kColumns rows of queries in place, each divided by a power of two of its own so that fp16 holds
/// it: the latent part to fp16, of 16 columns the even pairs first, as a lane gets them of a row's
/// codes; the rope part stays bf16. `factor`, [rows]: that power · `scale`. For all threads of both
/// consumer warpgroups, four to a row.
template <int kColumns>
__device__ __forceinline__ void divide_queries(std::uint32_t q, int thread, float scale,
                                               float* factor) {
  using Shape = PrefillShape;
  const int row = thread / 4, unit = thread % 4;
  if (kColumns < Shape::kRows && row >= kColumns) return;
  const auto place = [&](int slab, int half) {
    return q + slab * QuantisedMemory<kColumns>::kQuerySlabBytes + row * 128 +
           (((2 * unit + half) ^ row % 8) << 4);
  };
  const auto as_pair = [](std::uint32_t bits) {
    return *reinterpret_cast<const __nv_bfloat162*>(&bits);
  };
  __nv_bfloat162 top{};
  uint4 chunks[Shape::kSlabs][2];
#pragma unroll
  for (int slab = 0; slab < Shape::kSlabs; ++slab)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 chunk = chunks[slab][half] = ptx::load_shared_16(place(slab, half));
      const std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (const std::uint32_t word : words) top = __hmax2(top, __habs2(as_pair(word)));
    }
  float most = fmaxf(__low2float(top), __high2float(top));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  const PowerOfTwo power = PowerOfTwo::that_fits(most);
  if (unit == 0) factor[row] = power.value() * scale;
  const float inverse = power.inverse();
#pragma unroll
  for (int slab = 0; slab < Shape::kRopeSlab; ++slab) {
    const uint4 low = chunks[slab][0], high = chunks[slab][1];
    const std::uint32_t even[4] = {bf16x2_to_f16x2(low.x, inverse), bf16x2_to_f16x2(low.z, inverse),
                                   bf16x2_to_f16x2(high.x, inverse),
                                   bf16x2_to_f16x2(high.z, inverse)};
    const std::uint32_t odd[4] = {bf16x2_to_f16x2(low.y, inverse), bf16x2_to_f16x2(low.w, inverse),
                                  bf16x2_to_f16x2(high.y, inverse),
                                  bf16x2_to_f16x2(high.w, inverse)};
    ptx::store_shared_16(place(slab, 0), even);
    ptx::store_shared_16(place(slab, 1), odd);
  }
  const std::uint32_t twice = ptx::pack_bf16(inverse, inverse);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 chunk = chunks[Shape::kRopeSlab][half];
    const std::uint32_t divided[4] = {
        ptx::multiply_bf16(chunk.x, twice), ptx::multiply_bf16(chunk.y, twice),
        ptx::multiply_bf16(chunk.z, twice), ptx::multiply_bf16(chunk.w, twice)};
    ptx::store_shared_16(place(Shape::kRopeSlab, half), divided);
  }
}

}  // namespace sparse_mla::sm90
#endif
