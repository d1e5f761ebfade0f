/// The lightning indexer: a light score for every (query token, cached token) pair.
///
///   score[t,s] = k_scale[s] · Σ_h w[t,h] · relu(q_idx[t,h] · k_idx[s])     s ≤ position(t)
///
/// q_idx and k_idx are e4m3; the query's own scale is folded into w. k_scale ≥ 0 is required, relu
/// propagates NaN. Both arrive after rotary and Hadamard. Row j of a request sees keys
/// 0 … context_len + j. (The method: DeepSeek-V3.2's technical report, DeepSeek Sparse Attention.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sparse_mla/cache.h"
#include "sparse_mla/operation.h"
#include "sparse_mla/select.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

/// Consecutive query rows of one request.
struct ScoreMember {
  std::int32_t request = 0;      ///< row of the block tables (the caller's order)
  std::int32_t query_start = 0;  ///< first of these rows: token, the caller's numbering
  std::int32_t num_rows = 0;
  /// Position of that token; row j sees first_position + j + 1 keys. −1: the first row sees none.
  std::int32_t first_position = 0;
  std::int32_t row_keys = 0;      ///< elements from score row to score row: the request's seq_len
  std::int32_t first_row = 0;     ///< first score row of the piece
  std::int64_t score_offset = 0;  ///< its element in the score buffer
};

/// Work that fits the score budget: whole requests, or query rows of one request.
struct ScorePiece {
  std::int32_t member_begin = 0, member_end = 0;  ///< of ScorePlan::members
  std::int32_t num_rows = 0;
  std::int32_t max_keys = 0;
  std::int64_t num_scores = 0;  ///< Σ rows · keys
};

struct ScorePlan {
  std::vector<ScoreMember> members;
  std::vector<ScorePiece> pieces;
  std::int64_t max_scores = 0;  ///< of any piece
  std::int32_t max_rows = 0;    ///< of any piece
};

/// One request's new rows for plan_scores.
struct ScoreRequest {
  std::int32_t request = 0, query_start = 0, query_len = 0, context_len = 0;
};

/// Splits work by requests, then by query rows, so that a piece's scores (Σ rows · seq_len · 4
/// bytes) stay within `budget_bytes`; a single row may exceed it. Requests without rows are in no
/// piece. Greedy, in order.
ScorePlan plan_scores(std::span<const ScoreRequest> requests, std::int64_t budget_bytes);

/// Where the rows of a batch of drafts end, when every request brings `next_n` query rows: row
/// i · next_n + j sees keys [0, max(0, seq_lens[i] − next_n + j + 1)). Requests that padding left
/// with fewer keys than rows, none included, get rows without keys, never a negative end. Throws
/// std::invalid_argument for next_n < 1 and for negative lengths.
std::vector<std::int32_t> draft_row_ends(std::span<const std::int32_t> seq_lens,
                                         std::int32_t next_n);

/// Operation `indexer_scores`.
struct IndexerProblem {
  int index_n_heads = 64;
  int index_head_dim = 128;
  std::int64_t max_rows = 0;
  std::int64_t max_keys = 0;
};
struct IndexerCall {
  View3<const fp8_e4m3> index_q;     ///< [num_tokens, index_n_heads, D]
  View2<const float> index_weights;  ///< [num_tokens, index_n_heads]
  IndexKeyCache cache;
  View2<const std::int32_t> block_tables;  ///< [num_requests, max_blocks]
  std::span<const ScoreMember> members;
  float* scores = nullptr;  ///< ragged: row r of member m at m.score_offset + r · m.row_keys
};
const Operation<IndexerProblem, IndexerCall>& indexer_scores_operation();

/// Operation `select_from_indexer`: scores and selection together. The default entry composes
/// `indexer_scores` and `select`; a fused entry needs no score matrix.
struct SelectFromIndexerProblem {
  IndexerProblem indexer;
  int topk = 2048;
  std::int64_t max_scores = 0;  ///< elements of the largest piece
  Dispatch dispatch;            ///< how the composed entry chooses its parts
};
struct SelectFromIndexerCall {
  IndexerCall indexer;  ///< without `scores`: they live in the workspace
  ScorePiece piece;     ///< `indexer.members` are this piece's
  /// Tokens that see at most topk keys: all of them are picked, nothing is scored.
  std::span<const std::int32_t> whole_tokens;
  const std::int32_t* keys_of_token = nullptr;  ///< [num_tokens] keys that a token may see
  View2<std::int32_t> picks;  ///< [num_tokens, topk] request-local, ascending, then −1
};
const Operation<SelectFromIndexerProblem, SelectFromIndexerCall>& select_from_indexer_operation();

}  // namespace sparse_mla
