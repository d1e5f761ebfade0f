/// From a request's keys to rows of the cache, on the host and on the device.
#pragma once

#include <cstdint>

#include <cuda/std/bit>

#include "sparse_mla/host_device.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

/// One request's row of a block table.
class RequestPages {
 public:
  /// No pages: no key has a slot.
  SPARSE_MLA_HOST_DEVICE RequestPages() {}

  /// `request` outside of `block_tables` [num_requests, max_blocks]: no pages. A page holds
  /// `block_size` keys; the cache has `num_blocks` of them, at most 2^31.
  SPARSE_MLA_HOST_DEVICE RequestPages(const View2<const std::int32_t>& block_tables,
                                      std::int64_t request, std::int32_t block_size,
                                      std::int64_t num_blocks) {
    if (request < 0 || request >= block_tables.extent(0)) return;
    table_ = address(block_tables, request, 0);
    stride_ = block_tables.stride(1);
    constexpr std::int64_t kMaxColumns = 0x7FFFFFFF;  // keys are 32-bit
    const std::int64_t columns = block_tables.extent(1);
    columns_ = static_cast<std::int32_t>(columns < kMaxColumns ? columns : kMaxColumns);
    num_blocks_ = static_cast<std::uint32_t>(num_blocks);
    block_size_ = block_size;
    const auto size = static_cast<std::uint32_t>(block_size);
    block_shift_ = ::cuda::std::has_single_bit(size) ? ::cuda::std::countr_zero(size) : -1;
  }

  /// The slot of the request's key number `key` ≥ 0; −1 where the table has no such column or names
  /// no block of the cache.
  SPARSE_MLA_HOST_DEVICE std::int32_t slot_of(std::int32_t key) const {
    // A division takes a GPU some 20 instructions.
    const std::int32_t column = block_shift_ >= 0 ? key >> block_shift_ : key / block_size_;
    if (column >= columns_) return -1;
    const auto block = static_cast<std::uint32_t>(table_[column * stride_]);
    if (block >= num_blocks_) return -1;  // negative ones too
    return static_cast<std::int32_t>(block * static_cast<std::uint32_t>(block_size_) +
                                     static_cast<std::uint32_t>(key - column * block_size_));
  }

 private:
  const std::int32_t* table_ = nullptr;  // [columns_], `stride_` apart
  std::int64_t stride_ = 0;
  // 32 bits each: kernels keep them in registers.
  std::int32_t columns_ = 0, block_size_ = 1;
  std::uint32_t num_blocks_ = 0;
  int block_shift_ = 0;  // log2(block_size_), or −1 where it is no power of two
};

}  // namespace sparse_mla
