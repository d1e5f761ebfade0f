/// What neighbouring tokens picked, as the tiles that hold the heads of several tokens read it.
#pragma once

#include <cstdint>

namespace sparse_mla::sm90 {

/// Slots that the tokens of an item picked, in the order of their first appearance (lower token
/// first), each with the tokens that picked it. Distinct, or where few are shared, one for each
/// pick.
struct PickUnion {
  static constexpr int kMaxTokens = 8;
  std::int32_t* slots;   ///< [items, row], the first counts[item] of each
  std::uint8_t* tokens;  ///< [items, row], bit j: token j of the item picked it
  std::int32_t* counts;  ///< [items]
  std::int64_t row;      ///< tokens of an item · slots of a token
  int shift;             ///< log2 of an item's tokens
};

}  // namespace sparse_mla::sm90
