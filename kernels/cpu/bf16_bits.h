/// Numbers as the tile kernels take them: without a type that needs a CUDA header.
#pragma once

#include <cstdint>

#include "sparse_mla/types.h"

namespace sparse_mla::cpu {

/// The bf16 bit patterns at `row`.
inline const std::uint16_t* bits(const bfloat16* row) {
  return reinterpret_cast<const std::uint16_t*>(row);
}
inline std::uint16_t* bits(bfloat16* row) { return reinterpret_cast<std::uint16_t*>(row); }

}  // namespace sparse_mla::cpu
