// Selector "cuda_cub_topk": CUB's own top-k (cub::DeviceTopK), row after row, kept for comparison.
//
// CUB neither orders its picks nor says which of several equal scores it takes, so this serves
// TieBreak::any alone. It takes no lengths from the device either: every row has as many keys as
// the call's rows may have, those behind a row's end below all others. (CUB's batched top-k wants
// rows that fit one CTA, of a size known when it is compiled.)
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "sparse_mla/workspace.h"
#include "topk/cub_topk.h"
#include "topk/cuda_algorithms.h"
#include "topk/library_rows.cuh"
#include "topk/select_checks.h"
#include "topk/why_rather_not.h"

namespace sparse_mla::cuda {
namespace {

/// Of one slab: CUB's picks leave together.
struct Buffers {
  std::uint32_t* keys;             // [rows, width]
  std::uint32_t* best_keys;        // [k] scratch
  std::int32_t* best;              // [rows, k]
  std::span<std::byte> temporary;  // CUB's
};

/// Is there anything to select from rows of so many keys?
bool has_choice(std::int64_t k, std::int64_t width) { return width > k; }

std::int64_t rows_at_once(const SelectProblem& problem) {
  return slab_rows(problem.max_rows, problem.max_row_len);
}

Buffers carve(const SelectProblem& problem, WorkspaceCarver& carver) {
  const std::int64_t width = problem.max_row_len, rows = rows_at_once(problem);
  Buffers buffers{};
  if (!has_choice(problem.k, width)) return buffers;
  buffers.keys = carver.take<std::uint32_t>("cub_topk keys", rows * width);
  buffers.best_keys = carver.take<std::uint32_t>("cub_topk best keys", problem.k);
  buffers.best = carver.take<std::int32_t>("cub_topk best", rows * problem.k);
  buffers.temporary = carver.take_span("cub_topk temporary", cub_topk_bytes(width, problem.k));
  return buffers;
}

std::size_t workspace_bytes(const SelectProblem& problem) { return carved_bytes(problem, carve); }

/// NaN's key is 0, the key of what lies behind a row's end: raised to 1, which no score has.
struct WriteKey {
  std::uint32_t* keys;
  __device__ void operator()(std::int64_t place, std::int64_t, std::int32_t i, std::uint32_t key,
                             std::int32_t len) const {
    static_assert(topk::kNanKey == 0 && topk::kNegativeInfinityKey > 1);
    keys[place] = i < len ? max(key, 1u) : 0;
  }
};

template <class Element>
void launch(const SelectProblem& problem, const SelectCall& call, std::span<std::byte> workspace,
            Stream stream) {
  WorkspaceCarver carver(workspace);
  const Buffers buffers = carve(problem, carver);
  for_each_slab(problem, call, rows_at_once(problem), [&](const Slab& slab) {
    if (has_choice(problem.k, slab.width)) {
      write_keys<Element>(call, slab, WriteKey{buffers.keys}, stream);
      for (std::int64_t r = 0; r < slab.count; ++r)
        cub_topk(buffers.temporary, buffers.keys + r * slab.width, slab.width, problem.k,
                 buffers.best_keys, buffers.best + r * problem.k, stream);
    }
    write_picks<Element>(problem, call, slab, buffers.best, problem.k, stream);
  });
}

void run(const SelectProblem& problem, const SelectCall& call, std::span<std::byte> workspace,
         Stream stream) {
  run_for_type(problem, call,
               [&]<class Element>(Element) { launch<Element>(problem, call, workspace, stream); });
}

std::string why_not(const SelectProblem& problem) {
  if (!has_cub_topk())
    return "built without a CCCL that has cub::DeviceTopK: -DSPARSE_MLA_CCCL_DIR";
  if (problem.tie != TieBreak::any) return "takes any of several equal scores: TieBreak::any alone";
  if (problem.order == SelectOrder::by_value) return "does not order picks by value";
  return why_no_device();
}

}  // namespace
}  // namespace sparse_mla::cuda

namespace sparse_mla::topk {

SelectEntry cuda_cub_topk_entry() {
  return {"cuda_cub_topk", Backend::cuda,         "CUB's device top-k, row after row",
          cuda::why_not,   cuda::workspace_bytes, cuda::run,
          for_comparison};
}

}  // namespace sparse_mla::topk
