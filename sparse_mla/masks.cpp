#include "sparse_mla/masks.h"

#include <algorithm>

#include "kernels/common/ceil_div.h"
#include "sparse_mla/error.h"

namespace sparse_mla {
namespace {

/// First key and key count of a member's bits.
std::pair<std::int32_t, std::int32_t> bit_range(const ChunkMember& member, MaskScope scope) {
  if (scope == MaskScope::global) return {0, member.first_key + member.num_keys};
  return {member.first_key, member.num_keys};
}

}  // namespace

std::string to_string(MaskScope scope) {
  return scope == MaskScope::global ? "global" : "per chunk";
}

std::int64_t mask_budget_words(std::span<const ChunkMember> members, MaskScope scope) {
  std::int64_t words = 0;
  for (const ChunkMember& member : members)
    words += member.query_len * ceil_div(bit_range(member, scope).second, 32);
  return words;
}

MaskLayout plan_masks(std::span<const ChunkMember> members, MaskScope scope, MaskTile tile) {
  require(tile.queries >= 1, "tile.queries", tile.queries, "at least 1");
  require(tile.keys >= 32 && tile.keys % 32 == 0, "tile.keys", tile.keys, "a multiple of 32");
  MaskLayout layout;
  layout.tile = tile;
  layout.members.reserve(members.size());
  for (const ChunkMember& member : members) {
    const auto [first_key, num_keys] = bit_range(member, scope);
    const std::int64_t words = ceil_div(num_keys, 32);
    const std::int64_t query_tiles = ceil_div(member.query_len, tile.queries);
    MaskMember mask;
    mask.word_offset = layout.num_words;
    mask.tile_offset = layout.num_tile_ids;
    mask.tile_count_offset = layout.num_tile_counts;
    mask.first_key = first_key;
    mask.num_keys = num_keys;
    mask.row_words = static_cast<std::int32_t>(words + 1);
    mask.first_tile = first_key / tile.keys;
    mask.max_tiles =
        num_keys == 0
            ? 0
            : static_cast<std::int32_t>(ceil_div(std::int64_t{first_key} + num_keys, tile.keys) -
                                        mask.first_tile);
    layout.members.push_back(mask);
    layout.num_words += member.query_len * (words + 1);
    layout.num_tile_ids += query_tiles * mask.max_tiles;
    layout.num_tile_counts += query_tiles;
    layout.budget_words += member.query_len * words;
  }
  return layout;
}

}  // namespace sparse_mla
