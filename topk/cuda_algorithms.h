/// The CUDA selectors, one source file each; cuda_entries.cpp lists them.
#pragma once

#include "sparse_mla/select.h"

namespace sparse_mla::topk {

using SelectEntry = Entry<SelectProblem, SelectCall>;

SelectEntry cuda_hinted_entry();
SelectEntry cuda_cta_entry();
SelectEntry cuda_cluster_entry();
SelectEntry cuda_stream_entry();
SelectEntry cuda_radix_entry();
// A library's way, for comparison.
SelectEntry cuda_cub_topk_entry();
SelectEntry cuda_cub_segmented_sort_entry();
SelectEntry cuda_thrust_sort_entry();

}  // namespace sparse_mla::topk
