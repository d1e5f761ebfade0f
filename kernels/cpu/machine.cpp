#include "sparse_mla/machine.h"

#include <omp.h>

#include "kernels/cpu/cpu_features.h"

namespace sparse_mla {

std::string version() { return SPARSE_MLA_VERSION; }

CpuInfo cpu_info() { return {cpu::cpu_name(), omp_get_max_threads(), cpu::has_avx2_fma()}; }

}  // namespace sparse_mla
