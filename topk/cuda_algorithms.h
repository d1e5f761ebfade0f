/// The CUDA selectors, one source file each; cuda_entries.cpp lists them. All are exact,
/// deterministic and give ties to the lower index.
#pragma once

#include "sparse_mla/select.h"

namespace sparse_mla::cuda {

Entry<SelectProblem, SelectCall> cuda_cta_entry();
Entry<SelectProblem, SelectCall> cuda_cluster_entry();
Entry<SelectProblem, SelectCall> cuda_stream_entry();
Entry<SelectProblem, SelectCall> cuda_hinted_entry();

}  // namespace sparse_mla::cuda
