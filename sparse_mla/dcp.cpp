#include "sparse_mla/dcp.h"

#include <cstring>
#include <limits>
#include <string>

#include "kernels/common/merge_weights.h"
#include "kernels/common/view_checks.h"
#include "sparse_mla/error.h"
#include "topk/ordered_key.h"

namespace sparse_mla {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

void check_rank(const ContextSharding& sharding, std::int32_t rank) {
  validate(sharding);
  require(rank >= 0 && rank < sharding.world, "rank", rank,
          "0 … " + std::to_string(sharding.world - 1));
}

void check_same_shape(const char* name, const View2<std::int32_t>& got,
                      const View2<const std::int32_t>& expected) {
  require(got.extent(0) == expected.extent(0) && got.extent(1) == expected.extent(1), name,
          shape_text(got), shape_text(expected));
}

void check_chunk(const ContextPlan& plan, std::size_t chunk) {
  require(chunk < plan.chunks.size(), "chunk", chunk,
          "below the plan's " + std::to_string(plan.chunks.size()) + " chunks");
}

/// run(rank, row of that rank's buffer, row of the chunk, count) for every stretch of rows that lie
/// behind one another on both sides, in the chunk's order.
template <class Run>
void for_each_run(const ContextPlan& plan, std::size_t chunk, Run run) {
  const ContextSharding& sharding = plan.sharding;
  const auto rows = plan.cu_seq_lens(chunk), local_rows = plan.cu_local_seq_lens(chunk);
  for (std::size_t member = 0; member + 1 < rows.size(); ++member) {
    const std::int64_t len = rows[member + 1] - rows[member];
    const std::int64_t step = sharding.sharded() ? sharding.interleave : len;
    // A member's start is aligned, so that its rows can be counted from it.
    for (std::int64_t i = 0; i < len; i += step)
      run(sharding.owner(i), local_rows[member] + sharding.local_position(i), rows[member] + i,
          std::min(step, len - i));
  }
}

}  // namespace

void validate(const ContextSharding& sharding) {
  require(sharding.world >= 1, "world", sharding.world, "at least 1");
  require(sharding.interleave >= 1, "interleave", sharding.interleave, "at least 1");
  require(sharding.stripe_rows() <= kMaxInt32, "interleave", sharding.interleave,
          "interleave · world (" + std::to_string(sharding.world) + ") of at most 2^31-1");
}

void local_visible_lengths(const ContextSharding& sharding, std::int32_t rank,
                           std::span<const std::int32_t> visible, std::span<std::int32_t> local) {
  check_rank(sharding, rank);
  require(local.size() == visible.size(), "local", local.size(),
          "as many entries as visible (" + std::to_string(visible.size()) + ")");
  for (std::size_t row = 0; row < visible.size(); ++row)
    local[row] = static_cast<std::int32_t>(sharding.local_rows(rank, visible[row]));
}

void picks_to_local(const ContextSharding& sharding, std::int32_t rank,
                    View2<const std::int32_t> picks, View2<std::int32_t> local,
                    std::span<std::int32_t> counts) {
  check_rank(sharding, rank);
  check_same_shape("local", local, picks);
  const std::int64_t num_rows = picks.extent(0), k = picks.extent(1);
  require(counts.empty() || static_cast<std::int64_t>(counts.size()) == num_rows, "counts",
          counts.size(), "an entry per row of picks (" + std::to_string(num_rows) + ")");
  for (std::int64_t row = 0; row < num_rows; ++row) {
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int32_t pick = picks(row, i);
      if (pick >= 0 && sharding.owner(pick) == rank)
        local(row, count++) = static_cast<std::int32_t>(sharding.local_position(pick));
    }
    if (!counts.empty()) counts[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(count);
    for (std::int64_t i = count; i < k; ++i) local(row, i) = -1;
  }
}

void picks_to_global(const ContextSharding& sharding, std::int32_t rank,
                     View2<const std::int32_t> local, View2<std::int32_t> picks) {
  check_rank(sharding, rank);
  check_same_shape("picks", picks, local);
  for (std::int64_t row = 0; row < local.extent(0); ++row)
    for (std::int64_t i = 0; i < local.extent(1); ++i) {
      const std::int32_t place = local(row, i);
      const std::int64_t position = place < 0 ? -1 : sharding.global_position(rank, place);
      picks(row, i) = position > kMaxInt32 ? -1 : static_cast<std::int32_t>(position);
    }
}

void select_global_topk(const GatheredCandidates& candidates, View2<std::int32_t> picks) {
  const auto& [scores, positions] = candidates;
  require(scores.extent(0) == positions.extent(0) && scores.extent(1) == positions.extent(1) &&
              scores.extent(2) == positions.extent(2),
          "candidates.scores", shape_text(scores),
          "the shape of its picks, " + shape_text(positions));
  require(picks.extent(0) == positions.extent(1), "picks", shape_text(picks),
          "[rows, k] with the candidates' " + std::to_string(positions.extent(1)) + " rows");
  const std::int64_t world = positions.extent(0), width = positions.extent(2);
  const std::int64_t k = picks.extent(1);
#pragma omp parallel
  {
    std::vector<std::uint64_t> ranked;
#pragma omp for schedule(static)
    for (std::int64_t row = 0; row < picks.extent(0); ++row) {
      ranked.clear();
      for (std::int64_t rank = 0; rank < world; ++rank)
        for (std::int64_t i = 0; i < width; ++i) {
          const std::int32_t position = positions(rank, row, i);
          if (position < 0) continue;
          std::uint32_t bits;
          std::memcpy(&bits, address(scores, rank, row, i), sizeof(bits));
          ranked.push_back(topk::packed_rank(topk::ordered_key(bits), position));
        }
      if (static_cast<std::int64_t>(ranked.size()) > k) {
        std::nth_element(ranked.begin(), ranked.begin() + k, ranked.end());
        ranked.resize(static_cast<std::size_t>(k));
      }
      std::sort(ranked.begin(), ranked.end(), [](std::uint64_t a, std::uint64_t b) {
        return topk::packed_index(a) < topk::packed_index(b);
      });
      for (std::int64_t i = 0; i < k; ++i)
        picks(row, i) = i < static_cast<std::int64_t>(ranked.size())
                            ? topk::packed_index(ranked[static_cast<std::size_t>(i)])
                            : -1;
    }
  }
}

std::vector<ChunkMember> local_members(const ContextPlan& plan, std::size_t chunk,
                                       std::int32_t rank, std::span<const ChunkMember> members) {
  check_rank(plan.sharding, rank);
  check_chunk(plan, chunk);
  const auto starts = plan.local_starts(chunk), rows = plan.cu_local_seq_lens(chunk);
  const auto lens = plan.rank_seq_lens(chunk);
  require(members.size() == starts.size(), "members", members.size(),
          "the chunk's " + std::to_string(starts.size()) + " members");
  std::vector<ChunkMember> local(members.begin(), members.end());
  for (std::size_t i = 0; i < local.size(); ++i) {
    local[i].first_key = starts[i];
    local[i].num_keys =
        lens[i * static_cast<std::size_t>(plan.sharding.world) + static_cast<std::size_t>(rank)];
    local[i].key_row = rows[i];
  }
  return local;
}

void gathered_rows(const ContextPlan& plan, std::size_t chunk, std::int64_t rows_per_rank,
                   std::span<std::int64_t> source) {
  check_chunk(plan, chunk);
  require(rows_per_rank >= plan.local_rows(chunk), "rows_per_rank", rows_per_rank,
          "at least the chunk's " + std::to_string(plan.local_rows(chunk)) + " rows a rank");
  require(static_cast<std::int64_t>(source.size()) == plan.chunks[chunk].num_rows, "source",
          source.size(),
          "an entry per row of the chunk (" + std::to_string(plan.chunks[chunk].num_rows) + ")");
  for_each_run(plan, chunk,
               [&](std::int64_t rank, std::int64_t from, std::int64_t to, std::int64_t count) {
                 for (std::int64_t i = 0; i < count; ++i)
                   source[static_cast<std::size_t>(to + i)] = rank * rows_per_rank + from + i;
               });
}

void reorder_gathered_chunk(const ContextPlan& plan, std::size_t chunk,
                            View3<const std::byte> gathered, View2<std::byte> rows) {
  check_chunk(plan, chunk);
  const std::int64_t row_bytes = rows.extent(1);
  require(gathered.extent(0) == plan.sharding.world && gathered.extent(2) == row_bytes &&
              gathered.extent(1) >= plan.local_rows(chunk),
          "gathered", shape_text(gathered),
          "[" + std::to_string(plan.sharding.world) + ", at least " +
              std::to_string(plan.local_rows(chunk)) + ", " + std::to_string(row_bytes) + "]");
  require(rows.extent(0) >= plan.chunks[chunk].num_rows, "rows", shape_text(rows),
          "at least the chunk's " + std::to_string(plan.chunks[chunk].num_rows) + " rows");
  require(gathered.stride(2) == 1 && rows.stride(1) == 1, "gathered, rows",
          std::to_string(gathered.stride(2)) + ", " + std::to_string(rows.stride(1)),
          "contiguous rows (last stride 1)");
  const bool packed = gathered.stride(1) == row_bytes && rows.stride(0) == row_bytes;
  for_each_run(plan, chunk,
               [&](std::int64_t rank, std::int64_t from, std::int64_t to, std::int64_t count) {
                 const std::int64_t copies = packed ? 1 : count;
                 const std::int64_t bytes = packed ? count * row_bytes : row_bytes;
                 for (std::int64_t i = 0; i < copies; ++i)
                   std::memcpy(address(rows, to + i, 0), address(gathered, rank, from + i, 0),
                               static_cast<std::size_t>(bytes));
               });
}

void merge_rank_partials(std::span<const ConstPartial> ranks, const Partial& out) {
  require(!ranks.empty(), "ranks", ranks.size(), "at least one partial");
  const std::int64_t num_rows = out.out.extent(0), num_heads = out.out.extent(1);
  const std::int64_t width = out.out.extent(2);
  const auto check = [&](const std::string& name, const ConstPartial& partial) {
    require(partial.out.extent(0) == num_rows && partial.out.extent(1) == num_heads &&
                partial.out.extent(2) == width,
            name + ".out", shape_text(partial.out), shape_text(out.out));
    require(partial.lse.extent(0) == num_heads && partial.lse.extent(1) == num_rows, name + ".lse",
            shape_text(partial.lse),
            "[" + std::to_string(num_heads) + ", " + std::to_string(num_rows) + "]");
  };
  check("out", out);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    check("ranks[" + std::to_string(rank) + "]", ranks[rank]);
#pragma omp parallel
  {
    std::vector<float> weights(ranks.size());
#pragma omp for schedule(static)
    for (std::int64_t row = 0; row < num_rows; ++row)
      for (std::int64_t head = 0; head < num_heads; ++head) {
        // The fold of pairwise merges, done on the weights: no intermediate result is stored.
        float lse = -std::numeric_limits<float>::infinity();
        for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
          const MergeWeights pair = merge_weights(lse, ranks[rank].lse(head, row));
          for (std::size_t earlier = 0; earlier < rank; ++earlier) weights[earlier] *= pair.a;
          weights[rank] = pair.b;
          lse = pair.lse;
        }
        out.lse(head, row) = lse;
        for (std::int64_t i = 0; i < width; ++i) {
          MergeWeights join{0.0f, 0.0f, 0.0f};
          float value = 0.0f;
          for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
            join.b = weights[rank];
            value = merge_value(join, value, ranks[rank].out(row, head, i));
            if (join.b != 0.0f) join.a = 1.0f;
          }
          out.out(row, head, i) = value;
        }
      }
  }
}

}  // namespace sparse_mla
