// Selector "cuda_cub_segmented_sort": rows sorted whole by CUB's segmented radix sort, a library's
// way, kept for comparison.
//
//   scores ──ordered keys, indices──▶ slab ──stable descending sort per row──▶ first k ──▶ picks
//
// The sort is stable and indices go in ascending, so equal scores leave by index. CUB knows how
// many rows there are; where each begins and ends it reads on the device. (cub::DeviceSegmentedSort
// would sort by size classes, but waits for the device to count them, which no captured graph can.)
// Rows are sorted by one CTA each: slow where they are few.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <cub/device/device_segmented_radix_sort.cuh>

#include "sparse_mla/workspace.h"
#include "topk/cuda_algorithms.h"
#include "topk/library_rows.cuh"
#include "topk/select_checks.h"
#include "topk/why_rather_not.h"

namespace sparse_mla::cuda {
namespace {

/// CUB's offsets into a slab are 32-bit, and step past the end by less than a tile.
constexpr std::int64_t kMaxRowLen = std::int64_t{1} << 30;

struct Buffers {
  std::uint32_t* keys[2];          // [rows, width] both
  std::int32_t* indices[2];        // [rows, width] both
  std::int32_t *begins, *ends;     // [rows] a row's elements in those
  std::span<std::byte> temporary;  // CUB's
};

/// Sorts, or says in `bytes` how much CUB's temporary storage takes when `temporary` is null.
/// Returns the sorted indices.
std::int32_t* sort(const Buffers& buffers, std::int64_t rows, std::int64_t width, int begin_bit,
                   void* temporary, std::size_t& bytes, Stream stream) {
  cub::DoubleBuffer<std::uint32_t> keys(buffers.keys[0], buffers.keys[1]);
  cub::DoubleBuffer<std::int32_t> indices(buffers.indices[0], buffers.indices[1]);
  check(cub::DeviceSegmentedRadixSort::SortPairsDescending(
            temporary, bytes, keys, indices, static_cast<int>(rows * width), static_cast<int>(rows),
            buffers.begins, buffers.ends, begin_bit, 32, stream),
        "cub::DeviceSegmentedRadixSort");
  return indices.Current();
}

Buffers carve(const SelectProblem& problem, WorkspaceCarver& carver) {
  const std::int64_t width = problem.max_row_len, rows = slab_rows(problem.max_rows, width);
  Buffers buffers{};
  for (auto& keys : buffers.keys)
    keys = carver.take<std::uint32_t>("segmented_sort keys", rows * width);
  for (auto& indices : buffers.indices)
    indices = carver.take<std::int32_t>("segmented_sort indices", rows * width);
  buffers.begins = carver.take<std::int32_t>("segmented_sort begins", rows);
  buffers.ends = carver.take<std::int32_t>("segmented_sort ends", rows);
  std::size_t bytes = 0;
  sort({}, rows, width, 0, nullptr, bytes, nullptr);
  buffers.temporary = carver.take_span("segmented_sort temporary", bytes);
  return buffers;
}

std::size_t workspace_bytes(const SelectProblem& problem) { return carved_bytes(problem, carve); }

struct WritePair {
  std::uint32_t* keys;
  std::int32_t *indices, *begins, *ends;
  std::int64_t width;
  __device__ void operator()(std::int64_t place, std::int64_t r, std::int32_t i, std::uint32_t key,
                             std::int32_t len) const {
    keys[place] = key;
    indices[place] = i;
    if (i == 0) {
      begins[r] = static_cast<std::int32_t>(r * width);
      ends[r] = static_cast<std::int32_t>(r * width + len);
    }
  }
};

template <class Element>
void launch(const SelectProblem& problem, const SelectCall& call, std::span<std::byte> workspace,
            Stream stream) {
  WorkspaceCarver carver(workspace);
  const Buffers buffers = carve(problem, carver);
  // bf16 keys differ in their upper half alone.
  constexpr int kBeginBit = Element::kBytes == 2 ? 16 : 0;
  for_each_slab(problem, call, slab_rows(problem.max_rows, problem.max_row_len),
                [&](const Slab& slab) {
                  std::int32_t* sorted = buffers.indices[0];
                  if (slab.width > 0) {
                    write_keys<Element>(call, slab,
                                        WritePair{buffers.keys[0], buffers.indices[0],
                                                  buffers.begins, buffers.ends, slab.width},
                                        stream);
                    std::size_t bytes = buffers.temporary.size();
                    sorted = sort(buffers, slab.count, slab.width, kBeginBit,
                                  buffers.temporary.data(), bytes, stream);
                  }
                  write_picks<Element>(problem, call, slab, sorted, slab.width, stream);
                });
}

void run(const SelectProblem& problem, const SelectCall& call, std::span<std::byte> workspace,
         Stream stream) {
  run_for_type(problem, call,
               [&]<class Element>(Element) { launch<Element>(problem, call, workspace, stream); });
}

std::string why_not(const SelectProblem& problem) {
  if (problem.max_row_len > kMaxRowLen)
    return "rows of " + std::to_string(problem.max_row_len) + " scores, sorts at most " +
           std::to_string(kMaxRowLen);
  return why_no_device();
}

}  // namespace
}  // namespace sparse_mla::cuda

namespace sparse_mla::topk {

SelectEntry cuda_cub_segmented_sort_entry() {
  return {"cuda_cub_segmented_sort",
          Backend::cuda,
          "CUB's segmented radix sort of each row",
          cuda::why_not,
          cuda::workspace_bytes,
          cuda::run,
          for_comparison};
}

}  // namespace sparse_mla::topk
