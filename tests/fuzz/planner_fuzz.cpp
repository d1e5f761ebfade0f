// Bytes → a batch, a workspace and an alignment → a plan that keeps every invariant of the packed
// schedule; the equal split covers the same rows; score pieces cover every query row once.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <fuzzer/FuzzedDataProvider.h>

#include "sparse_mla/indexer.h"
#include "sparse_mla/planner.h"

#include "tests/fuzz/expect.h"

namespace {

using namespace sparse_mla;
using fuzz::expect;
using Lens = std::vector<std::int32_t>;

constexpr std::int32_t kMaxInt32 = 2147483647;

// Lengths where planners break: small, about a power of two, at the end of the range.
std::int32_t length(FuzzedDataProvider& input) {
  switch (input.ConsumeIntegralInRange(0, 4)) {
    case 0:
      return 0;
    case 1:
      return input.ConsumeIntegralInRange(0, 100);
    case 2:
      return (1 << input.ConsumeIntegralInRange(0, 30)) + input.ConsumeIntegralInRange(-1, 1);
    case 3:
      return input.ConsumeIntegralInRange(0, 70000);
    default:
      return kMaxInt32 - input.ConsumeIntegralInRange(0, 300);
  }
}

// Rows of each request, member by member: in order, each once.
std::vector<std::int64_t> covered(const ContextPlan& plan, const Lens& context_lens) {
  std::vector<std::int64_t> next(context_lens.size(), 0);
  for (std::size_t c = 0; c < plan.chunks.size(); ++c)
    for (std::int32_t i = 0; i < plan.chunks[c].num_members(); ++i) {
      const std::int32_t request = plan.chunks[c].request_begin + i;
      const std::int32_t rows = plan.seq_lens(c)[i];
      if (rows == 0) continue;
      expect(plan.starts(c)[i] == next[request], "rows come in order, each once");
      next[request] += rows;
    }
  return next;
}

// A chunk in rows of each rank: within a rank's share, and the ranks' rows are the chunk's.
void check_shards(const ContextPlan& plan, std::size_t c, const PlannerOptions& options) {
  const std::int32_t world = options.sharding.world;
  expect(plan.local_rows(c) <= options.row_budget / world, "a chunk fits a rank's share");
  std::int64_t local = 0;
  for (std::int32_t i = 0; i < plan.chunks[c].num_members(); ++i) {
    expect(plan.cu_local_seq_lens(c)[i] == local, "cu_local_seq_lens");
    local += plan.local_seq_lens(c)[i];
    expect(std::int64_t{plan.local_starts(c)[i]} * world == plan.starts(c)[i], "local_starts");
    std::int64_t rows = 0;
    for (std::int32_t rank = 0; rank < world; ++rank) {
      const std::int32_t held = plan.rank_seq_lens(c)[i * world + rank];
      expect(held >= 0 && held <= plan.local_seq_lens(c)[i], "a rank's rows fit its padded length");
      rows += held;
    }
    expect(rows == plan.seq_lens(c)[i], "every row lies on one rank");
  }
}

void check_packed(const Lens& query_lens, const Lens& context_lens, const PlannerOptions& options) {
  const ContextPlan plan = plan_context_chunks(query_lens, context_lens, options);
  std::vector<std::int64_t> token_of(query_lens.size() + 1, 0);
  for (std::size_t i = 0; i < query_lens.size(); ++i) token_of[i + 1] = token_of[i] + query_lens[i];
  for (std::size_t c = 0; c < plan.chunks.size(); ++c) {
    const ContextChunk& chunk = plan.chunks[c];
    expect(chunk.num_members() >= 1, "a chunk has members");
    expect(chunk.num_rows <= options.row_budget, "a chunk fits the workspace");
    expect(chunk.token_begin == token_of[chunk.request_begin] &&
               chunk.token_end == token_of[chunk.request_end],
           "tokens are the requests' tokens");
    expect(chunk.is_continuation == (plan.starts(c)[0] > 0), "is_continuation");
    expect(chunk.continuation_token_end ==
               (chunk.is_continuation ? token_of[chunk.request_begin + 1] : chunk.token_begin),
           "continuation_token_end");
    std::int64_t rows = 0;
    for (std::int32_t i = 0; i < chunk.num_members(); ++i) {
      const std::int32_t request = chunk.request_begin + i;
      const std::int64_t end = std::int64_t{plan.starts(c)[i]} + plan.seq_lens(c)[i];
      expect(plan.seq_lens(c)[i] > 0, "no member has length 0");
      expect(i == 0 || plan.starts(c)[i] == 0, "only the first member may be a continuation");
      expect(end == context_lens[request] || end % options.alignment == 0,
             "inner boundaries are aligned");
      expect(end == context_lens[request] || i == chunk.num_members() - 1,
             "a split request ends its chunk");
      expect(plan.cu_seq_lens(c)[i] == rows, "cu_seq_lens");
      expect(plan.cu_query_lens(c)[i] == token_of[request] - chunk.token_begin, "cu_query_lens");
      rows += plan.seq_lens(c)[i];
    }
    expect(rows == chunk.num_rows && plan.cu_seq_lens(c).back() == rows, "num_rows");
    expect(plan.member_of_row(c, chunk.num_rows - 1) == chunk.num_members() - 1, "last row");
    check_shards(plan, c, options);
  }
  const auto rows = covered(plan, context_lens);
  std::int64_t running = 0;
  for (std::size_t i = 0; i < context_lens.size(); ++i) {
    expect(rows[i] == context_lens[i], "every context row is gathered");
    if (context_lens[i] > 0) running = token_of[i + 1];
  }
  expect(plan.running_rows == running, "running_rows");
}

void check_scores(const Lens& query_lens, const Lens& context_lens, std::int64_t budget_bytes) {
  std::vector<ScoreRequest> requests;
  std::int64_t token = 0, row_pieces = 0;
  for (std::size_t i = 0; i < query_lens.size(); ++i) {
    const std::int64_t seq_len = std::int64_t{query_lens[i]} + context_lens[i];
    if (seq_len > kMaxInt32) return;  // no request: the batch's check refuses it
    requests.push_back({static_cast<std::int32_t>(i), static_cast<std::int32_t>(token),
                        query_lens[i], context_lens[i]});
    token += query_lens[i];
    row_pieces +=
        seq_len == 0 ? 0 : query_lens[i] / std::max<std::int64_t>(budget_bytes / 4 / seq_len, 1);
  }
  if (row_pieces > 100000) return;  // right, but slow
  const ScorePlan plan = plan_scores(requests, budget_bytes);
  std::vector<std::int64_t> next(query_lens.size(), 0);
  for (const ScorePiece& piece : plan.pieces) {
    expect(piece.num_rows == 1 || piece.num_scores * 4 <= budget_bytes, "a piece fits the budget");
    for (std::int32_t m = piece.member_begin; m < piece.member_end; ++m) {
      const ScoreMember& member = plan.members[m];
      expect(member.query_start == requests[member.request].query_start + next[member.request],
             "query rows come in order, each once");
      next[member.request] += member.num_rows;
      expect(
          member.score_offset + std::int64_t{member.num_rows} * member.row_keys <= piece.num_scores,
          "a member's scores lie inside its piece");
    }
  }
  for (std::size_t i = 0; i < query_lens.size(); ++i)
    expect(next[i] == query_lens[i], "every query row is scored");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider input(data, size);
  PlannerOptions options;
  options.row_budget = length(input);
  options.alignment = length(input);
  if (input.ConsumeBool()) {
    options.sharding.world = input.ConsumeIntegralInRange(1, 16);
    options.sharding.interleave = input.ConsumeIntegralInRange(1, 300);
    // Mostly an alignment that the sharding allows.
    const std::int64_t stripe = options.sharding.stripe_rows();
    if (input.ConsumeIntegralInRange(0, 7) > 0)
      options.alignment = static_cast<std::int32_t>(
          std::min<std::int64_t>(options.alignment / stripe + 1, kMaxInt32 / stripe) * stripe);
  }
  const std::int64_t score_budget = std::int64_t{length(input)}
                                    << input.ConsumeIntegralInRange(0, 30);
  Lens query_lens, context_lens;
  std::int64_t rows = 0;
  while (input.remaining_bytes() > 0 && query_lens.size() < 64) {
    query_lens.push_back(length(input));
    context_lens.push_back(length(input));
    rows += context_lens.back();
  }
  // A million chunks are right too, but slow.
  if (options.row_budget >= options.alignment && options.alignment >= 1) {
    const std::int64_t least = std::max(1, options.row_budget - options.alignment + 1);
    if (rows / least > 20000) return 0;
  }
  try {
    check_packed(query_lens, context_lens, options);
    const std::int64_t passes = equal_split_passes(context_lens, options);
    if (passes * static_cast<std::int64_t>(query_lens.size()) < 100000) {
      const ContextPlan split = plan_equal_split(query_lens, context_lens, options);
      expect(static_cast<std::int64_t>(split.chunks.size()) == passes, "equal_split_passes");
      const auto covered_rows = covered(split, context_lens);
      for (std::size_t i = 0; i < context_lens.size(); ++i)
        expect(covered_rows[i] == context_lens[i], "the equal split gathers every row");
    }
    if (score_budget >= 4) check_scores(query_lens, context_lens, score_budget);
  } catch (const std::invalid_argument&) {
    // Only what the planner says it refuses.
    std::int64_t tokens = 0, with_context = 0;
    for (const std::int32_t query_len : query_lens) tokens += query_len;
    for (const std::int32_t context_len : context_lens) with_context += context_len > 0;
    expect(options.alignment < 1 || options.alignment > options.row_budget || tokens > kMaxInt32 ||
               options.alignment % options.sharding.stripe_rows() != 0 ||
               with_context * options.alignment > kMaxInt32,
           "good input is not refused");
  }
  return 0;
}
