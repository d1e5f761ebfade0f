/// What the CUDA entries share on the host: the current device's numbers, and errors that name the
/// call that failed.
#pragma once

#include <string>

#include <cuda_runtime_api.h>

namespace sparse_mla::cuda {

/// Numbers of one device that launches depend on.
struct Device {
  int index = 0;
  int compute_capability = 0;  ///< 90 for 9.0
  int num_sms = 0;
  int max_shared_bytes = 0;  ///< dynamic shared memory that one block may ask for (opt-in)
  int l2_bytes = 0;
};

/// The calling thread's current device. Asked of the driver once per device and process, then a
/// table: no CUDA call but cudaGetDevice. Throws CudaError where there is none.
const Device& current_device();

/// Why no kernel of this backend can run here: no device, or one below `least` (80 = compute
/// capability 8.0). Empty = one can. For Entry::why_not.
std::string why_no_device(int least = 80);

/// Throws CudaError "call: error text" unless `status` is cudaSuccess.
void check(cudaError_t status, const char* call);

/// Throws CudaError when the launch of `kernel` just before failed.
void check_launch(const char* kernel);

/// Lets `kernel` be launched with `bytes` of dynamic shared memory. The kernel keeps the last wish:
/// `bytes` has to be one number per kernel and device, or a smaller wish of another thread may come
/// between this and the launch.
template <class Kernel>
void allow_shared(Kernel* kernel, int bytes) {
  constexpr int kWithoutAsking = 48 * 1024;  // every device gives so much
  if (bytes > kWithoutAsking)
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
}

}  // namespace sparse_mla::cuda
