#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {

std::vector<Entry<UpProjectProblem, UpProjectCall>> up_project_entries() { return {}; }

std::vector<Entry<AbsorbQueryProblem, AbsorbQueryCall>> absorb_query_entries() { return {}; }

std::vector<Entry<ProjectValueProblem, ProjectValueCall>> project_value_entries() { return {}; }

}  // namespace sparse_mla::cuda
