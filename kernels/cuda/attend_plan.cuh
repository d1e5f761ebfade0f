/// What the kernels of `attend` share: the call as device code takes it, the list of work that a
/// first small kernel makes from the members, and the epilogue of a result row.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/common/merge_weights.h"
#include "sparse_mla/attention.h"
#include "sparse_mla/host_device.h"

namespace sparse_mla::cuda {

/// An AttendCall as a kernel parameter: spans as pointers (their members are host functions).
struct AttendArguments {
  View3<const bfloat16> q;                   ///< [num_tokens, num_heads, P+R]
  View3<const bfloat16> k_nope;              ///< [rows, num_heads, P]
  View2<const bfloat16> k_pe;                ///< [rows, R]
  View3<const bfloat16> v;                   ///< [rows, num_heads, V]
  View3<float> out;                          ///< [running rows, num_heads, V]
  View2<float> lse;                          ///< [num_heads, running rows]
  const ChunkMember* members = nullptr;      ///< [num_members]
  const MaskMember* mask_members = nullptr;  ///< [num_members], mode masked only, as all masks
  const std::uint32_t* mask_words = nullptr;
  const std::int32_t* mask_tile_counts = nullptr;
  const std::int32_t* mask_tile_ids = nullptr;
  MaskTile mask_tile;
  std::int64_t merge_row_end = 0;
  float softmax_scale = 0;
  int num_members = 0;
  int num_heads = 0;
  bool causal = false;
};

/// Keys that a CTA of the portable kernels attends at a time; pieces of a member's keys are whole
/// blocks.
SPARSE_MLA_HOST_DEVICE constexpr int key_block() { return 64; }
/// Blocks below which a tile's keys are not cut: a piece's prologue and its partial (written, read
/// and merged) cost about one block's time.
SPARSE_MLA_HOST_DEVICE constexpr int least_piece_blocks() { return 8; }
/// Partials that the workspace holds, in halves per resident CTA: a first round of pieces, the
/// small pieces that fill up behind it, and room for tiles of few rows, which store as much as
/// others.
SPARSE_MLA_HOST_DEVICE constexpr int half_parts_per_cta() { return 5; }
/// Time per block of keys of a tile of few rows (few_rows()), in sixteenths of a full tile's.
SPARSE_MLA_HOST_DEVICE constexpr int few_rows_cost() { return 4; }
/// A query tile's time per block of keys, in sixteenths of a full tile's. Fewer rows save
/// arithmetic but no copies and no latency.
SPARSE_MLA_HOST_DEVICE constexpr int block_cost(int rows, int tile_rows, int few_rows,
                                                int few_cost) {
  if (rows <= few_rows) return few_cost;
  return rows >= tile_rows ? 16 : 8 + 8 * rows / tile_rows;
}
/// Time of a work item beside its blocks (its queries in, its result out), the same unit.
SPARSE_MLA_HOST_DEVICE constexpr int item_cost() { return 24; }
/// Rows up to which a tile is attended by warps that share its keys out (attend_few_rows.cuh), its
/// 16 rows being one fragment of the tensor cores. 0 where two blocks of keys and values do not fit
/// beside the queries in the shared memory of a full tile of `tile_rows`.
SPARSE_MLA_HOST_DEVICE constexpr int few_rows(int qk_dim, int v_dim, int tile_rows) {
  const int block = key_block() * (qk_dim + v_dim), rows = 16;
  return rows * qk_dim + 2 * block <= tile_rows * qk_dim + block ? rows : 0;
}
/// Products of a block's scores (16 columns each) in a row without a branch: all of them, so that
/// fragments are read ahead over the whole head width. 4 would keep the loop.
SPARSE_MLA_HOST_DEVICE constexpr int unrolled_score_steps() { return 16; }
/// Heads that follow each other before the next query tile's turn: the CTAs at work then share the
/// keys of few heads in L2 (8 heads × 4,096 keys × 640 bytes = 20 MiB) and the masks of a tile.
SPARSE_MLA_HOST_DEVICE constexpr int section_heads() { return 8; }

/// A query tile of one member (all heads), or one piece of its keys.
struct AttendItem {
  std::int32_t member;
  std::int32_t row;     ///< first query row of the tile
  std::uint16_t piece;  ///< of `num_pieces`
  std::uint16_t num_pieces;
  std::int32_t slot;  ///< place of the piece's partial; −1: not cut
};
/// A query tile whose keys are cut; its partials lie in slots [slot, slot + num_pieces).
struct CutTile {
  std::int32_t member;
  std::int32_t row;
  std::int32_t num_pieces;
  std::int32_t slot;
};

struct AttendCounts {
  std::int32_t num_cut_tiles;
  std::int32_t next;            ///< work handed out so far: item × head
  std::int32_t bucket_end[32];  ///< items of the buckets up to this one
};

/// The list in the workspace.
struct AttendPlan {
  AttendCounts* counts = nullptr;
  AttendItem* items = nullptr;   ///< [max_items], longest first
  CutTile* cut_tiles = nullptr;  ///< [max_slots / 2]
  float* part_out = nullptr;     ///< [slots, num_heads, tile_rows, V], normalised
  float* part_lse = nullptr;     ///< [slots, num_heads, tile_rows], natural logarithm
  std::int64_t max_items = 0;
  std::int32_t max_slots = 0;  ///< 0: keys are never cut
  std::int32_t tile_rows = 0;
  std::int32_t few_rows = 0;  ///< rows up to which a tile is attended the cheap way; 0: none is
  std::int32_t num_ctas = 0;  ///< that are resident together
  std::int32_t key_block = cuda::key_block();
  std::int32_t least_piece_blocks = cuda::least_piece_blocks();
  std::int32_t few_cost = few_rows_cost();
};

/// Keys, from the member's first, that query rows [0, row_end) of the member can see.
__device__ inline std::int32_t visible_keys(const AttendArguments& args, const ChunkMember& member,
                                            std::int32_t row_end) {
  if (!args.causal) return max(member.num_keys, 0);
  const std::int64_t seen = std::int64_t{member.context_len} + row_end - member.first_key;
  return static_cast<std::int32_t>(max(std::int64_t{0}, min(seen, std::int64_t{member.num_keys})));
}

/// Keys [begin, end), request-local, of one piece of a query tile that ends before row `row_end`.
struct KeyRange {
  std::int32_t begin, end;
};
/// `kBlock`: the plan's key_block.
template <int kBlock = key_block()>
__device__ inline KeyRange piece_keys(const AttendArguments& args, const ChunkMember& member,
                                      std::int32_t row_end, const AttendItem& item) {
  const std::int32_t keys = visible_keys(args, member, row_end);
  // In 32 bits: kernels at the register limit spill around a call of the 64-bit division.
  const unsigned blocks = (static_cast<unsigned>(keys) + kBlock - 1) / kBlock;
  const unsigned pieces = item.num_pieces, quotient = blocks / pieces, rest = blocks % pieces;
  const auto key_of = [&](unsigned piece) {  // blocks · piece / pieces, in keys
    return static_cast<std::int32_t>(
        min(std::int64_t{quotient * piece + rest * piece / pieces} * kBlock, std::int64_t{keys}));
  };
  return {member.first_key + key_of(item.piece), member.first_key + key_of(item.piece + 1u)};
}

/// Whether a member's rows of q, of the running partial, of keys and values are there. What is not
/// there a device cannot refuse: it attends nothing for such a member.
__device__ inline bool is_inside(const AttendArguments& args, const ChunkMember& member) {
  const auto within = [](std::int64_t begin, std::int64_t count, std::int64_t size) {
    return begin >= 0 && count >= 0 && begin + count <= size;
  };
  return within(member.query_start, member.query_len, args.q.extent(0)) &&
         within(member.packed_token, member.query_len, args.out.extent(0)) &&
         (member.num_keys == 0 || within(member.key_row, member.num_keys, args.k_pe.extent(0)));
}

/// Query tiles of a member that are alike: all but a last one with fewer rows, or that one.
struct TileClass {
  std::int32_t row;     ///< first row of the first tile
  std::int32_t tiles;   ///< may be 0
  std::int32_t blocks;  ///< of keys, of the last tile
  std::int32_t cost;    ///< block_cost()
  bool few;             ///< rows ≤ plan.few_rows
};
__device__ inline TileClass tile_class(const AttendArguments& args, const AttendPlan& plan,
                                       const ChunkMember& member, bool last) {
  const std::int32_t query_len = is_inside(args, member) ? member.query_len : 0;
  const std::int32_t rest = query_len % plan.tile_rows;
  TileClass tiles;
  tiles.row = last ? query_len - rest : 0;
  tiles.tiles = last ? (rest > 0 ? 1 : 0) : query_len / plan.tile_rows;
  const int rows = last ? rest : plan.tile_rows;
  tiles.blocks =
      (visible_keys(args, member, last ? query_len : query_len - rest) + plan.key_block - 1) /
      plan.key_block;
  tiles.cost = block_cost(rows, plan.tile_rows, plan.few_rows, plan.few_cost);
  tiles.few = rows <= plan.few_rows;
  return tiles;
}

/// How keys are cut, costs in sixteenths of a block. Pieces of `round` fill the CTAs a whole number
/// of times, pieces of tiles with few rows are `small` and fill up what is left.
struct CutLengths {
  std::uint32_t round = 0;  ///< 0: no cuts
  std::uint32_t small = 0;
  std::uint32_t least_blocks = 1;
  /// Pieces of a tile.
  __device__ int pieces(std::uint32_t blocks, std::uint32_t cost, bool few) const {
    if (round == 0) return 1;
    const std::uint32_t length = few ? small : round, total = blocks * cost;
    return static_cast<int>(max(1u, min((total + length - 1) / length, blocks / least_blocks)));
  }
};

/// Makes the list: one CTA, a thread per member and kind of tile. Items are sorted by the power of
/// two of their length, longest first.
/// When long tiles would leave CTAs idle at the end, keys are cut. With a share T = the whole work
/// / CTAs, ways to cut are tried side by side: tiles in the fewest pieces that are no longer than L
/// ≥ T / r, where those pieces are at most r per CTA. They take about r · L; what is shorter than
/// half a piece fills the rest up to T. The way with the least estimate wins, at equal ones the
/// first. Places within a bucket and slots are dealt by arrival: no result depends on them.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    plan_attend_kernel(const __grid_constant__ AttendArguments args,
                       const __grid_constant__ AttendPlan plan) {
  constexpr int kBuckets = 32;
  constexpr int kRounds = 8, kSteps = 8, kSmall = 4, kWays = kRounds * kSteps * kSmall;
  constexpr int kLanes = kThreads / kWays;  // threads per way
  static_assert(kLanes >= 1 && kLanes <= 32 && kThreads == kLanes * kWays);
  struct LongTiles {
    std::uint32_t blocks, tiles;
    std::uint16_t cost;
    bool few;
  };
  __shared__ unsigned long long load, best;
  __shared__ std::uint32_t longest;
  __shared__ LongTiles long_tiles[kThreads];
  __shared__ int num_long;
  __shared__ int bucket_place[kBuckets], num_slots, num_cut_tiles;
  if (threadIdx.x < kBuckets) bucket_place[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    load = 0;
    best = ~0ull;
    longest = 0;
    num_slots = num_cut_tiles = num_long = 0;
  }
  __syncthreads();

  const int rows = plan.tile_rows, classes = 2 * args.num_members;
  for (int c = threadIdx.x; c < classes && plan.max_slots > 0; c += kThreads) {
    const ChunkMember member = args.members[c / 2];
    const TileClass tiles = tile_class(args, plan, member, c % 2 != 0);
    if (tiles.tiles == 0) continue;
    // First and last tile averaged.
    const std::uint32_t first_blocks =
        (visible_keys(args, member, min(tiles.row + rows, member.query_len)) + plan.key_block - 1) /
        plan.key_block;
    atomicAdd(&load,
              ((static_cast<unsigned long long>(tiles.blocks) + first_blocks) * tiles.cost / 2 +
               item_cost()) *
                  tiles.tiles * args.num_heads);
    atomicMax(&longest, static_cast<std::uint32_t>(tiles.blocks) * tiles.cost);
  }
  __syncthreads();
  const unsigned long long share = load / plan.num_ctas + 1;
  CutLengths lengths;
  // Where no tile is an eighth of a CTA's share, longest first is balanced enough.
  if (plan.max_slots > 0 && share < 8ull * longest) {
    for (int c = threadIdx.x; c < classes; c += kThreads) {
      const TileClass tiles = tile_class(args, plan, args.members[c / 2], c % 2 != 0);
      const std::uint32_t total = static_cast<std::uint32_t>(tiles.blocks) * tiles.cost;
      if (tiles.tiles == 0 || total <= share / 16) continue;
      const int place = atomicAdd(&num_long, 1);
      if (place < kThreads)
        long_tiles[place] = {static_cast<std::uint32_t>(tiles.blocks),
                             static_cast<std::uint32_t>(tiles.tiles),
                             static_cast<std::uint16_t>(tiles.cost), tiles.few};
    }
    __syncthreads();
    const int way = threadIdx.x / kLanes;
    const unsigned long long rounds = way / (kSteps * kSmall) + 1;
    const auto lengths_of = [&](int number) {
      const unsigned long long r = number / (kSteps * kSmall) + 1, step = number / kSmall % kSteps;
      CutLengths cut;
      cut.least_blocks = plan.least_piece_blocks;
      cut.round = static_cast<std::uint32_t>(max(1ull, share * (16 + step) / (16 * r)));
      const int part = number % kSmall;  // T / 16, T / 4, T / 2, T
      cut.small = max(1u, static_cast<std::uint32_t>(share / (part == 0 ? 16 : 8 >> part)));
      return cut;
    };
    const CutLengths cut = lengths_of(way);
    unsigned long long units = 0, slots = 0;
    std::uint32_t fill = 0;  // the longest that is not part of a round
    for (int i = threadIdx.x % kLanes; i < num_long && num_long <= kThreads; i += kLanes) {
      const LongTiles tiles = long_tiles[i];
      const int pieces = cut.pieces(tiles.blocks, tiles.cost, tiles.few);
      const std::uint32_t length = tiles.blocks * tiles.cost / pieces;
      if (tiles.few || length < cut.round / 2)
        fill = max(fill, length);
      else
        units += static_cast<unsigned long long>(tiles.tiles) * pieces * args.num_heads;
      if (pieces > 1) slots += static_cast<unsigned long long>(tiles.tiles) * pieces;
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      units += __shfl_xor_sync(~0u, units, offset);
      slots += __shfl_xor_sync(~0u, slots, offset);
      fill = max(fill, __shfl_xor_sync(~0u, fill, offset));
    }
    // The estimate in the upper bits, the way in the lower.
    const unsigned long long estimate = max(rounds * cut.round, share + fill / 2);
    if (num_long <= kThreads && units <= rounds * plan.num_ctas && slots <= plan.max_slots &&
        threadIdx.x % kLanes == 0)
      atomicMin(&best, estimate * kWays + way);
    __syncthreads();
    if (best != ~0ull) lengths = lengths_of(static_cast<int>(best % kWays));
  }

  const auto bucket_of = [](const TileClass& tiles, int pieces) {
    return max(1, __clz(static_cast<std::uint32_t>(tiles.blocks) * tiles.cost / pieces)) - 1;
  };
  for (int c = threadIdx.x; c < classes; c += kThreads) {
    const TileClass tiles = tile_class(args, plan, args.members[c / 2], c % 2 != 0);
    if (tiles.tiles == 0) continue;
    const int pieces = lengths.pieces(tiles.blocks, tiles.cost, tiles.few);
    atomicAdd(&bucket_place[bucket_of(tiles, pieces)], tiles.tiles * pieces);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int place = 0;
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      const int count = bucket_place[bucket];
      bucket_place[bucket] = place;
      place += count;
      plan.counts->bucket_end[bucket] = static_cast<int>(
          min(static_cast<long long>(place), static_cast<long long>(plan.max_items)));
    }
    plan.counts->next = 0;
  }
  __syncthreads();

  const int lane = threadIdx.x % 32;
  for (int c0 = threadIdx.x - lane; c0 < classes; c0 += kThreads) {
    int tiles = 0, row = 0, pieces = 1, place = 0, slot = -1, cut = 0;
    if (c0 + lane < classes) {
      const TileClass mine =
          tile_class(args, plan, args.members[(c0 + lane) / 2], (c0 + lane) % 2 != 0);
      tiles = mine.tiles;
      row = mine.row;
      if (tiles > 0) {
        pieces = lengths.pieces(mine.blocks, mine.cost, mine.few);
        place = atomicAdd(&bucket_place[bucket_of(mine, pieces)], tiles * pieces);
        if (pieces > 1) {
          slot = atomicAdd(&num_slots, tiles * pieces);
          cut = atomicAdd(&num_cut_tiles, tiles);
        }
      }
    }
    // The warp writes one class's items after the other.
    for (unsigned left = __ballot_sync(~0u, tiles > 0); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const int their_tiles = __shfl_sync(~0u, tiles, source);
      const int their_row = __shfl_sync(~0u, row, source);
      const int their_pieces = __shfl_sync(~0u, pieces, source);
      const int their_place = __shfl_sync(~0u, place, source);
      const int their_slot = __shfl_sync(~0u, slot, source);
      const int their_cut = __shfl_sync(~0u, cut, source);
      const int member = (c0 + source) / 2;
      for (int i = lane; i < their_tiles * their_pieces; i += 32) {
        if (their_place + i >= plan.max_items) break;
        // Under a causal mask the last tile is the longest.
        const int tile = their_tiles - 1 - i / their_pieces, piece = i % their_pieces;
        const int tile_row = their_row + tile * rows;
        plan.items[their_place + i] = {member, tile_row, static_cast<std::uint16_t>(piece),
                                       static_cast<std::uint16_t>(their_pieces),
                                       their_slot < 0 ? -1 : their_slot + i};
        if (their_slot >= 0 && piece == 0)
          plan.cut_tiles[their_cut + i / their_pieces] = {member, tile_row, their_pieces,
                                                          their_slot + i};
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) plan.counts->num_cut_tiles = num_cut_tiles;
}

/// Work of the list: an item for one head.
struct AttendWork {
  AttendItem item;
  int head;
};
/// Takes the next work; false: there is none. A warp calls it together. Buckets one after the other
/// (longest items first), within a bucket heads in sections, within a section item by item.
__device__ inline bool next_work(const AttendPlan& plan, int num_heads, AttendWork& found) {
  const int lane = threadIdx.x % 32;
  int taken = lane == 0 ? atomicAdd(&plan.counts->next, 1) : 0;
  taken = __shfl_sync(~0u, taken, 0);
  const int end = plan.counts->bucket_end[lane];
  const unsigned buckets = __ballot_sync(~0u, taken < std::int64_t{end} * num_heads);
  if (buckets == 0) return false;
  const int bucket = __ffs(buckets) - 1;
  const int last = __shfl_sync(~0u, end, bucket);
  const int before = __shfl_sync(~0u, end, max(bucket - 1, 0));
  // In 32 bits, as the counter is.
  const unsigned first = bucket == 0 ? 0 : before;
  const unsigned place = taken - first * num_heads;
  const unsigned per_section = (last - first) * section_heads();
  const unsigned section = place / per_section;
  const unsigned heads =
      min(section_heads(), num_heads - static_cast<int>(section) * section_heads());
  const unsigned inside = place - section * per_section;
  found.item = plan.items[first + inside / heads];
  found.head = static_cast<int>(section * section_heads() + inside % heads);
  return true;
}

/// Where a finished row goes: written or merged. A merged row that saw nothing stays as it is.
class RowEpilogue {
 public:
  /// `running_lse`: the row's value so far, only looked at where it is merged.
  __device__ RowEpilogue(const AttendArguments& args, std::int64_t row, int head, float lse,
                         float running_lse)
      : out_(address(args.out, row, head, 0)),
        stride_(args.out.stride(2)),
        merges_(row < args.merge_row_end),
        stays_(merges_ && lse == -HUGE_VALF),
        lse_(lse) {
    if (merges_ && !stays_) {
      weights_ = merge_weights(running_lse, lse);
      lse_ = weights_.lse;
    }
  }
  __device__ bool stays() const { return stays_; }
  __device__ float lse() const { return lse_; }
  __device__ void put(int i, float value) const {
    float& place = out_[i * stride_];
    place = merges_ ? merge_value(weights_, place, value) : value;
  }

 private:
  float* out_;
  std::int64_t stride_;
  bool merges_, stays_;
  float lse_;
  MergeWeights weights_;
};

/// Joins the pieces of cut tiles in their order, then writes or merges the row: a warp per
/// (tile, head, row), `kThreads / 32` of them per CTA, V looped over by lanes.
template <int kThreads, int kValue>
__global__ void __launch_bounds__(kThreads)
    join_pieces_kernel(const __grid_constant__ AttendArguments args,
                       const __grid_constant__ AttendPlan plan) {
  static_assert(kValue % 32 == 0);
  constexpr int kWarps = kThreads / 32, kPerLane = kValue / 32;
  const int lane = threadIdx.x % 32;
  const std::int64_t rows = plan.tile_rows;
  const std::int64_t units = plan.counts->num_cut_tiles * rows * args.num_heads;
  for (std::int64_t unit = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; unit < units;
       unit += std::int64_t{gridDim.x} * kWarps) {
    const auto row = static_cast<int>(unit % rows);
    const auto head = static_cast<int>(unit / rows % args.num_heads);
    const CutTile tile = plan.cut_tiles[unit / rows / args.num_heads];
    const ChunkMember& member = args.members[tile.member];
    if (tile.row + row >= member.query_len) continue;

    float lse = -HUGE_VALF, value[kPerLane] = {};
#pragma unroll 4  // the loads of four pieces are under way together
    for (int piece = 0; piece < tile.num_pieces; ++piece) {
      const std::int64_t part =
          ((std::int64_t{tile.slot} + piece) * args.num_heads + head) * rows + row;
      const MergeWeights weights = merge_weights(lse, plan.part_lse[part]);
      const float* out = plan.part_out + part * kValue;
      for (int i = 0; i < kPerLane; ++i)
        value[i] = merge_value(weights, value[i], out[lane + 32 * i]);
      lse = weights.lse;
    }
    const std::int64_t running_row = std::int64_t{member.packed_token} + tile.row + row;
    float& running_lse = *address(args.lse, head, running_row);
    const RowEpilogue epilogue(args, running_row, head, lse, running_lse);
    if (epilogue.stays()) continue;
    for (int i = 0; i < kPerLane; ++i) epilogue.put(lane + 32 * i, value[i]);
    __syncwarp();  // all lanes have read the running lse
    if (lane == 0) running_lse = epilogue.lse();
  }
}

}  // namespace sparse_mla::cuda
