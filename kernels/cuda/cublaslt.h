/// Batched bf16 products through cuBLASLt: no device memory but the caller's workspace, nothing but
/// launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "sparse_mla/types.h"

namespace sparse_mla::cuda {

/// Workspace of a product. Products are never split along k, which is what takes space; the rest
/// is small tables of the kernels.
constexpr std::size_t cublaslt_workspace_bytes() { return std::size_t{4} << 20; }

/// One matrix of a product, or a batch of them: rows [0, rows) whose elements lie side by side, the
/// next row `row_stride` elements on, the next matrix `batch_stride` elements (0 = one for all).
struct BlasMatrix {
  std::int64_t row_stride = 0, batch_stride = 0;
};

/// C[b] = alpha · A[b] · B[b]ᵀ or, with b_transposed false, alpha · A[b] · B[b]; all row-major:
///   A [rows, depth] bf16, B [columns, depth] bf16 (b_transposed) or [depth, columns],
///   C [rows, columns] bf16 or fp32.
/// fp32 sums, each in one sequence along `depth`. The kernel is chosen for `max_rows` rows and kept
/// for every smaller call, so that a row's bits do not depend on the number of rows around it.
struct BlasProduct {
  std::int64_t rows = 0, max_rows = 0;
  std::int64_t columns = 0, depth = 0;
  std::int64_t batches = 1;
  bool b_transposed = true;
  bool c_is_float = false;
  float alpha = 1;
  const bfloat16* a = nullptr;
  const bfloat16* b = nullptr;
  void* c = nullptr;
  BlasMatrix a_layout, b_layout, c_layout;
};

/// Why cuBLASLt cannot compute products of `kind`'s shape and types, its memory left aside; empty =
/// it can. Makes the device's handle and chooses the kernel: called at set-up, so that no run has
/// to (versions of the library refuse to be asked while a stream is captured).
std::string why_no_cublaslt(const BlasProduct& kind);

/// Can `product` run? Its pointers and strides have to be multiples of 16 bytes and rows of a
/// matrix must not overlap: what the fast kernels ask for. Asks no library.
bool suits_cublaslt(const BlasProduct& product);

/// Throws CudaError naming the call that failed and its status. `workspace` (16-byte
/// aligned) holds cublaslt_workspace_bytes(). Thread-safe.
void multiply(const BlasProduct& product, void* workspace, Stream stream);

}  // namespace sparse_mla::cuda
