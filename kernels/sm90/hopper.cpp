#include "kernels/sm90/hopper.h"

#include "kernels/cuda/device.h"
#include "kernels/sm90/tensor_map.h"

namespace sparse_mla::sm90 {
namespace {

/// Whether the kernels' bodies were compiled: for any target but sm_90a they are empty, and no
/// attribute of a kernel tells sm_90 from sm_90a.
#ifdef SPARSE_MLA_HAS_SM90A
constexpr bool kBuilt = true;
#else
constexpr bool kBuilt = false;
#endif

}  // namespace

std::string why_no_hopper(int shared_bytes) {
  if (!kBuilt) return "built without sm_90a (CMAKE_CUDA_ARCHITECTURES)";
  if (std::string reason = cuda::why_no_device(90); !reason.empty()) return reason;
  if (cuda::current_device().compute_capability != 90) return "made for compute capability 9.0";
  if (std::string reason = cuda::why_no_shared(shared_bytes); !reason.empty()) return reason;
  return has_tensor_maps() ? "" : "the driver makes no tensor maps";
}

}  // namespace sparse_mla::sm90
