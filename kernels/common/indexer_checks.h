/// What every entry of `indexer_scores` and `select_from_indexer` requires of shapes. What the
/// arrays hold is not looked at: they may be device memory.
#pragma once

#include <string>

#include "kernels/common/view_checks.h"
#include "sparse_mla/error.h"
#include "sparse_mla/indexer.h"

namespace sparse_mla {

inline void check_shapes(const IndexerProblem& problem, const IndexerCall& call) {
  require_extent("index_q", call.index_q, 1, problem.index_n_heads, "index_n_heads");
  require_extent("index_q", call.index_q, 2, problem.index_head_dim, "index_head_dim");
  require_extent("index_weights", call.index_weights, 0, call.index_q.extent(0),
                 "index_q's tokens");
  require_extent("index_weights", call.index_weights, 1, problem.index_n_heads, "index_n_heads");
  require_contiguous_rows("index_q", call.index_q);
  require(call.cache.head_dim == problem.index_head_dim, "cache.head_dim", call.cache.head_dim,
          "index_head_dim (" + std::to_string(problem.index_head_dim) + ")");
  require(call.cache.block_size >= 1, "cache.block_size", call.cache.block_size, "at least 1");
  require(call.cache.num_blocks >= 0, "cache.num_blocks", call.cache.num_blocks, "at least 0");
  require(call.cache.data != nullptr || call.cache.num_blocks == 0, "cache.data", "null",
          "the cache's pages");
}

inline void check_shapes(const SelectFromIndexerProblem& problem,
                         const SelectFromIndexerCall& call) {
  require(call.piece.num_rows <= problem.indexer.max_rows, "piece.num_rows", call.piece.num_rows,
          "at most " + std::to_string(problem.indexer.max_rows));
  require(call.piece.num_scores <= problem.max_scores, "piece.num_scores", call.piece.num_scores,
          "at most " + std::to_string(problem.max_scores));
  require(call.picks.extent(1) == problem.topk, "picks", call.picks.extent(1),
          "topk (" + std::to_string(problem.topk) + ") columns");
}

}  // namespace sparse_mla
