#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "sparse_mla/capacity.h"
#include "sparse_mla/limits.h"

#include "tools/model_config.h"

namespace sparse_mla::command {

/// The model's sizes as the library takes them, with `heads` of them on this rank.
ModelDims model_dims(const ModelConfig& model, std::optional<int> heads);

/// What an engine's limits cost: `info --limits` and the options that set them.
class LimitsReport {
 public:
  /// Adds `--limits` and its options to `command`. This object has to outlive the parse.
  void add_options(CLI::App& command);
  bool wanted() const { return wanted_; }

  /// Where the workspace's bytes go and what the caches take, on stdout. Throws
  /// std::invalid_argument for limits out of range.
  void print(bool json) const;

 private:
  Limits limits() const;
  void print_json(const Capacity& capacity) const;
  void print_people(const Capacity& capacity) const;

  bool wanted_ = false;
  std::string model_ = "deepseek-v3.2";
  std::optional<int> heads_;
  std::string cache_ = "bf16";
  Limits limits_;  // the library's defaults, as far as no option says otherwise
  std::int64_t cache_tokens_ = 1;
  std::int64_t layers_ = 1;
};

}  // namespace sparse_mla::command
