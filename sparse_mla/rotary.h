/// Rotary position embedding, in the layout that the caller names.
///
/// A rotary vector is dims/2 pairs; pair i of a row at position p is turned by the angle
/// p · inverse_frequency[i]:  (x, y) → (x·cos − y·sin, y·cos + x·sin).
/// Which elements are a pair differs from model to model and inside a model: a wrong layout gives
/// plausible short answers and loses the needle in long ones. Nothing here has a default.
/// (The method: Su et al., "RoFormer", arXiv:2104.09864.)
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sparse_mla/operation.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

enum class RotaryLayout {
  half_split,   ///< pair i = elements (i, i + dims/2): the indexer of DeepSeek-V3.2
  interleaved,  ///< pair i = elements (2i, 2i + 1): the indexer of GLM-5, main MLA attention
};
std::string to_string(RotaryLayout layout);

/// inverse_frequency[i] = base^(−2i/dims), [dims/2]. A model with scaled frequencies (YaRN) brings
/// its own list. Throws std::invalid_argument for an odd dims or a base that is not above 0.
std::vector<double> rotary_inverse_frequencies(double base, int dims);

/// table [positions, dims]: row p holds cos(p · f_i) · magnitude in columns [0, dims/2) and
/// sin(p · f_i) · magnitude in columns [dims/2, dims), the layout that engines cache. Angles are
/// taken in fp64. `magnitude` is YaRN's factor on both (1 without it).
void fill_rotary_table(std::span<const double> inverse_frequencies, double magnitude,
                       View2<float> table);

/// Operation `rotary`: turns rows [rows, heads, dims] of a rotary part; a pair stays where it was.
/// fp32 arithmetic on bf16 data. `out` may be `in` itself, but not overlap it in another way. A
/// position outside the table throws std::invalid_argument before anything is written (a
/// device-side backend, which cannot look, leaves the row alone).
struct RotaryProblem {
  explicit RotaryProblem(RotaryLayout pairs) : layout(pairs) {}

  RotaryLayout layout;
  int dims = 64;  ///< even
  std::int64_t max_rows = 0;
};
struct RotaryCall {
  View3<const bfloat16> in;             ///< [rows, heads, dims], any strides: a part of wider heads
  View3<bfloat16> out;                  ///< [rows, heads, dims]
  View1<const std::int64_t> positions;  ///< [rows]
  View2<const float> table;             ///< [positions, dims], see fill_rotary_table
};
const Operation<RotaryProblem, RotaryCall>& rotary_operation();

}  // namespace sparse_mla
