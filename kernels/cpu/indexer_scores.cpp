// Operation `indexer_scores` on the CPU.
//
// Work item = (member, tile of query rows, tile of keys). The rows' q lies in panels whose columns
// are heads; keys are decoded to fp32 a few at a time and multiplied against all rows of the tile,
// with relu, weights and the sum over heads in registers. A score is one fixed chain of operations
// on its own row and key: splitting or reordering a batch does not change a bit of it.
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "kernels/common/ceil_div.h"
#include "kernels/common/indexer_checks.h"
#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/e4m3_values.h"
#include "kernels/cpu/entries.h"
#include "kernels/cpu/thread_scratch.h"
#include "kernels/cpu/tile_kernels.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

/// Query rows of a work item: 8 rows × 64 heads × 128 floats are 256 KiB of q panels, within an L2
/// cache, and decoding a key costs a hundredth of scoring it against 8 rows.
constexpr std::int64_t row_tile() { return 8; }
/// Keys of a work item: packing a row's q costs as much as scoring about 24 keys; a long decode
/// still falls into many items (32 at 32,768 keys). A multiple of kIndexKeys.
constexpr std::int64_t key_tile() { return 1008; }
static_assert(key_tile() % kIndexKeys == 0);

struct Scratch {
  float* q;        ///< [row_tile] × panels of [D, heads]
  float* weights;  ///< [row_tile, heads padded to whole panels]
  float* keys;     ///< [kIndexKeys, D]
  float* scales;   ///< [kIndexKeys]
  std::int64_t q_stride, weights_stride;

  Scratch(WorkspaceCarver& carver, const IndexerProblem& problem)
      : q_stride(panel_elements(problem.index_n_heads, problem.index_head_dim)),
        weights_stride(panel_elements(problem.index_n_heads, 1)) {
    q = carver.take<float>("indexer_q", row_tile() * q_stride);
    weights = carver.take<float>("indexer_weights", row_tile() * weights_stride);
    keys = carver.take<float>("indexer_keys", kIndexKeys * problem.index_head_dim);
    scales = carver.take<float>("indexer_scales", kIndexKeys);
  }
};

/// Keys that the member's row r sees.
std::int64_t visible_keys(const ScoreMember& member, std::int64_t r) {
  return std::int64_t{member.first_position} + r + 1;
}

void check(const IndexerProblem& problem, const IndexerCall& call) {
  check_shapes(problem, call);
  std::int64_t rows = 0;
  for (std::size_t m = 0; m < call.members.size(); ++m) {
    const ScoreMember& member = call.members[m];
    const std::string name = "members[" + std::to_string(m) + "]";
    require(member.num_rows >= 0, name + ".num_rows", member.num_rows, "at least 0");
    if (member.num_rows == 0) continue;
    rows += member.num_rows;
    require(member.request >= 0 && member.request < call.block_tables.extent(0), name + ".request",
            member.request, "below " + std::to_string(call.block_tables.extent(0)));
    require(member.query_start >= 0 &&
                member.query_start + std::int64_t{member.num_rows} <= call.index_q.extent(0),
            name + ".query_start", member.query_start,
            "rows within index_q's " + std::to_string(call.index_q.extent(0)));
    require(member.first_position >= -1, name + ".first_position", member.first_position,
            "at least -1 (a first row without keys)");
    const std::int64_t keys = visible_keys(member, member.num_rows - 1);
    require(keys <= problem.max_keys, name + ".first_position", member.first_position,
            "at most the problem's " + std::to_string(problem.max_keys) + " keys for its last row");
    require(member.row_keys >= keys, name + ".row_keys", member.row_keys,
            "room for the last row's " + std::to_string(keys) + " keys");
    require(member.score_offset >= 0, name + ".score_offset", member.score_offset, "at least 0");
  }
  require(rows <= problem.max_rows, "members", rows,
          "at most the problem's " + std::to_string(problem.max_rows) + " rows");
  require(rows == 0 || call.scores != nullptr, "scores", "null", "memory for the scores");
}

/// The cache slot of a request's key, or −1 where its page lies outside the block table or the
/// cache.
std::int64_t slot_of(const IndexerCall& call, std::int64_t request, std::int64_t key) {
  const std::int64_t column = key / call.cache.block_size;
  if (column >= call.block_tables.extent(1)) return -1;
  const std::int64_t block = call.block_tables(request, column);
  if (block < 0 || block >= call.cache.num_blocks) return -1;
  return block * call.cache.block_size + key % call.cache.block_size;
}

float* score_row(const IndexerCall& call, const ScoreMember& member, std::int64_t r) {
  return call.scores + member.score_offset + r * member.row_keys;
}

class Scorer {
 public:
  Scorer(const IndexerProblem& problem, const IndexerCall& call, const TileKernels& kernels,
         const Scratch& scratch)
      : call_(call),
        kernels_(kernels),
        scratch_(scratch),
        heads_(problem.index_n_heads),
        depth_(problem.index_head_dim) {}

  /// Rows [row_begin, row_end) of the member against keys [key_begin, key_end).
  void run(const ScoreMember& member, std::int64_t row_begin, std::int64_t row_end,
           std::int64_t key_begin, std::int64_t key_end) {
    key_end = std::min(key_end, visible_keys(member, row_end - 1));
    if (key_begin >= key_end) return;
    // Rows that see none of the keys: the first ones.
    row_begin = std::max(row_begin, key_begin - member.first_position);
    for (std::int64_t r = row_begin; r < row_end; ++r) load_row(r - row_begin, member, r);
    for (std::int64_t key = key_begin; key < key_end; key += kIndexKeys) {
      const std::int64_t count = std::min(kIndexKeys, key_end - key);
      const std::uint32_t missing = load_keys(member.request, key, count);
      for (std::int64_t r = row_begin; r < row_end; ++r) {
        const std::int64_t seen = std::min(count, visible_keys(member, r) - key);
        if (seen <= 0) continue;
        float* scores = score_row(call_, member, r) + key;
        kernels_.index_scores(scratch_.keys, seen, depth_,
                              scratch_.q + (r - row_begin) * scratch_.q_stride,
                              scratch_.weights + (r - row_begin) * scratch_.weights_stride, heads_,
                              scratch_.scales, scores);
        for (std::int64_t i = 0; missing != 0 && i < seen; ++i)
          if ((missing >> i & 1) != 0) scores[i] = -std::numeric_limits<float>::infinity();
      }
    }
  }

 private:
  void load_row(std::int64_t place, const ScoreMember& member, std::int64_t r) {
    const std::int64_t token = member.query_start + r;
    kernels_.pack_columns_e4m3(
        reinterpret_cast<const std::uint8_t*>(address(call_.index_q, token, 0, 0)),
        call_.index_q.stride(1), heads_, depth_, scratch_.q + place * scratch_.q_stride);
    float* weights = scratch_.weights + place * scratch_.weights_stride;
    for (std::int64_t h = 0; h < heads_; ++h) weights[h] = call_.index_weights(token, h);
    std::fill(weights + heads_, weights + scratch_.weights_stride, 0.0f);
  }

  /// Decodes keys [first, first + count), zeros behind them. Bit i of the result: key i has no
  /// page.
  std::uint32_t load_keys(std::int64_t request, std::int64_t first, std::int64_t count) {
    std::uint32_t missing = 0;
    for (std::int64_t i = 0; i < kIndexKeys; ++i) {
      float* key = scratch_.keys + i * depth_;
      const std::int64_t slot = i < count ? slot_of(call_, request, first + i) : -1;
      if (slot < 0) {
        missing |= std::uint32_t{1} << i;
        scratch_.scales[i] = 0;
        std::fill_n(key, depth_, 0.0f);
      } else {
        kernels_.e4m3_to_float(reinterpret_cast<const std::uint8_t*>(call_.cache.key(slot)), key,
                               depth_);
        std::memcpy(scratch_.scales + i, call_.cache.scale(slot), sizeof(float));
      }
    }
    return missing;
  }

  const IndexerCall& call_;
  const TileKernels& kernels_;
  const Scratch& scratch_;
  std::int64_t heads_, depth_;
};
static_assert(kIndexKeys <= 32);

/// Work items of one member: row tiles × key tiles, the causal corner included.
std::int64_t key_tiles(const ScoreMember& member) {
  return ceil_div(visible_keys(member, member.num_rows - 1), key_tile());
}
std::int64_t count_items(const ScoreMember& member) {
  return member.num_rows == 0 ? 0 : ceil_div(member.num_rows, row_tile()) * key_tiles(member);
}

template <const TileKernels& (*kKernels)()>
void run_tiled(const IndexerProblem& problem, const IndexerCall& call,
               std::span<std::byte> workspace, Stream) {
  check(problem, call);
  std::int64_t items = 0;
  for (const ScoreMember& member : call.members) items += count_items(member);
  if (items == 0) return;
#pragma omp parallel num_threads(scratch_threads <Scratch>(problem, workspace, items))
  {
    const auto scratch = thread_scratch<Scratch>(problem, workspace);
    Scorer scorer(problem, call, kKernels(), scratch);
    // A thread's items ascend, so its place in the list of members only moves forward.
    std::size_t m = 0;
    std::int64_t member_begin = 0;
#pragma omp for schedule(monotonic : dynamic, 1)
    for (std::int64_t item = 0; item < items; ++item) {
      while (item - member_begin >= count_items(call.members[m]))
        member_begin += count_items(call.members[m++]);
      const ScoreMember& member = call.members[m];
      const std::int64_t row = (item - member_begin) / key_tiles(member) * row_tile();
      const std::int64_t key = (item - member_begin) % key_tiles(member) * key_tile();
      scorer.run(member, row, std::min<std::int64_t>(row + row_tile(), member.num_rows), key,
                 key + key_tile());
    }
  }
}

/// Score by score, heads in order, dot products in fp64.
void run_reference(const IndexerProblem& problem, const IndexerCall& call, std::span<std::byte>,
                   Stream) {
  check(problem, call);
  const std::array<float, 256>& decoded = e4m3_values();
  for (const ScoreMember& member : call.members) {
#pragma omp parallel for schedule(dynamic, 1)
    for (std::int64_t r = 0; r < member.num_rows; ++r) {
      const std::int64_t token = member.query_start + r;
      for (std::int64_t key = 0; key < visible_keys(member, r); ++key) {
        const std::int64_t slot = slot_of(call, member.request, key);
        float& score = score_row(call, member, r)[key];
        if (slot < 0) {
          score = -std::numeric_limits<float>::infinity();
          continue;
        }
        const auto* k = reinterpret_cast<const fp8_e4m3*>(call.cache.key(slot));
        float scale = 0;
        std::memcpy(&scale, call.cache.scale(slot), sizeof scale);
        double sum = 0;
        for (int h = 0; h < problem.index_n_heads; ++h) {
          const fp8_e4m3* q = address(call.index_q, token, h, 0);
          double dot = 0;
          for (int d = 0; d < problem.index_head_dim; ++d)
            dot += double{decoded[q[d].__x]} * double{decoded[k[d].__x]};
          sum += double{call.index_weights(token, h)} * (dot < 0 ? 0 : dot);
        }
        score = static_cast<float>(double{scale} * sum);
      }
    }
  }
}

std::string usable(const IndexerProblem&) { return ""; }
std::string usable_avx2(const IndexerProblem&) { return why_not_avx2_fma(); }

}  // namespace

std::vector<Entry<IndexerProblem, IndexerCall>> indexer_scores_entries() {
  const auto bytes = [](const IndexerProblem& p) { return scratch_bytes<Scratch>(p); };
  return {{"cpu_avx2", Backend::cpu, "AVX2 register tiles, relu and head sum fused", usable_avx2,
           bytes, run_tiled<avx2_tile_kernels>},
          {"cpu_baseline", Backend::cpu, "SSE2 register tiles, relu and head sum fused", usable,
           bytes, run_tiled<baseline_tile_kernels>},
          {"cpu_reference", Backend::cpu, "scalar fp64, a score at a time", usable,
           [](const IndexerProblem&) { return std::size_t{0}; }, run_reference}};
}

}  // namespace sparse_mla::cpu
