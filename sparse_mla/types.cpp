#include "sparse_mla/types.h"

#include <cmath>
#include <utility>

#include "sparse_mla/error.h"

namespace sparse_mla {

std::string to_string(Backend backend) { return backend == Backend::cpu ? "cpu" : "cuda"; }

std::string to_string(OutputType type) {
  switch (type) {
    case OutputType::f32:
      return "fp32";
    case OutputType::bf16:
      return "bf16";
    case OutputType::fp8:
      return "fp8";
  }
  return "unknown";
}

void validate(const ModelDims& dims) {
  require(dims.num_heads >= 1 && dims.num_heads <= 128, "num_heads", dims.num_heads, "1 … 128");
  // Far above any model, and low enough that sums of two stay int and products of four int64.
  constexpr int kMaxWidth = 16384;
  const std::pair<const char*, int> widths[] = {
      {"kv_lora_rank", dims.kv_lora_rank},         {"qk_rope_head_dim", dims.qk_rope_head_dim},
      {"qk_nope_head_dim", dims.qk_nope_head_dim}, {"v_head_dim", dims.v_head_dim},
      {"index_n_heads", dims.index_n_heads},       {"index_head_dim", dims.index_head_dim}};
  for (const auto& [name, width] : widths)
    require(width >= 1 && width <= kMaxWidth, name, width, "1 … 16384");
  require(dims.index_topk >= 1, "index_topk", dims.index_topk, "at least 1");
  require(dims.softmax_scale > 0 && std::isfinite(dims.softmax_scale), "softmax_scale",
          dims.softmax_scale, "finite and more than 0");
}

}  // namespace sparse_mla
