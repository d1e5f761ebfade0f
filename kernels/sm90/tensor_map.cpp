#include "kernels/sm90/tensor_map.h"

#include <array>
#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

namespace sparse_mla::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

/// The driver's function, asked for once per process: the library does not link with the driver.
Encode encode_function() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    constexpr unsigned kSince = 12000;  // CUDA 12.0
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince,
                                         cudaEnableDefault, &result) != cudaSuccess) {
      cudaGetLastError();  // the answer is that there is none
      function = nullptr;
    }
    return reinterpret_cast<Encode>(result == cudaDriverEntryPointSuccess ? function : nullptr);
  }();
  return found;
}

/// `extents` and `strides` (elements) from the innermost axis, whose stride is 1, outwards.
template <std::size_t Rank>
bool encode(const bfloat16* data, const std::array<std::int64_t, Rank>& extents,
            const std::array<std::int64_t, Rank>& strides,
            const std::array<std::uint32_t, Rank>& box, CUtensorMap& map) {
  constexpr std::int64_t kBytes = sizeof(bfloat16), kUnit = 16;
  constexpr std::int64_t kMaxExtent = std::int64_t{1} << 32, kMaxStride = std::int64_t{1} << 40;
  if (encode_function() == nullptr || reinterpret_cast<std::uintptr_t>(data) % kUnit != 0)
    return false;
  std::array<cuuint64_t, Rank> sizes{};
  std::array<cuuint64_t, Rank - 1> stride_bytes{};
  std::array<cuuint32_t, Rank> steps{};
  for (std::size_t axis = 0; axis < Rank; ++axis) {
    if (extents[axis] < 1 || extents[axis] > kMaxExtent) return false;
    sizes[axis] = static_cast<cuuint64_t>(extents[axis]);
    steps[axis] = 1;
    if (axis == 0) continue;
    // The stride of an axis without a second element does not matter, but it may not be less than
    // what lies within.
    const std::int64_t within =
        extents[axis - 1] *
        (axis == 1 ? kBytes : static_cast<std::int64_t>(stride_bytes[axis - 2]));
    const std::int64_t bytes =
        extents[axis] == 1 ? (within + kUnit - 1) / kUnit * kUnit : strides[axis] * kBytes;
    if (bytes < kUnit || bytes % kUnit != 0 || bytes >= kMaxStride) return false;
    stride_bytes[axis - 1] = static_cast<cuuint64_t>(bytes);
  }
  return encode_function()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, Rank,
                           const_cast<bfloat16*>(data), sizes.data(), stride_bytes.data(),
                           box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                           CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool has_tensor_maps() { return encode_function() != nullptr; }

bool make_map(const View3<const bfloat16>& view, int box_rows, CUtensorMap& map, int box_heads) {
  return encode<3>(
      view.data_handle(), {view.extent(2), view.extent(1), view.extent(0)},
      {1, view.stride(1), view.stride(0)},
      {box_columns(), static_cast<std::uint32_t>(box_heads), static_cast<std::uint32_t>(box_rows)},
      map);
}

bool make_map(const View2<const bfloat16>& view, int box_rows, CUtensorMap& map) {
  return encode<2>(view.data_handle(), {view.extent(1), view.extent(0)}, {1, view.stride(0)},
                   {box_columns(), static_cast<std::uint32_t>(box_rows)}, map);
}

}  // namespace sparse_mla::sm90
