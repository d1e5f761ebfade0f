/// A decode step of fixed shape (BatchOptions::padded_query_len) on memory of fixed addresses: what
/// an engine keeps for a captured graph. Each step's lengths and data are written into it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "sparse_mla/layer.h"

#include "tests/support/compare.h"
#include "tests/support/problem.h"
#include "tests/support/reference.h"

namespace sparse_mla::support {

/// Lengths of one step: request i has query_lens[i] tokens after context_lens[i] cached ones.
struct StepLengths {
  std::vector<std::int32_t> query_lens, context_lens;  ///< [requests]
};

class PaddedStep {
 public:
  PaddedStep(const Limits& limits, std::int64_t num_requests, std::int32_t padded_query_len)
      : limits_(limits), requests_(num_requests), padded_(padded_query_len) {
    const ModelDims& dims = limits.dims;
    const std::int64_t tokens = num_requests * padded_query_len;
    columns_ = (limits.max_model_len + limits.block_size - 1) / limits.block_size;
    num_blocks_ = 2 * num_requests * (columns_ + 1) + 8;
    q_.resize(tokens * dims.num_heads * dims.qk_head_dim());
    latent_.resize(tokens * dims.latent_dim());
    index_q_.resize(tokens * dims.index_n_heads * dims.index_head_dim);
    index_weights_.resize(tokens * dims.index_n_heads);
    index_k_.resize(tokens * dims.index_head_dim);
    index_k_scale_.resize(tokens);
    slots_.resize(tokens);
    block_tables_.resize(num_requests * columns_);
    picks_.resize(tokens * dims.index_topk);
    out_.resize(tokens * dims.num_heads * dims.v_head_dim);
    lse_.resize(tokens * dims.num_heads);
    latent_cache_.resize(num_blocks_ * limits.block_size *
                         latent_row_bytes(limits.cache_format, dims));
    index_cache_.resize(num_blocks_ * index_page_bytes(limits.block_size, dims.index_head_dim));
  }

  /// Writes the step's inputs and spoils its outputs. The step's data: `data()`.
  void fill(const StepLengths& lengths, std::shared_ptr<const LayerWeights> weights,
            std::uint64_t seed) {
    weights_ = std::move(weights);
    lengths_ = lengths;
    LayerProblem problem;
    problem.dims = limits_.dims;
    problem.query_lens.assign(requests_, padded_);
    problem.context_lens = lengths.context_lens;
    problem.block_size = limits_.block_size;
    problem.cache_format = limits_.cache_format;
    problem.seed = seed;
    data_.emplace(problem, weights_);
    const LayerTensors from = data_->tensors();
    copy(q_, from.q.data_handle());
    copy(latent_, from.latent.data_handle());
    copy(index_q_, from.index_q.data_handle());
    copy(index_weights_, from.index_weights.data_handle());
    copy(index_k_, from.index_k.data_handle());
    copy(index_k_scale_, from.index_k_scale.data_handle());
    std::memset(latent_cache_.data(), 0xFF, latent_cache_.size());
    std::memset(index_cache_.data(), 0xFF, index_cache_.size());
    std::memcpy(latent_cache_.data(), from.latent_cache.data,
                from.latent_cache.num_blocks * from.latent_cache.block_stride);
    std::memcpy(index_cache_.data(), from.index_cache.data,
                from.index_cache.num_blocks * from.index_cache.block_stride);
    data_->write_new_rows();  // for the reference; the step's own caches get them from the layer
    std::fill(block_tables_.begin(), block_tables_.end(), 0x7FFFFFFF);
    for (std::int64_t i = 0; i < requests_; ++i)
      for (std::int64_t c = 0; c < std::min(columns_, from.block_tables.extent(1)); ++c)
        block_tables_[i * columns_ + c] = from.block_tables(i, c);
    for (std::int64_t token = 0; token < num_tokens(); ++token)
      slots_[token] = real(token) ? from.slot_mapping(token) : -1;
    std::memset(static_cast<void*>(out_.data()), 0xFF, out_.size() * sizeof(bfloat16));
    std::memset(lse_.data(), 0xFF, lse_.size() * sizeof(float));
    std::fill(picks_.begin(), picks_.end(), 0x7FFFFFFF);
  }

  std::int64_t num_tokens() const { return requests_ * padded_; }
  bool real(std::int64_t token) const {
    return token % padded_ < lengths_.query_lens[token / padded_];
  }
  const StepLengths& lengths() const { return lengths_; }
  LayerData& data() { return *data_; }
  std::int32_t padded_query_len() const { return padded_; }

  LayerTensors tensors() {
    const ModelDims& dims = limits_.dims;
    const std::int64_t tokens = num_tokens();
    LayerTensors t;
    t.q = contiguous<const bfloat16>(q_.data(), tokens, dims.num_heads, dims.qk_head_dim());
    t.latent = contiguous<const bfloat16>(latent_.data(), tokens, dims.latent_dim());
    t.index_q = contiguous<const fp8_e4m3>(index_q_.data(), tokens, dims.index_n_heads,
                                           dims.index_head_dim);
    t.index_weights = contiguous<const float>(index_weights_.data(), tokens, dims.index_n_heads);
    t.index_k = contiguous<const fp8_e4m3>(index_k_.data(), tokens, dims.index_head_dim);
    t.index_k_scale = contiguous<const float>(index_k_scale_.data(), tokens);
    t.slot_mapping = contiguous<const std::int64_t>(slots_.data(), tokens);
    t.block_tables = contiguous<const std::int32_t>(block_tables_.data(), requests_, columns_);
    t.latent_cache = make_latent_cache(limits_.cache_format, latent_cache_, num_blocks_,
                                       limits_.block_size, dims);
    t.latent_cache.scale = data_->tensors().latent_cache.scale;
    t.index_cache = make_index_key_cache(index_cache_.data(), num_blocks_, limits_.block_size,
                                         dims.index_head_dim);
    t.kv_b_proj = data_->tensors().kv_b_proj;
    t.picks = contiguous(picks_.data(), tokens, dims.index_topk);
    t.out = contiguous(out_.data(), tokens, dims.num_heads, dims.v_head_dim);
    t.lse = contiguous(lse_.data(), dims.num_heads, tokens);
    return t;
  }

  const std::vector<std::int32_t>& picks() const { return picks_; }
  const std::vector<bfloat16>& out() const { return out_; }
  const std::vector<float>& lse() const { return lse_; }

 private:
  template <class T>
  static void copy(std::vector<T>& to, const T* from) {
    std::memcpy(static_cast<void*>(to.data()), from, to.size() * sizeof(T));
  }

  Limits limits_;
  std::int64_t requests_, columns_ = 0, num_blocks_ = 0;
  std::int32_t padded_;
  StepLengths lengths_;
  std::shared_ptr<const LayerWeights> weights_;
  std::optional<LayerData> data_;
  std::vector<bfloat16> q_, latent_, out_;
  std::vector<fp8_e4m3> index_q_, index_k_;
  std::vector<float> index_weights_, index_k_scale_, lse_;
  std::vector<std::int64_t> slots_;
  std::vector<std::int32_t> block_tables_, picks_;
  std::vector<std::byte> latent_cache_, index_cache_;
};

/// Errors of a step's tokens against fp64 with the step's own picks; rows that are no token have to
/// be empty (counted as faults of the measure).
inline ErrorMeasure measure_step(PaddedStep& step, const Limits& limits) {
  const ModelDims& dims = limits.dims;
  ErrorMeasure errors;
  const std::vector<double> nothing(dims.v_head_dim, 0.0);
  for (std::int64_t token = 0; token < step.num_tokens(); ++token) {
    std::optional<TokenAttention> reference;
    if (step.real(token))
      reference = reference_attention(step.data(), token,
                                      {step.picks().data() + token * dims.index_topk,
                                       static_cast<std::size_t>(dims.index_topk)});
    for (int head = 0; head < dims.num_heads; ++head) {
      const std::span out(step.out().data() + (token * dims.num_heads + head) * dims.v_head_dim,
                          static_cast<std::size_t>(dims.v_head_dim));
      const float lse = step.lse()[head * step.num_tokens() + token];
      if (reference)
        errors.add(out, lse,
                   std::span(reference->out).subspan(head * dims.v_head_dim, dims.v_head_dim),
                   reference->lse[head]);
      else
        errors.add(out, lse, nothing, -std::numeric_limits<double>::infinity());
    }
  }
  return errors;
}

}  // namespace sparse_mla::support
