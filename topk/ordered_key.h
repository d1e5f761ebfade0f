/// Scores as unsigned integers in the order of the top-k contract: a larger key ranks before a
/// smaller one, equal scores have equal keys (−0 is +0), every NaN has the lowest key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "sparse_mla/host_device.h"

namespace sparse_mla::topk {

inline constexpr std::uint32_t kNanKey = 0;
inline constexpr std::uint32_t kNegativeInfinityKey = 0x007FFFFFu;
inline constexpr std::uint32_t kPositiveInfinityKey = 0xFF800000u;

/// Key of the float with these bits. Integer arithmetic only: a process that flushes denormals
/// still tells them apart.
SPARSE_MLA_HOST_DEVICE constexpr std::uint32_t ordered_key(std::uint32_t bits) {
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return kNanKey;
  if (bits == 0x80000000u) bits = 0;
  // By arithmetic, unlike the two rare cases above: no branch predictor can guess a sign.
  return bits ^ ((0u - (bits >> 31)) | 0x80000000u);
}

/// Ascending order of these = descending score, then ascending index.
SPARSE_MLA_HOST_DEVICE constexpr std::uint64_t packed_rank(std::uint32_t key, std::int64_t index) {
  return (std::uint64_t{~key} << 32) | static_cast<std::uint32_t>(index);
}
SPARSE_MLA_HOST_DEVICE constexpr std::int32_t packed_index(std::uint64_t rank) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(rank));
}

/// Element types of a row. `bits` reads element i as the bits of a float, at any byte alignment.
struct Float32 {
  static constexpr std::int64_t kBytes = 4;
  SPARSE_MLA_HOST_DEVICE static std::uint32_t bits(const std::byte* row, std::int64_t i) {
    std::uint32_t word;
    std::memcpy(&word, row + i * kBytes, kBytes);
    return word;
  }
};
struct BFloat16 {
  static constexpr std::int64_t kBytes = 2;
  SPARSE_MLA_HOST_DEVICE static std::uint32_t bits(const std::byte* row, std::int64_t i) {
    std::uint16_t half;
    std::memcpy(&half, row + i * kBytes, kBytes);
    return std::uint32_t{half} << 16;
  }
};

}  // namespace sparse_mla::topk
