/// What an engine fixes at start-up.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparse_mla/cache.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

/// Upper bounds of every batch that will be run. Sizes derived from them cover the worst step.
struct Limits {
  ModelDims dims;
  CacheFormat cache_format = CacheFormat::bf16;
  OutputType output = OutputType::bf16;  ///< LayerTensors::out (bf16) or out_fp8 (fp8)
  std::int32_t max_num_tokens = 8192;    ///< new tokens of a batch
  std::int32_t max_num_seqs = 256;       ///< requests of a batch
  std::int32_t max_model_len = 163840;   ///< seq_len of a request
  std::int32_t block_size = 64;          ///< rows per cache page
  std::int32_t decode_threshold = 1;  ///< a request with query_len ≤ this is a decode; 0 = none is
  std::int32_t workspace_rows = 0;   ///< cap of the context workspace; 0 = context_workspace_rows()
  std::int32_t chunk_alignment = 0;  ///< of inner split points; 0 = block_size
  std::int64_t score_budget_bytes = std::int64_t{512} << 20;  ///< indexer scores of one piece
  std::int64_t mask_budget_bytes = std::int64_t{128} << 20;   ///< mask words, pad words not counted
  /// Up-projected keys and values at a time (heads are looped in groups, of one at least), and
  /// likewise absorbed queries and their results (tokens are looped in tiles, of one at least).
  std::int64_t projection_budget_bytes = std::int64_t{1} << 30;
};

/// Throws std::invalid_argument naming the first limit that is out of range.
void validate(const Limits& limits);

}  // namespace sparse_mla
