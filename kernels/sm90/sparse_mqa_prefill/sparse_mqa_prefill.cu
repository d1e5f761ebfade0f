// Operation `sparse_mqa` on compute capability 9.0, for batches that fill the device
// (docs/kernels/sparse_mqa_prefill_sm90.md). Everything else is left to the portable entry.
#include <algorithm>
#include <numbers>
#include <string>

#include "kernels/common/ceil_div.h"
#include "kernels/common/sparse_mqa_checks.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/sparse_mqa_portable.h"
#include "kernels/sm90/entries.h"
#include "kernels/sm90/hopper.h"
#include "kernels/sm90/sparse_mqa_launch.cuh"
#include "kernels/sm90/sparse_mqa_prefill/pick_union.cuh"
#include "kernels/sm90/sparse_mqa_prefill/sparse_mqa_prefill.cuh"
#include "kernels/sm90/sparse_mqa_quantised/sparse_mqa_quantised.cuh"
#include "sparse_mla/workspace.h"

namespace sparse_mla::sm90 {
namespace {

using Shape = PrefillShape;

/// (token, 64 heads) items below which the portable entry's split of the keys is faster: measured.
/// Over quantised rows an item takes a quarter longer.
constexpr std::int64_t least_items(int num_heads, CacheFormat format) {
  if (format != CacheFormat::bf16) return num_heads <= 32 ? 64 : 32;
  return num_heads <= 32 ? 48 : 24;
}

/// Whether a tile holds the heads of two tokens, and the table their picks.
constexpr bool can_pack(int num_heads, std::int64_t topk) {
  return 2 * num_heads <= Shape::kRows && union_table(2 * topk) <= kMaxUnionTable;
}
/// Tokens whose heads share a tile: a power of two, 1 = not packed. Packed, a key that several of
/// them picked is gathered and multiplied once. But an item takes up to as many times longer: the
/// last round of items must not cost more than a tenth of the time.
constexpr int tokens_per_item(int num_heads, std::int64_t tokens, std::int64_t topk, int num_sms) {
  const auto rounds = [&](int packed) {
    return ceil_div(tokens, std::int64_t{packed} * num_sms) * packed;
  };
  int packed = 1;
  while (2 * packed <= PickUnion::kMaxTokens && can_pack(packed * num_heads, packed * topk) &&
         rounds(2 * packed) * 10 <= rounds(1) * 11)
    packed *= 2;
  // Two tokens seldom share enough: where they share nothing, building unions costs a sixth.
  return packed >= 4 ? packed : 1;
}
static_assert(tokens_per_item(16, 4096, 2048, 132) == 4);
static_assert(tokens_per_item(8, 4096, 2048, 132) == 8);
static_assert(tokens_per_item(24, 4096, 2048, 132) == 1);
static_assert(tokens_per_item(64, 4096, 2048, 132) == 1);
static_assert(tokens_per_item(16, 132, 2048, 132) == 1, "no packing below two tokens per SM");

/// Query rows of a tile.
constexpr int rows_of_tile(bool packed, int num_heads, CacheFormat format) {
  return packed || format == CacheFormat::bf16 ? Shape::kRows : quantised_columns(num_heads);
}

/// Tokens of a launch at most where they are packed: what bounds the workspace.
constexpr std::int64_t slice_tokens() { return 4096; }

/// The workspace of the unions of a slice.
PickUnion carve_union(WorkspaceCarver& carver, std::int64_t max_tokens, std::int64_t topk) {
  const std::int64_t tokens = std::min(max_tokens, slice_tokens());
  PickUnion picks{};
  picks.slots = carver.take<std::int32_t>("sparse_mqa_union_slots", tokens * topk);
  picks.tokens = carver.take<std::uint8_t>("sparse_mqa_union_tokens", tokens * topk);
  picks.counts = carver.take<std::int32_t>("sparse_mqa_union_counts", tokens);
  return picks;
}

std::size_t workspace_bytes(const SparseMqaProblem& problem) {
  std::size_t packed = 0;
  if (can_pack(problem.num_heads, problem.topk) &&
      problem.max_tokens > cuda::current_device().num_sms) {
    WorkspaceCarver carver;
    carve_union(carver, problem.max_tokens, problem.topk);
    packed = carver.bytes();
  }
  return std::max(packed, cuda::sparse_mqa_mma_bytes(problem));
}

std::string why_not(const SparseMqaProblem& problem) {
  if (problem.kv_lora_rank != Shape::kLatent || problem.qk_rope_head_dim != Shape::kRope)
    return "made for rows of 512 + 64 elements";
  if (problem.format != CacheFormat::bf16 && problem.format != CacheFormat::fp8_ds_mla)
    return "reads rows of bf16 or fp8_ds_mla";
  constexpr int kDeclared = 3072;
  return why_no_hopper(std::max(PrefillBlock::kSharedBytes + kDeclared, kQuantisedSharedBytes));
}

/// Two CTAs that are neighbours in the grid are a cluster where both work on the same token, so
/// that they are close to each other: rows come to that part of the L2 cache once then.
void launch(void (*kernel)(CUtensorMap, PrefillArguments), const CtaSize& cta,
            const CUtensorMap& q_map, const PrefillArguments& args, Stream stream) {
  const int ctas = std::min(args.items, cuda::current_device().num_sms);
  const bool in_twos = args.head_tiles % 2 == 0 && ctas % 2 == 0;
  sm90::launch(kernel, cta, ctas, in_twos ? 2 : 1, q_map, args, stream);
}
template <bool kPacked>
void launch(CacheFormat format, const CUtensorMap& q_map, const PrefillArguments& args,
            Stream stream) {
  constexpr CtaSize kBf16Cta{PrefillBlock::kThreads, PrefillBlock::kSharedBytes};
  if (format == CacheFormat::bf16)
    launch(sparse_mqa_prefill_kernel<kPacked>, kBf16Cta, q_map, args, stream);
  else if (rows_of_tile(kPacked, args.num_heads, format) == 16)
    launch(quantised_mqa_kernel<false, false, 16>, kQuantisedCta<16>, q_map, args, stream);
  else
    launch(quantised_mqa_kernel<kPacked, false, 64>, kQuantisedCta<64>, q_map, args, stream);
}

/// `packed` tokens to a tile, 1 = heads of one token.
void run_tiles(const SparseMqaProblem& problem, const SparseMqaCall& call, int packed,
               const CUtensorMap& q_map, std::span<std::byte> workspace, Stream stream) {
  const std::int64_t tokens = call.q.extent(0);
  PrefillArguments args{};
  args.call = call;
  args.page = PageDivisor::of(static_cast<std::uint32_t>(call.cache.block_size));
  args.num_heads = problem.num_heads;
  args.head_tiles = static_cast<int>(ceil_div(problem.num_heads, Shape::kRows));
  args.items = static_cast<int>(tokens * args.head_tiles);
  args.logit_scale = static_cast<float>(double{call.softmax_scale} * std::numbers::log2e);
  if (packed == 1) {
    launch<false>(problem.format, q_map, args, stream);
    return;
  }
  WorkspaceCarver carver(workspace);
  args.picks = carve_union(carver, problem.max_tokens, problem.topk);
  args.picks.row = packed * call.slots.extent(1);
  while (1 << args.picks.shift < packed) ++args.picks.shift;
  const auto table = static_cast<int>(union_table(args.picks.row));
  cuda::allow_shared(pick_union_kernel, union_bytes(kMaxUnionTable));
  for (args.first_token = 0; args.first_token < tokens; args.first_token += slice_tokens()) {
    const std::int64_t end = std::min(args.first_token + slice_tokens(), tokens);
    args.items = static_cast<int>(ceil_div(end - args.first_token, std::int64_t{packed}));
    pick_union_kernel<<<args.items, kUnionThreads, union_bytes(table), stream>>>(
        call, args.first_token, args.picks, table);
    cuda::check_launch("pick_union_kernel");
    launch<true>(problem.format, q_map, args, stream);
  }
}

void run(const SparseMqaProblem& problem, const SparseMqaCall& call, std::span<std::byte> workspace,
         Stream stream) {
  check_shapes(problem, call);
  const std::int64_t tokens = call.q.extent(0);
  if (tokens == 0) return;
  const std::int64_t items = tokens * ceil_div(problem.num_heads, Shape::kRows);
  const int packed =
      tokens_per_item(problem.num_heads, tokens, problem.topk, cuda::current_device().num_sms);
  CUtensorMap q_map;
  if (items < least_items(problem.num_heads, problem.format) ||
      !make_query_map(call, rows_of_tile(packed > 1, problem.num_heads, problem.format), packed,
                      q_map))
    cuda::run_sparse_mqa_mma(problem, call, workspace, stream);
  else
    run_tiles(problem, call, packed, q_map, workspace, stream);
}

}  // namespace

Entry<SparseMqaProblem, SparseMqaCall> sparse_mqa_prefill_entry() {
  return {"sm90_wgmma",
          Backend::cuda,
          "gathered rows, wgmma tiles of 64 heads or of several tokens' heads",
          why_not,
          workspace_bytes,
          run};
}

}  // namespace sparse_mla::sm90
