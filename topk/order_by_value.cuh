/// Order of picks by descending score, one block per row.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "topk/device_rows.cuh"
#include "topk/ordered_key.h"

namespace sparse_mla::cuda {

/// Ranks that order_by_value() needs for the longest row of a problem: a power of two.
inline std::int64_t sort_size(const SelectProblem& problem) {
  const auto count = static_cast<std::uint64_t>(
      std::min<std::int64_t>(problem.k, std::max<std::int64_t>(problem.max_row_len, 1)));
  return static_cast<std::int64_t>(std::bit_ceil(count));
}

/// Ascending bitonic sort of `size` (a power of two) ranks by one block; ends with a barrier.
__device__ inline void sort_ranks(std::uint64_t* ranks, std::int64_t size) {
  for (std::int64_t run = 2; run <= size; run *= 2)
    for (std::int64_t step = run / 2; step > 0; step /= 2) {
      for (std::int64_t pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const std::int64_t low = 2 * pair - (pair & (step - 1)), high = low + step;
        const std::uint64_t a = ranks[low], b = ranks[high];
        if ((a > b) == ((low & run) == 0)) {
          ranks[low] = b;
          ranks[high] = a;
        }
      }
      __syncthreads();
    }
}

/// Puts a row's picks, `count` indices in any order, into descending order of their scores.
/// `ranks`: [the power of two at or above count]. Begins and ends with a barrier.
template <class Element>
__device__ void order_by_value(const std::byte* row, std::int32_t* picks, std::int64_t count,
                               std::uint64_t* ranks) {
  std::int64_t size = 1;
  while (size < count) size *= 2;
  __syncthreads();  // the picks were written by other threads
  for (std::int64_t j = threadIdx.x; j < size; j += blockDim.x)
    ranks[j] = j < count
                   ? topk::packed_rank(topk::ordered_key(Element::bits(row, picks[j])), picks[j])
                   : ~std::uint64_t{0};
  __syncthreads();
  sort_ranks(ranks, size);
  for (std::int64_t j = threadIdx.x; j < count; j += blockDim.x)
    picks[j] = topk::packed_index(ranks[j]);
  __syncthreads();
}

/// Scores and slots of picks that are in place; begins with a barrier.
template <class Element>
__device__ void put_extras(const PickWriter& writer, const std::byte* row, std::int64_t count) {
  __syncthreads();
  for (std::int64_t j = threadIdx.x; j < count; j += blockDim.x) {
    const std::int32_t index = writer.indices()[j];
    writer.put_extras(j, index, writer.wants_values() ? Element::bits(row, index) : 0);
  }
}

}  // namespace sparse_mla::cuda
