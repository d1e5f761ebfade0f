/// The body of the scan, included by threshold_scan_baseline.cpp and threshold_scan_avx2.cpp alone.
/// Everything is in an anonymous namespace and no library template is used: two builds of one
/// inline function under different instruction sets would otherwise be merged by the linker, and
/// the wider one could be the one that is kept.
#pragma once

#include <cstdint>
#include <cstring>

#include "topk/threshold_scan.h"

namespace sparse_mla::topk {
namespace {  // NOLINT: see above

constexpr std::int32_t kInfinityBits = 0x7F800000;

struct ScanFloat32 {
  static constexpr std::int64_t kBytes = 4;
  static std::int32_t bits(const std::byte* element) {
    std::int32_t word;
    std::memcpy(&word, element, 4);
    return word;
  }
};
struct ScanBFloat16 {
  static constexpr std::int64_t kBytes = 2;
  static std::int32_t bits(const std::byte* element) {
    std::uint16_t half;
    std::memcpy(&half, element, 2);
    return static_cast<std::int32_t>(std::uint32_t{half} << 16);
  }
};

/// `Block::passing(elements, floor)`: bit j = element j of a block ranks above `floor`.
template <class Element, class Block>
void scan_row(ThresholdScan& scan) {
  const std::byte* const row = scan.row;
  std::int32_t* const indices = scan.indices;
  const Block block(scan.floor);
  std::int64_t position = scan.position, count = scan.count;
  for (; position + kScanBlock <= scan.len && count < scan.stop; position += kScanBlock) {
    std::uint32_t passing = block.passing(row + position * Element::kBytes);
    while (passing != 0) {
      indices[count++] = static_cast<std::int32_t>(position + __builtin_ctz(passing));
      passing &= passing - 1;
    }
  }
  if (position + kScanBlock > scan.len && count < scan.stop)
    for (; position < scan.len; ++position) {
      const std::int32_t bits = Element::bits(row + position * Element::kBytes);
      const std::int32_t key = bits ^ ((bits >> 31) & 0x7FFFFFFF);
      if (key > scan.floor && key <= kInfinityBits)
        indices[count++] = static_cast<std::int32_t>(position);
    }
  scan.position = position;
  scan.count = count;
}

}  // namespace
}  // namespace sparse_mla::topk
