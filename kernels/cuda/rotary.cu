// Operation `rotary` on CUDA.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/rotation_checks.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {
namespace {

constexpr int kMaxThreads = 256;

struct RotaryArguments {
  View3<const bfloat16> in;             ///< [rows, heads, dims]
  View3<bfloat16> out;                  ///< [rows, heads, dims]
  View1<const std::int64_t> positions;  ///< [rows]
  View2<const float> table;             ///< [positions, dims]
  int half;                             ///< dims/2
};

/// kCount neighbouring bf16 numbers, moved as one.
template <int kCount>
struct alignas(2 * kCount) Numbers {
  bfloat16 of[kCount];
};
template <int kCount>
struct alignas(4 * kCount) Floats {
  float of[kCount];
};

/// Rounded as the CPU rounds: no fused multiply-add.
__device__ void turn(bfloat16& x_number, bfloat16& y_number, float cosine, float sine) {
  const float x = __bfloat162float(x_number), y = __bfloat162float(y_number);
  x_number = __float2bfloat16_rn(__fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine)));
  y_number = __float2bfloat16_rn(__fadd_rn(__fmul_rn(y, cosine), __fmul_rn(x, sine)));
}

// Tile: one row with all its heads; a thread turns kPairs neighbouring pairs of a head. A pair
// moves 8 bytes; its row of the table is shared by the heads and stays in L1. kPairs 4 needs
// aligned rows: 8-byte halves (half-split) or 16 bytes at once (interleaved), and 16 bytes of the
// table. `out` may be `in`: a thread writes what it alone has read.
template <RotaryLayout kLayout, int kPairs>
__global__ void __launch_bounds__(kMaxThreads) rotary_kernel(const RotaryArguments a) {
  const std::int64_t row = blockIdx.x;
  const std::int64_t position = *address(a.positions, row);
  if (position < 0 || position >= a.table.extent(0)) return;
  const int units = a.half / kPairs;
  const std::int64_t total = a.in.extent(1) * units;
  for (std::int64_t index = threadIdx.x; index < total; index += blockDim.x) {
    const std::int64_t head = index / units;
    const int pair = static_cast<int>(index - head * units) * kPairs;
    Floats<kPairs> cosine, sine;
    if constexpr (kPairs == 1) {
      cosine.of[0] = *address(a.table, position, pair);
      sine.of[0] = *address(a.table, position, a.half + pair);
    } else {
      cosine = *reinterpret_cast<const Floats<kPairs>*>(address(a.table, position, pair));
      sine = *reinterpret_cast<const Floats<kPairs>*>(address(a.table, position, a.half + pair));
    }
    if constexpr (kPairs == 1) {
      const bool split = kLayout == RotaryLayout::half_split;
      const int first = split ? pair : 2 * pair, second = split ? a.half + pair : 2 * pair + 1;
      bfloat16 x = *address(a.in, row, head, first), y = *address(a.in, row, head, second);
      turn(x, y, cosine.of[0], sine.of[0]);
      *address(a.out, row, head, first) = x;
      *address(a.out, row, head, second) = y;
    } else if constexpr (kLayout == RotaryLayout::half_split) {
      using Half = Numbers<kPairs>;
      Half x = *reinterpret_cast<const Half*>(address(a.in, row, head, pair));
      Half y = *reinterpret_cast<const Half*>(address(a.in, row, head, a.half + pair));
#pragma unroll
      for (int i = 0; i < kPairs; ++i) turn(x.of[i], y.of[i], cosine.of[i], sine.of[i]);
      *reinterpret_cast<Half*>(address(a.out, row, head, pair)) = x;
      *reinterpret_cast<Half*>(address(a.out, row, head, a.half + pair)) = y;
    } else {
      using Pairs = Numbers<2 * kPairs>;
      Pairs both = *reinterpret_cast<const Pairs*>(address(a.in, row, head, 2 * pair));
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        turn(both.of[2 * i], both.of[2 * i + 1], cosine.of[i], sine.of[i]);
      *reinterpret_cast<Pairs*>(address(a.out, row, head, 2 * pair)) = both;
    }
  }
}

template <RotaryLayout kLayout>
void launch(const RotaryArguments& a, Stream stream) {
  constexpr int kPairs = 4;
  const bool vector = a.half % kPairs == 0 && aligned_rows(a.in, 16) && aligned_rows(a.out, 16) &&
                      aligned_rows(a.table, 16);
  const std::int64_t work = a.in.extent(1) * (vector ? a.half / kPairs : a.half);
  const auto threads =
      static_cast<unsigned>(std::min<std::int64_t>((work + 31) / 32 * 32, kMaxThreads));
  const auto blocks = static_cast<unsigned>(a.in.extent(0));
  if (vector)
    rotary_kernel<kLayout, kPairs><<<blocks, threads, 0, stream>>>(a);
  else
    rotary_kernel<kLayout, 1><<<blocks, threads, 0, stream>>>(a);
  check_launch("rotary_kernel");
}

void run(const RotaryProblem& problem, const RotaryCall& call, std::span<std::byte>,
         Stream stream) {
  check_shapes(problem, call);
  if (call.in.extent(0) == 0 || call.in.extent(1) == 0) return;
  const RotaryArguments arguments{call.in, call.out, call.positions, call.table, problem.dims / 2};
  if (problem.layout == RotaryLayout::half_split)
    launch<RotaryLayout::half_split>(arguments, stream);
  else
    launch<RotaryLayout::interleaved>(arguments, stream);
}

}  // namespace

std::vector<Entry<RotaryProblem, RotaryCall>> rotary_entries() {
  return {{"cuda", Backend::cuda, "fp32, a row per block",
           [](const RotaryProblem&) { return why_no_device(); },
           [](const RotaryProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cuda
