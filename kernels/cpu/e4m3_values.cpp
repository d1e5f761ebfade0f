#include "kernels/cpu/e4m3_values.h"

#include <cstddef>

#include "sparse_mla/types.h"

namespace sparse_mla::cpu {

const std::array<float, 256>& e4m3_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table{};
    for (std::size_t code = 0; code < table.size(); ++code) {
      fp8_e4m3 number;
      number.__x = static_cast<__nv_fp8_storage_t>(code);
      table[code] = static_cast<float>(number);
    }
    return table;
  }();
  return values;
}

}  // namespace sparse_mla::cpu
