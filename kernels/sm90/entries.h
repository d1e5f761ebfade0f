/// The entries for compute capability 9.0. They stand in front of the portable CUDA entries of
/// their operation.
#pragma once

#include "sparse_mla/attention.h"
#include "sparse_mla/operation.h"

namespace sparse_mla::sm90 {

/// The layer's choice of paths goes by whether this entry was chosen.
inline constexpr const char* kMaskedMhaEntry = "sm90_wgmma";

Entry<AttendProblem, AttendCall> masked_mha_entry();
Entry<SparseMqaProblem, SparseMqaCall> sparse_mqa_prefill_entry();
Entry<SparseMqaProblem, SparseMqaCall> sparse_mqa_decode_entry();

}  // namespace sparse_mla::sm90
