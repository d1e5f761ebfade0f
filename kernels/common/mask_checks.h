/// What the operations that write and read masks require of them, and what every entry of
/// `build_masks` requires of shapes. What the arrays hold is not looked at: they may be device
/// memory.
#pragma once

#include <cstddef>
#include <string>

#include "sparse_mla/error.h"
#include "sparse_mla/masks.h"

namespace sparse_mla {

inline void check_mask_shapes(const MaskView& mask, std::size_t num_members) {
  require(mask.members.size() == num_members, "mask.members", mask.members.size(),
          "one per member (" + std::to_string(num_members) + ")");
  require(mask.tile.queries >= 1, "mask.tile.queries", mask.tile.queries, "at least 1");
  require(mask.tile.keys >= 32 && mask.tile.keys % 32 == 0, "mask.tile.keys", mask.tile.keys,
          "a multiple of 32");
}

/// For a mask that is to be written or read.
inline void check_mask_arrays(const MaskView& mask) {
  require(mask.words != nullptr && mask.tile_counts != nullptr && mask.tile_ids != nullptr, "mask",
          "null", "words, tile_counts and tile_ids");
}

inline void check_shapes(const BuildMasksProblem& problem, const BuildMasksCall& call) {
  check_mask_shapes(call.mask, call.members.size());
  require(call.picks.extent(1) == problem.topk, "picks", call.picks.extent(1),
          "topk (" + std::to_string(problem.topk) + ") columns");
}

}  // namespace sparse_mla
