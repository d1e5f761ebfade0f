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

/// `Block(floor).passing(elements)`: bit j = element j of a run of 32 ranks above `floor`.
///
/// A block is first compared, then its survivors are written: where they lie no branch predictor
/// can guess, and the mispredictions would keep interrupting the stream of loads.
template <class Element, class Block>
void scan_row(ThresholdScan& scan) {
  constexpr std::int64_t kRun = 32, kRuns = kScanBlock / kRun;
  const Block block(scan.floor);
  std::int32_t* const indices = scan.indices;
  std::int64_t position = scan.position, count = scan.count;
  while (position + kRun <= scan.len && count < scan.stop) {
    const std::byte* const elements = scan.row + position * Element::kBytes;
    const std::int64_t left = (scan.len - position) / kRun;
    const std::int64_t runs = left < kRuns ? left : kRuns;
    std::uint32_t passing[kRuns];
    for (std::int64_t run = 0; run < runs; ++run)
      passing[run] = block.passing(elements + run * kRun * Element::kBytes);
    for (std::int64_t run = 0; run < runs; ++run, position += kRun)
      for (std::uint32_t rest = passing[run]; rest != 0; rest &= rest - 1)
        indices[count++] = static_cast<std::int32_t>(position + __builtin_ctz(rest));
  }
  if (position + kRun > scan.len && count < scan.stop)
    for (; position < scan.len; ++position) {
      const std::int32_t bits = Element::bits(scan.row + position * Element::kBytes);
      const std::int32_t key = bits ^ ((bits >> 31) & 0x7FFFFFFF);
      if (key > scan.floor && key <= kInfinityBits)
        indices[count++] = static_cast<std::int32_t>(position);
    }
  scan.position = position;
  scan.count = count;
}

}  // namespace
}  // namespace sparse_mla::topk
