#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sparse_mla::command {

/// What this library needs to know of a model: the attention sizes under the names of its
/// Hugging Face `config.json`, and the softmax scale that follows from it.
struct ModelConfig {
  std::string name;                 // the preset or the file
  int32_t num_attention_heads = 0;  // of the whole model, before any tensor-parallel split
  int32_t kv_lora_rank = 0;         // L
  int32_t qk_rope_head_dim = 0;     // R
  int32_t qk_nope_head_dim = 0;     // P
  int32_t v_head_dim = 0;           // V
  int32_t index_n_heads = 0;
  int32_t index_head_dim = 0;
  int32_t index_topk = 0;
  double softmax_scale = 0;  // (P+R)^-1/2 · mscale², the same in the MHA and the MQA form

  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

/// Reads the text of a Hugging Face config.json of the DeepSeek-V3.2 family. `name` stands for the
/// file in errors.
///
/// mscale is YaRN's attention factor as DeepSeek applies it: 0.1 · mscale_all_dim · ln(factor) + 1
/// from `rope_scaling` (or `rope_parameters`, its name in newer files), and 1 where the block is
/// absent, null or of type "default", or where mscale_all_dim is absent or 0, or factor ≤ 1.
/// Method: Peng et al., "YaRN" (arXiv:2309.00071), and the public DeepSeek-V3 modelling code.
///
/// Fields that published configurations of the family carry and that attention does not need are
/// accepted. Everything else that is wrong is collected into one std::invalid_argument, one line:
/// missing fields, unknown fields (a typing error must not pass silently) and bad values with what
/// was got and what was expected.
ModelConfig parse_model_config(std::string_view json, std::string name);

/// A preset, `deepseek-v3.2` or `glm-5`, or else the path of a config.json. Throws
/// std::invalid_argument also for a file that cannot be read.
ModelConfig load_model_config(const std::string& preset_or_path);

}  // namespace sparse_mla::command
