/// Sparse MQA for any widths, in fp32: CTA = one head of one token, 4 warps, 64 keys at a time.
///   scores  a warp takes a key, its lanes the columns (a fixed tree of shuffles adds them up)
///   softmax online, every warp for itself, in the same order
///   values  a thread takes every 128th column and walks the keys
/// Rows are read from the cache byte by byte, twice per head.
#pragma once

#include <cstdint>

#include "kernels/common/finished_row.h"
#include "kernels/cuda/latent_rows.cuh"
#include "kernels/cuda/write_lse.cuh"
#include "sparse_mla/attention.h"

namespace sparse_mla::cuda {

inline constexpr int kRowsMqaThreads = 128, kRowsMqaKeys = 64;

/// The kernel's own arrays in shared memory, rounded up.
inline constexpr int kRowsMqaStaticBytes = 2048;
/// Dynamic shared memory: query [L+R] and sums [L], fp32.
constexpr std::int64_t rows_mqa_shared_bytes(int lora, int rope) {
  return (2 * std::int64_t{lora} + rope) * 4;
}

/// Element `i` of a cached row [L+R], as the format defines it: e4m3 · scale in fp32.
__device__ inline float latent_element(const LatentCache& cache, const std::byte* row, int i,
                                       int lora) {
  const auto e4m3 = [row](int at) { return e4m3_to_float(static_cast<std::uint8_t>(row[at])); };
  const auto bf16 = [row](int at) { return __bfloat162float(load_bf16_bytes(row + at)); };
  if (cache.format == CacheFormat::bf16) return bf16(2 * i);
  if (cache.format == CacheFormat::fp8) return e4m3(i) * cache.scale;
  if (i >= lora) return bf16(ds_mla_rope_offset(lora) + 2 * (i - lora));
  return e4m3(i) * load_float_bytes(row + ds_mla_scale_offset(lora) + i / kLatentScaleGroup * 4);
}

__global__ void __launch_bounds__(kRowsMqaThreads)
    sparse_mqa_rows_kernel(const __grid_constant__ SparseMqaCall call, int num_heads, int lora,
                           int rope) {
  extern __shared__ float rows_mqa_shared[];
  float* const query = rows_mqa_shared;            // [L+R]
  float* const sums = query + lora + rope;         // [L], an element per owning thread
  __shared__ const std::byte* rows[kRowsMqaKeys];  // null = not to be read
  __shared__ float weights[kRowsMqaKeys];

  const float infinity = HUGE_VALF;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const std::int64_t token = blockIdx.x / static_cast<unsigned>(num_heads);
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(num_heads));
  const LatentCache& cache = call.cache;
  const std::int64_t num_slots = cache.num_slots();

  for (int d = thread; d < lora + rope; d += kRowsMqaThreads)
    query[d] = __bfloat162float(*address(call.q, token, head, d));
  for (int d = thread; d < lora; d += kRowsMqaThreads) sums[d] = 0;
  int count = static_cast<int>(call.slots.extent(1));
  if (call.counts != nullptr) count = max(0, min(count, call.counts[token]));

  float top = -infinity, total = 0;
  for (int first = 0; first < count; first += kRowsMqaKeys) {
    __syncthreads();  // the tile before is done with; queries are there
    if (thread < kRowsMqaKeys) {
      const std::int32_t slot = first + thread < count ? call.slots(token, first + thread) : -1;
      rows[thread] = slot >= 0 && slot < num_slots ? cached_row(cache, slot) : nullptr;
    }
    __syncthreads();
    for (int k = warp; k < kRowsMqaKeys; k += kRowsMqaThreads / 32) {
      const std::byte* row = rows[k];
      float dot = 0;
      if (row != nullptr)
        for (int d = lane; d < lora + rope; d += 32)
          dot = fmaf(query[d], latent_element(cache, row, d, lora), dot);
      for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
      if (lane == 0) weights[k] = row == nullptr ? -infinity : dot * call.softmax_scale;
    }
    __syncthreads();
    const float low = weights[lane], high = weights[lane + 32];
    float new_top = fmaxf(low, high);
    for (int step = 16; step > 0; step /= 2)
      new_top = fmaxf(new_top, __shfl_xor_sync(~0u, new_top, step));
    new_top = fmaxf(top, new_top);
    const float base = new_top == -infinity ? 0.0f : new_top;
    const float factor = expf(top - base);
    const float low_weight = expf(low - base), high_weight = expf(high - base);
    float sum = low_weight + high_weight;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    top = new_top;
    total = total * factor + sum;
    __syncthreads();  // every warp has read the scores
    if (warp == 0) {
      weights[lane] = low_weight;
      weights[lane + 32] = high_weight;
    }
    __syncthreads();
    for (int d = thread; d < lora; d += kRowsMqaThreads) {
      float value = sums[d] * factor;
      for (int k = 0; k < kRowsMqaKeys; ++k)
        if (rows[k] != nullptr)
          value = fmaf(weights[k], latent_element(cache, rows[k], d, lora), value);
      sums[d] = value;
    }
  }

  const bool empty = total == 0.0f;
  const float lse = empty ? -infinity : top + logf(total);
  float factor = empty ? 0.0f : 1.0f / total;
  if (call.sink.data_handle() != nullptr) factor *= sink_factor(call.sink(head), lse);
  for (int d = thread; d < lora; d += kRowsMqaThreads)
    *address(call.out, token, head, d) = __float2bfloat16_rn(empty ? 0.0f : sums[d] * factor);
  if (thread == 0) write_lse(call, token, head, lse);
}

}  // namespace sparse_mla::cuda
