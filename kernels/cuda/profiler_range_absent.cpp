#include "kernels/common/profiler_range.h"

namespace sparse_mla {

ProfilerRange::ProfilerRange(Stage) {}
ProfilerRange::~ProfilerRange() = default;

}  // namespace sparse_mla
