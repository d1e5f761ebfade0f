/// What the selectors around a library's routine share: rows laid out densely for it, slab by slab,
/// and its picks written the way the contract wants.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/device.h"
#include "topk/device_rows.cuh"
#include "topk/ordered_key.h"

namespace sparse_mla::cuda {

constexpr int kLibraryThreads = 256;

/// Keys that one slab may hold, so that scratch stays bounded: 0.8 to 1.6 GB. One row may be
/// longer.
constexpr std::int64_t kSlabKeys = std::int64_t{1} << 26;
/// Rows that one slab may hold: short rows need scratch per row too.
constexpr std::int64_t kSlabRows = std::int64_t{1} << 20;

/// Rows of a slab when each takes `width` keys.
constexpr std::int64_t slab_rows(std::int64_t max_rows, std::int64_t width) {
  const std::int64_t fitting = kSlabKeys / std::max<std::int64_t>(width, 1);
  return std::min({max_rows, kSlabRows, std::max<std::int64_t>(fitting, 1)});
}

/// Beyond this many CTAs the kernels loop.
inline unsigned library_grid(std::int64_t ctas) {
  return static_cast<unsigned>(std::min<std::int64_t>(ctas, 1 << 20));
}

/// Rows [first, first + count) of a call, `width` keys each.
struct Slab {
  std::int64_t first, count, width;
  std::int64_t max_row_len;
};

constexpr int kKeysPerCta = 16 * kLibraryThreads;

/// write(place, r, i, key, len) for every key of a slab: i < width of row r < count, at `place` =
/// r · width + i. Keys at i ≥ len are 0, NaN's. A CTA takes kKeysPerCta of one row at a time.
template <class Element, class Write>
__global__ void __launch_bounds__(kLibraryThreads)
    write_keys_kernel(const __grid_constant__ SelectCall call, Slab slab, Write write) {
  const std::int64_t pieces = (slab.width + kKeysPerCta - 1) / kKeysPerCta;
  for (std::int64_t piece = blockIdx.x; piece < slab.count * pieces; piece += gridDim.x) {
    const std::int64_t r = piece / pieces, begin = piece % pieces * kKeysPerCta;
    const DeviceRow row = row_of<Element>(call, slab.max_row_len, slab.first + r);
    const std::int64_t end = begin + kKeysPerCta < slab.width ? begin + kKeysPerCta : slab.width;
    for (std::int64_t i = begin + threadIdx.x; i < end; i += kLibraryThreads) {
      const std::uint32_t key =
          i < row.len ? topk::ordered_key(Element::bits(row.scores, i)) : topk::kNanKey;
      write(r * slab.width + i, r, static_cast<std::int32_t>(i), key, row.len);
    }
  }
}

template <class Element, class Write>
void write_keys(const SelectCall& call, const Slab& slab, Write write, Stream stream) {
  const std::int64_t pieces = (slab.width + kKeysPerCta - 1) / kKeysPerCta;
  if (slab.count * pieces == 0) return;
  write_keys_kernel<Element>
      <<<library_grid(slab.count * pieces), kLibraryThreads, 0, stream>>>(call, slab, write);
  check_launch("write_keys_kernel");
}

/// Ascending sort of any number of indices in place by one CTA; starts and ends with a barrier. A
/// bitonic sort (Batcher, "Sorting networks and their applications", 1968) whose merges begin with
/// mirrored pairs: all comparisons then point one way, and what lies behind the end may be thought
/// of as infinite and left out.
__device__ inline void sort_indices(std::int32_t* indices, std::int64_t count) {
  const auto order = [&](std::int64_t low, std::int64_t high) {
    if (high >= count) return;
    const std::int32_t a = indices[low], b = indices[high];
    if (a <= b) return;
    indices[low] = b;
    indices[high] = a;
  };
  __syncthreads();
  for (std::int64_t run = 2; run < 2 * count; run *= 2) {
    const std::int64_t pairs = (count + run - 1) / run * (run / 2);
    for (std::int64_t p = threadIdx.x; p < pairs; p += kLibraryThreads) {
      const std::int64_t begin = p / (run / 2) * run, offset = p % (run / 2);
      order(begin + offset, begin + run - 1 - offset);
    }
    __syncthreads();
    for (std::int64_t step = run / 4; step > 0; step /= 2) {
      for (std::int64_t p = threadIdx.x; p < pairs; p += kLibraryThreads) {
        const std::int64_t low = 2 * p - (p & (step - 1));
        order(low, low + step);
      }
      __syncthreads();
    }
  }
}

/// Writes the picks of a slab, one CTA per row: indices[r · stride, + min(k, len)) of row r, in
/// that order or by index. A row without a choice needs none of them, unless `by_value` asks for
/// their order.
template <class Element>
__global__ void __launch_bounds__(kLibraryThreads)
    write_picks_kernel(const __grid_constant__ SelectCall call, Slab slab, std::int64_t k,
                       SelectOrder order, std::int32_t* indices, std::int64_t stride) {
  for (std::int64_t r = blockIdx.x; r < slab.count; r += gridDim.x) {
    const DeviceRow row = row_of<Element>(call, slab.max_row_len, slab.first + r);
    if (row.out_row < 0) continue;
    const std::int64_t count = row.len < k ? row.len : k;
    std::int32_t* const picks = indices + r * stride;
    const bool all = row.len <= k && order != SelectOrder::by_value;
    if (!all && order == SelectOrder::by_index) sort_indices(picks, count);
    const PickWriter writer(call, slab.first + r, row.out_row);
    for (std::int64_t j = threadIdx.x; j < count; j += kLibraryThreads) {
      const std::int32_t index = all ? static_cast<std::int32_t>(j) : picks[j];
      writer.put(j, index, writer.wants_values() ? Element::bits(row.scores, index) : 0);
    }
    writer.pad(count, k, static_cast<int>(threadIdx.x), kLibraryThreads);
  }
}

template <class Element>
void write_picks(const SelectProblem& problem, const SelectCall& call, const Slab& slab,
                 std::int32_t* indices, std::int64_t stride, Stream stream) {
  write_picks_kernel<Element><<<library_grid(slab.count), kLibraryThreads, 0, stream>>>(
      call, slab, problem.k, problem.order, indices, stride);
  check_launch("write_picks_kernel");
}

/// handle(slab) for the call's rows, `rows` at a time; keys of a row as the problem bounds them.
template <class Handle>
void for_each_slab(const SelectProblem& problem, const SelectCall& call, std::int64_t rows,
                   Handle handle) {
  const std::int64_t width = std::min(call.scores.row_len, problem.max_row_len);
  for (std::int64_t first = 0; first < call.scores.num_rows; first += rows)
    handle(Slab{first, std::min(rows, call.scores.num_rows - first), width, problem.max_row_len});
}

}  // namespace sparse_mla::cuda
