/// A layer's stages as ranges of the CUDA profilers' timeline.
#pragma once

#include "sparse_mla/layer.h"

namespace sparse_mla {

/// The calling thread's range from construction to destruction, in the NVTX domain "sparse_mla".
/// Costs nothing where no profiler listens; nothing at all in a CPU-only build.
class ProfilerRange {
 public:
  explicit ProfilerRange(Stage stage);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace sparse_mla
