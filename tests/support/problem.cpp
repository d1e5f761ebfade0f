#include "tests/support/problem.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <stdexcept>

#include "tests/support/number_formats.h"
#include "tests/support/picks.h"
#include "tests/support/random_streams.h"

namespace sparse_mla::support {
namespace {

constexpr std::int64_t kGap = 3;  // odd, so that strided rows are unaligned
constexpr float kLogitDeviation = 1.5f;
/// The per-tensor scale of an fp8 cache: latent numbers end at ±3.45 (normal_row). Fixed, so that a
/// request's bytes do not depend on the batch around it, and no power of two, which would hide a
/// rounding.
constexpr float kLatentScale = 3.6f / 448.0f;

bfloat16 bf16_element(float value) { return std::bit_cast<bfloat16>(encode_bf16(value)); }

/// Writes one row's e4m3 bytes and returns its scale, amax / 448.
float quantise_row(std::span<const float> values, fp8_e4m3* bytes) {
  float amax = 1e-4f;
  for (const float value : values) amax = std::max(amax, std::fabs(value));
  const float scale = amax / 448.0f, inverse = 448.0f / amax;
  for (std::size_t i = 0; i < values.size(); ++i) {
    bytes[i] = std::bit_cast<fp8_e4m3>(encode_e4m3(values[i] * inverse));
  }
  return scale;
}

/// What a request's data depends on.
struct RequestSource {
  const ModelDims& dims;
  std::uint64_t seed;
  std::int64_t request_id;
  std::vector<float> values;  // one row

  RequestSource(const LayerProblem& problem, std::int64_t request)
      : dims(problem.dims), seed(problem.seed), request_id(problem.request_id(request)) {}

  void draw(RandomStream stream, std::int64_t row, int width, float deviation) {
    values.resize(static_cast<std::size_t>(width));
    normal_row(seed, stream_of(stream, request_id), row, width, deviation, values.data());
  }
  void bf16_row(RandomStream stream, std::int64_t row, int width, float deviation, bfloat16* out) {
    draw(stream, row, width, deviation);
    for (int i = 0; i < width; ++i) out[i] = bf16_element(values[static_cast<std::size_t>(i)]);
  }
  /// [L+R]
  void latent(std::int64_t position, bfloat16* out) {
    bf16_row(RandomStream::latent, position, dims.latent_dim(), 1.0f, out);
  }
  /// [D]; returns the scale. Keys differ in magnitude, so that scales do.
  float index_key(std::int64_t position, fp8_e4m3* out) {
    const float magnitude =
        0.5f + random_uniform(seed, stream_of(RandomStream::index_k_magnitude, request_id),
                              static_cast<std::uint64_t>(position));
    draw(RandomStream::index_k, position, dims.index_head_dim, magnitude);
    return quantise_row(values, out);
  }
};

/// Runs body(request, first position, end position) over pieces of [begin(r), end(r)).
template <class Begin, class End, class Body>
void for_rows_in_parallel(std::int64_t requests, Begin begin, End end, Body body) {
  constexpr std::int64_t kPiece = 64;
  std::vector<std::array<std::int64_t, 3>> pieces;
  for (std::int64_t r = 0; r < requests; ++r) {
    const std::int64_t last = end(r);
    for (std::int64_t first = begin(r); first < last; first += kPiece) {
      pieces.push_back({r, first, std::min(first + kPiece, last)});
    }
  }
#pragma omp parallel for schedule(dynamic, 4)
  for (std::size_t i = 0; i < pieces.size(); ++i) body(pieces[i][0], pieces[i][1], pieces[i][2]);
}

void print_lens(std::ostream& stream, const char* name, const std::vector<std::int32_t>& lens) {
  stream << ' ' << name << '[';
  constexpr std::size_t kShown = 12;
  for (std::size_t i = 0; i < std::min(lens.size(), kShown); ++i) {
    stream << (i == 0 ? "" : ",") << lens[i];
  }
  if (lens.size() > kShown) stream << ",… " << lens.size() << " in all";
  stream << ']';
}

void check(const LayerProblem& problem) {
  if (problem.context_lens.size() != problem.query_lens.size() ||
      (!problem.request_ids.empty() && problem.request_ids.size() != problem.query_lens.size())) {
    throw std::invalid_argument("problem: one query_len, context_len and id per request expected");
  }
  for (std::size_t r = 0; r < problem.query_lens.size(); ++r) {
    if (problem.query_lens[r] < 0 || problem.context_lens[r] < 0) {
      throw std::invalid_argument("problem: negative length");
    }
  }
  if (problem.cache_format == CacheFormat::fp8_ds_mla && problem.dims.kv_lora_rank % 128 != 0) {
    throw std::invalid_argument("problem: fp8_ds_mla needs a kv_lora_rank that 128 divides");
  }
  if (problem.block_size < 1) throw std::invalid_argument("problem: block_size below 1");
}

}  // namespace

std::string to_string(SelectionKind kind) {
  switch (kind) {
    case SelectionKind::indexer:
      return "indexer";
    case SelectionKind::random:
      return "random";
    case SelectionKind::clustered:
      return "clustered";
  }
  return "?";
}

std::int64_t LayerProblem::num_tokens() const {
  std::int64_t total = 0;
  for (const std::int32_t len : query_lens) total += len;
  return total;
}
std::int64_t LayerProblem::seq_len(std::int64_t request) const {
  const auto r = static_cast<std::size_t>(request);
  return std::int64_t{query_lens[r]} + context_lens[r];
}
std::int64_t LayerProblem::request_id(std::int64_t request) const {
  return request_ids.empty() ? request : request_ids[static_cast<std::size_t>(request)];
}

std::ostream& operator<<(std::ostream& stream, const LayerProblem& problem) {
  const ModelDims& d = problem.dims;
  stream << "heads " << d.num_heads << " L" << d.kv_lora_rank << " R" << d.qk_rope_head_dim << " P"
         << d.qk_nope_head_dim << " V" << d.v_head_dim << " indexer " << d.index_n_heads << "x"
         << d.index_head_dim << " topk " << d.index_topk;
  print_lens(stream, "query", problem.query_lens);
  print_lens(stream, "context", problem.context_lens);
  stream << " block " << problem.block_size;
  if (problem.cache_format != CacheFormat::bf16) {
    stream << " cache " << name_of(problem.cache_format)
           << (problem.power_of_two_scales ? " (power-of-two scales)" : "");
  }
  return stream << " seed " << problem.seed << ' ' << to_string(problem.selection)
                << (problem.strided ? " strided" : "");
}

LayerWeights::LayerWeights(const ModelDims& model, std::uint64_t seed)
    : dims(model),
      kv_b_proj(std::int64_t{model.num_heads} * (model.qk_nope_head_dim + model.v_head_dim) *
                model.kv_lora_rank) {
  // Columns of unit norm on average: up-projected keys and values are as large as latent rows.
  const std::int64_t rows =
      std::int64_t{dims.num_heads} * (dims.qk_nope_head_dim + dims.v_head_dim);
  const int width = dims.kv_lora_rank;
  const float deviation = 1.0f / std::sqrt(static_cast<float>(width));
#pragma omp parallel
  {
    std::vector<float> values(static_cast<std::size_t>(width));
#pragma omp for schedule(static)
    for (std::int64_t row = 0; row < rows; ++row) {
      normal_row(seed, stream_of(RandomStream::kv_b_proj, 0), row, width, deviation, values.data());
      for (int i = 0; i < width; ++i) {
        kv_b_proj[row * width + i] = bf16_element(values[static_cast<std::size_t>(i)]);
      }
    }
  }
}

LayerData::LayerData(const LayerProblem& problem)
    : LayerData(problem, std::make_shared<const LayerWeights>(problem.dims, problem.seed)) {}

LayerData::LayerData(const LayerProblem& problem, std::shared_ptr<const LayerWeights> weights)
    : problem_(problem), weights_(std::move(weights)) {
  check(problem_);
  query_starts_.push_back(0);
  for (const std::int32_t len : problem_.query_lens) {
    query_starts_.push_back(query_starts_.back() + len);
  }
  lay_out();
  hand_out_pages();
  write_context();
  write_new_tokens();
}

void LayerData::lay_out() {
  const ModelDims& d = problem_.dims;
  const std::int64_t gap = problem_.strided ? kGap : 0, tokens = num_tokens();
  std::int64_t pages = 0, longest = 0;
  for (std::int64_t r = 0; r < problem_.num_requests(); ++r) {
    const std::int64_t own = (problem_.seq_len(r) + problem_.block_size - 1) / problem_.block_size;
    pages += own;
    longest = std::max(longest, own);
  }
  max_blocks_ = longest + 1;  // at least one entry of every row belongs to nobody
  num_blocks_ = pages + std::max<std::int64_t>(2, pages / 16);

  strides_.q_head = d.qk_head_dim() + gap;
  strides_.q_token = d.num_heads * strides_.q_head + gap;
  strides_.latent = d.latent_dim() + gap;
  strides_.index_q_head = d.index_head_dim + gap;
  strides_.index_q_token = d.index_n_heads * strides_.index_q_head + gap;
  strides_.index_weights = d.index_n_heads + gap;
  strides_.index_k = d.index_head_dim + gap;
  strides_.block_tables = max_blocks_ + gap;
  strides_.picks = d.index_topk + gap;
  strides_.out_head = d.v_head_dim + gap;
  strides_.out_token = d.num_heads * strides_.out_head + gap;
  strides_.lse = tokens + gap;
  // Odd for a quantised cache: its scales and its bf16 part are unaligned.
  const std::int64_t row_gap = problem_.cache_format == CacheFormat::bf16 ? 2 * gap : gap;
  latent_row_stride_ = latent_format().row_bytes() + row_gap;
  latent_block_stride_ = problem_.block_size * latent_row_stride_ + 2 * gap;
  index_block_stride_ = std::int64_t{problem_.block_size} * (d.index_head_dim + 4) + gap;

  q_ = Buffer<bfloat16>(tokens * strides_.q_token);
  latent_ = Buffer<bfloat16>(tokens * strides_.latent);
  index_q_ = Buffer<fp8_e4m3>(tokens * strides_.index_q_token);
  index_weights_ = Buffer<float>(tokens * strides_.index_weights);
  index_k_ = Buffer<fp8_e4m3>(tokens * strides_.index_k);
  index_k_scale_ = Buffer<float>(tokens);
  slot_mapping_ = Buffer<std::int64_t>(tokens);
  block_tables_ = Buffer<std::int32_t>(problem_.num_requests() * strides_.block_tables);
  latent_cache_ = Buffer<std::byte>(num_blocks_ * latent_block_stride_);
  index_cache_ = Buffer<std::byte>(num_blocks_ * index_block_stride_);
  picks_ = Buffer<std::int32_t>(tokens * strides_.picks);
  out_ = Buffer<bfloat16>(tokens * strides_.out_token);
  lse_ = Buffer<float>(d.num_heads * strides_.lse);
  if (gap != 0) {
    q_.poison();
    latent_.poison();
    index_q_.poison();
    index_weights_.poison();
    index_k_.poison();
  }
  latent_cache_.poison();
  index_cache_.poison();
  out_.poison();
  lse_.poison();
  std::fill_n(picks_.data(), picks_.size(), std::numeric_limits<std::int32_t>::max());
}

void LayerData::hand_out_pages() {
  std::vector<std::int32_t> pages(static_cast<std::size_t>(num_blocks_));
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<std::int32_t>(i);
  RandomSequence random(problem_.seed, stream_of(RandomStream::pages, 0), 0);
  for (std::size_t i = pages.size(); i > 1; --i) {
    std::swap(pages[i - 1],
              pages[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
  }
  const std::array<std::int32_t, 4> nowhere{static_cast<std::int32_t>(num_blocks_),
                                            std::numeric_limits<std::int32_t>::max(), -1,
                                            std::numeric_limits<std::int32_t>::min()};
  std::size_t next = 0;
  for (std::int64_t r = 0; r < problem_.num_requests(); ++r) {
    std::int32_t* row = block_tables_.data() + r * strides_.block_tables;
    for (std::int64_t b = 0; b < strides_.block_tables; ++b) {
      row[b] = b * problem_.block_size < problem_.seq_len(r)
                   ? pages[next++]
                   : nowhere[static_cast<std::size_t>(b % 4)];
    }
  }
}

std::int64_t LayerData::slot(std::int64_t request, std::int64_t position) const {
  const std::int64_t page =
      block_tables_[request * strides_.block_tables + position / problem_.block_size];
  return page * problem_.block_size + position % problem_.block_size;
}
std::int64_t LayerData::latent_offset(std::int64_t slot) const {
  return slot / problem_.block_size * latent_block_stride_ +
         slot % problem_.block_size * latent_row_stride_;
}
std::int64_t LayerData::index_key_offset(std::int64_t slot) const {
  return slot / problem_.block_size * index_block_stride_ +
         slot % problem_.block_size * problem_.dims.index_head_dim;
}
std::int64_t LayerData::index_scale_offset(std::int64_t slot) const {
  // A page holds all keys first, then all scales.
  return slot / problem_.block_size * index_block_stride_ +
         std::int64_t{problem_.block_size} * problem_.dims.index_head_dim +
         slot % problem_.block_size * 4;
}

void LayerData::write_context() {
  const ModelDims& d = problem_.dims;
  for_rows_in_parallel(
      problem_.num_requests(), [](std::int64_t) { return std::int64_t{0}; },
      [&](std::int64_t r) { return problem_.context_lens[static_cast<std::size_t>(r)]; },
      [&](std::int64_t r, std::int64_t first, std::int64_t end) {
        RequestSource source(problem_, r);
        const LatentRowFormat format = latent_format();
        std::vector<bfloat16> row(static_cast<std::size_t>(d.latent_dim()));
        std::vector<fp8_e4m3> key(static_cast<std::size_t>(d.index_head_dim));
        for (std::int64_t position = first; position < end; ++position) {
          const std::int64_t at = slot(r, position);
          source.latent(position, row.data());
          encode_latent_row(format, row.data(), latent_cache_.data() + latent_offset(at));
          const float scale = source.index_key(position, key.data());
          std::memcpy(index_cache_.data() + index_key_offset(at), key.data(), key.size());
          std::memcpy(index_cache_.data() + index_scale_offset(at), &scale, 4);
        }
      });
}

void LayerData::write_new_tokens() {
  const ModelDims& d = problem_.dims;
  const float q_deviation =
      kLogitDeviation / (d.softmax_scale * std::sqrt(static_cast<float>(d.qk_head_dim())));
  const float weight_deviation =
      1.0f / std::sqrt(static_cast<float>(std::max(1, d.index_n_heads * d.index_head_dim)));
  for_rows_in_parallel(
      problem_.num_requests(),
      [&](std::int64_t r) { return query_starts_[static_cast<std::size_t>(r)]; },
      [&](std::int64_t r) { return query_starts_[static_cast<std::size_t>(r) + 1]; },
      [&](std::int64_t r, std::int64_t first, std::int64_t end) {
        RequestSource source(problem_, r);
        const auto request = static_cast<std::size_t>(r);
        for (std::int64_t token = first; token < end; ++token) {
          const std::int64_t position =
              problem_.context_lens[request] + token - query_starts_[request];
          slot_mapping_[token] = slot(r, position);
          source.latent(position, latent_.data() + token * strides_.latent);
          index_k_scale_[token] =
              source.index_key(position, index_k_.data() + token * strides_.index_k);
          for (int h = 0; h < d.num_heads; ++h) {
            source.bf16_row(RandomStream::q, position * d.num_heads + h, d.qk_head_dim(),
                            q_deviation,
                            q_.data() + token * strides_.q_token + h * strides_.q_head);
          }
          float* weights = index_weights_.data() + token * strides_.index_weights;
          source.draw(RandomStream::index_weights, position, d.index_n_heads, weight_deviation);
          std::copy(source.values.begin(), source.values.end(), weights);
          for (int h = 0; h < d.index_n_heads; ++h) {
            source.draw(RandomStream::index_q, position * d.index_n_heads + h, d.index_head_dim,
                        1.0f);
            // The query's own scale goes into its weight.
            weights[h] *=
                quantise_row(source.values, index_q_.data() + token * strides_.index_q_token +
                                                h * strides_.index_q_head);
          }
          if (problem_.selection == SelectionKind::random) {
            random_picks(
                problem_.seed, source.request_id, position,
                {picks_.data() + token * strides_.picks, static_cast<std::size_t>(d.index_topk)});
          }
        }
      });
  if (problem_.selection != SelectionKind::clustered) return;
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t r = 0; r < problem_.num_requests(); ++r) {
    const auto request = static_cast<std::size_t>(r);
    for (std::int64_t token = query_starts_[request]; token < query_starts_[request + 1]; ++token) {
      const std::int64_t row = token - query_starts_[request];
      const std::int64_t position = problem_.context_lens[request] + row;
      const std::span<std::int32_t> own{picks_.data() + token * strides_.picks,
                                        static_cast<std::size_t>(d.index_topk)};
      if (row == 0) {
        random_picks(problem_.seed, problem_.request_id(r), position, own);
      } else {
        clustered_picks(problem_.seed, problem_.request_id(r), position, picks(token - 1), own);
      }
    }
  }
}

LayerTensors LayerData::tensors() {
  const ModelDims& d = problem_.dims;
  const std::int64_t tokens = num_tokens(), requests = problem_.num_requests();
  LayerTensors t;
  t.q = strided<const bfloat16, 3>(q_.data(), {tokens, d.num_heads, d.qk_head_dim()},
                                   {strides_.q_token, strides_.q_head, 1});
  t.latent =
      strided<const bfloat16, 2>(latent_.data(), {tokens, d.latent_dim()}, {strides_.latent, 1});
  t.index_q =
      strided<const fp8_e4m3, 3>(index_q_.data(), {tokens, d.index_n_heads, d.index_head_dim},
                                 {strides_.index_q_token, strides_.index_q_head, 1});
  t.index_weights = strided<const float, 2>(index_weights_.data(), {tokens, d.index_n_heads},
                                            {strides_.index_weights, 1});
  t.index_k = strided<const fp8_e4m3, 2>(index_k_.data(), {tokens, d.index_head_dim},
                                         {strides_.index_k, 1});
  t.index_k_scale = strided<const float, 1>(index_k_scale_.data(), {tokens}, {1});
  t.slot_mapping = strided<const std::int64_t, 1>(slot_mapping_.data(), {tokens}, {1});
  t.block_tables = strided<const std::int32_t, 2>(block_tables_.data(), {requests, max_blocks_},
                                                  {strides_.block_tables, 1});
  t.latent_cache.format = problem_.cache_format;
  t.latent_cache.scale = latent_format().scale;
  t.latent_cache.data = latent_cache_.data();
  t.latent_cache.num_blocks = num_blocks_;
  t.latent_cache.block_size = problem_.block_size;
  t.latent_cache.block_stride = latent_block_stride_;
  t.latent_cache.row_stride = latent_row_stride_;
  t.index_cache.data = index_cache_.data();
  t.index_cache.num_blocks = num_blocks_;
  t.index_cache.block_size = problem_.block_size;
  t.index_cache.head_dim = d.index_head_dim;
  t.index_cache.block_stride = index_block_stride_;
  const std::int64_t projected = d.qk_nope_head_dim + d.v_head_dim;
  t.kv_b_proj = strided<const bfloat16, 3>(weights_->kv_b_proj.data(),
                                           {d.num_heads, projected, d.kv_lora_rank},
                                           {projected * d.kv_lora_rank, d.kv_lora_rank, 1});
  t.picks = strided<std::int32_t, 2>(picks_.data(), {tokens, d.index_topk}, {strides_.picks, 1});
  t.out = strided<bfloat16, 3>(out_.data(), {tokens, d.num_heads, d.v_head_dim},
                               {strides_.out_token, strides_.out_head, 1});
  t.lse = strided<float, 2>(lse_.data(), {d.num_heads, tokens}, {strides_.lse, 1});
  return t;
}

void LayerData::write_new_rows() {
  const ModelDims& d = problem_.dims;
#pragma omp parallel for schedule(static)
  for (std::int64_t token = 0; token < num_tokens(); ++token) {
    const std::int64_t at = slot_mapping_[token];
    if (at < 0) continue;
    encode_latent_row(latent_format(), latent_.data() + token * strides_.latent,
                      latent_cache_.data() + latent_offset(at));
    std::memcpy(index_cache_.data() + index_key_offset(at),
                index_k_.data() + token * strides_.index_k,
                static_cast<std::size_t>(d.index_head_dim));
    std::memcpy(index_cache_.data() + index_scale_offset(at), &index_k_scale_[token], 4);
  }
}

TokenPlace LayerData::place(std::int64_t token) const {
  // The last request that starts at or before the token: empty requests share their successor's
  // start and end before it.
  const auto after = std::upper_bound(query_starts_.begin(), query_starts_.end(), token);
  const auto request = static_cast<std::size_t>(after - query_starts_.begin() - 1);
  return {static_cast<std::int64_t>(request),
          problem_.context_lens[request] + token - query_starts_[request]};
}

const bfloat16* LayerData::q(std::int64_t token, std::int64_t head) const {
  return q_.data() + token * strides_.q_token + head * strides_.q_head;
}
const fp8_e4m3* LayerData::index_q(std::int64_t token, std::int64_t head) const {
  return index_q_.data() + token * strides_.index_q_token + head * strides_.index_q_head;
}
const float* LayerData::index_weights(std::int64_t token) const {
  return index_weights_.data() + token * strides_.index_weights;
}
const bfloat16* LayerData::out(std::int64_t token, std::int64_t head) const {
  return out_.data() + token * strides_.out_token + head * strides_.out_head;
}
float LayerData::lse(std::int64_t token, std::int64_t head) const {
  return lse_[head * strides_.lse + token];
}
std::span<const std::int32_t> LayerData::picks(std::int64_t token) const {
  return {picks_.data() + token * strides_.picks,
          static_cast<std::size_t>(problem_.dims.index_topk)};
}
std::span<const std::int32_t> LayerData::block_table(std::int64_t request) const {
  return {block_tables_.data() + request * strides_.block_tables,
          static_cast<std::size_t>(max_blocks_)};
}
const std::byte* LayerData::latent_page(std::int64_t block) const {
  return latent_cache_.data() + block * latent_block_stride_;
}
const std::byte* LayerData::latent_row(std::int64_t request, std::int64_t position) const {
  return latent_cache_.data() + latent_offset(slot(request, position));
}
LatentRowFormat LayerData::latent_format() const {
  const ModelDims& d = problem_.dims;
  return {problem_.cache_format, d.kv_lora_rank, d.qk_rope_head_dim,
          problem_.cache_format == CacheFormat::fp8 ? kLatentScale : 1.0f,
          problem_.power_of_two_scales};
}
void LayerData::latent_values(std::int64_t request, std::int64_t position, bfloat16* values) const {
  RequestSource(problem_, request).latent(position, values);
}
const std::byte* LayerData::index_key(std::int64_t request, std::int64_t position) const {
  return index_cache_.data() + index_key_offset(slot(request, position));
}
float LayerData::index_scale(std::int64_t request, std::int64_t position) const {
  float scale = 0;
  std::memcpy(&scale, index_cache_.data() + index_scale_offset(slot(request, position)), 4);
  return scale;
}

WrongCacheRows LayerData::count_wrong_cache_rows() const {
  const ModelDims& d = problem_.dims;
  struct Owner {
    std::int32_t request = -1;
    std::int32_t position = 0;
  };
  std::vector<Owner> owners(static_cast<std::size_t>(num_blocks_ * problem_.block_size));
  for (std::int64_t r = 0; r < problem_.num_requests(); ++r) {
    for (std::int32_t p = 0; p < problem_.context_lens[static_cast<std::size_t>(r)]; ++p) {
      owners[static_cast<std::size_t>(slot(r, p))] = {static_cast<std::int32_t>(r), p};
    }
  }
  for (std::int64_t token = 0; token < num_tokens(); ++token) {
    if (slot_mapping_[token] < 0) continue;
    const TokenPlace at = place(token);
    owners[static_cast<std::size_t>(slot_mapping_[token])] = {
        static_cast<std::int32_t>(at.request), static_cast<std::int32_t>(at.position)};
  }
  const LatentRowFormat format = latent_format();
  std::int64_t latent = 0, index_keys = 0;
#pragma omp parallel for schedule(dynamic, 64) reduction(+ : latent, index_keys)
  for (std::size_t at = 0; at < owners.size(); ++at) {
    std::vector<bfloat16> values(static_cast<std::size_t>(d.latent_dim()));
    std::vector<std::byte> row(static_cast<std::size_t>(format.row_bytes()), std::byte{0xFF});
    std::vector<fp8_e4m3> key(static_cast<std::size_t>(d.index_head_dim));
    float scale = std::bit_cast<float>(~std::uint32_t{0});
    if (owners[at].request >= 0) {
      RequestSource source(problem_, owners[at].request);
      source.latent(owners[at].position, values.data());
      encode_latent_row(format, values.data(), row.data());
      scale = source.index_key(owners[at].position, key.data());
    } else {
      std::fill(key.begin(), key.end(), std::bit_cast<fp8_e4m3>(std::uint8_t{0xFF}));
    }
    const auto cache_slot = static_cast<std::int64_t>(at);
    latent +=
        std::memcmp(latent_cache_.data() + latent_offset(cache_slot), row.data(), row.size()) != 0;
    index_keys += std::memcmp(index_cache_.data() + index_key_offset(cache_slot), key.data(),
                              key.size()) != 0 ||
                  std::memcmp(index_cache_.data() + index_scale_offset(cache_slot), &scale, 4) != 0;
  }
  return {latent, index_keys};
}

}  // namespace sparse_mla::support
