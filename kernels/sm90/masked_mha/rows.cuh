/// What a consumer warpgroup of masked_mha.cuh does with its query rows: scores, masks, softmax,
/// output.
#pragma once

#include <cstdint>

#include "kernels/sm90/masked_mha/work.cuh"
#include "kernels/sm90/wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace sparse_mla::sm90 {

/// `x`, the same in all lanes, in a way that tells the compiler so: descriptors are then computed
/// in uniform registers.
__device__ inline std::uint32_t uniform(std::uint32_t x) { return __shfl_sync(~0u, x, 0); }

/// What `sum`, which is not negative, is made from stays in front of what follows: else the
/// compiler computes the exponentials where their results are needed, behind the wait for the
/// product that they are to run beside. A branch that is never taken, which only `sum` tells.
__device__ __forceinline__ void stay_in_front(float sum) {
  if (__any_sync(~0u, sum < 0)) asm volatile("nanosleep.u32 0;");
}

/// What a thread knows of its rows g and g + 8 of its warp's sixteen.
struct RowSums {
  float maximum[2];  // of the logits so far, times log2 e; finite from the start
  float sum[2];      // the thread's share of the weights' sum
};

/// A warpgroup's 64 rows of Q as the A operand of S, 16 columns a step: the first steps' in
/// registers, read once per work item, the others in shared memory.
struct QueryRows {
  static constexpr int kSteps = MhaShape::kQk / 16, kHeld = MhaShape::kHeldSteps;
  std::uint32_t held[kHeld][4];
  std::uint32_t operand;

  /// Reads the held steps. `rows`: shared address of the warp's first row in the first slab.
  __device__ void load(std::uint32_t rows) {
    const int lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
    for (int s = 0; s < kHeld; ++s) {
      const int chunk = s % 4 * 2 + lane / 16;  // of 16 bytes, in its row of the slab
      ptx::ldmatrix_x4(held[s],
                       rows + s / 4 * MhaShape::kSlabBytes + row * 128 + ((chunk ^ row % 8) << 4));
    }
  }
};

/// S = Q · Kᵀ for a warpgroup's 64 rows, started.
__device__ __forceinline__ void start_scores(float (&score)[64], const QueryRows& q,
                                             std::uint32_t k) {
#pragma unroll
  for (int s = 0; s < QueryRows::kSteps; ++s) {
    const int bytes = s / 4 * MhaShape::kSlabBytes + s % 4 * 32;
    const std::uint32_t b = ptx::advance(k, bytes);
    if (s < QueryRows::kHeld) {
      const std::uint32_t(&a)[4] = q.held[s % QueryRows::kHeld];
      if (s == 0)
        ptx::wgmma_m64n128k16<false, false>(score, a[0], a[1], a[2], a[3], b);
      else
        ptx::wgmma_m64n128k16<true, false>(score, a[0], a[1], a[2], a[3], b);
    } else {
      ptx::wgmma_m64n128k16(score, ptx::advance(q.operand, bytes), b);
    }
  }
  ptx::wgmma_commit();
}
/// O += P · V, started.
__device__ __forceinline__ void start_output(float (&out)[64], const std::uint32_t (&weights)[32],
                                             std::uint32_t v) {
#pragma unroll
  for (int s = 0; s < MhaShape::kKeys / 16; ++s)
    ptx::wgmma_m64n128k16<true, true>(out, weights[4 * s], weights[4 * s + 1], weights[4 * s + 2],
                                      weights[4 * s + 3], ptx::advance(v, s * 16 * 128));
  ptx::wgmma_commit();
}

/// Scores become weights; `factor`: what the sums so far are to be multiplied with.
__device__ __forceinline__ void weigh(float (&score)[64], RowSums& rows, float scale,
                                      float (&factor)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = score[2 * h];
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) top = fmaxf(top, score[4 * n + 2 * h + i]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float maximum = fmaxf(rows.maximum[h], top * scale);
    factor[h] = ptx::ex2(rows.maximum[h] - maximum);
    rows.maximum[h] = maximum;
    float sum[2] = {};
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = score[4 * n + 2 * h + i];
        x = ptx::ex2(fmaf(x, scale, -maximum));
        sum[i] += x;
      }
    rows.sum[h] = fmaf(rows.sum[h], factor[h], sum[0] + sum[1]);
  }
}
__device__ __forceinline__ void rescale(float (&out)[64], const float (&factor)[2]) {
  if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 64; ++i) out[i] *= factor[i / 2 % 2];
}
/// Weights as the A operand of O += P · V: two neighbouring accumulators, one register.
__device__ __forceinline__ void round_weights(const float (&score)[64],
                                              std::uint32_t (&weights)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) weights[i] = ptx::pack_bf16(score[2 * i], score[2 * i + 1]);
}

/// The mask's words that a lane brings for its quad: of a block the 32 keys from 32 · (lane % 4)
/// on, of rows g and g + 8.
class QuadMask {
 public:
  /// `row`: g's row of the member. Rows from `row_end` on are not read and count as selected.
  __device__ void start(const AttendArguments& args, const MhaItem& item, int row, int row_end) {
    const int quarter = threadIdx.x % 4;
    first_key_ = item.mask.first_key;
    end_ = item.keys.end - quarter * 32;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      words_[h] = row + 8 * h < row_end
                      ? args.mask_words + item.mask.word_offset +
                            std::int64_t{row + 8 * h} * item.mask.row_words + quarter
                      : nullptr;
  }
  /// Starts to read the words of the block at `key`.
  __device__ void fetch(int key) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      pair_[h][0] = pair_[h][1] = words_[h] == nullptr ? ~0u : 0u;
      if (words_[h] == nullptr || key >= end_) continue;
      const std::uint32_t* words = words_[h] + ((key - first_key_) >> 5);
      pair_[h][0] = __ldg(words);
      pair_[h][1] = __ldg(words + 1);
    }
  }
  /// Their bits, of row h, those past the end cleared.
  __device__ std::uint32_t bits(int h, int key) const {
    const std::uint32_t bits = __funnelshift_r(pair_[h][0], pair_[h][1], (key - first_key_) & 31);
    const int left = end_ - key;
    if (left >= 32 || words_[h] == nullptr) return bits;
    return left <= 0 ? 0u : bits & ((1u << left) - 1);
  }

 private:
  const std::uint32_t* words_[2];
  std::int32_t first_key_, end_;
  std::uint32_t pair_[2][2];
};

/// Scores that the mask's bits leave out become −inf.
__device__ __forceinline__ void hide_unselected(float (&score)[64], const QuadMask& mask, int key) {
  const int lane = threadIdx.x % 32;
  const std::uint32_t mine[2] = {mask.bits(0, key), mask.bits(1, key)};
  if (__all_sync(~0u, (mine[0] & mine[1]) == ~0u)) return;
#pragma unroll
  for (int w = 0; w < 4; ++w)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::uint32_t bits = __shfl_sync(~0u, mine[h], (lane & ~3) | w) >> lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if ((bits >> (8 * n + i) & 1) == 0) score[16 * w + 4 * n + 2 * h + i] = -HUGE_VALF;
    }
}
/// Scores of keys from `end[h]` on, counted from the block's first, become −inf in row h.
__device__ __forceinline__ void hide_behind(float (&score)[64], const int (&end)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int left = end[h] - static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (8 * n + i >= left) score[4 * n + 2 * h + i] = -HUGE_VALF;
  }
}

/// A warp's finished rows: to the piece's partials, or written to or merged into the running one.
__device__ __forceinline__ void finish(const AttendArguments& args, const AttendPlan& plan,
                                       const MhaItem& item, int row, int row_end, RowSums& rows,
                                       const float (&out)[64]) {
  using Shape = MhaShape;
  constexpr float kLn2 = 0.69314718055994531f, kInfinity = HUGE_VALF;
  const int lane = threadIdx.x % 32, pair = lane % 4;
  const int tile_row = row - item.work.item.row;
  const bool partial = item.work.item.slot >= 0;
  const std::int64_t part =
      partial
          ? (std::int64_t{item.work.item.slot} * args.num_heads + item.work.head) * Shape::kRows +
                tile_row
          : 0;
  const std::int64_t running_row = std::int64_t{item.member.packed_token} + row;
  float before[2];
  bool merges[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    merges[h] = !partial && row + 8 * h < row_end && running_row + 8 * h < args.merge_row_end;
    before[h] = merges[h] ? *address(args.lse, item.work.head, running_row + 8 * h) : -kInfinity;
  }
  __syncwarp();  // the quad has read it
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = rows.sum[h];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const bool empty = total == 0;
    const float inverse = empty ? 0.0f : 1.0f / total;
    const float lse = empty ? -kInfinity : rows.maximum[h] * kLn2 + logf(total);
    // A merged row that saw nothing stays as it is.
    const bool writes = row + 8 * h < row_end && !(merges[h] && empty);
    MergeWeights weights;
    weights.lse = lse;
    if (merges[h] && !empty) weights = merge_weights(before[h], lse);
    if (pair == 0 && writes)
      *(partial ? plan.part_lse + part + 8 * h
                : address(args.lse, item.work.head, running_row + 8 * h)) = weights.lse;
    float* place = partial ? plan.part_out + (part + 8 * h) * Shape::kValue
                           : args.out.data_handle() + (running_row + 8 * h) * args.out.stride(0) +
                                 item.work.head * args.out.stride(1);
    // Neighbouring lanes swap halves of two tiles, so that each has four columns on end.
    const bool odd = pair % 2 != 0;
    auto* const target = reinterpret_cast<float4*>(place + odd * 8 + pair / 2 * 4);
    float4 values[Shape::kValue / 16];
#pragma unroll
    for (int m = 0; m < Shape::kValue / 16; ++m) {
      const float a0 = out[8 * m + 2 * h] * inverse, a1 = out[8 * m + 2 * h + 1] * inverse;
      const float b0 = out[8 * m + 4 + 2 * h] * inverse, b1 = out[8 * m + 4 + 2 * h + 1] * inverse;
      const float c0 = __shfl_xor_sync(~0u, odd ? a0 : b0, 1);
      const float c1 = __shfl_xor_sync(~0u, odd ? a1 : b1, 1);
      values[m] = odd ? make_float4(c0, c1, b0, b1) : make_float4(a0, a1, c0, c1);
    }
    if (!writes) continue;
    if (merges[h]) {
      float4 old[Shape::kValue / 16];
#pragma unroll
      for (int m = 0; m < Shape::kValue / 16; ++m) old[m] = target[4 * m];
#pragma unroll
      for (int m = 0; m < Shape::kValue / 16; ++m)
        values[m] = make_float4(merge_value(weights, old[m].x, values[m].x),
                                merge_value(weights, old[m].y, values[m].y),
                                merge_value(weights, old[m].z, values[m].z),
                                merge_value(weights, old[m].w, values[m].w));
    }
#pragma unroll
    for (int m = 0; m < Shape::kValue / 16; ++m) target[4 * m] = values[m];
  }
}

}  // namespace sparse_mla::sm90
#endif
