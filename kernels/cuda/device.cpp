#include "kernels/cuda/device.h"

#include <map>
#include <mutex>

#include "sparse_mla/error.h"

namespace sparse_mla::cuda {
namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

Device ask(int index) {
  Device device;
  device.index = index;
  device.compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                              attribute(cudaDevAttrComputeCapabilityMinor, index);
  device.num_sms = attribute(cudaDevAttrMultiProcessorCount, index);
  device.max_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  device.l2_bytes = attribute(cudaDevAttrL2CacheSize, index);
  return device;
}

}  // namespace

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // reported here, not by the next call
  throw CudaError(std::string(call) + ": " + cudaGetErrorString(status));
}

void check_launch(const char* kernel) {
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess)
    throw CudaError(std::string("launch of ") + kernel + ": " + cudaGetErrorString(status));
}

const Device& current_device() {
  int index = 0;
  check(cudaGetDevice(&index), "cudaGetDevice");
  static std::mutex mutex;
  static std::map<int, Device> devices;  // nodes stay where they are
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = devices.find(index);
  return found != devices.end() ? found->second : devices.emplace(index, ask(index)).first->second;
}

std::string why_no_device(int least) {
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    cudaGetLastError();
    return std::string("no CUDA device: ") + cudaGetErrorString(status);
  }
  if (count == 0) return "no CUDA device";
  const Device& device = current_device();
  const auto dotted = [](int capability) {
    return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
  };
  if (device.compute_capability < least)
    return "device " + std::to_string(device.index) + " has compute capability " +
           dotted(device.compute_capability) + ", expected " + dotted(least) + " or more";
  return "";
}

}  // namespace sparse_mla::cuda
