// Operation `build_masks` on the CPU: one pass over (member, query tile) that clears the rows, sets
// the picks' bits and lists the key tiles in which any row of the query tile has one.
#include <algorithm>
#include <string>

#include "kernels/common/mask_checks.h"
#include "kernels/cpu/entries.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

void check(const BuildMasksProblem& problem, const BuildMasksCall& call) {
  check_shapes(problem, call);
  std::int64_t words = 0;
  for (std::size_t m = 0; m < call.members.size(); ++m) {
    const ChunkMember& member = call.members[m];
    require(member.query_len == 0 ||
                (member.query_start >= 0 &&
                 member.query_start + std::int64_t{member.query_len} <= call.picks.extent(0)),
            "members[" + std::to_string(m) + "].query_start", member.query_start,
            "rows within picks (" + std::to_string(call.picks.extent(0)) + ")");
    words += std::int64_t{member.query_len} * call.mask.members[m].row_words;
  }
  require(words <= problem.max_words, "mask", words,
          "at most the problem's " + std::to_string(problem.max_words) + " words");
  if (words > 0) check_mask_arrays(call.mask);
}

/// The rows [row_begin, row_end) of one member, which are one query tile.
void build_tile(const BuildMasksCall& call, std::size_t m, std::int64_t tile) {
  const ChunkMember& member = call.members[m];
  const MaskMember& mask = call.mask.members[m];
  const std::int64_t row_begin = tile * call.mask.tile.queries;
  const std::int64_t row_end =
      std::min<std::int64_t>(row_begin + call.mask.tile.queries, member.query_len);
  std::int32_t* tile_ids = call.mask.tile_ids + mask.tile_offset + tile * mask.max_tiles;
  std::fill_n(tile_ids, mask.max_tiles, 0);  // first used as flags
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    std::uint32_t* words = call.mask.words + mask.word_offset + row * mask.row_words;
    std::fill_n(words, mask.row_words, 0u);
    const std::int64_t end = std::min<std::int64_t>(std::int64_t{mask.first_key} + mask.num_keys,
                                                    member.context_len + row + 1);
    const std::int64_t token = member.query_start + row;
    const std::int64_t count =
        call.counts == nullptr ? call.picks.extent(1)
                               : std::min<std::int64_t>(call.counts[token], call.picks.extent(1));
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t key = call.picks(token, i);
      if (key < mask.first_key || key >= end) continue;
      const std::int64_t bit = key - mask.first_key;
      words[bit >> 5] |= std::uint32_t{1} << (bit & 31);
      tile_ids[key / call.mask.tile.keys - mask.first_tile] = 1;
    }
  }
  std::int32_t count = 0;
  for (std::int32_t t = 0; t < mask.max_tiles; ++t)
    if (tile_ids[t] != 0) tile_ids[count++] = mask.first_tile + t;  // count ≤ t: no flag is lost
  std::fill(tile_ids + count, tile_ids + mask.max_tiles, 0);
  call.mask.tile_counts[mask.tile_count_offset + tile] = count;
}

void run(const BuildMasksProblem& problem, const BuildMasksCall& call, std::span<std::byte>,
         Stream) {
  check(problem, call);
  for (std::size_t m = 0; m < call.members.size(); ++m) {
    const std::int64_t tiles =
        (std::int64_t{call.members[m].query_len} + call.mask.tile.queries - 1) /
        call.mask.tile.queries;
#pragma omp parallel for schedule(dynamic, 1) if (tiles > 1)
    for (std::int64_t tile = 0; tile < tiles; ++tile) build_tile(call, m, tile);
  }
}

}  // namespace

std::vector<Entry<BuildMasksProblem, BuildMasksCall>> build_masks_entries() {
  return {{"cpu", Backend::cpu, "clear, scatter and list non-empty tiles, a query tile at a time",
           [](const BuildMasksProblem&) { return std::string(); },
           [](const BuildMasksProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cpu
