/// What the kernels of `sparse_mqa` over bf16 rows share: the order in which keys come and go.
#pragma once

namespace sparse_mla::sm90 {

/// Quarters of a pair of key blocks, filled in this order and freed as soon as the warpgroup that
/// uses them last is done. Group 0 computes the scores of block 0 and sums columns 0 … 255 of both
/// blocks, group 1 the scores of block 1 and columns 256 … 511.
enum Quarter : int {
  kFirstLow,    ///< block 0, columns 0 … 255: last used by group 0
  kFirstHigh,   ///< block 0, columns 256 … 511, and rope, later its weights: by group 1
  kSecondHigh,  ///< block 1, columns 256 … 511: by group 1
  kSecondLow,   ///< block 1, columns 0 … 255, and rope, later its weights: by group 0
  kQuarters
};

}  // namespace sparse_mla::sm90
