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

/// Keys that a CTA attends at a time; pieces of a member's keys are whole blocks.
SPARSE_MLA_HOST_DEVICE constexpr int key_block() { return 64; }
/// Blocks below which a tile's keys are not cut: a piece's prologue and its partial (written, read
/// and merged) cost about one block's time.
SPARSE_MLA_HOST_DEVICE constexpr int least_piece_blocks() { return 8; }
/// Pieces that a resident CTA should get when keys are cut at all. One would leave some CTAs idle
/// as soon as the pieces are not a whole number per CTA; more of them mean more partials.
SPARSE_MLA_HOST_DEVICE constexpr int pieces_per_cta() { return 2; }
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
  std::int32_t num_items;
  std::int32_t num_cut_tiles;
  std::int32_t next;  ///< work handed out so far: item × head
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
  std::int32_t num_ctas = 0;  ///< that are resident together
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
__device__ inline KeyRange piece_keys(const AttendArguments& args, const ChunkMember& member,
                                      std::int32_t row_end, const AttendItem& item) {
  const std::int32_t keys = visible_keys(args, member, row_end);
  const std::int64_t blocks = (std::int64_t{keys} + key_block() - 1) / key_block();
  const auto begin = static_cast<std::int32_t>(blocks * item.piece / item.num_pieces * key_block());
  const std::int64_t end = blocks * (item.piece + 1) / item.num_pieces * key_block();
  return {member.first_key + min(begin, keys),
          member.first_key + static_cast<std::int32_t>(min(end, std::int64_t{keys}))};
}

/// Makes the list: one CTA, a thread per member. Items are sorted by the power of two of their
/// length, longest first. When the whole work is less than a few tiles per CTA, the keys of long
/// tiles are cut into pieces of at least `piece_blocks`, so that no CTA is left with much more than
/// its share. Places within a bucket and slots are dealt by arrival: no result depends on them.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    plan_attend_kernel(const __grid_constant__ AttendArguments args,
                       const __grid_constant__ AttendPlan plan) {
  constexpr int kBuckets = 32;
  constexpr int kWarpRows = 32;  // rows of a tile that idle together when there are no more
  __shared__ unsigned long long load, full_load;
  __shared__ int bucket_place[kBuckets], num_slots, num_cut_tiles;
  if (threadIdx.x < kBuckets) bucket_place[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    load = full_load = 0;
    num_slots = num_cut_tiles = 0;
  }
  __syncthreads();

  const int rows = plan.tile_rows;
  const auto num_tiles = [&](const ChunkMember& m) {
    return (max(m.query_len, 0) + rows - 1) / rows;
  };
  const auto num_blocks = [&](const ChunkMember& m, int row_end) {
    return (visible_keys(args, m, row_end) + key_block() - 1) / key_block();
  };
  for (int m = threadIdx.x; m < args.num_members && plan.max_slots > 0; m += kThreads) {
    const ChunkMember member = args.members[m];
    if (member.query_len <= 0) continue;
    const unsigned blocks = num_blocks(member, member.query_len);
    const unsigned first_blocks = num_blocks(member, min(rows, member.query_len));
    const unsigned warps = (member.query_len + kWarpRows - 1) / kWarpRows;
    // In quarters of a block, first and last tile averaged.
    atomicAdd(&load, (static_cast<unsigned long long>(blocks) + first_blocks) * warps *
                         (4 * kWarpRows) / (2 * rows));
    atomicAdd(&full_load, static_cast<unsigned long long>(blocks) * num_tiles(member));
  }
  __syncthreads();

  // Σ tiles · floor(blocks / piece_blocks) ≤ full_load / piece_blocks ≤ max_slots.
  long long piece_blocks = 0;  // 0: no cuts
  if (plan.max_slots > 0) {
    const auto ceil_div = [](unsigned long long a, unsigned long long b) {
      return static_cast<long long>((a + b - 1) / b);
    };
    piece_blocks = max(static_cast<long long>(least_piece_blocks()),
                       max(ceil_div(load * args.num_heads, 4ull * pieces_per_cta() * plan.num_ctas),
                           ceil_div(full_load, plan.max_slots)));
  }
  const auto num_pieces = [&](int blocks) {
    return piece_blocks == 0 ? 1 : static_cast<int>(max(1ll, min(blocks / piece_blocks, 65535ll)));
  };
  const auto bucket_of = [](int blocks, int pieces) { return __clz(blocks / pieces); };  // 1 … 32
  for (int m = threadIdx.x; m < args.num_members; m += kThreads) {
    const ChunkMember member = args.members[m];
    if (member.query_len <= 0) continue;
    const int blocks = num_blocks(member, member.query_len), pieces = num_pieces(blocks);
    atomicAdd(&bucket_place[bucket_of(blocks, pieces) - 1], num_tiles(member) * pieces);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int place = 0;
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      const int count = bucket_place[bucket];
      bucket_place[bucket] = place;
      place += count;
    }
    plan.counts->num_items = static_cast<int>(
        min(static_cast<long long>(place), static_cast<long long>(plan.max_items)));
    plan.counts->next = 0;
  }
  __syncthreads();

  const int lane = threadIdx.x % 32;
  for (int m0 = threadIdx.x - lane; m0 < args.num_members; m0 += kThreads) {
    int tiles = 0, pieces = 1, place = 0, slot = -1, cut = 0;
    if (m0 + lane < args.num_members) {
      const ChunkMember member = args.members[m0 + lane];
      tiles = num_tiles(member);
      if (tiles > 0) {
        const int blocks = num_blocks(member, member.query_len);
        pieces = num_pieces(blocks);
        place = atomicAdd(&bucket_place[bucket_of(blocks, pieces) - 1], tiles * pieces);
        if (pieces > 1) {
          slot = atomicAdd(&num_slots, tiles * pieces);
          cut = atomicAdd(&num_cut_tiles, tiles);
        }
      }
    }
    // The warp writes one member's items after the other.
    for (unsigned left = __ballot_sync(~0u, tiles > 0); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const int their_tiles = __shfl_sync(~0u, tiles, source);
      const int their_pieces = __shfl_sync(~0u, pieces, source);
      const int their_place = __shfl_sync(~0u, place, source);
      const int their_slot = __shfl_sync(~0u, slot, source);
      const int their_cut = __shfl_sync(~0u, cut, source);
      const int member = m0 + source;
      for (int i = lane; i < their_tiles * their_pieces; i += 32) {
        if (their_place + i >= plan.max_items) break;
        // Under a causal mask the last tile is the longest.
        const int tile = their_tiles - 1 - i / their_pieces, piece = i % their_pieces;
        plan.items[their_place + i] = {member, tile * rows, static_cast<std::uint16_t>(piece),
                                       static_cast<std::uint16_t>(their_pieces),
                                       their_slot < 0 ? -1 : their_slot + i};
        if (their_slot >= 0 && piece == 0)
          plan.cut_tiles[their_cut + i / their_pieces] = {member, tile * rows, their_pieces,
                                                          their_slot + i};
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) plan.counts->num_cut_tiles = num_cut_tiles;
}

/// Work number `work` of the list: heads in sections, within a section item by item.
struct AttendWork {
  AttendItem item;
  int head;
};
__device__ inline bool find_work(const AttendPlan& plan, int num_heads, std::int64_t work,
                                 AttendWork& found) {
  const std::int64_t items = plan.counts->num_items;
  if (work >= items * num_heads) return false;
  const std::int64_t per_section = items * section_heads();
  const int section = static_cast<int>(work / per_section);
  const int heads = min(section_heads(), num_heads - section * section_heads());
  const auto inside = static_cast<std::int64_t>(work - section * per_section);
  found.item = plan.items[inside / heads];
  found.head = section * section_heads() + static_cast<int>(inside % heads);
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
  /// Elements i and i + 1 of a row with stride 1, at 8-byte boundaries.
  __device__ void put_pair(int i, float a, float b) const {
    auto& place = *reinterpret_cast<float2*>(out_ + i);
    if (merges_) {
      const float2 before = place;
      a = merge_value(weights_, before.x, a);
      b = merge_value(weights_, before.y, b);
    }
    place = make_float2(a, b);
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
