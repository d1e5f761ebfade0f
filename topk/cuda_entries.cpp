#include "kernels/cuda/entries.h"
#include "topk/cuda_algorithms.h"

namespace sparse_mla::cuda {

std::vector<Entry<SelectProblem, SelectCall>> select_entries() {
  return {topk::cuda_hinted_entry(),
          topk::cuda_cta_entry(),
          topk::cuda_cluster_entry(),
          topk::cuda_stream_entry(),
          topk::cuda_radix_entry(),
          topk::cuda_cub_topk_entry(),
          topk::cuda_cub_segmented_sort_entry(),
          topk::cuda_thrust_sort_entry()};
}

}  // namespace sparse_mla::cuda
