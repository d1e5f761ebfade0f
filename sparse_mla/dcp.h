/// The host side of decode context parallelism (DCP), as pure routines: nothing here communicates.
///
/// Prefill: every rank makes the same plan (`PlannerOptions::sharding`), gathers its own rows of a
/// chunk (`local_members`) into a buffer laid out by the plan's padded local lengths, the buffers
/// are all-gathered, and `reorder_gathered_chunk` brings the rows back into each request's own
/// order, as if nothing had been sharded.
/// Decode: every rank selects among its own keys, the candidates are all-gathered,
/// `select_global_topk` finds the exact top-k, each rank attends the picks that it owns
/// (`picks_to_local`, then its own block table), and `merge_rank_partials` joins the results.
/// `positions` and picks are request-local, as everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sparse_mla/chunk_member.h"
#include "sparse_mla/context_sharding.h"
#include "sparse_mla/partials.h"
#include "sparse_mla/planner.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

/// Keys that each query row sees on `rank`: `visible` [rows] keys that it sees in all, in the order
/// of their positions from 0; ≤ 0 (a padding row) sees none. `local` [rows] may be `visible`
/// itself. Throws std::invalid_argument for unequal sizes and for a rank outside the world.
void local_visible_lengths(const ContextSharding& sharding, std::int32_t rank,
                           std::span<const std::int32_t> visible, std::span<std::int32_t> local);

/// Positions → places among the rank's own rows, to be looked up in the rank's own block table.
/// Picks of other ranks and negative ones are dropped, the others keep their order and come first,
/// then −1. Every element of `local` is written; it may be `picks` itself.
/// Throws std::invalid_argument for unequal shapes and for a rank outside the world.
void picks_to_local(const ContextSharding& sharding, std::int32_t rank,
                    View2<const std::int32_t> picks,       ///< [rows, k]
                    View2<std::int32_t> local,             ///< [rows, k]
                    std::span<std::int32_t> counts = {});  ///< optional [rows]: entries not −1

/// Places among the rank's own rows → positions, each in its slot; negative places, and those whose
/// position would exceed 2^31-1, become −1. `picks` may be `local` itself. Throws like
/// `picks_to_local`.
void picks_to_global(const ContextSharding& sharding, std::int32_t rank,
                     View2<const std::int32_t> local,  ///< [rows, k]
                     View2<std::int32_t> picks);       ///< [rows, k]

/// The candidates of all ranks, as they lie behind one another after an all-gather. Each rank hands
/// in its exact top min(k, keys that it holds) with scores, padded with −inf / −1; a rank without
/// keys hands in nothing else. Order within a rank is free.
struct GatheredCandidates {
  View3<const float> scores;        ///< [world, rows, candidates]
  View3<const std::int32_t> picks;  ///< [world, rows, candidates] positions, negative = none
};

/// The exact top-k over all ranks' keys by the contract of `select`: the k largest, ties to the
/// lower *position* (whichever rank holds it), NaN below −inf, −0 equal to +0. (The union of the
/// ranks' own top-k holds the global one: a key that k keys of its own rank beat is beaten by k
/// keys in all. A rank's own ties go to its lower place, which is the lower position.) `picks`
/// [rows, k] ← min(k, candidates) positions, ascending, then −1: every element is written. Throws
/// std::invalid_argument for shapes that differ.
void select_global_topk(const GatheredCandidates& candidates, View2<std::int32_t> picks);

/// The members of one chunk as `rank` gathers them: `first_key` counted among the rank's own rows
/// (it may fall inside a page), `num_keys` the rows that it really holds (may be 0), `key_row` in a
/// buffer of local_rows(chunk) rows. `members` [chunk's members] as the whole chunk has them; what
/// concerns their queries stays. Buffer rows beyond a member's `num_keys` are padding: the gather
/// does not write them and the re-order does not read them.
std::vector<ChunkMember> local_members(const ContextPlan& plan, std::size_t chunk,
                                       std::int32_t rank, std::span<const ChunkMember> members);

/// Where the rows of a chunk come from after the all-gather: source[row] =
/// rank · rows_per_rank + row of that rank's buffer, for workspace rows [0, num_rows) of the chunk
/// in the order of cu_seq_lens. Within a request that is the order of the tokens' true positions,
/// not rank after rank: masks, causal tests and mask tiles count keys from a request's first one.
/// Padding is dropped at each request's own offset of this chunk. `rows_per_rank` ≥ the plan's
/// local_rows(chunk). Throws std::invalid_argument for sizes that do not fit.
void gathered_rows(const ContextPlan& plan, std::size_t chunk, std::int64_t rows_per_rank,
                   std::span<std::int64_t> source);

/// Moves the rows themselves, in runs of up to `interleave` rows, without that list.
/// Throws std::invalid_argument for shapes that do not fit, before a byte is written.
void reorder_gathered_chunk(
    const ContextPlan& plan, std::size_t chunk,
    View3<const std::byte> gathered,  ///< [world, ≥ local_rows(chunk), row bytes], last stride 1
    View2<std::byte> rows);           ///< [≥ the chunk's num_rows, row bytes], last stride 1

/// out, lse ← merge of the partials of any number of ranks in one pass over their values, rank by
/// rank in the order given (so that equal calls give equal bits), by the arithmetic of
/// `merge_partials`: lse is a natural logarithm; −inf and +inf = the rank has no keys, and what its
/// `out` holds is not looked at; no rank has keys → out 0, lse −inf; one rank with keys is returned
/// bit for bit; a NaN lse propagates. `out` may be one of `ranks`. 64-bit offsets, any strides.
/// Throws std::invalid_argument for no ranks and for shapes that differ.
void merge_rank_partials(std::span<const ConstPartial> ranks, const Partial& out);

}  // namespace sparse_mla
