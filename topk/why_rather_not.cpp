#include "topk/why_rather_not.h"

#include "kernels/cuda/device.h"
#include "topk/choice.h"
#include "topk/cuda_algorithms.h"

namespace sparse_mla::topk {
namespace {

SelectEntry entry_of(Selector selector) {
  switch (selector) {
    case Selector::cta:
      return cuda_cta_entry();
    case Selector::cluster:
      return cuda_cluster_entry();
    case Selector::stream:
      return cuda_stream_entry();
    case Selector::radix:
      break;
  }
  return cuda_radix_entry();
}

}  // namespace

Selector fastest_selector(const SelectProblem& problem) {
  // A card may have clusters and yet too little shared memory for that selector: it is treated as
  // one without.
  constexpr int kWithoutClusters = 80;
  for (const int capability : {cuda::current_device().compute_capability, kWithoutClusters}) {
    const Selector selector = choose(problem.max_rows, problem.max_row_len, problem.k, capability);
    if (entry_of(selector).why_not(problem).empty()) return selector;
  }
  return Selector::radix;
}

std::string left_to_another(const SelectProblem& problem, Selector own) {
  const Selector fastest = fastest_selector(problem);
  if (fastest == own) return "";
  return std::string(entry_of(fastest).name) + " is faster for " +
         std::to_string(problem.max_rows) + " rows of up to " + std::to_string(problem.max_row_len);
}

}  // namespace sparse_mla::topk
