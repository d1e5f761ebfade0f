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
#include "kernels/sm90/scaled_f16.cuh"
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

/// d (+)= a · b of a block's scores; quantised rows' but for the rope part in fp16.
template <bool kAdds>
__device__ __forceinline__ void start_product(float (&d)[32], std::uint32_t a, std::uint32_t b) {
  ptx::wgmma_m64n64k16<kAdds>(d, a, b);
}
template <bool kAdds>
__device__ __forceinline__ void start_product(float (&d)[24], std::uint32_t a, std::uint32_t b) {
  ptx::wgmma_m64n48k16<kAdds, ptx::F16Product>(d, a, b);
}

/// The latent part of 64 rows of queries, bf16, in place to fp16, each row divided by a power of
/// two of its own so that it stays within the range: `divisor`, [64]. For all threads of both
/// consumer warpgroups, four to a row.
__device__ __forceinline__ void queries_to_f16(std::uint32_t q, int thread, float* divisor) {
  using Shape = PrefillShape;
  constexpr int kChunks = Shape::kLatent / 8 / 4;
  const int row = thread / 4;
  // Sixteen bytes of half a slab, halves by turns of the row's parity, so that eight lanes touch
  // each bank once.
  const auto place = [&](int i) {
    const int chunk = thread % 4 + 4 * ((i ^ row) & 1);
    return q + i / 2 * Shape::kQuerySlabBytes + row * 128 + ((chunk ^ row % 8) << 4);
  };
  uint4 chunks[kChunks];
  __nv_bfloat162 top{};
  const auto as_pair = [](std::uint32_t bits) {
    return *reinterpret_cast<const __nv_bfloat162*>(&bits);
  };
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunks[i] = ptx::load_shared_16(place(i));
    const std::uint32_t words[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
    for (const std::uint32_t word : words) top = __hmax2(top, __habs2(as_pair(word)));
  }
  float most = fmaxf(__low2float(top), __high2float(top));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  const PowerOfTwo power = PowerOfTwo::that_fits(most);
  if (thread % 4 == 0) divisor[row] = power.value();
  const float factor = power.inverse();
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const std::uint32_t numbers[4] = {
        bf16x2_to_f16x2(chunks[i].x, factor), bf16x2_to_f16x2(chunks[i].y, factor),
        bf16x2_to_f16x2(chunks[i].z, factor), bf16x2_to_f16x2(chunks[i].w, factor)};
    ptx::store_shared_16(place(i), numbers);
  }
}

/// A consumer warpgroup.
template <int kGroup, CacheFormat kFormat, bool kPacked>
__device__ __forceinline__ void consume(const CUtensorMap& q_map, const PrefillArguments& args,
                                        PrefillShared& shared,
                                        const PrefillAddresses<kFormat>& at) {
  using Shape = PrefillShape;
  using Block = PrefillBlock<kFormat>;
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
  // group's own values; what keys are scaled by, by every lane that read it.
  const int reader = kPacked ? lane & ~3 : 0;
  const auto free_own_values = [&](std::uint32_t mbarrier) {
    __syncwarp();
    if (Block::kQuantised || lane == reader) ptx::block_mbarrier_arrive(mbarrier);
  };
  const auto load_q = [&](int item) {
    if (item >= args.items) return;
    ptx::block_mbarrier_arrive_expecting(at.full_q(), Shape::kQueryBytes);
    const PrefillItem to = item_at<kPacked>(args, item);
#pragma unroll
    for (int slab = 0; slab < Shape::kSlabs; ++slab)
      ptx::copy_box_3d(at.q() + slab * Shape::kQuerySlabBytes, &q_map, at.full_q(), 64 * slab,
                       static_cast<int>(to.token), to.head);
  };
  const int step_items = static_cast<int>(gridDim.x);
  if (kGroup == 1 && thread == 0) load_q(static_cast<int>(blockIdx.x));

  float out[128], score[kKeys / 2];
  std::uint32_t weights[kKeys / 4];
  std::uint32_t use = 0;  // of every quarter
  int next_count = picks_of<kPacked>(args, static_cast<int>(blockIdx.x));
  std::uint32_t q_use = 0;
  for (int item = static_cast<int>(blockIdx.x); item < args.items; item += step_items, ++q_use) {
    const int pairs = pairs_of<kFormat>(next_count);
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
          start_product<false>(score, a, b);
        else
          start_product<true>(score, a, b);
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
      if constexpr (!Block::kQuantised) scores_of(std::false_type{}, Shape::kRopeSlab);
      ptx::wgmma_commit();
    };
    // O += P · V of the own block, then of the other's. (ptxas does not take a product of 256
    // columns where threads start with 128 registers.)
    const auto add_product = [&](float(&d)[128], const auto& a, std::uint32_t b) {
      if constexpr (Block::kQuantised) {
        constexpr int kBytes = 2 * Block::kSlabBytes;  // of 128 columns
        ptx::wgmma_m64n128k16_n_major<ptx::F16Product>(reinterpret_cast<float(&)[64]>(d[0]), a, b);
        ptx::wgmma_m64n128k16_n_major<ptx::F16Product>(reinterpret_cast<float(&)[64]>(d[64]), a,
                                                       ptx::advance(b, kBytes));
      } else {
        ptx::wgmma_m64n256k16_n_major(d, a, b);
      }
    };
    const auto start_own = [&] {
      ptx::pin(out);
      ptx::wgmma_fence();
#pragma unroll
      for (int s = 0; s < kKeys / 16; ++s) {
        const std::uint32_t a[4] = {weights[4 * s], weights[4 * s + 1], weights[4 * s + 2],
                                    weights[4 * s + 3]};
        add_product(out, a, ptx::advance(own_values, s * 16 * 128));
      }
      ptx::wgmma_commit();
    };
    const auto start_other = [&] {
      ptx::pin(out);
      ptx::wgmma_fence();
#pragma unroll
      for (int s = 0; s < kKeys / 16; ++s)
        add_product(out, ptx::advance(other_weights, s * 32),
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
    // Of the block that is weighed: validity bits, of quantised rows what they and the queries were
    // divided by; asked for while the scores are under way.
    uint2 valid;
    float keys[kKeys / 8] = {}, queries[2];
    const auto load_block = [&] {
      valid = load_valid(&shared.valid[kGroup][token_of_row], reader);
      if constexpr (Block::kQuantised) {
        valid.y |= 0xFFFF0000u;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
          keys[n] = ptx::load_shared_float(at.key_divisors(kGroup) + 4 * n);
#pragma unroll
        for (int h = 0; h < 2; ++h) queries[h] = load_by_quad(shared.query_divisor[row + 8 * h]);
      }
    };
    // Quantised rows: the rope part, bf16, once the rest is there and multiplied back.
    const auto add_rope_scores = [&] {
      if constexpr (Block::kQuantised) {
        ptx::wgmma_wait<0>();
        ptx::pin(score);
        multiply_back<kKeys>(score, keys, queries);
        ptx::pin(score);
        ptx::wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; ++s)
          ptx::wgmma_m64n48k16<true>(
              score, ptx::advance(q, Shape::kRopeSlab * Shape::kQuerySlabBytes + s * 32),
              ptx::advance(k, Shape::kRopeSlab * Block::kSlabBytes + s * 32));
        ptx::wgmma_commit();
      }
    };
    float top[2];
    const auto find_block_tops = [&] {
      if constexpr (Block::kQuantised) logits_of_divided<kKeys>(score, keys, scale);
      find_tops<kKeys>(score, valid, top);
    };
    const auto weigh_block = [&] {
      weigh<kKeys, Block::kQuantised>(score, top, Block::kQuantised ? 1.0f : scale, keys, rows,
                                      factor, weights);
    };
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
      if constexpr (!Block::kQuantised) ptx::fence_shared_to_async();  // of copies
    };

    ptx::block_mbarrier_wait(at.full_q(), q_use % 2);
    if constexpr (Block::kQuantised) {
      queries_to_f16(at.q(), kGroup * Shape::kGroupThreads + thread, shared.query_divisor);
      ptx::fence_shared_to_async();
      ptx::block_mbarrier_arrive(at.ready_q());
      ptx::block_mbarrier_wait(at.ready_q(), q_use % 2);
    }
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
        load_block();
        add_rope_scores();
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
        load_block();
        if constexpr (Block::kQuantised) {  // the other's weights come later than these scores
          add_rope_scores();
          ptx::wgmma_wait<0>();
          ptx::pin(score);
          arrive(at.scored(1));
          find_block_tops();
        }
        take_reference();
        rescale(out, factor);
        start_other();  // while the scores become weights
        if constexpr (!Block::kQuantised) {
          ptx::wgmma_wait<1>();
          ptx::pin(score);
          arrive(at.scored(1));
          find_block_tops();
        }
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
    constexpr float kLn2 = 0.693147180559945309f;
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
      if (kGroup == 0 && writes && lane % 4 == 0) {
        const std::int64_t column = call.lse_tokens == nullptr ? token : call.lse_tokens[token];
        if (column >= 0 && column < call.lse.extent(1)) call.lse(head, column) = lse;
      }
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
        transpose_quad(packed);
        if (writes)
          __stcs(to + 4 * m + lane % 4, make_uint4(packed[0], packed[1], packed[2], packed[3]));
      }
    }
  }
}

#endif

/// The tile product of one work item, per pair of blocks of 64 keys (48 of quantised ones):
///   S[64, keys] = Q[64, 576] · K[keys, 576]ᵀ of block g by warpgroup g, both from shared memory
///   online softmax in base 2, fp32, a quad of lanes per row; block 1 goes on where block 0 is
///   O[64, 256g … 256g+255] += P[64, keys] · K[keys, the same columns] of both by warpgroup g:
///     its own block's P from registers, the other's from shared memory
/// Quantised rows: fp16 times powers of two, of which scores get rid before the rope part, bf16, is
/// added, and weights take the keys' on.
/// One CTA per SM that stays: a warpgroup that gathers (two that copy and decode) and two that
/// compute. Keys are filled and freed by quarters of a pair; the next item's keys and queries come
/// in during the last products and the epilogue of the one before.
template <CacheFormat kFormat, bool kPacked>
__global__ void __launch_bounds__(PrefillBlock<kFormat>::kThreads, 1)
    sparse_mqa_prefill_kernel(const __grid_constant__ CUtensorMap q_map,
                              const __grid_constant__ PrefillArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = PrefillShape;
  using Block = PrefillBlock<kFormat>;
  constexpr bool kQuantised = Block::kQuantised;
  extern __shared__ std::byte prefill_tiles[];
  __shared__ PrefillShared shared;
  const PrefillAddresses<kFormat> at{(ptx::shared_address(prefill_tiles) + Shape::kAlignment - 1) /
                                         Shape::kAlignment * Shape::kAlignment,
                                     ptx::shared_address(&shared)};
  if (threadIdx.x == 0) {
    constexpr int kWarps = Shape::kGroupThreads / 32;
    ptx::mbarrier_init(&shared.full_q, 1);
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
      // Every thread's copies of bf16 rows. Every warp's stores: what is decoded, and where a block
      // begins, what belongs to it, by the lanes that write it; likewise those that read it.
      const bool begins = quarter == kFirstLow || quarter == kSecondHigh;
      const bool copies = !kQuantised, stores = kQuantised || begins;
      const int of_tokens = kPacked ? PickUnion::kMaxTokens : 1;
      const int writers = begins ? of_tokens : 1;
      const int readers = !begins ? 1 : kQuantised ? 32 : of_tokens;
      ptx::mbarrier_init(&shared.full[quarter], (copies ? Shape::kGroupThreads : 0) +
                                                    (stores ? Block::kFillers * writers : 0));
      ptx::mbarrier_init(&shared.empty[quarter], kWarps * readers);
    }
    ptx::mbarrier_init(&shared.scored[0], kWarps);
    ptx::mbarrier_init(&shared.scored[1], kWarps);
    ptx::mbarrier_init(&shared.weighed[0], Shape::kGroupThreads / 4);
    ptx::mbarrier_init(&shared.weighed[1], Shape::kGroupThreads / 4);
    if constexpr (kQuantised)
      for (int warp = 0; warp < Block::kFillers; ++warp) {
        // The copying warp's lanes and those of it that wrote `picked`; those that read it.
        ptx::mbarrier_init(&shared.stored[warp], 32 + PickUnion::kMaxTokens);
        ptx::mbarrier_init(&shared.taken[warp], PickUnion::kMaxTokens);
      }
    ptx::mbarrier_init(&shared.summed, 2 * Shape::kGroupThreads / 4);
    ptx::mbarrier_init(&shared.ready_q, 2 * Shape::kGroupThreads);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  // From one lane, so that the compiler takes what follows from it as uniform.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / Shape::kGroupThreads, 0);
  if (group < Block::kProducerGroups) {
    ptx::release_registers<Block::kProducerRegisters>();
    if constexpr (kQuantised)
      quantised_rows<kPacked>(args, shared, at);
    else
      copy_rows<kPacked>(args, shared, at);
  } else {
    ptx::claim_registers<Block::kConsumerRegisters>();
    if (group == Block::kProducerGroups)
      consume<0, kFormat, kPacked>(q_map, args, shared, at);
    else
      consume<1, kFormat, kPacked>(q_map, args, shared, at);
  }
#endif
}

}  // namespace sparse_mla::sm90
