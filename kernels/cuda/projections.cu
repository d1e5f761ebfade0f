// Operations `up_project`, `absorb_query` and `project_value` on CUDA: products with kv_b_proj.
//
// "cuda_cublaslt": batched products over the heads. Rows named by `tokens` are gathered into the
// workspace before (queries) or scattered from it behind (values), a slice of the tokens at a time.
// Where pointers or strides are not multiples of 16 bytes it takes the other entry's kernel.
// "cuda_rows": one tiled fp32 kernel for any strides, which gathers and scatters by itself.
//
// Sums run along the depth in one sequence in both, so that a token's result does not depend on the
// batch around it.
#include <algorithm>
#include <cstdint>
#include <string>

#include "kernels/common/ceil_div.h"
#include "kernels/common/finished_row.h"
#include "kernels/common/projection_checks.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {
namespace {

/// Tokens that are gathered or scattered at a time: 1,024 × 128 heads fill the largest products'
/// tiles many times over, and their values are 64 MiB of fp32.
constexpr std::int64_t token_slice() { return 1024; }

// ---- the kernel for any strides

/// C[h][i, j] = alpha · Σ_k A[h][i, k] · W[h][j, k]; strides in elements. Rows of A and of C are
/// those that `a_rows` and `c_rows` name, or 0, 1, …; one outside its tensor is skipped.
template <class Out>
struct RowsProduct {
  const bfloat16* a;  ///< [heads, rows, depth]
  std::int64_t a_head_stride, a_row_stride, a_row_end;
  const std::int32_t* a_rows;  ///< [rows] or null
  const bfloat16* w;           ///< [heads, columns, depth]
  std::int64_t w_head_stride, w_column_stride, w_depth_stride;
  Out* c;  ///< [heads, rows, columns]
  std::int64_t c_head_stride, c_row_stride, c_row_end;
  const std::int32_t* c_rows;  ///< [rows] or null
  std::int64_t rows, columns, depth;
  float alpha, out_scale;
};

constexpr int kRowsTile = 64, kDepthTile = 16, kRowsThreads = 256;

__device__ bfloat16 finish(float value, float, bfloat16*) { return __float2bfloat16_rn(value); }
__device__ fp8_e4m3 finish(float value, float scale, fp8_e4m3*) {
  return quantise_output(value, scale);
}

/// Row `i` of a tensor of `end` rows, or −1.
__device__ std::int64_t named_row(const std::int32_t* names, std::int64_t i, std::int64_t end) {
  const std::int64_t row = names == nullptr ? i : names[i];
  return row >= 0 && row < end ? row : -1;
}

// CTA = 64 rows × 64 columns of one head, a thread 4 × 4 of them; tiles of 16 along the depth go
// through shared memory as fp32, the next one's loads behind two barriers.
template <class Out>
__global__ void __launch_bounds__(kRowsThreads) rows_product_kernel(RowsProduct<Out> p) {
  __shared__ float a_tile[kDepthTile][kRowsTile + 4], w_tile[kDepthTile][kRowsTile + 4];
  const int thread = static_cast<int>(threadIdx.x), tx = thread % 16, ty = thread / 16;
  const std::int64_t row0 = std::int64_t{blockIdx.x} * kRowsTile;
  const std::int64_t column0 = std::int64_t{blockIdx.y} * kRowsTile;
  const std::int64_t head = blockIdx.z;

  float sum[4][4] = {};
  for (std::int64_t k0 = 0; k0 < p.depth; k0 += kDepthTile) {
    for (int i = thread; i < kRowsTile * kDepthTile; i += kRowsThreads) {
      const int k = i % kDepthTile, r = i / kDepthTile;
      float value = 0;
      if (k0 + k < p.depth && row0 + r < p.rows) {
        const std::int64_t row = named_row(p.a_rows, row0 + r, p.a_row_end);
        if (row >= 0)
          value = __bfloat162float(p.a[head * p.a_head_stride + row * p.a_row_stride + (k0 + k)]);
      }
      a_tile[k][r] = value;
    }
    for (int i = thread; i < kRowsTile * kDepthTile; i += kRowsThreads) {
      // Neighbouring threads read along the axis whose elements lie side by side.
      const bool along_depth = p.w_depth_stride == 1;
      const int k = along_depth ? i % kDepthTile : i / kRowsTile;
      const int c = along_depth ? i / kDepthTile : i % kRowsTile;
      float value = 0;
      if (k0 + k < p.depth && column0 + c < p.columns)
        value = __bfloat162float(p.w[head * p.w_head_stride + (column0 + c) * p.w_column_stride +
                                     (k0 + k) * p.w_depth_stride]);
      w_tile[k][c] = value;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepthTile; ++k) {
      float a[4], w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = a_tile[k][ty * 4 + i];
        w[i] = w_tile[k][tx + 16 * i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(a[i], w[j], sum[i][j]);
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::int64_t r = row0 + ty * 4 + i;
    if (r >= p.rows || named_row(p.a_rows, r, p.a_row_end) < 0) continue;
    const std::int64_t row = named_row(p.c_rows, r, p.c_row_end);
    if (row < 0) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t column = column0 + tx + 16 * j;
      if (column < p.columns)
        p.c[head * p.c_head_stride + row * p.c_row_stride + column] =
            finish(sum[i][j] * p.alpha, p.out_scale, p.c);
    }
  }
}

template <class Out>
void launch_rows_product(const RowsProduct<Out>& p, std::int64_t heads, Stream stream) {
  if (p.rows == 0 || p.columns == 0 || heads == 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.rows, kRowsTile)),
                  static_cast<unsigned>(ceil_div(p.columns, kRowsTile)),
                  static_cast<unsigned>(heads));
  rows_product_kernel<<<grid, kRowsThreads, 0, stream>>>(p);
  check_launch("rows_product_kernel");
}

// ---- copies

/// Grid of a copy: a thread per element and CTAs of 256, as many as keep a device busy; the kernels
/// loop over the rest.
unsigned copy_grid(std::int64_t elements) {
  return static_cast<unsigned>(std::min<std::int64_t>(ceil_div(elements, 256), 1 << 16));
}

// absorbed[i, h, L…] = q_pe and, with `nope`, nope[i, h, :] = q_nope of token tokens[i]. `Vector`
// is what is copied at a time: 8 elements where everything is aligned, else one.
template <class Vector>
__global__ void split_query_kernel(View3<const bfloat16> q,     // [num_tokens, heads, P+R]
                                   const std::int32_t* tokens,  // [count]
                                   std::int64_t count, int nope_dim,
                                   bfloat16* nope,            // [count, heads, P] or null
                                   View3<bfloat16> absorbed,  // [count, heads, L+R]
                                   int lora) {
  constexpr int kWidth = sizeof(Vector) / sizeof(bfloat16);
  const std::int64_t heads = q.extent(1);
  const int first = nope == nullptr ? nope_dim : 0;
  const std::int64_t pieces = (q.extent(2) - first) / kWidth;  // of a head's row
  const std::int64_t total = count * heads * pieces;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total; i += step) {
    const std::int64_t piece = i % pieces, head = i / pieces % heads, row = i / (pieces * heads);
    const std::int64_t token = tokens[row];
    if (token < 0 || token >= q.extent(0)) continue;
    const std::int64_t d = first + piece * kWidth;
    bfloat16* to = d < nope_dim ? nope + (row * heads + head) * nope_dim + d
                                : address(absorbed, row, head, lora + (d - nope_dim));
    *reinterpret_cast<Vector*>(to) = *reinterpret_cast<const Vector*>(address(q, token, head, d));
  }
}

/// Tokens [begin, begin + count): the rope part, and the other into `nope` unless it is null.
void split_query(const AbsorbQueryProblem& problem, const AbsorbQueryCall& call, bfloat16* nope,
                 std::int64_t begin, std::int64_t count, Stream stream) {
  const int nope_dim = problem.qk_nope_head_dim, rope = problem.qk_rope_head_dim;
  const std::int64_t elements =
      count * problem.num_heads * (rope + (nope == nullptr ? 0 : nope_dim));
  if (elements == 0) return;
  View3<bfloat16> absorbed(address(call.absorbed, begin, 0, 0), call.absorbed.mapping());
  const std::int32_t* tokens = call.tokens.data() + begin;
  const bool vectors = aligned_rows(call.q, 16) && aligned_rows(absorbed, 16) &&
                       nope_dim % 8 == 0 && rope % 8 == 0 && problem.kv_lora_rank % 8 == 0;
  if (vectors)
    split_query_kernel<uint4><<<copy_grid(elements / 8), 256, 0, stream>>>(
        call.q, tokens, count, nope_dim, nope, absorbed, problem.kv_lora_rank);
  else
    split_query_kernel<bfloat16><<<copy_grid(elements), 256, 0, stream>>>(
        call.q, tokens, count, nope_dim, nope, absorbed, problem.kv_lora_rank);
  check_launch("split_query_kernel");
}

// out[tokens[i], h, :] = values[i, h, :], rounded once. Reads run along the row.
template <class Out>
__global__ void scatter_values_kernel(const float* values,         // [count, heads, V]
                                      const std::int32_t* tokens,  // [count]
                                      std::int64_t count,
                                      View3<Out> out,  // [num_tokens, heads, V]
                                      float out_scale) {
  const std::int64_t heads = out.extent(1), width = out.extent(2), total = count * heads * width;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total; i += step) {
    const std::int64_t d = i % width, head = i / width % heads;
    const std::int64_t token = tokens[i / (width * heads)];
    if (token < 0 || token >= out.extent(0)) continue;
    Out* to = address(out, token, head, d);
    *to = finish(values[i], out_scale, to);
  }
}

template <class Out>
void scatter_values(const float* values, const std::int32_t* tokens, std::int64_t count,
                    const View3<Out>& out, float out_scale, Stream stream) {
  const std::int64_t elements = count * out.extent(1) * out.extent(2);
  if (elements == 0) return;
  scatter_values_kernel<<<copy_grid(elements), 256, 0, stream>>>(values, tokens, count, out,
                                                                 out_scale);
  check_launch("scatter_values_kernel");
}

// ---- up_project

void run_up_project_rows(const UpProjectProblem& problem, const UpProjectCall& call,
                         std::span<std::byte>, Stream stream) {
  check_shapes(problem, call);
  RowsProduct<bfloat16> p{};
  p.a = call.latent.data_handle();
  p.a_row_stride = call.latent.stride(0);
  p.w = call.kv_b_proj.data_handle();
  p.w_head_stride = call.kv_b_proj.stride(0);
  p.w_column_stride = call.kv_b_proj.stride(1);
  p.w_depth_stride = 1;
  p.c = call.kv.data_handle();
  p.c_head_stride = call.kv.stride(1);
  p.c_row_stride = call.kv.stride(0);
  p.rows = p.a_row_end = p.c_row_end = call.kv.extent(0);
  p.columns = problem.kv_head_dim;
  p.depth = problem.kv_lora_rank;
  p.alpha = call.latent_scale;
  launch_rows_product(p, call.kv.extent(1), stream);
}

/// All heads at once, which lie behind one another in most memory: a single product.
BlasProduct kind_of(const UpProjectProblem& problem) {
  BlasProduct p;
  p.max_rows = problem.max_rows;
  p.columns = std::int64_t{problem.num_heads} * problem.kv_head_dim;
  p.depth = problem.kv_lora_rank;
  return p;
}

void run_up_project(const UpProjectProblem& problem, const UpProjectCall& call,
                    std::span<std::byte> workspace, Stream stream) {
  check_shapes(problem, call);
  const std::int64_t heads = call.kv.extent(1), width = problem.kv_head_dim;
  BlasProduct p = kind_of(problem);
  p.rows = call.kv.extent(0);
  p.alpha = call.latent_scale;
  p.a = call.latent.data_handle();
  p.b = call.kv_b_proj.data_handle();
  p.c = call.kv.data_handle();
  p.a_layout = {call.latent.stride(0), 0};
  p.b_layout = {call.kv_b_proj.stride(1), call.kv_b_proj.stride(0)};
  p.c_layout = {call.kv.stride(0), call.kv.stride(1)};
  if (p.rows == 0 || heads == 0 || width == 0) return;
  p.columns = heads * width;
  if (p.b_layout.batch_stride != width * p.b_layout.row_stride ||
      p.c_layout.batch_stride != width) {
    p.columns = width;
    p.batches = heads;
  }
  if (!suits_cublaslt(p)) return run_up_project_rows(problem, call, workspace, stream);
  multiply(p, workspace.data(), stream);
}

std::size_t up_project_workspace(const UpProjectProblem&) { return cublaslt_workspace_bytes(); }

// ---- absorb_query

struct AbsorbScratch {
  std::byte* blas;
  bfloat16* nope;  ///< [token_slice, num_heads, P]

  AbsorbScratch(WorkspaceCarver& carver, const AbsorbQueryProblem& problem) {
    blas = carver.take<std::byte>("absorb_query_cublaslt", cublaslt_workspace_bytes());
    nope = carver.take<bfloat16>(
        "absorb_query_nope",
        std::min(problem.max_tokens, token_slice()) * problem.num_heads * problem.qk_nope_head_dim);
  }
};

void run_absorb_query_rows(const AbsorbQueryProblem& problem, const AbsorbQueryCall& call,
                           std::span<std::byte>, Stream stream) {
  check_shapes(problem, call);
  RowsProduct<bfloat16> p{};
  p.a = call.q.data_handle();
  p.a_head_stride = call.q.stride(1);
  p.a_row_stride = call.q.stride(0);
  p.a_row_end = call.q.extent(0);
  p.a_rows = call.tokens.data();
  p.w = call.kv_b_proj.data_handle();
  p.w_head_stride = call.kv_b_proj.stride(0);
  p.w_column_stride = 1;
  p.w_depth_stride = call.kv_b_proj.stride(1);
  p.c = call.absorbed.data_handle();
  p.c_head_stride = call.absorbed.stride(1);
  p.c_row_stride = call.absorbed.stride(0);
  p.rows = p.c_row_end = static_cast<std::int64_t>(call.tokens.size());
  p.columns = problem.kv_lora_rank;
  p.depth = problem.qk_nope_head_dim;
  p.alpha = 1;
  launch_rows_product(p, problem.num_heads, stream);
  split_query(problem, call, nullptr, 0, p.rows, stream);
}

BlasProduct kind_of(const AbsorbQueryProblem& problem) {
  BlasProduct p;
  p.max_rows = std::min(problem.max_tokens, token_slice());
  p.columns = problem.kv_lora_rank;
  p.depth = problem.qk_nope_head_dim;
  p.batches = problem.num_heads;
  p.b_transposed = false;
  return p;
}

void run_absorb_query(const AbsorbQueryProblem& problem, const AbsorbQueryCall& call,
                      std::span<std::byte> workspace, Stream stream) {
  check_shapes(problem, call);
  const auto tokens = static_cast<std::int64_t>(call.tokens.size());
  const std::int64_t heads = problem.num_heads, nope = problem.qk_nope_head_dim;
  if (tokens == 0) return;
  WorkspaceCarver carver(workspace);
  const AbsorbScratch scratch(carver, problem);
  BlasProduct p = kind_of(problem);
  p.rows = std::min(tokens, token_slice());
  p.a = scratch.nope;
  p.b = call.kv_b_proj.data_handle();
  p.c = call.absorbed.data_handle();
  p.a_layout = {heads * nope, nope};
  p.b_layout = {call.kv_b_proj.stride(1), call.kv_b_proj.stride(0)};
  p.c_layout = {call.absorbed.stride(0), call.absorbed.stride(1)};
  if (!suits_cublaslt(p)) return run_absorb_query_rows(problem, call, workspace, stream);
  for (std::int64_t begin = 0; begin < tokens; begin += token_slice()) {
    p.rows = std::min(tokens - begin, token_slice());
    p.c = address(call.absorbed, begin, 0, 0);
    split_query(problem, call, scratch.nope, begin, p.rows, stream);
    multiply(p, scratch.blas, stream);
  }
}

// ---- project_value

struct ValueScratch {
  std::byte* blas;
  float* values;  ///< [token_slice, num_heads, V]

  ValueScratch(WorkspaceCarver& carver, const ProjectValueProblem& problem) {
    blas = carver.take<std::byte>("project_value_cublaslt", cublaslt_workspace_bytes());
    values = carver.take<float>("project_value_fp32", std::min(problem.max_tokens, token_slice()) *
                                                          problem.num_heads * problem.v_head_dim);
  }
};

/// W_UV of head 0: the last V rows.
const bfloat16* value_weights(const ProjectValueProblem& problem, const ProjectValueCall& call) {
  return call.kv_b_proj.data_handle() +
         (call.kv_b_proj.extent(1) - problem.v_head_dim) * call.kv_b_proj.stride(1);
}

template <class Out>
void launch_values_rows(const ProjectValueProblem& problem, const ProjectValueCall& call,
                        const View3<Out>& out, Stream stream) {
  RowsProduct<Out> p{};
  p.a = call.latent_out.data_handle();
  p.a_head_stride = call.latent_out.stride(1);
  p.a_row_stride = call.latent_out.stride(0);
  p.w = value_weights(problem, call);
  p.w_head_stride = call.kv_b_proj.stride(0);
  p.w_column_stride = call.kv_b_proj.stride(1);
  p.w_depth_stride = 1;
  p.c = out.data_handle();
  p.c_head_stride = out.stride(1);
  p.c_row_stride = out.stride(0);
  p.c_row_end = out.extent(0);
  p.c_rows = call.tokens.data();
  p.rows = p.a_row_end = static_cast<std::int64_t>(call.tokens.size());
  p.columns = problem.v_head_dim;
  p.depth = problem.kv_lora_rank;
  p.alpha = 1;
  p.out_scale = call.out_scale;
  launch_rows_product(p, problem.num_heads, stream);
}

void run_project_value_rows(const ProjectValueProblem& problem, const ProjectValueCall& call,
                            std::span<std::byte>, Stream stream) {
  check_shapes(problem, call);
  if (problem.output == OutputType::fp8)
    launch_values_rows(problem, call, call.out_fp8, stream);
  else
    launch_values_rows(problem, call, call.out, stream);
}

BlasProduct kind_of(const ProjectValueProblem& problem) {
  BlasProduct p;
  p.max_rows = std::min(problem.max_tokens, token_slice());
  p.columns = problem.v_head_dim;
  p.depth = problem.kv_lora_rank;
  p.batches = problem.num_heads;
  p.c_is_float = true;
  return p;
}

void run_project_value(const ProjectValueProblem& problem, const ProjectValueCall& call,
                       std::span<std::byte> workspace, Stream stream) {
  check_shapes(problem, call);
  const auto tokens = static_cast<std::int64_t>(call.tokens.size());
  const std::int64_t heads = problem.num_heads, value = problem.v_head_dim;
  if (tokens == 0) return;
  WorkspaceCarver carver(workspace);
  const ValueScratch scratch(carver, problem);
  BlasProduct p = kind_of(problem);
  p.rows = std::min(tokens, token_slice());
  p.a = call.latent_out.data_handle();
  p.b = value_weights(problem, call);
  p.c = scratch.values;
  p.a_layout = {call.latent_out.stride(0), call.latent_out.stride(1)};
  p.b_layout = {call.kv_b_proj.stride(1), call.kv_b_proj.stride(0)};
  p.c_layout = {heads * value, value};
  if (!suits_cublaslt(p)) return run_project_value_rows(problem, call, workspace, stream);
  for (std::int64_t begin = 0; begin < tokens; begin += token_slice()) {
    p.rows = std::min(tokens - begin, token_slice());
    p.a = address(call.latent_out, begin, 0, 0);
    multiply(p, scratch.blas, stream);
    const std::int32_t* rows = call.tokens.data() + begin;
    if (problem.output == OutputType::fp8)
      scatter_values(scratch.values, rows, p.rows, call.out_fp8, call.out_scale, stream);
    else
      scatter_values(scratch.values, rows, p.rows, call.out, 1, stream);
  }
}

// ---- entries

template <class Scratch, class Problem>
std::size_t scratch_size(const Problem& problem) {
  WorkspaceCarver carver;
  Scratch(carver, problem);
  return carver.bytes();
}

template <class Problem>
std::string usable(const Problem&) {
  return why_no_device();
}
template <class Problem>
std::string usable_blas(const Problem& problem) {
  const std::string reason = why_no_device();
  return reason.empty() ? why_no_cublaslt(kind_of(problem)) : reason;
}
template <class Problem>
std::size_t no_scratch(const Problem&) {
  return 0;
}

constexpr const char* kBlasSummary = "batched cuBLASLt products, rows gathered and scattered";
constexpr const char* kRowsSummary = "fp32 tiles of 64 × 64, any strides";

}  // namespace

std::vector<Entry<UpProjectProblem, UpProjectCall>> up_project_entries() {
  return {{"cuda_cublaslt", Backend::cuda, kBlasSummary, usable_blas, up_project_workspace,
           run_up_project},
          {"cuda_rows", Backend::cuda, kRowsSummary, usable, no_scratch, run_up_project_rows}};
}

std::vector<Entry<AbsorbQueryProblem, AbsorbQueryCall>> absorb_query_entries() {
  return {{"cuda_cublaslt", Backend::cuda, kBlasSummary, usable_blas,
           scratch_size<AbsorbScratch, AbsorbQueryProblem>, run_absorb_query},
          {"cuda_rows", Backend::cuda, kRowsSummary, usable, no_scratch, run_absorb_query_rows}};
}

std::vector<Entry<ProjectValueProblem, ProjectValueCall>> project_value_entries() {
  return {{"cuda_cublaslt", Backend::cuda, kBlasSummary, usable_blas,
           scratch_size<ValueScratch, ProjectValueProblem>, run_project_value},
          {"cuda_rows", Backend::cuda, kRowsSummary, usable, no_scratch, run_project_value_rows}};
}

}  // namespace sparse_mla::cuda
