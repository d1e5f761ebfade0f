/// The fp64 reference against hand-computed cases and against its own slow form.
#include "tests/support/reference.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/compare.h"
#include "tests/support/number_formats.h"

namespace sparse_mla::support {
namespace {

using testing::ElementsAre;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<std::byte> bf16_bytes(const std::vector<float>& values) {
  std::vector<std::byte> bytes(2 * values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint16_t bits = encode_bf16(values[i]);
    std::memcpy(bytes.data() + 2 * i, &bits, 2);
  }
  return bytes;
}

TEST(ReferenceMqa, ByHand) {
  // L = 2, R = 1. Head 0: logits 0.5 · (2 ln 3, 0) = (ln 3, 0), weights 3/4 and 1/4.
  // Head 1: the rope part alone, logits 0.5 · (0, 2 ln 7): weights 1/8 and 7/8.
  const auto first = bf16_bytes({1, 0, 0}), second = bf16_bytes({0, 2, 1});
  const std::vector<const std::byte*> rows{first.data(), second.data()};
  const std::vector<double> queries{2 * std::log(3), 0, 0, 0, 0, 2 * std::log(7)};
  const LatentAttention result = reference_mqa(queries, {CacheFormat::bf16, 2, 1}, 0.5, rows);
  const std::vector<double> expected{0.75, 0.5, 0.125, 1.75};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(result.out[i], expected[i], 1e-14) << i;
  EXPECT_NEAR(result.lse[0], std::log(4), 1e-14);
  EXPECT_NEAR(result.lse[1], std::log(8), 1e-14);
}

TEST(ReferenceMqa, HugeLogitsDoNotOverflow) {
  const auto first = bf16_bytes({1, 0}), second = bf16_bytes({1, 0});
  const std::vector<const std::byte*> rows{first.data(), second.data()};
  const LatentAttention result =
      reference_mqa(std::vector<double>{1e4, 0}, {CacheFormat::bf16, 1, 1}, 1.0, rows);
  EXPECT_NEAR(result.out[0], 1, 1e-14);
  EXPECT_NEAR(result.lse[0], 1e4 + std::log(2), 1e-10);
}

TEST(ReferenceMqa, NanOfARowShows) {
  const auto first = bf16_bytes({1, 0}), second = bf16_bytes({kNan, 0});
  const std::vector<const std::byte*> rows{first.data(), second.data()};
  const LatentAttention result =
      reference_mqa(std::vector<double>{1, 0}, {CacheFormat::bf16, 1, 1}, 1.0, rows);
  EXPECT_TRUE(std::isnan(result.out[0]));
  EXPECT_TRUE(std::isnan(result.lse[0]));
}

ModelDims small_dims(int heads, int topk) {
  ModelDims dims;
  dims.num_heads = heads;
  dims.kv_lora_rank = 40;
  dims.qk_rope_head_dim = 6;
  dims.qk_nope_head_dim = 18;
  dims.v_head_dim = 22;
  dims.index_n_heads = 5;
  dims.index_head_dim = 16;
  dims.index_topk = topk;
  dims.softmax_scale = 0.25f;
  return dims;
}

void expect_near(const TokenAttention& got, const TokenAttention& expected) {
  ASSERT_EQ(got.out.size(), expected.out.size());
  ASSERT_EQ(got.lse.size(), expected.lse.size());
  for (std::size_t i = 0; i < got.out.size(); ++i) {
    EXPECT_NEAR(got.out[i], expected.out[i], 1e-12) << i;
  }
  for (std::size_t i = 0; i < got.lse.size(); ++i) {
    EXPECT_NEAR(got.lse[i], expected.lse[i], 1e-12) << i;
  }
}

class ReferenceAttention : public testing::TestWithParam<LayerProblem> {};

TEST_P(ReferenceAttention, MatchesThePlainMhaForm) {
  LayerData data(GetParam());
  data.write_new_rows();
  auto tokens = sample_tokens(GetParam(), 1, kAllTokens);
  for (std::size_t i = 0; i < tokens.size(); i += 2) tokens[i].all_visible = true;
  const auto results = reference_attention(data, tokens);
  ASSERT_EQ(results.size(), tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::vector<std::int32_t> keys(data.picks(tokens[i].token).begin(),
                                   data.picks(tokens[i].token).end());
    if (tokens[i].all_visible) {
      keys.clear();
      for (std::int32_t key = 0; key <= tokens[i].position; ++key) keys.push_back(key);
    }
    SCOPED_TRACE(testing::Message() << "token " << tokens[i].token);
    expect_near(results[i], reference_attention_slow(data, tokens[i].token, keys));
    expect_near(reference_attention(data, tokens[i].token, keys), results[i]);
  }
}

INSTANTIATE_TEST_SUITE_P(Problems, ReferenceAttention,
                         testing::Values(LayerProblem{.dims = small_dims(1, 16),
                                                      .query_lens = {1, 5},
                                                      .context_lens = {40, 3},
                                                      .block_size = 1,
                                                      .selection = SelectionKind::random},
                                         LayerProblem{.dims = small_dims(16, 8),
                                                      .query_lens = {2, 0, 3},
                                                      .context_lens = {70, 9, 0},
                                                      .block_size = 7,
                                                      .selection = SelectionKind::clustered,
                                                      .strided = true},
                                         LayerProblem{.dims = small_dims(35, 64),
                                                      .query_lens = {3},
                                                      .context_lens = {100},
                                                      .selection = SelectionKind::random}));

TEST(ReferenceAttentionCases, OneKeyGivesItsValue) {
  const LayerProblem problem{.dims = small_dims(3, 4),
                             .query_lens = {1},
                             .context_lens = {20},
                             .selection = SelectionKind::random};
  LayerData data(problem);
  const ModelDims& d = problem.dims;
  const auto element = [](bfloat16 value) { return double{__bfloat162float(value)}; };
  const auto row = [&](int i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, data.latent_row(0, 13) + 2 * i, 2);
    return decode_bf16(bits);
  };
  const std::vector<std::int32_t> keys{13};
  const TokenAttention result = reference_attention(data, 0, keys);
  const auto projection = data.tensors().kv_b_proj;
  for (int h = 0; h < d.num_heads; ++h) {
    double logit = 0;
    for (int i = 0; i < d.qk_nope_head_dim; ++i) {
      for (int j = 0; j < d.kv_lora_rank; ++j) {
        logit += element(data.q(0, h)[i]) * element(projection(h, i, j)) * row(j);
      }
    }
    for (int i = 0; i < d.qk_rope_head_dim; ++i) {
      logit += element(data.q(0, h)[d.qk_nope_head_dim + i]) * row(d.kv_lora_rank + i);
    }
    EXPECT_NEAR(result.lse[static_cast<std::size_t>(h)], logit * d.softmax_scale, 1e-12);
    for (int i = 0; i < d.v_head_dim; ++i) {
      double value = 0;
      for (int j = 0; j < d.kv_lora_rank; ++j) {
        value += element(projection(h, d.qk_nope_head_dim + i, j)) * row(j);
      }
      EXPECT_NEAR(result.out[static_cast<std::size_t>(h * d.v_head_dim + i)], value, 1e-12);
    }
  }
}

TEST(ReferenceAttentionCases, KeysOutsideTheSequenceAreNoKeys) {
  const LayerProblem problem{
      .dims = small_dims(2, 4), .query_lens = {2}, .context_lens = {20}, .block_size = 8};
  LayerData data(problem);
  data.write_new_rows();
  constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min(),
                         kMax = std::numeric_limits<std::int32_t>::max();
  // Token 0 is at position 20: 21 is the next token's.
  const std::vector<std::int32_t> none{-1, kMin, 21, kMax, 114514}, two{-1, 3, 21, 20, kMax},
      plain{3, 20};
  for (const auto& attend :
       {&reference_attention_slow,
        static_cast<TokenAttention (*)(const LayerData&, std::int64_t,
                                       std::span<const std::int32_t>)>(&reference_attention)}) {
    const TokenAttention empty = attend(data, 0, none);
    EXPECT_THAT(empty.out, testing::Each(0.0));
    EXPECT_THAT(empty.lse, testing::Each(-kInfinity));
    expect_near(attend(data, 0, two), attend(data, 0, plain));
  }
}

TEST(ReferenceScores, MatchTheFormula) {
  const LayerProblem problem{.dims = small_dims(2, 4),
                             .query_lens = {3},
                             .context_lens = {45},
                             .block_size = 8,
                             .strided = true};
  LayerData data(problem);
  data.write_new_rows();
  const ModelDims& d = problem.dims;
  LayerTensors tensors = data.tensors();
  const std::int64_t token = 1, position = 46;
  const TokenScores result = reference_scores(data, token);
  ASSERT_EQ(result.score.size(), std::size_t{position + 1});
  std::vector<double> magnitudes;
  double squares = 0;
  bool positive = false, negative = false;
  for (std::int64_t key = 0; key <= position; ++key) {
    // The page layout, spelled out once more: all keys of a page, then all scales.
    const std::byte* page =
        tensors.index_cache.data + tensors.block_tables(0, key / 8) * (8 * (16 + 4) + 3);
    float scale = 0;
    std::memcpy(&scale, page + 8 * 16 + key % 8 * 4, 4);
    double score = 0, magnitude = 0;
    for (int h = 0; h < d.index_n_heads; ++h) {
      double product = 0;
      for (int i = 0; i < d.index_head_dim; ++i) {
        product += double{static_cast<float>(tensors.index_q(token, h, i))} *
                   decode_e4m3(std::to_integer<std::uint8_t>(page[key % 8 * 16 + i]));
      }
      score += double{tensors.index_weights(token, h)} * std::max(product, 0.0);
      magnitude += std::fabs(tensors.index_weights(token, h)) * std::max(product, 0.0);
    }
    EXPECT_NEAR(result.score[static_cast<std::size_t>(key)], scale * score, 1e-12);
    magnitudes.push_back(scale * magnitude);
    squares += scale * score * scale * score;
    positive = positive || score > 0;
    negative = negative || score < 0;
  }
  EXPECT_TRUE(positive && negative);
  const double rms = std::sqrt(squares / (position + 1));
  for (std::size_t key = 0; key < magnitudes.size(); ++key) {
    EXPECT_NEAR(result.bound[key], 1e-3 * (magnitudes[key] + rms), 1e-12);
  }
}

TEST(ReferenceAttention, RowsOfEveryFormat) {
  for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8_ds_mla, CacheFormat::fp8}) {
    LayerProblem problem{.query_lens = {3, 2},
                         .context_lens = {40, 0},
                         .block_size = 8,
                         .cache_format = format,
                         .selection = SelectionKind::random,
                         .strided = true};
    problem.dims.num_heads = 2;
    problem.dims.kv_lora_rank = 128;
    problem.dims.index_topk = 16;
    LayerProblem plain = problem;
    plain.cache_format = CacheFormat::bf16;
    LayerData data(problem), twin(plain);
    data.write_new_rows();
    twin.write_new_rows();
    auto tokens = sample_tokens(problem);
    tokens.back().all_visible = true;
    const auto cached = reference_attention(data, tokens);
    const auto unquantised = reference_attention(data, tokens, ReferenceRows::unquantised);
    const auto expected = reference_attention(twin, tokens);
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      EXPECT_EQ(unquantised[i].out, expected[i].out) << i;
      EXPECT_EQ(unquantised[i].lse, expected[i].lse) << i;
      const auto keys = data.picks(tokens[i].token);
      if (!tokens[i].all_visible) {
        const auto slow = reference_attention_slow(data, tokens[i].token, keys);
        for (std::size_t j = 0; j < slow.out.size(); ++j)
          EXPECT_NEAR(cached[i].out[j], slow.out[j], 1e-12);
      }
      for (std::size_t j = 0; j < cached[i].out.size(); ++j) {
        error += std::pow(cached[i].out[j] - expected[i].out[j], 2);
        norm += std::pow(expected[i].out[j], 2);
      }
    }
    const double rel_error = std::sqrt(error / norm);
    EXPECT_LE(rel_error, max_quantisation_error(format)) << name_of(format);
    EXPECT_GE(rel_error, max_quantisation_error(format) / 4) << name_of(format);
  }
}

TEST(ReferenceTopk, Order) {
  const std::vector<float> below{0.5f, -kInf, -kInf, -kInf, -kInf};
  EXPECT_THAT(reference_topk(below, 3), ElementsAre(0, 1, 2));
  const std::vector<float> nans{kNan, -kInf, 1, kNan, kInf};
  EXPECT_THAT(reference_topk(nans, 2), ElementsAre(2, 4));
  EXPECT_THAT(reference_topk(nans, 3), ElementsAre(1, 2, 4));
  EXPECT_THAT(reference_topk(nans, 4), ElementsAre(0, 1, 2, 4));
  const std::vector<float> zeros{-0.0f, -1, 0.0f, -0.0f, 0.0f, 1};
  EXPECT_THAT(reference_topk(zeros, 3), ElementsAre(0, 2, 5));
  EXPECT_THAT(reference_topk(zeros, 99), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(reference_topk(zeros, 0), ElementsAre());
  EXPECT_THAT(reference_topk({}, 5), ElementsAre());
}

}  // namespace
}  // namespace sparse_mla::support
