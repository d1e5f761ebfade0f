// Selector "cuda_cta": short rows, one thread block per row, the row in its threads' registers.
//
//   row (global) ──▶ T × V scores in registers ──select_in_block──▶ selected bits ──compact──▶
//   picks
//
// The row is read once and nothing of it is written but the histogram: about 2 µs of latency at
// 8,192 scores, most of it barriers. Thread t holds neighbours, so that picks ascend. How keys are
// selected is in block_select.cuh.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/cuda/device.h"
#include "topk/block_select.cuh"
#include "topk/choice.h"
#include "topk/cuda_algorithms.h"
#include "topk/device_rows.cuh"
#include "topk/order_by_value.cuh"
#include "topk/select_checks.h"
#include "topk/why_rather_not.h"

namespace sparse_mla::cuda {
namespace {

/// A block's threads and the scores of each. More than 16 a thread would not leave 1,024 threads
/// the registers to work with.
struct Shape {
  int threads, scores;
};
constexpr Shape kShapes[] = {{512, 8}, {512, 16}, {1024, 16}};
static_assert(std::int64_t{kShapes[2].threads} * kShapes[2].scores == topk::kMaxCtaRowLen);

/// The block for rows of up to `row_len` scores. What a warp does once – sums, bounds – costs as
/// much as its scores: 16 a thread. Two blocks of 512 threads share an SM.
constexpr Shape shape_for(std::int64_t row_len) {
  return row_len <= 4096 ? kShapes[0] : row_len <= 8192 ? kShapes[1] : kShapes[2];
}

struct Settings {
  int k;
  std::int64_t max_row_len;
  bool by_value;
  std::uint64_t* ranks;  // [grid, ranks_stride] in the workspace, for by_value
  std::int64_t ranks_stride;
};

/// The V scores from element `first` on; NaN behind the row's end.
template <class Element, int V>
__device__ void load_scores(const std::byte* row, std::int32_t len, std::int32_t first,
                            float (&score)[V]) {
  constexpr int kVector = static_cast<int>(16 / Element::kBytes);
  if (reinterpret_cast<std::uintptr_t>(row) % 16 == 0 && first + V <= len) {
    const auto* const vectors =
        reinterpret_cast<const uint4*>(row + std::int64_t{first} * Element::kBytes);
#pragma unroll
    for (int v = 0; v < V / kVector; ++v) {
      const uint4 raw = __ldg(vectors + v);
      const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        score[v * kVector + i] = __uint_as_float(
            kVector == 4 ? words[i]
                         : (i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000u));
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i)
      score[i] = __uint_as_float(first + i < len ? Element::bits(row, first + i) : 0x7FFFFFFFu);
  }
}

template <class Element, int T, int V>
__global__ void __launch_bounds__(T, 1024 / T)
    cta_kernel(const __grid_constant__ SelectCall call, const __grid_constant__ Settings settings) {
  static_assert(V % static_cast<int>(16 / Element::kBytes) == 0);
  __shared__ BlockShared shared;
  extern __shared__ std::uint16_t positions[];  // [k] of the selected
  for (std::int64_t r = blockIdx.x; r < call.scores.num_rows; r += gridDim.x) {
    const DeviceRow row = row_of<Element>(call, settings.max_row_len, r);
    if (row.out_row < 0) continue;
    const bool all = row.len <= settings.k;
    if (!all) {
      const std::int32_t first = static_cast<int>(threadIdx.x) * V;
      Block<T> block(shared, first - static_cast<int>(threadIdx.x % 32) * V >= row.len);
      float score[V];
      load_scores<Element, V>(row.scores, row.len, first, score);
      list_selected(block, score,
                    select_in_block(block, score, static_cast<std::uint32_t>(settings.k)),
                    positions);
      __syncthreads();
    }
    const PickWriter writer(call, r, row.out_row);
    const std::int32_t count = min(row.len, settings.k);
    for (std::int32_t j = static_cast<int>(threadIdx.x); j < count; j += T) {
      const std::int32_t index = all ? j : positions[j];
      if (settings.by_value)  // the rest when the picks are in order
        writer.indices()[j] = index;
      else
        writer.put(j, index, writer.wants_values() ? Element::bits(row.scores, index) : 0);
    }
    if (settings.by_value) {
      order_by_value<Element>(row.scores, writer.indices(), count,
                              settings.ranks + std::int64_t{blockIdx.x} * settings.ranks_stride);
      put_extras<Element>(writer, row.scores, count);
    }
    writer.pad(count, settings.k, static_cast<int>(threadIdx.x), T);
    __syncthreads();  // the next row uses the same shared memory
  }
}

/// Picks by value are sorted in the workspace, by four blocks per SM.
std::int64_t sorting_blocks(const SelectProblem& problem) {
  return std::min<std::int64_t>(problem.max_rows, 4 * current_device().num_sms);
}
std::uint64_t* carve(const SelectProblem& problem, WorkspaceCarver& carver) {
  const bool by_value = problem.order == SelectOrder::by_value;
  return carver.take<std::uint64_t>("select ranks",
                                    by_value ? sorting_blocks(problem) * sort_size(problem) : 0);
}
std::size_t workspace_bytes(const SelectProblem& problem) { return carved_bytes(problem, carve); }

template <class Element>
void launch(const SelectProblem& problem, const SelectCall& call, std::span<std::byte> workspace,
            Stream stream) {
  const std::int64_t rows = call.scores.num_rows;
  const std::int64_t row_len = std::min(call.scores.row_len, problem.max_row_len);
  Settings settings{problem.k, problem.max_row_len, problem.order == SelectOrder::by_value, nullptr,
                    0};
  std::int64_t grid = std::min<std::int64_t>(rows, 1 << 20);
  if (settings.by_value) {
    WorkspaceCarver carver(workspace);
    settings.ranks = carve(problem, carver);
    settings.ranks_stride = sort_size(problem);
    grid = std::min(grid, sorting_blocks(problem));
  }
  const Shape shape = shape_for(row_len);
  const auto blocks = static_cast<unsigned>(grid);
  // Of a row with more than k scores.
  const auto shared_bytes = static_cast<std::size_t>(
      sizeof(std::uint16_t) * std::min<std::int64_t>(problem.k, topk::kMaxCtaRowLen));
  if (shape.threads == 512 && shape.scores == 8)
    cta_kernel<Element, 512, 8><<<blocks, 512, shared_bytes, stream>>>(call, settings);
  else if (shape.threads == 512)
    cta_kernel<Element, 512, 16><<<blocks, 512, shared_bytes, stream>>>(call, settings);
  else
    cta_kernel<Element, 1024, 16><<<blocks, 1024, shared_bytes, stream>>>(call, settings);
  check_launch("cta_kernel");
}

void run(const SelectProblem& problem, const SelectCall& call, std::span<std::byte> workspace,
         Stream stream) {
  run_for_type(problem, call,
               [&]<class Element>(Element) { launch<Element>(problem, call, workspace, stream); });
}

std::string why_not(const SelectProblem& problem) {
  if (problem.max_row_len > topk::kMaxCtaRowLen)
    return "max_row_len: got " + std::to_string(problem.max_row_len) + ", expected at most " +
           std::to_string(topk::kMaxCtaRowLen) + ", which one block holds in registers";
  return why_no_device();
}

}  // namespace
}  // namespace sparse_mla::cuda

namespace sparse_mla::topk {

SelectEntry cuda_cta_entry() {
  return {"cuda_cta",
          Backend::cuda,
          "a row in the registers of one block",
          cuda::why_not,
          cuda::workspace_bytes,
          cuda::run,
          why_rather_not<Selector::cta>};
}

}  // namespace sparse_mla::topk
