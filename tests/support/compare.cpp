#include "tests/support/compare.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <ostream>
#include <set>
#include <stdexcept>
#include <vector>

#include "tests/support/number_formats.h"

namespace sparse_mla::support {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kSmallestNorm = 1e-6;

double to_double(bfloat16 value) { return decode_bf16(std::bit_cast<std::uint16_t>(value)); }
double to_double(float value) { return value; }

}  // namespace

double max_lse_error(CacheFormat format) {
  return format == CacheFormat::bf16 ? kBf16LseError : 2 * kBf16LseError;
}

double max_quantisation_error(CacheFormat format) {
  switch (format) {
    case CacheFormat::bf16:
      return 0;
    case CacheFormat::fp8_ds_mla:
      return 5e-2;
    case CacheFormat::fp8:
      return 7e-2;
  }
  return 0;
}

template <class T>
void ErrorMeasure::add_row(std::span<const T> out, float lse, std::span<const double> reference,
                           double reference_lse) {
  if (out.size() != reference.size()) throw std::invalid_argument("rows differ in width");
  double error_squares = 0, reference_squares = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double error = to_double(out[i]) - reference[i];
    error_squares += error * error;
    reference_squares += reference[i] * reference[i];
  }
  const bool empty = reference_lse == -kInfinity;
  double row_error =
      std::sqrt(error_squares) / std::max(std::sqrt(reference_squares), kSmallestNorm);
  double lse_error = empty ? 0 : std::fabs(lse - reference_lse);
  if (empty && (error_squares != 0 || lse != -kInfinity)) row_error = lse_error = kInfinity;
  // Also true of NaN.
  if (!(row_error < kInfinity)) row_error = kInfinity;
  if (!(lse_error < kInfinity)) lse_error = kInfinity;
  faulty_ = faulty_ || row_error == kInfinity;
  error_squares_ += error_squares;
  reference_squares_ += reference_squares;
  if (worst_row_ < 0 || row_error > max_rel_error_) worst_row_ = num_rows_;
  max_rel_error_ = std::max(max_rel_error_, row_error);
  lse_error_ = std::max(lse_error_, lse_error);
  ++num_rows_;
}

void ErrorMeasure::add(std::span<const bfloat16> out, float lse, std::span<const double> reference,
                       double reference_lse) {
  add_row(out, lse, reference, reference_lse);
}
void ErrorMeasure::add(std::span<const float> out, float lse, std::span<const double> reference,
                       double reference_lse) {
  add_row(out, lse, reference, reference_lse);
}

double ErrorMeasure::rel_error() const {
  if (faulty_) return kInfinity;
  return std::sqrt(error_squares_) / std::max(std::sqrt(reference_squares_), kSmallestNorm);
}

bool ErrorMeasure::within(double rel_error_bound, double max_rel_error_bound,
                          double lse_error_bound) const {
  return num_rows_ > 0 && rel_error() <= rel_error_bound && max_rel_error_ <= max_rel_error_bound &&
         lse_error_ <= lse_error_bound;
}

std::ostream& operator<<(std::ostream& stream, const ErrorMeasure& measure) {
  return stream << "rel_error " << measure.rel_error() << " max_rel_error "
                << measure.max_rel_error() << " (row " << measure.worst_row() << ") lse_error "
                << measure.lse_error() << " over " << measure.num_rows() << " rows";
}

ErrorMeasure measure_errors(const LayerData& data, std::span<const CheckedToken> tokens,
                            std::span<const TokenAttention> references) {
  ErrorMeasure measure;
  add_errors(measure, data, tokens, references);
  return measure;
}

void add_errors(ErrorMeasure& measure, const LayerData& data, std::span<const CheckedToken> tokens,
                std::span<const TokenAttention> references) {
  if (tokens.size() != references.size()) {
    throw std::invalid_argument("one reference per token expected");
  }
  const ModelDims& d = data.problem().dims;
  const auto width = static_cast<std::size_t>(d.v_head_dim);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (int head = 0; head < d.num_heads; ++head) {
      const auto h = static_cast<std::size_t>(head);
      measure.add(std::span(data.out(tokens[i].token, head), width),
                  data.lse(tokens[i].token, head),
                  std::span(references[i].out).subspan(h * width, width), references[i].lse[h]);
    }
  }
}

PicksDifference compare_picks(std::span<const std::int32_t> picks,
                              std::span<const std::int32_t> expected) {
  PicksDifference difference;
  std::vector<std::int32_t> got;
  bool ended = false;
  for (const std::int32_t pick : picks) {
    if (pick == -1) {
      ended = true;
      continue;
    }
    if (ended || pick < 0) ++difference.out_of_place;
    got.push_back(pick);
  }
  std::sort(got.begin(), got.end());
  const auto distinct_end = std::unique(got.begin(), got.end());
  difference.repeated = got.end() - distinct_end;
  got.erase(distinct_end, got.end());
  const std::set<std::int32_t> wanted(expected.begin(), expected.end());
  std::int64_t common = 0;
  for (const std::int32_t pick : got) common += wanted.contains(pick) ? 1 : 0;
  difference.missing = static_cast<std::int64_t>(wanted.size()) - common;
  difference.unexpected = static_cast<std::int64_t>(got.size()) - common;
  return difference;
}

std::ostream& operator<<(std::ostream& stream, const PicksDifference& difference) {
  return stream << "missing " << difference.missing << " unexpected " << difference.unexpected
                << " repeated " << difference.repeated << " out of place "
                << difference.out_of_place;
}

void SelectionMeasure::add(const LayerData& data, const CheckedToken& token,
                           std::span<const float> scores) {
  ++num_rows_;
  const TokenScores reference = reference_scores(data, token.token);
  if (scores.size() != reference.score.size()) {
    throw std::invalid_argument("scores: one per visible key expected");
  }
  for (std::size_t key = 0; key < scores.size(); ++key) {
    const double error = std::fabs(scores[key] - reference.score[key]);
    double part = error == 0 ? 0 : error / reference.bound[key];
    if (!(part < kInfinity)) part = kInfinity;  // NaN too
    score_error_ = std::max(score_error_, part);
  }
  const auto expected = reference_topk(scores, data.problem().dims.index_topk);
  if (!compare_picks(data.picks(token.token), expected).equal()) ++wrong_rows_;
}

}  // namespace sparse_mla::support
