// Operation `sparse_mqa` on compute capability 9.0, for few tokens: the CTAs of a cluster share a
// token's keys (docs/kernels/sparse_mqa_decode_sm90.md). What its views do not allow is left to the
// portable entry, many tokens to the prefill entry.
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <numbers>
#include <string>

#include "kernels/common/ceil_div.h"
#include "kernels/common/sparse_mqa_checks.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/sparse_mqa_portable.h"
#include "kernels/sm90/entries.h"
#include "kernels/sm90/hopper.h"
#include "kernels/sm90/sparse_mqa_decode/sparse_mqa_decode.cuh"
#include "kernels/sm90/sparse_mqa_launch.cuh"
#include "kernels/sm90/sparse_mqa_quantised/sparse_mqa_quantised.cuh"

namespace sparse_mla::sm90 {
namespace {

using Shape = DecodeShape;

/// Items of bf16 rows above which the prefill kernel takes the call: where hardly an item is split,
/// it is as fast over rows from memory, and a quarter faster (64 heads) or a tenth slower (16) over
/// rows from the L2 cache.
constexpr std::int64_t most_bf16_items(int num_heads) { return num_heads <= 32 ? 256 : 96; }

/// Clusters of each size that the device holds at once: of `kMaxSplits` sizes from 1.
using Residency = std::array<int, kMaxSplits>;

/// CTAs per item: the number by which the last item is done first, in tenths of a microsecond.
constexpr int choose_splits(std::int64_t items, std::int64_t topk, const SparseMqaProblem& problem,
                            const Residency& residency) {
  constexpr std::int64_t kStart = 45, kJoin = 55, kJoinHeads = 45;
  const std::int64_t kPair = problem.format == CacheFormat::bf16 ? 37 : 45;
  const std::int64_t blocks = ceil_div(std::max<std::int64_t>(topk, 1), Shape::kKeys);
  int best = 1;
  std::int64_t best_time = 0;
  for (int splits = 1; splits <= kMaxSplits; ++splits) {
    const int at_once = residency[static_cast<std::size_t>(splits - 1)];
    if (at_once == 0) continue;
    const std::int64_t pairs = ceil_div(ceil_div(blocks, splits), 2);
    const std::int64_t join =
        splits == 1
            ? 0
            : kJoin + kJoinHeads * std::min(problem.num_heads, Shape::kHeads) / Shape::kHeads;
    const std::int64_t time = ceil_div(items, at_once) * (pairs * kPair + join) + kStart;
    if (best_time == 0 || time < best_time) {
      best = splits;
      best_time = time;
    }
  }
  return best;
}

std::string why_not(const SparseMqaProblem& problem) {
  if (problem.kv_lora_rank != Shape::kLatent || problem.qk_rope_head_dim != Shape::kRope)
    return "made for rows of 512 + 64 elements";
  if (problem.format == CacheFormat::fp8) return "reads bf16 and fp8_ds_mla rows";
  constexpr int kDeclared = 3072;
  static_assert(sizeof(DecodeArguments) < 4000);
  return why_no_hopper(std::max(Shape::kSharedBytes + kDeclared, kQuantisedSharedBytes));
}

/// Its own kernels need none; those that it leaves calls to do.
std::size_t workspace_bytes(const SparseMqaProblem& problem) {
  return sparse_mqa_prefill_entry().workspace_bytes(problem);
}

constexpr CtaSize kBf16Cta{Shape::kThreads, Shape::kSharedBytes};

/// Of the current device, asked of the driver once.
const Residency& residency() {
  static std::mutex mutex;
  static std::map<int, Residency> known;  // by device
  const cuda::Device& device = cuda::current_device();
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = known.try_emplace(device.index);
  if (!is_new) return found->second;
  found->second[0] = device.num_sms;
  const auto kernel = quantised_mqa_kernel<false, true, 64>;
  prepare(kernel, kQuantisedCta<64>, kMaxSplits);
  for (int splits = 2; splits <= kMaxSplits; ++splits) {
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config =
        launch_of(kQuantisedCta<64>, device.num_sms * splits, splits, attribute, nullptr);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
      cudaGetLastError();  // the answer is that there are none
      clusters = 0;
    }
    found->second[static_cast<std::size_t>(splits - 1)] = clusters;
  }
  return found->second;
}

template <class Arguments>
void launch(void (*kernel)(CUtensorMap, Arguments), const CtaSize& cta, const CUtensorMap& q_map,
            const Arguments& args, Stream stream) {
  sm90::launch(kernel, cta, args.clusters * args.splits, args.splits, q_map, args, stream);
}

/// What both kernels are told.
template <class Arguments>
Arguments arguments(const SparseMqaProblem& problem, const SparseMqaCall& call, int splits) {
  Arguments args{};
  args.call = call;
  args.page = PageDivisor::of(static_cast<std::uint32_t>(call.cache.block_size));
  args.num_heads = problem.num_heads;
  args.head_tiles = static_cast<int>(ceil_div(problem.num_heads, Shape::kHeads));
  args.items = static_cast<int>(call.q.extent(0) * args.head_tiles);
  args.splits = splits;
  args.clusters =
      std::min(args.items, std::max(residency()[static_cast<std::size_t>(splits - 1)], 1));
  args.logit_scale = static_cast<float>(double{call.softmax_scale} * std::numbers::log2e);
  return args;
}

void run(const SparseMqaProblem& problem, const SparseMqaCall& call, std::span<std::byte> workspace,
         Stream stream) {
  check_shapes(problem, call);
  const std::int64_t items = call.q.extent(0) * ceil_div(problem.num_heads, Shape::kHeads);
  if (items == 0) return;
  const bool quantised = problem.format != CacheFormat::bf16;
  const bool many = !quantised && items > most_bf16_items(problem.num_heads);
  const int splits = many ? 1 : choose_splits(items, call.slots.extent(1), problem, residency());
  if (many || (quantised && splits == 1)) {
    sparse_mqa_prefill_entry().run(problem, call, workspace, stream);
    return;
  }
  CUtensorMap q_map;
  // A block of keys has nothing to share; and the portable kernels give a lone key's row back bit
  // by bit.
  const int rows = quantised ? quantised_columns(problem.num_heads) : Shape::kHeads;
  if (!make_query_map(call, rows, 1, q_map) || (quantised && call.slots.extent(1) <= kShareKeys))
    cuda::run_sparse_mqa_mma(problem, call, workspace, stream);
  else if (quantised && rows == 16)
    launch(quantised_mqa_kernel<false, true, 16>, kQuantisedCta<16>, q_map,
           arguments<PrefillArguments>(problem, call, splits), stream);
  else if (quantised)
    launch(quantised_mqa_kernel<false, true, 64>, kQuantisedCta<64>, q_map,
           arguments<PrefillArguments>(problem, call, splits), stream);
  else
    launch(sparse_mqa_decode_kernel, kBf16Cta, q_map,
           arguments<DecodeArguments>(problem, call, splits), stream);
}

}  // namespace

Entry<SparseMqaProblem, SparseMqaCall> sparse_mqa_decode_entry() {
  return {"sm90_decode", Backend::cuda,   "clusters share a token's keys, wgmma tiles of 64 heads",
          why_not,       workspace_bytes, run};
}

}  // namespace sparse_mla::sm90
