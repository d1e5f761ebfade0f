#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {

std::vector<Entry<SelectFromIndexerProblem, SelectFromIndexerCall>> select_from_indexer_entries() {
  return {};
}

}  // namespace sparse_mla::cuda
