// Operation `write_cache` on CUDA.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/cache_checks.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"
#include "kernels/cuda/latent_rows.cuh"

namespace sparse_mla::cuda {
namespace {

/// Numbers that one warp writes at a time: a scale group of fp8_ds_mla, four for each lane.
constexpr int kGroup = kLatentScaleGroup, kPerLane = kGroup / 32;
constexpr int kMaxWarps = 8;

constexpr int groups(int numbers) { return (numbers + kGroup - 1) / kGroup; }

struct WriteArguments {
  View2<const bfloat16> latent;            ///< [num_tokens, L+R]
  View2<const fp8_e4m3> index_k;           ///< [num_tokens, D]
  View1<const float> index_k_scale;        ///< [num_tokens]
  View1<const std::int64_t> slot_mapping;  ///< [num_tokens]
  LatentCache latent_cache;
  IndexKeyCache index_cache;
  int lora, rope, index_head_dim;  ///< L, R, D; D = 0: no indexer keys
  bool power_of_two_scales;
};

/// Lane's element `j` of a group that begins at 0: with kVector four neighbours, else 32 apart.
template <bool kVector>
__device__ int element_of(int lane, int j) {
  return kVector ? kPerLane * lane + j : lane + 32 * j;
}

template <bool kVector>
__device__ void load_group(const bfloat16* from, int count, int lane,
                           bfloat16 (&values)[kPerLane]) {
  if constexpr (kVector) {
    if (kPerLane * lane >= count) return;
    const uint2 bits = __ldg(reinterpret_cast<const uint2*>(from) + lane);
    values[0] = __ushort_as_bfloat16(static_cast<unsigned short>(bits.x & 0xFFFF));
    values[1] = __ushort_as_bfloat16(static_cast<unsigned short>(bits.x >> 16));
    values[2] = __ushort_as_bfloat16(static_cast<unsigned short>(bits.y & 0xFFFF));
    values[3] = __ushort_as_bfloat16(static_cast<unsigned short>(bits.y >> 16));
  } else {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j)
      if (element_of<false>(lane, j) < count) values[j] = from[element_of<false>(lane, j)];
  }
}

/// `count` ≤ 128 numbers, copied.
template <bool kVector>
__device__ void copy_group(const bfloat16* from, std::byte* to, int count, int lane) {
  bfloat16 values[kPerLane];
  load_group<kVector>(from, count, lane, values);
  if constexpr (kVector) {
    if (kPerLane * lane >= count) return;
    const auto pair = [&](int j) {
      return static_cast<unsigned>(__bfloat16_as_ushort(values[j])) |
             static_cast<unsigned>(__bfloat16_as_ushort(values[j + 1])) << 16;
    };
    reinterpret_cast<uint2*>(to)[lane] = {pair(0), pair(2)};
  } else {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int i = element_of<false>(lane, j);
      if (i < count) store_bf16_bytes(to + 2 * i, values[j]);
    }
  }
}

/// `count` ≤ 128 numbers, divided by `scale` and rounded to e4m3.
template <bool kVector>
__device__ void quantise_group(const bfloat16 (&values)[kPerLane], float scale, std::byte* to,
                               int count, int lane) {
  if constexpr (kVector) {
    if (kPerLane * lane >= count) return;
    std::uint32_t codes = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j)
      codes |= static_cast<std::uint32_t>(quantise(values[j], scale)) << (8 * j);
    reinterpret_cast<std::uint32_t*>(to)[lane] = codes;
  } else {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int i = element_of<false>(lane, j);
      if (i < count) to[i] = std::byte{quantise(values[j], scale)};
    }
  }
}

/// Group `group` of a latent row.
template <CacheFormat kFormat, bool kVector>
__device__ void write_group(const WriteArguments& a, const bfloat16* from, std::byte* row,
                            int group, int lane) {
  if constexpr (kFormat == CacheFormat::bf16) {
    const int first = group * kGroup, count = min(kGroup, a.lora + a.rope - first);
    copy_group<kVector>(from + first, row + 2 * first, count, lane);
  } else if constexpr (kFormat == CacheFormat::fp8) {
    const int first = group * kGroup, count = min(kGroup, a.lora + a.rope - first);
    bfloat16 values[kPerLane];
    load_group<kVector>(from + first, count, lane, values);
    quantise_group<kVector>(values, a.latent_cache.scale, row + first, count, lane);
  } else {
    const int scale_groups = a.lora / kGroup;
    if (group >= scale_groups) {
      const int first = (group - scale_groups) * kGroup, count = min(kGroup, a.rope - first);
      copy_group<kVector>(from + a.lora + first, row + ds_mla_rope_offset(a.lora) + 2 * first,
                          count, lane);
      return;
    }
    bfloat16 values[kPerLane];
    load_group<kVector>(from + group * kGroup, kGroup, lane, values);
    float amax = 0;  // fmaxf passes NaN over
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) amax = fmaxf(amax, fabsf(__bfloat162float(values[j])));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, distance));
    const float scale = group_scale(amax, a.power_of_two_scales);
    quantise_group<kVector>(values, scale, row + group * kGroup, kGroup, lane);
    if (lane == 0) store_float_bytes(row + ds_mla_scale_offset(a.lora) + 4 * group, scale);
  }
}

// Tile: one token. Each warp takes a group of up to 128 numbers of the latent row, one more warp
// the indexer key: six pieces of work at L 512, R 64. A token moves about 2.3 KB (bf16) or 1.9 KB;
// 8,192 of them 20 MB: some 5 µs. Without kVector every byte is stored by itself, so that rows may
// start anywhere.
template <CacheFormat kFormat, bool kVector>
__global__ void __launch_bounds__(32 * kMaxWarps)
    write_cache_kernel(const WriteArguments a, int latent_groups) {
  const std::int64_t token = blockIdx.x;
  const std::int64_t slot = a.slot_mapping(token);
  if (slot < 0 || slot >= a.latent_cache.num_slots()) return;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const int pieces = latent_groups + (a.index_head_dim > 0 ? 1 : 0);
  for (int piece = warp; piece < pieces; piece += num_warps) {
    if (piece < latent_groups) {
      write_group<kFormat, kVector>(a, address(a.latent, token, 0), a.latent_cache.row(slot), piece,
                                    lane);
      continue;
    }
    const auto* from = reinterpret_cast<const std::byte*>(address(a.index_k, token, 0));
    std::byte* to = a.index_cache.key(slot);
    for (int i = lane; i < a.index_head_dim; i += 32) to[i] = from[i];
    if (lane == 0) store_float_bytes(a.index_cache.scale(slot), a.index_k_scale(token));
  }
}

/// Whole groups of four numbers everywhere, and all that is read or written at once is aligned.
bool vector_path(const WriteCacheProblem& problem, const WriteCacheCall& call) {
  const int lora = problem.kv_lora_rank, rope = problem.qk_rope_head_dim;
  const LatentCache& cache = call.latent_cache;
  return lora % kPerLane == 0 && rope % kPerLane == 0 &&
         (cache.format != CacheFormat::fp8_ds_mla || ds_mla_rope_offset(lora) % 8 == 0) &&
         aligned(call.latent.data_handle(), 8, {call.latent.stride(0)}) &&
         aligned(cache.data, 8, {cache.block_stride, cache.row_stride});
}

template <CacheFormat kFormat>
void launch(const WriteArguments& a, bool vector, Stream stream) {
  const int latent_groups = kFormat == CacheFormat::fp8_ds_mla ? a.lora / kGroup + groups(a.rope)
                                                               : groups(a.lora + a.rope);
  const int warps = std::clamp(latent_groups + (a.index_head_dim > 0 ? 1 : 0), 1, kMaxWarps);
  const auto blocks = static_cast<unsigned>(a.slot_mapping.extent(0));
  const auto threads = static_cast<unsigned>(32 * warps);
  if (vector)
    write_cache_kernel<kFormat, true><<<blocks, threads, 0, stream>>>(a, latent_groups);
  else
    write_cache_kernel<kFormat, false><<<blocks, threads, 0, stream>>>(a, latent_groups);
  check_launch("write_cache_kernel");
}

void run(const WriteCacheProblem& problem, const WriteCacheCall& call, std::span<std::byte>,
         Stream stream) {
  check_shapes(problem, call);
  if (call.slot_mapping.extent(0) == 0) return;
  const WriteArguments arguments{call.latent,
                                 call.index_k,
                                 call.index_k_scale,
                                 call.slot_mapping,
                                 call.latent_cache,
                                 call.index_cache,
                                 problem.kv_lora_rank,
                                 problem.qk_rope_head_dim,
                                 with_index_keys(problem, call) ? problem.index_head_dim : 0,
                                 call.power_of_two_scales};
  const bool vector = vector_path(problem, call);
  switch (problem.format) {
    case CacheFormat::bf16:
      return launch<CacheFormat::bf16>(arguments, vector, stream);
    case CacheFormat::fp8_ds_mla:
      return launch<CacheFormat::fp8_ds_mla>(arguments, vector, stream);
    case CacheFormat::fp8:
      return launch<CacheFormat::fp8>(arguments, vector, stream);
  }
}

}  // namespace

std::vector<Entry<WriteCacheProblem, WriteCacheCall>> write_cache_entries() {
  return {{"cuda", Backend::cuda, "a token per block, a group of 128 numbers per warp",
           [](const WriteCacheProblem&) { return why_no_device(); },
           [](const WriteCacheProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cuda
