// Operation `indexer_scores` on CUDA.
//
// "cuda_mma" (D = 128): keys × heads = [32, 128] · [128, heads]ᵀ per warp and query row, on
// mma.sync fp16 (every e4m3 number is an fp16 number) with fp32 accumulators.
//   A CTA owns a tile of one member's query rows: their q lies in shared memory, decoded once, in
// the order in which the lanes want their fragments. Its 8 warps walk the keys, 32 at a time, each
// on its own: a warp reads its keys from the pages straight into fragments, multiplies them with
// every row of the tile, and applies relu, weights and the sum over heads to the accumulators:
// a thread holds 4 keys × 2 heads of every 8, so that three shuffles at the end finish 32 scores.
// While one warp waits for keys, others multiply. Several CTAs ("parts") share a tile's keys where
// there are few tiles, 256 keys in turn.
//
// "cuda_rows" (any D): a thread per key, scalar.
//
// A score is one fixed chain of operations on its own row and key, whatever the tile, the part and
// the batch. Members are device memory: a small kernel first lists their tiles, whose number the
// host can only bound.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include <cuda_fp8.h>
#include <math_constants.h>

#include "kernels/common/indexer_checks.h"
#include "kernels/common/ptx.cuh"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"
#include "sparse_mla/workspace.h"

namespace sparse_mla::cuda {
namespace {

constexpr int kHeadDim = 128;  // of the mma kernel
constexpr int kWarps = 8;
constexpr int kMmaThreads = 32 * kWarps;
/// Keys of a warp: two 16-row fragments of 8 k-steps are 64 registers, half of what a thread of two
/// CTAs per SM may have; with fewer, q would be read from shared memory more often.
constexpr int kWarpKeys = 32;
constexpr int kMmaKeys = kWarpKeys * kWarps;  // of a CTA in one turn
constexpr int kScalarThreads = 128;           // = keys in one turn

/// Head blocks of 8 are multiplied in pairs: four independent chains of mma per warp.
__host__ __device__ constexpr int padded_heads(int heads) { return (heads + 15) / 16 * 16; }
/// Shared bytes of one query row: fp16 q and fp32 weights.
constexpr int row_bytes(int heads) { return padded_heads(heads) * (kHeadDim * 2 + 4); }
/// Two CTAs per SM, and one on the smaller cards.
constexpr int max_shared_bytes() { return 68 * 1024; }
/// Query rows of a tile. Decoding keys costs a twentieth of scoring them against one row of 64
/// heads: beyond 8 rows there is nothing to gain.
constexpr int tile_rows(int heads) { return std::min(8, max_shared_bytes() / row_bytes(heads)); }
static_assert(tile_rows(64) == 4 && tile_rows(256) == 1 && tile_rows(257) == 0);

/// CTAs that share the keys of a tile: enough for eight CTAs per SM, which evens out rows of unlike
/// lengths, but none that could have no key.
std::int64_t parts_for(std::int64_t tiles, std::int64_t max_keys, std::int64_t keys_per_turn) {
  const std::int64_t wanted = (8 * current_device().num_sms + tiles - 1) / tiles;
  return std::clamp<std::int64_t>((max_keys + keys_per_turn - 1) / keys_per_turn, 1, wanted);
}

struct Tile {
  std::int32_t member, row;  // its first row within the member
};

struct Buffers {
  Tile* tiles;              // [max_rows]
  std::int32_t* num_tiles;  // [1]
};
Buffers carve(const IndexerProblem& problem, WorkspaceCarver& carver) {
  Buffers buffers;
  buffers.tiles = carver.take<Tile>("indexer_tiles", problem.max_rows);
  buffers.num_tiles = carver.take<std::int32_t>("indexer_num_tiles", 1);
  return buffers;
}

std::size_t workspace_bytes(const IndexerProblem& problem) {
  WorkspaceCarver counter;
  carve(problem, counter);
  return counter.bytes();
}

constexpr int kListThreads = 1024;

/// Lists the tiles of all members, in order; one CTA. More than max_tiles are not: then there are
/// more rows than the problem allows.
__global__ void __launch_bounds__(kListThreads)
    list_tiles_kernel(const ScoreMember* members,  // [num_members]
                      std::int64_t num_members, int rows_per_tile, std::int64_t max_tiles,
                      Tile* tiles, std::int32_t* num_tiles) {
  __shared__ std::int64_t warp_totals[kListThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::int64_t listed = 0;  // by members before this round
  for (std::int64_t first = 0; first < num_members; first += kListThreads) {
    const std::int64_t m = first + threadIdx.x;
    const std::int64_t rows = m < num_members ? members[m].num_rows : 0;
    const std::int64_t count = rows > 0 ? (rows + rows_per_tile - 1) / rows_per_tile : 0;
    std::int64_t through = count;  // tiles of this warp's members up to this one
    for (int step = 1; step < 32; step *= 2) {
      const std::int64_t other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    if (lane == 31) warp_totals[warp] = through;
    __syncthreads();
    std::int64_t begin = listed;
    for (int w = 0; w < kListThreads / 32; ++w) {
      if (w < warp) begin += warp_totals[w];
      listed += warp_totals[w];
    }
    __syncthreads();
    // The warp writes one member's tiles after the other.
    for (int source = 0; source < 32; ++source) {
      const std::int64_t source_count = __shfl_sync(~0u, count, source);
      const std::int64_t source_begin = begin + __shfl_sync(~0u, through, source) - source_count;
      for (std::int64_t i = lane; i < source_count; i += 32)
        if (source_begin + i < max_tiles)
          tiles[source_begin + i] = {static_cast<std::int32_t>(m - lane + source),
                                     static_cast<std::int32_t>(i * rows_per_tile)};
    }
  }
  if (threadIdx.x == 0)
    *num_tiles = static_cast<std::int32_t>(listed < max_tiles ? listed : max_tiles);
}

struct Params {
  View3<const fp8_e4m3> index_q;     // [num_tokens, heads, D]
  View2<const float> index_weights;  // [num_tokens, heads]
  IndexKeyCache cache;
  View2<const std::int32_t> block_tables;  // [num_requests, max_blocks]
  const ScoreMember* members;
  const Tile* tiles;              // [*num_tiles]
  const std::int32_t* num_tiles;  // [1]
  float* scores;
  std::int64_t max_keys;
  int heads, head_dim, rows_per_tile;
  int parts;
  bool aligned_q;     // q's heads start at multiples of 8 bytes
  bool aligned_keys;  // keys at multiples of 16 bytes, scales of 4
};

/// What a CTA works on.
struct Work {
  ScoreMember member;
  std::int32_t row, rows;  // first row within the member, how many
  std::int64_t keys;       // that the last of them sees; 0: nothing to do
  int part;

  /// Keys that row r of the tile sees.
  __device__ std::int64_t visible(int r) const {
    const std::int64_t seen = std::int64_t{member.first_position} + row + r + 1;
    return seen < keys ? seen : keys;
  }
  __device__ std::int64_t token(int r) const { return std::int64_t{member.query_start} + row + r; }
  __device__ float* scores(float* base, int r) const {
    return base + member.score_offset + (std::int64_t{row} + r) * member.row_keys;
  }
};

__device__ inline Work find_work(const Params& p) {
  Work work;
  work.keys = 0;
  const int tile_index = static_cast<int>(blockIdx.x / static_cast<unsigned>(p.parts));
  work.part = static_cast<int>(blockIdx.x % static_cast<unsigned>(p.parts));
  if (tile_index >= *p.num_tiles) return work;
  const Tile tile = p.tiles[tile_index];
  work.member = p.members[tile.member];
  work.row = tile.row;
  work.rows = min(p.rows_per_tile, work.member.num_rows - tile.row);
  // The CPU throws for members that reach outside; a kernel can only leave them alone.
  const ScoreMember& member = work.member;
  if (member.request < 0 || member.request >= p.block_tables.extent(0) || member.query_start < 0 ||
      std::int64_t{member.query_start} + member.num_rows > p.index_q.extent(0))
    return work;
  const std::int64_t seen = std::int64_t{member.first_position} + tile.row + work.rows;
  const std::int64_t room = member.row_keys < p.max_keys ? member.row_keys : p.max_keys;
  work.keys = seen < room ? seen : room;
  return work;
}

/// Where a request's key lies; both null where its page is outside the block table or the cache.
struct KeyPlace {
  const std::byte* key;    // [D] e4m3
  const std::byte* scale;  // one fp32
};
__device__ inline KeyPlace find_key(const Params& p, std::int32_t request, std::int64_t key) {
  const auto place = static_cast<std::uint32_t>(key);
  const auto block_size = static_cast<std::uint32_t>(p.cache.block_size);
  const std::uint32_t column = place / block_size, offset = place - column * block_size;
  if (column >= p.block_tables.extent(1)) return {nullptr, nullptr};
  const std::int32_t block = *address(p.block_tables, request, column);
  if (block < 0 || block >= p.cache.num_blocks) return {nullptr, nullptr};
  const std::byte* const page = p.cache.data + block * p.cache.block_stride;
  return {page + std::int64_t{offset} * p.head_dim,
          page + std::int64_t{block_size} * p.head_dim + std::int64_t{offset} * 4};
}

__device__ inline std::uint32_t byte_at(const std::byte* bytes, int i) {
  return static_cast<std::uint32_t>(bytes[i]);
}
__device__ inline std::uint32_t load_word(const std::byte* bytes, bool aligned) {
  if (aligned) return *reinterpret_cast<const std::uint32_t*>(bytes);
  return byte_at(bytes, 0) | byte_at(bytes, 1) << 8 | byte_at(bytes, 2) << 16 |
         byte_at(bytes, 3) << 24;
}

/// The lower two e4m3 numbers of a word as fp16, exactly; NaN stays NaN.
__device__ inline std::uint32_t e4m3x2_to_f16x2(std::uint32_t pair) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return halves.x | static_cast<std::uint32_t>(halves.y) << 16;
}

/// The tile's q and weights into shared memory. k-step w of a fragment takes, from lane 4g + t, the
/// dimensions 64·(w / 4) + 16·t + 4·(w % 4) + {0, 1} and + {2, 3} (keys do likewise, so the
/// products pair up): unit (head block, j, lane) holds what k-steps 2j and 2j + 1 take of head
/// 8·block + g, 8 neighbouring dimensions.
__device__ inline void load_rows(const Params& p, const Work& work, uint4* q, float* weights) {
  const int padded = padded_heads(p.heads), blocks = padded / 8;
  for (int unit = threadIdx.x; unit < work.rows * blocks * 128; unit += kMmaThreads) {
    const int lane = unit % 32, j = unit / 32 % 4, block = unit / 128 % blocks;
    const int r = unit / (128 * blocks), head = block * 8 + lane / 4;
    std::uint32_t low = 0, high = 0;
    if (head < p.heads) {
      const auto* const source = reinterpret_cast<const std::byte*>(
          address(p.index_q, work.token(r), head, 64 * (j / 2) + 16 * (lane % 4) + 8 * (j % 2)));
      if (p.aligned_q) {
        const uint2 words = *reinterpret_cast<const uint2*>(source);
        low = words.x;
        high = words.y;
      } else {
        low = load_word(source, false);
        high = load_word(source + 4, false);
      }
    }
    q[unit] = make_uint4(e4m3x2_to_f16x2(low & 0xFFFFu), e4m3x2_to_f16x2(low >> 16),
                         e4m3x2_to_f16x2(high & 0xFFFFu), e4m3x2_to_f16x2(high >> 16));
  }
  for (int i = threadIdx.x; i < work.rows * padded; i += kMmaThreads) {
    const int r = i / padded, head = i % padded;
    weights[i] = head < p.heads ? *address(p.index_weights, work.token(r), head) : 0.0f;
  }
}

/// Lane 4g + t's place among a warp's 32 keys: fragment row g of 8-row group t.
__device__ inline int key_of_lane(int lane) { return lane / 4 + 8 * (lane % 4); }

/// A fragments of 32 keys; zeros for a key without a place. Row g of 8-row group i is row
/// g + 8·(i % 2) of fragment i / 2. `place` is that of this lane's own key.
__device__ inline void load_keys(const KeyPlace& place, bool aligned, int lane,
                                 std::uint32_t (&a)[2][8][4]) {
  std::uint32_t raw[4][8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto pointer =
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(place.key), lane / 4 * 4 + i);
    const auto* const key = reinterpret_cast<const std::byte*>(pointer);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::byte* const source = key + 64 * half + 16 * (lane % 4);
      uint4 words{};
      if (key != nullptr && aligned) {
        words = *reinterpret_cast<const uint4*>(source);
      } else if (key != nullptr) {
        words = make_uint4(load_word(source, false), load_word(source + 4, false),
                           load_word(source + 8, false), load_word(source + 12, false));
      }
      raw[i][4 * half] = words.x;
      raw[i][4 * half + 1] = words.y;
      raw[i][4 * half + 2] = words.z;
      raw[i][4 * half + 3] = words.w;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      a[i / 2][w][i % 2] = e4m3x2_to_f16x2(raw[i][w] & 0xFFFFu);
      a[i / 2][w][2 + i % 2] = e4m3x2_to_f16x2(raw[i][w] >> 16);
    }
}

/// Σ over heads of weight · relu(q · key), of this lane's own key.
__device__ inline float score_keys(const std::uint32_t (&a)[2][8][4], const uint4* q,
                                   const float* weights, int head_blocks, int lane) {
  const int t = lane % 4;
  float sums[4] = {};  // of row g of 8-row group i, over this lane's heads
  for (int block = 0; block < head_blocks; block += 2) {
    float d[2][2][4] = {};  // [head block][fragment]
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 b0 = q[(block * 4 + j) * 32 + lane], b1 = q[(block * 4 + 4 + j) * 32 + lane];
#pragma unroll
      for (int fragment = 0; fragment < 2; ++fragment) {
        ptx::mma_m16n8k16_f16(d[0][fragment], a[fragment][2 * j], b0.x, b0.y);
        ptx::mma_m16n8k16_f16(d[1][fragment], a[fragment][2 * j], b1.x, b1.y);
      }
#pragma unroll
      for (int fragment = 0; fragment < 2; ++fragment) {
        ptx::mma_m16n8k16_f16(d[0][fragment], a[fragment][2 * j + 1], b0.z, b0.w);
        ptx::mma_m16n8k16_f16(d[1][fragment], a[fragment][2 * j + 1], b1.z, b1.w);
      }
    }
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const float2 weight = *reinterpret_cast<const float2*>(weights + (block + b) * 8 + 2 * t);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[i] = fmaf(weight.x, ptx::max_nan(d[b][i / 2][2 * (i % 2)], 0.0f), sums[i]);
        sums[i] = fmaf(weight.y, ptx::max_nan(d[b][i / 2][2 * (i % 2) + 1], 0.0f), sums[i]);
      }
    }
  }
  // The four lanes of a quad hold four heads' sums each; lane t gathers group t's. Always
  // (0 + 2) + (1 + 3).
  const bool upper = (t & 2) != 0, odd = (t & 1) != 0;
  const float even_sum =
      (upper ? sums[2] : sums[0]) + __shfl_xor_sync(~0u, upper ? sums[0] : sums[2], 2);
  const float odd_sum =
      (upper ? sums[3] : sums[1]) + __shfl_xor_sync(~0u, upper ? sums[1] : sums[3], 2);
  return (odd ? odd_sum : even_sum) + __shfl_xor_sync(~0u, odd ? even_sum : odd_sum, 1);
}

__global__ void __launch_bounds__(kMmaThreads, 2)
    score_mma_kernel(const __grid_constant__ Params p) {
  // q [rows_per_tile, head blocks, 4, 32] units of 16 bytes, then weights [rows_per_tile, heads]
  extern __shared__ __align__(16) unsigned char dynamic[];
  const Work work = find_work(p);
  if (std::int64_t{work.part} * kMmaKeys >= work.keys) return;
  const int padded = padded_heads(p.heads), units = padded / 8 * 128;
  auto* const q = reinterpret_cast<uint4*>(dynamic);
  auto* const weights = reinterpret_cast<float*>(q + p.rows_per_tile * units);
  load_rows(p, work, q, weights);
  __syncthreads();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (std::int64_t base = (std::int64_t{work.part} * kWarps + warp) * kWarpKeys; base < work.keys;
       base += std::int64_t{p.parts} * kMmaKeys) {
    const std::int64_t own = base + key_of_lane(lane);
    const KeyPlace place =
        own < work.keys ? find_key(p, work.member.request, own) : KeyPlace{nullptr, nullptr};
    const float scale =
        place.scale != nullptr ? __uint_as_float(load_word(place.scale, p.aligned_keys)) : 0.0f;
    std::uint32_t a[2][8][4];
    load_keys(place, p.aligned_keys, lane, a);
    for (int r = 0; r < work.rows; ++r) {
      const std::int64_t visible = work.visible(r);
      if (base >= visible) continue;
      const float sum = score_keys(a, q + r * units, weights + r * padded, padded / 8, lane);
      if (own < visible)
        work.scores(p.scores, r)[own] = place.key != nullptr ? scale * sum : -CUDART_INF_F;
    }
  }
}

__global__ void __launch_bounds__(kScalarThreads)
    score_rows_kernel(const __grid_constant__ Params p) {
  const Work work = find_work(p);
  for (std::int64_t key = std::int64_t{work.part} * kScalarThreads + threadIdx.x; key < work.keys;
       key += std::int64_t{p.parts} * kScalarThreads) {
    const KeyPlace place = find_key(p, work.member.request, key);
    for (int r = 0; r < work.rows; ++r) {
      if (key >= work.visible(r)) continue;
      float score = -CUDART_INF_F;
      if (place.key != nullptr) {
        const auto* const k = reinterpret_cast<const fp8_e4m3*>(place.key);
        float sum = 0;
        for (int head = 0; head < p.heads; ++head) {
          const fp8_e4m3* const q = address(p.index_q, work.token(r), head, 0);
          float dot = 0;
          for (int d = 0; d < p.head_dim; ++d)
            dot = fmaf(static_cast<float>(q[d]), static_cast<float>(k[d]), dot);
          sum = fmaf(*address(p.index_weights, work.token(r), head), ptx::max_nan(dot, 0.0f), sum);
        }
        score = __uint_as_float(load_word(place.scale, p.aligned_keys)) * sum;
      }
      work.scores(p.scores, r)[key] = score;
    }
  }
}

/// Lists the tiles, then launches `kernel` on them.
void run(const IndexerProblem& problem, const IndexerCall& call, std::span<std::byte> workspace,
         Stream stream, int rows_per_tile, int keys_per_turn, int threads, int shared_bytes,
         void (*kernel)(Params), const char* name) {
  check_shapes(problem, call);
  const auto members = static_cast<std::int64_t>(call.members.size());
  if (members == 0 || problem.max_rows == 0 || problem.max_keys == 0) return;
  require(call.scores != nullptr, "scores", "null", "memory for the scores");
  WorkspaceCarver carver(workspace);
  const Buffers buffers = carve(problem, carver);
  const std::int64_t max_tiles =
      std::min(problem.max_rows, problem.max_rows / rows_per_tile + members);
  list_tiles_kernel<<<1, kListThreads, 0, stream>>>(call.members.data(), members, rows_per_tile,
                                                    max_tiles, buffers.tiles, buffers.num_tiles);
  check_launch("list_tiles_kernel");

  const Params params{
      .index_q = call.index_q,
      .index_weights = call.index_weights,
      .cache = call.cache,
      .block_tables = call.block_tables,
      .members = call.members.data(),
      .tiles = buffers.tiles,
      .num_tiles = buffers.num_tiles,
      .scores = call.scores,
      .max_keys = problem.max_keys,
      .heads = problem.index_n_heads,
      .head_dim = problem.index_head_dim,
      .rows_per_tile = rows_per_tile,
      .parts = static_cast<int>(parts_for(max_tiles, problem.max_keys, keys_per_turn)),
      .aligned_q = aligned_rows(call.index_q, 8),
      .aligned_keys =
          aligned(call.cache.data, 16, {call.cache.block_stride, problem.index_head_dim})};
  if (shared_bytes > 0) allow_shared(kernel, max_shared_bytes());
  kernel<<<static_cast<unsigned>(max_tiles * params.parts), threads,
           static_cast<std::size_t>(shared_bytes), stream>>>(params);
  check_launch(name);
}

void run_mma(const IndexerProblem& problem, const IndexerCall& call, std::span<std::byte> workspace,
             Stream stream) {
  const int rows = tile_rows(problem.index_n_heads);
  run(problem, call, workspace, stream, rows, kMmaKeys, kMmaThreads,
      rows * row_bytes(problem.index_n_heads), score_mma_kernel, "score_mma_kernel");
}

void run_rows(const IndexerProblem& problem, const IndexerCall& call,
              std::span<std::byte> workspace, Stream stream) {
  run(problem, call, workspace, stream, 1, kScalarThreads, kScalarThreads, 0, score_rows_kernel,
      "score_rows_kernel");
}

std::string why_not_mma(const IndexerProblem& problem) {
  if (const std::string reason = why_no_device(); !reason.empty()) return reason;
  if (problem.index_head_dim != kHeadDim)
    return "index_head_dim " + std::to_string(problem.index_head_dim) + ", not 128";
  if (problem.index_n_heads < 1 || tile_rows(problem.index_n_heads) == 0)
    return "index_n_heads " + std::to_string(problem.index_n_heads) + ", not 1 … 256";
  return "";
}

}  // namespace

std::vector<Entry<IndexerProblem, IndexerCall>> indexer_scores_entries() {
  return {{"cuda_mma", Backend::cuda, "fp16 mma.sync over keys × heads, relu and head sum fused",
           why_not_mma, workspace_bytes, run_mma},
          {"cuda_rows", Backend::cuda, "a thread per key, for any head width",
           [](const IndexerProblem&) { return why_no_device(); }, workspace_bytes, run_rows}};
}

}  // namespace sparse_mla::cuda
