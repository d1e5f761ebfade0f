// Operation `sparse_mqa` on CUDA.
//
// "cuda_mma": tensor cores, rows up to 512 + 64 wide; a small batch's keys are split over CTAs,
// whose partial results a second kernel joins. "cuda_rows": any widths, in fp32.
// A call's bits depend on its own number of tokens (by the number of splits), not on its bounds.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>

#include "kernels/common/ceil_div.h"
#include "kernels/common/finished_row.h"
#include "kernels/common/merge_weights.h"
#include "kernels/common/sparse_mqa_checks.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"
#include "kernels/cuda/sparse_mqa_mma.cuh"
#include "kernels/cuda/sparse_mqa_portable.h"
#include "kernels/cuda/sparse_mqa_rows.cuh"
#include "kernels/cuda/sparse_mqa_shape.h"
#include "kernels/cuda/write_lse.cuh"
#include "kernels/sm90/entries.h"

namespace sparse_mla::cuda {
namespace {

MqaTile tile_of(const SparseMqaProblem& problem) {
  return choose_mqa_tile(problem.num_heads, problem.format, current_device().max_shared_bytes);
}

std::int64_t head_tiles(const SparseMqaProblem& problem, const MqaTile& tile) {
  return ceil_div(problem.num_heads, 16 * std::max(tile.head_units, 1));
}

struct Partials {
  float* out;  ///< [tokens, splits, num_heads, 512]
  float* lse;  ///< [tokens, splits, num_heads]

  /// Splits exist only while all CTAs fit the SMs: that bounds them for every number of tokens.
  Partials(WorkspaceCarver& carver, const SparseMqaProblem& problem) {
    const MqaTile tile = tile_of(problem);
    const std::int64_t tiles = head_tiles(problem, tile);
    const int sms = current_device().num_sms;
    const bool splits =
        key_splits(std::min<std::int64_t>(problem.max_tokens, 1), tiles, problem.topk, sms) > 1;
    const std::int64_t rows = splits ? sms / tiles * problem.num_heads : 0;
    out = carver.take<float>("sparse_mqa_part_out", rows * kTileLatent);
    lse = carver.take<float>("sparse_mqa_part_lse", rows);
  }
};

// out and lse of one head of one token from its splits' parts. CTA = (token, head), a thread 4 of
// the 512 columns. The splits' weights come from a tree of merges over the lanes (lane = split,
// lower splits first), the same in every warp; so no load waits for another's merge.
constexpr int kJoinThreads = kTileLatent / 4;

__global__ void __launch_bounds__(kJoinThreads)
    join_splits_kernel(const __grid_constant__ SparseMqaCall call, const float* part_out,
                       const float* part_lse, int num_heads, int lora, int splits) {
  const std::int64_t token = blockIdx.x / static_cast<unsigned>(num_heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(num_heads));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int column = 4 * static_cast<int>(threadIdx.x);
  const std::int64_t first_row = token * splits * num_heads + head;

  const float mine = lane < splits ? part_lse[first_row + lane * num_heads] : -HUGE_VALF;
  float lse = mine, weight = 1;
  for (int step = 1; step < kMaxSplits; step *= 2) {
    const float other = __shfl_xor_sync(~0u, lse, step);
    const bool first = (lane & step) == 0;
    const MergeWeights weights = merge_weights(first ? lse : other, first ? other : lse);
    weight *= first ? weights.a : weights.b;
    lse = weights.lse;
  }
  if (mine == -HUGE_VALF) weight = 0;  // without keys, it may have written nothing else

  float value[4] = {0, 0, 0, 0};
#pragma unroll 4
  for (int split = 0; split < splits; ++split) {
    const float share = __shfl_sync(~0u, weight, split);
    const float* from = part_out + (first_row + std::int64_t{split} * num_heads) * kTileLatent;
    float4 part = make_float4(0, 0, 0, 0);
    if (share != 0.0f) part = *reinterpret_cast<const float4*>(from + column);
    value[0] = fmaf(share, part.x, value[0]);
    value[1] = fmaf(share, part.y, value[1]);
    value[2] = fmaf(share, part.z, value[2]);
    value[3] = fmaf(share, part.w, value[3]);
  }
  const float factor =
      call.sink.data_handle() == nullptr ? 1.0f : sink_factor(call.sink(head), lse);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (column + i < lora)
      *address(call.out, token, head, column + i) = __float2bfloat16_rn(value[i] * factor);
  if (threadIdx.x == 0) write_lse(call, token, head, lse);
}

template <int kUnits, CacheFormat kFormat>
void launch_tile(const MqaArguments& arguments, unsigned grid, Stream stream) {
  const int bytes = MqaShared(kUnits, kFormat, arguments.stages).bytes;
  allow_shared(sparse_mqa_mma_kernel<kUnits, kFormat>, bytes);
  sparse_mqa_mma_kernel<kUnits, kFormat><<<grid, kMqaThreads, bytes, stream>>>(arguments);
  check_launch("sparse_mqa_mma_kernel");
}

template <CacheFormat kFormat>
void launch_format(int units, const MqaArguments& arguments, unsigned grid, Stream stream) {
  if (units == 1) return launch_tile<1, kFormat>(arguments, grid, stream);
  if (units == 2) return launch_tile<2, kFormat>(arguments, grid, stream);
  launch_tile<4, kFormat>(arguments, grid, stream);
}

std::string why_not_mma(const SparseMqaProblem& problem) {
  if (std::string reason = why_no_device(); !reason.empty()) return reason;
  if (problem.kv_lora_rank > kTileLatent || problem.qk_rope_head_dim > kTileRope)
    return "rows of " + std::to_string(problem.kv_lora_rank) + " + " +
           std::to_string(problem.qk_rope_head_dim) + " elements, expected at most " +
           std::to_string(kTileLatent) + " + " + std::to_string(kTileRope);
  if (tile_of(problem).head_units == 0)
    return "a block of the device has " + std::to_string(current_device().max_shared_bytes) +
           " bytes of shared memory, expected at least " +
           std::to_string(MqaShared(1, problem.format, 1).bytes);
  return "";
}

void run_rows(const SparseMqaProblem& problem, const SparseMqaCall& call, std::span<std::byte>,
              Stream stream) {
  check_shapes(problem, call);
  const std::int64_t ctas = call.q.extent(0) * problem.num_heads;
  if (ctas == 0) return;
  const auto bytes =
      static_cast<int>(rows_mqa_shared_bytes(problem.kv_lora_rank, problem.qk_rope_head_dim));
  allow_shared(sparse_mqa_rows_kernel, current_device().max_shared_bytes - kRowsMqaStaticBytes);
  sparse_mqa_rows_kernel<<<static_cast<unsigned>(ctas), kRowsMqaThreads, bytes, stream>>>(
      call, problem.num_heads, problem.kv_lora_rank, problem.qk_rope_head_dim);
  check_launch("sparse_mqa_rows_kernel");
}

std::string why_not_rows(const SparseMqaProblem& problem) {
  if (std::string reason = why_no_device(); !reason.empty()) return reason;
  const std::int64_t needed =
      rows_mqa_shared_bytes(problem.kv_lora_rank, problem.qk_rope_head_dim) + kRowsMqaStaticBytes;
  if (needed > current_device().max_shared_bytes)
    return "rows take " + std::to_string(needed) + " bytes of shared memory, expected at most " +
           std::to_string(current_device().max_shared_bytes);
  return "";
}

std::size_t no_scratch(const SparseMqaProblem&) { return 0; }

}  // namespace

std::size_t sparse_mqa_mma_bytes(const SparseMqaProblem& problem) {
  WorkspaceCarver carver;
  Partials(carver, problem);
  return carver.bytes();
}

void run_sparse_mqa_mma(const SparseMqaProblem& problem, const SparseMqaCall& call,
                        std::span<std::byte> workspace, Stream stream) {
  check_shapes(problem, call);
  const std::int64_t tokens = call.q.extent(0);
  if (tokens == 0) return;
  const MqaTile tile = tile_of(problem);
  WorkspaceCarver carver(workspace);
  const Partials partials(carver, problem);
  const bool full_width =
      problem.kv_lora_rank == kTileLatent && problem.qk_rope_head_dim == kTileRope;

  MqaArguments arguments{};
  arguments.call = call;
  arguments.num_heads = problem.num_heads;
  arguments.lora = problem.kv_lora_rank;
  arguments.rope = problem.qk_rope_head_dim;
  arguments.head_tiles = static_cast<int>(head_tiles(problem, tile));
  arguments.splits =
      key_splits(tokens, arguments.head_tiles, call.slots.extent(1), current_device().num_sms);
  arguments.stages = tile.stages;
  arguments.vector_rows =
      full_width && aligned(call.cache.data, 16, {call.cache.row_stride, call.cache.block_stride});
  arguments.vector_q = full_width && aligned_rows(call.q, 16);
  arguments.paired_out = aligned_rows(call.out, 4);
  arguments.value_scale = problem.format == CacheFormat::fp8 ? call.cache.scale : 1.0f;
  arguments.logit_scale = static_cast<float>(double{call.softmax_scale} *
                                             double{arguments.value_scale} * std::numbers::log2e);
  arguments.part_out = partials.out;
  arguments.part_lse = partials.lse;

  const auto grid = static_cast<unsigned>(tokens * arguments.head_tiles * arguments.splits);
  switch (problem.format) {
    case CacheFormat::bf16:
      launch_format<CacheFormat::bf16>(tile.head_units, arguments, grid, stream);
      break;
    case CacheFormat::fp8_ds_mla:
      launch_format<CacheFormat::fp8_ds_mla>(tile.head_units, arguments, grid, stream);
      break;
    case CacheFormat::fp8:
      launch_format<CacheFormat::fp8>(tile.head_units, arguments, grid, stream);
      break;
  }
  if (arguments.splits == 1) return;
  join_splits_kernel<<<static_cast<unsigned>(tokens * problem.num_heads), kJoinThreads, 0,
                       stream>>>(call, partials.out, partials.lse, problem.num_heads,
                                 problem.kv_lora_rank, arguments.splits);
  check_launch("join_splits_kernel");
}

std::vector<Entry<SparseMqaProblem, SparseMqaCall>> sparse_mqa_entries() {
  return {sm90::sparse_mqa_decode_entry(),
          sm90::sparse_mqa_prefill_entry(),
          {"cuda_mma", Backend::cuda, "gathered tiles on tensor cores, keys split for few tokens",
           why_not_mma, sparse_mqa_mma_bytes, run_sparse_mqa_mma},
          {"cuda_rows", Backend::cuda, "a head at a time in fp32, any widths", why_not_rows,
           no_scratch, run_rows}};
}

}  // namespace sparse_mla::cuda
