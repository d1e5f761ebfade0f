/// `sparse_mqa` over fp8_ds_mla rows, prefill and decode: rows stay in shared memory as they are
/// stored, and the warps that multiply decode them on the way into the tensor cores, keys and
/// values as operand a from registers. So a tile's rows are columns of the products.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda.h>

#include "kernels/common/finished_row.h"
#include "kernels/cuda/write_lse.cuh"
#include "kernels/sm90/scaled_f16.cuh"
#include "kernels/sm90/sparse_mqa_launch.cuh"
#include "kernels/sm90/sparse_mqa_quantised/queries.cuh"
#include "kernels/sm90/sparse_mqa_quantised/rows.cuh"
#include "kernels/sm90/sparse_mqa_quantised/tile.cuh"
#include "kernels/sm90/sparse_mqa_softmax.cuh"
#include "kernels/sm90/wgmma.cuh"
#include "sparse_mla/attention.h"

namespace sparse_mla::sm90 {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/// d (+)= a · b of kColumns = kNumbers · 2 columns.
template <bool kAdds, bool kNMajor, class Product, int kNumbers>
__device__ __forceinline__ void multiply(float (&d)[kNumbers], const std::uint32_t (&a)[4],
                                         std::uint32_t b) {
  if constexpr (kNumbers == 32)
    ptx::wgmma_m64n64k16<kAdds, kNMajor, Product>(d, a, b);
  else
    ptx::wgmma_m64n16k16<kAdds, kNMajor, Product>(d, a, b);
}

/// A consumer warpgroup.
template <bool kPacked, bool kShared, int kColumns>
__device__ __forceinline__ void consume_quantised(int group, const CUtensorMap& q_map,
                                                  const PrefillArguments& args,
                                                  QuantisedShared<kColumns>& shared,
                                                  const QuantisedAddresses<kColumns>& at) {
  using Shape = PrefillShape;
  using Tile = QuantisedTile;
  using Memory = QuantisedMemory<kColumns>;
  using Stage = StageWalk<Memory::kStages>;
  constexpr int kColumnGroups = kColumns / 8;  // of the tile's rows, which are columns here
  constexpr int kNumbers = 4 * kColumnGroups;  // of a product that a thread has
  // Of sums of weights a lane keeps so many groups' pairs of rows.
  constexpr int kSumGroups = kColumnGroups == 8 ? 2 : 1;
  constexpr int kTiles = 4;  // of 64 value columns
  const auto group_thread = static_cast<int>(threadIdx.x % Shape::kGroupThreads);
  const int shift = kPacked ? args.picks.shift : 0;
  const SparseMqaCall& call = args.call;
  const float scale = args.logit_scale;

  const auto uniform = [](std::uint32_t x) { return __shfl_sync(~0u, x, 0); };
  const std::uint32_t q = uniform(ptx::swizzled_operand(at.q()));
  const std::uint32_t weights[2] = {uniform(ptx::swizzled_operand(at.weights(0))),
                                    uniform(ptx::swizzled_operand(at.weights(1)))};
  // Of ldmatrix: lane l names row l % 16, 16 bytes number l / 16.
  const auto lane_row = [&](int lane, int stage) {
    return at.rows(stage) + lane % 16 * Tile::kRowBytes + lane / 16 * 16;
  };
  // One lane of a warp that all enter: its addresses are uniform then.
  const auto load_q = [&](int item) {
    if (uniform(static_cast<std::uint32_t>(anew(group_thread) / 32)) == 0 && ptx::elect_one())
      load_queries<kPacked, kColumns>(q_map, args, item, at.q(), at.full_q());
  };
  // Two rows of the tile that belong together, of the eight from 8n on.
  const auto load_two = [&](const float* of_rows, int n, int pair) {
    return *reinterpret_cast<const float2*>(of_rows + 8 * n + pair);
  };
  const int stride = step_items<kShared>(args);
  if (group == 1) load_q(first_item<kShared>(args));

  float out[kTiles][kNumbers], score[kNumbers], sum[2 * kSumGroups];
  // Products are issued in twos; one two is under way while the next one's are decoded. (Four at a
  // time take 16 registers more, one at a time as many waits again: both are slower.)
  std::uint32_t operand[2][2][4];
  // The group's block of a pair: its stage, and its number among all of the CTA's.
  Stage own;
  if (group == 1) own.next();
  auto own_block = static_cast<std::uint32_t>(group);
  std::uint32_t q_use = 0;
  for (int item = first_item<kShared>(args); item < args.items; item += stride, ++q_use) {
    const int picks = picks_of<kPacked>(args, item);
    const int pairs = kShared ? Share(picks, args.splits).pairs() : pairs_of(picks);
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) out[m][i] = 0;
#pragma unroll
    for (float& of_row : sum) of_row = 0;

    float divisor = 0;           // of the warp's keys
    bool raised_by_own = false;  // the own block's scores have raised the reference
    // S = K · Q of the block at that stage; keys scaled on the way.
    const auto find_scores = [&](int stage) {
      const int thread = anew(group_thread), lane = thread & 31, warp = thread >> 5;
      const int key_row = lane / 4;
      const std::uint32_t rows = lane_row(lane, stage) + 16 * warp * Tile::kRowBytes;
      constexpr int kChunks = Shape::kLatent / 32, kRaw = 4;
      std::uint32_t raw[kRaw][4];  // of chunks of 32 columns, three ahead
      const auto load_codes = [&](int chunk) {
        if (chunk < kChunks) ptx::ldmatrix_x4(raw[chunk % kRaw], rows + 32 * chunk);
      };
#pragma unroll
      for (int chunk = 0; chunk < kRaw - 1; ++chunk) load_codes(chunk);
      std::uint32_t factor[2];  // of both keys, for 128 columns
      const std::uint32_t at_scales =
          at.rows(stage) + (16 * warp + key_row) * Tile::kRowBytes + Tile::kScales;
      // Of the thread's key h, columns 128 · part on.
      const auto load_scale = [&](int h, int part) {
        return ptx::load_shared_float(at_scales + 8 * h * Tile::kRowBytes + 4 * part);
      };
      float next_scale[2], lane_scale[2];
      float scales[2], most = 0;  // of the first 128 columns; of all and the warp's keys
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 bits = ptx::load_shared_16(at_scales + 8 * h * Tile::kRowBytes);
        scales[h] = __uint_as_float(bits.x);
        most = fmaxf(fmaxf(most, fmaxf(fabsf(scales[h]), fabsf(__uint_as_float(bits.y)))),
                     fmaxf(fabsf(__uint_as_float(bits.z)), fabsf(__uint_as_float(bits.w))));
      }
      // Numbers that are not negative are in the order of their bits.
      most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
      constexpr float kLargestE4m3 = 448;
      divisor = PowerOfTwo::that_fits(kLargestE4m3 * most).value();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float divided = scales[h] * inverse_of(divisor);
        factor[h] = ptx::pack_f16(divided, divided);
      }
      std::uint32_t rope[4][4];
      ptx::pin(score);
#pragma unroll
      for (int slab = 0; slab < Shape::kRopeSlab; ++slab) {
        if (slab + 2 == Shape::kRopeSlab) {
#pragma unroll
          for (int step = 0; step < 4; ++step)
            ptx::ldmatrix_x4(rope[step], rows + Tile::kRopePart + 32 * step);
        }
        if (slab % 2 == 0 && slab > 0)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float divided = next_scale[h] * inverse_of(divisor);
            factor[h] = ptx::pack_f16(divided, divided);
          }
        if (slab % 2 == 1 && slab + 1 < Shape::kRopeSlab)
#pragma unroll
          for (int h = 0; h < 2; ++h) next_scale[h] = load_scale(h, slab / 2 + 1);
        // What values are multiplied by, while products are under way.
        const int part = lane & 3;
        if (slab == 2)
#pragma unroll
          for (int h = 0; h < 2; ++h) lane_scale[h] = load_scale(h, part);
        if (slab == 3) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            shared.value_factors[stage][part][16 * (key_row / 2) + 4 * warp + 2 * h + key_row % 2] =
                __float2half_rn(lane_scale[h] * inverse_of(divisor));
          }
        }
#pragma unroll
        for (int two = 0; two < 2; ++two) {
          const int chunk = 2 * slab + two;
          std::uint32_t(&a)[2][4] = operand[two];
          load_codes(chunk + kRaw - 1);
          ptx::wgmma_wait<1>();
#pragma unroll
          for (int i = 0; i < 4; ++i)
            scale_e4m3x4(raw[chunk % kRaw][i], factor[i % 2], a[i / 2][i % 2], a[i / 2][i % 2 + 2]);
          ptx::wgmma_fence();
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const std::uint32_t b =
                ptx::advance(q, slab * Memory::kQuerySlabBytes + (2 * two + i) * 32);
            if (chunk == 0 && i == 0)
              multiply<false, false, ptx::F16Product>(score, a[i], b);
            else
              multiply<true, false, ptx::F16Product>(score, a[i], b);
          }
          ptx::wgmma_commit();
        }
      }
      // The rope part, bf16, divided as the rest is.
      const std::uint32_t inverse = ptx::pack_bf16(inverse_of(divisor), inverse_of(divisor));
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) rope[step][i] = ptx::multiply_bf16(rope[step][i], inverse);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        multiply<true, false, ptx::Bf16Product>(
            score, rope[step],
            ptx::advance(q, Shape::kRopeSlab * Memory::kQuerySlabBytes + step * 32));
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(score);
    };
    // The first of the groups that the lane keeps sums of.
    const auto sum_group = [](int lane) { return kColumnGroups == 8 ? 2 * (lane / 8) : lane / 16; };
    const auto multiply_sums = [&](const float* factors) {
      const int lane = anew(group_thread) % 32, pair = 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < kSumGroups; ++i) {
        const float2 factor = load_two(factors, sum_group(lane) + i, pair);
        sum[2 * i] *= factor.x;
        sum[2 * i + 1] *= factor.y;
      }
    };
    const auto multiply_out = [&](const float* factors) {
      const int pair = 2 * (anew(group_thread) % 4);
#pragma unroll
      for (int n = 0; n < kColumnGroups; ++n) {
        const float2 factor = load_two(factors, n, pair);
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            out[m][4 * n + 2 * h] *= factor.x;
            out[m][4 * n + 2 * h + 1] *= factor.y;
          }
      }
    };
    const int turn = static_cast<int>(q_use % 2);
    // Weights, by the inverse of what the keys were divided by, to the thread's sums: over its two
    // keys, a half of the lanes' keys, then a half of those. Of eight pairs of rows two are left to
    // a lane.
    const auto add_to_sums = [&] {
      const int lane = anew(group_thread) % 32;
      const bool upper = lane / 16 != 0, odd = lane / 8 % 2 != 0;
      float two[2 * kColumnGroups];
#pragma unroll
      for (int i = 0; i < 2 * kColumnGroups; ++i) {
        const int at_score = 4 * (i / 2) + i % 2;
        two[i] = score[at_score] + score[at_score + 2];
      }
#pragma unroll
      for (int i = 0; i < kColumnGroups; ++i) {
        const float other = __shfl_xor_sync(~0u, upper ? two[i] : two[i + kColumnGroups], 16);
        two[i] = (upper ? two[i + kColumnGroups] : two[i]) + other;
      }
#pragma unroll
      for (int i = 0; i < 2 * kSumGroups; ++i) {
        float left = two[i];
        if constexpr (kColumnGroups == 8) {
          const float other = __shfl_xor_sync(~0u, odd ? left : two[i + 4], 8);
          left = (odd ? two[i + 4] : left) + other;
        } else {
          left += __shfl_xor_sync(~0u, left, 8);
        }
        sum[i] = fmaf(left, inverse_of(divisor), sum[i]);
      }
    };
    // Scores to weights of the own block, for both groups, relative to what the block before left.
    const auto weigh = [&](bool is_first, bool last) {
      const int thread = anew(group_thread), lane = thread & 31, warp = thread >> 5;
      const int key_row = lane >> 2, pair = 2 * (lane & 3);
      bool valid[2][2];
      const float log2 = static_cast<float>(static_cast<int>(__float_as_uint(divisor) >> 23) - 127);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::uint32_t tokens = shared.tokens[own.stage][16 * warp + key_row + 8 * h];
#pragma unroll
        for (int e = 0; e < 2; ++e)
          valid[h][e] = (tokens >> ((pair + e) & ((1 << shift) - 1)) & 1) != 0;
      }
      // To base-2 logarithms of weights · what the keys were divided by: weights times divided
      // keys are right then.
#pragma unroll
      for (int n = 0; n < kColumnGroups; ++n) {
        const float2 base = load_two(shared.base[turn], n, pair);
        const float2 query = load_two(shared.query_factor, n, pair);
        const float2 factor = {divisor * query.x, divisor * query.y};
        const float2 offset = {log2 - base.x, log2 - base.y};
#pragma unroll
        for (int i = 4 * n; i < 4 * n + 4; i += 2) {
          score[i] = fmaf(score[i], factor.x, offset.x);
          score[i + 1] = fmaf(score[i + 1], factor.y, offset.y);
        }
      }
      if (!(valid[0][0] && valid[0][1] && valid[1][0] && valid[1][1])) {
#pragma unroll
        for (int i = 0; i < kNumbers; ++i)
          if (!valid[i / 2 % 2][i % 2]) score[i] = -HUGE_VALF;
      }
      float tops[4] = {score[0], score[1], score[2], score[3]};
#pragma unroll
      for (int i = 4; i < kNumbers; ++i) tops[i % 4] = fmaxf(tops[i % 4], score[i]);
      const float most = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
      const bool raises = ptx::named_barrier_any(kFirstGroup + group, Shape::kGroupThreads,
                                                 most > kSlack || shared.incomplete[turn] != 0);
      if (group == 1 && last) load_q(item + stride);
      if (raises) {
        // Of the warp's keys: over the thread's two, then over half of the lanes three times, of
        // half of the rows each. Of eight pairs of rows one is left to a lane.
        float tops_of_two[2 * kColumnGroups];
#pragma unroll
        for (int i = 0; i < 2 * kColumnGroups; ++i) {
          const int at_score = 4 * (i / 2) + i % 2;
          tops_of_two[i] = fmaxf(score[at_score], score[at_score + 2]);
        }
#pragma unroll
        for (int halved = 0; halved < 3; ++halved) {
          const int left = kColumnGroups >> halved, apart = 16 >> halved;
          const bool upper = (lane & apart) != 0;
#pragma unroll
          for (int i = 0; i < kColumnGroups; ++i) {
            if (i >= left || left < 2) continue;
            const float other =
                __shfl_xor_sync(~0u, upper ? tops_of_two[i] : tops_of_two[i + left], apart);
            tops_of_two[i] = fmaxf(upper ? tops_of_two[i + left] : tops_of_two[i], other);
          }
#pragma unroll
          for (int i = 0; i < 2 && left < 2; ++i)  // one pair is left: of all lanes
            tops_of_two[i] = fmaxf(tops_of_two[i], __shfl_xor_sync(~0u, tops_of_two[i], apart));
        }
        float(&tops_of_group)[4][Shape::kRows] = shared.tops[group];
        const int row_of_lane =
            kColumnGroups == 8 ? (lane >> 4 & 1) * 32 + (lane >> 3 & 1) * 16 + (lane >> 2 & 1) * 8
                               : lane / 16 * 8;
        if (kColumnGroups == 8 || (lane & 12) == 0)
          *reinterpret_cast<float2*>(&tops_of_group[warp][row_of_lane + pair]) = {tops_of_two[0],
                                                                                  tops_of_two[1]};
        ptx::named_barrier(kFirstGroup + group, Shape::kGroupThreads);
        // A thread to a row. What scores are moved by goes to where maxima were.
        bool incomplete = false;
        if (thread < kColumns) {
          float top = tops_of_group[0][thread];
#pragma unroll
          for (int w = 1; w < 4; ++w) top = fmaxf(top, tops_of_group[w][thread]);
          const float before = shared.reference[turn][thread], base = shared.base[turn][thread];
          top += base;
          const float now = top > before + kSlack ? top : before;
          incomplete = now == -HUGE_VALF;
          tops_of_group[1][thread] = base - base_of(now);
          shared.reference[turn][thread] = now;
          shared.base[turn][thread] = base_of(now);
          shared.factor[group][thread] = rescaling(before, now);
        }
        incomplete = ptx::named_barrier_any(kFirstGroup + group, Shape::kGroupThreads, incomplete);
#pragma unroll
        for (int n = 0; n < kColumnGroups; ++n) {
          const float2 back = load_two(tops_of_group[1], n, pair);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            score[4 * n + 2 * h] += back.x;
            score[4 * n + 2 * h + 1] += back.y;
          }
        }
        if (thread == 0) shared.incomplete[turn] = incomplete;
        multiply_sums(shared.factor[group]);
      }
      // An item's first block has no sums to multiply.
      raised_by_own = raises && !is_first;
      if (thread == 0) shared.raised[group] = raised_by_own;
      // Of stmatrix: lane l names row l % 16 of the warp's, chunk l / 16 of two.
      const std::uint32_t to = at.weights(group) + (16 * warp + lane % 16) * 128;
#pragma unroll
      for (int two = 0; two < kColumnGroups; two += 2) {
        std::uint32_t packed[4];
#pragma unroll
        for (int n = two; n < two + 2; ++n) {
#pragma unroll
          for (int i = 4 * n; i < 4 * n + 4; ++i) score[i] = ptx::ex2(score[i]);
#pragma unroll
          for (int h = 0; h < 2; ++h)
            packed[2 * (n - two) + h] =
                ptx::pack_f16(score[4 * n + 2 * h], score[4 * n + 2 * h + 1]);
        }
        ptx::stmatrix_x4(to + (((two + lane / 16) ^ lane % 8) << 4), packed);
      }
      ptx::fence_shared_to_async();
      ptx::block_mbarrier_arrive(at.weighed(group));
      add_to_sums();
    };
    // O += V · P of a block, once its weights are there.
    const auto add_values = [&](const Stage& from, std::uint32_t block) {
      constexpr int kSteps = Tile::kKeys / 16;
      const auto parity = static_cast<int>(block % 2);
      const int thread = anew(group_thread), lane = thread & 31, warp = thread >> 5;
      const std::uint32_t columns =
          lane_row(lane, from.stage) + group * Shape::kHalfColumns + 64 * warp;
      const __half* const factors =
          &shared.value_factors[from.stage][2 * group + warp / 2][16 * (lane & 3)];
      std::uint32_t raw[2][2][4];  // of two steps by turns
      uint2 factor[2];
      const auto load_codes = [&](int step) {
        ptx::ldmatrix_x4_transposed(raw[step % 2][0], columns + 16 * step * Tile::kRowBytes);
        ptx::ldmatrix_x4_transposed(raw[step % 2][1], columns + 16 * step * Tile::kRowBytes + 32);
      };
      const auto load_factors = [&](int step) {
        factor[step % 2] = *reinterpret_cast<const uint2*>(factors + 4 * step);
      };
      // Of the own block all is known but whether every warp's weights are there: its rows have
      // been waited for, and the vote lies behind its value_factors.
      const bool is_own = parity == group;
      bool raised = raised_by_own;
      if (!is_own) {
        ptx::block_mbarrier_wait(at.weighed(parity), block / 2 % 2);
        raised = shared.raised[parity] != 0;
        ptx::block_mbarrier_wait(at.full(from.stage), from.parity);
      }
      load_codes(0);
      load_factors(0);
      const std::uint32_t b = parity == 0 ? weights[0] : weights[1];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step + 1 < kSteps) {
          load_codes(step + 1);
          load_factors(step + 1);
        }
#pragma unroll
        for (int two = 0; two < kTiles / 2; ++two) {
          std::uint32_t(&a)[2][4] = operand[two];
          if (step > 0 || two > 0) ptx::wgmma_wait<1>();
#pragma unroll
          for (int i = 0; i < 4; ++i)
            scale_e4m3x4(__byte_perm(raw[step % 2][two][i], 0, 0x3120),
                         i % 2 == 0 ? factor[step % 2].x : factor[step % 2].y,
                         a[i / 2][2 * (i % 2)], a[i / 2][2 * (i % 2) + 1]);
          if (step % 2 == 1 && two == 1) ptx::block_mbarrier_arrive(at.empty(from.stage, step / 2));
          if (step == 0 && two == 0) {
            if (is_own) ptx::block_mbarrier_wait(at.weighed(parity), block / 2 % 2);
            if (raised) {
              if (!is_own) multiply_sums(shared.factor[parity]);
              multiply_out(shared.factor[parity]);
            }
          }
          ptx::wgmma_fence();
#pragma unroll
          for (int i = 0; i < 2; ++i)
            multiply<true, true, ptx::F16Product>(out[2 * two + i], a[i],
                                                  ptx::advance(b, step * 16 * 128));
          ptx::wgmma_commit();
        }
      }
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int m = 0; m < kTiles; ++m) ptx::pin(out[m]);
    };

    ptx::block_mbarrier_wait(at.full_q(), q_use % 2);
    divide_queries<kColumns>(at.q(), group * Shape::kGroupThreads + anew(group_thread), scale,
                             shared.query_factor);
    if (const int row = anew(group_thread); group == 0 && row < kColumns) {
      shared.reference[turn][row] = -HUGE_VALF;
      shared.base[turn][row] = base_of(-HUGE_VALF);
      if (row == 0) shared.incomplete[turn] = 1;
    }
    ptx::fence_shared_to_async();
    ptx::block_mbarrier_arrive(at.ready_q());
    ptx::block_mbarrier_wait(at.ready_q(), q_use % 2);
    for (int number = 0; number < pairs; ++number) {
      ptx::block_mbarrier_wait(at.full(own.stage), own.parity);
      find_scores(own.stage);
      if (kShared && anew(group_thread) % 32 == 0) {  // no register is left for it
        float& largest = shared.largest_divisor[group][anew(group_thread) / 32];
        largest = number == 0 ? divisor : fmaxf(largest, divisor);
      }
      // Values of the block before, weights of the own one, its values; and of group 0, the values
      // of the item's last block.
      const bool is_first = group == 0 && number == 0, last = number == pairs - 1;
      Stage from = is_first ? own : own.previous();
      const int end = group == 0 && last ? 3 : 2;
#pragma unroll 1
      for (int i = is_first ? 1 : 0; i < end; ++i) {
        if (i == 1) weigh(is_first, last);
        add_values(from, own_block - 1 + static_cast<std::uint32_t>(i));
        from.next();
      }
      own.next();
      own.next();
      own_block += 2;
    }

    const int thread = anew(group_thread), lane = thread & 31, warp = thread >> 5;
    const int key_row = lane >> 2, pair = 2 * (lane & 3);
    if (kShared && pairs == 0 && lane == 0) shared.largest_divisor[group][warp] = 0;
    // By items in turns, so that a group may be an item ahead of the other's reading.
    float(&sums)[2][4][Shape::kRows] = shared.sum[q_use % 2];
#pragma unroll
    for (int i = 0; i < kSumGroups; ++i) {
      float2 two = {sum[2 * i], sum[2 * i + 1]};
      two.x += __shfl_xor_sync(~0u, two.x, 4);
      two.y += __shfl_xor_sync(~0u, two.y, 4);
      if (key_row % 2 == 0 && (kColumnGroups == 8 || (lane & 8) == 0))
        *reinterpret_cast<float2*>(&sums[group][warp][8 * (sum_group(lane) + i) + pair]) = two;
    }
    if (key_row % 2 == 0) ptx::block_mbarrier_arrive(at.summed());
    ptx::block_mbarrier_wait(at.summed(), q_use % 2);
    // Both groups have waited for this item's queries.
    if (group == 1 && pairs == 0) load_q(item + stride);
    if constexpr (kShared) {
      const PrefillItem to = item_at<false>(args, item);
      const int rows_of_item = min(kColumns, args.num_heads - to.head);
      if (group == 0 && thread < kColumns) {
        float total = 0, scale_of_part = 0;
#pragma unroll
        for (int part = 0; part < 8; ++part) {
          total += sums[part / 4][part % 4][thread];
          scale_of_part = fmaxf(scale_of_part, shared.largest_divisor[part / 4][part % 4]);
        }
        shared.part_sum[thread] = total;
        shared.part_scale[thread] = scale_of_part;
        shared.share[0][thread] = total == 0.0f ? 0.0f : inverse_of(scale_of_part) / total;
      }
      // And both groups are done with weights and rows.
      ptx::named_barrier(kBothGroups, 2 * Shape::kGroupThreads);
      const int column = group * Shape::kHalfColumns + 64 * warp + 2 * key_row;
#pragma unroll
      for (int n = 0; n < kColumnGroups; ++n) {
        if (8 * n >= rows_of_item) break;
        const float2 share = load_two(shared.share[0], n, pair);
        const std::uint32_t row = at.part() + (8 * n + pair) * kPartRowBytes + 2 * column;
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const float* const four = &out[m][4 * n];
          ptx::store_shared_4(row + 32 * m, ptx::pack_f16(four[0] * share.x, four[2] * share.x));
          ptx::store_shared_4(row + kPartRowBytes + 32 * m,
                              ptx::pack_f16(four[1] * share.y, four[3] * share.y));
        }
      }
      if (group == 0 && thread < kColumns) {
        const std::uint32_t bits[4] = {__float_as_uint(shared.reference[turn][thread]),
                                       __float_as_uint(shared.part_sum[thread]),
                                       __float_as_uint(shared.part_scale[thread]), 0};
        ptx::store_shared_16(at.part() + (thread + 1) * kPartRowBytes - 16, bits);
      }
      ptx::fence_shared_to_async();  // rows will be copied to where the part was
      ptx::cluster_arrive();         // all parts are there
      ptx::cluster_wait();
      join_parts(call, args.splits, at.part(), group * Shape::kGroupThreads + thread,
                 {static_cast<int>(to.token), to.head, rows_of_item});
      ptx::cluster_wait();
      continue;
    }
    if (thread < kColumns) {
      const int row = thread;
      float total = 0;
#pragma unroll
      for (int part = 0; part < 8; ++part) total += sums[part / 4][part % 4][row];
      const PrefillItem to_item = item_at<kPacked>(args, item);
      const std::int64_t token = to_item.token + (row & ((1 << shift) - 1));
      const int head = to_item.head + (row >> shift);
      const bool writes = head < args.num_heads && (!kPacked || token < call.out.extent(0));
      const bool empty = total == 0.0f;
      const float lse = empty ? -HUGE_VALF : (shared.reference[turn][row] + log2f(total)) * kLn2;
      float share = empty ? 0.0f : 1.0f / total;
      if (writes && call.sink.data_handle() != nullptr) share *= sink_factor(call.sink(head), lse);
      if (group == 0 && writes) cuda::write_lse(call, token, head, lse);
      shared.share[group][row] = share;
      shared.to[group][row] = writes ? address(call.out, token, head, 0) : nullptr;
    }
    ptx::named_barrier(kFirstGroup + group, Shape::kGroupThreads);
    // The lane's eight columns of 64: of tile number key_row % 4 the half key_row / 4.
    const int column =
        group * Shape::kHalfColumns + 64 * warp + 16 * (key_row % 4) + 8 * (key_row / 4);
#pragma unroll
    for (int n = 0; n < kColumnGroups; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * n + pair + e;
        const float share = shared.share[group][row];
        bfloat16* const to = shared.to[group][row];
        std::uint32_t packed[kTiles];
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
          packed[m] = share == 0.0f ? 0u
                                    : ptx::pack_bf16(out[m][4 * n + e] * share,
                                                     out[m][4 * n + 2 + e] * share);
        transpose_four<4>(packed);
        if (to != nullptr)
          __stcs(reinterpret_cast<uint4*>(to + column),
                 make_uint4(packed[0], packed[1], packed[2], packed[3]));
      }
  }
}

#endif

/// The tile product of one work item, per pair of blocks of 64 keys:
///   S[64 keys, 64 rows] = K[64 keys, 576] · Q[64 rows, 576]ᵀ of block g by warpgroup g:
///     K decoded to fp16 in registers, divided by a power of two that 16 keys share, Q from shared
///     memory
///   online softmax in base 2, fp32, a row of the tile per column; a row's reference is raised only
///     when a score exceeds it by kSlack, which all warps of the group vote on; a block goes on
///     where the block before is
///   O[512, 64 rows] += V[512, 64 keys] · P[64 keys, 64 rows] of both blocks, value columns
///     256g … 256g+255 by warpgroup g: V decoded in registers, P from shared memory
/// A warpgroup's turn: S of its own block, O of the block before, which the other one has weighed
/// meanwhile, P of the own block, O of the own block. So the groups are half a turn apart, and
/// neither waits for the other where it goes well.
/// One CTA per SM that stays: a warpgroup that asks for rows, one bulk copy each, and two that
/// compute. A block's halves are freed as soon as they are in registers.
/// kPacked: a tile holds the heads of several tokens. kShared: the CTAs of a cluster take even
/// shares of an item's blocks and join their parts (sparse_mqa_parts.cuh).
/// kColumns: the tile's 64 rows, or of tokens of 16 heads or fewer its first 16.
template <bool kPacked, bool kShared, int kColumns>
__global__ void __launch_bounds__(QuantisedTile::kThreads, 1)
    quantised_mqa_kernel(const __grid_constant__ CUtensorMap q_map,
                         const __grid_constant__ PrefillArguments args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = PrefillShape;
  using Tile = QuantisedTile;
  extern __shared__ std::byte quantised_tiles[];
  __shared__ QuantisedShared<kColumns> shared;
  static_assert(sizeof(shared) <= Tile::kDeclaredBytes);
  const QuantisedAddresses<kColumns> at{
      (ptx::shared_address(quantised_tiles) + Shape::kAlignment - 1) / Shape::kAlignment *
          Shape::kAlignment,
      ptx::shared_address(&shared)};
  if constexpr (kShared) {
    // A cluster's first picks are on their way while barriers are made.
    const int item = first_item<kShared>(args);
    const Share share(picks_of<kPacked>(args, item), args.splits);
    const int pick = share.begin + static_cast<int>(threadIdx.x);
    if (threadIdx.x < PrefillShape::kPairKeys && pick < share.end)
      ptx::prefetch_l2(&args.call.slots(item_at<kPacked>(args, item).token, pick));
  }
  if (threadIdx.x == 0) {
    constexpr int kWarps = Shape::kGroupThreads / 32;
    ptx::mbarrier_init(&shared.full_q, 1);
    ptx::mbarrier_init(&shared.ready_q, 2 * Shape::kGroupThreads);
    ptx::mbarrier_init(&shared.summed, 2 * kWarps * 16);
    for (int stage = 0; stage < QuantisedMemory<kColumns>::kStages; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], Tile::kKeys + 2 * kWarps);
      for (int half = 0; half < 2; ++half)
        ptx::mbarrier_init(&shared.empty[stage][half], 2 * Shape::kGroupThreads);
    }
    ptx::mbarrier_init(&shared.weighed[0], Shape::kGroupThreads);
    ptx::mbarrier_init(&shared.weighed[1], Shape::kGroupThreads);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  // From one lane, so that the compiler takes what follows from it as uniform.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / Shape::kGroupThreads, 0);
  if (group == 0) {
    ptx::release_registers<Tile::kProducerRegisters>();
    copy_quantised_rows<kPacked, kShared, kColumns>(args, shared, at);
  } else {
    ptx::claim_registers<Tile::kConsumerRegisters>();
    consume_quantised<kPacked, kShared, kColumns>(group - 1, q_map, args, shared, at);
  }
#endif
}

template <int kColumns>
inline constexpr CtaSize kQuantisedCta{QuantisedTile::kThreads, QuantisedMemory<kColumns>::kBytes};

}  // namespace sparse_mla::sm90
