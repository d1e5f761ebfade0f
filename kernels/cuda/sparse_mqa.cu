#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {

std::vector<Entry<SparseMqaProblem, SparseMqaCall>> sparse_mqa_entries() { return {}; }

}  // namespace sparse_mla::cuda
