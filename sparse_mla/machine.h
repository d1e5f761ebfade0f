/// What the library runs on: its own version, the processor and the GPUs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sparse_mla {

/// The library's version, "major.minor.patch".
std::string version();

struct CpuInfo {
  std::string name;       ///< brand string, "unknown" if the processor has none
  int num_threads = 1;    ///< that OpenMP will use
  bool avx2_fma = false;  ///< the vector path beyond the x86-64 baseline can run
};
CpuInfo cpu_info();

struct GpuInfo {
  std::string name;
  int compute_capability = 0;  ///< 10 · major + minor: 90 for Hopper
  int num_sms = 0;
  std::int64_t memory_bytes = 0;
};

struct GpuReport {
  std::vector<GpuInfo> gpus;
  std::string why_none;  ///< set when `gpus` is empty: no CUDA in this build, no driver, …
};
/// Never throws: a machine without a GPU is an ordinary machine.
GpuReport gpu_report();

}  // namespace sparse_mla
