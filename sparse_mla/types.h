/// Element types, views and the shape letters that every header, kernel, test and page of
/// documentation uses.
///
///   num_heads H          query heads on this rank            1 … 128
///   kv_lora_rank L       latent width of the KV cache        512
///   qk_rope_head_dim R   rotary part, shared by all heads    64
///   qk_nope_head_dim P   per-head key width after up-projection
///   v_head_dim V         per-head value width after up-projection
///   index_n_heads, index_head_dim (D), index_topk            the lightning indexer
///   block_size           rows per cache page
///   query_len, context_len, seq_len   new tokens, already-cached tokens, their sum, per request
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <cuda/std/mdspan>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "sparse_mla/host_device.h"

/// The CUDA runtime's stream handle, declared here so that no CUDA runtime header is needed.
struct CUstream_st;

namespace sparse_mla {

using bfloat16 = __nv_bfloat16;
using fp8_e4m3 = __nv_fp8_e4m3;

/// Same type as `cudaStream_t`. The CPU backend ignores it.
using Stream = CUstream_st*;

/// A strided view; extents and strides are 64-bit and counted in elements.
template <class T, std::size_t Rank>
using View =
    ::cuda::std::mdspan<T, ::cuda::std::dextents<std::int64_t, Rank>, ::cuda::std::layout_stride>;
template <class T>
using View1 = View<T, 1>;
template <class T>
using View2 = View<T, 2>;
template <class T>
using View3 = View<T, 3>;

/// A view over contiguous row-major memory: `contiguous(p, num_tokens, num_heads, width)`.
template <class T, class... Extents>
View<T, sizeof...(Extents)> contiguous(T* data, Extents... extents) {
  constexpr std::size_t kRank = sizeof...(Extents);
  const std::array<std::int64_t, kRank> shape{static_cast<std::int64_t>(extents)...};
  ::cuda::std::array<std::int64_t, kRank> sizes{}, strides{};
  std::int64_t stride = 1;
  for (std::size_t axis = kRank; axis-- > 0;) {
    sizes[axis] = shape[axis];
    strides[axis] = stride;
    stride *= shape[axis];
  }
  return View<T, kRank>(data, typename View<T, kRank>::mapping_type(
                                  ::cuda::std::dextents<std::int64_t, kRank>(sizes), strides));
}

/// A view with explicit strides (elements).
template <class T, std::size_t Rank>
View<T, Rank> strided(T* data, const std::array<std::int64_t, Rank>& shape,
                      const std::array<std::int64_t, Rank>& stride) {
  ::cuda::std::array<std::int64_t, Rank> sizes{}, strides{};
  for (std::size_t axis = 0; axis < Rank; ++axis) {
    sizes[axis] = shape[axis];
    strides[axis] = stride[axis];
  }
  return View<T, Rank>(data, typename View<T, Rank>::mapping_type(
                                 ::cuda::std::dextents<std::int64_t, Rank>(sizes), strides));
}

/// The address of element (i, j, …): for kernels that walk rows by pointer.
template <class T, class Extents, class... Index>
SPARSE_MLA_HOST_DEVICE T* address(
    const ::cuda::std::mdspan<T, Extents, ::cuda::std::layout_stride>& view, Index... index) {
  return view.data_handle() + view.mapping()(static_cast<std::int64_t>(index)...);
}

/// Widths and head counts of one attention layer. The softmax scale is explicit and the same in
/// the MHA and the MQA form: (P+R)^-1/2 · mscale², never (L+R)^-1/2.
struct ModelDims {
  int num_heads = 128;         ///< H
  int kv_lora_rank = 512;      ///< L
  int qk_rope_head_dim = 64;   ///< R
  int qk_nope_head_dim = 128;  ///< P
  int v_head_dim = 128;        ///< V
  int index_n_heads = 64;
  int index_head_dim = 128;  ///< D
  int index_topk = 2048;
  float softmax_scale = 0.07216878364870322f;  ///< 192^-1/2: mscale = 1

  int latent_dim() const { return kv_lora_rank + qk_rope_head_dim; }       ///< L+R
  int qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }  ///< P+R
};

/// Throws std::invalid_argument naming the first width that the library cannot work with.
void validate(const ModelDims& dims);

enum class Backend { cpu, cuda };
std::string to_string(Backend backend);

/// Element type of an attention result. `fp8`: e4m3 with one scale for the whole tensor, made from
/// the fp32 result: quantise(result / scale), saturating at ±448.
enum class OutputType { f32, bf16, fp8 };
std::string to_string(OutputType type);

}  // namespace sparse_mla
