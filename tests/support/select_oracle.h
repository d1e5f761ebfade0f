/// Top-k selection by its definition, one row at a time; shares no code with the library.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sparse_mla::support {

/// The min(k, len) best of row[start, end) (clamped to the row; inverted = empty) as indices
/// relative to the clamped start, best first: larger scores first, equal scores (−0 and +0 are
/// equal) by index, NaNs last.
std::vector<std::int32_t> select_oracle(std::span<const float> row, std::int64_t start,
                                        std::int64_t end, std::int64_t k);

}  // namespace sparse_mla::support
