/// Where a cached row lies, with 32-bit divisions: LatentCache::row() divides 64-bit numbers, which
/// is a function call on a device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparse_mla/cache.h"

namespace sparse_mla::cuda {

/// The row at `slot`, which lies in the cache.
__device__ inline const std::byte* cached_row(const LatentCache& cache, std::int32_t slot) {
  const auto number = static_cast<std::uint32_t>(slot);
  const auto size = static_cast<std::uint32_t>(cache.block_size);
  return cache.data + std::int64_t{number / size} * cache.block_stride +
         std::int64_t{number % size} * cache.row_stride;
}

}  // namespace sparse_mla::cuda
