/// Division of slots by the rows of a page, without a division.
#pragma once

#include <cstdint>

#include "sparse_mla/host_device.h"

namespace sparse_mla::sm90 {

/// slot / page for 0 ≤ slot < 2^31 by a product: with 2^(l−1) < page ≤ 2^l, the multiplier is
/// ⌊2^(31+l) / page⌋ + 1, too large by a part of at most 2^−31 · page / 2^l.
struct PageDivisor {
  std::uint32_t page, multiplier;  ///< rows of a page
  int shift;                       ///< l − 1; −1: a page is a row

  static PageDivisor of(std::uint32_t page) {
    int l = 0;
    while ((std::uint64_t{1} << l) < page) ++l;
    return {page, static_cast<std::uint32_t>((std::uint64_t{1} << (31 + l)) / page + 1), l - 1};
  }
  SPARSE_MLA_HOST_DEVICE std::uint32_t quotient(std::uint32_t slot) const {
    if (shift < 0) return slot;
    return static_cast<std::uint32_t>(std::uint64_t{slot} * multiplier >> 32) >> shift;
  }
};

}  // namespace sparse_mla::sm90
