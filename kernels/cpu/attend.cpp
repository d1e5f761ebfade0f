// Operation `attend` on the CPU: MHA over packed members, a tile of query rows against a block of
// keys at a time.
//
// Work item = (member, head, group of query tiles). Per key block: keys and values → fp32 once for
// the group; then per query tile S = Q·Kᵀ (sgemm) → mask and online softmax → O += P·V (sgemm).
// Under a mask only the listed key tiles are visited, neighbours joined into one product.
// (The online softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.)
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "kernels/common/attend_checks.h"
#include "kernels/common/ceil_div.h"
#include "kernels/common/merge_weights.h"
#include "kernels/cpu/bf16_bits.h"
#include "kernels/cpu/blas.h"
#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/entries.h"
#include "kernels/cpu/thread_scratch.h"
#include "kernels/cpu/tile_kernels.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

/// Rows of a query tile: the mask's grid, and already nine tenths of sgemm's best rate (64 × 128 ×
/// 192 runs at 91 of 103 GFLOP/s).
constexpr std::int64_t query_tile_rows() { return 64; }
/// Keys of a block: fp32 keys and values of DeepSeek's widths are 320 KiB, which leaves room in a
/// 1 MiB L2 cache for the group's queries and sums; two mask tiles.
constexpr std::int64_t key_block() { return 256; }
/// Query tiles that share a block's conversion to fp32. A key costs about 60 cycles to convert and
/// 20 per query row to attend: at 256 rows the conversion is one hundredth.
constexpr std::int64_t max_group_tiles() { return 4; }
/// Items per thread below which groups are made smaller: the last item bounds the idle time.
constexpr std::int64_t items_per_thread() { return 4; }
/// Keys that are converted together; a block's granules are the bits of one word.
constexpr std::int64_t kGranule = 32;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Scratch {
  float* q;                 ///< [group rows, P+R], softmax scale folded in
  float* out;               ///< [group rows, V], not yet divided by `sum`
  float* maximum;           ///< [group rows]
  float* sum;               ///< [group rows]
  float* k;                 ///< [key_block, P+R]
  float* v;                 ///< [key_block, V]
  float* scores;            ///< [query_tile_rows, key_block]
  std::uint32_t* row_mask;  ///< [key_block / 32]

  Scratch(WorkspaceCarver& carver, const AttendProblem& problem) {
    const std::int64_t rows = max_group_tiles() * query_tile_rows();
    const int qk = problem.qk_nope_head_dim + problem.qk_rope_head_dim;
    q = carver.take<float>("attend_q", rows * qk);
    out = carver.take<float>("attend_out", rows * problem.v_head_dim);
    maximum = carver.take<float>("attend_maximum", rows);
    sum = carver.take<float>("attend_sum", rows);
    k = carver.take<float>("attend_k", key_block() * qk);
    v = carver.take<float>("attend_v", key_block() * problem.v_head_dim);
    scores = carver.take<float>("attend_scores", query_tile_rows() * key_block());
    row_mask = carver.take<std::uint32_t>("attend_row_mask", key_block() / 32);
  }
};

struct ReferenceScratch {
  double* out;  ///< [V]
  ReferenceScratch(WorkspaceCarver& carver, const AttendProblem& problem) {
    out = carver.take<double>("attend_reference_out", problem.v_head_dim);
  }
};

void check(const AttendProblem& problem, const AttendCall& call) {
  check_shapes(problem, call);
  const std::int64_t key_rows =
      std::min({call.k_nope.extent(0), call.k_pe.extent(0), call.v.extent(0)});
  const std::int64_t out_rows = std::min(call.running.out.extent(0), call.running.lse.extent(1));
  const bool masked = problem.mode == AttendMode::masked;
  std::int64_t queries = 0, keys = 0;
  for (std::size_t m = 0; m < call.members.size(); ++m) {
    const ChunkMember& member = call.members[m];
    const std::string name = "members[" + std::to_string(m) + "]";
    require(member.query_len >= 0, name + ".query_len", member.query_len, "at least 0");
    require(member.num_keys >= 0, name + ".num_keys", member.num_keys, "at least 0");
    require(member.first_key >= 0, name + ".first_key", member.first_key, "at least 0");
    if (member.query_len == 0) continue;
    require(member.query_start >= 0 &&
                member.query_start + std::int64_t{member.query_len} <= call.q.extent(0),
            name + ".query_start", member.query_start,
            "rows within q's " + std::to_string(call.q.extent(0)));
    require(member.packed_token >= 0 &&
                member.packed_token + std::int64_t{member.query_len} <= out_rows,
            name + ".packed_token", member.packed_token,
            "rows within the running partial's " + std::to_string(out_rows));
    queries += member.query_len;
    if (member.num_keys == 0) continue;
    require(member.key_row >= 0 && member.key_row + std::int64_t{member.num_keys} <= key_rows,
            name + ".key_row", member.key_row,
            "rows within the " + std::to_string(key_rows) + " of k_nope, k_pe and v");
    keys += member.num_keys;
    if (!masked) continue;
    const MaskMember& mask = call.mask.members[m];
    require(
        mask.first_key <= member.first_key && std::int64_t{mask.first_key} + mask.num_keys >=
                                                  std::int64_t{member.first_key} + member.num_keys,
        "mask." + name,
        std::to_string(mask.first_key) + " + " + std::to_string(mask.num_keys) + " keys",
        "bits for the member's keys " + std::to_string(member.first_key) + " + " +
            std::to_string(member.num_keys));
  }
  require(queries <= problem.max_query_tokens, "members", queries,
          "at most the problem's " + std::to_string(problem.max_query_tokens) + " query tokens");
  require(keys <= problem.max_key_rows, "members", keys,
          "at most the problem's " + std::to_string(problem.max_key_rows) + " key rows");
  if (masked && keys > 0) check_mask_arrays(call.mask);
}

/// Writes or merges one row's result; `value(i)` is its normalised output.
template <class Value>
void finish_row(const AttendCall& call, std::int64_t row, std::int64_t head, float lse,
                Value value) {
  float* out = address(call.running.out, row, head, 0);
  float& running_lse = call.running.lse(head, row);
  const std::int64_t stride = call.running.out.stride(2), width = call.running.out.extent(2);
  if (row >= call.merge_row_end) {
    for (std::int64_t i = 0; i < width; ++i) out[i * stride] = value(i);
    running_lse = lse;
  } else if (lse != -kInfinity) {
    const MergeWeights weights = merge_weights(running_lse, lse);
    for (std::int64_t i = 0; i < width; ++i)
      out[i * stride] = merge_value(weights, out[i * stride], value(i));
    running_lse = weights.lse;
  }
}

/// Cuts a member's query rows into tiles that lie within one query tile of the mask each.
class QueryTiling {
 public:
  struct Tile {
    std::int64_t begin, end;  ///< query rows of the member
    std::int64_t mask_tile;
  };

  QueryTiling(const AttendProblem& problem, const AttendCall& call, const ChunkMember& member)
      : query_len_(member.query_len),
        mask_rows_(problem.mode == AttendMode::masked ? call.mask.tile.queries
                                                      : std::max<std::int64_t>(query_len_, 1)),
        per_mask_tile_(ceil_div(mask_rows_, query_tile_rows())) {}

  std::int64_t count() const {
    const std::int64_t whole = query_len_ / mask_rows_;
    return whole * per_mask_tile_ + ceil_div(query_len_ - whole * mask_rows_, query_tile_rows());
  }
  Tile operator[](std::int64_t tile) const {
    const std::int64_t mask_tile = tile / per_mask_tile_;
    const std::int64_t begin = mask_tile * mask_rows_ + (tile % per_mask_tile_) * query_tile_rows();
    const std::int64_t end = std::min(
        {begin + query_tile_rows(), (mask_tile + 1) * mask_rows_, std::int64_t{query_len_}});
    return {begin, end, mask_tile};
  }

 private:
  std::int64_t query_len_, mask_rows_, per_mask_tile_;
};

/// Keys [begin, end), request-local, that a query tile visits in one product.
struct KeyRun {
  std::int64_t begin = 0, end = 0;
};

/// Walks the keys of one query tile in ascending order.
class KeyWalk {
 public:
  KeyWalk() = default;
  /// Every key below `limit`.
  explicit KeyWalk(std::int64_t limit) : limit_(limit) {}
  /// The listed tiles of query tile `tile`.
  KeyWalk(const MaskView& mask, const MaskMember& member, std::int64_t tile)
      : limit_(std::numeric_limits<std::int64_t>::max()),
        ids_(mask.tile_ids + member.tile_offset + tile * member.max_tiles),
        count_(mask.tile_counts[member.tile_count_offset + tile]),
        tile_keys_(mask.tile.keys) {}

  /// The first run of keys at or past `from` and before `to`; empty when there is none.
  KeyRun next(std::int64_t from, std::int64_t to) {
    to = std::min(to, limit_);
    if (ids_ == nullptr) return {from, to};
    while (next_ < count_ && tile_end(next_) <= from) ++next_;
    if (next_ == count_ || tile_begin(next_) >= to) return {};
    const std::int64_t begin = std::max(tile_begin(next_), from);
    while (next_ + 1 < count_ && tile_end(next_) < to && ids_[next_ + 1] == ids_[next_] + 1)
      ++next_;
    return {begin, std::min(tile_end(next_), to)};
  }

 private:
  std::int64_t tile_begin(std::int64_t i) const { return std::int64_t{ids_[i]} * tile_keys_; }
  std::int64_t tile_end(std::int64_t i) const { return tile_begin(i) + tile_keys_; }

  std::int64_t limit_ = 0;
  const std::int32_t* ids_ = nullptr;
  std::int64_t count_ = 0, tile_keys_ = 0, next_ = 0;
};

/// One work item: a group of query tiles of one member and one head.
class Attention {
 public:
  Attention(const AttendProblem& problem, const AttendCall& call, const TileKernels& kernels,
            const Scratch& scratch)
      : call_(call),
        kernels_(kernels),
        scratch_(scratch),
        mode_(problem.mode),
        nope_(problem.qk_nope_head_dim),
        rope_(problem.qk_rope_head_dim),
        qk_(nope_ + rope_),
        value_(problem.v_head_dim) {}

  void run(std::size_t m, std::int64_t head, const QueryTiling& tiling, std::int64_t tile_begin,
           std::int64_t tile_end) {
    member_ = call_.members[m];
    mask_ = mode_ == AttendMode::masked ? &call_.mask.members[m] : nullptr;
    head_ = head;
    const std::int64_t first = member_.first_key;
    std::int64_t last = first + member_.num_keys;
    KeyWalk walks[max_group_tiles()];
    for (std::int64_t t = tile_begin; t < tile_end; ++t) {
      const QueryTiling::Tile tile = tiling[t];
      load_queries(t - tile_begin, tile);
      if (member_.num_keys == 0) continue;
      // Row j sees the keys up to context_len + j: a tile none at or past context_len + its end.
      if (mode_ == AttendMode::causal)
        walks[t - tile_begin] = KeyWalk(member_.context_len + tile.end);
      else if (mode_ == AttendMode::masked)
        walks[t - tile_begin] = KeyWalk(call_.mask, *mask_, tile.mask_tile);
      else
        walks[t - tile_begin] = KeyWalk(last);
    }
    if (mode_ == AttendMode::causal)
      last = std::min(last, member_.context_len + tiling[tile_end - 1].end);

    // Blocks lie on the request's key grid, as the mask's tiles do.
    for (block_ = first / key_block() * key_block(); block_ < last; block_ += key_block()) {
      block_begin_ = std::max(first, block_);
      block_end_ = std::min(last, block_ + key_block());
      ready_ = 0;
      for (std::int64_t t = tile_begin; t < tile_end; ++t) {
        KeyWalk& walk = walks[t - tile_begin];
        for (KeyRun run = walk.next(block_begin_, block_end_); run.begin < run.end;
             run = walk.next(run.end, block_end_)) {
          load_keys(run);
          attend_run(t - tile_begin, tiling[t], run);
        }
      }
    }
    for (std::int64_t t = tile_begin; t < tile_end; ++t) finish(t - tile_begin, tiling[t]);
  }

 private:
  void load_queries(std::int64_t slot, const QueryTiling::Tile& tile) {
    const std::int64_t row0 = slot * query_tile_rows();
    for (std::int64_t j = tile.begin; j < tile.end; ++j) {
      const std::int64_t row = row0 + j - tile.begin;
      kernels_.scale_bf16_to_float(bits(address(call_.q, member_.query_start + j, head_, 0)),
                                   call_.softmax_scale, scratch_.q + row * qk_, qk_);
      std::fill_n(scratch_.out + row * value_, value_, 0.0f);
      scratch_.maximum[row] = -kInfinity;
      scratch_.sum[row] = 0;
    }
  }

  /// Converts what `run` needs and no earlier run of the block has converted. Rows past the
  /// member's end belong to nobody and are never touched.
  void load_keys(const KeyRun& run) {
    for (std::int64_t g = (run.begin - block_) / kGranule; g <= (run.end - 1 - block_) / kGranule;
         ++g) {
      if ((ready_ >> g & 1) != 0) continue;
      ready_ |= std::uint64_t{1} << g;
      const std::int64_t end = std::min(block_ + (g + 1) * kGranule, block_end_);
      for (std::int64_t key = std::max(block_ + g * kGranule, block_begin_); key < end; ++key) {
        const std::int64_t row = member_.key_row + key - member_.first_key;
        float* k = scratch_.k + (key - block_) * qk_;
        kernels_.bf16_to_float(bits(address(call_.k_nope, row, head_, 0)), k, nope_);
        kernels_.bf16_to_float(bits(address(call_.k_pe, row, 0)), k + nope_, rope_);
        kernels_.bf16_to_float(bits(address(call_.v, row, head_, 0)),
                               scratch_.v + (key - block_) * value_, value_);
      }
    }
  }

  void attend_run(std::int64_t slot, const QueryTiling::Tile& tile, const KeyRun& run) {
    const std::int64_t row0 = slot * query_tile_rows(), rows = tile.end - tile.begin;
    const std::int64_t width = run.end - run.begin;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(rows),
                static_cast<blasint>(width), static_cast<blasint>(qk_), 1.0f,
                scratch_.q + row0 * qk_, static_cast<blasint>(qk_),
                scratch_.k + (run.begin - block_) * qk_, static_cast<blasint>(qk_), 0.0f,
                scratch_.scores, static_cast<blasint>(key_block()));
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t j = tile.begin + r;
      std::int64_t visible = width;
      const std::uint32_t* row_mask = nullptr;
      if (mode_ == AttendMode::causal) {
        visible = std::clamp<std::int64_t>(member_.context_len + j + 1 - run.begin, 0, width);
      } else if (mode_ == AttendMode::masked) {
        const std::uint32_t* words = call_.mask.words + mask_->word_offset + j * mask_->row_words;
        for (std::int64_t i = 0; i * 32 < width; ++i)
          scratch_.row_mask[i] = mask_word(words, *mask_, run.begin + i * 32, run.end);
        row_mask = scratch_.row_mask;
      }
      const float factor =
          kernels_.softmax_row(scratch_.scores + r * key_block(), width, visible, row_mask,
                               scratch_.maximum + row0 + r, scratch_.sum + row0 + r);
      if (factor != 1.0f) kernels_.scale(scratch_.out + (row0 + r) * value_, factor, value_);
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<blasint>(rows),
                static_cast<blasint>(value_), static_cast<blasint>(width), 1.0f, scratch_.scores,
                static_cast<blasint>(key_block()), scratch_.v + (run.begin - block_) * value_,
                static_cast<blasint>(value_), 1.0f, scratch_.out + row0 * value_,
                static_cast<blasint>(value_));
  }

  void finish(std::int64_t slot, const QueryTiling::Tile& tile) {
    for (std::int64_t j = tile.begin; j < tile.end; ++j) {
      const std::int64_t row = slot * query_tile_rows() + j - tile.begin;
      const float sum = scratch_.sum[row];
      const float* out = scratch_.out + row * value_;
      const bool empty = sum == 0;
      const float inverse = empty ? 0.0f : 1.0f / sum;
      finish_row(call_, member_.packed_token + j, head_,
                 empty ? -kInfinity : scratch_.maximum[row] + std::log(sum),
                 [&](std::int64_t i) { return empty ? 0.0f : out[i] * inverse; });
    }
  }

  const AttendCall& call_;
  const TileKernels& kernels_;
  const Scratch& scratch_;
  AttendMode mode_;
  std::int64_t nope_, rope_, qk_, value_;
  // The item's.
  ChunkMember member_;
  const MaskMember* mask_ = nullptr;
  std::int64_t head_ = 0;
  // The key block's: where it starts on the grid, the keys of it that exist, converted granules.
  std::int64_t block_ = 0, block_begin_ = 0, block_end_ = 0;
  std::uint64_t ready_ = 0;
};
static_assert(key_block() / kGranule <= 64 && key_block() % kScorePadding == 0);

std::int64_t count_items(const AttendProblem& problem, const AttendCall& call,
                         std::int64_t group_tiles) {
  std::int64_t items = 0;
  for (const ChunkMember& member : call.members)
    items += ceil_div(QueryTiling(problem, call, member).count(), group_tiles);
  return items * call.q.extent(1);
}

template <const TileKernels& (*kKernels)()>
void run_tiled(const AttendProblem& problem, const AttendCall& call, std::span<std::byte> workspace,
               Stream) {
  check(problem, call);
  // A row's arithmetic does not depend on its group, so the group may follow the thread count.
  std::int64_t group_tiles = max_group_tiles();
  while (group_tiles > 1 &&
         count_items(problem, call, group_tiles) < items_per_thread() * omp_get_max_threads())
    group_tiles /= 2;
  const std::int64_t items = count_items(problem, call, group_tiles);
  if (items == 0) return;

  const SingleThreadedBlas one_thread_per_product;
#pragma omp parallel num_threads(scratch_threads <Scratch>(problem, workspace, items))
  {
    const auto scratch = thread_scratch<Scratch>(problem, workspace);
    Attention attention(problem, call, kKernels(), scratch);
    // A thread's items ascend, so its place in the list of members only moves forward.
    std::size_t m = 0;
    std::int64_t member_begin = 0;
#pragma omp for schedule(monotonic : dynamic, 1)
    for (std::int64_t item = 0; item < items; ++item) {
      while (true) {
        const QueryTiling tiling(problem, call, call.members[m]);
        const std::int64_t groups = ceil_div(tiling.count(), group_tiles);
        const std::int64_t index = item - member_begin;
        if (index < groups * call.q.extent(1)) {
          const std::int64_t tile = index % groups * group_tiles;
          attention.run(m, index / groups, tiling, tile,
                        std::min(tile + group_tiles, tiling.count()));
          break;
        }
        member_begin += groups * call.q.extent(1);
        ++m;
      }
    }
  }
}

/// Row by row in fp64: the maximum, then the sums.
void run_reference(const AttendProblem& problem, const AttendCall& call,
                   std::span<std::byte> workspace, Stream) {
  check(problem, call);
  const std::int64_t nope = problem.qk_nope_head_dim, rope = problem.qk_rope_head_dim;
  for (std::size_t m = 0; m < call.members.size(); ++m) {
    const ChunkMember member = call.members[m];
    const std::int64_t items = member.query_len * call.q.extent(1);
    if (items == 0) continue;
#pragma omp parallel num_threads(scratch_threads <ReferenceScratch>(problem, workspace, items))
    {
      const auto scratch = thread_scratch<ReferenceScratch>(problem, workspace);
#pragma omp for schedule(dynamic, 16)
      for (std::int64_t item = 0; item < items; ++item) {
        const std::int64_t j = item / call.q.extent(1), head = item % call.q.extent(1);
        const auto seen = [&](std::int64_t i) {
          const std::int64_t key = std::int64_t{member.first_key} + i;
          if (problem.mode == AttendMode::causal) return key <= member.context_len + j;
          if (problem.mode == AttendMode::dense) return true;
          const MaskMember& mask = call.mask.members[m];
          return mask_word(call.mask.words + mask.word_offset + j * mask.row_words, mask, key,
                           key + 1) != 0;
        };
        const auto score = [&](std::int64_t i) {
          const bfloat16* q = address(call.q, member.query_start + j, head, 0);
          const bfloat16* k_nope = address(call.k_nope, member.key_row + i, head, 0);
          const bfloat16* k_pe = address(call.k_pe, member.key_row + i, 0);
          double dot = 0;
          for (std::int64_t d = 0; d < nope; ++d)
            dot += double{__bfloat162float(q[d])} * double{__bfloat162float(k_nope[d])};
          for (std::int64_t d = 0; d < rope; ++d)
            dot += double{__bfloat162float(q[nope + d])} * double{__bfloat162float(k_pe[d])};
          return dot * double{call.softmax_scale};
        };
        double maximum = -HUGE_VAL, sum = 0;
        for (std::int64_t i = 0; i < member.num_keys; ++i)
          if (seen(i)) maximum = std::max(maximum, score(i));
        std::fill_n(scratch.out, problem.v_head_dim, 0.0);
        for (std::int64_t i = 0; i < member.num_keys; ++i) {
          if (!seen(i)) continue;
          const double weight = std::exp(score(i) - (maximum == -HUGE_VAL ? 0.0 : maximum));
          sum += weight;
          const bfloat16* v = address(call.v, member.key_row + i, head, 0);
          for (int d = 0; d < problem.v_head_dim; ++d)
            scratch.out[d] += weight * double{__bfloat162float(v[d])};
        }
        const bool empty = sum == 0;
        finish_row(call, member.packed_token + j, head,
                   empty ? -kInfinity : static_cast<float>(maximum + std::log(sum)),
                   [&](std::int64_t i) {
                     return empty ? 0.0f : static_cast<float>(scratch.out[i] / sum);
                   });
      }
    }
  }
}

std::string usable(const AttendProblem&) { return ""; }
std::string usable_avx2(const AttendProblem&) { return why_not_avx2_fma(); }

}  // namespace

std::vector<Entry<AttendProblem, AttendCall>> attend_entries() {
  const auto bytes = [](const AttendProblem& p) { return scratch_bytes<Scratch>(p); };
  return {
      {"cpu_avx2", Backend::cpu, "OpenBLAS products, AVX2 softmax, empty mask tiles skipped",
       usable_avx2, bytes, run_tiled<avx2_tile_kernels>},
      {"cpu_baseline", Backend::cpu, "OpenBLAS products, SSE2 softmax, empty mask tiles skipped",
       usable, bytes, run_tiled<baseline_tile_kernels>},
      {"cpu_reference", Backend::cpu, "scalar fp64, a row at a time", usable,
       [](const AttendProblem& p) { return scratch_bytes<ReferenceScratch>(p); }, run_reference}};
}

}  // namespace sparse_mla::cpu
