// The tile kernels for processors with AVX2 and FMA: eight lanes. Compiled with wider instructions
// than the rest of the library: include nothing here that has inline functions with linkage.
#include <cstddef>
#include <cstdint>

#include <immintrin.h>

#include "kernels/cpu/tile_kernels.h"

namespace sparse_mla::cpu {
namespace {

using Vector = __m256;
using IntVector [[gnu::vector_size(32)]] = std::int32_t;
constexpr std::int64_t kLanes = 8;
constexpr IntVector kLaneIndex = {0, 1, 2, 3, 4, 5, 6, 7};

inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Vector value) { _mm256_storeu_ps(to, value); }
inline Vector broadcast(float value) { return _mm256_set1_ps(value); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

/// Eight 16-bit numbers, zero-extended.
inline IntVector load_u16(const std::uint16_t* from) {
  return (IntVector)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
/// Eight 8-bit numbers, zero-extended.
inline IntVector load_u8(const std::uint8_t* from) {
  return (IntVector)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}

}  // namespace
}  // namespace sparse_mla::cpu

#include "kernels/cpu/tile_kernels.inl.h"

namespace sparse_mla::cpu {
const TileKernels& avx2_tile_kernels() { return kTileKernels; }
}  // namespace sparse_mla::cpu
