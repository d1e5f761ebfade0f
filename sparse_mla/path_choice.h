/// Which path a batch's prefill requests take. Pure functions of lengths and limits.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "sparse_mla/chunk_member.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

enum class AttentionPath {
  automatic,  ///< only as a wish
  none,       ///< only as a result: the batch has no prefill request
  dense,      ///< chunked MHA without a mask: the selection is everything
  masked,     ///< chunked MHA under the selection's bit mask
  sparse,     ///< MQA over the selected latent rows
};
std::string to_string(AttentionPath path);

/// Whose measured rates the choice is made by.
enum class PathMachine {
  cpu,
  gpu,     ///< with the portable kernels
  hopper,  ///< with those of compute capability 9.0
};

/// What the choice between masked and sparse depends on.
struct PathCosts {
  double masked_cost = 0;
  double sparse_cost = 0;
};

/// Estimated time of both paths, from rates measured on such a machine, on Hopper from times
/// measured at DeepSeek-V3.2's widths, topk 2,048, over a bf16 cache; only the ratio means
/// anything. `suffix` [prefill requests] are the suffix members of the batch.
PathCosts estimate_path_costs(PathMachine machine, const ModelDims& dims,
                              std::span<const ChunkMember> suffix);

}  // namespace sparse_mla
