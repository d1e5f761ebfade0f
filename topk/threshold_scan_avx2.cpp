// Compiled with -mavx2; see threshold_scan_loop.h for what may not be included here.
#include <immintrin.h>

#include "topk/threshold_scan_loop.h"

namespace sparse_mla::topk {
namespace {

/// A run of 32 elements as four vectors of eight float bits.
template <class Element>
class Avx2Block {
 public:
  explicit Avx2Block(std::int32_t floor)
      : floor_(_mm256_set1_epi32(floor)), infinity_(_mm256_set1_epi32(kInfinityBits)) {}

  std::uint32_t passing(const std::byte* elements) const {
    return lanes(elements, 0) | lanes(elements, 1) << 8 | lanes(elements, 2) << 16 |
           lanes(elements, 3) << 24;
  }

 private:
  std::uint32_t lanes(const std::byte* elements, int vector) const {
    const __m256i bits = load(elements + vector * 8 * Element::kBytes, Element{});
    const __m256i flip = _mm256_srli_epi32(_mm256_srai_epi32(bits, 31), 1);
    const __m256i key = _mm256_xor_si256(bits, flip);
    const __m256i above = _mm256_cmpgt_epi32(key, floor_);
    const __m256i nan = _mm256_cmpgt_epi32(key, infinity_);
    return static_cast<std::uint32_t>(
        _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_andnot_si256(nan, above))));
  }

  static __m256i load(const std::byte* elements, ScanFloat32) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(elements));
  }
  static __m256i load(const std::byte* elements, ScanBFloat16) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(elements));
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
  }

  __m256i floor_, infinity_;
};

}  // namespace

void scan_f32_avx2(ThresholdScan& scan) { scan_row<ScanFloat32, Avx2Block<ScanFloat32>>(scan); }
void scan_bf16_avx2(ThresholdScan& scan) { scan_row<ScanBFloat16, Avx2Block<ScanBFloat16>>(scan); }

}  // namespace sparse_mla::topk
