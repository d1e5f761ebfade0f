#include "sparse_mla/planner.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "sparse_mla/error.h"

namespace sparse_mla {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

/// Throws for a negative length; returns the sum.
std::int64_t checked_sum(const char* name, std::span<const std::int32_t> lens) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < lens.size(); ++i) {
    if (lens[i] < 0)
      throw_invalid(name + ("[" + std::to_string(i) + "]"), std::to_string(lens[i]), "at least 0");
    sum += lens[i];
  }
  return sum;
}

// Context rows may pass 2^31 in all: they are only ever counted chunk by chunk.
void check_context(std::span<const std::int32_t> context_lens, const PlannerOptions& options) {
  require(options.alignment >= 1, "alignment", options.alignment, "at least 1");
  require(options.alignment <= options.row_budget, "alignment", options.alignment,
          "at most the workspace's " + std::to_string(options.row_budget) + " rows");
  validate(options.sharding);
  // With it, padded_rows(alignment) = alignment / world ≤ ⌊row_budget / world⌋ follows from
  // alignment ≤ row_budget.
  require(
      options.alignment % options.sharding.stripe_rows() == 0, "alignment", options.alignment,
      "a multiple of interleave · world (" + std::to_string(options.sharding.stripe_rows()) + ")");
  checked_sum("context_lens", context_lens);
}

void check_inputs(std::span<const std::int32_t> query_lens,
                  std::span<const std::int32_t> context_lens, const PlannerOptions& options) {
  require(query_lens.size() == context_lens.size(), "query_lens", query_lens.size(),
          "as many entries as context_lens (" + std::to_string(context_lens.size()) + ")");
  check_context(context_lens, options);
  const std::int64_t tokens = checked_sum("query_lens", query_lens);
  require(tokens <= kMaxInt32, "query_lens", tokens, "at most 2^31-1 tokens in all");
}

/// Appends members to a plan and closes its chunks.
class PlanBuilder {
 public:
  PlanBuilder(ContextPlan& plan, std::span<const std::int32_t> query_lens)
      : plan_(plan), query_lens_(query_lens), sharded_(plan.sharding.sharded()) {}

  /// Rows of a rank that the open chunk uses.
  std::int32_t used_rows() const {
    if (!open_) return 0;
    return sharded_ ? plan_.cumulative_local_seq_lens.back() : plan_.chunks.back().num_rows;
  }

  void add(std::int32_t request, std::int32_t token_begin, std::int32_t start, std::int32_t rows) {
    if (!open_) {
      open_ = true;
      ContextChunk chunk;
      chunk.request_begin = chunk.request_end = request;
      chunk.token_begin = chunk.token_end = token_begin;
      chunk.continuation_token_end = token_begin;
      chunk.member_begin = static_cast<std::int32_t>(plan_.member_starts.size());
      chunk.is_continuation = start > 0;
      if (start > 0) chunk.continuation_token_end = token_begin + query_lens_[request];
      plan_.chunks.push_back(chunk);
      plan_.cumulative_seq_lens.push_back(0);
      plan_.cumulative_query_lens.push_back(0);
      if (sharded_) plan_.cumulative_local_seq_lens.push_back(0);
    }
    ContextChunk& chunk = plan_.chunks.back();
    const std::int32_t query_len = query_lens_[request];
    chunk.request_end = request + 1;
    chunk.token_end = token_begin + query_len;
    chunk.num_rows += rows;
    chunk.max_query_len = std::max(chunk.max_query_len, query_len);
    chunk.max_seq_len = std::max(chunk.max_seq_len, rows);
    plan_.member_starts.push_back(start);
    plan_.member_seq_lens.push_back(rows);
    plan_.cumulative_seq_lens.push_back(chunk.num_rows);
    plan_.cumulative_query_lens.push_back(plan_.cumulative_query_lens.back() + query_len);
    if (sharded_) add_local(start, rows);
  }

  void close() { open_ = false; }

 private:
  void add_local(std::int32_t start, std::int32_t rows) {
    const ContextSharding& sharding = plan_.sharding;
    const auto padded = static_cast<std::int32_t>(sharding.padded_rows(rows));
    // `start` is a multiple of the stripe: each rank has the same number of rows before it.
    plan_.member_local_starts.push_back(start / sharding.world);
    plan_.member_local_seq_lens.push_back(padded);
    plan_.cumulative_local_seq_lens.push_back(plan_.cumulative_local_seq_lens.back() + padded);
    for (std::int32_t rank = 0; rank < sharding.world; ++rank)
      plan_.member_rank_seq_lens.push_back(
          static_cast<std::int32_t>(sharding.local_rows(rank, rows)));
  }

  ContextPlan& plan_;
  std::span<const std::int32_t> query_lens_;
  bool sharded_ = false;
  bool open_ = false;
};

std::int64_t longest(std::span<const std::int32_t> lens) {
  return lens.empty() ? 0 : *std::max_element(lens.begin(), lens.end());
}

/// An aligned piece of the context takes exactly 1/world of its rows on every rank. So `rows` of a
/// rank hold this many whole alignments, in rows of the context: the largest multiple of the
/// alignment whose padded_rows fits, without a search.
std::int64_t largest_aligned(std::int64_t rows, const PlannerOptions& options) {
  return rows / (options.alignment / options.sharding.world) * options.alignment;
}

/// Rows that one request gets in each pass of the equal split.
std::int64_t equal_split_slice(std::int64_t requests_with_context, const PlannerOptions& options) {
  const std::int64_t share = options.row_budget / options.sharding.world / requests_with_context;
  return std::max<std::int64_t>(largest_aligned(share, options), options.alignment);
}

}  // namespace

std::string to_string(Schedule schedule) {
  return schedule == Schedule::packed ? "packed" : "equal-split";
}

std::span<const std::int32_t> ContextPlan::starts(std::size_t chunk) const {
  return std::span(member_starts).subspan(chunks[chunk].member_begin, chunks[chunk].num_members());
}

std::span<const std::int32_t> ContextPlan::seq_lens(std::size_t chunk) const {
  return std::span(member_seq_lens)
      .subspan(chunks[chunk].member_begin, chunks[chunk].num_members());
}

std::span<const std::int32_t> ContextPlan::cu_seq_lens(std::size_t chunk) const {
  return std::span(cumulative_seq_lens)
      .subspan(chunks[chunk].member_begin + chunk, chunks[chunk].num_members() + 1);
}

std::span<const std::int32_t> ContextPlan::cu_query_lens(std::size_t chunk) const {
  return std::span(cumulative_query_lens)
      .subspan(chunks[chunk].member_begin + chunk, chunks[chunk].num_members() + 1);
}

std::span<const std::int32_t> ContextPlan::local_starts(std::size_t chunk) const {
  if (!sharding.sharded()) return starts(chunk);
  return std::span(member_local_starts)
      .subspan(chunks[chunk].member_begin, chunks[chunk].num_members());
}

std::span<const std::int32_t> ContextPlan::local_seq_lens(std::size_t chunk) const {
  if (!sharding.sharded()) return seq_lens(chunk);
  return std::span(member_local_seq_lens)
      .subspan(chunks[chunk].member_begin, chunks[chunk].num_members());
}

std::span<const std::int32_t> ContextPlan::cu_local_seq_lens(std::size_t chunk) const {
  if (!sharding.sharded()) return cu_seq_lens(chunk);
  return std::span(cumulative_local_seq_lens)
      .subspan(chunks[chunk].member_begin + chunk, chunks[chunk].num_members() + 1);
}

std::span<const std::int32_t> ContextPlan::rank_seq_lens(std::size_t chunk) const {
  if (!sharding.sharded()) return seq_lens(chunk);
  const auto world = static_cast<std::size_t>(sharding.world);
  return std::span(member_rank_seq_lens)
      .subspan(chunks[chunk].member_begin * world, chunks[chunk].num_members() * world);
}

std::int32_t ContextPlan::member_of_row(std::size_t chunk, std::int32_t row) const {
  require(row >= 0 && row < chunks[chunk].num_rows, "row", row,
          "within the chunk's " + std::to_string(chunks[chunk].num_rows) + " rows");
  const auto bounds = cu_seq_lens(chunk);
  return static_cast<std::int32_t>(std::upper_bound(bounds.begin(), bounds.end(), row) -
                                   bounds.begin()) -
         1;
}

bool ContextPlan::single_covering_chunk() const {
  return chunks.size() == 1 && init_token_ranges.empty() &&
         chunks[0].continuation_token_end == chunks[0].token_begin && chunks[0].token_begin == 0 &&
         chunks[0].token_end == running_rows;
}

std::int64_t default_alignment(std::int32_t block_size, const ContextSharding& sharding) {
  require(block_size >= 1, "block_size", block_size, "at least 1");
  validate(sharding);
  return std::lcm(std::int64_t{block_size}, sharding.stripe_rows());
}

ContextPlan plan_context_chunks(std::span<const std::int32_t> query_lens,
                                std::span<const std::int32_t> context_lens,
                                const PlannerOptions& options) {
  check_inputs(query_lens, context_lens, options);
  ContextPlan plan;
  plan.sharding = options.sharding;
  PlanBuilder builder(plan, query_lens);
  const std::int32_t budget = options.row_budget / options.sharding.world;  // rows of a rank
  std::int32_t token = 0;
  std::int32_t gap_begin = 0;  // end of the last token with context
  for (std::int32_t request = 0; request < static_cast<std::int32_t>(context_lens.size());
       ++request) {
    const std::int32_t context_len = context_lens[request];
    if (context_len == 0) builder.close();
    for (std::int32_t start = 0; start < context_len;) {
      const std::int32_t space = budget - builder.used_rows();
      const std::int32_t remaining = context_len - start;
      if (options.sharding.padded_rows(remaining) <= space) {
        builder.add(request, token, start, remaining);
        start += remaining;
        continue;
      }
      // The largest aligned piece; what is left of the request starts the next chunk. Nothing
      // aligned fits: the chunk is closed as it is. An empty chunk always takes a piece, since
      // padded_rows(alignment) ≤ budget. A piece is shorter than what remains, whose padded rows
      // are more than `space`, and no longer than the workspace rounded down to the alignment.
      const auto piece = static_cast<std::int32_t>(largest_aligned(space, options));
      if (piece > 0) builder.add(request, token, start, piece);
      start += piece;
      builder.close();
    }
    const std::int32_t token_end = token + query_lens[request];
    if (context_len > 0) {
      if (gap_begin < token) plan.init_token_ranges.push_back({gap_begin, token});
      gap_begin = token_end;
    }
    token = token_end;
  }
  plan.running_rows = gap_begin;
  return plan;
}

std::int64_t equal_split_passes(std::span<const std::int32_t> context_lens,
                                const PlannerOptions& options) {
  check_context(context_lens, options);
  const std::int64_t with_context = static_cast<std::int64_t>(context_lens.size()) -
                                    std::count(context_lens.begin(), context_lens.end(), 0);
  if (with_context == 0) return 0;
  const std::int64_t slice = equal_split_slice(with_context, options);
  return (longest(context_lens) + slice - 1) / slice;
}

ContextPlan plan_equal_split(std::span<const std::int32_t> query_lens,
                             std::span<const std::int32_t> context_lens,
                             const PlannerOptions& options) {
  check_inputs(query_lens, context_lens, options);
  ContextPlan plan;
  plan.schedule = Schedule::equal_split;
  plan.sharding = options.sharding;
  const std::int64_t with_context = static_cast<std::int64_t>(context_lens.size()) -
                                    std::count(context_lens.begin(), context_lens.end(), 0);
  if (with_context == 0) return plan;
  const std::int64_t slice = equal_split_slice(with_context, options);
  require(with_context * slice <= kMaxInt32, "context_lens", with_context,
          "few enough requests with context for 2^31-1 rows a pass");
  const std::int64_t longest_context = longest(context_lens);
  PlanBuilder builder(plan, query_lens);
  std::int32_t num_tokens = 0;
  for (std::int64_t start = 0; start < longest_context; start += slice) {
    std::int32_t token = 0;
    for (std::size_t request = 0; request < context_lens.size(); ++request) {
      const std::int64_t rows = std::clamp<std::int64_t>(context_lens[request] - start, 0, slice);
      builder.add(static_cast<std::int32_t>(request), token, static_cast<std::int32_t>(start),
                  static_cast<std::int32_t>(rows));
      token += query_lens[request];
    }
    builder.close();
    num_tokens = token;
    plan.chunks.back().continuation_token_end = token;  // every pass merges
  }
  plan.running_rows = num_tokens;
  if (num_tokens > 0) plan.init_token_ranges = {{0, num_tokens}};
  return plan;
}

std::int64_t context_workspace_rows(std::int64_t max_model_len, std::int64_t max_num_seqs,
                                    std::int64_t block_size, std::int64_t user_cap) {
  require(max_model_len >= 1 && max_model_len <= kMaxInt32, "max_model_len", max_model_len,
          "1 … 2^31-1");
  require(max_num_seqs >= 1 && max_num_seqs <= kMaxInt32, "max_num_seqs", max_num_seqs,
          "1 … 2^31-1");
  require(block_size >= 1 && block_size <= kMaxInt32, "block_size", block_size, "1 … 2^31-1");
  require(user_cap >= 0, "workspace_rows", user_cap, "at least 0 (0: no cap)");
  // 65,536 rows feed a GPU; 8 sequences' worth or 4 pages each is where more stops helping. A page
  // must fit, so that an aligned piece does: the floor is one block.
  std::int64_t rows = std::max(
      8 * max_model_len, max_num_seqs > 65536 / block_size ? 65536 : 4 * max_num_seqs * block_size);
  rows = std::max(std::min<std::int64_t>(rows, 65536), block_size);
  return user_cap == 0 ? rows : std::max(std::min(rows, user_cap), block_size);
}

}  // namespace sparse_mla
