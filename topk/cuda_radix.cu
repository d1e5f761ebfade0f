#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {

std::vector<Entry<SelectProblem, SelectCall>> select_entries() { return {}; }

}  // namespace sparse_mla::cuda
