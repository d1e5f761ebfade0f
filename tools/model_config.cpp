#include "tools/model_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/quote.h"

namespace sparse_mla::command {
namespace {

using Json = nlohmann::json;

struct IntegerField {
  std::string_view name;
  int32_t ModelConfig::*member;
  int32_t max;   // generous: an order of magnitude beyond any published model
  int32_t unit;  // the value has to be a multiple
};

constexpr IntegerField kIntegerFields[] = {
    {"num_attention_heads", &ModelConfig::num_attention_heads, 4096, 1},
    {"kv_lora_rank", &ModelConfig::kv_lora_rank, 8192, 1},
    {"qk_rope_head_dim", &ModelConfig::qk_rope_head_dim, 4096, 2},  // rotary turns pairs
    {"qk_nope_head_dim", &ModelConfig::qk_nope_head_dim, 4096, 1},
    {"v_head_dim", &ModelConfig::v_head_dim, 4096, 1},
    {"index_n_heads", &ModelConfig::index_n_heads, 4096, 1},
    {"index_head_dim", &ModelConfig::index_head_dim, 4096, 1},
    {"index_topk", &ModelConfig::index_topk, 1 << 20, 1},
};

// Fields of published config.json files of these families that attention does not depend on here.
constexpr std::string_view kUnusedFields[] = {
    // What every transformers configuration may carry.
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path",
    "add_cross_attention", "architectures", "attn_implementation", "auto_map", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "id2label", "is_decoder", "is_encoder_decoder", "label2id",
    "length_penalty", "max_length", "min_length", "model_type", "name_or_path",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "prefix",
    "problem_type", "pruned_heads", "quantization_config", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p",
    "torch_dtype", "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
    "use_return_dict",
    // Decoder layers, mixture of experts, multi-token prediction: DeepSeek-V3, V3.2 and GLM.
    "attention_bias", "attention_dropout", "aux_loss_alpha", "compression_config", "ep_size",
    "first_k_dense_replace", "head_dim", "hidden_act", "hidden_size",
    "index_share_for_mtp_iteration", "index_skip_topk_offset", "index_topk_freq",
    "index_topk_pattern", "indexer_rope_interleave", "indexer_types", "initializer_range",
    "intermediate_size", "layer_types", "max_position_embeddings", "mlp_bias", "mlp_layer_types",
    "moe_intermediate_size", "moe_layer_freq", "moe_router_dtype", "n_group", "n_routed_experts",
    "n_shared_experts", "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_hidden_layers",
    "num_key_value_heads", "num_local_experts", "num_nextn_predict_layers", "output_router_logits",
    "partial_rotary_factor", "pretraining_tp", "q_lora_rank", "qk_head_dim", "rms_norm_eps",
    "rope_interleave", "rope_theta", "routed_scaling_factor", "router_aux_loss_coef",
    "scoring_func", "seq_aux", "sliding_window", "topk_group", "topk_method", "unsloth_fixed",
    "unsloth_version", "use_index_cache", "use_qk_norm", "use_sliding_window", "vocab_size"};

// The blocks that hold the rotary embedding's settings, and their fields.
constexpr std::string_view kRopeBlocks[] = {"rope_scaling", "rope_parameters"};
constexpr std::string_view kRopeFields[] = {"attention_factor",
                                            "beta_fast",
                                            "beta_slow",
                                            "factor",
                                            "finetuned",
                                            "high_freq_factor",
                                            "long_factor",
                                            "low_freq_factor",
                                            "mrope_section",
                                            "mscale",
                                            "mscale_all_dim",
                                            "original_max_position_embeddings",
                                            "partial_rotary_factor",
                                            "rope_theta",
                                            "rope_type",
                                            "short_factor",
                                            "truncate",
                                            "type"};

bool contains(std::span<const std::string_view> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Number of insertions, deletions and replacements between two field names.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

// An unknown field as the error names it, with the field that was probably meant.
std::string describe_unknown(const std::string& name, std::span<const std::string_view> known) {
  std::string text = quote(name, 60);
  if (name.size() > 60) return text;
  constexpr size_t kTypingErrors = 2;
  const auto nearest =
      std::min_element(known.begin(), known.end(), [&](std::string_view a, std::string_view b) {
        return edit_distance(name, a) < edit_distance(name, b);
      });
  if (nearest != known.end() && edit_distance(name, *nearest) <= kTypingErrors) {
    text += " (did you mean " + std::string(*nearest) + "?)";
  }
  return text;
}

std::string describe(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  if (value.is_string()) return quote(value.get<std::string>());
  return value.dump();
}

std::string join(const std::vector<std::string>& parts, std::string_view separator) {
  std::string text;
  for (const std::string& part : parts) {
    if (!text.empty()) text += separator;
    text += part;
  }
  return text;
}

// Collects everything that is wrong with a file, for one error.
struct Problems {
  std::vector<std::string> missing;
  std::vector<std::string> unknown;
  std::vector<std::string> bad;  // "field: got …, expected …"

  void report(const std::string& name) const {
    std::vector<std::string> parts;
    if (!missing.empty()) parts.push_back("missing fields: " + join(missing, ", "));
    if (!unknown.empty()) parts.push_back("unknown fields: " + join(unknown, ", "));
    parts.insert(parts.end(), bad.begin(), bad.end());
    if (!parts.empty()) throw std::invalid_argument(name + ": " + join(parts, "; "));
  }
};

std::optional<int64_t> integer_in(const Json& value, int64_t min, int64_t max) {
  // JSON numbers above 2^63 are unsigned in this library: they must not wrap.
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(max)) {
    return std::nullopt;
  }
  if (!value.is_number_integer()) return std::nullopt;
  const auto integer = value.get<int64_t>();
  if (integer < min || integer > max) return std::nullopt;
  return integer;
}

// mscale of one rope block: 1 unless it is YaRN-scaled.
double mscale_of(const std::string& block, const Json& rope, Problems& problems) {
  if (rope.is_null()) return 1;
  if (!rope.is_object()) {
    problems.bad.push_back(block + ": got " + describe(rope) + ", expected an object or null");
    return 1;
  }
  for (const auto& item : rope.items()) {
    if (contains(kRopeFields, item.key())) continue;
    problems.unknown.push_back(block + "." + describe_unknown(item.key(), kRopeFields));
  }
  for (const char* key : {"rope_type", "type"}) {
    const auto type = rope.find(key);
    if (type == rope.end()) continue;
    if (!type->is_string()) {
      problems.bad.push_back(block + "." + key + ": got " + describe(*type) +
                             ", expected a string");
      return 1;
    }
    if (*type == "default") return 1;
  }
  const auto number = [&](const char* key, double max) -> std::optional<double> {
    const auto field = rope.find(key);
    if (field == rope.end() || field->is_null()) return std::nullopt;
    const double value = field->is_number() ? field->get<double>() : -1;
    if (!(value >= 0 && value <= max)) {
      problems.bad.push_back(block + "." + key + ": got " + describe(*field) +
                             ", expected a number from 0 to " +
                             std::to_string(static_cast<int64_t>(max)));
      return 0;
    }
    return value;
  };
  const std::optional<double> mscale_all_dim = number("mscale_all_dim", 100);
  const std::optional<double> factor = number("factor", 1e6);
  if (mscale_all_dim.value_or(0) == 0) return 1;
  if (!factor) {
    problems.missing.push_back(block + ".factor");
    return 1;
  }
  return *factor <= 1 ? 1 : 0.1 * *mscale_all_dim * std::log(*factor) + 1;
}

double softmax_scale_of(const ModelConfig& config, double mscale) {
  return mscale * mscale / std::sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim);
}

ModelConfig deepseek_v3_2() {
  ModelConfig config = {.name = "deepseek-v3.2",
                        .num_attention_heads = 128,
                        .kv_lora_rank = 512,
                        .qk_rope_head_dim = 64,
                        .qk_nope_head_dim = 128,
                        .v_head_dim = 128,
                        .index_n_heads = 64,
                        .index_head_dim = 128,
                        .index_topk = 2048};
  // rope_scaling of the published file: factor 40, mscale_all_dim 1.
  config.softmax_scale = softmax_scale_of(config, 0.1 * std::log(40.0) + 1);
  return config;
}

ModelConfig glm_5() {
  ModelConfig config = {.name = "glm-5",
                        .num_attention_heads = 64,
                        .kv_lora_rank = 512,
                        .qk_rope_head_dim = 64,
                        .qk_nope_head_dim = 192,
                        .v_head_dim = 256,
                        .index_n_heads = 32,
                        .index_head_dim = 128,
                        .index_topk = 2048};
  config.softmax_scale = softmax_scale_of(config, 1);  // rope type "default"
  return config;
}

}  // namespace

ModelConfig parse_model_config(std::string_view text, std::string name) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) {
    throw std::invalid_argument(name +
                                ": got text that is not JSON, expected a Hugging Face "
                                "config.json");
  }
  if (!json.is_object()) {
    throw std::invalid_argument(name + ": got " + describe(json) +
                                ", expected the JSON object of a Hugging Face config.json");
  }

  Problems problems;
  ModelConfig config;
  std::vector<std::string_view> known(std::begin(kUnusedFields), std::end(kUnusedFields));
  known.insert(known.end(), std::begin(kRopeBlocks), std::end(kRopeBlocks));
  for (const IntegerField& field : kIntegerFields) {
    known.push_back(field.name);
    const auto value = json.find(std::string(field.name));
    if (value == json.end()) {
      problems.missing.emplace_back(field.name);
      continue;
    }
    const std::optional<int64_t> integer = integer_in(*value, field.unit, field.max);
    if (!integer || *integer % field.unit != 0) {
      problems.bad.push_back(std::string(field.name) + ": got " + describe(*value) +
                             ", expected an " + (field.unit == 2 ? "even " : "") + "integer from " +
                             std::to_string(field.unit) + " to " + std::to_string(field.max));
      continue;
    }
    config.*field.member = static_cast<int32_t>(*integer);
  }
  for (const auto& item : json.items()) {
    if (!contains(known, item.key())) {
      problems.unknown.push_back(describe_unknown(item.key(), known));
    }
  }

  std::optional<double> mscale;
  for (const std::string_view block : kRopeBlocks) {
    const auto rope = json.find(std::string(block));
    if (rope == json.end() || rope->is_null()) continue;
    const double of_block = mscale_of(std::string(block), *rope, problems);
    if (mscale && *mscale != of_block) {
      problems.bad.push_back(
          "rope_scaling and rope_parameters: got two different scalings, "
          "expected one");
    }
    mscale = of_block;
  }
  problems.report(name);

  config.name = std::move(name);
  config.softmax_scale = softmax_scale_of(config, mscale.value_or(1));
  return config;
}

ModelConfig load_model_config(const std::string& preset_or_path) {
  for (ModelConfig preset : {deepseek_v3_2(), glm_5()}) {
    if (preset.name == preset_or_path) return preset;
  }
  std::ifstream file(preset_or_path, std::ios::binary);
  // A published file has a few KiB; a device or a file of weights may never end.
  constexpr size_t kMaxBytes = size_t{1} << 20;
  std::string text(kMaxBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxBytes) {
    throw std::invalid_argument("model: got " + quote(preset_or_path, 200) + " of more than " +
                                std::to_string(kMaxBytes) + " bytes, expected a config.json");
  }
  // At the end of a file both flags are set; a folder opens, but cannot be read.
  if (!file.eof() || file.bad() || std::filesystem::is_directory(preset_or_path)) {
    throw std::invalid_argument("model: got " + quote(preset_or_path, 200) +
                                ", expected deepseek-v3.2, glm-5 or a readable config.json");
  }
  return parse_model_config(text, preset_or_path);
}

}  // namespace sparse_mla::command
