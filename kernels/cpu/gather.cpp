// Operation `gather` on the CPU: a row at a time from its page, zeros where the page lies outside
// the block table or the cache.
#include <cstring>
#include <string>

#include "kernels/cpu/entries.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

void check(const GatherProblem& problem, const GatherCall& call) {
  const std::int64_t row_bytes = 2 * std::int64_t{problem.latent_dim};
  require(call.cache.format == problem.format, "cache.format", to_string(call.cache.format),
          to_string(problem.format));
  require(call.cache.block_size >= 1, "cache.block_size", call.cache.block_size, "at least 1");
  require(call.cache.row_stride >= row_bytes, "cache.row_stride", call.cache.row_stride,
          "at least a row's " + std::to_string(row_bytes) + " bytes");
  require(call.rows.extent(1) == problem.latent_dim, "rows", call.rows.extent(1),
          "latent_dim (" + std::to_string(problem.latent_dim) + ") columns");
  require(call.rows.extent(0) == 0 || call.rows.stride(1) == 1, "rows", call.rows.stride(1),
          "contiguous rows (last stride 1)");
  std::int64_t total = 0;
  for (std::size_t m = 0; m < call.members.size(); ++m) {
    const ChunkMember& member = call.members[m];
    const std::string name = "members[" + std::to_string(m) + "]";
    require(member.num_keys >= 0 && member.first_key >= 0, name,
            std::to_string(member.first_key) + " + " + std::to_string(member.num_keys),
            "a first key and a key count of at least 0");
    if (member.num_keys == 0) continue;
    require(member.request >= 0 && member.request < call.block_tables.extent(0), name + ".request",
            member.request, "below " + std::to_string(call.block_tables.extent(0)));
    require(member.key_row >= 0 &&
                member.key_row + std::int64_t{member.num_keys} <= call.rows.extent(0),
            name + ".key_row", member.key_row,
            "rows within the workspace's " + std::to_string(call.rows.extent(0)));
    total += member.num_keys;
  }
  require(total <= problem.max_rows, "members", total,
          "at most the problem's " + std::to_string(problem.max_rows) + " rows");
}

void run(const GatherProblem& problem, const GatherCall& call, std::span<std::byte>, Stream) {
  check(problem, call);
  const std::size_t row_bytes = 2 * static_cast<std::size_t>(problem.latent_dim);
  for (const ChunkMember& member : call.members) {
#pragma omp parallel for schedule(static) if (member.num_keys > 256)
    for (std::int64_t i = 0; i < member.num_keys; ++i) {
      const std::int64_t position = std::int64_t{member.first_key} + i;
      const std::int64_t column = position / call.cache.block_size;
      const std::int64_t block = column < call.block_tables.extent(1)
                                     ? call.block_tables(member.request, column)
                                     : std::int64_t{-1};
      bfloat16* row = address(call.rows, member.key_row + i, 0);
      if (block < 0 || block >= call.cache.num_blocks)
        std::memset(row, 0, row_bytes);
      else
        std::memcpy(
            row, call.cache.row(block * call.cache.block_size + position % call.cache.block_size),
            row_bytes);
    }
  }
}

}  // namespace

std::vector<Entry<GatherProblem, GatherCall>> gather_entries() {
  return {{"cpu", Backend::cpu, "a row at a time from its page",
           [](const GatherProblem&) { return std::string(); },
           [](const GatherProblem&) { return std::size_t{0}; }, run}};
}

}  // namespace sparse_mla::cpu
