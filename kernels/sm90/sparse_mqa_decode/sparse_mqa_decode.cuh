/// `sparse_mqa` on Hopper's warpgroup products for few tokens over bf16 rows: an item (token × 64
/// heads) belongs to a cluster whose CTAs share its keys and join their parts through distributed
/// shared memory. (Two key blocks in flight, one per warpgroup, and the sums split by value
/// columns: FlashMLA's schedule.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda.h>

#include "kernels/common/finished_row.h"
#include "kernels/cuda/write_lse.cuh"
#include "kernels/sm90/scaled_f16.cuh"
#include "kernels/sm90/sparse_mqa_decode/rows.cuh"
#include "kernels/sm90/sparse_mqa_decode/tile.cuh"
#include "kernels/sm90/sparse_mqa_parts.cuh"
#include "kernels/sm90/sparse_mqa_softmax.cuh"

namespace sparse_mla::sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// Sums · factor, of the rows that a thread has.
__device__ __forceinline__ void rescale(float (&low)[64], float (&high)[64],
                                        const float (&factor)[2]) {
  if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    low[i] *= factor[i / 2 % 2];
    high[i] *= factor[i / 2 % 2];
  }
}

/// A consumer warpgroup.
template <int kGroup>
__device__ __forceinline__ void consume(const CUtensorMap& q_map, const DecodeArguments& args,
                                        DecodeShared& shared, const DecodeAddresses& at) {
  using Shape = DecodeShape;
  constexpr int kOther = 1 - kGroup;
  const int thread = threadIdx.x % Shape::kGroupThreads;
  const int lane = thread % 32, warp = thread / 32;
  const int row = 16 * warp + lane / 4;  // and row + 8
  const SparseMqaCall& call = args.call;
  const float scale = args.logit_scale;
  const bool whole = args.splits == 1;

  const auto uniform = [](std::uint32_t x) { return __shfl_sync(~0u, x, 0); };
  const std::uint32_t q = uniform(ptx::swizzled_operand(at.q()));
  const std::uint32_t k = uniform(ptx::swizzled_operand(at.keys(kGroup)));
  // The group's half of the value columns, of its own block and of the other.
  const auto values_of = [&](int block) {
    return uniform(ptx::swizzled_operand(
        at.keys(block) + kGroup * Shape::kHalfSlabs * Shape::kSlabBytes, Shape::kSlabBytes));
  };
  const std::uint32_t own_values = values_of(kGroup), other_values = values_of(kOther);
  const std::uint32_t other_weights = uniform(ptx::swizzled_operand(at.weights(kOther)));
  // Of stmatrix: lane l names row l % 16 of the warp's, chunk l / 16 of a step's two.
  const std::uint32_t own_weights = at.weights(kGroup) + (16 * warp + lane % 16) * 128;
  const auto arrive = [&](std::uint32_t mbarrier) {
    __syncwarp();
    if (lane == 0) ptx::block_mbarrier_arrive(mbarrier);
  };
  const auto load_q = [&](int item) {
    if (item >= args.items) return;
    ptx::block_mbarrier_arrive_expecting(at.full_q(), Shape::kTileBytes);
    const int token = item / args.head_tiles, tile = item % args.head_tiles;
#pragma unroll
    for (int slab = 0; slab < Shape::kSlabs; ++slab)
      ptx::copy_box_3d(at.q() + slab * Shape::kSlabBytes, &q_map, at.full_q(), 64 * slab, token,
                       tile * Shape::kHeads);
  };
  if (kGroup == 1 && thread == 0) load_q(first_item(args));

  float out[2][64], score[32];  // of 128 columns each: a product of 256 would not compile

  std::uint32_t weights[16];
  std::uint32_t use = 0;  // of every quarter
  int next_count = slots_of(args, first_item(args));
  std::uint32_t item_use = 0;
  for (int item = first_item(args); item < args.items; item += args.clusters, ++item_use) {
    const int pairs = Share(next_count, args.splits).pairs();
    next_count = slots_of(args, item + args.clusters);
    RowState rows = {{-HUGE_VALF, -HUGE_VALF}, {0, 0}};
    float factor[2];
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i / 64][i % 64] = 0;

    const auto scores_of = [&](auto first, int slab) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const int bytes = slab * Shape::kSlabBytes + s * 32;
        if (decltype(first)::value && s == 0)
          ptx::wgmma_m64n64k16<false>(score, ptx::advance(q, bytes), ptx::advance(k, bytes));
        else
          ptx::wgmma_m64n64k16<true>(score, ptx::advance(q, bytes), ptx::advance(k, bytes));
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
      ptx::pin(out[0]);
      ptx::pin(out[1]);
      ptx::wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const std::uint32_t a[4] = {weights[4 * s], weights[4 * s + 1], weights[4 * s + 2],
                                    weights[4 * s + 3]};
#pragma unroll
        for (int c = 0; c < 2; ++c)
          ptx::wgmma_m64n128k16<true, true>(
              out[c], a[0], a[1], a[2], a[3],
              ptx::advance(own_values, s * 16 * 128 + c * 2 * Shape::kSlabBytes));
      }
      ptx::wgmma_commit();
    };
    const auto start_other = [&] {
      ptx::pin(out[0]);
      ptx::pin(out[1]);
      ptx::wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          ptx::wgmma_m64n128k16_n_major(
              out[c], ptx::advance(other_weights, s * 32),
              ptx::advance(other_values, s * 16 * 128 + c * 2 * Shape::kSlabBytes));
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
    const auto weigh_block = [&] {
      weigh(score, load_valid(shared.valid[kGroup], 0), scale, rows, factor, weights);
    };
    const auto publish_weights = [&] {
      ptx::block_mbarrier_wait(at.scored(kGroup), use % 2);
#pragma unroll
      for (int s = 0; s < 4; ++s) {
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
      ptx::fence_shared_to_async();
    };
    // A shared item's last pair stays locked: the part takes its place.
    const auto release = [&](int quarter, int pair) {
      if (whole || pair < pairs - 1) arrive(at.empty(quarter));
    };

    ptx::block_mbarrier_wait(at.full_q(), item_use % 2);
    for (int pair = 0; pair < pairs; ++pair, ++use) {
      if constexpr (kGroup == 0) {
        wait_full(kFirstLow);
        ptx::pin(score);
        ptx::wgmma_fence();
        start_first_scores(0);
        wait_full(kFirstHigh);
        ptx::wgmma_fence();
        start_last_scores(Shape::kHalfSlabs);
        ptx::wgmma_wait<0>();
        ptx::pin(score);
        arrive(at.scored(0));
        weigh_block();
        publish_weights();
        rescale(out[0], out[1], factor);
        start_own();
        ptx::wgmma_wait<0>();
        ptx::pin(out[0]);
        ptx::pin(out[1]);
        release(kFirstLow, pair);
        take_reference();
        rescale(out[0], out[1], factor);
        start_other();
        ptx::wgmma_wait<0>();
        ptx::pin(out[0]);
        ptx::pin(out[1]);
        release(kSecondLow, pair);
      } else {
        wait_full(kSecondHigh);
        ptx::pin(score);
        ptx::wgmma_fence();
        start_first_scores(Shape::kHalfSlabs);
        wait_full(kSecondLow);
        ptx::wgmma_fence();
        start_last_scores(0);
        take_reference();
        rescale(out[0], out[1], factor);
        start_other();  // while the scores become weights
        ptx::wgmma_wait<1>();
        ptx::pin(score);
        arrive(at.scored(1));
        if (pair == pairs - 1) {  // group 0 is done with the queries since its weights are there
          ptx::named_barrier(kSecondDecodeGroup, Shape::kGroupThreads);
          if (thread == 0) load_q(item + args.clusters);
        }
        weigh_block();
        publish_weights();
        ptx::wgmma_wait<0>();
        ptx::pin(out[0]);
        ptx::pin(out[1]);
        release(kFirstHigh, pair);
        rescale(out[0], out[1], factor);
        start_own();
        ptx::wgmma_wait<0>();
        ptx::pin(out[0]);
        ptx::pin(out[1]);
        release(kSecondHigh, pair);
      }
    }

    // By items in turns, so that a group may be an item ahead of the other's reading.
    float(&sums)[2][Shape::kHeads] = shared.sum[item_use % 2];
    float total[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = rows.sum[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0) sums[kGroup][row + 8 * h] = sum;
    }
    if (lane % 4 == 0) ptx::block_mbarrier_arrive(at.summed());
    ptx::block_mbarrier_wait(at.summed(), item_use % 2);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      total[h] = load_by_quad(sums[0][row + 8 * h]) + load_by_quad(sums[1][row + 8 * h]);
    // Both groups have waited for this item's queries.
    if (kGroup == 1 && pairs == 0 && thread == 0) load_q(item + args.clusters);
    const int token = item / args.head_tiles, tile_head = item % args.head_tiles * Shape::kHeads;
    if (!whole) {
      const int item_rows = min(Shape::kHeads, args.num_heads - tile_head);
      float most[2] = {0, 0};  // of the rows' sums
#pragma unroll
      for (int i = 0; i < 64; ++i)
        most[i / 2 % 2] = fmaxf(most[i / 2 % 2], fmaxf(fabsf(out[0][i]), fabsf(out[1][i])));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 1));
        most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 2));
        if (lane % 4 == 0) shared.most[kGroup][row + 8 * h] = most[h];
      }
      ptx::named_barrier(kBothDecodeGroups, 2 * Shape::kGroupThreads);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at_row = row + 8 * h;
        const float inverse = total[h] == 0.0f ? 0.0f : 1.0f / total[h];
        const PowerOfTwo power =
            PowerOfTwo::that_fits(fmaxf(shared.most[0][at_row], shared.most[1][at_row]) * inverse);
        if (kGroup == 0 && lane % 4 == 0) {
          const std::uint32_t bits[4] = {__float_as_uint(rows.reference[h]),
                                         __float_as_uint(total[h]), __float_as_uint(power.value()),
                                         0};
          ptx::store_shared_16(at.part() + (at_row + 1) * kPartRowBytes - 16, bits);
        }
        if (at_row >= item_rows) continue;  // no head
        const float share = inverse * power.inverse();
        const std::uint32_t to = at.part() + at_row * kPartRowBytes +
                                 (kGroup * Shape::kHalfColumns + 2 * (lane % 4)) * 2;
#pragma unroll
        for (int n = 0; n < Shape::kHalfColumns / 8; ++n)
          ptx::store_shared_4(to + 16 * n,
                              ptx::pack_f16(out[n / 16][n % 16 * 4 + 2 * h] * share,
                                            out[n / 16][n % 16 * 4 + 2 * h + 1] * share));
      }
      ptx::cluster_arrive();  // all parts are there
      ptx::cluster_wait();
      join_parts(call, args.splits, at.part(), kGroup * Shape::kGroupThreads + thread,
                 {token, tile_head, item_rows});
      ptx::cluster_wait();
      if (pairs > 0) {
        arrive(at.empty(kGroup == 0 ? kFirstLow : kFirstHigh));
        arrive(at.empty(kGroup == 0 ? kSecondLow : kSecondHigh));
      }
      continue;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = tile_head + row + 8 * h;
      const bool writes = head < args.num_heads, empty = total[h] == 0.0f;
      const float lse = empty ? -HUGE_VALF : (rows.reference[h] + log2f(total[h])) * kLn2;
      float share = empty ? 0.0f : 1.0f / total[h];
      if (writes && call.sink.data_handle() != nullptr) share *= sink_factor(call.sink(head), lse);
      if (kGroup == 0 && writes && lane % 4 == 0) cuda::write_lse(call, token, head, lse);
      auto* to = reinterpret_cast<uint4*>(
          address(call.out, token, writes ? head : 0, kGroup * Shape::kHalfColumns));
#pragma unroll
      for (int m = 0; m < Shape::kHalfColumns / 32; ++m) {
        std::uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int n = 4 * m + j, i = n % 16 * 4 + 2 * h;
          packed[j] =
              empty ? 0u : ptx::pack_bf16(out[n / 16][i] * share, out[n / 16][i + 1] * share);
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
///   S[64, 64] = Q[64, 576] · K[64, 576]ᵀ of block g by warpgroup g, both from shared memory
///   online softmax in base 2, fp32, a quad of lanes per row; block 1 goes on where block 0 is
///   O[64, 256g … 256g+255] += P[64, 64] · K[64, the same columns] of both blocks by warpgroup g:
///     its own block's P from registers, the other's from shared memory
/// One CTA per SM: two warpgroups that gather, two that compute. Keys are filled and freed by
/// quarters of a pair. A cluster takes an item, its CTAs even shares of the item's blocks; a CTA
/// then puts its sums where its keys were, and each joins a share of the results from all of them.
/// Clusters stay and take items number c, c + clusters, …; of clusters of one CTA the next item's
/// keys and queries come in during the last products and the epilogue of the one before.
__global__ void __launch_bounds__(DecodeShape::kThreads, 1)
    sparse_mqa_decode_kernel(const __grid_constant__ CUtensorMap q_map,
                             const __grid_constant__ DecodeArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = DecodeShape;
  extern __shared__ std::byte decode_tiles[];
  __shared__ DecodeShared shared;
  const DecodeAddresses at{(ptx::shared_address(decode_tiles) + Shape::kAlignment - 1) /
                               Shape::kAlignment * Shape::kAlignment,
                           ptx::shared_address(&shared)};
  if (threadIdx.x == 0) {
    constexpr int kWarps = Shape::kGroupThreads / 32;
    ptx::mbarrier_init(&shared.full_q, 1);
#pragma unroll
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
      ptx::mbarrier_init(&shared.full[quarter], kFullArrivals);
      ptx::mbarrier_init(&shared.empty[quarter], kWarps);
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
  if (group < 2) {
    ptx::release_registers<Shape::kProducerRegisters>();
    produce(args, shared, at);
  } else {
    ptx::claim_registers<Shape::kConsumerRegisters>();
    if (group == 2)
      consume<0>(q_map, args, shared, at);
    else
      consume<1>(q_map, args, shared, at);
  }
#endif
}

}  // namespace sparse_mla::sm90
