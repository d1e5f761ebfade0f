#include "kernels/cuda/cublaslt.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <mutex>

#include <cublasLt.h>

#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "sparse_mla/error.h"

namespace sparse_mla::cuda {
namespace {

constexpr std::uint32_t kAlignment = 16;  // bytes

void check_blas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw CudaError(std::string(call) + ": " + cublasLtGetStatusString(status));
}

/// What a chosen algorithm depends on: the product's shape and types. Strides are left out, so that
/// a row has the same bits in whatever tensor it lies.
using AlgorithmKey = std::array<std::int64_t, 6>;

/// A device's handle and the algorithms chosen so far. They live as long as the process: at its end
/// the driver may be gone before a destructor runs.
struct Context {
  cublasLtHandle_t handle = nullptr;
  std::map<AlgorithmKey, cublasLtMatmulAlgo_t> algorithms;
};

std::mutex& mutex() {
  static std::mutex instance;
  return instance;
}

/// The current device's context; mutex() is held.
Context& context() {
  static auto& contexts = *new std::map<int, Context>;  // never destroyed, see Context
  Context& found = contexts[current_device().index];
  if (found.handle == nullptr) check_blas(cublasLtCreate(&found.handle), "cublasLtCreate");
  return found;
}

/// cuBLASLt's matrices are column-major: a row-major [rows, columns] matrix is its transpose there.
cublasLtMatrixLayoutOpaque_t layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns,
                                    const BlasMatrix& matrix, std::int64_t batches) {
  cublasLtMatrixLayoutOpaque_t opaque;
  // One row has no next one; its stride may be anything.
  const std::int64_t stride = rows == 1 ? columns : matrix.row_stride;
  check_blas(cublasLtMatrixLayoutInit(&opaque, type, static_cast<std::uint64_t>(columns),
                                      static_cast<std::uint64_t>(rows), stride),
             "cublasLtMatrixLayoutInit");
  const auto count = static_cast<std::int32_t>(batches);
  check_blas(cublasLtMatrixLayoutSetAttribute(&opaque, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                              sizeof count),
             "cublasLtMatrixLayoutSetAttribute");
  check_blas(cublasLtMatrixLayoutSetAttribute(&opaque, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                              &matrix.batch_stride, sizeof matrix.batch_stride),
             "cublasLtMatrixLayoutSetAttribute");
  return opaque;
}

/// The library computes Cᵀ = B · Aᵀ: `first` is B, `second` is A.
struct Descriptors {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t first, second, result;

  explicit Descriptors(const BlasProduct& p) {
    check_blas(cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
               "cublasLtMatmulDescInit");
    // [columns, depth] row-major is a (depth × columns) matrix there, to be transposed.
    const cublasOperation_t transpose = p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    check_blas(cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                              sizeof transpose),
               "cublasLtMatmulDescSetAttribute");
    first = p.b_transposed ? layout(CUDA_R_16BF, p.columns, p.depth, p.b_layout, p.batches)
                           : layout(CUDA_R_16BF, p.depth, p.columns, p.b_layout, p.batches);
    second = layout(CUDA_R_16BF, p.rows, p.depth, p.a_layout, p.batches);
    result =
        layout(p.c_is_float ? CUDA_R_32F : CUDA_R_16BF, p.rows, p.columns, p.c_layout, p.batches);
  }
};

cublasLtMatmulAlgo_t ask_heuristic(cublasLtHandle_t handle, Descriptors& d) {
  cublasLtMatmulPreferenceOpaque_t preference;
  check_blas(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check_blas(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value),
               "cublasLtMatmulPreferenceSetAttribute");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{cublaslt_workspace_bytes()});
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kAlignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kAlignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kAlignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kAlignment);
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  check_blas(cublasLtMatmulAlgoGetHeuristic(handle, &d.operation, &d.first, &d.second, &d.result,
                                            &d.result, &preference, 1, &found, &count),
             "cublasLtMatmulAlgoGetHeuristic");
  check_blas(count > 0 ? found.state : CUBLAS_STATUS_NOT_SUPPORTED,
             "cublasLtMatmulAlgoGetHeuristic");
  return found.algo;
}

AlgorithmKey key_of(const BlasProduct& p) {
  return {p.max_rows, p.columns, p.depth, p.batches, p.b_transposed, p.c_is_float};
}

/// The largest product of `p`'s kind in tensors without gaps, tokens before heads: what the
/// algorithm is chosen for, whichever call comes first.
BlasProduct largest(BlasProduct p) {
  p.rows = p.max_rows = std::max(p.max_rows, p.rows);
  p.a_layout = {p.batches * p.depth, p.depth};
  p.b_layout = {p.b_transposed ? p.depth : p.columns, p.columns * p.depth};
  p.c_layout = {p.batches * p.columns, p.columns};
  return p;
}

/// The kernel of `p`'s kind, kept from the first question on; mutex() is held.
const cublasLtMatmulAlgo_t& algorithm_of(Context& here, const BlasProduct& p) {
  const AlgorithmKey key = key_of(p);
  auto found = here.algorithms.find(key);
  if (found == here.algorithms.end()) {
    Descriptors bound(largest(p));
    found = here.algorithms.emplace(key, ask_heuristic(here.handle, bound)).first;
  }
  return found->second;
}

/// What the alignment of every row asks of the lengths of one.
bool suitable_lengths(const BlasProduct& p) { return p.depth % 8 == 0 && p.columns % 8 == 0; }

/// Rows of `columns` elements that start on 16-byte boundaries and do not overlap, with strides
/// that the library takes: it knows no kernel for those beyond 2^31 elements.
template <class T>
bool suits(const T* data, const BlasMatrix& matrix, std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kMaxStride = std::numeric_limits<std::int32_t>::max();
  return matrix.batch_stride >= 0 && matrix.batch_stride <= kMaxStride &&
         aligned(data, kAlignment, {matrix.batch_stride}) &&
         (rows <= 1 || (matrix.row_stride >= columns && matrix.row_stride <= kMaxStride &&
                        aligned(data, kAlignment, {matrix.row_stride})));
}

}  // namespace

std::string why_no_cublaslt(const BlasProduct& kind) {
  const std::lock_guard<std::mutex> lock(mutex());
  try {
    Context& here = context();
    const bool empty =
        kind.max_rows == 0 || kind.columns == 0 || kind.depth == 0 || kind.batches == 0;
    if (!empty && suitable_lengths(kind)) algorithm_of(here, kind);
  } catch (const CudaError& error) {
    return error.what();
  }
  return "";
}

bool suits_cublaslt(const BlasProduct& p) {
  // A single row of A or C: layout() makes its stride its length, which has to be aligned, too.
  if (!suitable_lengths(p) || !suits(p.a, p.a_layout, p.rows, p.depth) ||
      !suits(p.b, p.b_layout, p.b_transposed ? p.columns : p.depth,
             p.b_transposed ? p.depth : p.columns))
    return false;
  return p.c_is_float ? suits(static_cast<const float*>(p.c), p.c_layout, p.rows, p.columns)
                      : suits(static_cast<const bfloat16*>(p.c), p.c_layout, p.rows, p.columns);
}

void multiply(const BlasProduct& product, void* workspace, Stream stream) {
  Descriptors d(product);
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulAlgo_t algorithm;
  {
    const std::lock_guard<std::mutex> lock(mutex());
    Context& here = context();
    handle = here.handle;
    algorithm = algorithm_of(here, product);
  }
  // Kernels take any number of rows and any aligned strides; should one not, the call gets a kernel
  // of its own.
  cublasLtMatmulHeuristicResult_t result;
  const cublasStatus_t status = cublasLtMatmulAlgoCheck(handle, &d.operation, &d.first, &d.second,
                                                        &d.result, &d.result, &algorithm, &result);
  if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > cublaslt_workspace_bytes())
    algorithm = ask_heuristic(handle, d);
  const float zero = 0;
  check_blas(cublasLtMatmul(handle, &d.operation, &product.alpha, product.b, &d.first, product.a,
                            &d.second, &zero, product.c, &d.result, product.c, &d.result,
                            &algorithm, workspace, cublaslt_workspace_bytes(), stream),
             "cublasLtMatmul");
}

}  // namespace sparse_mla::cuda
