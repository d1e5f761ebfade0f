// Operation `gather` on the CPU: a row at a time from its page, zeros where the page lies outside
// the block table or the cache.
#include <cstring>
#include <string>

#include "kernels/common/cache_checks.h"
#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/entries.h"
#include "kernels/cpu/latent_rows.h"
#include "kernels/cpu/tile_kernels.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

void check(const GatherProblem& problem, const GatherCall& call) {
  check_shapes(problem, call);
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

template <class Rows>
void run(const GatherProblem& problem, const GatherCall& call, const Rows& rows) {
  check(problem, call);
  const std::int64_t latent_dim = call.rows.extent(1);
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
        std::memset(row, 0, static_cast<std::size_t>(latent_dim) * sizeof(bfloat16));
      else
        rows.gather(block * call.cache.block_size + position % call.cache.block_size, row);
    }
  }
}

template <const TileKernels& (*kKernels)()>
void run_vectorised(const GatherProblem& problem, const GatherCall& call, std::span<std::byte>,
                    Stream) {
  run(problem, call,
      LatentRows(call.cache, problem.kv_lora_rank, problem.qk_rope_head_dim, kKernels()));
}

void run_reference(const GatherProblem& problem, const GatherCall& call, std::span<std::byte>,
                   Stream) {
  run(problem, call, ScalarLatentRows(call.cache, problem.kv_lora_rank, problem.qk_rope_head_dim));
}

std::string usable(const GatherProblem&) { return ""; }
std::string usable_avx2(const GatherProblem&) { return why_not_avx2_fma(); }
std::size_t no_workspace(const GatherProblem&) { return 0; }

}  // namespace

std::vector<Entry<GatherProblem, GatherCall>> gather_entries() {
  return {
      {"cpu_avx2", Backend::cpu, "a row at a time from its page, decoded in AVX2 registers",
       usable_avx2, no_workspace, run_vectorised<avx2_tile_kernels>},
      {"cpu_baseline", Backend::cpu, "a row at a time from its page, decoded in SSE2 registers",
       usable, no_workspace, run_vectorised<baseline_tile_kernels>},
      {"cpu_reference", Backend::cpu, "a number at a time", usable, no_workspace, run_reference}};
}

}  // namespace sparse_mla::cpu
