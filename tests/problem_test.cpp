/// The seeded inputs: what tests of the library rely on.
#include "tests/support/problem.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/number_formats.h"
#include "tests/support/picks.h"
#include "tests/support/random_streams.h"
#include "tests/support/reference.h"

namespace sparse_mla::support {
namespace {

TEST(NumberFormats, E4m3MatchesCudaHeaders) {
  for (int code = 0; code < 256; ++code) {
    const auto bits = static_cast<std::uint8_t>(code);
    const double value = decode_e4m3(bits);
    if (std::isnan(value)) {
      EXPECT_EQ(code & 0x7F, 0x7F);
      continue;
    }
    EXPECT_EQ(value, double{static_cast<float>(std::bit_cast<fp8_e4m3>(bits))}) << code;
    EXPECT_EQ(encode_e4m3(static_cast<float>(value)), bits);
  }
  for (std::uint64_t i = 0; i < 200000; ++i) {
    // Magnitudes 2^-12 … 2^12, ties and their neighbours among them.
    std::uint32_t bits = random_bits(3, 1, i);
    const std::uint32_t exponent = 115 + (bits >> 8) % 25;
    bits = (bits & 0x80000000u) | (exponent << 23) | ((bits & 0xFu) << 19) |
           (i % 3 == 0 ? 0u : bits & 1u);
    const float value = std::bit_cast<float>(bits);
    ASSERT_EQ(encode_e4m3(value), std::bit_cast<std::uint8_t>(fp8_e4m3(value))) << value;
  }
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(encode_e4m3(1000), 0x7E);
  EXPECT_EQ(encode_e4m3(-kInf), 0xFE);
  EXPECT_EQ(encode_e4m3(-0.0f), 0x80);
  EXPECT_EQ(encode_e4m3(std::numeric_limits<float>::quiet_NaN()), 0x7F);
}

TEST(LatentRows, ByHand) {
  std::vector<bfloat16> values(130, std::bit_cast<bfloat16>(encode_bf16(0)));
  const auto set = [&](std::size_t i, float value) {
    values[i] = std::bit_cast<bfloat16>(encode_bf16(value));
  };
  set(0, 336), set(1, -0.75f), set(2, -0.0f), set(128, 1.5f), set(129, -3);
  std::vector<double> decoded(130);
  const auto encode = [&](const LatentRowFormat& format) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(format.row_bytes()) + 1);
    encode_latent_row(format, values.data(), bytes.data() + 1);  // unaligned
    decode_latent_row(format, bytes.data() + 1, decoded.data());
    bytes.erase(bytes.begin());
    return bytes;
  };
  const auto code = [](std::byte byte) { return std::to_integer<int>(byte); };
  const auto scale = [](const std::vector<std::byte>& bytes) {
    float value = 0;
    std::memcpy(&value, bytes.data() + 128, 4);
    return value;
  };

  std::vector<std::byte> bytes = encode({CacheFormat::bf16, 128, 2});
  EXPECT_EQ(bytes.size(), 260u);
  EXPECT_EQ(decoded[0], 336);
  EXPECT_EQ(decoded[129], -3);

  bytes = encode({CacheFormat::fp8_ds_mla, 128, 2});
  EXPECT_EQ(bytes.size(), 128u + 4 + 4);
  EXPECT_EQ(scale(bytes), 0.75f);
  EXPECT_EQ(code(bytes[0]), 0x7E);
  EXPECT_EQ(code(bytes[1]), 0xB8);  // −1
  EXPECT_EQ(code(bytes[2]), 0x80);
  EXPECT_EQ(code(bytes[132 + 2]), 0x40);  // −3 in bf16 is 0xC040
  EXPECT_EQ(code(bytes[132 + 3]), 0xC0);
  EXPECT_EQ(decoded[0], 336);
  EXPECT_EQ(decoded[1], -0.75);
  EXPECT_EQ(decoded[128], 1.5);

  bytes = encode({CacheFormat::fp8_ds_mla, 128, 2, 1, true});
  EXPECT_EQ(scale(bytes), 1);
  EXPECT_EQ(decoded[0], 320);  // halfway between 320 and 352: to the even one
  EXPECT_EQ(decoded[1], -0.75);

  bytes = encode({CacheFormat::fp8, 128, 2, 0.5f});
  EXPECT_EQ(bytes.size(), 130u);
  EXPECT_EQ(decoded[0], 224);  // saturated at 448
  EXPECT_EQ(decoded[129], -3);

  set(0, 0), set(1, 0);
  EXPECT_EQ(scale(encode({CacheFormat::fp8_ds_mla, 128, 2})), 1e-4f);
  EXPECT_EQ(scale(encode({CacheFormat::fp8_ds_mla, 128, 2, 1, true})), 0x1p-13f);
}

TEST(LayerProblem, RowsOfEveryFormat) {
  for (const CacheFormat format : {CacheFormat::bf16, CacheFormat::fp8_ds_mla, CacheFormat::fp8}) {
    LayerProblem problem{.query_lens = {2, 1},
                         .context_lens = {30, 0},
                         .block_size = 8,
                         .cache_format = format,
                         .strided = true};
    problem.dims.num_heads = 1;
    problem.dims.kv_lora_rank = 128;
    LayerData data(problem);
    EXPECT_EQ(data.count_wrong_cache_rows().latent, 3);
    data.write_new_rows();
    EXPECT_EQ(data.count_wrong_cache_rows().latent, 0);
    const LayerTensors t = data.tensors();
    EXPECT_EQ(t.latent_cache.format, format);
    EXPECT_EQ(t.latent_cache.row_stride % 2, format == CacheFormat::bf16 ? 0 : 1);
    std::vector<bfloat16> values(192);
    std::vector<double> decoded(192);
    for (std::int64_t position = 0; position < 32; ++position) {
      data.latent_values(0, position, values.data());
      decode_latent_row(data.latent_format(), data.latent_row(0, position), decoded.data());
      for (std::size_t i = 0; i < values.size(); ++i) {
        // e4m3 is off by 2^-4 at most, and by half of its smallest step below its normal numbers.
        const double value = decode_bf16(std::bit_cast<std::uint16_t>(values[i]));
        const bool exact =
            format == CacheFormat::bf16 || (format == CacheFormat::fp8_ds_mla && i >= 128);
        ASSERT_NEAR(decoded[i], value, exact ? 0 : std::fabs(value) / 16 + 1e-5) << i;
      }
    }
    t.latent_cache.row(t.slot_mapping(2))[0] ^= std::byte{1};
    EXPECT_EQ(data.count_wrong_cache_rows().latent, 1);
  }
  LayerProblem odd{.query_lens = {1}, .context_lens = {0}, .cache_format = CacheFormat::fp8_ds_mla};
  odd.dims.kv_lora_rank = 100;
  EXPECT_THROW(LayerData{odd}, std::invalid_argument);
}

TEST(NumberFormats, Bf16MatchesCudaHeaders) {
  for (std::uint64_t i = 0; i < 200000; ++i) {
    const std::uint32_t bits = random_bits(4, 1, i) & (i % 2 == 0 ? 0xFFFFFFFFu : 0xFFFF8000u);
    const float value = std::bit_cast<float>(bits);
    if (std::isnan(value)) continue;
    ASSERT_EQ(encode_bf16(value), std::bit_cast<std::uint16_t>(__float2bfloat16_rn(value)));
  }
  EXPECT_TRUE(std::isnan(decode_bf16(encode_bf16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_EQ(decode_bf16(0x3FC0), 1.5);
}

TEST(NormalRow, MomentsAndTail) {
  constexpr int kWidth = 1003;
  std::vector<float> values(kWidth);
  double sum = 0, squares = 0, largest = 0;
  for (std::int64_t row = 0; row < 100; ++row) {
    normal_row(1, 2, row, kWidth, 2.0f, values.data());
    for (const float value : values) {
      sum += value;
      squares += double{value} * value;
      largest = std::max(largest, std::fabs(double{value}));
    }
  }
  const double count = 100.0 * kWidth;
  EXPECT_NEAR(sum / count, 0, 0.03);  // five standard errors
  EXPECT_NEAR(std::sqrt(squares / count), 2, 0.03);
  EXPECT_GT(largest, 6);
}

void expect_valid_picks(std::span<const std::int32_t> picks, std::int64_t position) {
  const auto valid = std::min<std::int64_t>(static_cast<std::int64_t>(picks.size()), position + 1);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(picks.size()); ++i) {
    const std::int32_t pick = picks[static_cast<std::size_t>(i)];
    if (i >= valid) {
      ASSERT_EQ(pick, -1) << i;
    } else if (i > 0) {
      ASSERT_GT(pick, picks[static_cast<std::size_t>(i - 1)]) << i;
    } else {
      ASSERT_GE(pick, 0);
    }
  }
  // Ascending and not past it: the last one is the token itself.
  ASSERT_EQ(picks[static_cast<std::size_t>(valid - 1)], position);
}

class Picks : public testing::TestWithParam<int> {};

TEST_P(Picks, DistinctAscendingWithTheTokenItself) {
  const int topk = GetParam();
  std::vector<std::int32_t> picks(static_cast<std::size_t>(topk)), next = picks;
  for (const std::int64_t position : {0, 1, topk - 2, topk - 1, topk, topk + 1, 5 * topk + 63}) {
    if (position < 0) continue;
    SCOPED_TRACE(testing::Message() << "position " << position);
    random_picks(7, 3, position, picks);
    expect_valid_picks(picks, position);
    clustered_picks(7, 3, position + 1, picks, next);
    expect_valid_picks(next, position + 1);
  }
}
INSTANTIATE_TEST_SUITE_P(Topk, Picks, testing::Values(1, 2, 3, 64, 200, 2048));

TEST(PicksDistribution, RandomIsUniform) {
  constexpr std::int64_t kPosition = 999;
  std::vector<int> counts(kPosition);
  std::vector<std::int32_t> picks(101);
  constexpr int kRows = 4000;
  for (int request = 0; request < kRows; ++request) {
    random_picks(1, request, kPosition, picks);
    for (std::size_t i = 0; i < 100; ++i) ++counts[static_cast<std::size_t>(picks[i])];
  }
  // Each of the 999 earlier positions: binomial, mean 400, standard deviation 19.
  for (std::size_t i = 0; i < counts.size(); ++i) EXPECT_NEAR(counts[i], 400, 6 * 19) << i;
}

TEST(PicksDistribution, ClusteredKeepsFourFifths) {
  constexpr std::int64_t kTopk = 512, kContext = 100000;
  std::vector<std::int32_t> before(kTopk), picks(kTopk);
  random_picks(1, 0, kContext, before);
  std::int64_t common = 0, new_sum = 0, new_count = 0;
  constexpr int kRows = 200;
  for (int row = 1; row <= kRows; ++row) {
    clustered_picks(1, 0, kContext + row, before, picks);
    const std::set<std::int32_t> old(before.begin(), before.end());
    for (const std::int32_t pick : picks) {
      if (old.contains(pick)) {
        ++common;
      } else if (pick != kContext + row) {
        new_sum += pick;
        ++new_count;
      }
    }
    before = picks;
  }
  // Standard error 0.4 / sqrt(102,400) = 0.00125; a new pick is an old one with 0.2 · 0.5 %.
  EXPECT_NEAR(static_cast<double>(common) / (kRows * kTopk), 0.801, 0.006);
  // New picks are uniform over the sequence: standard error 29,000 / sqrt(20,000).
  EXPECT_NEAR(static_cast<double>(new_sum) / static_cast<double>(new_count), 50050, 1000);
}

ModelDims small_dims() {
  ModelDims dims;
  dims.num_heads = 2;
  dims.kv_lora_rank = 24;
  dims.qk_rope_head_dim = 8;
  dims.qk_nope_head_dim = 16;
  dims.v_head_dim = 16;
  dims.index_n_heads = 3;
  dims.index_head_dim = 20;
  dims.index_topk = 8;
  dims.softmax_scale = 0.2f;
  return dims;
}

class Layout : public testing::TestWithParam<LayerProblem> {};

TEST_P(Layout, PagesAndPoison) {
  const LayerProblem& problem = GetParam();
  LayerData data(problem);
  const LayerTensors t = data.tensors();
  const std::int64_t block = problem.block_size;
  std::set<std::int32_t> pages;
  for (std::int64_t r = 0; r < problem.num_requests(); ++r) {
    ASSERT_GT(t.block_tables.extent(1), (problem.seq_len(r) + block - 1) / block);
    for (std::int64_t b = 0; b < t.block_tables.extent(1); ++b) {
      const std::int32_t page = t.block_tables(r, b);
      if (b * block < problem.seq_len(r)) {
        EXPECT_TRUE(page >= 0 && page < data.num_blocks());
        EXPECT_TRUE(pages.insert(page).second) << "page " << page << " twice";
      } else {
        EXPECT_TRUE(page < 0 || page >= data.num_blocks());
      }
    }
  }
  EXPECT_LT(static_cast<std::int64_t>(pages.size()), data.num_blocks());  // spare pages
  for (std::int64_t token = 0; token < data.num_tokens(); ++token) {
    const TokenPlace at = data.place(token);
    EXPECT_EQ(t.slot_mapping(token),
              t.block_tables(at.request, at.position / block) * block + at.position % block);
    EXPECT_TRUE(std::isnan(data.lse(token, 0)));
    EXPECT_EQ(std::bit_cast<std::uint16_t>(t.out(token, 1, 15)), 0xFFFF);
    EXPECT_EQ(t.picks(token, 7), std::numeric_limits<std::int32_t>::max());
  }
  // Context rows are there, new rows and spare pages are not.
  EXPECT_EQ(data.count_wrong_cache_rows().latent, data.num_tokens());
  EXPECT_EQ(data.count_wrong_cache_rows().index_keys, data.num_tokens());
  data.write_new_rows();
  EXPECT_EQ(data.count_wrong_cache_rows().latent, 0);
  EXPECT_EQ(data.count_wrong_cache_rows().index_keys, 0);
  // The structs' own addressing finds the rows too, and one changed byte is seen.
  const std::int64_t slot = t.slot_mapping(0);
  std::uint16_t first = 0;
  std::memcpy(&first, t.latent_cache.row(slot), 2);
  EXPECT_EQ(first, std::bit_cast<std::uint16_t>(t.latent(0, 0)));
  EXPECT_EQ(std::to_integer<int>(t.index_cache.key(slot)[19]),
            std::bit_cast<std::uint8_t>(t.index_k(0, 19)));
  float scale = 0;
  std::memcpy(&scale, t.index_cache.scale(slot), 4);
  EXPECT_EQ(scale, t.index_k_scale(0));
  EXPECT_GT(scale, 0);
  t.latent_cache.row(slot)[5] ^= std::byte{1};
  t.index_cache.scale(slot)[0] ^= std::byte{1};
  EXPECT_EQ(data.count_wrong_cache_rows().latent, 1);
  EXPECT_EQ(data.count_wrong_cache_rows().index_keys, 1);
}

INSTANTIATE_TEST_SUITE_P(Problems, Layout,
                         testing::Values(LayerProblem{.dims = small_dims(),
                                                      .query_lens = {1, 5, 0, 9},
                                                      .context_lens = {40, 3, 7, 0},
                                                      .block_size = 1},
                                         LayerProblem{.dims = small_dims(),
                                                      .query_lens = {0, 130},
                                                      .context_lens = {64, 190},
                                                      .block_size = 64},
                                         LayerProblem{.dims = small_dims(),
                                                      .query_lens = {3, 2},
                                                      .context_lens = {61, 122},
                                                      .block_size = 61,
                                                      .strided = true}));

TEST(LayerData, DependsOnRequestAndPositionOnly) {
  // Request 5 alone from position 0, then cut at 30 and in another batch with other pages.
  LayerData whole({.dims = small_dims(),
                   .query_lens = {40},
                   .context_lens = {0},
                   .request_ids = {5},
                   .selection = SelectionKind::random});
  LayerData cut({.dims = small_dims(),
                 .query_lens = {4, 10},
                 .context_lens = {9, 30},
                 .request_ids = {2, 5},
                 .block_size = 8,
                 .selection = SelectionKind::random,
                 .strided = true});
  whole.write_new_rows();
  cut.write_new_rows();
  const ModelDims dims = small_dims();
  for (std::int64_t p = 0; p < 40; ++p) {
    EXPECT_EQ(std::memcmp(whole.latent_row(0, p), cut.latent_row(1, p), 64), 0) << p;
    EXPECT_EQ(std::memcmp(whole.index_key(0, p), cut.index_key(1, p), 20), 0) << p;
    EXPECT_EQ(whole.index_scale(0, p), cut.index_scale(1, p)) << p;
    if (p < 30) continue;
    const std::int64_t token = 4 + p - 30;
    for (int h = 0; h < dims.num_heads; ++h) {
      EXPECT_EQ(std::memcmp(whole.q(p, h), cut.q(token, h), 48), 0) << p;
    }
    for (int h = 0; h < dims.index_n_heads; ++h) {
      EXPECT_EQ(std::memcmp(whole.index_q(p, h), cut.index_q(token, h), 20), 0) << p;
      EXPECT_EQ(whole.index_weights(p)[h], cut.index_weights(token)[h]) << p;
    }
    EXPECT_TRUE(std::ranges::equal(whole.picks(p), cut.picks(token))) << p;
  }
  EXPECT_NE(std::memcmp(cut.latent_row(0, 3), cut.latent_row(1, 3), 64), 0);
}

TEST(LayerData, ClusteredPicksFollowEachOther) {
  LayerProblem problem{.dims = small_dims(),
                       .query_lens = {20, 6},
                       .context_lens = {300, 0},
                       .selection = SelectionKind::clustered};
  problem.dims.index_topk = 64;
  const LayerData data(problem);
  std::int64_t common = 0;
  for (std::int64_t token = 0; token < 26; ++token) {
    expect_valid_picks(data.picks(token), data.place(token).position);
    if (token == 0 || token >= 20) continue;
    const std::set<std::int32_t> old(data.picks(token - 1).begin(), data.picks(token - 1).end());
    for (const std::int32_t pick : data.picks(token)) common += old.contains(pick) ? 1 : 0;
  }
  // 0.8 and a fifth of 20 % by chance; 19 · 64 trials.
  EXPECT_NEAR(static_cast<double>(common) / (19 * 64), 0.83, 0.06);
}

TEST(LayerData, LogitsAreNeitherUniformNorOneHot) {
  LayerProblem problem{
      .query_lens = {1}, .context_lens = {1000}, .selection = SelectionKind::random};
  problem.dims.num_heads = 4;
  problem.dims.softmax_scale = 0.135f;  // with an mscale² of 1.87
  LayerData data(problem);
  data.write_new_rows();
  std::vector<std::int32_t> keys(1001);
  std::iota(keys.begin(), keys.end(), 0);
  const TokenAttention result = reference_attention(data, 0, keys);
  for (const double lse : result.lse) {
    // Normal logits of deviation s: lse = log(keys) + s² / 2.
    const double deviation = std::sqrt(2 * (lse - std::log(1001)));
    EXPECT_GT(deviation, 1);
    EXPECT_LT(deviation, 2);
  }
}

TEST(LayerData, EmptyBatch) {
  LayerData data({.dims = small_dims(), .query_lens = {}, .context_lens = {}});
  EXPECT_EQ(data.num_tokens(), 0);
  EXPECT_EQ(data.tensors().q.extent(0), 0);
  EXPECT_EQ(data.count_wrong_cache_rows().latent, 0);
}

TEST(LayerData, BadProblemsAreRefused) {
  const ModelDims dims = small_dims();
  EXPECT_THROW(LayerData({.dims = dims, .query_lens = {1}, .context_lens = {}}),
               std::invalid_argument);
  EXPECT_THROW(LayerData({.dims = dims, .query_lens = {1}, .context_lens = {-1}}),
               std::invalid_argument);
  EXPECT_THROW(LayerData({.dims = dims, .query_lens = {1}, .context_lens = {1}, .block_size = 0}),
               std::invalid_argument);
}

TEST(LayerProblem, Prints) {
  std::ostringstream text;
  text << LayerProblem{.dims = small_dims(), .query_lens = {1, 5}, .context_lens = {40, 0}};
  EXPECT_EQ(text.str(),
            "heads 2 L24 R8 P16 V16 indexer 3x20 topk 8 query[1,5] context[40,0] block 64 seed 1 "
            "indexer");
}

}  // namespace
}  // namespace sparse_mla::support
