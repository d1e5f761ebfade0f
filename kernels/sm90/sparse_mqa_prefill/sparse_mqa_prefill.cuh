/// `sparse_mqa` on Hopper's warpgroup products: absorbed attention of 64 query rows per work item
/// (heads of one token, or the heads of several tokens) over the rows that their slots name, 2 × 64
/// keys at a time. (Two key blocks in flight, one per warpgroup, and the sums split by value
/// columns: FlashMLA's schedule.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda.h>

#include "kernels/common/finished_row.h"
#include "kernels/cuda/write_lse.cuh"
#include "kernels/sm90/sparse_mqa_prefill/prefill_rows.cuh"
#include "kernels/sm90/sparse_mqa_prefill/prefill_tile.cuh"
#include "kernels/sm90/sparse_mqa_softmax.cuh"
#include "kernels/sm90/wgmma.cuh"
#include "sparse_mla/attention.h"

namespace sparse_mla::sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// out · factor, of the rows that a thread has.
__device__ __forceinline__ void rescale(float (&out)[128], const float (&factor)[2]) {
  if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 128; ++i) out[i] *= factor[i / 2 % 2];
}

/// A consumer warpgroup.
template <int kGroup, bool kPacked>
__device__ __forceinline__ void consume(const CUtensorMap& q_map, const PrefillArguments& args,
                                        PrefillShared& shared, const PrefillAddresses& at) {
  using Shape = PrefillShape;
  using Block = PrefillBlock;
  constexpr int kKeys = Block::kKeys;
  constexpr int kOther = 1 - kGroup, kBoth = 2 * Shape::kGroupThreads;
  const int thread = threadIdx.x % Shape::kGroupThreads;
  const int lane = thread % 32, warp = thread / 32;
  const int row = 16 * warp + lane / 4;  // and row + 8
  const int shift = kPacked ? args.picks.shift : 0;
  const int token_of_row = row & ((1 << shift) - 1);  // of row + 8 too
  const SparseMqaCall& call = args.call;
  const float scale = args.logit_scale;

  const auto uniform = [](std::uint32_t x) { return __shfl_sync(~0u, x, 0); };
  const std::uint32_t q = uniform(ptx::swizzled_operand(at.q()));
  const std::uint32_t k = uniform(ptx::swizzled_operand(at.keys(kGroup)));
  // The group's half of the value columns, of its own block and of the other.
  const auto values_of = [&](int block) {
    return uniform(ptx::swizzled_operand(
        at.keys(block) + kGroup * Shape::kHalfSlabs * Block::kSlabBytes, Block::kSlabBytes));
  };
  const std::uint32_t own_values = values_of(kGroup), other_values = values_of(kOther);
  const std::uint32_t other_weights = uniform(ptx::swizzled_operand(at.weights(kOther)));
  // Of stmatrix: lane l names row l % 16 of the warp's, chunk l / 16 of a step's two.
  const std::uint32_t own_weights = at.weights(kGroup) + (16 * warp + lane % 16) * 128;
  const auto arrive = [&](std::uint32_t mbarrier) {
    __syncwarp();
    if (lane == 0) ptx::block_mbarrier_arrive(mbarrier);
  };
  // Validity bits are of a token: those of 8 rows may be of as many. They are freed with the
  // group's own values.
  const int reader = kPacked ? lane & ~3 : 0;
  const auto free_own_values = [&](std::uint32_t mbarrier) {
    __syncwarp();
    if (lane == reader) ptx::block_mbarrier_arrive(mbarrier);
  };
  const auto load_q = [&](int item) {
    load_queries<kPacked>(q_map, args, item, at.q(), at.full_q());
  };
  const int step_items = static_cast<int>(gridDim.x);
  if (kGroup == 1 && thread == 0) load_q(static_cast<int>(blockIdx.x));

  float out[128], score[kKeys / 2];
  std::uint32_t weights[kKeys / 4];
  std::uint32_t use = 0;  // of every quarter
  int next_count = picks_of<kPacked>(args, static_cast<int>(blockIdx.x));
  std::uint32_t q_use = 0;
  for (int item = static_cast<int>(blockIdx.x); item < args.items; item += step_items, ++q_use) {
    const int pairs = pairs_of(next_count);
    next_count = picks_of<kPacked>(args, item + step_items);
    RowState rows = {{-HUGE_VALF, -HUGE_VALF}, {0, 0}};
    float factor[2];
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i] = 0;

    const auto scores_of = [&](auto first, int slab) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        constexpr bool kFirst = decltype(first)::value;
        const std::uint32_t a = ptx::advance(q, slab * Shape::kQuerySlabBytes + s * 32);
        const std::uint32_t b = ptx::advance(k, slab * Block::kSlabBytes + s * 32);
        if (kFirst && s == 0)
          ptx::wgmma_m64n64k16<false>(score, a, b);
        else
          ptx::wgmma_m64n64k16<true>(score, a, b);
      }
    };
    // Of four slabs with the first of the product, and of four with the rope part.
    const auto start_first_scores = [&](int slab) {
      scores_of(std::true_type{}, slab);
#pragma unroll
      for (int i = 1; i < Shape::kHalfSlabs; ++i) scores_of(std::false_type{}, slab + i);
      ptx::wgmma_commit();
    };
    const auto start_last_scores = [&](int slab) {
#pragma unroll
      for (int i = 0; i < Shape::kHalfSlabs; ++i) scores_of(std::false_type{}, slab + i);
      scores_of(std::false_type{}, Shape::kRopeSlab);
      ptx::wgmma_commit();
    };
    // O += P · V of the own block, then of the other's.
    const auto start_own = [&] {
      ptx::pin(out);
      ptx::wgmma_fence();
#pragma unroll
      for (int s = 0; s < kKeys / 16; ++s) {
        const std::uint32_t a[4] = {weights[4 * s], weights[4 * s + 1], weights[4 * s + 2],
                                    weights[4 * s + 3]};
        ptx::wgmma_m64n256k16_n_major(out, a, ptx::advance(own_values, s * 16 * 128));
      }
      ptx::wgmma_commit();
    };
    const auto start_other = [&] {
      ptx::pin(out);
      ptx::wgmma_fence();
#pragma unroll
      for (int s = 0; s < kKeys / 16; ++s)
        ptx::wgmma_m64n256k16_n_major(out, ptx::advance(other_weights, s * 32),
                                      ptx::advance(other_values, s * 16 * 128));
      ptx::wgmma_commit();
    };
    // The other group's weights are there: take over its reference.
    const auto take_reference = [&] {
      ptx::block_mbarrier_wait(at.weighed(kOther), use % 2);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float now = load_by_quad(shared.reference[kOther][row + 8 * h]);
        factor[h] = rescaling(rows.reference[h], now);
        rows.reference[h] = now;
        rows.sum[h] *= factor[h];
      }
    };
    // Validity bits of the block that is weighed: asked for while the scores are under way.
    uint2 valid;
    const auto load_block_valid = [&] {
      valid = load_valid(&shared.valid[kGroup][token_of_row], reader);
    };
    float top[2];
    const auto find_block_tops = [&] { find_tops(score, valid, top); };
    const auto weigh_block = [&] { weigh(score, top, scale, rows, factor, weights); };
    const auto publish_weights = [&] {
      ptx::block_mbarrier_wait(at.scored(kGroup), use % 2);
#pragma unroll
      for (int s = 0; s < kKeys / 16; ++s) {
        const std::uint32_t a[4] = {weights[4 * s], weights[4 * s + 1], weights[4 * s + 2],
                                    weights[4 * s + 3]};
        ptx::stmatrix_x4(own_weights + (((2 * s + lane / 16) ^ lane % 8) << 4), a);
      }
      ptx::fence_shared_to_async();
      __syncwarp();
      if (lane % 4 == 0) {
        shared.reference[kGroup][row] = rows.reference[0];
        shared.reference[kGroup][row + 8] = rows.reference[1];
        ptx::block_mbarrier_arrive(at.weighed(kGroup));
      }
    };
    const auto wait_full = [&](int quarter) {
      ptx::block_mbarrier_wait(at.full(quarter), use % 2);
      ptx::fence_shared_to_async();  // of copies
    };

    ptx::block_mbarrier_wait(at.full_q(), q_use % 2);
    for (int pair = 0; pair < pairs; ++pair, ++use) {
      if constexpr (kGroup == 0) {
        wait_full(kFirstLow);
        ptx::pin(score);
        ptx::wgmma_fence();
        start_first_scores(0);
        wait_full(kFirstHigh);
        ptx::wgmma_fence();
        start_last_scores(Shape::kHalfSlabs);
        ptx::named_barrier_arrive(kFirstScores, kBoth);
        load_block_valid();
        ptx::wgmma_wait<0>();
        ptx::pin(score);
        arrive(at.scored(0));
        find_block_tops();
        weigh_block();
        publish_weights();
        rescale(out, factor);
        start_own();
        ptx::wgmma_wait<0>();
        ptx::pin(out);
        free_own_values(at.empty(kFirstLow));
        take_reference();
        rescale(out, factor);
        start_other();
        ptx::wgmma_wait<0>();
        ptx::pin(out);
        arrive(at.empty(kSecondLow));
      } else {
        // Behind group 0's: side by side both would end late, with nothing to do for the tensor
        // cores while group 0's scores become weights.
        ptx::named_barrier(kFirstScores, kBoth);
        wait_full(kSecondHigh);
        ptx::pin(score);
        ptx::wgmma_fence();
        start_first_scores(Shape::kHalfSlabs);
        wait_full(kSecondLow);
        ptx::wgmma_fence();
        start_last_scores(0);
        load_block_valid();
        take_reference();
        rescale(out, factor);
        start_other();  // while the scores become weights
        ptx::wgmma_wait<1>();
        ptx::pin(score);
        arrive(at.scored(1));
        find_block_tops();
        if (pair == pairs - 1) {  // group 0 is done with the queries since its weights are there
          ptx::named_barrier(kSecondGroup, Shape::kGroupThreads);
          if (thread == 0) load_q(item + step_items);
        }
        weigh_block();
        publish_weights();
        ptx::wgmma_wait<0>();
        ptx::pin(out);
        arrive(at.empty(kFirstHigh));
        rescale(out, factor);
        start_own();
        ptx::wgmma_wait<0>();
        ptx::pin(out);
        free_own_values(at.empty(kSecondHigh));
      }
    }

    // By items in turns, so that a group may be an item ahead of the other's reading.
    float(&sums)[2][Shape::kRows] = shared.sum[q_use % 2];
    float total[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = rows.sum[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0) sums[kGroup][row + 8 * h] = sum;
    }
    if (lane % 4 == 0) ptx::block_mbarrier_arrive(at.summed());
    ptx::block_mbarrier_wait(at.summed(), q_use % 2);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      total[h] = load_by_quad(sums[0][row + 8 * h]) + load_by_quad(sums[1][row + 8 * h]);
    // Both groups have waited for this item's queries.
    if (kGroup == 1 && pairs == 0 && thread == 0) load_q(item + step_items);
    const PrefillItem to_item = item_at<kPacked>(args, item);
    const std::int64_t token = to_item.token + token_of_row;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = to_item.head + ((row + 8 * h) >> shift);
      const bool writes = head < args.num_heads && (!kPacked || token < call.out.extent(0));
      const bool empty = total[h] == 0.0f;
      const float lse = empty ? -HUGE_VALF : (rows.reference[h] + log2f(total[h])) * kLn2;
      float share = empty ? 0.0f : 1.0f / total[h];
      if (writes && call.sink.data_handle() != nullptr) share *= sink_factor(call.sink(head), lse);
      if (kGroup == 0 && writes && lane % 4 == 0) cuda::write_lse(call, token, head, lse);
      auto* to = reinterpret_cast<uint4*>(
          address(call.out, writes ? token : 0, writes ? head : 0, kGroup * Shape::kHalfColumns));
#pragma unroll
      for (int m = 0; m < Shape::kHalfColumns / 32; ++m) {
        std::uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = 4 * (4 * m + j) + 2 * h;
          packed[j] = empty ? 0u : ptx::pack_bf16(out[i] * share, out[i + 1] * share);
        }
        transpose_four<1>(packed);
        if (writes)
          __stcs(to + 4 * m + lane % 4, make_uint4(packed[0], packed[1], packed[2], packed[3]));
      }
    }
  }
}

#endif

/// The tile product of one work item, per pair of blocks of 64 keys:
///   S[64, 64 keys] = Q[64, 576] · K[64 keys, 576]ᵀ of block g by warpgroup g, both from shared
///     memory
///   online softmax in base 2, fp32, a quad of lanes per row; block 1 goes on where block 0 is
///   O[64, 256g … 256g+255] += P[64, 64 keys] · K[64 keys, the same columns] of both blocks by
///     warpgroup g: its own block's P from registers, the other's from shared memory
/// One CTA per SM that stays: a warpgroup that gathers and two that compute. Keys are filled and
/// freed by quarters of a pair; the next item's keys and queries come in during the last products
/// and the epilogue of the one before.
template <bool kPacked>
__global__ void __launch_bounds__(PrefillBlock::kThreads, 1)
    sparse_mqa_prefill_kernel(const __grid_constant__ CUtensorMap q_map,
                              const __grid_constant__ PrefillArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = PrefillShape;
  using Block = PrefillBlock;
  extern __shared__ std::byte prefill_tiles[];
  __shared__ PrefillShared shared;
  const PrefillAddresses at{(ptx::shared_address(prefill_tiles) + Shape::kAlignment - 1) /
                                Shape::kAlignment * Shape::kAlignment,
                            ptx::shared_address(&shared)};
  if (threadIdx.x == 0) {
    constexpr int kWarps = Shape::kGroupThreads / 32;
    ptx::mbarrier_init(&shared.full_q, 1);
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
      // Every thread's copies; where a block begins, the lanes that write its validity bits, and
      // those that read them.
      const bool begins = quarter == kFirstLow || quarter == kSecondHigh;
      const int of_tokens = kPacked ? PickUnion::kMaxTokens : 1;
      ptx::mbarrier_init(&shared.full[quarter],
                         Shape::kGroupThreads + (begins ? kWarps * of_tokens : 0));
      ptx::mbarrier_init(&shared.empty[quarter], kWarps * (begins ? of_tokens : 1));
    }
    ptx::mbarrier_init(&shared.scored[0], kWarps);
    ptx::mbarrier_init(&shared.scored[1], kWarps);
    ptx::mbarrier_init(&shared.weighed[0], Shape::kGroupThreads / 4);
    ptx::mbarrier_init(&shared.weighed[1], Shape::kGroupThreads / 4);
    ptx::mbarrier_init(&shared.summed, 2 * Shape::kGroupThreads / 4);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  // From one lane, so that the compiler takes what follows from it as uniform.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / Shape::kGroupThreads, 0);
  if (group == 0) {
    ptx::release_registers<Block::kProducerRegisters>();
    copy_rows<kPacked>(args, shared, at);
  } else {
    ptx::claim_registers<Block::kConsumerRegisters>();
    if (group == 1)
      consume<0, kPacked>(q_map, args, shared, at);
    else
      consume<1, kPacked>(q_map, args, shared, at);
  }
#endif
}

}  // namespace sparse_mla::sm90
