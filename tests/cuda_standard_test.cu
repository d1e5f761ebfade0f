// The CUDA sources are compiled as C++20, on the host pass and on the device pass. CMake 3.25 drops
// CUDA_STANDARD 20 for nvcc 13 without a word, so the build passes the flag itself; this notices
// when it no longer arrives.
#include <cuda/std/mdspan>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

namespace {

static_assert(__cplusplus >= 202002L, "host and device pass must both be C++20");

__global__ void write_cplusplus(long* value) {
#ifdef __CUDA_ARCH__
  *value = __cplusplus;
#endif
}

TEST(CudaStandard, DeviceCodeIsCpp20) {
  int num_devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&num_devices);
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    GTEST_SKIP() << "no GPU here";
  }
  ASSERT_EQ(error, cudaSuccess);
  long* device_value = nullptr;  // [1]
  ASSERT_EQ(cudaMalloc(&device_value, sizeof(long)), cudaSuccess);
  write_cplusplus<<<1, 1>>>(device_value);
  long value = 0;
  ASSERT_EQ(cudaMemcpy(&value, device_value, sizeof(long), cudaMemcpyDeviceToHost), cudaSuccess);
  ASSERT_EQ(cudaFree(device_value), cudaSuccess);
  EXPECT_GE(value, 202002L);
}

}  // namespace
