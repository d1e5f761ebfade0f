/// What every entry of `build_masks` requires of shapes. What the arrays hold is not looked at:
/// they may be device memory.
#pragma once

#include <string>

#include "sparse_mla/error.h"
#include "sparse_mla/masks.h"

namespace sparse_mla {

inline void check_shapes(const BuildMasksProblem& problem, const BuildMasksCall& call) {
  require(call.mask.members.size() == call.members.size(), "mask.members", call.mask.members.size(),
          "one per member (" + std::to_string(call.members.size()) + ")");
  require(call.mask.tile.queries >= 1, "mask.tile.queries", call.mask.tile.queries, "at least 1");
  require(call.mask.tile.keys >= 32 && call.mask.tile.keys % 32 == 0, "mask.tile.keys",
          call.mask.tile.keys, "a multiple of 32");
  require(call.picks.extent(1) == problem.topk, "picks", call.picks.extent(1),
          "topk (" + std::to_string(problem.topk) + ") columns");
}

/// For `required` = a row is to be written.
inline void check_memory(const MaskView& mask, bool required) {
  require(!required ||
              (mask.words != nullptr && mask.tile_counts != nullptr && mask.tile_ids != nullptr),
          "mask", "null", "memory for words, tile_counts and tile_ids");
}

}  // namespace sparse_mla
