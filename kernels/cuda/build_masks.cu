// Operation `build_masks` on CUDA.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "kernels/common/mask_checks.h"
#include "kernels/common/ptx.cuh"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"
#include "kernels/cuda/members.cuh"

namespace sparse_mla::cuda {
namespace {

/// A warp's part of the bitmap in shared memory: groups of 32 words, which leave as whole lines of
/// 128 bytes. 33 groups hold the 1,025 words of a row of 32,768 keys wherever it begins in its
/// first line.
constexpr int kWarpGroups = 33, kWarpWords = 32 * kWarpGroups;
/// Warps of a block: 16 bitmaps are 66 KB, so that two such blocks share an SM.
constexpr int kMaxWarps = 16, kMaxThreads = 32 * kMaxWarps, kBlocksPerSm = 2;
/// Loads of four picks that a thread has in flight: 4 KB a warp, so that the 16 warps of one block
/// are enough for the latency of memory.
template <bool kVector>
constexpr int kLoads = kVector ? 8 : 2;

/// How query rows are dealt to blocks.
struct Split {
  int warps;       ///< of a block, a power of two
  int block_rows;  ///< rows of a block, all of one query tile
};

/// Where the rows give most SMs a block of 64, a block takes a query tile (or 64 rows of it): it
/// lists the tile's keys alone, without flags in memory. Fewer rows: blocks of four rows and two
/// warps for each, so that a call is spread over the card.
constexpr Split split_rows(std::int64_t rows, std::int64_t queries, std::int64_t num_sms) {
  constexpr std::int64_t kRows = 64, kFewRows = 4;
  const std::int64_t block_rows = std::min(4 * rows >= 3 * kRows * num_sms ? kRows : kFewRows,
                                           std::max<std::int64_t>(queries, 1));
  const auto warps = static_cast<int>(std::bit_ceil(static_cast<std::uint64_t>(block_rows)));
  return {std::clamp(block_rows <= kFewRows ? 2 * warps : warps, 4, kMaxWarps),
          static_cast<int>(block_rows)};
}

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
  int block_rows;
  unsigned blocks_per_tile;  ///< ceil(rows of the largest query tile / block_rows)
};

/// A query tile: rows [row_begin, row_end) of a member, and what is needed of the member. Without
/// initialisers, so that it can lie in shared memory.
struct QueryTile {
  std::int64_t row_begin, row_end;
  std::int64_t query_start, context_len;
  std::int64_t word_offset;
  std::int32_t* ids;    ///< [max_tiles]
  std::int32_t* count;  ///< number of ids
  std::int32_t first_key, num_keys, row_words, first_tile, max_tiles;
};

/// Query tile number `index` of the call; without rows where there are fewer. Tiles are numbered as
/// tile_counts lists them. Whole warps call it.
__device__ QueryTile find_tile(const MaskArguments& a, std::int64_t index) {
  index += a.masks[0].tile_count_offset;
  const int m = find_record_by_warp(a.masks, a.num_members, &MaskMember::tile_count_offset, index);
  const ChunkMember& member = a.members[m];
  const MaskMember& mask = a.masks[m];
  const std::int64_t own = index - mask.tile_count_offset, row_begin = own * a.tile.queries;
  return {row_begin,
          min(row_begin + a.tile.queries, std::int64_t{member.query_len}),
          member.query_start,
          member.context_len,
          mask.word_offset,
          a.tile_ids + mask.tile_offset + own * mask.max_tiles,
          a.tile_counts + index,
          mask.first_key,
          mask.num_keys,
          mask.row_words,
          mask.first_tile,
          mask.max_tiles};
}

// A block clears the list and the count of one query tile: where several blocks share a tile,
// build_masks_kernel uses them as flags and as the count of blocks that have finished.
__global__ void __launch_bounds__(kMaxThreads) clear_tiles_kernel(const MaskArguments a) {
  const QueryTile tile = find_tile(a, blockIdx.x);
  if (tile.row_begin >= tile.row_end) return;
  for (int i = static_cast<int>(threadIdx.x); i < tile.max_tiles; i += static_cast<int>(blockDim.x))
    tile.ids[i] = 0;
  if (threadIdx.x == 0) *tile.count = 0;
}

/// Threads that build a row together: one warp, or several where the row needs more shared memory
/// or the block has more warps than rows.
struct Team {
  int index, size, rank;  ///< size in threads

  /// Teams of several warps take their rows in step, so that the block's barrier is theirs too:
  /// racecheck takes named barriers whose number is not a constant for missing ones.
  __device__ void sync() const {
    if (size == 32)
      __syncwarp();
    else
      __syncthreads();
  }
};

/// How many picks of a row count; 0 behind row_end. Those at or behind the count are not read.
__device__ int count_picks(const MaskArguments& a, const QueryTile& tile, std::int64_t row,
                           int row_end) {
  const std::int64_t token = tile.query_start + row;
  if (row >= row_end || token < 0 || token >= a.picks.extent(0)) return 0;
  return a.counts == nullptr ? a.topk : max(min(a.counts[token], a.topk), 0);
}

/// The i-th four of a thread's picks in a step, −1 behind `count`: neighbours with kVector, which
/// leaves the row's last count % 4 to load_rest, else picks that are 32 apart. `own` are the
/// thread's first pick of the step, of which the row has `count` at or behind that one.
template <bool kVector>
__device__ int4 load_four(const std::int32_t* own, std::int64_t stride, int count, int i) {
  int4 four{-1, -1, -1, -1};
  if constexpr (kVector) {
    four = ptx::load_4_or_minus_1(own + 128 * i, 128 * i + 4 <= count);
  } else {
    const auto load = [&](int j) {
      const int pick = 32 * (4 * i + j);
      return pick < count ? own[pick * stride] : -1;
    };
    four = {load(0), load(1), load(2), load(3)};
  }
  return four;
}
template <bool kVector>
__device__ std::int32_t load_rest(const std::int32_t* picks, std::int64_t stride, int count,
                                  const Team& team) {
  return kVector && team.rank < count % 4 ? picks[(count / 4 * 4 + team.rank) * stride] : -1;
}

/// Sets the bits of the picks in [begin, begin + num_keys) in the bitmap at shared address
/// `bitmap`, where key `begin` is bit 0; other picks set one in `waste`, a word of the lane's own,
/// because a condition around an atomic is a branch. Keys end at 2^31, so that in unsigned numbers
/// a negative pick lies behind all of them.
template <int kCount>
__device__ void set_bits(const std::int32_t (&picks)[kCount], unsigned begin, unsigned num_keys,
                         std::uint32_t bitmap, std::uint32_t waste) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const unsigned bit = static_cast<unsigned>(picks[i]) - begin;
    ptx::or_shared(bit < num_keys ? bitmap + bit / 32 * 4 : waste, 1u << (bit % 32));
  }
}

/// Part of the keys of a row, and how it lies on the request's grid of 32 keys, its *cells*: key
/// tiles are made of whole cells, words only where the mask's first key is a multiple of 32.
struct Window {
  unsigned key;  ///< of bit 0
  int num_words;
  unsigned inside;  ///< bits of each word in its first cell, 1 … 32; the rest lie in the next
};

/// Ors `bits` into `cells` from bit `position` on, which may be down to −32 where the first bits
/// are 0.
__device__ void or_bits(std::uint32_t* cells, int position, std::uint32_t bits) {
  const int word = position >> 5, offset = position & 31;
  const std::uint32_t low = bits << offset, high = offset == 0 ? 0 : bits >> (32 - offset);
  if (low != 0) atomicOr(cells + word, low);
  if (high != 0) atomicOr(cells + word + 1, high);
}

/// A team's finished bitmap, whose word `skew` is the window's first, goes to `words` and is
/// cleared behind; cells with a bit are marked in `cells`. Warps take groups in turn: a group is a
/// line of memory. A vote finds the words of a group that are not 0, and lane k keeps the vote on
/// the k-th group until there are 32 to be marked.
__device__ void store_row(const Window& window, const Team& team, int skew, std::uint32_t* bitmap,
                          std::uint32_t* words, std::uint32_t* cells) {
  const int lane = team.rank % 32, warp = team.rank / 32, warps = team.size / 32;
  const int num_groups = (skew + window.num_words + 31) / 32;
  const std::uint32_t first_cell = window.inside == 32 ? ~0u : (1u << window.inside) - 1;
  for (int begin = warp; begin < num_groups; begin += 32 * warps) {
    const int num_turns = min((num_groups - begin + warps - 1) / warps, 32);
    std::uint32_t low = 0, high = 0;
#pragma unroll 4
    for (int k = 0; k < num_turns; ++k) {
      const int at = 32 * (begin + k * warps) + lane, word = at - skew;
      const std::uint32_t bits = bitmap[at];
      bitmap[at] = 0;
      if (word >= 0 && word < window.num_words) __stcg(words + word, bits);
      const std::uint32_t vote = __ballot_sync(~0u, (bits & first_cell) != 0);
      if (lane == k) low = vote;
      if (window.inside < 32) {
        const std::uint32_t next = __ballot_sync(~0u, (bits & ~first_cell) != 0);
        if (lane == k) high = next;
      }
    }
    const int position = 32 * (begin + lane * warps) - skew;
    or_bits(cells, position, low);
    or_bits(cells, position + 1, high);
  }
}

/// Is a cell of [begin, end) marked?
__device__ bool any_cell(const std::uint32_t* cells, unsigned begin, unsigned end) {
  while (begin < end) {
    const unsigned count = min(32 - begin % 32, end - begin);
    if ((cells[begin / 32] >> (begin % 32) << (32 - count)) != 0) return true;
    begin += count;
  }
  return false;
}

/// Is a bit of the key tile that is number `i` of the member's list set in the window?
__device__ bool any_in_tile(const std::uint32_t* cells, const Window& window, unsigned tile_keys,
                            std::int64_t tile) {
  const std::int64_t tile_cells = tile_keys / 32, first = window.key / 32;
  const std::int64_t end = first + window.num_words + (window.inside < 32 ? 1 : 0);
  const std::int64_t begin_cell = max(tile * tile_cells, first);
  const std::int64_t end_cell = min((tile + 1) * tile_cells, end);
  return begin_cell < end_cell && any_cell(cells, static_cast<unsigned>(begin_cell - first),
                                           static_cast<unsigned>(end_cell - first));
}

/// Writes a query tile's list: the numbers of the key tiles i for which set(i), ascending, then
/// zeros. set(i) may look at the list itself: the n-th number stands no later than its flag, and a
/// turn's flags are read before its numbers are written.
template <class Set>
__device__ void list_tiles(const QueryTile& tile, Set set) {
  __shared__ int of_warp[kMaxWarps];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int threads = static_cast<int>(blockDim.x), max_tiles = tile.max_tiles;
  int count = 0;
  for (int first = 0; first < max_tiles; first += threads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const bool listed = i < max_tiles && set(i);
    const unsigned votes = __ballot_sync(~0u, listed);
    if (lane == 0) of_warp[warp] = __popc(votes);
    __syncthreads();
    int before = count;
    for (int w = 0; w < threads / 32; ++w) {
      if (w < warp) before += of_warp[w];
      count += of_warp[w];
    }
    if (listed) tile.ids[before + __popc(votes & ((1u << lane) - 1))] = tile.first_tile + i;
    __syncthreads();  // of_warp is written again
  }
  for (int i = count + static_cast<int>(threadIdx.x); i < max_tiles; i += threads) tile.ids[i] = 0;
  if (threadIdx.x == 0) *tile.count = count;
}

// Tile: up to 64 query rows of one query tile × all of the member's keys, 1,025 words for each warp
// of a team at a time. Roles: a warp (a team of several where rows are longer than 32,768 keys or
// fewer than warps) builds every n-th row alone, without a block barrier. Schedule of a row: set
// the picks' bits in the team's bitmap in shared memory – integer atomics, so that order and
// duplicates do not matter –, each load of four picks replaced by one further on, which at the
// row's end is the next row's, so that kLoads loads a thread are in flight throughout; team
// barrier; write the bitmap out by lines, clear it behind; team barrier. At last the block lists
// the key tiles that have a bit: from shared memory where the query tile and its keys are all its
// own, else by flags in the list, which the block that finishes the tile last turns into numbers.
// Bytes of a row of 32,768 keys with 2,048 picks: 8 KB read, 4 KB written; 16,384 rows 201 MB.
template <bool kVector>
__global__ void __launch_bounds__(kMaxThreads, kBlocksPerSm)
    build_masks_kernel(const MaskArguments a) {
  extern __shared__ std::uint32_t bitmaps[];  // [warps, kWarpWords], then [32] for waste
  __shared__ std::uint32_t cells[kMaxWarps * kWarpGroups + 2];
  __shared__ bool is_last;
  __shared__ QueryTile tile;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if (thread < 32) {
    const QueryTile found = find_tile(a, blockIdx.x / a.blocks_per_tile);
    if (thread == 0) tile = found;
  }
  for (int i = thread; i < threads / 32 * kWarpWords; i += threads) bitmaps[i] = 0;
  __syncthreads();
  const std::int64_t block_begin =
      tile.row_begin + std::int64_t{blockIdx.x % a.blocks_per_tile} * a.block_rows;
  if (block_begin >= tile.row_end) return;
  const auto row_begin = static_cast<int>(block_begin);  // members' lengths are 32-bit numbers
  const auto row_end = static_cast<int>(min(block_begin + a.block_rows, tile.row_end));

  // Windows of `capacity` words, the rest of the team's bitmap being for the skew. A team doubles
  // until it holds a row or is the block, and no team is left without a row.
  const auto capacity = [](int team_size) { return team_size / 32 * kWarpWords - 31; };
  int team_size = 32;
  while (team_size < threads &&
         (capacity(team_size) < tile.row_words || (threads / team_size) / 2 >= row_end - row_begin))
    team_size *= 2;
  const Team team{thread / team_size, team_size, thread % team_size};
  const int num_teams = threads / team_size;
  const bool shared_tile = a.blocks_per_tile > 1;
  const bool by_flags = shared_tile || tile.row_words > capacity(team_size);
  const auto tile_keys = static_cast<unsigned>(a.tile.keys);
  std::uint32_t* bitmap = bitmaps + team.index * (team_size / 32) * kWarpWords;

  if (by_flags && !shared_tile)
    for (int i = thread; i < tile.max_tiles; i += threads) tile.ids[i] = 0;
  const std::int64_t stride = a.picks.stride(1);
  const std::int32_t* tile_picks = a.picks.data_handle() + tile.query_start * a.picks.stride(0);
  const auto own_picks = [&](int row, int pick) {  // somewhere where the row has none
    return tile_picks + row * a.picks.stride(0) + pick * stride;
  };
  const std::uint32_t lane_waste =
      ptx::shared_address(bitmaps + threads / 32 * kWarpWords + thread % 32);
  Window window{};
  window.inside = 32 - static_cast<unsigned>(tile.first_key) % 32;
  for (int first_word = 0; first_word < tile.row_words; first_word += capacity(team_size)) {
    window.key = static_cast<unsigned>(tile.first_key) + 32u * static_cast<unsigned>(first_word);
    window.num_words = min(capacity(team_size), tile.row_words - first_word);
    for (int i = thread; i < (window.num_words + 1) / 32 + 1; i += threads) cells[i] = 0;

    constexpr int kOwn = 128 * kLoads<kVector>;  // picks of a warp in a step
    const int step = kOwn * (team.size / 32),
              own_first = kOwn * (team.rank / 32) + (kVector ? 4 : 1) * (team.rank % 32);
    int row = row_begin + team.index;
    int count = count_picks(a, tile, row, row_end);
    int next_count = count_picks(a, tile, std::int64_t{row} + num_teams, row_end);
    int4 loaded[kLoads<kVector>];
#pragma unroll
    for (int i = 0; i < kLoads<kVector>; ++i)
      loaded[i] = load_four<kVector>(own_picks(row, own_first), stride, count - own_first, i);
    __syncthreads();  // bitmaps, cells and list are clear
    const int num_turns = (row_end - row_begin + num_teams - 1) / num_teams;
    for (int turn = 0; turn < num_turns; ++turn, row += num_teams) {
      if (team.size == 32 && row >= row_end) break;
      const int count_after = count_picks(a, tile, std::int64_t{row} + 2 * num_teams, row_end);
      const std::int32_t rest = load_rest<kVector>(own_picks(row, 0), stride, count, team);
      std::uint32_t* words =
          a.words + tile.word_offset + std::int64_t{row} * tile.row_words + first_word;
      const auto skew = static_cast<int>(reinterpret_cast<std::uintptr_t>(words) / 4 % 32);
      const std::uint32_t row_bitmap = ptx::shared_address(bitmap + skew);
      const std::int64_t key_end =
          min(std::int64_t{tile.first_key} + tile.num_keys, tile.context_len + row + 1);
      const auto num_keys = static_cast<unsigned>(
          max(min(key_end - std::int64_t{window.key}, std::int64_t{32} * window.num_words),
              std::int64_t{0}));
      for (int first = step;; first += step) {
        const bool more = first < count;
        const int from_first = (more ? first : 0) + own_first;
        const int from_count = (more ? count : next_count) - from_first;
        const std::int32_t* from = own_picks(more ? row : row + num_teams, from_first);
#pragma unroll
        for (int i = 0; i < kLoads<kVector>; ++i) {
          const int4 four = loaded[i];
          set_bits<4>({four.x, four.y, four.z, four.w}, window.key, num_keys, row_bitmap,
                      lane_waste);
          loaded[i] = load_four<kVector>(from, stride, from_count, i);
        }
        if (!more) break;
      }
      if constexpr (kVector) set_bits<1>({rest}, window.key, num_keys, row_bitmap, lane_waste);
      count = next_count;
      next_count = count_after;
      team.sync();
      if (row < row_end) store_row(window, team, skew, bitmap, words, cells);
      team.sync();
    }
    __syncthreads();  // the window's cells are marked
    if (!by_flags) break;
    for (int i = thread; i < tile.max_tiles; i += threads)
      if (any_in_tile(cells, window, tile_keys, tile.first_tile + i)) tile.ids[i] = 1;
    __syncthreads();  // before the next window clears the cells
  }

  if (!by_flags) {
    list_tiles(tile, [&](int i) {
      return any_in_tile(cells, window, tile_keys, std::int64_t{tile.first_tile} + i);
    });
    return;
  }
  if (shared_tile) {
    __threadfence();  // this thread's flags, before the block counts as finished
    __syncthreads();
    if (thread == 0) {
      const std::int64_t blocks = (tile.row_end - tile.row_begin + a.block_rows - 1) / a.block_rows;
      is_last = atomicAdd(tile.count, 1) == blocks - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
  }
  list_tiles(tile, [&](int i) { return __ldcg(tile.ids + i) != 0; });  // not L1: others' writes
}

void run(const BuildMasksProblem& problem, const BuildMasksCall& call, std::span<std::byte>,
         Stream stream) {
  check_shapes(problem, call);
  const std::int64_t rows = call.picks.extent(0);
  if (rows == 0 || call.members.empty()) return;
  check_mask_arrays(call.mask);
  const std::int64_t queries = call.mask.tile.queries;
  const auto num_members = static_cast<std::int64_t>(call.members.size());
  // Members have rows of `picks` of their own: so many query tiles there are at most.
  const std::int64_t tiles = std::min(rows, rows / queries + num_members);
  const Split split = split_rows(rows, queries, current_device().num_sms);
  const std::int64_t blocks_per_tile =
      (std::min(rows, queries) + split.block_rows - 1) / split.block_rows;
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
                                split.block_rows,
                                static_cast<unsigned>(blocks_per_tile)};
  const bool vector = problem.topk % 4 == 0 && aligned_rows(call.picks, 16);
  const auto threads = static_cast<unsigned>(32 * split.warps);
  if (blocks_per_tile > 1) {
    clear_tiles_kernel<<<static_cast<unsigned>(tiles), threads, 0, stream>>>(arguments);
    check_launch("clear_tiles_kernel");
  }
  const auto blocks = static_cast<unsigned>(tiles * blocks_per_tile);
  const int bytes = (split.warps * kWarpWords + 32) * static_cast<int>(sizeof(std::uint32_t));
  if (vector) {
    allow_shared(build_masks_kernel<true>, bytes);
    build_masks_kernel<true><<<blocks, threads, bytes, stream>>>(arguments);
  } else {
    allow_shared(build_masks_kernel<false>, bytes);
    build_masks_kernel<false><<<blocks, threads, bytes, stream>>>(arguments);
  }
  check_launch("build_masks_kernel");
}

}  // namespace

std::vector<Entry<BuildMasksProblem, BuildMasksCall>> build_masks_entries() {
  return {{"cuda", Backend::cuda,
           "a warp per row, built in shared memory; a block per query tile lists",
           [](const BuildMasksProblem&) { return why_no_device(); },
           [](const BuildMasksProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cuda
