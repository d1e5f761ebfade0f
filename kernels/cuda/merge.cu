// Operation `merge` on CUDA.
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/finished_row.h"
#include "kernels/common/merge_weights.h"
#include "kernels/common/partial_checks.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {
namespace {

/// Eight neighbouring rows use the whole 32-byte sectors of an lse that is contiguous along rows;
/// eight heads of a row are 4 KB of neighbouring values at V = 128.
constexpr int kTileRows = 8, kTileHeads = 8, kItems = kTileRows * kTileHeads;
constexpr int kThreads = 256;
/// Loads of each side in flight per thread: eight at 16 bytes with both sides, two rounds a tile at
/// V = 128.
constexpr int kLoads = 4;

template <class Out>
struct MergeArguments {
  ConstPartial a, b;
  View3<Out> out;                  ///< [tokens, num_heads, V]
  View2<float> lse;                ///< [num_heads, tokens]
  View1<const float> sink;         ///< [num_heads] or without data
  const std::int32_t* out_tokens;  ///< [rows] or null
  float out_scale;                 ///< fp8
  int num_heads, v_head_dim;
  std::int64_t head_tiles;
};

/// One (row, head) of the tile.
struct Item {
  MergeWeights weights;
  float factor;        ///< of the sink
  std::int64_t token;  ///< where it goes; −1: nowhere
};

template <int kWidth>
struct Values {
  float of[kWidth];
};

template <int kWidth>
__device__ Values<kWidth> load(const float* from) {
  Values<kWidth> values;
  if constexpr (kWidth == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    values.of[0] = four.x, values.of[1] = four.y, values.of[2] = four.z, values.of[3] = four.w;
  } else {
    values.of[0] = *from;
  }
  return values;
}

template <int kWidth>
__device__ void store(float* to, const Values<kWidth>& values, float) {
  if constexpr (kWidth == 4)
    *reinterpret_cast<float4*>(to) = {values.of[0], values.of[1], values.of[2], values.of[3]};
  else
    *to = values.of[0];
}

template <int kWidth>
__device__ void store(bfloat16* to, const Values<kWidth>& values, float) {
  if constexpr (kWidth == 4) {
    const auto bits = [&](int i) {
      return static_cast<unsigned>(__bfloat16_as_ushort(__float2bfloat16_rn(values.of[i])));
    };
    *reinterpret_cast<uint2*>(to) = {bits(0) | bits(1) << 16, bits(2) | bits(3) << 16};
  } else {
    *to = __float2bfloat16_rn(values.of[0]);
  }
}

template <int kWidth>
__device__ void store(fp8_e4m3* to, const Values<kWidth>& values, float scale) {
  if constexpr (kWidth == 4) {
    std::uint32_t codes = 0;
    for (int i = 0; i < 4; ++i)
      codes |= static_cast<std::uint32_t>(quantise_output(values.of[i], scale).__x) << (8 * i);
    *reinterpret_cast<std::uint32_t*>(to) = codes;
  } else {
    *to = quantise_output(values.of[0], scale);
  }
}

// Tile: 8 rows × 8 heads × V. 64 threads compute the weights of one (row, head) each, so that its
// exponentials and its lse are paid once; then 256 threads walk the tile's 64 · V / kWidth vectors.
// Bytes per (row, head) at V = 128: 512 + 512 read, 512 (fp32) … 128 (fp8) written, and 12 of lse;
// five operations per element: memory alone decides. 8,192 rows × 128 heads into fp32 move 1.6 GB.
// kWidth 4 needs 16-byte aligned rows of a and b and stores whole vectors; 1 takes any stride. Both
// round alike. Nothing is __restrict__: `out` and `lse` may be a's or b's own.
template <class Out, int kWidth>
__global__ void __launch_bounds__(kThreads) merge_kernel(const MergeArguments<Out> m) {
  __shared__ Item items[kItems];
  const std::int64_t row_begin = blockIdx.x / m.head_tiles * kTileRows;
  const int head_begin = static_cast<int>(blockIdx.x % m.head_tiles) * kTileHeads;
  const std::int64_t rows = m.b.out.extent(0), rows_a = m.a.out.extent(0);

  if (threadIdx.x < kItems) {
    // Neighbouring threads have neighbouring rows: the lse's contiguous axis.
    const int item_row = static_cast<int>(threadIdx.x) % kTileRows;
    const int item_head = static_cast<int>(threadIdx.x) / kTileRows;
    const std::int64_t row = row_begin + item_row;
    const int head = head_begin + item_head;
    Item item{{}, 1.0f, -1};
    if (row < rows && head < m.num_heads) {
      const std::int64_t token = m.out_tokens == nullptr ? row : m.out_tokens[row];
      const float lse_a = row < rows_a ? *address(m.a.lse, head, row) : -HUGE_VALF;
      item.weights = merge_weights(lse_a, *address(m.b.lse, head, row));
      if (m.sink.data_handle() != nullptr)
        item.factor = sink_factor(*address(m.sink, head), item.weights.lse);
      if (token >= 0 && token < m.out.extent(0)) {
        item.token = token;
        *address(m.lse, head, token) = item.weights.lse;
      }
    }
    items[item_row * kTileHeads + item_head] = item;
  }
  __syncthreads();

  const unsigned vectors = static_cast<unsigned>(m.v_head_dim) / kWidth, total = kItems * vectors;
  for (unsigned begin = threadIdx.x; begin < total; begin += kLoads * kThreads) {
    Values<kWidth> a[kLoads], b[kLoads];
#pragma unroll
    for (unsigned i = 0; i < kLoads; ++i) {
      const unsigned index = begin + i * kThreads, item = index / vectors;
      a[i] = b[i] = {};
      if (index >= total || items[item].token < 0) continue;
      const std::int64_t row = row_begin + item / kTileHeads;
      const int head = head_begin + static_cast<int>(item % kTileHeads);
      const auto element = static_cast<int>(index - item * vectors) * kWidth;
      b[i] = load<kWidth>(address(m.b.out, row, head, element));
      if (row < rows_a) a[i] = load<kWidth>(address(m.a.out, row, head, element));
    }
#pragma unroll
    for (unsigned i = 0; i < kLoads; ++i) {
      const unsigned index = begin + i * kThreads, item = index / vectors;
      if (index >= total || items[item].token < 0) continue;
      const MergeWeights weights = items[item].weights;
      const float factor = items[item].factor;
      Values<kWidth> merged;
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        merged.of[j] = factor * merge_value(weights, a[i].of[j], b[i].of[j]);
      const int head = head_begin + static_cast<int>(item % kTileHeads);
      const auto element = static_cast<int>(index - item * vectors) * kWidth;
      store<kWidth>(address(m.out, items[item].token, head, element), merged, m.out_scale);
    }
  }
}

/// No part, or one whose rows are read four numbers at a time.
bool vectors_of_four(const View3<const float>& part) {
  return part.extent(0) == 0 || aligned_rows(part, 16);
}

template <class Out>
void launch(const MergeProblem& problem, const MergeCall& call, const View3<Out>& out,
            Stream stream) {
  const std::int64_t row_tiles = (call.b.out.extent(0) + kTileRows - 1) / kTileRows;
  const std::int64_t head_tiles = (problem.num_heads + kTileHeads - 1) / kTileHeads;
  if (row_tiles * head_tiles == 0) return;
  const MergeArguments<Out> arguments{call.a,
                                      call.b,
                                      out,
                                      call.lse,
                                      call.sink,
                                      call.out_tokens,
                                      call.out_scale,
                                      problem.num_heads,
                                      problem.v_head_dim,
                                      head_tiles};
  const auto blocks = static_cast<unsigned>(row_tiles * head_tiles);
  if (problem.v_head_dim % 4 == 0 && vectors_of_four(call.a.out) && vectors_of_four(call.b.out) &&
      aligned_rows(out, 4 * sizeof(Out)))
    merge_kernel<Out, 4><<<blocks, kThreads, 0, stream>>>(arguments);
  else
    merge_kernel<Out, 1><<<blocks, kThreads, 0, stream>>>(arguments);
  check_launch("merge_kernel");
}

void run(const MergeProblem& problem, const MergeCall& call, std::span<std::byte>, Stream stream) {
  check_shapes(problem, call);
  switch (problem.output) {
    case OutputType::f32:
      return launch(problem, call, call.out_f32, stream);
    case OutputType::bf16:
      return launch(problem, call, call.out_bf16, stream);
    case OutputType::fp8:
      return launch(problem, call, call.out_fp8, stream);
  }
}

}  // namespace

std::vector<Entry<MergeProblem, MergeCall>> merge_entries() {
  return {{"cuda", Backend::cuda, "8 rows × 8 heads a block, weights once, values 16 bytes a load",
           [](const MergeProblem&) { return why_no_device(); },
           [](const MergeProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cuda
