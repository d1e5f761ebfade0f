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
  /// `block_size` keys; the cache has `num_blocks` of them.
  SPARSE_MLA_HOST_DEVICE RequestPages(const View2<const std::int32_t>& block_tables,
                                      std::int64_t request, std::int32_t block_size,
                                      std::int64_t num_blocks) {
    if (request < 0 || request >= block_tables.extent(0)) return;
    table_ = address(block_tables, request, 0);
    stride_ = block_tables.stride(1);
    columns_ = block_tables.extent(1);
    num_blocks_ = num_blocks;
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
    const std::int64_t block = table_[column * stride_];
    if (block < 0 || block >= num_blocks_) return -1;
    return static_cast<std::int32_t>(block * block_size_ + (key - column * block_size_));
  }

 private:
  const std::int32_t* table_ = nullptr;  // [columns_], `stride_` apart
  std::int64_t stride_ = 0, columns_ = 0, num_blocks_ = 0;
  std::int32_t block_size_ = 1;
  int block_shift_ = 0;  // log2(block_size_), or −1 where it is no power of two
};

}  // namespace sparse_mla
