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
/// Tokens of a block, one for each warp.
constexpr int kWarps = 4, kThreads = 32 * kWarps;
/// 48 registers a thread: 40 tokens on an SM, whose loads, 1.3 KB each, are twice what its share of
/// the memory's rate needs.
constexpr int kBlocksPerSm = 10;
/// Groups that a lane has in flight: with L+R = 576, the whole row.
constexpr int kLoads = 5;

constexpr int groups(int numbers) { return (numbers + kGroup - 1) / kGroup; }

/// Slot numbers become page numbers by a product, because a division of 64-bit numbers is a call
/// and costs registers: floor(slot / size) = the upper half of slot · ceil(2^64 / size) wherever
/// slot · size < 2^64.
struct Pages {
  std::int64_t size;      ///< slots of a page
  std::uint64_t inverse;  ///< not used for 1

  explicit Pages(std::int32_t block_size)
      : size(block_size), inverse(~std::uint64_t{0} / static_cast<std::uint64_t>(block_size) + 1) {}
  __device__ std::int64_t of(std::int64_t slot) const {
    return size == 1 ? slot
                     : static_cast<std::int64_t>(
                           __umul64hi(static_cast<unsigned long long>(slot), inverse));
  }
};

struct WriteArguments {
  View2<const bfloat16> latent;            ///< [num_tokens, L+R]
  View2<const fp8_e4m3> index_k;           ///< [num_tokens, D]
  View1<const float> index_k_scale;        ///< [num_tokens]
  View1<const std::int64_t> slot_mapping;  ///< [num_tokens]
  LatentCache latent_cache;
  IndexKeyCache index_cache;
  Pages latent_pages, index_pages;
  int lora, rope, index_head_dim;  ///< L, R, D; D = 0: no indexer keys
  bool index_words;                ///< indexer keys are whole, aligned words on both sides
  bool power_of_two_scales;
};

/// Lane's element `j` of a group that begins at 0: with kVector four neighbours, else 32 apart.
template <bool kVector>
__device__ int element_of(int lane, int j) {
  return kVector ? kPerLane * lane + j : lane + 32 * j;
}

/// A lane's four elements of a group of `count` at `from`, packed.
template <bool kVector>
__device__ uint2 load_group(const bfloat16* from, int count, int lane) {
  if constexpr (kVector) {
    if (kPerLane * lane >= count) return {};
    return __ldg(reinterpret_cast<const uint2*>(from) + lane);
  } else {
    const auto load = [&](int j) {
      const int i = element_of<false>(lane, j);
      return i < count ? static_cast<unsigned>(__bfloat16_as_ushort(from[i])) : 0u;
    };
    return {load(0) | load(1) << 16, load(2) | load(3) << 16};
  }
}

__device__ void unpack(const uint2& packed, bfloat16 (&values)[kPerLane]) {
  values[0] = __ushort_as_bfloat16(static_cast<unsigned short>(packed.x & 0xFFFF));
  values[1] = __ushort_as_bfloat16(static_cast<unsigned short>(packed.x >> 16));
  values[2] = __ushort_as_bfloat16(static_cast<unsigned short>(packed.y & 0xFFFF));
  values[3] = __ushort_as_bfloat16(static_cast<unsigned short>(packed.y >> 16));
}

/// `count` ≤ 128 numbers, copied.
template <bool kVector>
__device__ void copy_group(const uint2& packed, std::byte* to, int count, int lane) {
  if constexpr (kVector) {
    if (kPerLane * lane < count) reinterpret_cast<uint2*>(to)[lane] = packed;
  } else {
    bfloat16 values[kPerLane];
    unpack(packed, values);
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

/// Numbers [first, first + count) of a row.
struct Group {
  int first, count;
};

/// Group `group` of a latent row; behind the last one its count is below 1. fp8_ds_mla begins new
/// groups with the rope part.
template <CacheFormat kFormat>
__device__ Group group_of(const WriteArguments& a, int group) {
  if constexpr (kFormat == CacheFormat::fp8_ds_mla) {
    const int scale_groups = a.lora / kGroup;
    if (group >= scale_groups) {
      const int first = (group - scale_groups) * kGroup;
      return {a.lora + first, min(kGroup, a.rope - first)};
    }
    return {group * kGroup, kGroup};
  } else {
    return {group * kGroup, min(kGroup, a.lora + a.rope - group * kGroup)};
  }
}

template <CacheFormat kFormat, bool kVector>
__device__ void write_group(const WriteArguments& a, const uint2& packed, std::byte* row,
                            const Group& group, int lane) {
  if constexpr (kFormat == CacheFormat::bf16) {
    copy_group<kVector>(packed, row + 2 * group.first, group.count, lane);
  } else if constexpr (kFormat == CacheFormat::fp8) {
    bfloat16 values[kPerLane];
    unpack(packed, values);
    quantise_group<kVector>(values, a.latent_cache.scale, row + group.first, group.count, lane);
  } else {
    if (group.first >= a.lora) {
      copy_group<kVector>(packed, row + ds_mla_rope_offset(a.lora) + 2 * (group.first - a.lora),
                          group.count, lane);
      return;
    }
    bfloat16 values[kPerLane];
    unpack(packed, values);
    float amax = 0;  // fmaxf passes NaN over
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) amax = fmaxf(amax, fabsf(__bfloat162float(values[j])));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, distance));
    const float scale = group_scale(amax, a.power_of_two_scales);
    quantise_group<kVector>(values, scale, row + group.first, kGroup, lane);
    if (lane == 0)
      store_float_bytes(row + ds_mla_scale_offset(a.lora) + group.first / kGroup * 4, scale);
  }
}

/// D bytes by a warp, from row to slot; 4 at a time where `words`.
__device__ void copy_key(const std::byte* from, std::byte* to, int bytes, bool words, int lane) {
  if (words) {
    for (int i = lane; i < bytes / 4; i += 32)
      reinterpret_cast<std::uint32_t*>(to)[i] = reinterpret_cast<const std::uint32_t*>(from)[i];
  } else {
    for (int i = lane; i < bytes; i += 32) to[i] = from[i];
  }
}

// Tile: one token for each warp, four numbers of each group of 128 in a lane. The row's loads are
// issued before the slot is known: a token waits for memory twice, for its row and for its indexer
// key. A token moves about 2.6 KB (bf16) or 2.1 KB; 8,192 of them 21 MB: some 5 µs. Without kVector
// every byte is stored by itself, so that rows may start anywhere.
template <CacheFormat kFormat, bool kVector>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    write_cache_kernel(const WriteArguments a, int latent_groups) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const std::int64_t token = std::int64_t{blockIdx.x} * kWarps + warp;
  if (token >= a.slot_mapping.extent(0)) return;
  const bfloat16* from = address(a.latent, token, 0);
  const std::int64_t slot = a.slot_mapping(token);
  for (int begin = 0; begin < latent_groups; begin += kLoads) {
    uint2 packed[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const Group group = group_of<kFormat>(a, begin + i);
      packed[i] = load_group<kVector>(from + group.first, group.count, lane);
    }
    if (slot < 0 || slot >= a.latent_cache.num_slots()) return;
    const std::int64_t page = a.latent_pages.of(slot);
    std::byte* row = a.latent_cache.data + page * a.latent_cache.block_stride +
                     (slot - page * a.latent_pages.size) * a.latent_cache.row_stride;
    if (begin == 0 && a.index_head_dim > 0) {
      const std::int64_t index_page = a.index_pages.of(slot);
      const std::int64_t offset = slot - index_page * a.index_pages.size;
      std::byte* page_data = a.index_cache.data + index_page * a.index_cache.block_stride;
      copy_key(reinterpret_cast<const std::byte*>(address(a.index_k, token, 0)),
               page_data + offset * a.index_head_dim, a.index_head_dim, a.index_words, lane);
      if (lane == 0)
        store_float_bytes(page_data + a.index_pages.size * a.index_head_dim + 4 * offset,
                          a.index_k_scale(token));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      write_group<kFormat, kVector>(a, packed[i], row, group_of<kFormat>(a, begin + i), lane);
  }
}

/// Whole groups of four numbers everywhere, and all that is read or written at once is aligned.
bool vector_path(const WriteCacheProblem& problem, const WriteCacheCall& call) {
  const int lora = problem.kv_lora_rank, rope = problem.qk_rope_head_dim;
  const LatentCache& cache = call.latent_cache;
  return lora % kPerLane == 0 && rope % kPerLane == 0 &&
         (cache.format != CacheFormat::fp8_ds_mla || ds_mla_rope_offset(lora) % 8 == 0) &&
         aligned_rows(call.latent, 8) &&
         aligned(cache.data, 8, {cache.block_stride, cache.row_stride});
}

/// Keys of D bytes lie behind each other in a page.
bool index_words(const WriteCacheProblem& problem, const WriteCacheCall& call) {
  return problem.index_head_dim % 4 == 0 && aligned_rows(call.index_k, 4) &&
         aligned(call.index_cache.data, 4, {call.index_cache.block_stride});
}

template <CacheFormat kFormat>
void launch(const WriteArguments& a, bool vector, Stream stream) {
  const int latent_groups = kFormat == CacheFormat::fp8_ds_mla ? a.lora / kGroup + groups(a.rope)
                                                               : groups(a.lora + a.rope);
  const auto blocks = static_cast<unsigned>((a.slot_mapping.extent(0) + kWarps - 1) / kWarps);
  if (vector)
    write_cache_kernel<kFormat, true><<<blocks, kThreads, 0, stream>>>(a, latent_groups);
  else
    write_cache_kernel<kFormat, false><<<blocks, kThreads, 0, stream>>>(a, latent_groups);
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
                                 Pages(std::max(call.latent_cache.block_size, 1)),
                                 Pages(std::max(call.index_cache.block_size, 1)),
                                 problem.kv_lora_rank,
                                 problem.qk_rope_head_dim,
                                 with_index_keys(problem, call) ? problem.index_head_dim : 0,
                                 index_words(problem, call),
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
  return {{"cuda", Backend::cuda, "a token per warp, groups of 128 numbers",
           [](const WriteCacheProblem&) { return why_no_device(); },
           [](const WriteCacheProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cuda
