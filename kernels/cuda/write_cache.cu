#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {

std::vector<Entry<WriteCacheProblem, WriteCacheCall>> write_cache_entries() { return {}; }

}  // namespace sparse_mla::cuda
