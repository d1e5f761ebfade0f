/// Decode context parallelism (DCP): how the rows of a cached context are shared out over ranks.
///
/// `interleave` rows go to rank 0, the next `interleave` to rank 1, …, after the last rank to rank
/// 0 again. A rank keeps its rows in the order of their positions, in pages of its own. (The
/// method: vllm-project/vllm's decode context parallel, `cp_kv_cache_interleave_size`.)
#pragma once

#include <algorithm>
#include <cstdint>

namespace sparse_mla {

/// A plain value. Arithmetic is 64-bit; `validate` says which values it is meant for.
struct ContextSharding {
  std::int32_t world = 1;       ///< W: ranks
  std::int32_t interleave = 1;  ///< I: consecutive rows of one rank; no meaning when world is 1

  bool operator==(const ContextSharding&) const = default;

  bool sharded() const { return world > 1; }

  /// I · W: rows of all ranks' turns once. A start that is a multiple of it is *aligned*: every
  /// rank holds exactly 1/W of the rows before it. 1 when world is 1.
  std::int64_t stripe_rows() const { return sharded() ? std::int64_t{interleave} * world : 1; }

  /// Rows that every rank sets aside for `n` ≥ 0 rows from an aligned start: ceil(n / (I·W)) · I,
  /// n itself when world is 1. The same on all ranks, so that their buffers can be all-gathered.
  std::int64_t padded_rows(std::int64_t n) const {
    if (!sharded()) return n;
    return (n + stripe_rows() - 1) / stripe_rows() * interleave;
  }

  /// Rows that `rank` really holds of n rows from an aligned start:
  ///   ⌊n / (I·W)⌋ · I + clamp(n mod (I·W) − rank · I, 0, I)
  /// n ≤ 0 (a padding row of a batch) holds none. With n = the keys that a query sees, the keys
  /// that it sees on this rank: not n / W.
  std::int64_t local_rows(std::int32_t rank, std::int64_t n) const {
    if (n <= 0) return 0;
    if (!sharded()) return n;
    return n / stripe_rows() * interleave +
           std::clamp<std::int64_t>(n % stripe_rows() - std::int64_t{rank} * interleave, 0,
                                    interleave);
  }

  /// The rank that holds `position` ≥ 0, and its place among that rank's rows.
  std::int32_t owner(std::int64_t position) const {
    return sharded() ? static_cast<std::int32_t>(position / interleave % world) : 0;
  }
  std::int64_t local_position(std::int64_t position) const {
    if (!sharded()) return position;
    return position / stripe_rows() * interleave + position % interleave;
  }
  /// The position of row `local` ≥ 0 of `rank`.
  std::int64_t global_position(std::int32_t rank, std::int64_t local) const {
    if (!sharded()) return local;
    return local / interleave * stripe_rows() + std::int64_t{rank} * interleave +
           local % interleave;
  }
};

/// Throws std::invalid_argument for world or interleave < 1 and for I·W beyond 2^31-1.
void validate(const ContextSharding& sharding);

}  // namespace sparse_mla
