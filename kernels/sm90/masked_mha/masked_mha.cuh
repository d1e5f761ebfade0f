/// `attend` on Hopper's warpgroup products: MHA of 128 query rows × one head per work item, 128
/// keys at a time. (The schedule inside a warpgroup is FlashAttention-3's: Shah et al., 2024.)
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/sm90/masked_mha/rows.cuh"
#include "kernels/sm90/masked_mha/work.cuh"
#include "kernels/sm90/wgmma.cuh"

namespace sparse_mla::sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// A consumer warpgroup: 64 query rows of every work item.
template <bool kMasked>
__device__ __forceinline__ void consume(const AttendArguments& args, const AttendPlan& plan,
                                        const MhaShared& shared, const MhaBarriers& barriers,
                                        const MhaTiles& tiles, int group) {
  using Shape = MhaShape;
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr int kGroupBytes = Shape::kGroupRows * 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const float scale = args.softmax_scale * kLog2e;
  QueryRows q;
  q.operand = uniform(ptx::swizzled_operand(tiles.q + group * kGroupBytes));
  const auto keys_of = [&](const StageUse& use) {
    return uniform(ptx::swizzled_operand(tiles.k(use.stage())));
  };
  const auto values_of = [&](const StageUse& use) {
    return uniform(ptx::swizzled_operand(tiles.v(use.stage()), Shape::kSlabBytes));
  };
  const auto arrive = [&](std::uint32_t mbarrier) {
    __syncwarp();
    if (lane == 0) ptx::block_mbarrier_arrive(mbarrier);
  };

  StageUse block{0};
  for (std::uint32_t count = 0;; ++count) {
    ptx::block_mbarrier_wait(barriers.full_q(), count % 2);
    const MhaItem& item = shared.items[count % 3];
    if (item.none) return;
    const int group_row = item.work.item.row + group * Shape::kGroupRows;
    const int row = group_row + warp * 16 + lane / 4;
    const int row_end = min(item.work.item.row + Shape::kRows, item.member.query_len);

    float out[64], score[64], factor[2];
    std::uint32_t weights[32];
    RowSums rows = {{-FLT_MAX, -FLT_MAX}, {0, 0}};
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = 0;
    // Of the group's rows the first sees least: up to here every row sees every key.
    const int all_end = visible_end(args, item.member, item.keys, group_row);
    [[maybe_unused]] QuadMask mask;
    if constexpr (kMasked) mask.start(args, item, row, row_end);
    const auto hide = [&](int key) {
      if constexpr (kMasked) {
        hide_unselected(score, mask, key);
      } else if (key + Shape::kKeys > all_end) {
        const int end[2] = {visible_end(args, item.member, item.keys, row) - key,
                            visible_end(args, item.member, item.keys, row + 8) - key};
        hide_behind(score, end);
      }
    };
    if (item.first_key < item.keys.end) q.load(tiles.q + group * kGroupBytes + warp * 16 * 128);
    const bool has_blocks = item.first_key < item.keys.end;
    bool more = has_blocks;
    while (more) {
      // The next block that concerns this group, with no product of it under way.
      MhaBlock at;
      while (true) {
        ptx::block_mbarrier_wait(barriers.full_k(block.stage()), block.parity());
        at = barriers.block(block.stage());
        if ((at.groups >> group & 1) != 0) break;
        arrive(barriers.empty_k(block.stage()));
        // Not before V is there: the other group may still hold the stage's V before this one.
        ptx::block_mbarrier_wait(barriers.full_v(block.stage()), block.parity());
        arrive(barriers.empty_v(block.stage()));
        ++block.use;
        if (at.last) break;
      }
      if ((at.groups >> group & 1) == 0) break;
      ptx::pin(score);
      ptx::wgmma_fence();
      start_scores(score, q, keys_of(block));
      if constexpr (kMasked) mask.fetch(at.key);
      ptx::wgmma_wait<0>();
      ptx::pin(score);
      arrive(barriers.empty_k(block.stage()));
      hide(at.key);
      if constexpr (kMasked) mask.fetch(at.following);
      weigh(score, rows, scale, factor);
      rescale(out, factor);
      round_weights(score, weights);
      StageUse values = block;
      ++block.use;

      // S of a block and O of the one before it are under way together; the softmax of S runs
      // while O does.
      while (!at.last) {
        ptx::block_mbarrier_wait(barriers.full_k(block.stage()), block.parity());
        const MhaBlock following = barriers.block(block.stage());
        if ((following.groups >> group & 1) == 0) break;
        ptx::pin(score);
        ptx::pin(out);
        ptx::wgmma_fence();
        start_scores(score, q, keys_of(block));
        ptx::block_mbarrier_wait(barriers.full_v(values.stage()), values.parity());
        ptx::wgmma_fence();
        start_output(out, weights, values_of(values));
        ptx::wgmma_wait<1>();
        ptx::pin(score);
        arrive(barriers.empty_k(block.stage()));
        hide(following.key);
        if constexpr (kMasked) mask.fetch(following.following);
        weigh(score, rows, scale, factor);
        ptx::pin(score);
        stay_in_front(rows.sum[0] + rows.sum[1]);
        ptx::wgmma_wait<0>();
        ptx::pin(out);
        arrive(barriers.empty_v(values.stage()));
        rescale(out, factor);
        round_weights(score, weights);
        at = following;
        values = block;
        ++block.use;
      }
      more = !at.last;
      if (!more) arrive(barriers.empty_q());

      ptx::block_mbarrier_wait(barriers.full_v(values.stage()), values.parity());
      // Only a last block can reach past the end. What lies there may be anything, and 0 · NaN is
      // NaN. Each group clears the rows for itself: for the other one they are 0 already or not yet
      // read.
      if (const int valid = item.keys.end - at.key; valid < Shape::kKeys) {
        constexpr int kChunksPerRow = 8;
        const std::uint32_t zeros[4] = {};
#pragma unroll 1
        for (int c = valid * kChunksPerRow + static_cast<int>(threadIdx.x) % Shape::kGroupThreads;
             c < Shape::kKeys * kChunksPerRow; c += Shape::kGroupThreads)
#pragma unroll
          for (int slab = 0; slab < Shape::kValue / Shape::kSlabColumns; ++slab)
            ptx::store_shared_16(tiles.v(values.stage()) + slab * Shape::kSlabBytes + c * 16,
                                 zeros);
        ptx::fence_shared_to_async();
        ptx::named_barrier(1 + group, Shape::kGroupThreads);
      }
      ptx::pin(out);
      ptx::wgmma_fence();
      start_output(out, weights, values_of(values));
      ptx::wgmma_wait<0>();
      ptx::pin(out);
      arrive(barriers.empty_v(values.stage()));
    }
    if (more || !has_blocks) arrive(barriers.empty_q());  // not done so with the last product
    finish(args, plan, item, row, row_end, rows, out);
  }
}

#endif

/// The tile product of one work item, per block of 128 keys:
///   S[128, 128] = Q[128, P+R] · K[128, P+R]ᵀ   Q: two thirds in registers; K from shared memory
///   online softmax in base 2, fp32, a quad of lanes per row
///   O[128, V] += P[128, 128] · V[128, V]       P from registers as bf16, V as it lies, N-major
/// One CTA per SM that stays: a warpgroup of which one warp schedules and one produces, and
/// two consumer warpgroups of 64 rows each. CTAs take (item, head) from a common counter, longest
/// items first (attend_plan.cuh); two stages of K and V, one of Q.
template <bool kMasked>
__global__ void __launch_bounds__(MhaShape::kThreads, 1)
    masked_mha_kernel(const __grid_constant__ MhaMaps maps,
                      const __grid_constant__ AttendArguments args,
                      const __grid_constant__ AttendPlan plan) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = MhaShape;
  extern __shared__ std::byte shared_memory[];
  __shared__ MhaShared shared;
  const MhaTiles tiles{
      cuda::not_hoisted((ptx::shared_address(shared_memory) + Shape::kAlignment - 1) /
                        Shape::kAlignment * Shape::kAlignment)};
  const MhaBarriers barriers{cuda::not_hoisted(ptx::shared_address(&shared))};
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = Shape::kGroups * Shape::kGroupThreads / 32;
    ptx::mbarrier_init(&shared.full_q, 1);
    ptx::mbarrier_init(&shared.empty_q, kConsumerWarps);
    ptx::mbarrier_init(&shared.wanted, 1);
    ptx::mbarrier_init(&shared.ready, 1);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full_k[stage], 1);
      ptx::mbarrier_init(&shared.empty_k[stage], kConsumerWarps);
      ptx::mbarrier_init(&shared.full_v[stage], 1);
      ptx::mbarrier_init(&shared.empty_v[stage], kConsumerWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  // From one lane, so that the compiler takes what follows from it as uniform.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / Shape::kGroupThreads, 0);
  if (group == 0) {
    ptx::release_registers<Shape::kProducerRegisters>();
    if (threadIdx.x < 32)
      produce<kMasked>(maps, args, shared, barriers, tiles);
    else if (threadIdx.x < 64)
      schedule<kMasked>(args, plan, shared, barriers);
  } else {
    ptx::claim_registers<Shape::kConsumerRegisters>();
    consume<kMasked>(args, plan, shared, barriers, tiles, group - 1);
  }
#endif
}

}  // namespace sparse_mla::sm90
