#include "tests/support/gpu.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include <cuda_runtime_api.h>

namespace sparse_mla::support {
namespace {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

}  // namespace

bool gpu_present() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return count > 0;
}

bool under_sanitizer() { return std::getenv("SPARSE_MLA_TEST_SANITIZER") != nullptr; }

DeviceMemory::DeviceMemory(std::size_t bytes) : size_(bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, bytes == 0 ? 1 : bytes), "cudaMalloc");
  data_.reset(static_cast<std::byte*>(data));
  if (!under_sanitizer()) fill_device(data_.get(), 0xFF, bytes);
}

void DeviceMemory::Free::operator()(std::byte* data) const { cudaFree(data); }

void copy_to_device(std::byte* device, const void* host, std::size_t bytes) {
  check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
  // It returns once pageable memory is staged; streams that do not wait for the default one could
  // still overtake the last stretch.
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void copy_to_host(void* host, const std::byte* device, std::size_t bytes) {
  check(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
}

void fill_device(std::byte* device, int byte, std::size_t bytes) {
  check(cudaMemset(device, byte, bytes), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // other streams do not wait for it
}

DeviceStream::DeviceStream() {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
}

DeviceStream::~DeviceStream() { cudaStreamDestroy(stream_); }

void DeviceStream::synchronize() const {
  check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

DeviceClock::~DeviceClock() {
  for (void* event : events_) cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

std::size_t DeviceClock::mark(Stream stream) {
  if (used_ == events_.size()) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreate(&event), "cudaEventCreate");
    events_.push_back(event);
  }
  check(cudaEventRecord(static_cast<cudaEvent_t>(events_[used_]), stream), "cudaEventRecord");
  return used_++;
}

double DeviceClock::seconds_between(std::size_t first, std::size_t second) const {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(events_[first]),
                             static_cast<cudaEvent_t>(events_[second])),
        "cudaEventElapsedTime");
  return milliseconds * 1e-3;
}

}  // namespace sparse_mla::support
