#include "tools/limits_report.h"

#include <algorithm>
#include <iostream>
#include <limits>
#include <vector>

#include "sparse_mla/cache.h"

#include "tools/table.h"

namespace sparse_mla::command {
namespace {

using Json = nlohmann::ordered_json;

// So that tokens × layers × bytes stay far inside an int64.
constexpr std::int64_t kMaxCacheTokens = std::int64_t{1} << 36;
constexpr std::int64_t kMaxLayers = 4096;

std::string gibibytes(std::int64_t bytes) {
  return format_number(static_cast<double>(bytes) / (1 << 30), 2);
}

// Buffers of one group lie behind each other; groups start at the same byte.
std::string group_of(const WorkspaceBuffer& buffer) {
  return buffer.name.substr(0, buffer.name.find('.'));
}

std::int64_t index_row_bytes(const ModelDims& dims) {
  return index_page_bytes(1, dims.index_head_dim);
}

}  // namespace

ModelDims model_dims(const ModelConfig& model, std::optional<int> heads) {
  ModelDims dims;
  dims.num_heads = heads.value_or(model.num_attention_heads);
  dims.kv_lora_rank = model.kv_lora_rank;
  dims.qk_rope_head_dim = model.qk_rope_head_dim;
  dims.qk_nope_head_dim = model.qk_nope_head_dim;
  dims.v_head_dim = model.v_head_dim;
  dims.index_n_heads = model.index_n_heads;
  dims.index_head_dim = model.index_head_dim;
  dims.index_topk = model.index_topk;
  dims.softmax_scale = static_cast<float>(model.softmax_scale);
  return dims;
}

void LimitsReport::add_options(CLI::App& command) {
  CLI::Option* wanted = command.add_flag(
      "--limits", wanted_, "What an engine's limits cost: workspace and caches, byte by byte");
  const CLI::Range positive(1, std::numeric_limits<std::int32_t>::max());
  const CLI::Range bytes(std::int64_t{0}, std::numeric_limits<std::int64_t>::max());
  const auto add = [&](const char* name, auto& value, const char* text) {
    return command.add_option(name, value, text)->needs(wanted);
  };
  add("--model", model_, "deepseek-v3.2, glm-5, or the path of a Hugging Face config.json")
      ->capture_default_str();
  add("--heads", heads_, "Query heads on this rank [the model's]")->check(CLI::Range(1, 128));
  add("--max-tokens", limits_.max_num_tokens, "New tokens of a batch")
      ->check(positive)
      ->capture_default_str();
  add("--max-seqs", limits_.max_num_seqs, "Requests of a batch")
      ->check(positive)
      ->capture_default_str();
  add("--max-model-len", limits_.max_model_len, "Tokens of a request")
      ->check(positive)
      ->capture_default_str();
  add("--block", limits_.block_size, "Rows of a cache page")
      ->check(positive)
      ->capture_default_str();
  add("--cache", cache_, "Format of the latent cache: bf16, fp8_ds_mla or fp8")
      ->check(CLI::IsMember({"bf16", "fp8_ds_mla", "fp8"}))
      ->capture_default_str();
  add("--workspace", limits_.workspace_rows, "Cap of the context workspace, rows")->check(positive);
  add("--score-budget", limits_.score_budget_bytes, "Indexer scores of one piece, bytes")
      ->check(bytes)
      ->capture_default_str();
  add("--mask-budget", limits_.mask_budget_bytes, "Mask words, bytes")
      ->check(bytes)
      ->capture_default_str();
  add("--projection-budget", limits_.projection_budget_bytes,
      "Up-projected keys and values at a time, bytes")
      ->check(bytes)
      ->capture_default_str();
  add("--cache-tokens", cache_tokens_, "Tokens that the caches hold")
      ->check(CLI::Range(std::int64_t{1}, kMaxCacheTokens))
      ->capture_default_str();
  add("--layers", layers_, "Layers that have caches")
      ->check(CLI::Range(std::int64_t{1}, kMaxLayers))
      ->capture_default_str();
}

Limits LimitsReport::limits() const {
  Limits limits = limits_;
  limits.dims = model_dims(load_model_config(model_), heads_);
  limits.cache_format = parse_cache_format(cache_);
  return limits;
}

void LimitsReport::print(bool json) const {
  const Capacity capacity(limits());
  if (json) {
    print_json(capacity);
  } else {
    print_people(capacity);
  }
}

void LimitsReport::print_json(const Capacity& capacity) const {
  const Limits& limits = capacity.limits();
  Json buffers = Json::array();
  for (const WorkspaceBuffer& buffer : capacity.workspace_buffers())
    buffers.push_back({{"name", buffer.name}, {"offset", buffer.offset}, {"bytes", buffer.bytes}});
  const std::int64_t latent = latent_row_bytes(limits.cache_format, limits.dims);
  const std::int64_t index = index_row_bytes(limits.dims);
  const std::int64_t rows = cache_tokens_ * layers_;
  const Json out = {{"model", model_},
                    {"heads", limits.dims.num_heads},
                    {"max_num_tokens", limits.max_num_tokens},
                    {"max_num_seqs", limits.max_num_seqs},
                    {"max_model_len", limits.max_model_len},
                    {"block_size", limits.block_size},
                    {"workspace_rows", capacity.workspace_rows()},
                    {"head_group", capacity.head_group()},
                    {"token_tile", capacity.token_tile()},
                    {"workspace_bytes", capacity.workspace_bytes()},
                    {"workspace_buffers", buffers},
                    {"cache",
                     {{"format", to_string(limits.cache_format)},
                      {"latent_bytes_per_token_and_layer", latent},
                      {"index_bytes_per_token_and_layer", index},
                      {"tokens", cache_tokens_},
                      {"layers", layers_},
                      {"latent_bytes", latent * rows},
                      {"index_bytes", index * rows}}}};
  std::cout << out.dump(2) << '\n';
}

void LimitsReport::print_people(const Capacity& capacity) const {
  const Limits& limits = capacity.limits();
  std::cout << "model " << model_ << ", " << limits.dims.num_heads << " heads, at most "
            << format_count(limits.max_num_tokens) << " new tokens of "
            << format_count(limits.max_num_seqs) << " requests, "
            << format_count(limits.max_model_len) << " tokens a request\ncontext workspace "
            << format_count(capacity.workspace_rows()) << " rows, keys and values of "
            << capacity.head_group() << " heads at a time, absorbed queries of "
            << format_count(capacity.token_tile()) << " tokens at a time\n\n";
  Table workspace({{"group", Table::Align::left},
                   {"buffer", Table::Align::left},
                   {"offset, bytes"},
                   {"size, bytes"},
                   {"GiB"}});
  std::string group;
  for (const WorkspaceBuffer& buffer : capacity.workspace_buffers()) {
    const auto bytes = static_cast<std::int64_t>(buffer.bytes);
    const bool first = group_of(buffer) != group;
    group = group_of(buffer);
    workspace.add_row({first ? group : "", buffer.name.substr(group.size() + 1),
                       format_count(static_cast<std::int64_t>(buffer.offset)), format_count(bytes),
                       gibibytes(bytes)});
  }
  const auto all = static_cast<std::int64_t>(capacity.workspace_bytes());
  workspace.add_row({"all", "", "", format_count(all), gibibytes(all)});
  std::cout << workspace << "Groups never run together and share memory: the largest counts.\n\n";

  Table caches({{"cache", Table::Align::left},
                {"format", Table::Align::left},
                {"bytes per token and layer"},
                {"bytes of all"},
                {"GiB of all"}});
  const std::int64_t rows = cache_tokens_ * layers_;
  const std::int64_t latent = latent_row_bytes(limits.cache_format, limits.dims);
  const std::int64_t index = index_row_bytes(limits.dims);
  caches.add_row({"latent", to_string(limits.cache_format), format_count(latent),
                  format_count(latent * rows), gibibytes(latent * rows)});
  caches.add_row({"indexer keys", "e4m3 and fp32 scale", format_count(index),
                  format_count(index * rows), gibibytes(index * rows)});
  std::cout << caches << "All: " << format_count(cache_tokens_)
            << (cache_tokens_ == 1 ? " token, " : " tokens, ") << format_count(layers_)
            << (layers_ == 1 ? " layer\n" : " layers\n");
}

}  // namespace sparse_mla::command
