// SSE2, which every x86-64 has.
#include <emmintrin.h>

#include "topk/threshold_scan_loop.h"

namespace sparse_mla::topk {
namespace {

/// A run of 32 elements as eight vectors of four float bits.
template <class Element>
class Sse2Block {
 public:
  explicit Sse2Block(std::int32_t floor)
      : floor_(_mm_set1_epi32(floor)), infinity_(_mm_set1_epi32(kInfinityBits)) {}

  std::uint32_t passing(const std::byte* elements) const {
    return sixteen(elements) | sixteen(elements + 16 * Element::kBytes) << 16;
  }

 private:
  /// Saturating packs keep all-ones and zero, so a byte's top bit says whether its element passes.
  std::uint32_t sixteen(const std::byte* elements) const {
    const __m128i low = _mm_packs_epi32(lanes(elements, 0), lanes(elements, 1));
    const __m128i high = _mm_packs_epi32(lanes(elements, 2), lanes(elements, 3));
    return static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(low, high)));
  }

  __m128i lanes(const std::byte* elements, int vector) const {
    const __m128i bits = load(elements + vector * 4 * Element::kBytes, Element{});
    const __m128i flip = _mm_srli_epi32(_mm_srai_epi32(bits, 31), 1);
    const __m128i key = _mm_xor_si128(bits, flip);
    return _mm_andnot_si128(_mm_cmpgt_epi32(key, infinity_), _mm_cmpgt_epi32(key, floor_));
  }

  static __m128i load(const std::byte* elements, ScanFloat32) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(elements));
  }
  static __m128i load(const std::byte* elements, ScanBFloat16) {
    const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(elements));
    return _mm_unpacklo_epi16(_mm_setzero_si128(), halves);
  }

  __m128i floor_, infinity_;
};

}  // namespace

void scan_f32_baseline(ThresholdScan& scan) { scan_row<ScanFloat32, Sse2Block<ScanFloat32>>(scan); }
void scan_bf16_baseline(ThresholdScan& scan) {
  scan_row<ScanBFloat16, Sse2Block<ScanBFloat16>>(scan);
}

}  // namespace sparse_mla::topk
