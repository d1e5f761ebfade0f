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
  int max_shared_bytes = 0;  ///< shared memory of a block, static and dynamic, at most (opt-in)
  int l2_bytes = 0;
};

/// The calling thread's current device. Asked of the driver once per device and process, then a
/// table: no CUDA call but cudaGetDevice. Throws CudaError where there is none.
const Device& current_device();

/// Why no kernel of this backend can run here: no device, or one below `least` (80 = compute
/// capability 8.0). Empty = one can. For Entry::why_not.
std::string why_no_device(int least = 80);

/// Why a kernel whose blocks need that much shared memory, static and dynamic, cannot run on the
/// current device; empty = it can. For Entry::why_not, behind why_no_device().
std::string why_no_shared(int needed_bytes);

/// Why `kernel` has no code for compute capability `least` (90 = 9.0) or more on the current
/// device: what was compiled for less runs there too. Empty = it has. For Entry::why_not, behind
/// the others.
std::string why_no_code(const void* kernel, int least);

/// Throws CudaError "call: error text" unless `status` is cudaSuccess.
void check(cudaError_t status, const char* call);

/// Throws CudaError when the launch of `kernel` just before failed.
void check_launch(const char* kernel);

/// Lets `kernel` be launched with `bytes` of dynamic shared memory. The kernel keeps the last wish:
/// `bytes` has to be one number per kernel and device, or a smaller wish of another thread may come
/// between this and the launch. Throws CudaError where that, with what the kernel declares, is more
/// than current_device() gives a block.
void allow_shared(const void* kernel, int bytes);
template <class Kernel>
void allow_shared(Kernel* kernel, int bytes) {
  allow_shared(reinterpret_cast<const void*>(kernel), bytes);
}

/// For tests of what happens on a smaller card: as long as it lives, current_device() gives a block
/// at most `bytes` of shared memory, to every thread. One at a time.
class PretendedSharedMemory {
 public:
  explicit PretendedSharedMemory(int bytes);
  ~PretendedSharedMemory();
  PretendedSharedMemory(const PretendedSharedMemory&) = delete;
  PretendedSharedMemory& operator=(const PretendedSharedMemory&) = delete;
};

}  // namespace sparse_mla::cuda
