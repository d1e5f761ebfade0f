/// Error measures between a layer's results and the reference.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <span>

#include "sparse_mla/types.h"

#include "tests/support/checked_tokens.h"
#include "tests/support/problem.h"
#include "tests/support/reference.h"

namespace sparse_mla::support {

/// Bounds of bf16 arithmetic on `rel_error`, `max_rel_error` and `lse_error`. A logit carries the
/// rounding of 2^-9 of its bf16 operands, 2e-3 at a logit deviation of 1.5; an lse averages logits.
constexpr double kBf16RelError = 5e-3;
constexpr double kBf16MaxRelError = 1e-2;
constexpr double kBf16LseError = 1e-2;

/// The chunked paths round fp8_ds_mla's e4m3 · scale to bf16 once more, numbers of a group with the
/// same mantissa all the same way: logits err twice as far.
double max_lse_error(CacheFormat format);
/// Bounds on the `rel_error` of a quantised cache against the rows before they were quantised, with
/// the same picks: 0 for bf16. An e4m3 number is off by 2.4 % (root mean square, 2^-4 at most), a
/// weighted sum of values by as much; logits of deviation 1.5 are off by up to 1.5 times that,
/// which moves the weights: 4.3 % together, less where the rope part stays bf16. Seeded problems
/// show 3 %.
double max_quantisation_error(CacheFormat format);

/// Errors over (token, head) rows. A row whose reference is empty (lse −inf) has to be exactly 0
/// with lse −inf. A NaN, a wrong empty row and a row that is empty by mistake make the errors
/// infinite.
class ErrorMeasure {
 public:
  /// One row: `out` and `reference` [V].
  void add(std::span<const bfloat16> out, float lse, std::span<const double> reference,
           double reference_lse);
  void add(std::span<const float> out, float lse, std::span<const double> reference,
           double reference_lse);

  double rel_error() const;  ///< ‖out − ref‖₂ / max(‖ref‖₂, 1e-6), all rows as one tensor
  double max_rel_error() const { return max_rel_error_; }  ///< the largest of any single row
  double lse_error() const { return lse_error_; }          ///< the largest |lse − ref|
  std::int64_t num_rows() const { return num_rows_; }
  std::int64_t worst_row() const { return worst_row_; }  ///< in the order of add(), −1 = none
  /// No row counted is not a pass.
  bool within(double rel_error, double max_rel_error, double lse_error) const;
  /// bf16 arithmetic on a cache of this format.
  bool within_bf16(CacheFormat cache = CacheFormat::bf16) const {
    return within(kBf16RelError, kBf16MaxRelError, max_lse_error(cache));
  }

 private:
  template <class T>
  void add_row(std::span<const T> out, float lse, std::span<const double> reference,
               double reference_lse);

  double error_squares_ = 0, reference_squares_ = 0;
  double max_rel_error_ = 0, lse_error_ = 0;
  bool faulty_ = false;
  std::int64_t num_rows_ = 0, worst_row_ = -1;
};
std::ostream& operator<<(std::ostream& stream, const ErrorMeasure& measure);

/// Errors of the layer's `out` and `lse` in `data`; references[i] belongs to tokens[i]. Rows are
/// counted token by token, head by head.
ErrorMeasure measure_errors(const LayerData& data, std::span<const CheckedToken> tokens,
                            std::span<const TokenAttention> references);
/// The same, added to what `measure` holds.
void add_errors(ErrorMeasure& measure, const LayerData& data, std::span<const CheckedToken> tokens,
                std::span<const TokenAttention> references);

/// How a row of picks differs from the set it should be.
struct PicksDifference {
  std::int64_t missing = 0;       ///< expected and not picked
  std::int64_t unexpected = 0;    ///< picked and not expected
  std::int64_t repeated = 0;      ///< picked more than once
  std::int64_t out_of_place = 0;  ///< picks after a −1, and fillers other than −1

  bool equal() const { return missing + unexpected + repeated + out_of_place == 0; }
};
std::ostream& operator<<(std::ostream& stream, const PicksDifference& difference);

/// `picks`: valid entries in any order, then −1. `expected`: a set, any order, no −1.
PicksDifference compare_picks(std::span<const std::int32_t> picks,
                              std::span<const std::int32_t> expected);

/// Checks a selection: the picks against the exact top-k of the layer's own scores, those scores
/// against fp64.
class SelectionMeasure {
 public:
  /// `scores` [position + 1]: the layer's own fp32 scores of this token.
  void add(const LayerData& data, const CheckedToken& token, std::span<const float> scores);

  bool exact() const { return wrong_rows_ == 0; }
  std::int64_t num_rows() const { return num_rows_; }
  std::int64_t wrong_rows() const { return wrong_rows_; }
  /// The largest |score − fp64| as a part of its bound: passes up to 1.
  double score_error() const { return score_error_; }

 private:
  std::int64_t num_rows_ = 0, wrong_rows_ = 0;
  double score_error_ = 0;
};

}  // namespace sparse_mla::support
