// The packed planner's invariants (docs: architecture, "Packed context chunks") as properties over
// random batches, against a dynamic program, and the published corner cases one by one.
#include "sparse_mla/planner.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sparse_mla {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Lens = std::vector<std::int32_t>;

struct PlanProblem {
  Lens query_lens, context_lens;
  std::int32_t row_budget = 1024;
  std::int32_t alignment = 16;
  ContextSharding sharding = {};
};

std::ostream& operator<<(std::ostream& out, const PlanProblem& p) {
  out << "budget " << p.row_budget << " alignment " << p.alignment << " world " << p.sharding.world
      << " interleave " << p.sharding.interleave << " query/context:";
  for (std::size_t i = 0; i < p.context_lens.size(); ++i)
    out << ' ' << p.query_lens[i] << '/' << p.context_lens[i];
  return out;
}

ContextPlan plan_of(const PlanProblem& p) {
  return plan_context_chunks(p.query_lens, p.context_lens, {p.row_budget, p.alignment, p.sharding});
}

// The buffers of every rank, counted row by row.
class RankRows {
 public:
  explicit RankRows(const PlanProblem& p) : p_(p), seen_(p.context_lens.size()) {
    for (Lens& of_rank : seen_) of_rank.assign(p.sharding.world, 0);
  }

  void check_chunk(const ContextPlan& plan, std::size_t c) {
    const ContextChunk& chunk = plan.chunks[c];
    const std::int32_t world = p_.sharding.world, interleave = p_.sharding.interleave;
    const auto starts = plan.local_starts(c), lens = plan.local_seq_lens(c);
    const auto rows = plan.cu_local_seq_lens(c), of_ranks = plan.rank_seq_lens(c);
    ASSERT_EQ(of_ranks.size(), static_cast<std::size_t>(chunk.num_members()) * world);
    EXPECT_EQ(rows[0], 0);
    EXPECT_EQ(plan.local_rows(c), rows.back());
    EXPECT_LE(plan.local_rows(c), p_.row_budget / world) << "a rank's share of the workspace";
    EXPECT_LE(chunk.num_rows, std::int64_t{world} * plan.local_rows(c));
    for (std::int32_t i = 0; i < chunk.num_members(); ++i) {
      Lens& seen = seen_[chunk.request_begin + i];
      Lens held(world, 0);
      const std::int32_t start = plan.starts(c)[i], end = start + plan.seq_lens(c)[i];
      for (std::int32_t position = start; position < end; ++position)
        ++held[world == 1 ? 0 : position / interleave % world];
      EXPECT_EQ(rows[i + 1] - rows[i], lens[i]);
      // No rank has more than rank 0; it is padded up to whole turns.
      EXPECT_EQ(lens[i],
                world == 1 ? held[0] : (held[0] + interleave - 1) / interleave * interleave);
      for (std::int32_t rank = 0; rank < world; ++rank) {
        EXPECT_EQ(of_ranks[i * world + rank], held[rank]) << "rank " << rank;
        EXPECT_EQ(starts[i], seen[rank]) << "the rank's rows in order, each once";
        seen[rank] += held[rank];
      }
    }
  }

 private:
  const PlanProblem& p_;
  std::vector<Lens> seen_;  // [requests][world]
};

PlanProblem problem(Lens context_lens, std::int32_t budget, std::int32_t alignment,
                    std::int32_t query_len = 4) {
  Lens query_lens(context_lens.size(), query_len);
  return {std::move(query_lens), std::move(context_lens), budget, alignment};
}

// What every packed plan must satisfy, whatever the batch.
void check_invariants(const PlanProblem& p, const ContextPlan& plan) {
  const std::size_t num_requests = p.context_lens.size();
  std::vector<std::int32_t> token_of(num_requests + 1, 0);
  for (std::size_t i = 0; i < num_requests; ++i) token_of[i + 1] = token_of[i] + p.query_lens[i];

  std::vector<std::int32_t> next_row(num_requests, 0);
  std::int32_t previous_end = 0;
  std::size_t members_seen = 0;
  RankRows rank_rows(p);
  for (std::size_t c = 0; c < plan.chunks.size(); ++c) {
    SCOPED_TRACE("chunk " + std::to_string(c));
    const ContextChunk& chunk = plan.chunks[c];
    const auto starts = plan.starts(c), lens = plan.seq_lens(c);
    const auto rows = plan.cu_seq_lens(c), queries = plan.cu_query_lens(c);
    ASSERT_GT(chunk.num_members(), 0);
    ASSERT_EQ(chunk.member_begin, static_cast<std::int32_t>(members_seen));
    members_seen += chunk.num_members();
    ASSERT_GE(chunk.request_begin, previous_end - 1);
    previous_end = chunk.request_end;
    EXPECT_LE(chunk.num_rows, p.row_budget);
    EXPECT_EQ(chunk.num_rows, rows.back());
    EXPECT_EQ(chunk.token_begin, token_of[chunk.request_begin]);
    EXPECT_EQ(chunk.token_end, token_of[chunk.request_end]);
    EXPECT_EQ(chunk.is_continuation, starts[0] > 0);
    EXPECT_EQ(chunk.continuation_token_end,
              starts[0] > 0 ? token_of[chunk.request_begin + 1] : chunk.token_begin);
    std::int32_t longest = 0, longest_query = 0;
    for (std::int32_t i = 0; i < chunk.num_members(); ++i) {
      const std::int32_t request = chunk.request_begin + i;
      EXPECT_GT(lens[i], 0);
      if (i > 0) {
        EXPECT_EQ(starts[i], 0) << "only the first member may be a continuation";
      }
      EXPECT_EQ(starts[i], next_row[request]) << "rows in order, each once";
      next_row[request] += lens[i];
      if (next_row[request] < p.context_lens[request]) {
        EXPECT_EQ(next_row[request] % p.alignment, 0) << "inner boundary";
        EXPECT_EQ(i, chunk.num_members() - 1) << "a split request ends its chunk";
      }
      EXPECT_EQ(rows[i + 1] - rows[i], lens[i]);
      EXPECT_EQ(queries[i], token_of[request] - chunk.token_begin);
      longest = std::max(longest, lens[i]);
      longest_query = std::max(longest_query, p.query_lens[request]);
    }
    EXPECT_EQ(queries.back(), chunk.token_end - chunk.token_begin);
    EXPECT_EQ(chunk.max_seq_len, longest);
    EXPECT_EQ(chunk.max_query_len, longest_query);
    // The row → member map, in place of an array with an entry per row.
    for (const std::int32_t row : {0, chunk.num_rows / 2, chunk.num_rows - 1}) {
      const std::int32_t member = plan.member_of_row(c, row);
      EXPECT_LE(rows[member], row);
      EXPECT_GT(rows[member + 1], row);
    }
    rank_rows.check_chunk(plan, c);
  }
  EXPECT_EQ(next_row, p.context_lens) << "every context row exactly once";
  EXPECT_EQ(plan.member_starts.size(), members_seen);
  EXPECT_EQ(plan.sharding, p.sharding);
  const std::size_t sharded_members = p.sharding.world > 1 ? members_seen : 0;
  EXPECT_EQ(plan.member_local_starts.size(), sharded_members);
  EXPECT_EQ(plan.member_rank_seq_lens.size(), sharded_members * p.sharding.world);

  // Tokens with context and the ranges without tile [0, running_rows).
  std::vector<bool> without(plan.running_rows, false);
  for (const TokenRange& range : plan.init_token_ranges) {
    ASSERT_LT(range.begin, range.end);
    ASSERT_LE(range.end, plan.running_rows);
    for (std::int32_t t = range.begin; t < range.end; ++t) without[t] = true;
  }
  std::int32_t last = 0;
  for (std::size_t i = 0; i < num_requests; ++i) {
    if (p.context_lens[i] > 0) last = token_of[i + 1];
    for (std::int32_t t = token_of[i]; t < token_of[i + 1] && t < plan.running_rows; ++t)
      EXPECT_EQ(without[t], p.context_lens[i] == 0) << "token " << t;
  }
  EXPECT_EQ(plan.running_rows, last);
}

// The fewest chunks of any in-order aligned packing whose chunks cover consecutive requests with
// context. State: (request, next row in units of alignment); a chunk may take any aligned piece of
// its last member, not only the largest.
class FewestChunks {
 public:
  explicit FewestChunks(const PlanProblem& p) : p_(p) {}

  int from(std::size_t request, std::int32_t start) {
    while (request < p_.context_lens.size() && p_.context_lens[request] == 0) ++request, start = 0;
    if (request == p_.context_lens.size()) return 0;
    const auto key = std::pair(request, start);
    if (const auto found = memo_.find(key); found != memo_.end()) return found->second;
    int best = std::numeric_limits<int>::max() / 2;
    // One chunk from here: whole requests while they fit, then perhaps a piece of the next.
    std::int32_t used = 0, row = start;  // used: rows of a rank
    for (std::size_t r = request; r < p_.context_lens.size() && p_.context_lens[r] > 0;
         ++r, row = 0) {
      const std::int32_t remaining = p_.context_lens[r] - row;
      const std::int32_t space = p_.row_budget / p_.sharding.world - used;
      for (std::int32_t piece = p_.alignment; piece < remaining && padded(piece) <= space;
           piece += p_.alignment)
        best = std::min(best, 1 + from(r, row + piece));
      if (padded(remaining) > space) break;
      used += padded(remaining);
      best = std::min(best, 1 + from(r + 1, 0));
    }
    return memo_[key] = best;
  }

 private:
  std::int32_t padded(std::int32_t rows) const {
    if (p_.sharding.world == 1) return rows;
    std::int32_t padded = 0;
    for (; rows > 0; rows -= p_.sharding.interleave * p_.sharding.world)
      padded += p_.sharding.interleave;
    return padded;
  }

  const PlanProblem& p_;
  std::map<std::pair<std::size_t, std::int32_t>, int> memo_;
};

TEST(Planner, RandomBatchesKeepTheInvariants) {
  std::mt19937 random(1);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int trial = 0; trial < 3000; ++trial) {
    PlanProblem p;
    p.alignment = draw(1, 70);
    p.row_budget = draw(p.alignment, p.alignment + 600);
    const int scale = draw(1, 3) == 1 ? 5000 : 300;
    for (int i = draw(0, 12); i > 0; --i) {
      p.query_lens.push_back(draw(0, 3) == 0 ? draw(0, 1) : draw(0, 90));
      p.context_lens.push_back(draw(0, 3) == 0 ? 0 : draw(1, scale));
    }
    SCOPED_TRACE(::testing::PrintToString(p));
    check_invariants(p, plan_of(p));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Planner, IsMinimalAgainstADynamicProgram) {
  std::mt19937 random(2);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int trial = 0; trial < 2000; ++trial) {
    PlanProblem p;
    p.alignment = draw(1, 8);
    p.row_budget = draw(p.alignment, 40);
    for (int i = draw(1, 6); i > 0; --i) {
      p.query_lens.push_back(1);
      p.context_lens.push_back(draw(0, 4) == 0 ? 0 : draw(1, 90));
    }
    ASSERT_EQ(static_cast<int>(plan_of(p).chunks.size()), FewestChunks(p).from(0, 0)) << p;
  }
}

class ShardedPlanner : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  const ContextSharding sharding_{std::get<0>(GetParam()), std::get<1>(GetParam())};
  const std::int32_t stripe_ = sharding_.world == 1 ? 1 : sharding_.world * sharding_.interleave;
};

TEST_P(ShardedPlanner, RandomBatchesKeepTheInvariants) {
  std::mt19937 random(3);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int trial = 0; trial < 300; ++trial) {
    PlanProblem p;
    p.sharding = sharding_;
    p.alignment = stripe_ * draw(1, 5);
    p.row_budget = p.alignment + draw(0, 3 * p.alignment + 300);
    const int scale = draw(1, 3) == 1 ? 3000 : 300;
    for (int i = draw(0, 12); i > 0; --i) {
      p.query_lens.push_back(draw(0, 3) == 0 ? draw(0, 1) : draw(0, 90));
      p.context_lens.push_back(draw(0, 3) == 0 ? 0 : draw(1, scale));
    }
    SCOPED_TRACE(::testing::PrintToString(p));
    check_invariants(p, plan_of(p));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_P(ShardedPlanner, IsMinimalAgainstADynamicProgram) {
  std::mt19937 random(4);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int trial = 0; trial < 300; ++trial) {
    PlanProblem p;
    p.sharding = sharding_;
    p.alignment = stripe_ * draw(1, 3);
    p.row_budget = p.alignment + draw(0, 4 * p.alignment);
    for (int i = draw(1, 6); i > 0; --i) {
      p.query_lens.push_back(1);
      p.context_lens.push_back(draw(0, 4) == 0 ? 0 : draw(1, 10 * p.alignment));
    }
    ASSERT_EQ(static_cast<int>(plan_of(p).chunks.size()), FewestChunks(p).from(0, 0)) << p;
  }
}

INSTANTIATE_TEST_SUITE_P(Dcp, ShardedPlanner,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(1, 2, 16, 64)));

TEST(Planner, ShardedEqualSplitCutsARanksShare) {
  const Lens query_lens(3, 4), context_lens{1000, 0, 130};
  // 512 rows a rank over 2 requests with context: 256 of a rank are 512 of the context.
  const PlannerOptions options{1024, 128, {2, 64}};
  EXPECT_EQ(equal_split_passes(context_lens, options), 2);
  const ContextPlan plan = plan_equal_split(query_lens, context_lens, options);
  ASSERT_EQ(plan.chunks.size(), 2u);
  EXPECT_THAT(plan.seq_lens(0), ElementsAre(512, 0, 130));
  EXPECT_THAT(plan.local_seq_lens(0), ElementsAre(256, 0, 128));
  EXPECT_THAT(plan.rank_seq_lens(0), ElementsAre(256, 256, 0, 0, 66, 64));
  EXPECT_THAT(plan.local_starts(1), ElementsAre(256, 256, 256));
  EXPECT_THAT(plan.local_seq_lens(1), ElementsAre(256, 0, 0));
  EXPECT_THAT(plan.rank_seq_lens(1), ElementsAre(256, 232, 0, 0, 0, 0));
}

TEST(Planner, DefaultAlignmentSuitsPagesAndStripes) {
  EXPECT_EQ(default_alignment(64, {}), 64);
  EXPECT_EQ(default_alignment(64, {1, 48}), 64);
  EXPECT_EQ(default_alignment(128, {2, 64}), 128);
  EXPECT_EQ(default_alignment(64, {3, 1}), 192);
  EXPECT_EQ(default_alignment(61, {4, 16}), 61 * 64);
  EXPECT_EQ(default_alignment(2147483647, {2, 1 << 29}), 2147483647LL << 30);
  EXPECT_THROW(default_alignment(0, {}), std::invalid_argument);
  EXPECT_THROW(default_alignment(64, {2, 1 << 30}), std::invalid_argument);
}

TEST(Planner, OneLongRequestLeavesRoomForTheShortOnes) {
  Lens context(32, 16);
  context[0] = 60000;
  const PlanProblem p = problem(context, 65536, 16, 513);
  const ContextPlan plan = plan_of(p);
  check_invariants(p, plan);
  EXPECT_EQ(plan.chunks.size(), 1u);
  EXPECT_EQ(plan.chunks[0].num_rows, 60496);
  EXPECT_TRUE(plan.single_covering_chunk());
  EXPECT_EQ(equal_split_passes(context, {65536, 16}), 30);
}

TEST(Planner, PublishedBatches) {
  for (const Lens& context : {Lens{960, 16, 16, 16, 16, 16, 16, 16}, Lens{2048, 320},
                              Lens{1024, 1024, 1024}, Lens{37, 1000, 5}, Lens{1}}) {
    const PlanProblem p = problem(context, 1024, 16);
    SCOPED_TRACE(::testing::PrintToString(p));
    check_invariants(p, plan_of(p));
  }
}

// Found by fuzzing: 3 × 10^9 rows are no error, they are only ever counted chunk by chunk.
TEST(Planner, ContextMayPassTwoToTheThirtyOneRowsInAll) {
  const PlanProblem p = problem(Lens(3, 1000000000), 1 << 20, 64);
  const ContextPlan plan = plan_of(p);
  EXPECT_EQ(plan.chunks.size(), (3000000000u + (1u << 20) - 1) >> 20);
  const std::int64_t slice = (1 << 20) / 3 / 64 * 64;
  EXPECT_EQ(equal_split_passes(p.context_lens, {1 << 20, 64}), (1000000000 + slice - 1) / slice);
  check_invariants(p, plan);
}

TEST(Planner, ContinuationFlagsAndTokenRanges) {
  const PlanProblem p{{3, 5, 7}, {2048, 32, 32}, 1024, 16};
  const ContextPlan plan = plan_of(p);
  check_invariants(p, plan);
  ASSERT_EQ(plan.chunks.size(), 3u);
  EXPECT_FALSE(plan.chunks[0].is_continuation);
  EXPECT_TRUE(plan.chunks[1].is_continuation);
  EXPECT_EQ(plan.chunks[1].continuation_token_end, 3);
  EXPECT_FALSE(plan.chunks[2].is_continuation);
  EXPECT_THAT(plan.cu_query_lens(2), ElementsAre(0, 5, 12));
  EXPECT_EQ(plan.chunks[2].token_begin, 3);
}

TEST(Planner, NothingAlignedFitsClosesTheChunk) {
  // The published listing falls through here and overfills the chunk.
  const PlanProblem p = problem({900, 512}, 1024, 256);
  const ContextPlan plan = plan_of(p);
  check_invariants(p, plan);
  ASSERT_EQ(plan.chunks.size(), 2u);
  EXPECT_THAT(plan.seq_lens(0), ElementsAre(900));
  EXPECT_THAT(plan.seq_lens(1), ElementsAre(512));
}

TEST(Planner, ARequestWithoutContextClosesTheChunk) {
  const ContextPlan plan = plan_of(problem({64, 0, 64, 0}, 1024, 16));
  ASSERT_EQ(plan.chunks.size(), 2u);
  EXPECT_EQ(plan.running_rows, 12);
  EXPECT_THAT(plan.init_token_ranges, ElementsAre(TokenRange{4, 8}));
  EXPECT_FALSE(plan.single_covering_chunk());
  EXPECT_TRUE(plan_of(problem({0, 0}, 1024, 16)).empty());
  EXPECT_TRUE(plan_of(problem({}, 1024, 16)).empty());
}

TEST(Planner, LeadingRequestWithoutContextIsInitialised) {
  const ContextPlan plan = plan_of(problem({0, 64}, 1024, 16));
  EXPECT_THAT(plan.init_token_ranges, ElementsAre(TokenRange{0, 4}));
  EXPECT_FALSE(plan.single_covering_chunk());
}

TEST(Planner, ARemainderThatFitsIsTakenWhole) {
  // 1,000 rows fit a workspace of 1,000, although the largest aligned piece is 768.
  const ContextPlan whole = plan_of(problem({1000}, 1000, 256));
  EXPECT_EQ(whole.chunks.size(), 1u);
  const ContextPlan split = plan_of(problem({1001}, 1000, 256));
  ASSERT_EQ(split.chunks.size(), 2u);
  EXPECT_THAT(split.seq_lens(0), ElementsAre(768));
  EXPECT_THAT(split.seq_lens(1), ElementsAre(233));
}

TEST(Planner, EqualSplitPassesCoverAllRequestsAndMerge) {
  const PlanProblem p = problem({100, 0, 700, 30}, 96, 16);
  const ContextPlan plan = plan_equal_split(p.query_lens, p.context_lens, {96, 16});
  // 96 rows over 3 requests with context: slices of 32; ceil(700 / 32) passes.
  EXPECT_EQ(plan.chunks.size(), 22u);
  EXPECT_EQ(equal_split_passes(p.context_lens, {96, 16}), 22);
  Lens seen(4, 0);
  for (std::size_t c = 0; c < plan.chunks.size(); ++c) {
    EXPECT_EQ(plan.chunks[c].num_members(), 4);
    EXPECT_LE(plan.chunks[c].num_rows, 96);
    EXPECT_EQ(plan.chunks[c].continuation_token_end, 16);
    for (int i = 0; i < 4; ++i) {
      if (plan.seq_lens(c)[i] > 0) {
        EXPECT_EQ(plan.starts(c)[i], seen[i]);
      }
      seen[i] += plan.seq_lens(c)[i];
    }
  }
  EXPECT_EQ(seen, p.context_lens);
  EXPECT_THAT(plan.init_token_ranges, ElementsAre(TokenRange{0, 16}));
  EXPECT_FALSE(plan.single_covering_chunk());
  EXPECT_TRUE(plan_equal_split(Lens{1}, Lens{0}, {96, 16}).empty());
}

TEST(Planner, EqualSplitSliceIsAtLeastOneAlignment) {
  const Lens context(10, 100);
  EXPECT_EQ(equal_split_passes(context, {64, 32}), 4);  // 64/10 = 6 rows, raised to 32
}

TEST(Planner, WorkspaceRowsHaveAFloorOfOneBlock) {
  for (const int seqs : {1, 32, 256})
    for (const int model_len : {8192, 163840})
      EXPECT_EQ(context_workspace_rows(model_len, seqs, 11000), 65536);
  EXPECT_EQ(context_workspace_rows(1024, 1, 64), 8192);
  EXPECT_EQ(context_workspace_rows(100, 4, 64), 1024);      // 4·4·64 > 8·100
  EXPECT_EQ(context_workspace_rows(100, 1, 70000), 70000);  // one block
  EXPECT_EQ(context_workspace_rows(163840, 32, 64, 10000), 10000);
  EXPECT_EQ(context_workspace_rows(163840, 32, 64, 10), 64);
  EXPECT_EQ(context_workspace_rows(1 << 30, 1 << 30, 1 << 30), 1 << 30);
  EXPECT_THROW(context_workspace_rows(163840, 32, 64, -1), std::invalid_argument);
  EXPECT_THROW(context_workspace_rows(0, 32, 64), std::invalid_argument);
  EXPECT_THROW(context_workspace_rows(1, 0, 64), std::invalid_argument);
  EXPECT_THROW(context_workspace_rows(1, 1, 0), std::invalid_argument);
}

std::string error_of(const PlanProblem& p) {
  try {
    plan_of(p);
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

TEST(Planner, BadInputIsNamed) {
  EXPECT_EQ(error_of({{1, 1}, {5, -3}, 64, 16}), "context_lens[1]: got -3, expected at least 0");
  EXPECT_EQ(error_of({{-1, 1}, {5, 3}, 64, 16}), "query_lens[0]: got -1, expected at least 0");
  EXPECT_THAT(error_of({{1}, {5, 3}, 64, 16}), HasSubstr("query_lens: got 1"));
  EXPECT_THAT(error_of({{1}, {5}, 64, 0}), HasSubstr("alignment: got 0"));
  EXPECT_THAT(error_of({{1}, {5}, 64, 65}), HasSubstr("alignment: got 65"));
  EXPECT_THAT(error_of({{2147483647, 1}, {5, 5}, 64, 16}), HasSubstr("2^31-1 tokens"));
  EXPECT_EQ(error_of({{1}, {5}, 64, 16, {0, 1}}), "world: got 0, expected at least 1");
  EXPECT_EQ(error_of({{1}, {5}, 64, 16, {2, 0}}), "interleave: got 0, expected at least 1");
  EXPECT_THAT(error_of({{1}, {5}, 64, 16, {1 << 16, 1 << 15}}), HasSubstr("of at most 2^31-1"));
  EXPECT_EQ(error_of({{1}, {5}, 64, 24, {2, 16}}),
            "alignment: got 24, expected a multiple of interleave · world (32)");
  // One aligned piece takes 64 rows of each rank, whose share is 63.
  EXPECT_EQ(error_of({{1}, {5}, 127, 128, {2, 64}}),
            "alignment: got 128, expected at most the workspace's 127 rows");
}

TEST(Planner, LargestLengthsDoNotOverflow) {
  PlanProblem p = problem({std::numeric_limits<std::int32_t>::max()}, 1 << 30, 1 << 20);
  const ContextPlan whole = plan_of(p);
  ASSERT_EQ(whole.chunks.size(), 2u);
  EXPECT_THAT(whole.seq_lens(1), ElementsAre((1 << 30) - 1));
  p.sharding = {2, 1 << 19};
  const ContextPlan sharded = plan_of(p);
  ASSERT_EQ(sharded.chunks.size(), 2u);
  EXPECT_THAT(sharded.local_starts(1), ElementsAre(1 << 29));
  EXPECT_THAT(sharded.local_seq_lens(1), ElementsAre(1 << 29));
  EXPECT_THAT(sharded.rank_seq_lens(1), ElementsAre(1 << 29, (1 << 29) - 1));
}

// Linear in requests + chunks: 16 times the work may not take 100 times as long.
TEST(Planner, TimeIsLinear) {
  const auto seconds = [](int requests) {
    const PlanProblem p = problem(Lens(requests, 5000), 65536, 64);
    double best = 1e9;
    for (int repeat = 0; repeat < 5; ++repeat) {
      const auto start = std::chrono::steady_clock::now();
      const ContextPlan plan = plan_of(p);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      EXPECT_FALSE(plan.empty());
      best = std::min(best, took.count());
    }
    return best;
  };
  EXPECT_LT(seconds(64000), 100 * seconds(4000) + 1e-3);
}

}  // namespace
}  // namespace sparse_mla
