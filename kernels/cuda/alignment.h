/// Whether a kernel's vector path may be taken: decided on the host, once per launch.
#pragma once

#include <cstdint>
#include <initializer_list>

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

}  // namespace sparse_mla::cuda
