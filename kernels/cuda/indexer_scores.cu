#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {

std::vector<Entry<IndexerProblem, IndexerCall>> indexer_scores_entries() { return {}; }

}  // namespace sparse_mla::cuda
