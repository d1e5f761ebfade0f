#include "sparse_mla/path_choice.h"

#include <algorithm>

namespace sparse_mla {
namespace {

/// FLOP/s of each path's parts on a backend, in any unit: only ratios matter.
struct PathRates {
  double projection;  ///< latent → keys and values, query absorption, value projection
  double masked_mha;  ///< scores and values of a masked MHA tile, every tile visited
  double sparse_mqa;  ///< scores and values of selected rows, gather included
};

constexpr PathRates path_rates(Backend backend, int num_heads) {
  // One core's OpenBLAS rate is 1; measured with `sparse-mla run`, 16 and 128 heads.
  if (backend == Backend::cpu) return {1.0, 0.7, 0.6};
  // TFLOP/s on an H200 (bench/results/h200: worst_case, attend, sparse_mqa). Sparse MQA gathers a
  // row once for all heads of a tile: below 64 heads the gathering is what takes the time.
  const double sparse_mqa = num_heads >= 64 ? 231 : num_heads > 16 ? 150 : 89;
  return {671, 293, sparse_mqa};
}

}  // namespace

std::string to_string(AttentionPath path) {
  switch (path) {
    case AttentionPath::automatic:
      return "auto";
    case AttentionPath::none:
      return "none";
    case AttentionPath::dense:
      return "dense";
    case AttentionPath::masked:
      return "masked";
    case AttentionPath::sparse:
      return "sparse";
  }
  return "unknown";
}

PathCosts estimate_path_costs(Backend backend, const ModelDims& dims,
                              std::span<const ChunkMember> suffix) {
  const PathRates rates = path_rates(backend, dims.num_heads);
  double keys = 0, pairs = 0, selected = 0, queries = 0;
  for (const ChunkMember& member : suffix) {
    const double query_len = member.query_len, context_len = member.context_len;
    keys += context_len + query_len;
    queries += query_len;
    pairs += query_len * context_len + query_len * (query_len + 1) / 2;
    // Rows with at most topk keys select them all.
    const double short_rows = std::clamp<double>(dims.index_topk - context_len, 0, query_len);
    selected += short_rows * context_len + short_rows * (short_rows + 1) / 2 +
                (query_len - short_rows) * dims.index_topk;
  }
  const double heads = dims.num_heads, latent = dims.kv_lora_rank;
  const double nope = dims.qk_nope_head_dim, rope = dims.qk_rope_head_dim, value = dims.v_head_dim;
  PathCosts costs;
  costs.masked_cost = heads * 2 *
                      (keys * latent * (nope + value) / rates.projection +
                       pairs * (nope + rope + value) / rates.masked_mha);
  costs.sparse_cost = heads * 2 *
                      (queries * latent * (nope + value) / rates.projection +
                       selected * (2 * latent + rope) / rates.sparse_mqa);
  return costs;
}

}  // namespace sparse_mla
