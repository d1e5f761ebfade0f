/// What the 256 e4m3 bit patterns mean, for code that reads a number at a time: the toolkit's host
/// conversion takes some 5 ns, a look-up a fraction of one. Vector code computes instead
/// (TileKernels::e4m3_to_float): eight numbers cost it less than eight look-ups.
#pragma once

#include <array>

namespace sparse_mla::cpu {

/// [bit pattern]; 0x7F and 0xFF are NaN.
const std::array<float, 256>& e4m3_values();

}  // namespace sparse_mla::cpu
