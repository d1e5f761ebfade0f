/// Seeded score rows for the top-k selectors' tests, benchmarks and command.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace sparse_mla::support {

enum class ScoreData {
  normal,  ///< standard normal
  narrow,  ///< 1 + 1e-4 · normal: all scores share their leading bits
  ties,    ///< normal rounded to multiples of 0.5: about 15 distinct scores
  relu,    ///< max(0, normal): half of the scores are exactly 0
  ramp,    ///< the floats of the bits 0x3F800000 + i, ascending: every score beats all before it
};

inline constexpr std::array<ScoreData, 5> kAllScoreData{
    ScoreData::normal, ScoreData::narrow, ScoreData::ties, ScoreData::relu, ScoreData::ramp};

/// "normal", "narrow", …
std::string_view to_string(ScoreData kind);

/// Fills out [len] with row `row` of the data under `seed`; a row does not depend on the others.
void fill_scores(ScoreData kind, std::span<float> out, std::uint64_t seed, std::uint64_t row);

}  // namespace sparse_mla::support
