#include "sparse_mla/path_choice.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "kernels/common/path_table.h"

namespace sparse_mla {
namespace {

/// FLOP/s of each path's parts, in any unit: only ratios matter.
struct PathRates {
  double projection;  ///< latent → keys and values, query absorption, value projection
  double masked_mha;  ///< scores and values of a masked MHA tile, every tile visited
  double sparse_mqa;  ///< scores and values of selected rows, gather included
};

constexpr PathRates path_rates(PathMachine machine, int num_heads) {
  // One core's OpenBLAS rate is 1; measured with `sparse-mla run`, 16 and 128 heads.
  if (machine == PathMachine::cpu) return {1.0, 0.7, 0.6};
  // TFLOP/s on an H200 of the portable kernels (docs/kernels/attend_cuda.md, sparse_mqa_cuda.md;
  // projections of cuBLASLt). Sparse MQA gathers a
  // row once for all heads of a tile: below 64 heads the gathering is what takes the time.
  const double sparse_mqa = num_heads >= 64 ? 231 : num_heads > 16 ? 150 : 89;
  return {671, 293, sparse_mqa};
}

/// Pairs of a query token and a key: those that it sees, those that it selects.
struct Pairs {
  double seen = 0, selected = 0;

  Pairs(const ChunkMember& member, int topk) {
    const double query_len = member.query_len, context_len = member.context_len;
    seen = query_len * context_len + query_len * (query_len + 1) / 2;
    // Rows with at most topk keys select them all.
    const double short_rows = std::clamp<double>(topk - context_len, 0, query_len);
    selected = short_rows * context_len + short_rows * (short_rows + 1) / 2 +
               (query_len - short_rows) * topk;
  }
};

PathCosts costs_by_rates(PathMachine machine, const ModelDims& dims,
                         std::span<const ChunkMember> suffix) {
  const PathRates rates = path_rates(machine, dims.num_heads);
  double keys = 0, queries = 0, seen = 0, selected = 0;
  for (const ChunkMember& member : suffix) {
    const Pairs pairs(member, dims.index_topk);
    keys += 1.0 * member.context_len + member.query_len;
    queries += member.query_len;
    seen += pairs.seen;
    selected += pairs.selected;
  }
  const double heads = dims.num_heads, latent = dims.kv_lora_rank;
  const double nope = dims.qk_nope_head_dim, rope = dims.qk_rope_head_dim, value = dims.v_head_dim;
  PathCosts costs;
  costs.masked_cost = heads * 2 *
                      (keys * latent * (nope + value) / rates.projection +
                       seen * (nope + rope + value) / rates.masked_mha);
  costs.sparse_cost = heads * 2 *
                      (queries * latent * (nope + value) / rates.projection +
                       selected * (2 * latent + rope) / rates.sparse_mqa);
  return costs;
}

/// A place on an axis of the table: between point `below` and the next one, `part` of the way by
/// the reciprocal, since what several heads, query tokens or keys share costs each its part of it.
/// Outside of the axis it is the nearest end.
struct AxisPlace {
  std::size_t below = 0;
  double part = 0;

  template <std::size_t kSize>
  AxisPlace(const int (&axis)[kSize], double value) {
    static_assert(kSize > 1);
    while (below + 2 < kSize && value >= axis[below + 1]) ++below;
    const double first = 1.0 / axis[below], last = 1.0 / axis[below + 1];
    part = std::clamp((first - 1 / value) / (first - last), 0.0, 1.0);
  }
  PathCosts between(const PathCosts& from, const PathCosts& to) const {
    return {from.masked_cost + part * (to.masked_cost - from.masked_cost),
            from.sparse_cost + part * (to.sparse_cost - from.sparse_cost)};
  }
};

/// The table for one number of heads.
class TableOfHeads {
 public:
  explicit TableOfHeads(int heads) {
    const AxisPlace place(kPathHeads, heads);
    for (std::size_t i = 0; i < kPoints; ++i) {
      const PathCost &from = kPathCosts[place.below * kPoints + i],
                     &to = kPathCosts[(place.below + 1) * kPoints + i];
      costs_[i] = place.between({from.masked, from.sparse}, {to.masked, to.sparse});
    }
  }
  PathCosts at(double query_len, double seq_len) const {
    const AxisPlace query(kPathQueryLens, query_len), seq(kPathSeqLens, seq_len);
    const PathCosts* const row = costs_ + query.below * kSeqLens + seq.below;
    return query.between(seq.between(row[0], row[1]),
                         seq.between(row[kSeqLens], row[kSeqLens + 1]));
  }

 private:
  static constexpr std::size_t kSeqLens = std::size(kPathSeqLens),
                               kPoints = std::size(kPathQueryLens) * kSeqLens;
  static_assert(std::size(kPathCosts) == std::size(kPathHeads) * kPoints);

  PathCosts costs_[kPoints];  // by query length and sequence length
};

PathCosts costs_by_table(const ModelDims& dims, std::span<const ChunkMember> suffix) {
  const TableOfHeads table(dims.num_heads);
  PathCosts costs;
  for (const ChunkMember& member : suffix) {
    if (member.query_len == 0) continue;
    const Pairs pairs(member, dims.index_topk);
    const PathCosts cost = table.at(member.query_len, 1.0 * member.context_len + member.query_len);
    costs.masked_cost += dims.num_heads * pairs.seen * cost.masked_cost;
    costs.sparse_cost += dims.num_heads * pairs.selected * cost.sparse_cost;
  }
  return costs;
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

PathCosts estimate_path_costs(PathMachine machine, const ModelDims& dims,
                              std::span<const ChunkMember> suffix) {
  return machine == PathMachine::hopper ? costs_by_table(dims, suffix)
                                        : costs_by_rates(machine, dims, suffix);
}

}  // namespace sparse_mla
