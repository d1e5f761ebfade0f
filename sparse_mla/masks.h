/// Selection masks: which keys each query row may see, one bit per key.
///
/// Word w, bit b of a row = key first_key + 32·w + b. A *global* mask starts at the request's first
/// key and serves the suffix and every chunk; a *per-chunk* mask starts at the member's first key.
/// Each row has ceil(num_keys / 32) words and one pad word; tail bits and pad word are 0, so that a
/// reader that starts at any bit may funnel-shift two neighbouring words. A reader of a global mask
/// also ands away the bits at or past the member's end in this chunk.
///
/// Ragged: every member has its own rows × its own words; there is no padded box. Built from the
/// picks by one kernel that also clears. The builder drops picks beyond the row's own position, so
/// that readers need no second causal test.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sparse_mla/chunk_member.h"
#include "sparse_mla/operation.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

enum class MaskScope { global, per_chunk };
std::string to_string(MaskScope scope);

/// The grid on which non-empty tiles are listed. Key tiles lie on the request's own key grid (tile
/// t = keys [t·keys, (t+1)·keys)), so that a chunk that starts inside a tile visits it too.
struct MaskTile {
  std::int32_t queries = 64;
  std::int32_t keys = 128;  ///< a multiple of 32
};

/// Where one member's bits and tile lists lie.
struct MaskMember {
  std::int64_t word_offset = 0;        ///< first word of row 0
  std::int64_t tile_offset = 0;        ///< first slot of query tile 0's list in `tile_ids`
  std::int64_t tile_count_offset = 0;  ///< query tile 0's place in `tile_counts`, where members
                                       ///< follow one another without a gap
  std::int32_t first_key = 0;          ///< request-local position of bit 0
  std::int32_t num_keys = 0;           ///< bits that may be set
  std::int32_t row_words = 0;          ///< words from row to row: ceil(num_keys / 32) + 1
  std::int32_t first_tile = 0;         ///< first_key / tile.keys
  std::int32_t max_tiles = 0;  ///< slots of one query tile's list: key tiles that the bits touch
  std::int32_t reserved = 0;
};

/// Layout of a set of members' masks. Host arrays have one entry per member.
struct MaskLayout {
  MaskTile tile;
  std::vector<MaskMember> members;
  std::int64_t num_words = 0;        ///< pad words included
  std::int64_t num_tile_ids = 0;     ///< capacity of all lists
  std::int64_t num_tile_counts = 0;  ///< query tiles
  std::int64_t budget_words = 0;     ///< words that count against a budget: pad words excluded
};

/// `global`: bits for keys [0, first_key + num_keys) of each member, to be used with the suffix's
/// members (first_key = context_len, num_keys = query_len: the whole sequence).
/// `per_chunk`: bits for keys [first_key, first_key + num_keys).
MaskLayout plan_masks(std::span<const ChunkMember> members, MaskScope scope, MaskTile tile);

/// The mask words (pads excluded) that plan_masks' layout would need, without building it.
std::int64_t mask_budget_words(std::span<const ChunkMember> members, MaskScope scope);

/// Masks in memory. `members` runs parallel to the members of the call that reads them.
struct MaskView {
  MaskTile tile;
  std::span<const MaskMember> members;
  std::uint32_t* words = nullptr;
  std::int32_t* tile_counts = nullptr;  ///< [query tiles] non-empty key tiles of each
  std::int32_t* tile_ids = nullptr;     ///< ascending key tile numbers on the request's grid
};

/// Operation `build_masks`.
struct BuildMasksProblem {
  std::int64_t max_words = 0;
  int topk = 0;
};
struct BuildMasksCall {
  View2<const std::int32_t> picks;  ///< [num_tokens, topk] request-local positions, −1 = none
  /// Optional [num_tokens]: only picks [0, count) are used.
  const std::int32_t* counts = nullptr;
  std::span<const ChunkMember> members;
  MaskView mask;  ///< words, tile_counts and tile_ids of these members are written whole
};
const Operation<BuildMasksProblem, BuildMasksCall>& build_masks_operation();

/// 32 bits of a row from request-local key `key` on (any alignment), keys at or past `end` cleared.
/// `row` is the row's first word, `key` ≥ member.first_key, `end` ≤ member.first_key + num_keys.
SPARSE_MLA_HOST_DEVICE inline std::uint32_t mask_word(const std::uint32_t* row,
                                                      const MaskMember& member, std::int64_t key,
                                                      std::int64_t end) {
  if (key >= end) return 0;
  const std::int64_t bit = key - member.first_key;
  const std::uint64_t pair = row[bit >> 5] | (std::uint64_t{row[(bit >> 5) + 1]} << 32);
  const auto bits = static_cast<std::uint32_t>(pair >> (bit & 31));
  return end - key >= 32 ? bits : bits & ((std::uint32_t{1} << (end - key)) - 1);
}

}  // namespace sparse_mla
