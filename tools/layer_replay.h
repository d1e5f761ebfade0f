#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sparse_mla/layer.h"

#include "tests/support/compare.h"
#include "tests/support/layer_runner.h"
#include "tests/support/problem.h"
#include "tools/request_lengths.h"

namespace sparse_mla::command {

/// What one batch did.
struct BatchResult {
  std::vector<RequestLengths> requests;
  std::int64_t num_tokens = 0, num_decode_tokens = 0;
  AttentionPath path = AttentionPath::none;
  std::string why_path;
  std::int64_t chunks = 0;
  std::optional<MaskScope> mask_scope;  ///< of the masked path
  double seconds = 0;                   ///< of run_layer
  /// The same with each path that can serve the batch forced, where they are compared.
  std::map<AttentionPath, double> seconds_of_path;
};

/// What the checks of all batches found (docs: architecture, "Reproducibility").
struct CheckResult {
  CacheFormat cache_format = CacheFormat::bf16;
  support::ErrorMeasure errors;
  /// Of a quantised cache: against the rows before they were quantised, with the same picks.
  support::ErrorMeasure unquantised;
  support::SelectionMeasure selection;
  std::int64_t tokens = 0;
  std::int64_t wrong_cache_rows = 0;

  bool quantised() const { return cache_format != CacheFormat::bf16; }
  bool selection_checked() const { return selection.num_rows() > 0; }
  /// Empty = passed, else what is out of bounds.
  std::string fault() const;
};

/// Replays batches through one Capacity: seeded data, run, check.
class LayerReplay {
 public:
  /// `compare_paths`: every batch is timed with each path forced, too.
  LayerReplay(const Limits& limits, Dispatch dispatch, BatchOptions options,
              support::SelectionKind selection, std::uint64_t seed, bool compare_paths = false);

  /// Runs one batch; its data stay until the next call.
  BatchResult run(const std::vector<RequestLengths>& requests);

  /// The last batch's tokens that are compared with the reference: a sample, or all.
  std::vector<support::CheckedToken> checked_tokens(bool all) const;
  /// Compares the last batch with the fp64 reference.
  void check(bool all, CheckResult& result);

  const Capacity& capacity() const { return capacity_; }
  const support::LayerData& data() const { return *data_; }
  /// Seconds per stage over all batches, in the order in which the stages first ran.
  const std::vector<std::pair<Stage, double>>& stage_seconds() const { return stage_seconds_; }

 private:
  /// The batch with each path forced that can serve it.
  std::map<AttentionPath, BatchMetadata> with_each_path(const support::LayerProblem& problem) const;
  /// Medians of some runs of each, in turns, on the data at hand.
  std::vector<double> compared_seconds(const std::vector<const BatchMetadata*>& batches);
  void check_selection(std::span<const support::CheckedToken> tokens, CheckResult& result);
  /// The layer's own scores of each token, [position + 1], by the entry that the capacity chose.
  std::vector<std::vector<float>> layer_scores(std::span<const support::CheckedToken> tokens);

  Capacity capacity_;
  BatchOptions options_;
  support::SelectionKind selection_;
  std::uint64_t seed_;
  bool compare_paths_;
  std::shared_ptr<const support::LayerWeights> weights_;
  support::LayerRunner runner_;
  std::optional<support::LayerData> data_;
  AttentionPath path_ = AttentionPath::none;
  std::int64_t next_request_id_ = 0;
  std::vector<std::pair<Stage, double>> stage_seconds_;
};

}  // namespace sparse_mla::command
