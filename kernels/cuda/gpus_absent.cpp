#include "sparse_mla/machine.h"

namespace sparse_mla {

GpuReport gpu_report() { return {{}, "this build has no CUDA backend"}; }

}  // namespace sparse_mla
