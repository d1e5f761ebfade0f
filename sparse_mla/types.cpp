#include "sparse_mla/types.h"

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
  require(dims.kv_lora_rank >= 1, "kv_lora_rank", dims.kv_lora_rank, "at least 1");
  require(dims.qk_rope_head_dim >= 1, "qk_rope_head_dim", dims.qk_rope_head_dim, "at least 1");
  require(dims.qk_nope_head_dim >= 1, "qk_nope_head_dim", dims.qk_nope_head_dim, "at least 1");
  require(dims.v_head_dim >= 1, "v_head_dim", dims.v_head_dim, "at least 1");
  require(dims.index_n_heads >= 1, "index_n_heads", dims.index_n_heads, "at least 1");
  require(dims.index_head_dim >= 1, "index_head_dim", dims.index_head_dim, "at least 1");
  require(dims.index_topk >= 1, "index_topk", dims.index_topk, "at least 1");
  require(dims.softmax_scale > 0, "softmax_scale", dims.softmax_scale, "more than 0");
}

}  // namespace sparse_mla
