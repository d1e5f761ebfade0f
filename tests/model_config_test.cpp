#include "tools/model_config.h"

#include <cmath>
#include <cstdio>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>

#include <gtest/gtest.h>

namespace sparse_mla::command {
namespace {

// The fields of published files of each family, with their values.
const std::string kDeepSeekV32 = R"({
  "architectures": ["DeepseekV32ForCausalLM"],
  "attention_bias": false,
  "attention_dropout": 0.0,
  "bos_token_id": 0,
  "eos_token_id": 1,
  "ep_size": 1,
  "first_k_dense_replace": 3,
  "hidden_act": "silu",
  "hidden_size": 7168,
  "index_head_dim": 128,
  "index_n_heads": 64,
  "index_topk": 2048,
  "initializer_range": 0.02,
  "intermediate_size": 18432,
  "kv_lora_rank": 512,
  "max_position_embeddings": 163840,
  "model_type": "deepseek_v32",
  "moe_intermediate_size": 2048,
  "moe_layer_freq": 1,
  "n_group": 8,
  "n_routed_experts": 256,
  "n_shared_experts": 1,
  "norm_topk_prob": true,
  "num_attention_heads": 128,
  "num_experts_per_tok": 8,
  "num_hidden_layers": 61,
  "num_key_value_heads": 128,
  "num_nextn_predict_layers": 1,
  "q_lora_rank": 1536,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                          "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
  "rms_norm_eps": 1e-06,
  "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                   "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                   "type": "yarn"},
  "rope_theta": 10000,
  "routed_scaling_factor": 2.5,
  "scoring_func": "sigmoid",
  "tie_word_embeddings": false,
  "topk_group": 4,
  "topk_method": "noaux_tc",
  "torch_dtype": "bfloat16",
  "transformers_version": "4.44.2",
  "use_cache": true,
  "v_head_dim": 128,
  "vocab_size": 129280
})";

const std::string kGlm5 = R"({
  "architectures": ["GlmMoeDsaForCausalLM"],
  "attention_bias": false,
  "attention_dropout": 0.0,
  "dtype": "bfloat16",
  "eos_token_id": [154820, 154827, 154829],
  "ep_size": 1,
  "first_k_dense_replace": 3,
  "head_dim": 192,
  "hidden_act": "silu",
  "hidden_size": 6144,
  "index_head_dim": 128,
  "index_n_heads": 32,
  "index_share_for_mtp_iteration": true,
  "index_skip_topk_offset": 3,
  "index_topk": 2048,
  "index_topk_freq": 4,
  "index_topk_pattern": null,
  "indexer_rope_interleave": true,
  "indexer_types": ["full", "full", "full", "shared"],
  "initializer_range": 0.02,
  "intermediate_size": 12288,
  "kv_lora_rank": 512,
  "max_position_embeddings": 202752,
  "mlp_layer_types": ["dense", "dense", "dense", "sparse"],
  "model_type": "glm_moe_dsa",
  "moe_intermediate_size": 2048,
  "moe_layer_freq": 1,
  "n_group": 1,
  "n_routed_experts": 256,
  "n_shared_experts": 1,
  "norm_topk_prob": true,
  "num_attention_heads": 64,
  "num_experts_per_tok": 8,
  "num_hidden_layers": 78,
  "num_key_value_heads": 64,
  "num_nextn_predict_layers": 1,
  "pad_token_id": 154820,
  "pretraining_tp": 1,
  "q_lora_rank": 2048,
  "qk_head_dim": 256,
  "qk_nope_head_dim": 192,
  "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-05,
  "rope_interleave": true,
  "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
  "routed_scaling_factor": 2.5,
  "scoring_func": "sigmoid",
  "tie_word_embeddings": false,
  "topk_group": 1,
  "topk_method": "noaux_tc",
  "transformers_version": "5.0.2",
  "use_cache": true,
  "v_head_dim": 256,
  "vocab_size": 154880
})";

// Only what is needed.
const std::string kMinimal = R"({"num_attention_heads": 8, "kv_lora_rank": 64,
  "qk_rope_head_dim": 16, "qk_nope_head_dim": 48, "v_head_dim": 32, "index_n_heads": 4,
  "index_head_dim": 32, "index_topk": 128})";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

// kMinimal with more fields.
std::string with(const std::string& fields) { return replaced(kMinimal, "{", "{" + fields + ", "); }

double scale_of(const std::string& text) { return parse_model_config(text, "c").softmax_scale; }

std::string error_of(const std::string& text) {
  try {
    parse_model_config(text, "config.json");
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

TEST(ModelConfig, ReadsDeepSeekV32) {
  ModelConfig config = parse_model_config(kDeepSeekV32, "deepseek-v3.2");
  EXPECT_EQ(config, load_model_config("deepseek-v3.2"));
  EXPECT_EQ(config.num_attention_heads, 128);
  EXPECT_EQ(config.index_n_heads, 64);
  // (128+64)^-1/2 · (0.1 · ln 40 + 1)², by hand.
  EXPECT_NEAR(config.softmax_scale, 0.0721687836 * 1.3688879454 * 1.3688879454, 1e-9);
}

TEST(ModelConfig, ReadsGlm5) {
  ModelConfig config = parse_model_config(kGlm5, "glm-5");
  EXPECT_EQ(config, load_model_config("glm-5"));
  EXPECT_EQ(config.num_attention_heads, 64);
  EXPECT_EQ(config.qk_nope_head_dim, 192);
  EXPECT_EQ(config.v_head_dim, 256);
  EXPECT_EQ(config.index_n_heads, 32);
  EXPECT_EQ(config.softmax_scale, 1.0 / 16);
}

TEST(ModelConfig, NeedsOnlyTheAttentionFields) {
  EXPECT_EQ(parse_model_config(kMinimal, "tiny"),
            (ModelConfig{"tiny", 8, 64, 16, 48, 32, 4, 32, 128, 0.125}));
}

TEST(ModelConfig, MscaleIsOneUnlessYarnAsksForIt) {
  EXPECT_EQ(scale_of(with(R"("rope_scaling": null)")), 0.125);
  EXPECT_EQ(scale_of(with(R"("rope_scaling": {"type": "yarn", "factor": 40})")), 0.125);
  EXPECT_EQ(scale_of(with(R"("rope_scaling": {"factor": 40, "mscale_all_dim": 0})")), 0.125);
  EXPECT_EQ(scale_of(with(R"("rope_scaling": {"factor": 1, "mscale_all_dim": 1})")), 0.125);
  EXPECT_EQ(
      scale_of(with(
          R"("rope_parameters": {"rope_type": "default", "factor": 40, "mscale_all_dim": 1})")),
      0.125);
  const double mscale = 0.1 * 0.707 * std::log(8.0) + 1;
  EXPECT_DOUBLE_EQ(scale_of(with(R"("rope_scaling": {"factor": 8, "mscale_all_dim": 0.707})")),
                   0.125 * mscale * mscale);
  EXPECT_DOUBLE_EQ(scale_of(with(R"("rope_scaling": null, "rope_parameters": {"rope_type": "yarn",
                                    "rope_theta": 1e6, "factor": 8.0, "mscale_all_dim": 0.707})")),
                   0.125 * mscale * mscale);
}

TEST(ModelConfig, MscaleIsNotMscaleAllDim) {
  // `mscale` scales the rotary tables; only mscale_all_dim enters the softmax scale.
  EXPECT_EQ(scale_of(with(R"("rope_scaling": {"factor": 8, "mscale": 1})")), 0.125);
}

TEST(ModelConfig, NamesAllMissingFieldsAtOnce) {
  EXPECT_EQ(error_of("{}"),
            "config.json: missing fields: num_attention_heads, kv_lora_rank, qk_rope_head_dim, "
            "qk_nope_head_dim, v_head_dim, index_n_heads, index_head_dim, index_topk");
  EXPECT_EQ(error_of(with(R"("rope_scaling": {"mscale_all_dim": 1})")),
            "config.json: missing fields: rope_scaling.factor");
}

TEST(ModelConfig, NamesUnknownFieldsAndWhatWasMeant) {
  EXPECT_EQ(error_of(replaced(kMinimal, "index_topk", "index_topkk")),
            "config.json: missing fields: index_topk; unknown fields: \"index_topkk\" (did you "
            "mean index_topk?)");
  EXPECT_EQ(error_of(with(R"("my_own_field": 1)")),
            "config.json: unknown fields: \"my_own_field\"");
  EXPECT_EQ(error_of(with(R"("rope_scaling": {"factor": 40, "mscale_all_dims": 1})")),
            "config.json: unknown fields: rope_scaling.\"mscale_all_dims\" (did you mean "
            "mscale_all_dim?)");
}

TEST(ModelConfig, NamesBadValues) {
  const auto error_with_topk = [](const std::string& value) {
    return error_of(replaced(kMinimal, "128}", value + "}"));
  };
  const std::string expected = ", expected an integer from 1 to 1048576";
  EXPECT_EQ(error_with_topk("0"), "config.json: index_topk: got 0" + expected);
  EXPECT_EQ(error_with_topk("-3"), "config.json: index_topk: got -3" + expected);
  EXPECT_EQ(error_with_topk("1048577"), "config.json: index_topk: got 1048577" + expected);
  EXPECT_EQ(error_with_topk("18446744073709551615"),
            "config.json: index_topk: got 18446744073709551615" + expected);
  EXPECT_EQ(error_with_topk("2048.0"), "config.json: index_topk: got 2048.0" + expected);
  EXPECT_EQ(error_with_topk("\"2048\""), "config.json: index_topk: got \"2048\"" + expected);
  EXPECT_EQ(error_with_topk("null"), "config.json: index_topk: got null" + expected);
  EXPECT_EQ(error_with_topk("true"), "config.json: index_topk: got true" + expected);
  EXPECT_EQ(error_with_topk("[1]"), "config.json: index_topk: got an array" + expected);
  EXPECT_EQ(error_with_topk("{}"), "config.json: index_topk: got an object" + expected);
  EXPECT_EQ(error_of(replaced(kMinimal, "\"qk_rope_head_dim\": 16", "\"qk_rope_head_dim\": 15")),
            "config.json: qk_rope_head_dim: got 15, expected an even integer from 2 to 4096");
  EXPECT_EQ(error_of(with(R"("rope_scaling": "yarn")")),
            "config.json: rope_scaling: got \"yarn\", expected an object or null");
  EXPECT_EQ(error_of(with(R"("rope_scaling": {"type": 3})")),
            "config.json: rope_scaling.type: got 3, expected a string");
  EXPECT_EQ(error_of(with(R"("rope_scaling": {"factor": "40", "mscale_all_dim": -1})")),
            "config.json: rope_scaling.mscale_all_dim: got -1, expected a number from 0 to 100; "
            "rope_scaling.factor: got \"40\", expected a number from 0 to 1000000");
  EXPECT_EQ(error_of(with(R"("rope_scaling": {"factor": 8, "mscale_all_dim": 1},
                             "rope_parameters": {"rope_type": "default"})")),
            "config.json: rope_scaling and rope_parameters: got two different scalings, expected "
            "one");
}

TEST(ModelConfig, NamesWhatIsNoConfig) {
  EXPECT_EQ(error_of(""),
            "config.json: got text that is not JSON, expected a Hugging Face config.json");
  EXPECT_EQ(error_of("[1, 2]"),
            "config.json: got an array, expected the JSON object of a Hugging Face config.json");
  EXPECT_THROW(load_model_config("no/such/file.json"), std::invalid_argument);
  EXPECT_THROW(load_model_config("."), std::invalid_argument);  // a folder
  EXPECT_THROW(load_model_config("deepseek-v3"), std::invalid_argument);
}

TEST(ModelConfig, LoadsFiles) {
  const std::string path = testing::TempDir() + "/model_config_test.json";
  std::ofstream(path) << kMinimal;
  EXPECT_EQ(load_model_config(path), parse_model_config(kMinimal, path));
  std::remove(path.c_str());
}

TEST(ModelConfig, MutatedTextsParseOrThrowInvalidArgument) {
  constexpr std::string_view kAlphabet = "0123456789\",:{}[]-.etrufalsn ";
  std::mt19937_64 random(17);
  int parsed = 0;
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text =
        round % 2 == 0 ? kMinimal : with(R"("rope_scaling": {"factor": 8, "mscale_all_dim": 1.0})");
    for (size_t edits = 1 + random() % 4; edits > 0; --edits) {
      const size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text.erase(at, 1 + random() % 4);
          break;
        case 1:
          text[at] = static_cast<char>(random() % 256);
          break;
        case 2:
          text[at] = kAlphabet[random() % kAlphabet.size()];
          break;
        default:
          text.insert(at, 1, kAlphabet[random() % kAlphabet.size()]);
      }
      if (text.empty()) text = "x";
    }
    try {
      const ModelConfig config = parse_model_config(text, "c");
      ++parsed;
      ASSERT_TRUE(std::isfinite(config.softmax_scale) && config.softmax_scale > 0) << text;
      ASSERT_GE(config.index_topk, 1);
    } catch (const std::invalid_argument& error) {
      ++refused;
      ASSERT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos) << text;
    }
  }
  EXPECT_GT(parsed, 100);
  EXPECT_GT(refused, 500);
}

}  // namespace
}  // namespace sparse_mla::command
