#include "sparse_mla/rotary.h"

#include <cmath>

#include "sparse_mla/error.h"

namespace sparse_mla {

std::string to_string(RotaryLayout layout) {
  return layout == RotaryLayout::half_split ? "half-split" : "interleaved";
}

std::vector<double> rotary_inverse_frequencies(double base, int dims) {
  require(dims >= 2 && dims % 2 == 0, "dims", dims, "an even number from 2 on");
  require(base > 0 && base < HUGE_VAL, "base", base, "a finite value above 0");
  std::vector<double> frequencies;
  for (int i = 0; i < dims / 2; ++i) frequencies.push_back(std::pow(base, -2.0 * i / dims));
  return frequencies;
}

void fill_rotary_table(std::span<const double> inverse_frequencies, double magnitude,
                       View2<float> table) {
  const auto half = static_cast<std::int64_t>(inverse_frequencies.size());
  require(half >= 1, "inverse_frequencies", half, "at least one");
  require(table.extent(1) == 2 * half, "table", table.extent(1),
          std::to_string(2 * half) + " columns, two per inverse frequency");
#pragma omp parallel for schedule(static)
  for (std::int64_t position = 0; position < table.extent(0); ++position) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * inverse_frequencies[i];
      table(position, i) = static_cast<float>(std::cos(angle) * magnitude);
      table(position, half + i) = static_cast<float>(std::sin(angle) * magnitude);
    }
  }
}

}  // namespace sparse_mla
