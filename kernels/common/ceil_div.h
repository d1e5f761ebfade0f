/// Division that rounds up: tiles, words and blocks for so many elements.
#pragma once

#include <cstdint>

namespace sparse_mla {

/// a ≥ 0, b > 0.
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace sparse_mla
