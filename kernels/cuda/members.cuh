/// Finding the record that a row belongs to. Member lists are short (requests of a batch) and read
/// by every warp: they stay in L1.
#pragma once

#include <cstdint>

namespace sparse_mla::cuda {

/// The last of `count` records whose `first` field is ≤ `row`; records ascend in that field. The
/// first record must not start after `row`. Records of no rows share their start with the next one:
/// the last of them that starts there is the one that has rows.
template <class Record, class Integer>
__device__ int find_record(const Record* records, int count, Integer Record::*first,
                           std::int64_t row) {
  int low = 0, high = count;  // the answer lies in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (records[middle].*first <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/// The same by a warp, all of whose lanes ask for the same row: 32 records are looked at together,
/// so that the latency of memory is paid once for each factor of 32 and not of 2.
template <class Record, class Integer>
__device__ int find_record_by_warp(const Record* records, int count, Integer Record::*first,
                                   std::int64_t row) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int low = 0, high = count;  // the answer lies in [low, high)
  while (high - low > 1) {
    const int step = (high - low + 31) / 32, i = low + lane * step;
    const bool starts = lane == 0 || (i < high && records[i].*first <= row);
    low += (__popc(__ballot_sync(~0u, starts)) - 1) * step;
    high = min(high, low + step);
  }
  return low;
}

}  // namespace sparse_mla::cuda
