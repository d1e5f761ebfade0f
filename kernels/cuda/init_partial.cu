#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {

std::vector<Entry<InitPartialProblem, InitPartialCall>> init_partial_entries() { return {}; }

}  // namespace sparse_mla::cuda
