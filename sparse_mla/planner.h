/// Packed context chunks: the schedule that lets short and long requests share one workspace.
///
/// The workspace is filled request by request, in order, instead of giving each request an equal
/// slice. A request that does not fit is split at the largest multiple of `alignment` that does; if
/// not even one aligned piece fits, the chunk is closed there and the request starts the next one.
/// A request without context closes the open chunk too, so that a chunk's request and token ranges
/// are true ranges. (The method: vllm-project/vllm #50613. A listing published there falls through
/// where nothing aligned fits and overfills the chunk; [900, 512] rows in a workspace of 1,024 with
/// alignment 256 shows it.)
///
/// With the context sharded over ranks (DCP), every rank makes the same plan: a request then takes
/// the rows that each rank sets aside for it, and the budget is a rank's share of the workspace.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sparse_mla/context_sharding.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

/// Half-open range of tokens (or of rows of a partial, which are numbered like them).
struct TokenRange {
  std::int32_t begin = 0, end = 0;
  bool operator==(const TokenRange&) const = default;
};

enum class Schedule {
  packed,       ///< this library's
  equal_split,  ///< the schedule it replaces, kept as a baseline
};
std::string to_string(Schedule schedule);

/// One fill of the workspace. A member is one request's part of it.
struct ContextChunk {
  std::int32_t request_begin = 0, request_end = 0;  ///< consecutive requests, one member each
  std::int32_t token_begin = 0, token_end = 0;      ///< their new tokens
  std::int32_t member_begin = 0;  ///< first member's place in the plan's flat arrays
  std::int32_t num_rows = 0;      ///< rows of the workspace in use
  std::int32_t max_query_len = 0;
  std::int32_t max_seq_len = 0;  ///< longest member, rows
  bool is_continuation = false;  ///< the first member (equal split: every member) has earlier rows
  /// Tokens [token_begin, continuation_token_end) already hold a partial: merge them. The chunk's
  /// other tokens are written.
  std::int32_t continuation_token_end = 0;

  std::int32_t num_members() const { return request_end - request_begin; }
};

/// A batch's context, cut into chunks. Host arrays have entries per request and per member, none
/// per context row.
struct ContextPlan {
  Schedule schedule = Schedule::packed;
  std::vector<ContextChunk> chunks;
  std::vector<std::int32_t> member_starts;          ///< [members] first row, counted in the request
  std::vector<std::int32_t> member_seq_lens;        ///< [members] rows
  std::vector<std::int32_t> cumulative_seq_lens;    ///< [members + chunks] chunk-local, from 0
  std::vector<std::int32_t> cumulative_query_lens;  ///< [members + chunks] chunk-local, from 0
  /// DCP: the layout of every rank's buffer. Empty when the context is not sharded.
  ContextSharding sharding;
  std::vector<std::int32_t> member_local_starts;        ///< [members] first row among a rank's own
  std::vector<std::int32_t> member_local_seq_lens;      ///< [members] padded: the same on all ranks
  std::vector<std::int32_t> cumulative_local_seq_lens;  ///< [members + chunks] of the padded ones
  std::vector<std::int32_t> member_rank_seq_lens;  ///< [members, world] rows that a rank really has
  /// Rows [0, running_rows) of the running partial are in use: up to the end of the last token with
  /// context. Tokens beyond take the suffix alone.
  std::int32_t running_rows = 0;
  /// Rows inside that `init_context_partial` sets to the empty partial: tokens without context
  /// (equal split: all of them, since each of its passes merges).
  std::vector<TokenRange> init_token_ranges;

  bool empty() const { return chunks.empty(); }
  std::span<const std::int32_t> starts(std::size_t chunk) const;         ///< [members]
  std::span<const std::int32_t> seq_lens(std::size_t chunk) const;       ///< [members]
  std::span<const std::int32_t> cu_seq_lens(std::size_t chunk) const;    ///< [members + 1]
  std::span<const std::int32_t> cu_query_lens(std::size_t chunk) const;  ///< [members + 1]
  /// The same in rows of a rank; without DCP those are the rows themselves. A local start is the
  /// same on all ranks and may fall inside a page.
  std::span<const std::int32_t> local_starts(std::size_t chunk) const;       ///< [members]
  std::span<const std::int32_t> local_seq_lens(std::size_t chunk) const;     ///< [members] padded
  std::span<const std::int32_t> cu_local_seq_lens(std::size_t chunk) const;  ///< [members + 1]
  std::span<const std::int32_t> rank_seq_lens(std::size_t chunk) const;      ///< [members, world]
  /// Rows of every rank's buffer that the chunk uses, padding included.
  std::int32_t local_rows(std::size_t chunk) const { return cu_local_seq_lens(chunk).back(); }
  /// The member that holds workspace row `row` of `chunk` (binary search in cu_seq_lens).
  std::int32_t member_of_row(std::size_t chunk, std::int32_t row) const;
  /// One chunk covers every token of the batch that has a running row and nothing is merged: the
  /// chunk's partial is the context's partial.
  bool single_covering_chunk() const;
};

struct PlannerOptions {
  std::int32_t row_budget = 65536;  ///< rows of the workspace
  std::int32_t alignment = 64;      ///< inner split points are multiples of it
  ContextSharding sharding = {};    ///< DCP: a rank's budget is ⌊row_budget / world⌋ rows
};

/// The alignment that a sharded context needs: lcm(block_size, interleave · world), so that inner
/// split points lie between pages and between stripes. block_size without DCP.
/// Throws std::invalid_argument for block_size < 1 and for a bad sharding.
std::int64_t default_alignment(std::int32_t block_size, const ContextSharding& sharding);

/// The packed schedule. `query_lens`, `context_lens` [requests], both ≥ 0.
/// Throws std::invalid_argument for negative lengths, for lists of unequal size, for alignment < 1,
/// for an alignment that does not fit the budget, for a bad sharding and for an alignment that is
/// no multiple of interleave · world. O(requests + chunks) (DCP: + members · world).
ContextPlan plan_context_chunks(std::span<const std::int32_t> query_lens,
                                std::span<const std::int32_t> context_lens,
                                const PlannerOptions& options);

/// The baseline: slice = (row_budget / requests with context) rounded down to `alignment`, at least
/// one `alignment`; ceil(longest context / slice) passes; every pass covers all requests (members
/// may be empty) and merges all their tokens. DCP: the same in rows of a rank.
ContextPlan plan_equal_split(std::span<const std::int32_t> query_lens,
                             std::span<const std::int32_t> context_lens,
                             const PlannerOptions& options);

/// Number of passes of plan_equal_split, without building it.
std::int64_t equal_split_passes(std::span<const std::int32_t> context_lens,
                                const PlannerOptions& options);

/// Rows of the context workspace for an engine's limits:
///   max(min(max(8·max_model_len, 4·max_num_seqs·block_size), 65,536), block_size)
/// The floor is one block, not one block per sequence. `user_cap` > 0 lowers it, not below one
/// block. Throws std::invalid_argument for values < 1 (user_cap: < 0).
std::int64_t context_workspace_rows(std::int64_t max_model_len, std::int64_t max_num_seqs,
                                    std::int64_t block_size, std::int64_t user_cap = 0);

}  // namespace sparse_mla
