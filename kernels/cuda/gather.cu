// Operation `gather` on CUDA.
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/common/cache_checks.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"
#include "kernels/cuda/latent_rows.cuh"
#include "kernels/cuda/members.cuh"

namespace sparse_mla::cuda {
namespace {

/// At most 32: a warp finds their sources.
/// 16 rows of 72 units are four units for each of 288 threads at L+R = 576: all loads of a thread
/// are issued together, and seven such blocks fit an SM.
constexpr int kRows = 16, kThreads = 288, kLoads = 4;

struct GatherArguments {
  LatentCache cache;
  View2<const std::int32_t> block_tables;  ///< [num_requests, max_blocks]
  const ChunkMember* members;              ///< [num_members], ascending in key_row
  int num_members;
  View2<bfloat16> rows;  ///< [workspace rows, L+R]
  int lora, latent_dim;  ///< L, L+R
};

/// Does workspace row `row` belong to a member? Then `source` is its cached row, or null where its
/// page lies outside the block table or the cache. `m` is a member at or before the row's.
__device__ bool locate(const GatherArguments& a, std::int64_t row, int m,
                       const std::byte*& source) {
  source = nullptr;
  if (row >= a.rows.extent(0) || row < a.members[0].key_row) return false;
  while (m + 1 < a.num_members && a.members[m + 1].key_row <= row) ++m;
  const ChunkMember member = a.members[m];
  const std::int64_t key = row - member.key_row;
  if (key >= member.num_keys) return false;
  const std::int64_t position = member.first_key + key;
  if (position < 0 || member.request < 0 || member.request >= a.block_tables.extent(0)) return true;
  // A sum of two 32-bit numbers that are not negative: 32-bit divisions.
  const auto size = static_cast<std::uint32_t>(a.cache.block_size);
  const std::uint32_t column = static_cast<std::uint32_t>(position) / size;
  if (column >= a.block_tables.extent(1)) return true;
  const std::int64_t block = a.block_tables(member.request, column);
  if (block < 0 || block >= a.cache.num_blocks) return true;
  source = a.cache.data + block * a.cache.block_stride +
           std::int64_t{static_cast<std::uint32_t>(position) - column * size} * a.cache.row_stride;
  return true;
}

// Tile: 16 workspace rows × L+R numbers. A warp finds the first row's member and a thread per row
// its source – three loads behind each other before the first number is read –; then all threads
// walk the tile as one list of units. A unit is eight numbers: 16 bytes written, 16 (bf16) or 8
// (e4m3) read, neighbouring threads at neighbouring addresses. A row moves 2,304 bytes (bf16),
// 1,808 (fp8_ds_mla) or 1,728 (fp8) at L+R = 576, and no arithmetic worth counting: memory alone
// decides. Without kVector a unit is one number, read bytewise.
template <CacheFormat kFormat, bool kVector>
__global__ void __launch_bounds__(kThreads) gather_kernel(const GatherArguments a) {
  __shared__ const std::byte* sources[kRows];
  __shared__ bool owned[kRows];
  const std::int64_t first_row = std::int64_t{blockIdx.x} * kRows;
  if (threadIdx.x < 32) {
    const int m = find_record_by_warp(a.members, a.num_members, &ChunkMember::key_row, first_row);
    if (threadIdx.x < kRows)
      owned[threadIdx.x] = locate(a, first_row + threadIdx.x, m, sources[threadIdx.x]);
  }
  __syncthreads();

  if constexpr (kVector) {
    const unsigned units = static_cast<unsigned>(a.latent_dim) / RowUnit::kNumbers;
    const unsigned total = kRows * units;
    for (unsigned begin = threadIdx.x; begin < total; begin += kLoads * kThreads) {
      RowUnit loaded[kLoads];
#pragma unroll
      for (unsigned i = 0; i < kLoads; ++i) {
        const unsigned index = begin + i * kThreads, row = index / units;
        loaded[i] = {};
        if (index < total && sources[row] != nullptr)
          loaded[i] = load_unit<kFormat>(sources[row], static_cast<int>(index - row * units),
                                         a.lora, a.cache.scale);
      }
#pragma unroll
      for (unsigned i = 0; i < kLoads; ++i) {
        const unsigned index = begin + i * kThreads, row = index / units;
        if (index >= total || !owned[row]) continue;
        const auto unit = static_cast<int>(index - row * units);
        // Zero bytes decode to zeros.
        *reinterpret_cast<uint4*>(address(a.rows, first_row + row, unit * RowUnit::kNumbers)) =
            decode_unit<kFormat>(loaded[i], unit, a.lora);
      }
    }
  } else {
    const unsigned width = static_cast<unsigned>(a.latent_dim);
    for (unsigned index = threadIdx.x; index < kRows * width; index += kThreads) {
      const unsigned row = index / width;
      const auto i = static_cast<int>(index - row * width);
      if (!owned[row]) continue;
      const std::byte* source = sources[row];
      *address(a.rows, first_row + row, i) =
          source == nullptr ? __float2bfloat16_rn(0.0f)
                            : decode_number<kFormat>(source, i, a.lora, a.cache.scale);
    }
  }
}

/// Eight numbers of a row lie in one part of it, and all that is read or written at once is
/// aligned.
bool vector_path(const GatherProblem& problem, const GatherCall& call) {
  const int lora = problem.kv_lora_rank, rope = problem.qk_rope_head_dim;
  const LatentCache& cache = call.cache;
  const std::uint64_t bytes = cache.format == CacheFormat::bf16 ? 16 : 8;
  return lora % RowUnit::kNumbers == 0 && rope % RowUnit::kNumbers == 0 &&
         (cache.format != CacheFormat::fp8_ds_mla || ds_mla_rope_offset(lora) % 8 == 0) &&
         aligned(cache.data, bytes, {cache.block_stride, cache.row_stride}) &&
         aligned_rows(call.rows, 16);
}

template <CacheFormat kFormat>
void launch(const GatherArguments& arguments, bool vector, Stream stream) {
  const auto blocks = static_cast<unsigned>((arguments.rows.extent(0) + kRows - 1) / kRows);
  if (vector)
    gather_kernel<kFormat, true><<<blocks, kThreads, 0, stream>>>(arguments);
  else
    gather_kernel<kFormat, false><<<blocks, kThreads, 0, stream>>>(arguments);
  check_launch("gather_kernel");
}

void run(const GatherProblem& problem, const GatherCall& call, std::span<std::byte>,
         Stream stream) {
  check_shapes(problem, call);
  if (call.rows.extent(0) == 0 || call.members.empty()) return;
  const GatherArguments arguments{call.cache,
                                  call.block_tables,
                                  call.members.data(),
                                  static_cast<int>(call.members.size()),
                                  call.rows,
                                  problem.kv_lora_rank,
                                  problem.kv_lora_rank + problem.qk_rope_head_dim};
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

std::vector<Entry<GatherProblem, GatherCall>> gather_entries() {
  return {{"cuda", Backend::cuda, "16 rows a block, 16 bytes a thread and store",
           [](const GatherProblem&) { return why_no_device(); },
           [](const GatherProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cuda
