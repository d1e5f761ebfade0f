#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "tools/request_lengths.h"
#include "tools/trace.h"

namespace sparse_mla::command {

/// Where a command's batches come from: `--spec S`, one batch, or `--trace F --batch-tokens T`, a
/// recorded trace cut into batches of T new tokens.
class BatchInput {
 public:
  /// Adds the three options to `command`. This object has to outlive the parse.
  void add_options(CLI::App& command);

  /// Call once after the parse. Throws std::invalid_argument unless exactly one source is named and
  /// readable.
  void open();

  /// The next batch; false at the end.
  bool next(std::vector<RequestLengths>& batch);

  bool is_trace() const { return cutter_.has_value(); }
  int64_t batch_tokens() const { return batch_tokens_; }  // of a trace
  /// Requests read so far.
  int64_t num_requests() const;
  /// The spec or the file, for people.
  const std::string& name() const { return is_trace() ? trace_ : spec_; }

 private:
  CLI::Option* spec_option_ = nullptr;
  CLI::Option* trace_option_ = nullptr;
  CLI::Option* batch_tokens_option_ = nullptr;
  std::string spec_;
  std::string trace_;
  int64_t batch_tokens_ = 0;

  std::vector<RequestLengths> spec_batch_;
  bool spec_done_ = false;
  std::ifstream file_;
  std::optional<TraceReader> reader_;
  std::optional<BatchCutter> cutter_;
};

}  // namespace sparse_mla::command
