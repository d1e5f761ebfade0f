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
};

std::ostream& operator<<(std::ostream& out, const PlanProblem& p) {
  out << "budget " << p.row_budget << " alignment " << p.alignment << " query/context:";
  for (std::size_t i = 0; i < p.context_lens.size(); ++i)
    out << ' ' << p.query_lens[i] << '/' << p.context_lens[i];
  return out;
}

ContextPlan plan_of(const PlanProblem& p) {
  return plan_context_chunks(p.query_lens, p.context_lens, {p.row_budget, p.alignment});
}

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
  }
  EXPECT_EQ(next_row, p.context_lens) << "every context row exactly once";
  EXPECT_EQ(plan.member_starts.size(), members_seen);

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
    std::int32_t used = 0, row = start;
    for (std::size_t r = request; r < p_.context_lens.size() && p_.context_lens[r] > 0;
         ++r, row = 0) {
      const std::int32_t remaining = p_.context_lens[r] - row;
      const std::int32_t space = p_.row_budget - used;
      for (std::int32_t piece = p_.alignment; piece < remaining && piece <= space;
           piece += p_.alignment)
        best = std::min(best, 1 + from(r, row + piece));
      if (remaining > space) break;
      used += remaining;
      best = std::min(best, 1 + from(r + 1, 0));
    }
    return memo_[key] = best;
  }

 private:
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
}

TEST(Planner, LargestLengthsDoNotOverflow) {
  const PlanProblem p = problem({std::numeric_limits<std::int32_t>::max()}, 1 << 30, 1 << 20);
  check_invariants(p, plan_of(p));
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
