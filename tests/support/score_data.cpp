#include "tests/support/score_data.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "sparse_mla/random.h"

namespace sparse_mla::support {

std::string_view to_string(ScoreData kind) {
  switch (kind) {
    case ScoreData::normal:
      return "normal";
    case ScoreData::narrow:
      return "narrow";
    case ScoreData::ties:
      return "ties";
    case ScoreData::relu:
      return "relu";
    case ScoreData::ramp:
      return "ramp";
  }
  return "unknown";
}

void fill_scores(ScoreData kind, std::span<float> out, std::uint64_t seed, std::uint64_t row) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (kind == ScoreData::ramp) {
      out[i] = std::bit_cast<float>(0x3F800000u + static_cast<std::uint32_t>(i));
      continue;
    }
    const float normal = random_normal(seed, row, i);
    switch (kind) {
      case ScoreData::narrow:
        out[i] = 1.0f + 1e-4f * normal;
        break;
      case ScoreData::ties:
        out[i] = std::round(2.0f * normal) * 0.5f;
        break;
      case ScoreData::relu:
        out[i] = std::max(0.0f, normal);
        break;
      default:
        out[i] = normal;
    }
  }
}

}  // namespace sparse_mla::support
