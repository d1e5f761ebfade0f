/// What the operations' argument checks share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "sparse_mla/error.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

template <class T, class Extents>
using StridedView = ::cuda::std::mdspan<T, Extents, ::cuda::std::layout_stride>;

/// "[3, 16, 576]"
template <class T, class Extents>
std::string shape_text(const StridedView<T, Extents>& view) {
  std::string text = "[";
  for (std::size_t axis = 0; axis < Extents::rank(); ++axis)
    text += (axis == 0 ? "" : ", ") + std::to_string(view.extent(axis));
  return text + "]";
}

/// `view`'s extent along `axis` must be `expected`, which `meaning` explains.
template <class T, class Extents>
void require_extent(const char* name, const StridedView<T, Extents>& view, std::size_t axis,
                    std::int64_t expected, const char* meaning) {
  require(view.extent(axis) == expected, name, shape_text(view),
          "extent " + std::to_string(expected) + " (" + meaning + ") along axis " +
              std::to_string(axis));
}

/// Kernels walk the last axis by pointer.
template <class T, class Extents>
void require_contiguous_rows(const char* name, const StridedView<T, Extents>& view) {
  constexpr std::size_t kLast = Extents::rank() - 1;
  if (view.size() == 0 || view.extent(kLast) == 1 || view.stride(kLast) == 1) return;
  throw_invalid(name, "stride " + std::to_string(view.stride(kLast)),
                "stride 1 along the last axis");
}

}  // namespace sparse_mla
