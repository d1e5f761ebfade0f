#include "kernels/cuda/device.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "sparse_mla/error.h"

namespace sparse_mla::cuda {
namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

constexpr int kNoLimit = std::numeric_limits<int>::max();
std::atomic<int> pretended_shared_bytes{kNoLimit};

Device ask(int index, int shared_limit) {
  Device device;
  device.index = index;
  device.compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                              attribute(cudaDevAttrComputeCapabilityMinor, index);
  device.num_sms = attribute(cudaDevAttrMultiProcessorCount, index);
  device.max_shared_bytes =
      std::min(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index), shared_limit);
  device.l2_bytes = attribute(cudaDevAttrL2CacheSize, index);
  return device;
}

/// What a kernel was compiled to for the current device. It does not change: asked once.
struct KernelCode {
  int static_shared_bytes;  // that it declares
  int capability;           // that it was compiled for, as Device::compute_capability
};
KernelCode code_of(const void* kernel) {
  const std::pair which(current_device().index, kernel);
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, KernelCode> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known.find(which); found != known.end()) return found->second;
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  return known[which] = {static_cast<int>(attributes.sharedSizeBytes), attributes.ptxVersion};
}

std::string dotted(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
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
  const std::pair which(index, pretended_shared_bytes.load());
  static std::mutex mutex;
  static std::map<std::pair<int, int>, Device> devices;  // nodes stay where they are
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = devices.find(which);
  return found != devices.end()
             ? found->second
             : devices.emplace(which, ask(which.first, which.second)).first->second;
}

PretendedSharedMemory::PretendedSharedMemory(int bytes) { pretended_shared_bytes = bytes; }
PretendedSharedMemory::~PretendedSharedMemory() { pretended_shared_bytes = kNoLimit; }

void allow_shared(const void* kernel, int bytes) {
  if (const std::string reason = why_no_shared(bytes + code_of(kernel).static_shared_bytes);
      !reason.empty()) {
    const char* name = "a kernel";
    cudaFuncGetName(&name, kernel);
    throw CudaError(std::string(name) + " " + reason);
  }
  constexpr int kWithoutAsking = 48 * 1024;  // every device gives so much
  if (bytes > kWithoutAsking)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
}

std::string why_no_code(const void* kernel, int least) {
  const int built = code_of(kernel).capability;
  if (built >= least) return "";
  return "built for compute capability " + dotted(built) + ", expected " + dotted(least) +
         " or more (CMAKE_CUDA_ARCHITECTURES)";
}

std::string why_no_device(int least) {
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    cudaGetLastError();
    return std::string("no CUDA device: ") + cudaGetErrorString(status);
  }
  if (count == 0) return "no CUDA device";
  const Device& device = current_device();
  if (device.compute_capability < least)
    return "device " + std::to_string(device.index) + " has compute capability " +
           dotted(device.compute_capability) + ", expected " + dotted(least) + " or more";
  return "";
}

std::string why_no_shared(int needed_bytes) {
  const int given = current_device().max_shared_bytes;
  if (needed_bytes <= given) return "";
  return "needs " + std::to_string(needed_bytes) +
         " bytes of shared memory per block, the device gives " + std::to_string(given);
}

}  // namespace sparse_mla::cuda
