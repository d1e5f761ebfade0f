/// What the 256 e4m3 bit patterns mean, for code that reads a number at a time: the toolkit's host
/// conversion takes 2 to 7 ns, a look-up 0.3. Vector code computes (TileKernels::e4m3_to_float):
/// 0.15 ns a number with AVX2.
#pragma once

#include <array>

namespace sparse_mla::cpu {

/// [bit pattern]; 0x7F and 0xFF are NaN.
const std::array<float, 256>& e4m3_values();

}  // namespace sparse_mla::cpu
