// Selection masks: every bit at every offset, global and per chunk, against a plain set of pairs.
#include "sparse_mla/masks.h"

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/run_entry.h"

namespace sparse_mla {
namespace {

struct MaskProblem {
  std::vector<ChunkMember> members;
  MaskScope scope = MaskScope::per_chunk;
  MaskTile tile;
  int topk = 16;
  std::uint32_t seed = 1;
};

std::ostream& operator<<(std::ostream& out, const MaskProblem& p) {
  out << to_string(p.scope) << " tile " << p.tile.queries << 'x' << p.tile.keys << " topk "
      << p.topk << " members (queries, context, first key, keys):";
  for (const ChunkMember& m : p.members)
    out << " (" << m.query_len << ", " << m.context_len << ", " << m.first_key << ", " << m.num_keys
        << ')';
  return out;
}

ChunkMember member(std::int32_t query_len, std::int32_t context_len, std::int32_t first_key,
                   std::int32_t num_keys) {
  ChunkMember m;
  m.query_len = query_len;
  m.context_len = context_len;
  m.first_key = first_key;
  m.num_keys = num_keys;
  return m;
}

// Picks for all rows, masks built into poisoned memory with guards.
struct Built {
  MaskLayout layout;
  std::vector<std::int32_t> picks;
  std::int64_t num_tokens = 0;
  std::vector<std::uint32_t> words;
  std::vector<std::int32_t> counts, ids;

  explicit Built(MaskProblem& p) : layout(plan_masks(p.members, p.scope, p.tile)) {
    std::mt19937 random(p.seed);
    for (ChunkMember& m : p.members) {
      m.query_start = static_cast<std::int32_t>(num_tokens + 3);  // rows of others in between
      num_tokens = m.query_start + m.query_len;
    }
    picks.resize(num_tokens * p.topk);
    for (auto& pick : picks) pick = static_cast<std::int32_t>(random() % 7) - 3;  // others' rows
    for (const ChunkMember& m : p.members)
      for (std::int32_t row = 0; row < m.query_len; ++row)
        for (int i = 0; i < p.topk; ++i) {
          // Any position of the sequence, beyond the row's own too, and invalid ones.
          const auto value =
              static_cast<std::int32_t>(random() % (m.context_len + m.query_len + 9));
          picks[(m.query_start + row) * p.topk + i] = random() % 5 == 0 ? -1 : value - 2;
        }
    words.assign(layout.num_words + 1, 0xA5A5A5A5u);
    counts.assign(layout.num_tile_counts + 1, -77);
    ids.assign(layout.num_tile_ids + 1, -77);
    BuildMasksCall call;
    call.picks = contiguous(static_cast<const std::int32_t*>(picks.data()), num_tokens, p.topk);
    call.members = p.members;
    call.mask = {p.tile, layout.members, words.data(), counts.data(), ids.data()};
    support::run_fastest(build_masks_operation(), {layout.num_words, p.topk}, call);
  }
};

std::set<std::int32_t> visible(const MaskProblem& p, const Built& built, const ChunkMember& m,
                               const MaskMember& mask, std::int32_t row) {
  std::set<std::int32_t> keys;
  for (int i = 0; i < p.topk; ++i) {
    const std::int32_t pick = built.picks[(m.query_start + row) * p.topk + i];
    if (pick >= mask.first_key && pick < mask.first_key + mask.num_keys &&
        pick <= m.context_len + row)
      keys.insert(pick);
  }
  return keys;
}

class Masks : public ::testing::TestWithParam<MaskProblem> {};

TEST_P(Masks, HoldExactlyThePicksAndListTheirTiles) {
  MaskProblem p = GetParam();
  const Built built(p);
  for (std::size_t i = 0; i < p.members.size(); ++i) {
    const ChunkMember& m = p.members[i];
    const MaskMember& mask = built.layout.members[i];
    EXPECT_EQ(mask.first_key, p.scope == MaskScope::global ? 0 : m.first_key);
    EXPECT_EQ(mask.row_words, (mask.num_keys + 31) / 32 + 1);
    for (std::int32_t tile = 0; tile * p.tile.queries < m.query_len; ++tile) {
      std::set<std::int32_t> tiles;
      for (std::int32_t row = tile * p.tile.queries;
           row < std::min(m.query_len, (tile + 1) * p.tile.queries); ++row) {
        const std::set<std::int32_t> keys = visible(p, built, m, mask, row);
        const std::uint32_t* words =
            built.words.data() + mask.word_offset + std::int64_t{row} * mask.row_words;
        std::set<std::int32_t> found;
        for (std::int32_t word = 0; word < mask.row_words; ++word)
          for (int bit = 0; bit < 32; ++bit)
            if ((words[word] >> bit & 1) != 0) found.insert(mask.first_key + word * 32 + bit);
        ASSERT_EQ(found, keys) << "row " << row;  // tail bits and pad word are 0 as well
        for (const std::int32_t key : keys) tiles.insert(key / p.tile.keys);
      }
      const std::int32_t count = built.counts[mask.tile_count_offset + tile];
      const auto first = built.ids.begin() + mask.tile_offset + tile * mask.max_tiles;
      ASSERT_LE(count, mask.max_tiles);
      ASSERT_EQ(std::vector<std::int32_t>(first, first + count),
                std::vector<std::int32_t>(tiles.begin(), tiles.end()));
    }
  }
  EXPECT_EQ(built.words.back(), 0xA5A5A5A5u);
  EXPECT_EQ(built.counts.back(), -77);
  EXPECT_EQ(built.ids.back(), -77);
  EXPECT_EQ(built.layout.budget_words, mask_budget_words(p.members, p.scope));
}

// A reader may start at any bit and end at any bit of a member.
TEST_P(Masks, AreReadAtEveryBitOffset) {
  MaskProblem p = GetParam();
  const Built built(p);
  for (std::size_t i = 0; i < p.members.size(); ++i) {
    const ChunkMember& m = p.members[i];
    const MaskMember& mask = built.layout.members[i];
    if (m.query_len == 0) continue;
    const std::int32_t row = m.query_len - 1;
    const std::set<std::int32_t> keys = visible(p, built, m, mask, row);
    const std::uint32_t* words =
        built.words.data() + mask.word_offset + std::int64_t{row} * mask.row_words;
    const std::int64_t last = std::int64_t{mask.first_key} + mask.num_keys;
    const std::int64_t to = std::min(last, std::int64_t{mask.first_key} + 200);
    for (std::int64_t key = mask.first_key; key < to; ++key)
      for (const std::int64_t end : {last, std::min(last, key + 1), std::min(last, key + 31),
                                     std::min(last, key + 32), std::min(last, key + 33)}) {
        std::uint32_t expected = 0;
        for (int bit = 0; bit < 32; ++bit)
          if (key + bit < end && keys.count(static_cast<std::int32_t>(key + bit)) > 0)
            expected |= std::uint32_t{1} << bit;
        ASSERT_EQ(mask_word(words, mask, key, end), expected) << "key " << key << " end " << end;
      }
    EXPECT_EQ(mask_word(words, mask, last, last), 0u);
  }
}

std::vector<MaskProblem> mask_problems() {
  std::vector<MaskProblem> problems;
  for (const MaskScope scope : {MaskScope::global, MaskScope::per_chunk}) {
    for (const std::int32_t first : {0, 1, 31, 32, 33, 127, 128, 129})
      for (const std::int32_t keys : {1, 31, 32, 33, 128, 200})
        problems.push_back({{member(5, first + keys, first, keys)}, scope, {4, 64}, 16, 7});
    problems.push_back({{member(70, 100, 100, 70), member(1, 0, 0, 1), member(0, 50, 50, 0),
                         member(130, 1000, 1000, 130)},
                        scope,
                        {64, 128},
                        64,
                        8});
    // Members without keys (equal split), without rows, and one beyond its own position.
    problems.push_back(
        {{member(3, 64, 64, 0), member(0, 64, 0, 64), member(2, 0, 0, 2)}, scope, {64, 128}, 4, 9});
    problems.push_back({{}, scope, {64, 128}, 4, 10});
    // Rows and lists of picks that are longer than what a kernel holds at a time; 3,001 picks are
    // no whole vectors.
    for (const int topk : {3000, 3001})
      problems.push_back(
          {{member(6, 140000, 3, 139000), member(3, 70000, 70000, 3)}, scope, {4, 32}, topk, 11});
  }
  return problems;
}
INSTANTIATE_TEST_SUITE_P(Problems, Masks, ::testing::ValuesIn(mask_problems()));

TEST(MaskBudget, CountsWordsWithoutPads) {
  const std::vector<ChunkMember> suffix{member(33, 2048, 2048, 33), member(64, 4096, 4096, 64)};
  EXPECT_EQ(mask_budget_words(suffix, MaskScope::global), 33 * 66 + 64 * 130);
  EXPECT_EQ(mask_budget_words(suffix, MaskScope::per_chunk), 33 * 2 + 64 * 2);
  // The published limits: 32,768 tokens fit 128 MiB exactly, 33,024 do not.
  const std::vector<ChunkMember> exact{member(32768, 0, 0, 32768)};
  const std::vector<ChunkMember> above{member(33024, 0, 0, 33024)};
  EXPECT_EQ(4 * mask_budget_words(exact, MaskScope::global), std::int64_t{128} << 20);
  EXPECT_GT(4 * mask_budget_words(above, MaskScope::global), std::int64_t{128} << 20);
}

TEST(MaskBudget, OffsetsAre64Bit) {
  const std::vector<ChunkMember> huge(3, member(200000, 1000000, 1000000, 200000));
  const MaskLayout layout = plan_masks(huge, MaskScope::global, {});
  EXPECT_EQ(layout.members[2].word_offset, std::int64_t{2} * 200000 * 37501);
  EXPECT_EQ(layout.budget_words, std::int64_t{3} * 200000 * 37500);
}

TEST(MaskBudget, BadInputIsNamed) {
  EXPECT_THROW(plan_masks({}, MaskScope::global, {0, 128}), std::invalid_argument);
  EXPECT_THROW(plan_masks({}, MaskScope::global, {64, 100}), std::invalid_argument);
  MaskProblem p{{member(2, 10, 0, 10)}, MaskScope::per_chunk, {64, 128}, 4, 1};
  const MaskLayout layout = plan_masks(p.members, p.scope, p.tile);
  const std::vector<std::int32_t> picks(4, 0);  // one row, but the member has two
  BuildMasksCall call;
  call.picks = contiguous(picks.data(), 1, 4);
  call.members = p.members;
  call.mask.members = layout.members;
  EXPECT_THROW(support::run_fastest(build_masks_operation(), {100, 4}, call),
               std::invalid_argument);
  call.members = {};
  call.mask.members = {};
  call.mask.tile.queries = 0;
  EXPECT_THROW(support::run_fastest(build_masks_operation(), {100, 4}, call),
               std::invalid_argument);
}

}  // namespace
}  // namespace sparse_mla
