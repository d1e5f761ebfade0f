// Operation `sparse_mqa` on the CPU: absorbed attention over the selected rows of the cache.
//
// Work item = (token, group of heads). The token's valid slots, in their order, are cut into tiles
// of rows that are gathered to fp32; then S = q'·latentᵀ (sgemm) → online softmax → out += P·latent
// (sgemm). Tiles and product shapes follow from the token's own slots and the head count alone, so
// a token's result does not depend on the batch around it.
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "kernels/common/finished_row.h"
#include "kernels/common/sparse_mqa_checks.h"
#include "kernels/cpu/bf16_bits.h"
#include "kernels/cpu/blas.h"
#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/entries.h"
#include "kernels/cpu/latent_rows.h"
#include "kernels/cpu/thread_scratch.h"
#include "kernels/cpu/tile_kernels.h"
#include "sparse_mla/error.h"

#ifndef NDEBUG
#include <algorithm>
#include <vector>
#endif

namespace sparse_mla::cpu {
namespace {

/// Rows of a gathered tile: 128 × 576 floats are 288 KiB, within an L2 cache together with the
/// group's queries and sums; longer tiles are no faster (sgemm is at its best from 128 on).
constexpr std::int64_t row_tile() { return 128; }
/// Heads of a work item at most: sgemm reaches nine tenths of its best rate at 64 rows (97 % at
/// 128), and 128 heads of a single token still give two threads work for one more gather of its
/// rows.
constexpr std::int64_t head_group() { return 64; }

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::int64_t latent_dim(const SparseMqaProblem& problem) {
  return std::int64_t{problem.kv_lora_rank} + problem.qk_rope_head_dim;
}

struct Scratch {
  float* q;        ///< [head_group, L+R], softmax scale folded in
  float* out;      ///< [head_group, L], not yet divided by `sum`
  float* maximum;  ///< [head_group]
  float* sum;      ///< [head_group]
  float* rows;     ///< [row_tile, L+R]
  float* scores;   ///< [head_group, row_tile]

  Scratch(WorkspaceCarver& carver, const SparseMqaProblem& problem) {
    q = carver.take<float>("sparse_mqa_q", head_group() * latent_dim(problem));
    out = carver.take<float>("sparse_mqa_out", head_group() * problem.kv_lora_rank);
    maximum = carver.take<float>("sparse_mqa_maximum", head_group());
    sum = carver.take<float>("sparse_mqa_sum", head_group());
    rows = carver.take<float>("sparse_mqa_rows", row_tile() * latent_dim(problem));
    scores = carver.take<float>("sparse_mqa_scores", head_group() * row_tile());
  }
};

struct ReferenceScratch {
  double* out;  ///< [L]
  float* row;   ///< [L+R]
  ReferenceScratch(WorkspaceCarver& carver, const SparseMqaProblem& problem) {
    out = carver.take<double>("sparse_mqa_reference_out", problem.kv_lora_rank);
    row = carver.take<float>("sparse_mqa_reference_row", latent_dim(problem));
  }
};

/// Slots of token `t` that are looked at.
std::int64_t slot_count(const SparseMqaCall& call, std::int64_t t) {
  const std::int64_t width = call.slots.extent(1);
  return call.counts == nullptr ? width : std::clamp<std::int64_t>(call.counts[t], 0, width);
}

bool is_valid(const SparseMqaCall& call, std::int64_t slot) {
  return slot >= 0 && slot < call.cache.num_slots();
}

void check(const SparseMqaProblem& problem, const SparseMqaCall& call) {
  check_shapes(problem, call);
  const std::int64_t tokens = call.q.extent(0);
  for (std::int64_t t = 0; call.lse_tokens != nullptr && t < tokens; ++t)
    require(call.lse_tokens[t] >= 0 && call.lse_tokens[t] < call.lse.extent(1),
            "lse_tokens[" + std::to_string(t) + "]", call.lse_tokens[t],
            "a column below " + std::to_string(call.lse.extent(1)));
#ifndef NDEBUG
  std::vector<std::int32_t> sorted;
  for (std::int64_t t = 0; t < tokens; ++t) {
    sorted.clear();
    for (std::int64_t i = 0; i < slot_count(call, t); ++i)
      if (is_valid(call, call.slots(t, i))) sorted.push_back(call.slots(t, i));
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    require(twice == sorted.end(), "slots", "slot twice for token " + std::to_string(t),
            "distinct slots");
  }
#endif
}

float sink_factor(const SparseMqaCall& call, std::int64_t head, float lse) {
  if (call.sink.data_handle() == nullptr) return 1.0f;
  return sparse_mla::sink_factor(call.sink(head), lse);
}

std::int64_t lse_column(const SparseMqaCall& call, std::int64_t t) {
  return call.lse_tokens == nullptr ? t : call.lse_tokens[t];
}

class Attention {
 public:
  Attention(const SparseMqaProblem& problem, const SparseMqaCall& call, const TileKernels& kernels,
            const Scratch& scratch)
      : call_(call),
        kernels_(kernels),
        scratch_(scratch),
        cached_(call.cache, problem.kv_lora_rank, problem.qk_rope_head_dim, kernels),
        latent_(latent_dim(problem)),
        lora_(problem.kv_lora_rank) {}

  /// Heads [head_begin, head_end) of token t.
  void run(std::int64_t t, std::int64_t head_begin, std::int64_t head_end) {
    const std::int64_t heads = head_end - head_begin;
    for (std::int64_t h = 0; h < heads; ++h) {
      kernels_.scale_bf16_to_float(bits(address(call_.q, t, head_begin + h, 0)),
                                   call_.softmax_scale, scratch_.q + h * latent_, latent_);
      scratch_.maximum[h] = -kInfinity;
      scratch_.sum[h] = 0;
    }
    std::fill_n(scratch_.out, heads * lora_, 0.0f);

    std::int64_t gathered = 0;
    const std::int64_t count = slot_count(call_, t);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t slot = call_.slots(t, i);
      if (!is_valid(call_, slot)) continue;
      cached_.read(slot, scratch_.rows + gathered * latent_);
      if (++gathered == row_tile()) {
        attend_tile(heads, gathered);
        gathered = 0;
      }
    }
    if (gathered > 0) attend_tile(heads, gathered);

    for (std::int64_t h = 0; h < heads; ++h) {
      const bool empty = scratch_.sum[h] == 0;
      const float lse = empty ? -kInfinity : scratch_.maximum[h] + std::log(scratch_.sum[h]);
      float* out = scratch_.out + h * lora_;
      if (!empty)
        kernels_.scale(out, sink_factor(call_, head_begin + h, lse) / scratch_.sum[h], lora_);
      kernels_.float_to_bf16(out, bits(address(call_.out, t, head_begin + h, 0)), lora_);
      call_.lse(head_begin + h, lse_column(call_, t)) = lse;
    }
  }

 private:
  void attend_tile(std::int64_t heads, std::int64_t rows) {
    const auto m = static_cast<blasint>(heads), n = static_cast<blasint>(rows);
    const auto latent = static_cast<blasint>(latent_), lora = static_cast<blasint>(lora_);
    const auto score_stride = static_cast<blasint>(row_tile());
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, latent, 1.0f, scratch_.q, latent,
                scratch_.rows, latent, 0.0f, scratch_.scores, score_stride);
    for (std::int64_t h = 0; h < heads; ++h) {
      const float factor = kernels_.softmax_row(scratch_.scores + h * row_tile(), rows, rows,
                                                nullptr, scratch_.maximum + h, scratch_.sum + h);
      if (factor != 1.0f) kernels_.scale(scratch_.out + h * lora_, factor, lora_);
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, lora, n, 1.0f, scratch_.scores,
                score_stride, scratch_.rows, latent, 1.0f, scratch_.out, lora);
  }

  const SparseMqaCall& call_;
  const TileKernels& kernels_;
  const Scratch& scratch_;
  LatentRows cached_;
  std::int64_t latent_, lora_;
};
static_assert(row_tile() % kScorePadding == 0);

template <const TileKernels& (*kKernels)()>
void run_tiled(const SparseMqaProblem& problem, const SparseMqaCall& call,
               std::span<std::byte> workspace, Stream) {
  check(problem, call);
  const std::int64_t groups = (problem.num_heads + head_group() - 1) / head_group();
  const std::int64_t group = (problem.num_heads + groups - 1) / groups;  // of even sizes
  const std::int64_t items = call.q.extent(0) * groups;
  if (items == 0) return;

  const SingleThreadedBlas one_thread_per_product;
#pragma omp parallel num_threads(scratch_threads <Scratch>(problem, workspace, items))
  {
    const auto scratch = thread_scratch<Scratch>(problem, workspace);
    Attention attention(problem, call, kKernels(), scratch);
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t item = 0; item < items; ++item) {
      const std::int64_t head = item % groups * group;
      attention.run(item / groups, head, std::min<std::int64_t>(head + group, problem.num_heads));
    }
  }
}

/// Head by head in fp64: the maximum, then the sums.
void run_reference(const SparseMqaProblem& problem, const SparseMqaCall& call,
                   std::span<std::byte> workspace, Stream) {
  check(problem, call);
  const std::int64_t latent = latent_dim(problem), heads = problem.num_heads;
  const std::int64_t items = call.q.extent(0) * heads;
  if (items == 0) return;
  const ScalarLatentRows cached(call.cache, problem.kv_lora_rank, problem.qk_rope_head_dim);
#pragma omp parallel num_threads(scratch_threads <ReferenceScratch>(problem, workspace, items))
  {
    const auto scratch = thread_scratch<ReferenceScratch>(problem, workspace);
#pragma omp for schedule(dynamic, 16)
    for (std::int64_t item = 0; item < items; ++item) {
      const std::int64_t t = item / heads, head = item % heads, count = slot_count(call, t);
      const bfloat16* q = address(call.q, t, head, 0);
      // Reads the row too.
      const auto score = [&](std::int64_t slot) {
        cached.read(slot, scratch.row);
        double dot = 0;
        for (std::int64_t d = 0; d < latent; ++d)
          dot += double{__bfloat162float(q[d])} * double{scratch.row[d]};
        return dot * double{call.softmax_scale};
      };
      double maximum = -HUGE_VAL, sum = 0;
      for (std::int64_t i = 0; i < count; ++i)
        if (is_valid(call, call.slots(t, i))) maximum = std::max(maximum, score(call.slots(t, i)));
      std::fill_n(scratch.out, problem.kv_lora_rank, 0.0);
      for (std::int64_t i = 0; i < count; ++i) {
        if (!is_valid(call, call.slots(t, i))) continue;
        const double weight =
            std::exp(score(call.slots(t, i)) - (maximum == -HUGE_VAL ? 0.0 : maximum));
        sum += weight;
        for (int d = 0; d < problem.kv_lora_rank; ++d)
          scratch.out[d] += weight * double{scratch.row[d]};
      }
      const bool empty = sum == 0;
      const float lse = empty ? -kInfinity : static_cast<float>(maximum + std::log(sum));
      const float factor = sink_factor(call, head, lse);
      for (int d = 0; d < problem.kv_lora_rank; ++d)
        call.out(t, head, d) =
            __float2bfloat16_rn(empty ? 0.0f : factor * static_cast<float>(scratch.out[d] / sum));
      call.lse(head, lse_column(call, t)) = lse;
    }
  }
}

std::string usable(const SparseMqaProblem&) { return ""; }
std::string usable_avx2(const SparseMqaProblem&) { return why_not_avx2_fma(); }

}  // namespace

std::vector<Entry<SparseMqaProblem, SparseMqaCall>> sparse_mqa_entries() {
  const auto bytes = [](const SparseMqaProblem& p) { return scratch_bytes<Scratch>(p); };
  return {{"cpu_avx2", Backend::cpu, "gathered row tiles, OpenBLAS products, AVX2 softmax",
           usable_avx2, bytes, run_tiled<avx2_tile_kernels>},
          {"cpu_baseline", Backend::cpu, "gathered row tiles, OpenBLAS products, SSE2 softmax",
           usable, bytes, run_tiled<baseline_tile_kernels>},
          {"cpu_reference", Backend::cpu, "scalar fp64, a head at a time", usable,
           [](const SparseMqaProblem& p) { return scratch_bytes<ReferenceScratch>(p); },
           run_reference}};
}

}  // namespace sparse_mla::cpu
