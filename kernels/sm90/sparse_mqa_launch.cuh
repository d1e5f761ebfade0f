/// What the entries of `sparse_mqa` on compute capability 9.0 do on the host alike: queries for the
/// copy engine, launches in clusters.
#pragma once

#include <cstddef>

#include <cuda.h>
#include <cuda_runtime.h>

#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device.h"
#include "kernels/sm90/tensor_map.h"
#include "sparse_mla/attention.h"

namespace sparse_mla::sm90 {

/// False where the copy engine, the 16-byte copies or the 16-byte stores cannot serve the call's
/// views, or where its scale is not positive (the maximum is taken before scaling). Boxes are
/// `packed` tokens × rows / packed heads, row head · packed + token.
inline bool make_query_map(const SparseMqaCall& call, int rows, int packed, CUtensorMap& map) {
  const View3<const bfloat16> heads_first = strided<const bfloat16, 3>(
      call.q.data_handle(), {call.q.extent(1), call.q.extent(0), call.q.extent(2)},
      {call.q.stride(1), call.q.stride(0), 1});
  return call.softmax_scale > 0 && cuda::aligned_rows(call.out, 16) &&
         cuda::aligned(call.cache.data, 16, {call.cache.row_stride, call.cache.block_stride}) &&
         make_map(heads_first, rows / packed, map, packed);
}

/// What a kernel's CTA takes.
struct CtaSize {
  int threads, shared_bytes;
};

/// Lets the kernel have that much shared memory and, beyond what every device can do, such
/// clusters.
template <class Kernel>
void prepare(Kernel* kernel, const CtaSize& cta, int cluster) {
  constexpr int kPortableCluster = 8;
  cuda::allow_shared(kernel, cta.shared_bytes);
  if (cluster > kPortableCluster)
    cuda::check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                     cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                "cudaFuncSetAttribute(NonPortableClusterSizeAllowed)");
}

/// A launch of `ctas` in clusters of `cluster`; `attribute` has to outlive it.
inline cudaLaunchConfig_t launch_of(const CtaSize& cta, int ctas, int cluster,
                                    cudaLaunchAttribute& attribute, Stream stream) {
  attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(ctas), 1, 1};
  config.blockDim = {static_cast<unsigned>(cta.threads), 1, 1};
  config.dynamicSmemBytes = static_cast<std::size_t>(cta.shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  return config;
}

template <class Arguments>
void launch(void (*kernel)(CUtensorMap, Arguments), const CtaSize& cta, int ctas, int cluster,
            const CUtensorMap& q_map, const Arguments& args, Stream stream) {
  prepare(kernel, cta, cluster);
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = launch_of(cta, ctas, cluster, attribute, stream);
  cuda::check(cudaLaunchKernelEx(&config, kernel, q_map, args), "cudaLaunchKernelEx");
}

}  // namespace sparse_mla::sm90
