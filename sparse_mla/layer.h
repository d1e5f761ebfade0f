/// One sparse-MLA layer call: from a mixed batch to outputs.
///
///   write caches → indexer scores → top-k → attend
///
/// Decode tokens: sparse MQA over the paged cache. Prefill requests: dense MHA, masked MHA (both
/// chunked over the cached context) or sparse MQA, chosen by BatchMetadata. All paths read the
/// cache, the new tokens' rows included, so that they see the same (quantised) bytes. The key of a
/// token with slot −1 is whatever its page holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "sparse_mla/cache.h"
#include "sparse_mla/capacity.h"
#include "sparse_mla/metadata.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

struct LayerTensors {
  // New tokens.
  View3<const bfloat16> q;                 ///< [num_tokens, num_heads, P+R]
  View2<const bfloat16> latent;            ///< [num_tokens, L+R] normalised latent and rotated key
  View3<const fp8_e4m3> index_q;           ///< [num_tokens, index_n_heads, D]
  View2<const float> index_weights;        ///< [num_tokens, index_n_heads], query scale folded in
  View2<const fp8_e4m3> index_k;           ///< [num_tokens, D]; none: see BatchOptions::select
  View1<const float> index_k_scale;        ///< [num_tokens] ≥ 0
  View1<const std::int64_t> slot_mapping;  ///< [num_tokens] where to write; −1 = nowhere
  // Caches and weights.
  View2<const std::int32_t> block_tables;  ///< [num_requests, max_blocks] page numbers
  LatentCache latent_cache;
  IndexKeyCache index_cache;
  View3<const bfloat16> kv_b_proj;  ///< [num_heads, P+V, L], the checkpoint's layout
  /// Optional [num_heads] attention sinks, logits in natural-log units after scaling: one more key
  /// whose value is 0. out ·= 1/(1+exp(sink − lse)); rows without keys stay 0.
  View1<const float> sink;
  // Results.
  View2<std::int32_t> picks;  ///< [num_tokens, topk] request-local, ascending, then −1; an input
                              ///< when BatchOptions::select is false
  /// [num_tokens], an input with BatchOptions::counted_picks: only picks [0, count) of a token are
  /// used, the others may hold anything. Clamped to [0, topk].
  View1<const std::int32_t> pick_counts;
  View3<bfloat16> out;      ///< [num_tokens, num_heads, V]; Limits::output bf16
  View3<fp8_e4m3> out_fp8;  ///< [num_tokens, num_heads, V]; Limits::output fp8
  float out_scale = 1;      ///< out_fp8 ← quantise(fp32 result / out_scale); finite, > 0
  View2<float> lse;         ///< [num_heads, num_tokens] natural logarithm, without the sink
};

enum class Stage {
  write_cache,
  select,        ///< indexer scores and top-k
  map_slots,     ///< picks → slots
  absorb_query,  ///< q_nope @ W_UK
  sparse_mqa,
  project_value,  ///< @ W_UV
  build_masks,
  gather,
  up_project,  ///< latent @ kv_b_proj
  attend,
  merge,
};
std::string to_string(Stage stage);

struct RunOptions {
  /// Called on the calling thread before (`begin`) and after each stage's launches. On the CPU the
  /// stage's work is done by then.
  std::function<void(Stage stage, bool begin)> on_stage;
  bool power_of_two_scales = false;  ///< see WriteCacheCall
  /// The batch's arena where the backend's kernels can read it: a copy of metadata.arena() on the
  /// device. null: metadata.arena() itself, for the CPU alone.
  const std::byte* arena = nullptr;
};

/// Runs the layer: launches only, no allocation, no synchronisation, no default-stream work (the
/// CPU backend works on the calling thread and OpenMP's and is done on return). `metadata` must
/// have been built with `capacity`; a batch without tokens returns at once. Rows are contiguous
/// (last stride 1), except those of lse, index_weights and block_tables; other strides are free.
/// Throws std::invalid_argument naming the first tensor whose shape or memory is wrong, before
/// anything is written.
void run_layer(const Capacity& capacity, const BatchMetadata& metadata, const LayerTensors& tensors,
               std::span<std::byte> workspace, Stream stream = nullptr,
               const RunOptions& options = {});

}  // namespace sparse_mla
