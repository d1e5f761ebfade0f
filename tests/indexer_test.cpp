// Operation `indexer_scores`: every entry against plain fp64 loops, and its bits under any
// batching.
#include "sparse_mla/indexer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/number_formats.h"
#include "tests/support/run_entry.h"

namespace sparse_mla {
namespace {

using support::decode_e4m3;
using support::poisoned;
using support::run_entry;
using support::same_bits;

constexpr double kEpsilon = 0x1p-24;  // half an ulp of 1 in fp32
constexpr std::uint8_t kNanCode = 0x7F;

struct Member {
  int rows = 0, first_position = 0;
};

struct IndexerTest {
  int heads = 64, dim = 128, block_size = 64;
  std::vector<Member> members;
};

std::ostream& operator<<(std::ostream& out, const IndexerTest& p) {
  out << p.heads << " heads × " << p.dim << ", pages of " << p.block_size
      << ", members (rows, first position):";
  for (const Member& m : p.members) out << " (" << m.rows << ", " << m.first_position << ')';
  return out;
}

fp8_e4m3 from_code(std::uint8_t code) {
  fp8_e4m3 value;
  value.__x = code;
  return value;
}

// Pages in random places; everything that is no key of a request is NaN.
struct IndexerData {
  IndexerProblem problem;
  std::vector<fp8_e4m3> q;
  std::vector<float> weights, scores;
  std::vector<std::byte> pages;
  std::vector<std::int32_t> block_tables;
  std::vector<ScoreMember> members;
  IndexerCall call;

  explicit IndexerData(const IndexerTest& p) {
    std::mt19937 engine(5);
    // Finite codes of every magnitude up to 15, subnormals and both zeros among them: a few large
    // ones would drown the rest.
    const auto code = [&] {
      return static_cast<std::uint8_t>((engine() & 0x80u) | (engine() % 0x57u));
    };
    std::int64_t tokens = 1, offset = 2, max_blocks = 1, num_blocks = 2;
    for (const Member& m : p.members) {
      ScoreMember member;
      member.request = static_cast<std::int32_t>(members.size());
      member.query_start = static_cast<std::int32_t>(tokens);
      member.num_rows = m.rows;
      member.first_position = m.first_position;
      member.row_keys = m.first_position + m.rows + 1;
      member.score_offset = offset;
      members.push_back(member);
      tokens += m.rows + 1;
      offset += std::int64_t{member.row_keys} * m.rows + 3;
      const std::int64_t blocks = (m.first_position + m.rows + p.block_size - 1) / p.block_size;
      max_blocks = std::max(max_blocks, blocks);
      num_blocks += blocks;
    }
    scores = poisoned<float>(offset);

    const std::int64_t q_head = p.dim + 1;
    q = poisoned<fp8_e4m3>(tokens * p.heads * q_head);
    weights = poisoned<float>(tokens * p.heads);
    std::vector<std::int32_t> free_blocks(static_cast<std::size_t>(num_blocks));
    for (std::int64_t b = 0; b < num_blocks; ++b)
      free_blocks[static_cast<std::size_t>(b)] = static_cast<std::int32_t>(b);
    std::shuffle(free_blocks.begin(), free_blocks.end(), engine);
    block_tables = poisoned<std::int32_t>(static_cast<std::int64_t>(members.size()) * max_blocks);
    const std::int64_t stride = std::int64_t{p.block_size} * (p.dim + 4) + 3;  // odd on purpose
    pages = poisoned<std::byte>(num_blocks * stride);
    call.cache.data = pages.data();
    call.cache.num_blocks = num_blocks;
    call.cache.block_size = p.block_size;
    call.cache.head_dim = p.dim;
    call.cache.block_stride = stride;

    for (const ScoreMember& m : members) {
      for (std::int64_t t = m.query_start; t < m.query_start + m.num_rows; ++t)
        for (int h = 0; h < p.heads; ++h) {
          for (int d = 0; d < p.dim; ++d)
            q[static_cast<std::size_t>((t * p.heads + h) * q_head + d)] = from_code(code());
          weights[static_cast<std::size_t>(t * p.heads + h)] =
              static_cast<float>(static_cast<double>(engine()) * 0x1p-31 - 0.5);
        }
      for (std::int64_t key = 0; key < m.first_position + m.num_rows; ++key) {
        std::int32_t& block =
            block_tables[static_cast<std::size_t>(m.request * max_blocks + key / p.block_size)];
        if (key % p.block_size == 0) {
          block = free_blocks.back();
          free_blocks.pop_back();
        }
        for (int d = 0; d < p.dim; ++d) *key_byte(m, key, d) = std::byte{code()};
        const auto scale = static_cast<float>(static_cast<double>(engine()) * 0x1p-32);
        std::memcpy(scale_bytes(m, key), &scale, sizeof scale);
      }
    }
    call.index_q = strided<const fp8_e4m3, 3>(q.data(), {tokens, p.heads, p.dim},
                                              {p.heads * q_head, q_head, 1});
    call.index_weights = contiguous<const float>(weights.data(), tokens, p.heads);
    call.block_tables = contiguous<const std::int32_t>(
        block_tables.data(), static_cast<std::int64_t>(members.size()), max_blocks);
    call.members = members;
    call.scores = scores.data();
    problem = {p.heads, p.dim, tokens, 1 << 20};
  }

  // A page: block_size · D bytes of keys, then block_size scales.
  std::byte* page(const ScoreMember& m, std::int64_t key) {
    const std::size_t columns = members.empty() ? 0 : block_tables.size() / members.size();
    const std::int32_t block = block_tables[static_cast<std::size_t>(m.request) * columns +
                                            static_cast<std::size_t>(key / call.cache.block_size)];
    return pages.data() + block * call.cache.block_stride;
  }
  std::byte* key_byte(const ScoreMember& m, std::int64_t key, int d) {
    return page(m, key) + key % call.cache.block_size * call.cache.head_dim + d;
  }
  std::byte* scale_bytes(const ScoreMember& m, std::int64_t key) {
    return page(m, key) + std::int64_t{call.cache.block_size} * call.cache.head_dim +
           key % call.cache.block_size * 4;
  }
  float& score(const ScoreMember& m, std::int64_t r, std::int64_t key) {
    return scores[static_cast<std::size_t>(m.score_offset + r * m.row_keys + key)];
  }
};

using EntryAndProblem = std::tuple<std::string, IndexerTest>;
class IndexerScores : public testing::TestWithParam<EntryAndProblem> {};

TEST_P(IndexerScores, AgreesWithPlainLoops) {
  const auto& [entry, p] = GetParam();
  IndexerData data(p);
  run_entry(indexer_scores_operation(), entry, data.problem, data.call);
  std::vector<bool> scored(data.scores.size(), false);
  for (const ScoreMember& m : data.members)
    for (std::int64_t r = 0; r < m.num_rows; ++r)
      for (std::int64_t key = 0; key <= m.first_position + r; ++key) {
        float scale = 0;
        std::memcpy(&scale, data.scale_bytes(m, key), sizeof scale);
        double sum = 0, magnitude = 0;
        for (int h = 0; h < p.heads; ++h) {
          double dot = 0, absolute = 0;
          for (int d = 0; d < p.dim; ++d) {
            const double product =
                decode_e4m3(data.call.index_q(m.query_start + r, h, d).__x) *
                decode_e4m3(static_cast<std::uint8_t>(*data.key_byte(m, key, d)));
            dot += product;
            absolute += std::fabs(product);
          }
          const double weight = double{data.call.index_weights(m.query_start + r, h)};
          sum += weight * std::max(dot, 0.0);
          magnitude += std::fabs(weight) * absolute;
        }
        // sqrt(terms) roundings of the terms' magnitude.
        const double bound =
            4 * kEpsilon * (std::sqrt(p.dim) + std::sqrt(p.heads)) * magnitude * double{scale};
        ASSERT_NEAR(double{data.score(m, r, key)}, double{scale} * sum, bound)
            << "request " << m.request << " row " << r << " key " << key;
        scored[static_cast<std::size_t>(m.score_offset + r * m.row_keys + key)] = true;
      }
  // No score of a key that a row does not see.
  for (std::size_t i = 0; i < scored.size(); ++i)
    ASSERT_TRUE(scored[i] || std::isnan(data.scores[i])) << i;

  const auto scores = data.scores;
  run_entry(indexer_scores_operation(), entry, data.problem, data.call);
  EXPECT_TRUE(same_bits(scores, data.scores));
}

std::vector<IndexerTest> problems() {
  std::vector<IndexerTest> list;
  for (const int heads : {1, 5, 8, 16, 24, 32, 64, 128})
    list.push_back({heads, 128, 64, {{3, 29}, {0, 7}, {1, 0}}});
  for (const int dim : {4, 32, 64, 100, 128}) list.push_back({16, dim, 64, {{1, 47}, {2, 23}}});
  for (const int block_size : {1, 2, 61, 64, 576})
    for (const int dim : {32, 128}) list.push_back({8, dim, block_size, {{9, 600}}});
  // Prefill over several row and key tiles; decodes; speculative rows.
  list.push_back({4, 16, 64, {{70, 0}, {33, 2100}, {1, 1007}, {1, 1008}, {1, 4000}, {8, 100}}});
  list.push_back({4, 128, 64, {{70, 0}, {33, 2100}, {1, 1007}, {1, 1008}, {1, 4000}, {8, 100}}});
  list.push_back({2, 8, 64, {{1100, 0}}});
  list.push_back({2, 128, 64, {{1100, 0}}});
  list.push_back({3, 8, 16, {{20, 1003}}});  // the causal corner crosses a key tile
  return list;
}

const auto kEntries = support::usable_entries(indexer_scores_operation());

std::vector<EntryAndProblem> entries_and_problems() {
  std::vector<EntryAndProblem> list;
  for (const std::string& entry : kEntries)
    for (const IndexerTest& p : problems())
      if (support::serves(indexer_scores_operation(), entry, {p.heads, p.dim}))
        list.emplace_back(entry, p);
  return list;
}

INSTANTIATE_TEST_SUITE_P(EveryEntry, IndexerScores, testing::ValuesIn(entries_and_problems()));

class IndexerEntry : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(EveryEntry, IndexerEntry, testing::ValuesIn(kEntries));

TEST_P(IndexerEntry, BatchesDoNotChangeBits) {
  const IndexerTest p{24, 128, 64, {{19, 40}, {1, 1200}, {10, 1000}, {7, 0}}};
  IndexerData data(p);
  run_entry(indexer_scores_operation(), GetParam(), data.problem, data.call);
  const auto whole = data.scores;

  // Requests in another order.
  std::vector<ScoreMember> members(data.members.rbegin(), data.members.rend());
  data.scores = poisoned<float>(static_cast<std::int64_t>(whole.size()));
  data.call.members = members;
  data.call.scores = data.scores.data();
  run_entry(indexer_scores_operation(), GetParam(), data.problem, data.call);
  EXPECT_TRUE(same_bits(whole, data.scores));

  // Every row a call of its own, and pieces of five rows.
  for (const int piece : {1, 5}) {
    data.scores = poisoned<float>(static_cast<std::int64_t>(whole.size()));
    data.call.scores = data.scores.data();
    for (const ScoreMember& m : data.members)
      for (std::int32_t r = 0; r < m.num_rows; r += piece) {
        ScoreMember part = m;
        part.query_start += r;
        part.num_rows = std::min(piece, m.num_rows - r);
        part.first_position += r;
        part.score_offset += std::int64_t{r} * m.row_keys;
        data.call.members = {&part, 1};
        run_entry(indexer_scores_operation(), GetParam(), data.problem, data.call);
      }
    EXPECT_TRUE(same_bits(whole, data.scores)) << "pieces of " << piece;
  }
}

TEST_P(IndexerEntry, DecodesEveryCode) {
  // One head, one element that is not 0: score = 1 · 1 · relu(1 · k).
  constexpr int kDim = 128;
  IndexerData data({1, kDim, 256, {{1, 255}}});
  const auto q = data.q.begin() + kDim + 1;  // token 1: 1.0, then zeros
  std::fill(q, q + kDim, from_code(0));
  *q = from_code(0x38);
  data.weights[1] = 1;
  const float one = 1;
  const ScoreMember& m = data.members[0];
  for (int code = 0; code < 256; ++code) {
    *data.key_byte(m, code, 0) = std::byte{static_cast<std::uint8_t>(code)};
    std::memcpy(data.scale_bytes(m, code), &one, sizeof one);
  }
  run_entry(indexer_scores_operation(), GetParam(), data.problem, data.call);
  for (int code = 0; code < 256; ++code) {
    const double value = decode_e4m3(static_cast<std::uint8_t>(code));
    if (std::isnan(value))
      EXPECT_TRUE(std::isnan(data.score(m, 0, code))) << code;
    else
      EXPECT_EQ(double{data.score(m, 0, code)}, std::max(value, 0.0)) << code;
  }
}

TEST_P(IndexerEntry, NanPassesReluAndStaysInItsScores) {
  for (int head = 0; head < 20; ++head) {
    IndexerData data({20, 128, 64, {{12, 50}}});
    const ScoreMember& m = data.members[0];
    if (head == 0) *data.key_byte(m, 33, 31) = std::byte{kNanCode};
    data.q[static_cast<std::size_t>(((m.query_start + 7) * 20 + head) * 129 + 4)] =
        from_code(kNanCode);
    run_entry(indexer_scores_operation(), GetParam(), data.problem, data.call);
    for (std::int64_t r = 0; r < 12; ++r)
      for (std::int64_t key = 0; key <= 50 + r; ++key)
        ASSERT_EQ(std::isnan(data.score(m, r, key)), r == 7 || (head == 0 && key == 33))
            << "head " << head << " row " << r << " key " << key;
  }
}

TEST_P(IndexerEntry, PagesOutsideTableOrCacheScoreMinusInfinity) {
  IndexerData data({8, 128, 16, {{10, 90}}});
  const ScoreMember& m = data.members[0];
  run_entry(indexer_scores_operation(), GetParam(), data.problem, data.call);
  const auto whole = data.scores;
  const auto num_blocks = static_cast<std::int32_t>(data.call.cache.num_blocks);
  data.block_tables[1] = -1;
  data.block_tables[2] = num_blocks;
  data.block_tables[4] = std::numeric_limits<std::int32_t>::min();
  // The table ends before the last page.
  data.call.block_tables = strided<const std::int32_t, 2>(data.block_tables.data(), {1, 6}, {7, 1});
  run_entry(indexer_scores_operation(), GetParam(), data.problem, data.call);
  for (std::int64_t r = 0; r < 10; ++r)
    for (std::int64_t key = 0; key <= 90 + r; ++key) {
      const std::int64_t page = key / 16;
      if (page == 1 || page == 2 || page == 4 || page == 6)
        EXPECT_EQ(data.score(m, r, key), -std::numeric_limits<float>::infinity());
      else
        EXPECT_EQ(data.score(m, r, key),
                  whole[static_cast<std::size_t>(m.score_offset + r * m.row_keys + key)]);
    }
}

TEST_P(IndexerEntry, ManyRows) {
  IndexerData data({1, 128, 64, {{1, 3}}});
  // 70,000 requests of one row share the block table and the query.
  std::vector<ScoreMember> members(70000, data.members[0]);
  std::vector<float> scores = poisoned<float>(70000 * 5);
  for (std::size_t i = 0; i < members.size(); ++i)
    members[i].score_offset = static_cast<std::int64_t>(i) * 5;
  data.call.members = members;
  data.call.scores = scores.data();
  data.problem.max_rows = 70000;
  run_entry(indexer_scores_operation(), GetParam(), data.problem, data.call);
  for (std::size_t i = 0; i < members.size(); ++i) {
    ASSERT_EQ(std::memcmp(&scores[i * 5], scores.data(), 4 * sizeof(float)), 0) << i;
    ASSERT_TRUE(std::isfinite(scores[i * 5]) && std::isnan(scores[i * 5 + 4]));
  }
}

TEST_P(IndexerEntry, NothingToDo) {
  IndexerData none({64, 128, 64, {}});
  EXPECT_NO_THROW(run_entry(indexer_scores_operation(), GetParam(), none.problem, none.call));
  IndexerData empty({64, 128, 64, {{0, 10}, {0, 0}}});
  EXPECT_NO_THROW(run_entry(indexer_scores_operation(), GetParam(), empty.problem, empty.call));
}

TEST_P(IndexerEntry, RefusesBadArgumentsBeforeWriting) {
  const auto refuses = [&](const std::string& text, auto spoil) {
    IndexerData data({4, 128, 64, {{5, 40}}});
    spoil(data);
    try {
      run_entry(indexer_scores_operation(), GetParam(), data.problem, data.call);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const std::invalid_argument& error) {
      EXPECT_THAT(error.what(), testing::StartsWith(text));
    }
    for (const float score : data.scores) EXPECT_TRUE(std::isnan(score));
  };
  refuses("index_q:", [](IndexerData& d) { d.problem.index_n_heads = 5; });
  if (support::serves(indexer_scores_operation(), GetParam(), {4, 15}))
    refuses("index_q:", [](IndexerData& d) { d.problem.index_head_dim = 15; });
  refuses("index_weights:", [](IndexerData& d) {
    d.call.index_weights = contiguous<const float>(d.weights.data(), 3, 4);
  });
  refuses("cache.head_dim:", [](IndexerData& d) { d.call.cache.head_dim = 8; });
  refuses("cache.block_size:", [](IndexerData& d) { d.call.cache.block_size = 0; });
  refuses("scores:", [](IndexerData& d) { d.call.scores = nullptr; });
  if (!support::checks_contents(indexer_scores_operation(), GetParam())) return;
  refuses("members[0].request:", [](IndexerData& d) { d.members[0].request = 1; });
  refuses("members[0].query_start:", [](IndexerData& d) { d.members[0].query_start = 3; });
  refuses("members[0].num_rows:", [](IndexerData& d) { d.members[0].num_rows = -1; });
  refuses("members[0].row_keys:", [](IndexerData& d) { d.members[0].row_keys = 44; });
  refuses("members[0].first_position:", [](IndexerData& d) { d.problem.max_keys = 44; });
  refuses("members:", [](IndexerData& d) { d.problem.max_rows = 4; });
}

}  // namespace
}  // namespace sparse_mla
