// Decode context parallelism: the routines one by one, then whole prefill contexts and decodes with
// several ranks in one process.
#include "sparse_mla/dcp.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/attention.h"
#include "sparse_mla/cache.h"
#include "sparse_mla/select.h"

#include "tests/support/compare.h"
#include "tests/support/reference.h"
#include "tests/support/run_entry.h"
#include "tests/support/select_oracle.h"
#include "tests/support/sharded_context.h"

namespace sparse_mla {

std::ostream& operator<<(std::ostream& out, const ContextSharding& sharding) {
  return out << "world " << sharding.world << " interleave " << sharding.interleave;
}

namespace {

using support::deal;
using support::PagedRows;
using support::ShardedContext;
using ::testing::Combine;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Values;
using Lens = std::vector<std::int32_t>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class Sharding : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  const ContextSharding sharding_{std::get<0>(GetParam()), std::get<1>(GetParam())};
};

TEST_P(Sharding, RoundTripAndLengths) {
  const std::int32_t positions = 3 * sharding_.world * sharding_.interleave + 7;
  const auto places = deal(sharding_, positions);
  Lens held(sharding_.world, 0);
  for (std::int32_t position = 0; position < positions; ++position) {
    const auto [rank, place] = places[position];
    ASSERT_EQ(sharding_.owner(position), rank) << position;
    ASSERT_EQ(sharding_.local_position(position), place) << position;
    ASSERT_EQ(sharding_.global_position(rank, place), position);
    for (std::int32_t r = 0; r < sharding_.world; ++r) {
      ASSERT_EQ(sharding_.local_rows(r, position), held[r]) << position << " rank " << r;
      ASSERT_LE(held[r], sharding_.padded_rows(position));
    }
    ++held[rank];
  }
  for (std::int32_t r = 0; r < sharding_.world; ++r) EXPECT_EQ(sharding_.local_rows(r, -5), 0);
}

TEST_P(Sharding, PicksGoToTheirOwnersAndBack) {
  const std::int32_t k = 64, positions = 1000;
  const auto places = deal(sharding_, positions);
  std::mt19937 random(5);
  Lens all(positions), picks(2 * k, -1);
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), random);
  std::copy_n(all.begin(), k, picks.begin());
  std::copy_n(all.begin() + k, 20, picks.begin() + k + 5);  // −1 in front, between and behind
  picks[k + 9] = std::numeric_limits<std::int32_t>::min();
  Lens owners(positions, 0);
  for (std::int32_t rank = 0; rank < sharding_.world; ++rank) {
    Lens local(2 * k, -2), counts(2, -2);
    picks_to_local(sharding_, rank, contiguous<const std::int32_t>(picks.data(), 2, k),
                   contiguous(local.data(), 2, k), counts);
    for (std::int32_t row = 0; row < 2; ++row) {
      Lens expected;
      for (std::int32_t i = 0; i < k; ++i) {
        const std::int32_t pick = picks[row * k + i];
        if (pick >= 0 && places[pick].first == rank) expected.push_back(places[pick].second);
      }
      EXPECT_EQ(counts[row], static_cast<std::int32_t>(expected.size()));
      expected.resize(k, -1);
      EXPECT_EQ(Lens(local.begin() + row * k, local.begin() + (row + 1) * k), expected);
    }
    Lens in_place = picks;
    picks_to_local(sharding_, rank, contiguous<const std::int32_t>(in_place.data(), 2, k),
                   contiguous(in_place.data(), 2, k));
    EXPECT_EQ(in_place, local);
    picks_to_global(sharding_, rank, contiguous<const std::int32_t>(local.data(), 2, k),
                    contiguous(local.data(), 2, k));
    for (const std::int32_t pick : local)
      if (pick >= 0) ++owners[pick];
  }
  for (std::int32_t position = 0; position < positions; ++position)
    ASSERT_EQ(owners[position], std::count(picks.begin(), picks.end(), position)) << position;
}

INSTANTIATE_TEST_SUITE_P(Dcp, Sharding, Combine(Values(1, 2, 3, 4), Values(1, 2, 3, 4, 16, 64)));

TEST(Dcp, VisibleLengthsFollowTheInterleave) {
  const Lens visible{1, 2, 3, 4, 0, -1};
  Lens local(6, -7);
  local_visible_lengths({2, 2}, 0, visible, local);
  EXPECT_THAT(local, ElementsAre(1, 2, 2, 2, 0, 0));
  local_visible_lengths({2, 2}, 1, visible, local);
  EXPECT_THAT(local, ElementsAre(0, 0, 1, 2, 0, 0));
}

TEST(Dcp, PicksOfOtherRanksAreDropped) {
  Lens picks{0, 1, 2, 3};
  const auto view = contiguous(picks.data(), 1, 4);
  picks_to_local({2, 1}, 1, contiguous<const std::int32_t>(picks.data(), 1, 4), view);
  EXPECT_THAT(picks, ElementsAre(0, 1, -1, -1));
}

TEST(Dcp, PlacesBeyondAnyPositionHaveNoPick) {
  Lens places{2147483647, 1073741823, 1073741824, -1, -2147483647 - 1};
  const auto view = contiguous(places.data(), 1, 5);
  picks_to_global({2, 1}, 1, contiguous<const std::int32_t>(places.data(), 1, 5), view);
  EXPECT_THAT(places, ElementsAre(-1, 2147483647, -1, -1, -1));
}

TEST(Dcp, BadInputIsNamed) {
  const auto error_of = [](auto call) -> std::string {
    try {
      call();
      return "";
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
  };
  Lens four(4), five(5);
  const auto in = contiguous<const std::int32_t>(four.data(), 1, 4);
  const auto out = contiguous(five.data(), 1, 5);
  EXPECT_EQ(error_of([&] {
              local_visible_lengths({2, 1}, 2, four, four);
            }),
            "rank: got 2, expected 0 … 1");
  EXPECT_EQ(error_of([&] {
              local_visible_lengths({0, 1}, 0, four, four);
            }),
            "world: got 0, expected at least 1");
  EXPECT_THAT(error_of([&] {
                local_visible_lengths({2, 1}, 0, four, five);
              }),
              HasSubstr("local: got 5"));
  EXPECT_EQ(error_of([&] {
              picks_to_local({2, 1}, 0, in, out);
            }),
            "local: got [1, 5], expected [1, 4]");
  EXPECT_EQ(error_of([&] {
              picks_to_global({2, 1}, -1, in, out);
            }),
            "rank: got -1, expected 0 … 1");
  float score = 0;
  EXPECT_THAT(error_of([&] {
                select_global_topk({contiguous<const float>(&score, 1, 1, 1),
                                    contiguous<const std::int32_t>(four.data(), 2, 1, 2)},
                                   out);
              }),
              HasSubstr("candidates.scores: got [1, 1, 1]"));
  EXPECT_THAT(error_of([&] { merge_rank_partials({}, {}); }), HasSubstr("ranks: got 0"));

  const ContextPlan plan = plan_context_chunks(Lens{1}, Lens{100}, {128, 32, {2, 16}});
  std::vector<std::byte> bytes(4096);
  std::vector<std::int64_t> source(100);
  const auto rows = contiguous(bytes.data(), 100, 4);
  EXPECT_THAT(error_of([&] { gathered_rows(plan, 1, 64, source); }), HasSubstr("chunk: got 1"));
  EXPECT_THAT(error_of([&] { gathered_rows(plan, 0, 63, source); }),
              HasSubstr("rows_per_rank: got 63"));
  EXPECT_THAT(error_of([&] { gathered_rows(plan, 0, 64, std::span(source).first(99)); }),
              HasSubstr("source: got 99"));
  EXPECT_THAT(error_of([&] {
                reorder_gathered_chunk(plan, 0, contiguous<const std::byte>(bytes.data(), 2, 63, 4),
                                       rows);
              }),
              HasSubstr("gathered: got [2, 63, 4], expected [2, at least 64, 4]"));
  EXPECT_THAT(error_of([&] { local_members(plan, 0, 0, {}); }), HasSubstr("members: got 0"));
}

// The exact global selection.

class GlobalTopk : public testing::TestWithParam<std::tuple<int, int, int, int>> {};

// Each rank's own top-k, as `select` hands it out, of rows of scores by position.
struct Candidates {
  Lens picks;                 // [world, rows, k] positions
  std::vector<float> scores;  // [world, rows, k]
  std::int64_t world, rows, k;

  Candidates(const ContextSharding& sharding, const std::vector<std::vector<float>>& scores_of_row,
             std::int64_t topk)
      : world(sharding.world), rows(static_cast<std::int64_t>(scores_of_row.size())), k(topk) {
    for (std::int32_t rank = 0; rank < sharding.world; ++rank) {
      std::vector<float> local;
      Lens lens;
      std::vector<std::int64_t> offsets;
      for (const std::vector<float>& row : scores_of_row) {
        offsets.push_back(static_cast<std::int64_t>(local.size()));
        const auto places = deal(sharding, static_cast<std::int32_t>(row.size()));
        for (std::size_t position = 0; position < row.size(); ++position)
          if (places[position].first == rank) local.push_back(row[position]);
        lens.push_back(
            static_cast<std::int32_t>(static_cast<std::int64_t>(local.size()) - offsets.back()));
      }
      Lens indices(static_cast<std::size_t>(rows * k), -2);
      std::vector<float> values(static_cast<std::size_t>(rows * k), kNan);
      SelectCall call;
      call.scores.data = local.data();
      call.scores.num_rows = rows;
      call.scores.row_len = rows == 0 ? 0 : *std::max_element(lens.begin(), lens.end());
      call.scores.row_stride = call.scores.row_len;
      call.scores.row_offsets = offsets.data();
      call.ends = lens.data();
      call.indices = contiguous(indices.data(), rows, k);
      call.values = contiguous(values.data(), rows, k);
      support::run_fastest(select_operation(), problem_of(call), call);
      picks_to_global(sharding, rank, contiguous<const std::int32_t>(indices.data(), rows, k),
                      contiguous(indices.data(), rows, k));
      picks.insert(picks.end(), indices.begin(), indices.end());
      scores.insert(scores.end(), values.begin(), values.end());
    }
  }

  Lens select() const {
    Lens selected(static_cast<std::size_t>(rows * k), -2);
    select_global_topk({contiguous<const float>(scores.data(), world, rows, k),
                        contiguous<const std::int32_t>(picks.data(), world, rows, k)},
                       contiguous(selected.data(), rows, k));
    return selected;
  }
};

TEST_P(GlobalTopk, IsTheTopkOfAllKeys) {
  const auto [world, interleave, k, keys] = GetParam();
  const ContextSharding sharding{world, interleave};
  std::mt19937 random(6);
  std::vector<std::vector<float>> rows(24);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    for (int i = 0; i < keys; ++i) {
      const auto draw = random();
      float score = static_cast<float>(draw) * 0x1p-32f;
      if (row % 4 == 1) score = static_cast<float>(draw % 3);  // ties
      if (row % 4 == 2)
        score = std::array{kNan, -kInfinity, kInfinity, 0.0f, -0.0f, 1.0f}[draw % 6];
      if (row % 4 == 3) score = draw % 8 == 0 ? -kInfinity : kNan;  // NaN has to be taken
      rows[row].push_back(score);
    }
  }
  const Lens selected = Candidates(sharding, rows, k).select();
  for (std::size_t row = 0; row < rows.size(); ++row) {
    Lens expected = support::select_oracle(rows[row], 0, keys, k);
    std::sort(expected.begin(), expected.end());
    expected.resize(k, -1);
    ASSERT_EQ(Lens(selected.begin() + row * k, selected.begin() + (row + 1) * k), expected)
        << "row " << row;
  }
  // Each pick is kept by one rank, and together the ranks keep them all.
  std::multiset<std::int32_t> kept;
  for (std::int32_t rank = 0; rank < world; ++rank) {
    Lens local = selected;
    const auto view = contiguous(local.data(), 24, k);
    picks_to_local(sharding, rank, contiguous<const std::int32_t>(local.data(), 24, k), view);
    picks_to_global(sharding, rank, contiguous<const std::int32_t>(local.data(), 24, k), view);
    for (const std::int32_t pick : local)
      if (pick >= 0) kept.insert(pick);
  }
  std::multiset<std::int32_t> all;
  for (const std::int32_t pick : selected)
    if (pick >= 0) all.insert(pick);
  EXPECT_EQ(kept, all);
}

// 3 and 7 keys leave ranks with fewer than k, or with none.
INSTANTIATE_TEST_SUITE_P(Dcp, GlobalTopk,
                         Combine(Values(1, 2, 4), Values(1, 2, 3), Values(1, 8),
                                 Values(0, 3, 7, 8, 9, 200)));

TEST(Dcp, ARanksOwnSelectionIsNotTheGlobalOne) {
  // All of the best keys are rank 1's: half of what each rank picks alone is wrong.
  std::vector<float> scores(64);
  for (int i = 0; i < 64; ++i) scores[i] = static_cast<float>(i % 2 == 1 ? 100 + i : i);
  const Candidates candidates({2, 1}, {scores}, 8);
  EXPECT_THAT(candidates.select(), ElementsAre(49, 51, 53, 55, 57, 59, 61, 63));
}

TEST(Dcp, TiesBetweenRanksGoToTheLowerPosition) {
  // Rank 0 holds positions 0, 1, 4, 5, rank 1 holds 2, 3, 6, 7.
  const Candidates candidates({2, 2}, {std::vector<float>(8, 1.0f)}, 3);
  EXPECT_THAT(candidates.select(), ElementsAre(0, 1, 2));
}

TEST(Dcp, PaddingIsNoCandidateWhateverItsScore) {
  const std::vector<float> scores{-kInfinity, kInfinity, kNan, -kInfinity};
  const Lens picks{7, -1, -1, 3};
  Lens selected(3, -2);
  select_global_topk({contiguous<const float>(scores.data(), 2, 1, 2),
                      contiguous<const std::int32_t>(picks.data(), 2, 1, 2)},
                     contiguous(selected.data(), 1, 3));
  EXPECT_THAT(selected, ElementsAre(3, 7, -1));
}

// The merge over ranks.

struct RankPartials {
  std::int64_t rows, heads, width;
  std::vector<std::vector<float>> out, lse;  // [ranks] each

  RankPartials(std::size_t ranks, std::int64_t num_rows, std::int64_t num_heads, std::int64_t v)
      : rows(num_rows),
        heads(num_heads),
        width(v),
        out(ranks, std::vector<float>(static_cast<std::size_t>(num_rows * num_heads * v))),
        lse(ranks, std::vector<float>(static_cast<std::size_t>(num_rows * num_heads))) {}

  Partial partial(std::size_t rank) {
    return {contiguous(out[rank].data(), rows, heads, width),
            contiguous(lse[rank].data(), heads, rows)};
  }
  std::vector<ConstPartial> all() {
    std::vector<ConstPartial> partials;
    for (std::size_t rank = 0; rank < out.size(); ++rank) partials.emplace_back(partial(rank));
    return partials;
  }
};

TEST(Dcp, MergeTakesNaturalLogarithms) {
  RankPartials ranks(2, 1, 1, 1);
  ranks.lse = {{std::log(2.0f)}, {std::log(8.0f)}};
  ranks.out = {{0.0f}, {10.0f}};
  float out = kNan, lse = kNan;
  merge_rank_partials(ranks.all(), {contiguous(&out, 1, 1, 1), contiguous(&lse, 1, 1)});
  EXPECT_NEAR(out, 8.0f, 4e-6f);  // a mix-up with base 2 gives 7.23
  EXPECT_NEAR(lse, std::log(10.0f), 1e-6f);
}

class MergeRanks : public testing::TestWithParam<int> {};

TEST_P(MergeRanks, AgreesWithFp64WhicheverRanksAreEmpty) {
  const auto world = static_cast<std::size_t>(GetParam());
  const std::int64_t num_rows = std::int64_t{1} << world, heads = 3, width = 5;
  RankPartials ranks(world, num_rows, heads, width);
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (std::int64_t row = 0; row < num_rows; ++row)  // bit r of the row: rank r has keys
    for (std::size_t rank = 0; rank < world; ++rank)
      for (std::int64_t head = 0; head < heads; ++head) {
        const bool has_keys = (row >> rank & 1) == 1;
        ranks.lse[rank][static_cast<std::size_t>(head * num_rows + row)] = has_keys ? normal(random)
                                                                           : random() % 2 == 0
                                                                               ? -kInfinity
                                                                               : kInfinity;
        for (std::int64_t i = 0; i < width; ++i)
          ranks.out[rank][static_cast<std::size_t>((row * heads + head) * width + i)] =
              has_keys ? normal(random) : kNan;
      }
  RankPartials merged(1, num_rows, heads, width);
  merge_rank_partials(ranks.all(), merged.partial(0));
  for (std::int64_t row = 0; row < num_rows; ++row)
    for (std::int64_t head = 0; head < heads; ++head) {
      const auto lse_at = static_cast<std::size_t>(head * num_rows + row);
      double sum = 0;
      int with_keys = 0;
      for (std::size_t rank = 0; rank < world; ++rank)
        if (row >> rank & 1) {
          sum += std::exp(double{ranks.lse[rank][lse_at]});
          ++with_keys;
        }
      const float lse = merged.lse[0][lse_at];
      if (with_keys == 0)
        EXPECT_EQ(lse, -kInfinity);
      else
        EXPECT_NEAR(lse, std::log(sum), 1e-5);
      for (std::int64_t i = 0; i < width; ++i) {
        const auto at = static_cast<std::size_t>((row * heads + head) * width + i);
        double value = 0, magnitude = 0;
        for (std::size_t rank = 0; rank < world; ++rank)
          if (row >> rank & 1) {
            const double weight = std::exp(double{ranks.lse[rank][lse_at]}) / sum;
            value += weight * double{ranks.out[rank][at]};
            magnitude += weight * std::fabs(double{ranks.out[rank][at]});
            if (with_keys == 1) {
              EXPECT_EQ(merged.out[0][at], ranks.out[rank][at]) << "bit for bit";
              EXPECT_EQ(lse, ranks.lse[rank][lse_at]);
            }
          }
        if (with_keys == 0)
          EXPECT_EQ(merged.out[0][at], 0.0f);
        else  // per rank: a few roundings of exp at arguments up to ~20
          EXPECT_NEAR(merged.out[0][at], value,
                      static_cast<double>(world) * 40 * 0x1p-24 * magnitude);
      }
    }

  // Into a rank's own memory, and once more: the same bits.
  const std::size_t last = world - 1;
  merge_rank_partials(ranks.all(), ranks.partial(last));
  EXPECT_TRUE(support::same_bits(ranks.out[last], merged.out[0]));
  EXPECT_TRUE(support::same_bits(ranks.lse[last], merged.lse[0]));
}

INSTANTIATE_TEST_SUITE_P(Dcp, MergeRanks, Values(1, 2, 3, 4, 8));

TEST(Dcp, MergeOfTwoRanksIsTheMergeOfPartials) {
  RankPartials ranks(2, 50, 4, 16);
  std::mt19937 random(8);
  std::normal_distribution<float> normal(0.0f, 4.0f);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    for (float& value : ranks.out[rank]) value = normal(random);
    for (float& lse : ranks.lse[rank]) lse = random() % 5 == 0 ? -kInfinity : normal(random);
  }
  RankPartials pair(1, 50, 4, 16), fold(1, 50, 4, 16);
  merge_partials(ranks.partial(0), ranks.partial(1), pair.partial(0));
  merge_rank_partials(ranks.all(), fold.partial(0));
  EXPECT_TRUE(support::same_bits(pair.out[0], fold.out[0]));
  EXPECT_TRUE(support::same_bits(pair.lse[0], fold.lse[0]));
}

TEST(Dcp, AFaultOfOneRankStaysVisible) {
  RankPartials ranks(3, 1, 1, 2);
  ranks.lse = {{-kInfinity}, {kNan}, {1.0f}};
  RankPartials merged(1, 1, 1, 2);
  merge_rank_partials(ranks.all(), merged.partial(0));
  EXPECT_TRUE(std::isnan(merged.lse[0][0]));
  EXPECT_TRUE(std::isnan(merged.out[0][0]));
}

// Whole contexts in chunks.

struct ChunkedContextTest {
  Lens context_lens;
  ContextSharding sharding;
  std::int32_t block_size = 64;
  std::int32_t workspace = 1024;
};
std::ostream& operator<<(std::ostream& out, const ChunkedContextTest& p) {
  return out << p.sharding << " block " << p.block_size << " workspace " << p.workspace
             << " contexts " << testing::PrintToString(p.context_lens);
}

class ChunkedContext : public testing::TestWithParam<ChunkedContextTest> {};

TEST_P(ChunkedContext, AllGatheredAndReorderedEqualsUnsharded) {
  const ChunkedContextTest& p = GetParam();
  constexpr int kWidth = 6;
  const ShardedContext context(
      p.context_lens, p.sharding, p.block_size, kWidth,
      [](bfloat16* row, std::size_t request, std::int32_t position) {
        const std::int32_t mark[3] = {static_cast<std::int32_t>(request), position, 7};
        std::memcpy(static_cast<void*>(row), mark, sizeof(mark));
      });
  const Lens query_lens(p.context_lens.size(), 4);
  const PlannerOptions options{
      p.workspace, static_cast<std::int32_t>(default_alignment(p.block_size, p.sharding)),
      p.sharding};
  const ContextPlan plan = plan_context_chunks(query_lens, p.context_lens, options);
  const std::int64_t world = p.sharding.world, rows_per_rank = p.workspace / world;
  const GatherProblem problem{
      .max_rows = p.workspace, .kv_lora_rank = kWidth, .qk_rope_head_dim = 0};
  const auto gather = [&](const PagedRows& rows, std::span<const ChunkMember> members,
                          View2<bfloat16> out) {
    GatherCall call;
    call.cache = rows.cache;
    call.block_tables = rows.table_view();
    call.members = members;
    call.rows = out;
    support::run_fastest(gather_operation(), problem, call);
  };

  Lens seen(p.context_lens.size(), 0);
  for (std::size_t c = 0; c < plan.chunks.size(); ++c) {
    SCOPED_TRACE("chunk " + std::to_string(c));
    const ContextChunk& chunk = plan.chunks[c];
    std::vector<ChunkMember> members;
    for (std::int32_t i = 0; i < chunk.num_members(); ++i) {
      ChunkMember& member = members.emplace_back();
      member.request = chunk.request_begin + i;
      member.query_len = 4;
      member.first_key = plan.starts(c)[i];
      member.num_keys = plan.seq_lens(c)[i];
      member.key_row = plan.cu_seq_lens(c)[i];
      seen[member.request] += member.num_keys;
    }
    auto expected = support::poisoned<bfloat16>(std::int64_t{p.workspace} * kWidth);
    gather(context.whole, members, contiguous(expected.data(), p.workspace, kWidth));

    // Every rank's buffer; what the gather leaves is padding, 0xFF. All-gather: one behind another.
    auto gathered = support::poisoned<bfloat16>(world * rows_per_rank * kWidth);
    for (std::int32_t rank = 0; rank < world; ++rank) {
      const std::vector<ChunkMember> local = local_members(plan, c, rank, members);
      gather(context.shards[rank], local,
             contiguous(gathered.data() + rank * rows_per_rank * kWidth, rows_per_rank, kWidth));
      for (std::size_t i = 0; i < local.size(); ++i) EXPECT_EQ(local[i].query_len, 4);
    }
    const auto from = contiguous<const std::byte>(
        reinterpret_cast<const std::byte*>(gathered.data()), world, rows_per_rank, 2 * kWidth);
    auto rows = support::poisoned<bfloat16>(std::int64_t{p.workspace} * kWidth);
    reorder_gathered_chunk(
        plan, c, from,
        contiguous(reinterpret_cast<std::byte*>(rows.data()), p.workspace, 2 * kWidth));
    EXPECT_TRUE(support::same_bits(rows, expected)) << "rows behind the chunk's are not touched";

    // Into rows with gaps.
    auto wide = support::poisoned<std::byte>(std::int64_t{p.workspace} * 31);
    reorder_gathered_chunk(
        plan, c, from, strided<std::byte, 2>(wide.data(), {chunk.num_rows, 2 * kWidth}, {31, 1}));
    std::vector<std::int64_t> source(static_cast<std::size_t>(chunk.num_rows), -1);
    gathered_rows(plan, c, rows_per_rank, source);
    for (std::int32_t row = 0; row < chunk.num_rows; ++row) {
      const auto* want = expected.data() + row * kWidth;
      ASSERT_EQ(std::memcmp(wide.data() + row * 31, want, 2 * kWidth), 0) << "row " << row;
      ASSERT_TRUE(std::all_of(wide.data() + row * 31 + 2 * kWidth, wide.data() + (row + 1) * 31,
                              [](std::byte byte) { return byte == std::byte{0xFF}; }));
      ASSERT_EQ(std::memcmp(gathered.data() + source[row] * kWidth, want, 2 * kWidth), 0)
          << "row " << row;
    }
  }
  EXPECT_EQ(seen, p.context_lens);
}

INSTANTIATE_TEST_SUITE_P(
    Dcp, ChunkedContext,
    Values(ChunkedContextTest{{3000, 200, 200}, {2, 64}, 128, 1024},
           ChunkedContextTest{{3000, 200, 200}, {1, 64}, 128, 1024},
           ChunkedContextTest{{37, 1000, 5}, {3, 1}, 16, 193},
           ChunkedContextTest{{64, 0, 64, 0, 1}, {4, 16}, 64, 256},
           ChunkedContextTest{{2048, 320, 77}, {4, 2}, 61, 1000},
           ChunkedContextTest{
               {1, 1, 1, 1, 1, 700}, {4, 64}, 128, 300},  // pages · world > workspace
           ChunkedContextTest{{960, 16, 16, 16, 16, 16, 16, 16}, {2, 1}, 16, 1024},
           ChunkedContextTest{{500, 3, 900}, {3, 7}, 1, 64},
           ChunkedContextTest{{}, {2, 1}, 16, 64}));

TEST(Dcp, LocalLengthsShrinkByWhatEarlierChunksTook) {
  const Lens context_lens{3000, 200, 200};
  const ContextPlan plan = plan_context_chunks(Lens{4, 4, 4}, context_lens, {1024, 128, {2, 64}});
  Lens totals(3, 0), next(3, 0), rank_totals(6, 0);
  for (std::size_t c = 0; c < plan.chunks.size(); ++c) {
    EXPECT_LE(plan.local_rows(c), 512);
    for (std::int32_t i = 0; i < plan.chunks[c].num_members(); ++i) {
      const std::int32_t request = plan.chunks[c].request_begin + i;
      EXPECT_EQ(plan.local_starts(c)[i], next[request]);
      next[request] += plan.local_seq_lens(c)[i];
      totals[request] += plan.local_seq_lens(c)[i];
      for (int rank = 0; rank < 2; ++rank)
        rank_totals[2 * request + rank] += plan.rank_seq_lens(c)[2 * i + rank];
    }
  }
  EXPECT_THAT(totals, ElementsAre(1536, 128, 128));
  EXPECT_THAT(rank_totals, ElementsAre(1528, 1472, 128, 72, 128, 72));
}

// A decode step: local top-k, global picks, local attention, merge.

struct DecodeTest {
  ContextSharding sharding;
  std::int32_t block_size = 64;
};
std::ostream& operator<<(std::ostream& out, const DecodeTest& p) {
  return out << p.sharding << " block " << p.block_size;
}
class ShardedDecode : public testing::TestWithParam<DecodeTest> {};

TEST_P(ShardedDecode, AgreesWithTheReference) {
  const DecodeTest& p = GetParam();
  constexpr int kHeads = 4, kLora = 64, kRope = 16, kWidth = kLora + kRope, kTopk = 24;
  const float scale = 2.0f / std::sqrt(static_cast<float>(kWidth));
  const Lens lens{300, 1, 0, 23, 24, 25, 129, 7};  // keys that each token sees; 0: a padding row
  const auto num_tokens = static_cast<std::int64_t>(lens.size());
  std::mt19937 random(9);
  const auto value = [&] {
    return __float2bfloat16_rn(static_cast<float>(random()) * 0x1p-31f - 1.0f);
  };
  ShardedContext context(
      lens, p.sharding, p.block_size, kWidth,
      [&](bfloat16* row, std::size_t, std::int32_t) { std::generate_n(row, kWidth, value); });
  std::vector<bfloat16> q(static_cast<std::size_t>(num_tokens * kHeads * kWidth));
  std::generate(q.begin(), q.end(), value);
  std::vector<std::vector<float>> scores;  // with ties
  for (const std::int32_t len : lens) {
    scores.emplace_back();
    for (std::int32_t i = 0; i < len; ++i)
      scores.back().push_back(static_cast<float>(random() % 50));
  }

  const Lens picks = Candidates(p.sharding, scores, kTopk).select();
  Lens request_of_token(lens.size());
  std::iota(request_of_token.begin(), request_of_token.end(), 0);
  RankPartials ranks(static_cast<std::size_t>(p.sharding.world), num_tokens, kHeads, kLora);
  for (std::int32_t rank = 0; rank < p.sharding.world; ++rank) {
    const PagedRows& shard = context.shards[rank];
    Lens local(picks.size()), slots(picks.size()), visible(lens.size());
    picks_to_local(p.sharding, rank,
                   contiguous<const std::int32_t>(picks.data(), num_tokens, kTopk),
                   contiguous(local.data(), num_tokens, kTopk));
    local_visible_lengths(p.sharding, rank, lens, visible);
    MapSlotsCall map;
    map.picks = contiguous<const std::int32_t>(local.data(), num_tokens, kTopk);
    map.request_of_token = request_of_token.data();
    map.keys_of_token = visible.data();
    map.block_tables = shard.table_view();
    map.num_blocks = shard.cache.num_blocks;
    map.block_size = p.block_size;
    map.slots = contiguous(slots.data(), num_tokens, kTopk);
    support::run_fastest(map_slots_operation(), {num_tokens, kTopk}, map);
    for (std::size_t i = 0; i < slots.size(); ++i)
      ASSERT_EQ(slots[i] < 0, local[i] < 0) << "a pick that the rank owns is in its cache";

    auto out = support::poisoned<bfloat16>(num_tokens * kHeads * kLora);
    SparseMqaCall call;
    call.q = contiguous<const bfloat16>(q.data(), num_tokens, kHeads, kWidth);
    call.cache = shard.cache;
    call.slots = contiguous<const std::int32_t>(slots.data(), num_tokens, kTopk);
    call.softmax_scale = scale;
    call.out = contiguous(out.data(), num_tokens, kHeads, kLora);
    call.lse = ranks.partial(static_cast<std::size_t>(rank)).lse;
    support::run_fastest(sparse_mqa_operation(),
                         SparseMqaProblem{.num_heads = kHeads,
                                          .kv_lora_rank = kLora,
                                          .qk_rope_head_dim = kRope,
                                          .topk = kTopk,
                                          .max_tokens = num_tokens},
                         call);
    std::transform(out.begin(), out.end(), ranks.out[static_cast<std::size_t>(rank)].begin(),
                   [](bfloat16 element) { return __bfloat162float(element); });
  }
  RankPartials merged(1, num_tokens, kHeads, kLora);
  merge_rank_partials(ranks.all(), merged.partial(0));

  support::ErrorMeasure measure;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const auto at = static_cast<std::size_t>(token);
    std::vector<double> query(kHeads * kWidth);
    std::transform(q.begin() + token * kHeads * kWidth, q.begin() + (token + 1) * kHeads * kWidth,
                   query.begin(),
                   [](bfloat16 element) { return double{__bfloat162float(element)}; });
    std::vector<const std::byte*> rows;
    for (const std::int32_t pick : support::reference_topk(scores[at], kTopk))
      rows.push_back(context.whole.row(token, pick));
    const support::LatentAttention expected =
        support::reference_mqa(query, {CacheFormat::bf16, kLora, kRope}, double{scale}, rows);
    for (int head = 0; head < kHeads; ++head)
      measure.add(
          std::span<const float>(merged.out[0]).subspan((at * kHeads + head) * kLora, kLora),
          merged.lse[0][static_cast<std::size_t>(head * num_tokens + token)],
          std::span<const double>(expected.out).subspan(head * kLora, kLora),
          expected.lse[static_cast<std::size_t>(head)]);
  }
  EXPECT_EQ(measure.num_rows(), num_tokens * kHeads);
  EXPECT_TRUE(measure.within_bf16()) << measure;
}

INSTANTIATE_TEST_SUITE_P(Dcp, ShardedDecode,
                         Values(DecodeTest{{1, 1}, 64}, DecodeTest{{2, 1}, 64},
                                DecodeTest{{2, 64}, 128}, DecodeTest{{3, 16}, 61},
                                DecodeTest{{4, 2}, 16}, DecodeTest{{4, 64}, 64},
                                DecodeTest{{8, 3}, 1}));

}  // namespace
}  // namespace sparse_mla
