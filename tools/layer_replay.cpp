#include "tools/layer_replay.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "tests/support/checked_tokens.h"
#include "tests/support/reference.h"
#include "tests/support/run_entry.h"
#include "tools/memory.h"

namespace sparse_mla::command {

std::string CheckResult::fault() const {
  std::ostringstream text;
  if (tokens > 0 && !errors.within_bf16(cache_format))
    text << "rel_error " << errors.rel_error() << ", max_rel_error " << errors.max_rel_error()
         << ", lse_error " << errors.lse_error() << ": expected at most " << support::kBf16RelError
         << ", " << support::kBf16MaxRelError << ", " << support::max_lse_error(cache_format)
         << "; ";
  if (tokens > 0 && quantised() &&
      !(unquantised.rel_error() <= support::max_quantisation_error(cache_format)))
    text << "rel_error_unquantised " << unquantised.rel_error() << ": expected at most "
         << support::max_quantisation_error(cache_format) << "; ";
  if (!selection.exact())
    text << selection.wrong_rows() << " of " << selection.num_rows()
         << " selections are not the exact top-k; ";
  if (selection_checked() && !(selection.score_error() <= 1))
    text << "scores are off by " << selection.score_error() << " of their bound; ";
  if (wrong_cache_rows > 0) text << wrong_cache_rows << " cache rows are wrong; ";
  std::string fault = text.str();
  if (!fault.empty()) fault.resize(fault.size() - 2);
  return fault;
}

namespace {

// Bytes of a batch's tensors, to refuse what would not fit: caches by the page, and the tokens'.
double memory_of(const std::vector<RequestLengths>& requests, const Limits& limits) {
  const ModelDims& dims = limits.dims;
  double rows = 0, tokens = 0;
  for (const RequestLengths& request : requests) {
    const double seq_len = 1.0 * request.query_len + request.context_len;
    rows += std::ceil(seq_len / limits.block_size) * limits.block_size;
    tokens += request.query_len;
  }
  const double row_bytes = 2.0 * dims.latent_dim() + dims.index_head_dim + 4;
  const double token_bytes = 2.0 * dims.num_heads * (dims.qk_head_dim() + dims.v_head_dim) +
                             4.0 * dims.index_topk + 1.0 * dims.index_n_heads * dims.index_head_dim;
  return rows * row_bytes + tokens * token_bytes;
}

/// A workspace is reserved whole and touched in part: for the worst step that limits admit, of
/// which one batch uses a little. Many times the machine's memory is a typing error all the same.
const Capacity& reservable(const Capacity& capacity) {
  const auto bytes = static_cast<double>(capacity.workspace_bytes());
  if (capacity.backend() == Backend::cpu &&
      bytes > 16 * static_cast<double>(available_memory_bytes()))
    require_memory("workspace", bytes);
  return capacity;
}

}  // namespace

LayerReplay::LayerReplay(const Limits& limits, Dispatch dispatch, BatchOptions options,
                         support::SelectionKind selection, std::uint64_t seed, bool compare_paths)
    : capacity_(limits, std::move(dispatch)),
      options_(options),
      selection_(selection),
      seed_(seed),
      compare_paths_(compare_paths),
      weights_(std::make_shared<support::LayerWeights>(limits.dims, seed)),
      runner_(reservable(capacity_), false) {
  options_.select = selection == support::SelectionKind::indexer;
}

std::map<AttentionPath, BatchMetadata> LayerReplay::with_each_path(
    const support::LayerProblem& problem) const {
  std::map<AttentionPath, BatchMetadata> batches;
  for (const AttentionPath path :
       {AttentionPath::dense, AttentionPath::masked, AttentionPath::sparse}) {
    BatchOptions options = options_;
    options.path = path;
    try {
      batches.emplace(
          std::piecewise_construct, std::forward_as_tuple(path),
          std::forward_as_tuple(capacity_, problem.query_lens, problem.context_lens, options));
    } catch (const std::invalid_argument&) {
      // A path that would ignore the selection, or whose masks do not fit.
    }
  }
  return batches;
}

std::vector<double> LayerReplay::compared_seconds(
    const std::vector<const BatchMetadata*>& batches) {
  constexpr std::size_t kTimings = 3;
  std::vector<const BatchMetadata*> runs;
  for (std::size_t i = 0; i <= kTimings; ++i)  // the first time loads kernels and is not counted
    runs.insert(runs.end(), batches.begin(), batches.end());
  runner_.run(runs, data_->tensors());
  std::vector<double> medians;
  for (std::size_t b = 0; b < batches.size(); ++b) {
    std::vector<double> times;
    for (std::size_t i = 1; i <= kTimings; ++i)
      times.push_back(runner_.seconds_of_each()[i * batches.size() + b]);
    std::nth_element(times.begin(), times.begin() + kTimings / 2, times.end());
    medians.push_back(times[kTimings / 2]);
  }
  return medians;
}

BatchResult LayerReplay::run(const std::vector<RequestLengths>& requests) {
  support::LayerProblem problem;
  problem.dims = capacity_.limits().dims;
  problem.block_size = capacity_.limits().block_size;
  problem.cache_format = capacity_.limits().cache_format;
  problem.seed = seed_;
  problem.selection = selection_;
  for (const RequestLengths& request : requests) {
    problem.query_lens.push_back(request.query_len);
    problem.context_lens.push_back(request.context_len);
    problem.request_ids.push_back(next_request_id_++);
  }
  const BatchMetadata batch(capacity_, problem.query_lens, problem.context_lens, options_);
  require_memory("batch", memory_of(requests, capacity_.limits()));
  data_.reset();  // frees the last batch's memory before this one's is taken
  data_.emplace(problem, weights_);
  path_ = batch.prefill_path();

  BatchResult result;
  result.requests = requests;
  result.num_tokens = batch.num_tokens();
  result.num_decode_tokens = batch.num_decode_tokens();
  result.path = batch.prefill_path();
  result.why_path = batch.why_path();
  result.chunks = static_cast<std::int64_t>(batch.plan().chunks.size());
  if (path_ == AttentionPath::masked) result.mask_scope = batch.mask_scope();

  std::map<AttentionPath, BatchMetadata> others;
  if (compare_paths_ && path_ != AttentionPath::none) others = with_each_path(problem);
  if (others.empty()) {
    runner_.run(batch, data_->tensors());
    result.seconds = runner_.seconds();
  } else {
    std::vector<const BatchMetadata*> batches;
    for (const auto& [path, other] : others) batches.push_back(&other);
    batches.push_back(&batch);
    const std::vector<double> seconds = compared_seconds(batches);
    result.seconds = seconds.back();
    auto of_other = seconds.begin();
    for (const auto& [path, other] : others) result.seconds_of_path[path] = *of_other++;
  }
  for (const auto& [stage, seconds] : runner_.stage_seconds()) {
    auto found = std::find_if(stage_seconds_.begin(), stage_seconds_.end(),
                              [&](const auto& entry) { return entry.first == stage; });
    if (found == stage_seconds_.end())
      found = stage_seconds_.insert(stage_seconds_.end(), {stage, 0.0});
    found->second += seconds;
  }
  return result;
}

std::vector<support::CheckedToken> LayerReplay::checked_tokens(bool all) const {
  std::vector<support::CheckedToken> tokens =
      support::sample_tokens(data_->problem(), capacity_.limits().decode_threshold,
                             all ? support::kAllTokens : support::kSampledTokens);
  for (support::CheckedToken& token : tokens)
    token.all_visible = path_ == AttentionPath::dense && token.kind != support::RequestKind::decode;
  return tokens;
}

std::vector<std::vector<float>> LayerReplay::layer_scores(
    std::span<const support::CheckedToken> tokens) {
  const LayerTensors tensors = data_->tensors();
  const ModelDims& dims = capacity_.limits().dims;
  const auto count = static_cast<std::int64_t>(tokens.size());
  const std::int64_t width = std::int64_t{dims.index_n_heads} * dims.index_head_dim;
  std::vector<fp8_e4m3> index_q(static_cast<std::size_t>(count * width));
  std::vector<float> weights(static_cast<std::size_t>(count * dims.index_n_heads));
  std::vector<ScoreMember> members;
  std::int64_t num_scores = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const support::CheckedToken& token = tokens[static_cast<std::size_t>(i)];
    for (std::int64_t head = 0; head < dims.index_n_heads; ++head)
      std::copy_n(address(tensors.index_q, token.token, head, 0), dims.index_head_dim,
                  index_q.begin() + i * width + head * dims.index_head_dim);
    for (std::int64_t head = 0; head < dims.index_n_heads; ++head)
      weights[static_cast<std::size_t>(i * dims.index_n_heads + head)] =
          tensors.index_weights(token.token, head);
    ScoreMember member;
    member.request = static_cast<std::int32_t>(token.request);
    member.query_start = static_cast<std::int32_t>(i);
    member.num_rows = 1;
    member.first_position = static_cast<std::int32_t>(token.position);
    member.row_keys = static_cast<std::int32_t>(token.position + 1);
    member.first_row = static_cast<std::int32_t>(i);
    member.score_offset = num_scores;
    num_scores += member.row_keys;
    members.push_back(member);
  }
  std::vector<float> scores(static_cast<std::size_t>(num_scores));
  IndexerCall call;
  call.index_q =
      contiguous<const fp8_e4m3>(index_q.data(), count, dims.index_n_heads, dims.index_head_dim);
  call.index_weights = contiguous<const float>(weights.data(), count, dims.index_n_heads);
  call.cache = tensors.index_cache;
  call.block_tables = tensors.block_tables;
  call.members = members;
  call.scores = scores.data();
  IndexerProblem problem = capacity_.operations().select_from_indexer.problem.indexer;
  problem.max_rows = count;
  const auto& entry = indexer_scores_operation().choose(problem, capacity_.dispatch());
  support::run_entry(indexer_scores_operation(), entry.name, problem, call);
  std::vector<std::vector<float>> result;
  for (const ScoreMember& member : members)
    result.emplace_back(scores.begin() + member.score_offset,
                        scores.begin() + member.score_offset + member.row_keys);
  return result;
}

void LayerReplay::check_selection(std::span<const support::CheckedToken> tokens,
                                  CheckResult& result) {
  std::vector<support::CheckedToken> selected;
  for (const support::CheckedToken& token : tokens)
    if (!token.all_visible) selected.push_back(token);
  // In slices of about 2^26 scores, so that those of a large batch need not fit memory at once.
  constexpr std::int64_t kScores = std::int64_t{1} << 26;
  for (std::size_t begin = 0; begin < selected.size();) {
    std::size_t end = begin;
    for (std::int64_t scores = 0; end < selected.size() && scores < kScores; ++end)
      scores += selected[end].position + 1;
    const auto slice = std::span(selected).subspan(begin, end - begin);
    const auto scores = layer_scores(slice);
    for (std::size_t i = 0; i < slice.size(); ++i)
      result.selection.add(*data_, slice[i], scores[i]);
    begin = end;
  }
}

void LayerReplay::check(bool all, CheckResult& result) {
  const std::vector<support::CheckedToken> tokens = checked_tokens(all);
  result.cache_format = capacity_.limits().cache_format;
  result.tokens += static_cast<std::int64_t>(tokens.size());
  // In slices, so that the reference of a large batch need not fit memory at once.
  constexpr std::size_t kSlice = 256;
  for (std::size_t begin = 0; begin < tokens.size(); begin += kSlice) {
    const std::span<const support::CheckedToken> slice =
        std::span(tokens).subspan(begin, std::min(kSlice, tokens.size() - begin));
    const auto references = support::reference_attention(*data_, slice);
    support::add_errors(result.errors, *data_, slice, references);
    if (!result.quantised()) continue;
    support::add_errors(
        result.unquantised, *data_, slice,
        support::reference_attention(*data_, slice, support::ReferenceRows::unquantised));
  }
  if (selection_ == support::SelectionKind::indexer) check_selection(tokens, result);
  const support::WrongCacheRows wrong = data_->count_wrong_cache_rows();
  result.wrong_cache_rows += wrong.latent + wrong.index_keys;
}

}  // namespace sparse_mla::command
