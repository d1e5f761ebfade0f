// Selector "cuda_stream": many long rows, one thread block per row, each score read once.
//
// Tile: T × 64 bytes of a row at a time, T = 512. Two blocks or more share an SM, so that one
// streams while another looks for its threshold or selects among its survivors. How: see
// stream_select.cuh.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/cuda/device.h"
#include "topk/choice.h"
#include "topk/cuda_algorithms.h"
#include "topk/select_checks.h"
#include "topk/stream_select.cuh"
#include "topk/why_rather_not.h"

namespace sparse_mla::cuda {
namespace {

/// 512 threads at 64 registers: two blocks fill an SM's register file. One has a tile on its way
/// while the other looks at one, and one stays within the 99 KB of shared memory that smaller cards
/// give.
using Shape = StreamShape<512, 12, 4, 1>;
constexpr int kThreads = Shape::kThreads;

template <class Element>
__device__ void stream_row(const SelectCall& call, const StreamSettings& settings, std::int64_t r,
                           StreamShared& shared, std::byte* dynamic) {
  const DeviceRow row = row_of<Element>(call, settings.max_row_len, r);
  if (row.out_row < 0) return;
  if (row.len <= settings.k) {
    put_whole_row<Element, Shape>(call, settings, r, row, dynamic);
    return;
  }
  const auto k = static_cast<std::uint32_t>(settings.k);
  const Survivors survivors{reinterpret_cast<float*>(dynamic),
                            reinterpret_cast<std::int32_t*>(dynamic) + Shape::kCapacity};
  const RowVectors<Element> vectors(row.scores, row.len);
  const Part whole(vectors.count, 0, 1);
  Block<kThreads> block(shared.block);
  RowStream<Element, Shape> stream(block, shared, survivors, dynamic + 8 * Shape::kCapacity, k);
  const auto sample = Sample::take<kThreads>(vectors, k);
  stream.prefetch(vectors, whole.begin, whole.end);  // behind the sample
  Threshold threshold = sample.threshold(block, Shape::kCapacity);
  stream.set_threshold(threshold.least);
#pragma unroll 1
  for (;;) {
    add_part(stream, vectors, whole);
    if (stream.filled() >= k) break;
    stream.restart();
    threshold.least = no_score();
    stream.prefetch(vectors, whole.begin, whole.end);
  }
  finish_row<Element, Shape>(call, settings, r, row, block, survivors, stream.filled(), threshold,
                             dynamic);
}

template <class Element>
__global__ void __launch_bounds__(kThreads, 2)
    stream_kernel(const __grid_constant__ SelectCall call,
                  const __grid_constant__ StreamSettings settings) {
  extern __shared__ __align__(16) std::byte dynamic[];
  __shared__ StreamShared shared;
  for (std::int64_t r = blockIdx.x; r < call.scores.num_rows; r += gridDim.x) {
    stream_row<Element>(call, settings, r, shared, dynamic);
    __syncthreads();  // the next row uses the same shared memory
  }
}

template <class Element>
void launch(const SelectProblem& problem, const SelectCall& call, Stream stream) {
  const StreamSettings settings{problem.k, problem.max_row_len,
                                problem.order == SelectOrder::by_value};
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(call.scores.num_rows, 1 << 20));
  allow_shared(stream_kernel<Element>, Shape::kBytes);
  stream_kernel<Element><<<blocks, kThreads, Shape::kBytes, stream>>>(call, settings);
  check_launch("stream_kernel");
}

void run(const SelectProblem& problem, const SelectCall& call, std::span<std::byte>,
         Stream stream) {
  run_for_type(problem, call,
               [&]<class Element>(Element) { launch<Element>(problem, call, stream); });
}

std::string why_not(const SelectProblem& problem) {
  constexpr int kLeastCapability = 80;
  return why_no_streams(problem, kLeastCapability,
                        Shape::kBytes + static_cast<int>(sizeof(StreamShared)));
}

}  // namespace
}  // namespace sparse_mla::cuda

namespace sparse_mla::topk {

SelectEntry cuda_stream_entry() {
  return {"cuda_stream",
          Backend::cuda,
          "a block per row: one reading against a sampled threshold",
          cuda::why_not,
          cuda::no_workspace,
          cuda::run,
          why_rather_not<Selector::stream>};
}

}  // namespace sparse_mla::topk
