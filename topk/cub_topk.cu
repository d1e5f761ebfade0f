// The only source that is compiled with SPARSE_MLA_CCCL_DIR's CCCL, where that is given: CUB's own
// top-k came after the CCCL of CUDA 13.0. CUB and Thrust in a namespace of their own, so that no
// instantiation of another version is taken for one of these.
#define THRUST_CUB_WRAPPED_NAMESPACE sparse_mla_newer_cccl

#include <stdexcept>

#include "kernels/cuda/device.h"
#include "topk/cub_topk.h"

#if __has_include(<cub/device/device_topk.cuh>)

#include <cub/device/device_topk.cuh>
#include <cuda/iterator>
#include <cuda/std/execution>
#include <cuda/stream_ref>

namespace sparse_mla::cuda {
namespace {

namespace cub = sparse_mla_newer_cccl::cub;

/// Fills in `bytes` where `temporary` is null.
void max_pairs(void* temporary, std::size_t& bytes, const std::uint32_t* keys, std::int64_t len,
               std::int64_t k, std::uint32_t* best_keys, std::int32_t* best, cudaStream_t stream) {
  const auto requirements = ::cuda::execution::require(
      ::cuda::execution::determinism::not_guaranteed, ::cuda::execution::output_ordering::unsorted);
  const auto environment = ::cuda::std::execution::env{::cuda::stream_ref{stream}, requirements};
  // 32-bit numbers of items: CUB's kernels for those are the faster ones.
  check(cub::DeviceTopK::MaxPairs(
            temporary, bytes, keys, best_keys, ::cuda::counting_iterator<std::int32_t>(0), best,
            static_cast<std::uint32_t>(len), static_cast<std::uint32_t>(k), environment),
        "cub::DeviceTopK::MaxPairs");
}

}  // namespace

bool has_cub_topk() { return true; }

std::size_t cub_topk_bytes(std::int64_t len, std::int64_t k) {
  std::size_t bytes = 0;
  max_pairs(nullptr, bytes, nullptr, len, k, nullptr, nullptr, nullptr);
  return bytes;
}

void cub_topk(std::span<std::byte> temporary, const std::uint32_t* keys, std::int64_t len,
              std::int64_t k, std::uint32_t* best_keys, std::int32_t* best, cudaStream_t stream) {
  std::size_t bytes = temporary.size();
  max_pairs(temporary.data(), bytes, keys, len, k, best_keys, best, stream);
}

}  // namespace sparse_mla::cuda

#else

namespace sparse_mla::cuda {

bool has_cub_topk() { return false; }

std::size_t cub_topk_bytes(std::int64_t, std::int64_t) {
  throw std::logic_error("cub_topk_bytes: built without cub::DeviceTopK");
}

void cub_topk(std::span<std::byte>, const std::uint32_t*, std::int64_t, std::int64_t,
              std::uint32_t*, std::int32_t*, cudaStream_t) {
  throw std::logic_error("cub_topk: built without cub::DeviceTopK");
}

}  // namespace sparse_mla::cuda

#endif
