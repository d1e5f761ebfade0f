// Operations `up_project`, `absorb_query` and `project_value` on the CPU: products with kv_b_proj.
//
// up_project: work item = (tile of rows, group of heads), one sgemm per head.
// absorb_query, project_value: work item = (head, share of the tokens), the head's weights packed
// into panels once. They stand on either side of sparse MQA and, like it, give a token the same
// bits in whatever batch it comes; BLAS products of different heights do not promise that, panel
// products do.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "kernels/common/ceil_div.h"
#include "kernels/common/finished_row.h"
#include "kernels/common/projection_checks.h"
#include "kernels/cpu/bf16_bits.h"
#include "kernels/cpu/blas.h"
#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/entries.h"
#include "kernels/cpu/thread_scratch.h"
#include "kernels/cpu/tile_kernels.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cpu {
namespace {

/// Rows of an up-projected tile: converting a head's weights to fp32 costs as much as multiplying
/// about four rows, a hundredth at 256.
constexpr std::int64_t row_tile() { return 256; }
/// Heads that share the conversion of a tile's latent rows, for the same reason.
constexpr std::int64_t head_group() { return 4; }
/// Tokens that are converted and multiplied at a time: 64 × 512 floats are 128 KiB.
constexpr std::int64_t token_tile() { return 64; }

std::int64_t whole_panels(std::int64_t columns) { return panel_elements(columns, 1); }

void check_tokens(std::span<const std::int32_t> tokens, std::int64_t num_tokens) {
  for (std::size_t i = 0; i < tokens.size(); ++i)
    require(tokens[i] >= 0 && tokens[i] < num_tokens, "tokens[" + std::to_string(i) + "]",
            tokens[i], "a token below " + std::to_string(num_tokens));
}

// ---- up_project

struct UpProjectScratch {
  float* latent;   ///< [row_tile, L]
  float* weights;  ///< [P+V, L]
  float* kv;       ///< [row_tile, P+V]

  UpProjectScratch(WorkspaceCarver& carver, const UpProjectProblem& problem) {
    latent = carver.take<float>("up_project_latent", row_tile() * problem.kv_lora_rank);
    weights = carver.take<float>("up_project_weights",
                                 std::int64_t{problem.kv_head_dim} * problem.kv_lora_rank);
    kv = carver.take<float>("up_project_kv", row_tile() * problem.kv_head_dim);
  }
};

template <const TileKernels& (*kKernels)()>
void run_up_project(const UpProjectProblem& problem, const UpProjectCall& call,
                    std::span<std::byte> workspace, Stream) {
  check_shapes(problem, call);
  const std::int64_t rows = call.kv.extent(0), heads = call.kv.extent(1);
  const std::int64_t lora = problem.kv_lora_rank, width = problem.kv_head_dim;
  const std::int64_t groups = ceil_div(heads, head_group());
  const std::int64_t items = ceil_div(rows, row_tile()) * groups;
  if (items == 0) return;

  const TileKernels& kernels = kKernels();
  const SingleThreadedBlas one_thread_per_product;
#pragma omp parallel num_threads(scratch_threads <UpProjectScratch>(problem, workspace, items))
  {
    const auto scratch = thread_scratch<UpProjectScratch>(problem, workspace);
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t item = 0; item < items; ++item) {
      const std::int64_t row0 = item / groups * row_tile(), head0 = item % groups * head_group();
      const std::int64_t count = std::min(row_tile(), rows - row0);
      for (std::int64_t r = 0; r < count; ++r)
        kernels.bf16_to_float(bits(address(call.latent, row0 + r, 0)), scratch.latent + r * lora,
                              lora);
      for (std::int64_t head = head0; head < std::min(head0 + head_group(), heads); ++head) {
        for (std::int64_t i = 0; i < width; ++i)
          kernels.bf16_to_float(bits(address(call.kv_b_proj, head, i, 0)),
                                scratch.weights + i * lora, lora);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(count),
                    static_cast<blasint>(width), static_cast<blasint>(lora), call.latent_scale,
                    scratch.latent, static_cast<blasint>(lora), scratch.weights,
                    static_cast<blasint>(lora), 0.0f, scratch.kv, static_cast<blasint>(width));
        for (std::int64_t r = 0; r < count; ++r)
          kernels.float_to_bf16(scratch.kv + r * width, bits(address(call.kv, row0 + r, head, 0)),
                                width);
      }
    }
  }
}

void run_up_project_reference(const UpProjectProblem& problem, const UpProjectCall& call,
                              std::span<std::byte>, Stream) {
  check_shapes(problem, call);
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < call.kv.extent(0); ++row) {
    for (std::int64_t head = 0; head < call.kv.extent(1); ++head) {
      for (std::int64_t i = 0; i < problem.kv_head_dim; ++i) {
        double sum = 0;
        for (std::int64_t l = 0; l < problem.kv_lora_rank; ++l)
          sum += double{__bfloat162float(call.latent(row, l))} *
                 double{__bfloat162float(call.kv_b_proj(head, i, l))};
        call.kv(row, head, i) = __double2bfloat16(sum * double{call.latent_scale});
      }
    }
  }
}

// ---- products of one head's token rows with its packed weights

struct TokenScratch {
  float* weights;  ///< panels of one head
  float* in;       ///< [token_tile, depth]
  float* out;      ///< [token_tile, columns padded to whole panels]

  TokenScratch(WorkspaceCarver& carver, std::int64_t depth, std::int64_t columns) {
    weights = carver.take<float>("projection_weights", panel_elements(columns, depth));
    in = carver.take<float>("projection_in", token_tile() * depth);
    out = carver.take<float>("projection_out", token_tile() * whole_panels(columns));
  }
  TokenScratch(WorkspaceCarver& carver, const AbsorbQueryProblem& problem)
      : TokenScratch(carver, problem.qk_nope_head_dim, problem.kv_lora_rank) {}
  TokenScratch(WorkspaceCarver& carver, const ProjectValueProblem& problem)
      : TokenScratch(carver, problem.kv_lora_rank, problem.v_head_dim) {}
};

/// For every head: pack(head, weights), then over tiles of its tokens: store(i, head, row) takes
/// row [columns] = in_row(i, head)[0, depth) · weights. Tokens are shared out only while heads
/// alone leave threads without work.
template <class Problem, class Pack, class InRow, class Store>
void project_tokens(const Problem& problem, const TileKernels& kernels,
                    std::span<std::byte> workspace, std::int64_t tokens, std::int64_t heads,
                    std::int64_t depth, std::int64_t columns, Pack pack, InRow in_row,
                    Store store) {
  if (tokens == 0 || heads == 0) return;
  const std::int64_t shares =
      std::min(ceil_div(omp_get_max_threads(), heads), ceil_div(tokens, token_tile()));
  const std::int64_t share = ceil_div(tokens, shares), items = heads * shares;
  const std::int64_t out_stride = whole_panels(columns);
#pragma omp parallel num_threads(scratch_threads <TokenScratch>(problem, workspace, items))
  {
    const auto scratch = thread_scratch<TokenScratch>(problem, workspace);
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t item = 0; item < items; ++item) {
      const std::int64_t head = item / shares, begin = item % shares * share;
      const std::int64_t end = std::min(begin + share, tokens);
      if (begin >= end) continue;
      pack(head, scratch.weights);
      for (std::int64_t first = begin; first < end; first += token_tile()) {
        const std::int64_t count = std::min(token_tile(), end - first);
        for (std::int64_t i = 0; i < count; ++i)
          kernels.bf16_to_float(in_row(first + i, head), scratch.in + i * depth, depth);
        kernels.multiply_panels(scratch.in, depth, count, scratch.weights, columns, depth,
                                scratch.out, out_stride);
        for (std::int64_t i = 0; i < count; ++i)
          store(first + i, head, scratch.out + i * out_stride);
      }
    }
  }
}

// ---- absorb_query

void check(const AbsorbQueryProblem& problem, const AbsorbQueryCall& call) {
  check_shapes(problem, call);
  check_tokens(call.tokens, call.q.extent(0));
}

/// q_pe goes along unchanged.
void copy_rope(const AbsorbQueryProblem& problem, const AbsorbQueryCall& call) {
  const auto tokens = static_cast<std::int64_t>(call.tokens.size());
  for (std::int64_t i = 0; i < tokens; ++i)
    for (std::int64_t head = 0; head < problem.num_heads; ++head)
      std::copy_n(address(call.q, call.tokens[i], head, problem.qk_nope_head_dim),
                  problem.qk_rope_head_dim, address(call.absorbed, i, head, problem.kv_lora_rank));
}

template <const TileKernels& (*kKernels)()>
void run_absorb_query(const AbsorbQueryProblem& problem, const AbsorbQueryCall& call,
                      std::span<std::byte> workspace, Stream) {
  check(problem, call);
  const TileKernels& kernels = kKernels();
  const std::int64_t nope = problem.qk_nope_head_dim, lora = problem.kv_lora_rank;
  project_tokens(
      problem, kernels, workspace, static_cast<std::int64_t>(call.tokens.size()), problem.num_heads,
      nope, lora,
      [&](std::int64_t head, float* weights) {
        kernels.pack_rows_bf16(bits(address(call.kv_b_proj, head, 0, 0)), call.kv_b_proj.stride(1),
                               lora, nope, weights);
      },
      [&](std::int64_t i, std::int64_t head) {
        return bits(address(call.q, call.tokens[i], head, 0));
      },
      [&](std::int64_t i, std::int64_t head, const float* row) {
        kernels.float_to_bf16(row, bits(address(call.absorbed, i, head, 0)), lora);
      });
  copy_rope(problem, call);
}

void run_absorb_query_reference(const AbsorbQueryProblem& problem, const AbsorbQueryCall& call,
                                std::span<std::byte>, Stream) {
  check(problem, call);
  const auto tokens = static_cast<std::int64_t>(call.tokens.size());
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < tokens; ++i) {
    for (std::int64_t head = 0; head < problem.num_heads; ++head) {
      for (std::int64_t l = 0; l < problem.kv_lora_rank; ++l) {
        double sum = 0;
        for (std::int64_t d = 0; d < problem.qk_nope_head_dim; ++d)
          sum += double{__bfloat162float(call.q(call.tokens[i], head, d))} *
                 double{__bfloat162float(call.kv_b_proj(head, d, l))};
        call.absorbed(i, head, l) = __double2bfloat16(sum);
      }
    }
  }
  copy_rope(problem, call);
}

// ---- project_value

void check(const ProjectValueProblem& problem, const ProjectValueCall& call) {
  check_shapes(problem, call);
  check_tokens(call.tokens,
               problem.output == OutputType::bf16 ? call.out.extent(0) : call.out_fp8.extent(0));
}

/// Element d of token i's finished row.
void store_value(const ProjectValueProblem& problem, const ProjectValueCall& call, std::int64_t i,
                 std::int64_t head, std::int64_t d, float value) {
  if (problem.output == OutputType::fp8)
    call.out_fp8(call.tokens[i], head, d) = quantise_output(value, call.out_scale);
  else
    call.out(call.tokens[i], head, d) = __float2bfloat16_rn(value);
}

template <const TileKernels& (*kKernels)()>
void run_project_value(const ProjectValueProblem& problem, const ProjectValueCall& call,
                       std::span<std::byte> workspace, Stream) {
  check(problem, call);
  const TileKernels& kernels = kKernels();
  const std::int64_t value = problem.v_head_dim, lora = problem.kv_lora_rank;
  const std::int64_t first_row = call.kv_b_proj.extent(1) - value;
  project_tokens(
      problem, kernels, workspace, static_cast<std::int64_t>(call.tokens.size()), problem.num_heads,
      lora, value,
      [&](std::int64_t head, float* weights) {
        kernels.pack_columns_bf16(bits(address(call.kv_b_proj, head, first_row, 0)),
                                  call.kv_b_proj.stride(1), value, lora, weights);
      },
      [&](std::int64_t i, std::int64_t head) { return bits(address(call.latent_out, i, head, 0)); },
      [&](std::int64_t i, std::int64_t head, const float* row) {
        if (problem.output == OutputType::bf16)
          return kernels.float_to_bf16(row, bits(address(call.out, call.tokens[i], head, 0)),
                                       value);
        for (std::int64_t d = 0; d < value; ++d) store_value(problem, call, i, head, d, row[d]);
      });
}

void run_project_value_reference(const ProjectValueProblem& problem, const ProjectValueCall& call,
                                 std::span<std::byte>, Stream) {
  check(problem, call);
  const auto tokens = static_cast<std::int64_t>(call.tokens.size());
  const std::int64_t first_row = call.kv_b_proj.extent(1) - problem.v_head_dim;
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < tokens; ++i) {
    for (std::int64_t head = 0; head < problem.num_heads; ++head) {
      for (std::int64_t d = 0; d < problem.v_head_dim; ++d) {
        double sum = 0;
        for (std::int64_t l = 0; l < problem.kv_lora_rank; ++l)
          sum += double{__bfloat162float(call.latent_out(i, head, l))} *
                 double{__bfloat162float(call.kv_b_proj(head, first_row + d, l))};
        store_value(problem, call, i, head, d, static_cast<float>(sum));
      }
    }
  }
}

template <class Problem>
std::string usable(const Problem&) {
  return "";
}
template <class Problem>
std::string usable_avx2(const Problem&) {
  return why_not_avx2_fma();
}
template <class Problem>
std::size_t no_scratch(const Problem&) {
  return 0;
}

}  // namespace

std::vector<Entry<UpProjectProblem, UpProjectCall>> up_project_entries() {
  return {
      {"cpu_avx2", Backend::cpu, "OpenBLAS products, AVX2 conversions", usable_avx2,
       scratch_bytes<UpProjectScratch>, run_up_project<avx2_tile_kernels>},
      {"cpu_baseline", Backend::cpu, "OpenBLAS products, SSE2 conversions", usable,
       scratch_bytes<UpProjectScratch>, run_up_project<baseline_tile_kernels>},
      {"cpu_reference", Backend::cpu, "scalar fp64", usable, no_scratch, run_up_project_reference}};
}

std::vector<Entry<AbsorbQueryProblem, AbsorbQueryCall>> absorb_query_entries() {
  return {{"cpu_avx2", Backend::cpu, "AVX2 register tiles over packed weights", usable_avx2,
           scratch_bytes<TokenScratch>, run_absorb_query<avx2_tile_kernels>},
          {"cpu_baseline", Backend::cpu, "SSE2 register tiles over packed weights", usable,
           scratch_bytes<TokenScratch>, run_absorb_query<baseline_tile_kernels>},
          {"cpu_reference", Backend::cpu, "scalar fp64", usable, no_scratch,
           run_absorb_query_reference}};
}

std::vector<Entry<ProjectValueProblem, ProjectValueCall>> project_value_entries() {
  return {{"cpu_avx2", Backend::cpu, "AVX2 register tiles over packed weights", usable_avx2,
           scratch_bytes<TokenScratch>, run_project_value<avx2_tile_kernels>},
          {"cpu_baseline", Backend::cpu, "SSE2 register tiles over packed weights", usable,
           scratch_bytes<TokenScratch>, run_project_value<baseline_tile_kernels>},
          {"cpu_reference", Backend::cpu, "scalar fp64", usable, no_scratch,
           run_project_value_reference}};
}

}  // namespace sparse_mla::cpu
