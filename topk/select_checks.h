/// Argument checks that the selectors of every backend share: they read no array, so that a call on
/// device memory can be checked too.
#pragma once

#include "sparse_mla/select.h"

namespace sparse_mla::topk {

/// Throws std::invalid_argument for a problem that breaks select.h's contract.
void validate(const SelectProblem& problem);

/// Throws std::invalid_argument for a call whose types, sizes or views break it.
void validate_shapes(const SelectProblem& problem, const SelectCall& call);

}  // namespace sparse_mla::topk
