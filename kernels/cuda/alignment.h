/// Whether a kernel's vector path may be taken: decided on the host, once per launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include <cuda/std/mdspan>

namespace sparse_mla::cuda {

/// `data` and every address that lies a sum of multiples of `strides` (elements) behind it are
/// multiples of `bytes`, a power of two.
template <class T>
bool aligned(const T* data, std::uint64_t bytes, std::initializer_list<std::int64_t> strides = {}) {
  auto address_bits = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(data));
  for (const std::int64_t stride : strides)
    address_bits |= static_cast<std::uint64_t>(stride) * sizeof(T);
  return address_bits % bytes == 0;
}

/// Every row of `view`, along its last axis, lies in one piece and starts at a multiple of `bytes`,
/// a power of two. The stride of an axis without a second element does not matter.
template <class T, class Extents>
bool aligned_rows(const ::cuda::std::mdspan<T, Extents, ::cuda::std::layout_stride>& view,
                  std::uint64_t bytes) {
  constexpr std::size_t kLast = Extents::rank() - 1;
  if (!aligned(view.data_handle(), bytes) || (view.extent(kLast) > 1 && view.stride(kLast) != 1))
    return false;
  for (std::size_t axis = 0; axis < kLast; ++axis)
    if (view.extent(axis) > 1 && !aligned(view.data_handle(), bytes, {view.stride(axis)}))
      return false;
  return true;
}

}  // namespace sparse_mla::cuda
