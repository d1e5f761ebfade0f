#include <cuda_runtime.h>

#include "sparse_mla/machine.h"

namespace sparse_mla {

GpuReport gpu_report() {
  GpuReport report;
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    cudaGetLastError();  // this question's failure is answered here, not by the next call
    report.why_none = cudaGetErrorString(status);
    return report;
  }
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    report.gpus.push_back({properties.name, 10 * properties.major + properties.minor,
                           properties.multiProcessorCount,
                           static_cast<std::int64_t>(properties.totalGlobalMem)});
  }
  if (report.gpus.empty()) report.why_none = "no CUDA device";
  return report;
}

}  // namespace sparse_mla
