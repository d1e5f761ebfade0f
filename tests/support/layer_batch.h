/// A small mixed batch, and the layer's limits and problem that fit it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "sparse_mla/layer.h"

#include "tests/support/problem.h"
#include "tests/support/run_entry.h"

namespace sparse_mla::support {

/// Lengths and what follows from them; chunks of 67 rows cut most contexts.
struct LayerBatch {
  std::vector<std::int32_t> query_lens = {1, 37, 0, 5, 1, 70, 2};
  std::vector<std::int32_t> context_lens = {300, 200, 90, 0, 0, 411, 62};
  AttentionPath path = AttentionPath::automatic;
  int num_heads = 8;
  int topk = 64;
  std::int32_t decode_threshold = 1;
  std::int32_t workspace_rows = 67;  // many chunks, continuations
  OutputType output = OutputType::bf16;
  SelectionKind selection = SelectionKind::indexer;
  std::string force = "";
  std::uint64_t seed = 1;
  std::vector<std::int64_t> request_ids = {};

  BatchOptions options() const {
    BatchOptions options;
    options.path = path;
    options.select = selection == SelectionKind::indexer;
    return options;
  }
  Dispatch dispatch() const {
    Dispatch dispatch = tested_dispatch();
    dispatch.force(force);
    return dispatch;
  }
  ModelDims dims() const {
    ModelDims dims;
    dims.num_heads = num_heads;
    dims.index_topk = topk;
    dims.index_n_heads = 8;
    return dims;
  }
  Limits limits() const {
    Limits limits;
    limits.dims = dims();
    limits.output = output;
    limits.max_num_tokens = std::max(1, std::accumulate(query_lens.begin(), query_lens.end(), 0));
    limits.max_num_seqs = std::max(1, static_cast<std::int32_t>(query_lens.size()));
    limits.max_model_len = 1;
    for (std::size_t i = 0; i < query_lens.size(); ++i)
      limits.max_model_len = std::max(limits.max_model_len, query_lens[i] + context_lens[i]);
    limits.block_size = 16;
    limits.workspace_rows = workspace_rows;
    limits.decode_threshold = decode_threshold;
    return limits;
  }
  LayerProblem problem() const {
    LayerProblem problem;
    problem.dims = dims();
    problem.query_lens = query_lens;
    problem.context_lens = context_lens;
    problem.request_ids = request_ids;
    problem.block_size = 16;
    problem.seed = seed;
    problem.selection = selection;
    problem.strided = true;
    return problem;
  }
};

inline std::ostream& operator<<(std::ostream& out, const LayerBatch& b) {
  out << to_string(b.path) << ' ' << b.num_heads << " heads topk " << b.topk << " threshold "
      << b.decode_threshold << " workspace " << b.workspace_rows << ' ' << b.force << " q/ctx:";
  for (std::size_t i = 0; i < b.query_lens.size(); ++i)
    out << ' ' << b.query_lens[i] << '/' << b.context_lens[i];
  return out;
}

/// Nothing prefilled is longer than topk 64: for the dense path.
inline LayerBatch short_batch() {
  LayerBatch b;
  b.query_lens = {1, 20, 0, 64, 1, 3, 2};
  b.context_lens = {300, 44, 50, 0, 10, 61, 0};
  return b;
}

inline LayerBatch batch_of(AttentionPath path) {
  LayerBatch b = path == AttentionPath::dense ? short_batch() : LayerBatch{};
  b.path = path;
  return b;
}

}  // namespace sparse_mla::support
