#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {

std::vector<Entry<BuildMasksProblem, BuildMasksCall>> build_masks_entries() { return {}; }

}  // namespace sparse_mla::cuda
