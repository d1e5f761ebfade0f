/// The portable tensor-core entry of `sparse_mqa`, for an entry that leaves some calls to it.
#pragma once

#include <cstddef>
#include <span>

#include "sparse_mla/attention.h"

namespace sparse_mla::cuda {

std::size_t sparse_mqa_mma_bytes(const SparseMqaProblem& problem);
void run_sparse_mqa_mma(const SparseMqaProblem& problem, const SparseMqaCall& call,
                        std::span<std::byte> workspace, Stream stream);

}  // namespace sparse_mla::cuda
