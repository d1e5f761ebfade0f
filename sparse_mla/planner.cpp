#include "sparse_mla/planner.h"

#include <algorithm>
#include <limits>
#include <string>

#include "sparse_mla/error.h"

namespace sparse_mla {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

void check_inputs(std::span<const std::int32_t> query_lens,
                  std::span<const std::int32_t> context_lens, const PlannerOptions& options) {
  require(query_lens.size() == context_lens.size(), "query_lens", query_lens.size(),
          "as many entries as context_lens (" + std::to_string(context_lens.size()) + ")");
  require(options.alignment >= 1, "alignment", options.alignment, "at least 1");
  require(options.alignment <= options.row_budget, "alignment", options.alignment,
          "at most the workspace's " + std::to_string(options.row_budget) + " rows");
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < query_lens.size(); ++i) {
    if (query_lens[i] < 0 || context_lens[i] < 0) {
      const bool query = query_lens[i] < 0;
      throw_invalid((query ? "query_lens[" : "context_lens[") + std::to_string(i) + "]",
                    std::to_string(query ? query_lens[i] : context_lens[i]), "at least 0");
    }
    tokens += query_lens[i];
  }
  require(tokens <= kMaxInt32, "query_lens", tokens, "at most 2^31-1 tokens in all");
}

/// Appends members to a plan and closes its chunks.
class PlanBuilder {
 public:
  PlanBuilder(ContextPlan& plan, std::span<const std::int32_t> query_lens)
      : plan_(plan), query_lens_(query_lens) {}

  bool open() const { return open_; }
  std::int32_t used_rows() const { return open_ ? plan_.chunks.back().num_rows : 0; }

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
  }

  void close() { open_ = false; }

 private:
  ContextPlan& plan_;
  std::span<const std::int32_t> query_lens_;
  bool open_ = false;
};

std::int64_t longest(std::span<const std::int32_t> lens) {
  return lens.empty() ? 0 : *std::max_element(lens.begin(), lens.end());
}

/// Rows that one request gets in each pass of the equal split.
std::int64_t equal_split_slice(std::int64_t requests_with_context, const PlannerOptions& options) {
  const std::int64_t share = options.row_budget / requests_with_context;
  return std::max<std::int64_t>(share / options.alignment * options.alignment, options.alignment);
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

ContextPlan plan_context_chunks(std::span<const std::int32_t> query_lens,
                                std::span<const std::int32_t> context_lens,
                                const PlannerOptions& options) {
  check_inputs(query_lens, context_lens, options);
  ContextPlan plan;
  PlanBuilder builder(plan, query_lens);
  const std::int32_t budget = options.row_budget;
  std::int32_t token = 0;
  std::int32_t gap_begin = 0;  // end of the last token with context
  for (std::int32_t request = 0; request < static_cast<std::int32_t>(context_lens.size());
       ++request) {
    const std::int32_t context_len = context_lens[request];
    if (context_len == 0) builder.close();
    for (std::int32_t start = 0; start < context_len;) {
      const std::int32_t space = budget - builder.used_rows();
      const std::int32_t remaining = context_len - start;
      if (remaining <= space) {
        builder.add(request, token, start, remaining);
        start += remaining;
        continue;
      }
      // The largest aligned piece; what is left of the request starts the next chunk. Nothing
      // aligned fits: the chunk is closed as it is. An empty chunk always takes a piece, since
      // alignment ≤ budget.
      const std::int32_t piece = space / options.alignment * options.alignment;
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
  check_inputs(context_lens, context_lens, options);
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
