// The tile kernels for any x86-64 processor: SSE2, four lanes.
#include <cstddef>
#include <cstdint>

#include <emmintrin.h>

#include "kernels/cpu/tile_kernels.h"

namespace sparse_mla::cpu {
namespace {

using Vector = __m128;
using IntVector [[gnu::vector_size(16)]] = std::int32_t;
constexpr std::int64_t kLanes = 4;
constexpr IntVector kLaneIndex = {0, 1, 2, 3};

inline Vector load(const float* from) { return _mm_loadu_ps(from); }
inline void store(float* to, Vector value) { _mm_storeu_ps(to, value); }
inline Vector broadcast(float value) { return _mm_set1_ps(value); }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }

/// Four 16-bit numbers, zero-extended.
inline IntVector load_u16(const std::uint16_t* from) {
  const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (IntVector)_mm_unpacklo_epi16(packed, _mm_setzero_si128());
}
/// Four 8-bit numbers, zero-extended.
inline IntVector load_u8(const std::uint8_t* from) {
  return IntVector{from[0], from[1], from[2], from[3]};
}

}  // namespace
}  // namespace sparse_mla::cpu

#include "kernels/cpu/tile_kernels.inl.h"

namespace sparse_mla::cpu {
const TileKernels& baseline_tile_kernels() { return kTileKernels; }
}  // namespace sparse_mla::cpu
