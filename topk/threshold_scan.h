/// The one hot loop of the threshold selector, in two builds.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparse_mla::topk {

/// A scan may overshoot its stop by less than one block: buffers have this much slack.
inline constexpr std::int64_t kScanBlock = 1024;

/// Appends to `indices`, ascending, every i of [position, len) whose score ranks at or above a
/// threshold. Stops at the end of the block in which `count` reaches `stop`.
struct ThresholdScan {
  const std::byte* row = nullptr;  ///< [len] elements, any byte alignment
  std::int64_t len = 0;
  /// The threshold less one, as the float's bits with the lower 31 flipped when the sign is set:
  /// signed integers in the order of the scores. Never below −inf's predecessor, so that comparing
  /// with it drops NaNs whose sign is set.
  std::int32_t floor = 0;
  std::int64_t stop = 0;
  std::int32_t* indices = nullptr;  ///< [stop + kScanBlock]
  std::int64_t position = 0;        ///< in, out
  std::int64_t count = 0;           ///< in, out
};

using ScanFunction = void (*)(ThresholdScan& scan);

void scan_f32_baseline(ThresholdScan& scan);
void scan_bf16_baseline(ThresholdScan& scan);
void scan_f32_avx2(ThresholdScan& scan);
void scan_bf16_avx2(ThresholdScan& scan);

}  // namespace sparse_mla::topk
