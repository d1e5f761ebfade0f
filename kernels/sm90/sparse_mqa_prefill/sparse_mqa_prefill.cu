// Operation `sparse_mqa` on compute capability 9.0, for batches that fill the device
// (docs/kernels/sparse_mqa_prefill_sm90.md). Everything else is left to the portable entry.
#include <algorithm>
#include <numbers>
#include <string>

#include "kernels/common/ceil_div.h"
#include "kernels/common/sparse_mqa_checks.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/sparse_mqa_portable.h"
#include "kernels/sm90/entries.h"
#include "kernels/sm90/hopper.h"
#include "kernels/sm90/sparse_mqa_prefill/sparse_mqa_prefill.cuh"
#include "kernels/sm90/tensor_map.h"

namespace sparse_mla::sm90 {
namespace {

using Shape = PrefillShape;

/// (token, 64 heads) items below which the portable entry's split of the keys is faster: measured.
constexpr std::int64_t least_items(int num_heads) { return num_heads <= 32 ? 48 : 24; }

std::string why_not(const SparseMqaProblem& problem) {
  if (problem.kv_lora_rank != Shape::kLatent || problem.qk_rope_head_dim != Shape::kRope)
    return "made for rows of 512 + 64 elements";
  if (problem.format != CacheFormat::bf16) return "reads bf16 rows";
  constexpr int kDeclared = 2048;
  return why_no_hopper(Shape::kSharedBytes + kDeclared);
}

/// False where the copy engine, the 16-byte copies or the 16-byte stores cannot serve the call's
/// views, or where its scale is not positive (the maximum is taken before scaling).
bool make_query_map(const SparseMqaCall& call, CUtensorMap& map) {
  const View3<const bfloat16> heads_first = strided<const bfloat16, 3>(
      call.q.data_handle(), {call.q.extent(1), call.q.extent(0), call.q.extent(2)},
      {call.q.stride(1), call.q.stride(0), 1});
  return call.softmax_scale > 0 && cuda::aligned_rows(call.out, 16) &&
         cuda::aligned(call.cache.data, 16, {call.cache.row_stride, call.cache.block_stride}) &&
         sm90::make_map(heads_first, Shape::kHeads, map);
}

void run(const SparseMqaProblem& problem, const SparseMqaCall& call, std::span<std::byte> workspace,
         Stream stream) {
  check_shapes(problem, call);
  const std::int64_t tokens = call.q.extent(0);
  if (tokens == 0) return;
  PrefillArguments args{};
  args.call = call;
  args.num_heads = problem.num_heads;
  args.head_tiles = static_cast<int>(ceil_div(problem.num_heads, Shape::kHeads));
  args.items = static_cast<int>(tokens * args.head_tiles);
  args.logit_scale = static_cast<float>(double{call.softmax_scale} * std::numbers::log2e);
  CUtensorMap q_map;
  if (args.items < least_items(problem.num_heads) || !make_query_map(call, q_map)) {
    cuda::run_sparse_mqa_mma(problem, call, workspace, stream);
    return;
  }
  const auto kernel = sparse_mqa_prefill_kernel;
  cuda::allow_shared(kernel, Shape::kSharedBytes);
  kernel<<<std::min(args.items, cuda::current_device().num_sms), Shape::kThreads,
           Shape::kSharedBytes, stream>>>(q_map, args);
  cuda::check_launch("sparse_mqa_prefill_kernel");
}

}  // namespace

Entry<SparseMqaProblem, SparseMqaCall> sparse_mqa_prefill_entry() {
  return {"sm90_wgmma",
          Backend::cuda,
          "gathered rows, wgmma tiles of 64 heads",
          why_not,
          cuda::sparse_mqa_mma_bytes,
          run};
}

}  // namespace sparse_mla::sm90
