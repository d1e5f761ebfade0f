/// Error measures and the choice of tokens to check.
#include "tests/support/compare.h"

#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/number_formats.h"

namespace sparse_mla::support {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

ErrorMeasure one_row(const std::vector<float>& out, float lse, const std::vector<double>& reference,
                     double reference_lse) {
  ErrorMeasure measure;
  measure.add(std::span<const float>(out), lse, reference, reference_lse);
  return measure;
}

TEST(ErrorMeasure, ByHand) {
  ErrorMeasure measure;
  const std::vector<float> first{3, 4.5f}, second{0, 10};
  measure.add(std::span<const float>(first), 1.0f, std::vector<double>{3, 4}, 1.25);
  measure.add(std::span<const float>(second), 2.0f, std::vector<double>{0, 10}, 2.0);
  EXPECT_DOUBLE_EQ(measure.max_rel_error(), 0.1);                      // 0.5 / 5
  EXPECT_DOUBLE_EQ(measure.rel_error(), 0.5 / std::sqrt(25. + 100.));  // as one tensor
  EXPECT_DOUBLE_EQ(measure.lse_error(), 0.25);
  EXPECT_EQ(measure.worst_row(), 0);
  EXPECT_EQ(measure.num_rows(), 2);
  EXPECT_TRUE(measure.within(0.05, 0.1, 0.25));
  EXPECT_FALSE(measure.within(0.04, 0.1, 0.25));
  EXPECT_FALSE(measure.within(0.05, 0.09, 0.25));
  EXPECT_FALSE(measure.within(0.05, 0.1, 0.24));
}

TEST(ErrorMeasure, TinyReferenceIsMeasuredAgainstOneMillionth) {
  EXPECT_NEAR(one_row({2e-6f}, 0, {0}, 0).max_rel_error(), 2, 1e-6);
}

TEST(ErrorMeasure, NanNeverPasses) {
  for (const ErrorMeasure& measure :
       {one_row({kNan, 1}, 0, {1, 1}, 0), one_row({1, 1}, 0, {std::nan(""), 1}, 0),
        one_row({1}, kNan, {1}, 0), one_row({1}, 0, {1}, std::nan("")),
        one_row({kInf}, 0, {1}, 0)}) {
    EXPECT_FALSE(measure.within(1e30, 1e30, 1e30)) << measure;
  }
}

TEST(ErrorMeasure, NanStaysVisibleBesideGoodRows) {
  ErrorMeasure measure = one_row({kNan}, 0, {1}, 0);
  const std::vector<float> good{1};
  measure.add(std::span<const float>(good), 0, std::vector<double>{1}, 0);
  EXPECT_FALSE(measure.within(1, 1, 1));
  EXPECT_EQ(measure.worst_row(), 0);
}

TEST(ErrorMeasure, EmptyRowsAreExact) {
  EXPECT_TRUE(one_row({0, 0}, -kInf, {0, 0}, -kInfinity).within(0, 0, 0));
  for (const ErrorMeasure& measure :
       {one_row({0, 1e-30f}, -kInf, {0, 0}, -kInfinity), one_row({0, 0}, 0, {0, 0}, -kInfinity),
        one_row({0, 0}, kInf, {0, 0}, -kInfinity), one_row({0, 0}, kNan, {0, 0}, -kInfinity),
        one_row({0, kNan}, -kInf, {0, 0}, -kInfinity),
        one_row({1, 1}, -kInf, {1, 1}, 0)}) {  // empty by mistake
    EXPECT_FALSE(measure.within(1e30, 1e30, 1e30)) << measure;
  }
}

TEST(ErrorMeasure, NothingComparedIsNoPass) { EXPECT_FALSE(ErrorMeasure().within(1, 1, 1)); }

TEST(ErrorMeasure, RowsOfUnequalWidthAreRefused) {
  EXPECT_THROW(one_row({1, 2}, 0, {1}, 0), std::invalid_argument);
}

TEST(ComparePicks, Differences) {
  const std::vector<std::int32_t> expected{2, 5, 9};
  const auto difference = [&](const std::vector<std::int32_t>& picks) {
    return compare_picks(picks, expected);
  };
  EXPECT_TRUE(difference({9, 2, 5, -1, -1}).equal());
  EXPECT_TRUE(difference({2, 5, 9}).equal());
  EXPECT_EQ(difference({2, 5, -1}).missing, 1);
  EXPECT_EQ(difference({2, 5, 9, 11}).unexpected, 1);
  EXPECT_EQ(difference({2, 5, 5, 9}).repeated, 1);
  EXPECT_EQ(difference({2, -1, 5, 9}).out_of_place, 2);
  EXPECT_EQ(difference({2, 5, 9, -2}).out_of_place, 1);
  EXPECT_FALSE(difference({2, 5, 9, std::numeric_limits<std::int32_t>::max()}).equal());
  EXPECT_TRUE(compare_picks({}, {}).equal());
}

std::set<std::int64_t> token_set(const std::vector<CheckedToken>& tokens) {
  std::set<std::int64_t> set;
  for (const CheckedToken& token : tokens) set.insert(token.token);
  return set;
}

TEST(SampleTokens, TakesTheEndsOfEachKind) {
  LayerProblem problem;
  problem.query_lens = {0, 300, 1, 500, 0, 400, 1, 1, 200, 100, 0};
  problem.context_lens = {5, 0, 8, 70, 1, 0, 0, 9, 64, 0, 0};
  // decodes: tokens 300, 1201, 1202; with context [301, 801), [1203, 1403); without [0, 300),
  // [801, 1201), [1403, 1503)
  const auto tokens = sample_tokens(problem);
  const auto set = token_set(tokens);
  EXPECT_GE(set.size(), 64u);
  EXPECT_EQ(set.size(), tokens.size());
  for (const std::int64_t token : {0, 299, 300, 301, 800, 1202, 1203, 1402, 1403, 1502}) {
    EXPECT_TRUE(set.contains(token)) << token;
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0) {
      EXPECT_LT(tokens[i - 1].token, tokens[i].token);
    }
    const CheckedToken& t = tokens[i];
    EXPECT_FALSE(t.all_visible);
    if (t.token == 300) {
      EXPECT_EQ(std::tuple(t.request, t.position), std::tuple(2, 8));
    }
    if (t.token == 800) {
      EXPECT_EQ(std::tuple(t.request, t.position), std::tuple(3, 569));
    }
    const RequestKind kind = problem.query_lens[static_cast<std::size_t>(t.request)] <= 1
                                 ? RequestKind::decode
                             : problem.context_lens[static_cast<std::size_t>(t.request)] > 0
                                 ? RequestKind::prefill_with_context
                                 : RequestKind::prefill;
    EXPECT_EQ(t.kind, kind) << t.token;
  }
  EXPECT_EQ(token_set(sample_tokens(problem)), set);  // seeded
  LayerProblem other = problem;
  other.seed = 2;
  EXPECT_NE(token_set(sample_tokens(other)), set);
  EXPECT_EQ(sample_tokens(problem, 1, kAllTokens).size(), 1503u);
  EXPECT_EQ(sample_tokens(problem, 300)[0].kind, RequestKind::decode);
}

TEST(SampleTokens, SmallBatchesAreCheckedWhole) {
  LayerProblem problem;
  problem.query_lens = {3, 0, 20};
  problem.context_lens = {0, 4, 4};
  EXPECT_EQ(sample_tokens(problem).size(), 23u);
  problem.query_lens = {0, 0, 0};
  EXPECT_TRUE(sample_tokens(problem).empty());
  problem.query_lens = problem.context_lens = {};
  EXPECT_TRUE(sample_tokens(problem).empty());
}

class SelectionMeasureTest : public testing::Test {
 protected:
  SelectionMeasureTest() : data_(problem()) {
    data_.write_new_rows();
    tokens_ = sample_tokens(data_.problem(), 1, kAllTokens);
    for (const CheckedToken& token : tokens_) {
      const TokenScores reference = reference_scores(data_, token.token);
      scores_.emplace_back(reference.score.begin(), reference.score.end());
      const auto picks = reference_topk(scores_.back(), 8);
      for (std::size_t i = 0; i < 8; ++i) {
        data_.tensors().picks(token.token, static_cast<std::int64_t>(i)) =
            i < picks.size() ? picks[i] : -1;
      }
    }
  }
  static LayerProblem problem() {
    LayerProblem problem{.query_lens = {3, 2}, .context_lens = {30, 0}, .block_size = 8};
    problem.dims.num_heads = 1;
    problem.dims.index_n_heads = 4;
    problem.dims.index_topk = 8;
    return problem;
  }
  SelectionMeasure measure() const {
    SelectionMeasure result;
    for (std::size_t i = 0; i < tokens_.size(); ++i) result.add(data_, tokens_[i], scores_[i]);
    return result;
  }

  LayerData data_;
  std::vector<CheckedToken> tokens_;
  std::vector<std::vector<float>> scores_;
};

TEST_F(SelectionMeasureTest, ExactSelectionPasses) {
  EXPECT_TRUE(measure().exact());
  EXPECT_EQ(measure().num_rows(), 5);
  EXPECT_LT(measure().score_error(), 1e-3);  // fp32 rounding of fp64 scores
}

TEST_F(SelectionMeasureTest, OneWrongPickFails) {
  std::int32_t& pick = data_.tensors().picks(1, 3);
  const auto others = data_.picks(1);
  std::int32_t other = 0;
  while (std::find(others.begin(), others.end(), other) != others.end()) ++other;
  pick = other;
  EXPECT_FALSE(measure().exact());
  EXPECT_EQ(measure().wrong_rows(), 1);
}

TEST_F(SelectionMeasureTest, ScoresBeyondTheirBoundShow) {
  const TokenScores reference = reference_scores(data_, tokens_[2].token);
  scores_[2][7] = static_cast<float>(reference.score[7] + 2 * reference.bound[7]);
  EXPECT_NEAR(measure().score_error(), 2, 1e-2);
  scores_[2][7] = kNan;
  EXPECT_EQ(measure().score_error(), kInfinity);
}

TEST(MeasureErrors, RoundedReferencePasses) {
  LayerProblem problem{.query_lens = {2, 1},
                       .context_lens = {30, 9},
                       .block_size = 8,
                       .selection = SelectionKind::random,
                       .strided = true};
  problem.dims.num_heads = 3;
  problem.dims.index_topk = 16;
  LayerData data(problem);
  data.write_new_rows();
  const auto tokens = sample_tokens(problem);
  const auto references = reference_attention(data, tokens);
  EXPECT_FALSE(measure_errors(data, tokens, references).within(1e30, 1e30, 1e30));  // not written
  const LayerTensors tensors = data.tensors();
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    for (int h = 0; h < 3; ++h) {
      tensors.lse(h, tokens[t].token) = static_cast<float>(references[t].lse[h]);
      for (int i = 0; i < 128; ++i) {
        tensors.out(tokens[t].token, h, i) = std::bit_cast<bfloat16>(
            encode_bf16(static_cast<float>(references[t].out[h * 128 + i])));
      }
    }
  }
  const ErrorMeasure measure = measure_errors(data, tokens, references);
  EXPECT_TRUE(measure.within_bf16()) << measure;
  EXPECT_GT(measure.rel_error(), 1e-4);  // one bf16 rounding, not nothing
  EXPECT_EQ(measure.num_rows(), 9);
  // Two heads exchanged do not pass.
  std::swap(tensors.out(0, 0, 0), tensors.out(0, 1, 0));
  EXPECT_FALSE(measure_errors(data, tokens, references).within_bf16());
}

}  // namespace
}  // namespace sparse_mla::support
