/// Why a CUDA selector that can serve a problem leaves it to another: Entry::why_rather_not.
///
/// The selectors of the table leave a problem to the one that topk/choice.h names. One for calls
/// with hints does what another of them does, faster: it stands before that one in the list and
/// leaves to others what that one does.
#pragma once

#include <string>

#include "sparse_mla/select.h"
#include "topk/selectors.h"

namespace sparse_mla::topk {

/// The fastest of those that can serve the problem on the current device.
Selector fastest_selector(const SelectProblem& problem);

/// "cuda_stream is faster for 4096 rows of up to 131072", or empty where `own` is the fastest.
std::string left_to_another(const SelectProblem& problem, Selector own);

template <Selector kOwn>
std::string why_rather_not(const SelectProblem& problem) {
  return left_to_another(problem, kOwn);
}

/// Libraries' ways.
inline std::string for_comparison(const SelectProblem&) { return "for comparison"; }

}  // namespace sparse_mla::topk
