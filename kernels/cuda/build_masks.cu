// Operation `build_masks` on CUDA.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "kernels/common/mask_checks.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"
#include "kernels/cuda/members.cuh"

namespace sparse_mla::cuda {
namespace {

constexpr int kThreads = 256;
/// Blocks of the vector path for each SM: 40 registers a thread without spills, and while one block
/// waits at a barrier the others keep the memory busy.
constexpr int kBlocksPerSm = 6;
/// Of the path for any stride, which needs more registers.
constexpr int kScalarBlocksPerSm = 4;
/// Rows that a block builds one after the other: the next row's picks are in flight while a row is
/// written out, and a block's tile flags go to memory once. 8,192 rows are 2,048 blocks: enough for
/// 132 SMs.
constexpr int kBlockRows = 4;
/// Picks of a thread that are in flight at once: with 256 threads the usual topk, 2,048.
constexpr int kPicks = 8;
/// Words of a row that lie in shared memory at a time: 65,536 keys, 8 KB. Longer rows take several
/// windows and read their picks once for each.
constexpr int kWindowWords = 2048;
/// Key tiles that a window can touch: tiles have at least 32 keys, the window may begin inside one.
constexpr int kWindowTiles = kWindowWords + 1;

struct MaskArguments {
  View2<const std::int32_t> picks;  ///< [num_tokens, topk]
  const std::int32_t* counts;       ///< [num_tokens] or null
  const ChunkMember* members;       ///< [num_members]
  const MaskMember* masks;          ///< [num_members], ascending in tile_count_offset
  int num_members;
  MaskTile tile;
  std::uint32_t* words;
  std::int32_t* tile_counts;
  std::int32_t* tile_ids;
  int topk;
  unsigned blocks_per_tile;  ///< ceil(rows of the largest query tile / kBlockRows)
};

/// A query tile: rows [row_begin, row_end) of a member.
struct QueryTile {
  ChunkMember member;
  MaskMember mask;
  std::int64_t row_begin, row_end;
  std::int32_t* ids;    ///< [mask.max_tiles]
  std::int32_t* count;  ///< number of ids
};

/// Query tile number `index` of the call; false where there are fewer. Tiles are numbered as
/// tile_counts lists them.
__device__ bool find_tile(const MaskArguments& a, std::int64_t index, QueryTile& tile) {
  index += a.masks[0].tile_count_offset;
  const int m = find_record(a.masks, a.num_members, &MaskMember::tile_count_offset, index);
  tile.member = a.members[m];
  tile.mask = a.masks[m];
  const std::int64_t own = index - tile.mask.tile_count_offset;
  tile.row_begin = own * a.tile.queries;
  tile.row_end = min(tile.row_begin + a.tile.queries, std::int64_t{tile.member.query_len});
  if (tile.row_begin >= tile.row_end) return false;
  tile.ids = a.tile_ids + tile.mask.tile_offset + own * tile.mask.max_tiles;
  tile.count = a.tile_counts + index;
  return true;
}

// A block clears the list and the count of one query tile: build_masks_kernel uses them as flags
// and as the count of blocks that have finished.
__global__ void __launch_bounds__(kThreads) clear_tiles_kernel(const MaskArguments a) {
  QueryTile tile;
  if (!find_tile(a, blockIdx.x, tile)) return;
  for (int i = static_cast<int>(threadIdx.x); i < tile.mask.max_tiles; i += kThreads)
    tile.ids[i] = 0;
  if (threadIdx.x == 0) *tile.count = 0;
}

/// A thread's share of `kThreads · kPicks` picks of a row.
struct Picks {
  std::int32_t of[kPicks];
};

/// Picks [first, first + kThreads · kPicks) of `token`; those at or past `count` are −1, unread.
template <bool kVector>
__device__ Picks load_picks(const MaskArguments& a, std::int64_t token, int first, int count) {
  Picks picks;
  if constexpr (kVector) {
#pragma unroll
    for (int j = 0; j < kPicks; j += 4) {
      const int i = first + j * kThreads + static_cast<int>(threadIdx.x) * 4;
      int4 four{-1, -1, -1, -1};
      if (i + 4 <= count) {
        four = __ldg(reinterpret_cast<const int4*>(address(a.picks, token, i)));
      } else if (i < count) {
        four.x = *address(a.picks, token, i);
        if (i + 1 < count) four.y = *address(a.picks, token, i + 1);
        if (i + 2 < count) four.z = *address(a.picks, token, i + 2);
      }
      picks.of[j] = four.x, picks.of[j + 1] = four.y;
      picks.of[j + 2] = four.z, picks.of[j + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kPicks; ++j) {
      const int i = first + j * kThreads + static_cast<int>(threadIdx.x);
      picks.of[j] = i < count ? *address(a.picks, token, i) : -1;
    }
  }
  return picks;
}

/// Sets the bits of the picks in [begin, begin + num_keys) in `bitmap`; key `begin` is bit
/// 32 · shift. Neighbouring picks of one word, which is what sorted picks are, share an atomic.
/// Keys end at 2^31, so that in unsigned numbers a negative pick lies behind all of them.
__device__ void set_bits(const Picks& picks, unsigned begin, unsigned num_keys, unsigned shift,
                         std::uint32_t* bitmap) {
#pragma unroll
  for (int j = 0; j < kPicks; j += 4) {
    unsigned word[4];
    std::uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned bit = static_cast<unsigned>(picks.of[j + i]) - begin;
      word[i] = bit / 32;
      bits[i] = bit < num_keys ? 1u << (bit % 32) : 0u;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (word[i] == word[i + 1]) {
        bits[i + 1] |= bits[i];
        bits[i] = 0;
      }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (bits[i] != 0) atomicOr(bitmap + shift + word[i], bits[i]);
  }
}

/// Flags the key tiles in which `words`, the bits from key `key` on, has one. flags[0] is tile
/// `first_tile`.
template <int kCount>
__device__ void flag_tiles(const std::uint32_t (&words)[kCount], unsigned key, unsigned tile_keys,
                           unsigned first_tile, std::int32_t* flags) {
  unsigned tile = key / tile_keys, offset = key - tile * tile_keys;
  tile -= first_tile;
#pragma unroll
  for (int i = 0; i < kCount; ++i, offset += 32) {
    if (offset >= tile_keys) ++tile, offset -= tile_keys;  // a tile is no shorter than a word
    if (words[i] == 0) continue;
    const unsigned inside = tile_keys - offset;  // bits of this word that lie in `tile`, ≥ 1
    if (inside >= 32) {
      atomicOr(flags + tile, 1);
    } else {
      if ((words[i] & ((1u << inside) - 1)) != 0) atomicOr(flags + tile, 1);
      if ((words[i] >> inside) != 0) atomicOr(flags + tile + 1, 1);
    }
  }
}

/// The flags of a query tile become its list: ascending tile numbers, then zeros. In place: the
/// n-th number stands no later than its flag, and a turn's flags are read before its numbers are
/// written.
__device__ void compact(const QueryTile& tile) {
  __shared__ int of_warp[kThreads / 32];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int max_tiles = tile.mask.max_tiles;
  int count = 0;
  for (int first = 0; first < max_tiles; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const bool set = i < max_tiles && __ldcg(tile.ids + i) != 0;  // other blocks' writes: not by L1
    const unsigned sets = __ballot_sync(~0u, set);
    if (lane == 0) of_warp[warp] = __popc(sets);
    __syncthreads();
    int before = count;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) before += of_warp[w];
      count += of_warp[w];
    }
    if (set) tile.ids[before + __popc(sets & ((1u << lane) - 1))] = tile.mask.first_tile + i;
    __syncthreads();  // of_warp is written again
  }
  for (int i = count + static_cast<int>(threadIdx.x); i < max_tiles; i += kThreads) tile.ids[i] = 0;
  if (threadIdx.x == 0) *tile.count = count;
}

// Tile: up to 4 query rows of one query tile × all of the member's keys, a window of 65,536 keys at
// a time. Schedule of a row: 256 threads set the picks' bits in a bitmap in shared memory (integer
// atomics, so that order and duplicates do not matter) – barrier – the bitmap goes out in 16-byte
// stores, is cleared behind them, and non-zero words flag their key tiles – barrier. The next row's
// picks are loaded before the first barrier. The bitmap is shifted by up to three words so that its
// vectors are aligned in memory as well: rows have ceil(keys/32) + 1 words. At last the block
// stores its flags into the query tile's list; the block of a query tile that finishes last makes
// the list out of them. Bytes of a row of 32,768 keys with 2,048 picks: 8 KB read, 4 KB written;
// 16,384 rows 201 MB. The atomics, 8 a thread and row at most, take about as long as the memory and
// overlap with that of the other seven blocks on the SM.
template <bool kVector>
__global__ void __launch_bounds__(kThreads, kVector ? kBlocksPerSm : kScalarBlocksPerSm)
    build_masks_kernel(const MaskArguments a) {
  __shared__ __align__(16) std::uint32_t bitmap[kWindowWords + 4];
  __shared__ std::int32_t flags[kWindowTiles];
  __shared__ bool is_last;
  QueryTile tile;
  if (!find_tile(a, blockIdx.x / a.blocks_per_tile, tile)) return;
  const std::int64_t row_begin =
      tile.row_begin + std::int64_t{blockIdx.x % a.blocks_per_tile} * kBlockRows;
  const std::int64_t row_end = min(row_begin + kBlockRows, tile.row_end);
  if (row_begin >= row_end) return;
  const MaskMember& mask = tile.mask;
  const auto picks_of = [&](std::int64_t row) {  // how many of them count
    const std::int64_t token = tile.member.query_start + row;
    if (token < 0 || token >= a.picks.extent(0)) return 0;
    return a.counts == nullptr ? a.topk : min(a.counts[token], a.topk);
  };

  for (int i = static_cast<int>(threadIdx.x); i < kWindowWords + 4; i += kThreads) bitmap[i] = 0;
  for (int window = 0; window < mask.row_words; window += kWindowWords) {
    const int num_words = min(kWindowWords, mask.row_words - window);
    const auto tile_keys = static_cast<unsigned>(a.tile.keys);
    const unsigned window_key = static_cast<unsigned>(mask.first_key) + 32u * window;
    const unsigned window_tile = window_key / tile_keys;
    const auto num_tiles =
        static_cast<int>((window_key + 32u * num_words - 1) / tile_keys - window_tile + 1);
    for (int i = static_cast<int>(threadIdx.x); i < num_tiles; i += kThreads) flags[i] = 0;
    int count = picks_of(row_begin);
    Picks picks = load_picks<kVector>(a, tile.member.query_start + row_begin, 0, count);
    __syncthreads();  // bitmap and flags are clear
    for (std::int64_t row = row_begin; row < row_end; ++row) {
      std::uint32_t* words = a.words + mask.word_offset + row * mask.row_words + window;
      const auto shift = static_cast<int>(reinterpret_cast<std::uintptr_t>(words) / 4 % 4);
      const std::int64_t key_end =
          min(std::int64_t{mask.first_key} + mask.num_keys, tile.member.context_len + row + 1);
      const auto num_keys = static_cast<unsigned>(max(
          min(key_end - std::int64_t{window_key}, std::int64_t{32} * num_words), std::int64_t{0}));
      for (int first = 0;;) {
        set_bits(picks, window_key, num_keys, static_cast<unsigned>(shift), bitmap);
        first += kThreads * kPicks;
        if (first >= count) break;
        picks = load_picks<kVector>(a, tile.member.query_start + row, first, count);
      }
      if (row + 1 < row_end) {
        count = picks_of(row + 1);
        picks = load_picks<kVector>(a, tile.member.query_start + row + 1, 0, count);
      }
      __syncthreads();
      for (int v = static_cast<int>(threadIdx.x); 4 * v < num_words + shift; v += kThreads) {
        uint4& four = reinterpret_cast<uint4*>(bitmap)[v];
        const std::uint32_t bits[4] = {four.x, four.y, four.z, four.w};
        const int word = 4 * v - shift;  // of bits[0]; −3 … −1: in front of the window
        if (word >= 0 && word + 4 <= num_words) {
          // By an intrinsic: the compiler would share single stores with the branch below.
          __stcg(reinterpret_cast<uint4*>(words + word),
                 make_uint4(bits[0], bits[1], bits[2], bits[3]));
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (word + i >= 0 && word + i < num_words) words[word + i] = bits[i];
        }
        if ((bits[0] | bits[1] | bits[2] | bits[3]) == 0) continue;
        four = {0, 0, 0, 0};
        if (word >= 0) {
          flag_tiles(bits, window_key + 32u * word, tile_keys, window_tile, flags);
        } else {  // what lies in front of the window has no tile here, and no bits
#pragma unroll
          for (int i = 1; i < 4; ++i)
            if (word + i >= 0)
              flag_tiles<1>({bits[i]}, window_key + 32u * (word + i), tile_keys, window_tile,
                            flags);
        }
      }
      __syncthreads();
    }
    for (int i = static_cast<int>(threadIdx.x); i < num_tiles; i += kThreads)
      if (flags[i] != 0) tile.ids[static_cast<int>(window_tile) + i - mask.first_tile] = 1;
    __syncthreads();  // before the next window clears the flags
  }

  __threadfence();  // this thread's flags, before the block counts as finished
  __syncthreads();
  if (threadIdx.x == 0) {
    const std::int64_t blocks = (tile.row_end - tile.row_begin + kBlockRows - 1) / kBlockRows;
    is_last = atomicAdd(tile.count, 1) == blocks - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  compact(tile);
}

void run(const BuildMasksProblem& problem, const BuildMasksCall& call, std::span<std::byte>,
         Stream stream) {
  check_shapes(problem, call);
  const std::int64_t rows = call.picks.extent(0);
  if (rows == 0 || call.members.empty()) return;
  check_memory(call.mask, true);
  const std::int64_t queries = call.mask.tile.queries;
  const auto num_members = static_cast<std::int64_t>(call.members.size());
  // Members have rows of `picks` of their own: so many query tiles there are at most.
  const std::int64_t tiles = std::min(rows, rows / queries + num_members);
  const std::int64_t blocks_per_tile = (std::min(rows, queries) + kBlockRows - 1) / kBlockRows;
  require(tiles * blocks_per_tile <= std::numeric_limits<std::int32_t>::max(), "picks", rows,
          "fewer rows and members than a grid has blocks");
  const MaskArguments arguments{call.picks,
                                call.counts,
                                call.members.data(),
                                call.mask.members.data(),
                                static_cast<int>(num_members),
                                call.mask.tile,
                                call.mask.words,
                                call.mask.tile_counts,
                                call.mask.tile_ids,
                                problem.topk,
                                static_cast<unsigned>(blocks_per_tile)};
  const bool vector = problem.topk % 4 == 0 && call.picks.stride(1) == 1 &&
                      aligned(call.picks.data_handle(), 16, {call.picks.stride(0)});
  clear_tiles_kernel<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(arguments);
  check_launch("clear_tiles_kernel");
  const auto blocks = static_cast<unsigned>(tiles * blocks_per_tile);
  if (vector)
    build_masks_kernel<true><<<blocks, kThreads, 0, stream>>>(arguments);
  else
    build_masks_kernel<false><<<blocks, kThreads, 0, stream>>>(arguments);
  check_launch("build_masks_kernel");
}

}  // namespace

std::vector<Entry<BuildMasksProblem, BuildMasksCall>> build_masks_entries() {
  return {{"cuda", Backend::cuda, "4 rows a block, built in shared memory; the last block lists",
           [](const BuildMasksProblem&) { return why_no_device(); },
           [](const BuildMasksProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cuda
