// main() of the benchmarks that need a GPU: Google Benchmark's, with the GPU in the JSON's context.
// The commit comes from the command line: --benchmark_context=commit=….
#include <cstdio>
#include <string>

#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include "kernels/cuda/device.h"
#include "sparse_mla/machine.h"

namespace sparse_mla::bench {
namespace {

std::string dotted_version(int version) {  // 13000 → "13.0"
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string megahertz(cudaDeviceAttr clock, int device) {
  int kilohertz = 0;
  cuda::check(cudaDeviceGetAttribute(&kilohertz, clock, device), "cudaDeviceGetAttribute");
  return std::to_string(kilohertz / 1000);
}

void add_context(const GpuInfo& gpu) {
  const cuda::Device& device = cuda::current_device();
  int driver = 0, runtime = 0;
  cuda::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  cuda::check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  benchmark::AddCustomContext("gpu", gpu.name);
  benchmark::AddCustomContext("gpu_compute_capability", std::to_string(device.compute_capability));
  benchmark::AddCustomContext("gpu_sms", std::to_string(device.num_sms));
  benchmark::AddCustomContext("gpu_l2_bytes", std::to_string(device.l2_bytes));
  // What the card may reach, not what it runs at: under load the clock falls.
  benchmark::AddCustomContext("gpu_max_sm_clock_mhz",
                              megahertz(cudaDevAttrClockRate, device.index));
  benchmark::AddCustomContext("gpu_max_memory_clock_mhz",
                              megahertz(cudaDevAttrMemoryClockRate, device.index));
  benchmark::AddCustomContext("cuda_driver_supports", dotted_version(driver));
  benchmark::AddCustomContext("cuda_runtime", dotted_version(runtime));
}

}  // namespace
}  // namespace sparse_mla::bench

int main(int argc, char** argv) {
  const sparse_mla::GpuReport report = sparse_mla::gpu_report();
  const std::string why_not = sparse_mla::cuda::why_no_device();
  if (report.gpus.empty() || !why_not.empty()) {
    std::printf("skipped: %s\n", why_not.empty() ? report.why_none.c_str() : why_not.c_str());
    return 0;
  }
  sparse_mla::bench::add_context(report.gpus.front());
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
