// Selector "cuda_thrust_sort": Thrust's stable sort of all rows at once by (row, inverted key), a
// library's way, kept for comparison.
//
// par_nosync and an allocator over the workspace keep Thrust from waiting and from allocating, so
// that the sort can be captured. Elements behind a row's end have NaN's key and higher indices:
// they stay behind the row's own.
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <string>

#include <cub/device/device_radix_sort.cuh>
#include <thrust/sort.h>
#include <thrust/system/cuda/execution_policy.h>

#include "sparse_mla/workspace.h"
#include "topk/cuda_algorithms.h"
#include "topk/library_rows.cuh"
#include "topk/select_checks.h"
#include "topk/why_rather_not.h"

namespace sparse_mla::cuda {
namespace {

/// Hands out workspace to Thrust; one sort's needs, then reset by making another.
class Arena {
 public:
  using value_type = std::byte;

  explicit Arena(std::span<std::byte> memory) : memory_(memory) {}

  std::byte* allocate(std::ptrdiff_t bytes) {
    const std::size_t padded = (static_cast<std::size_t>(bytes) + kWorkspaceAlignment - 1) /
                               kWorkspaceAlignment * kWorkspaceAlignment;
    if (padded > memory_.size() - used_) throw std::bad_alloc();
    std::byte* const begin = memory_.data() + used_;
    used_ += padded;
    return begin;
  }
  void deallocate(std::byte*, std::size_t) {}

 private:
  std::span<std::byte> memory_;
  std::size_t used_ = 0;
};

struct Buffers {
  std::uint64_t* keys;             // [rows, width] row << 32 | inverted key
  std::int32_t* indices;           // [rows, width]
  std::span<std::byte> temporary;  // Thrust's: copies of both and what CUB asks for
};

Buffers carve(const SelectProblem& problem, WorkspaceCarver& carver) {
  const std::int64_t width = problem.max_row_len;
  const std::int64_t size = slab_rows(problem.max_rows, width) * width;
  Buffers buffers{};
  buffers.keys = carver.take<std::uint64_t>("thrust_sort keys", size);
  buffers.indices = carver.take<std::int32_t>("thrust_sort indices", size);
  std::size_t bytes = 0;
  cub::DoubleBuffer<std::uint64_t> keys;
  cub::DoubleBuffer<std::int32_t> indices;
  check(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, indices, size),
        "cub::DeviceRadixSort");
  bytes += static_cast<std::size_t>(size) * (sizeof(std::uint64_t) + sizeof(std::int32_t));
  // Thrust rounds its pieces up.
  buffers.temporary = carver.take_span("thrust_sort temporary", bytes + 4096);
  return buffers;
}

std::size_t workspace_bytes(const SelectProblem& problem) { return carved_bytes(problem, carve); }

struct WritePair {
  std::uint64_t* keys;
  std::int32_t* indices;
  __device__ void operator()(std::int64_t place, std::int64_t r, std::int32_t i, std::uint32_t key,
                             std::int32_t) const {
    keys[place] = static_cast<std::uint64_t>(r) << 32 | ~key;
    indices[place] = i;
  }
};

template <class Element>
void launch(const SelectProblem& problem, const SelectCall& call, std::span<std::byte> workspace,
            Stream stream) {
  WorkspaceCarver carver(workspace);
  const Buffers buffers = carve(problem, carver);
  for_each_slab(
      problem, call, slab_rows(problem.max_rows, problem.max_row_len), [&](const Slab& slab) {
        if (slab.width > 0) {
          write_keys<Element>(call, slab, WritePair{buffers.keys, buffers.indices}, stream);
          Arena arena(buffers.temporary);
          thrust::stable_sort_by_key(thrust::cuda::par_nosync(arena).on(stream), buffers.keys,
                                     buffers.keys + slab.count * slab.width, buffers.indices);
        }
        write_picks<Element>(problem, call, slab, buffers.indices, slab.width, stream);
      });
}

void run(const SelectProblem& problem, const SelectCall& call, std::span<std::byte> workspace,
         Stream stream) {
  run_for_type(problem, call,
               [&]<class Element>(Element) { launch<Element>(problem, call, workspace, stream); });
}

}  // namespace
}  // namespace sparse_mla::cuda

namespace sparse_mla::topk {

SelectEntry cuda_thrust_sort_entry() {
  return {"cuda_thrust_sort",
          Backend::cuda,
          "Thrust: a full sort of all rows at once",
          [](const SelectProblem&) { return cuda::why_no_device(); },
          cuda::workspace_bytes,
          cuda::run,
          for_comparison};
}

}  // namespace sparse_mla::topk
