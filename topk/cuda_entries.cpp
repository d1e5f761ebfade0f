#include "kernels/cuda/entries.h"
#include "topk/cuda_algorithms.h"

namespace sparse_mla::cuda {

std::vector<Entry<SelectProblem, SelectCall>> select_entries() {
  return {topk::cuda_radix_entry(), topk::cuda_cub_topk_entry(),
          topk::cuda_cub_segmented_sort_entry(), topk::cuda_thrust_sort_entry()};
}

}  // namespace sparse_mla::cuda
