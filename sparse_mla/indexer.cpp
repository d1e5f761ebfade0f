#include "sparse_mla/indexer.h"

#include <algorithm>
#include <limits>

#include "sparse_mla/error.h"

namespace sparse_mla {

ScorePlan plan_scores(std::span<const ScoreRequest> requests, std::int64_t budget_bytes) {
  require(budget_bytes >= 4, "score_budget_bytes", budget_bytes, "at least one score's 4 bytes");
  const std::int64_t budget = budget_bytes / 4;  // scores
  ScorePlan plan;
  bool open = false;
  const auto add = [&](const ScoreRequest& request, std::int32_t row_begin, std::int32_t row_end) {
    if (!open) {
      ScorePiece piece;
      piece.member_begin = piece.member_end = static_cast<std::int32_t>(plan.members.size());
      plan.pieces.push_back(piece);
      open = true;
    }
    ScorePiece& piece = plan.pieces.back();
    const std::int32_t seq_len = request.context_len + request.query_len;
    ScoreMember member;
    member.request = request.request;
    member.query_start = request.query_start + row_begin;
    member.num_rows = row_end - row_begin;
    member.first_position = request.context_len + row_begin;
    member.row_keys = seq_len;
    member.first_row = piece.num_rows;
    member.score_offset = piece.num_scores;
    plan.members.push_back(member);
    piece.member_end++;
    piece.num_rows += member.num_rows;
    piece.max_keys = std::max(piece.max_keys, seq_len);
    piece.num_scores += std::int64_t{member.num_rows} * seq_len;
    plan.max_scores = std::max(plan.max_scores, piece.num_scores);
    plan.max_rows = std::max(plan.max_rows, piece.num_rows);
  };
  for (const ScoreRequest& request : requests) {
    require(request.query_len >= 0 && request.context_len >= 0, "requests",
            std::min(request.query_len, request.context_len), "lengths of at least 0");
    if (request.query_len == 0) continue;
    const std::int64_t seq_len = std::int64_t{request.context_len} + request.query_len;
    require(seq_len <= std::numeric_limits<std::int32_t>::max(), "requests", seq_len,
            "context_len + query_len of at most 2^31-1");
    const std::int64_t whole = request.query_len * seq_len;
    if (open && plan.pieces.back().num_scores + whole > budget) open = false;
    if (whole <= budget) {
      add(request, 0, request.query_len);
      continue;
    }
    // Too much for any piece: by query rows, at least one at a time, in pieces of its own.
    const std::int64_t rows = std::max<std::int64_t>(budget / seq_len, 1);
    for (std::int64_t row = 0; row < request.query_len; row += rows) {
      open = false;
      add(request, static_cast<std::int32_t>(row),
          static_cast<std::int32_t>(std::min<std::int64_t>(row + rows, request.query_len)));
    }
    open = false;
  }
  return plan;
}

std::vector<std::int32_t> draft_row_ends(std::span<const std::int32_t> seq_lens,
                                         std::int32_t next_n) {
  require(next_n >= 1, "next_n", next_n, "at least 1");
  std::vector<std::int32_t> ends;
  ends.reserve(seq_lens.size() * static_cast<std::size_t>(next_n));
  for (std::size_t i = 0; i < seq_lens.size(); ++i) {
    require(seq_lens[i] >= 0, "seq_lens[" + std::to_string(i) + "]", seq_lens[i], "at least 0");
    for (std::int32_t j = 0; j < next_n; ++j)
      ends.push_back(std::max(0, seq_lens[i] - (next_n - 1 - j)));
  }
  return ends;
}

}  // namespace sparse_mla
