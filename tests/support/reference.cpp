#include "tests/support/reference.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>

#include "tests/support/number_formats.h"

// The inner loops are compiled twice, the version is picked at run time.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define SPARSE_MLA_REFERENCE_CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define SPARSE_MLA_REFERENCE_CLONES
#endif

namespace sparse_mla::support {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kTileRows = 16;    // decoded rows: 16 · 576 doubles stay close to the core
constexpr std::int64_t kGroupHeads = 16;  // a decoded row serves so many heads

SPARSE_MLA_REFERENCE_CLONES
void decode_row(const std::byte* bytes, std::int64_t width, double* values) {
  for (std::int64_t i = 0; i < width; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, bytes + 2 * i, 2);
    values[i] = decode_bf16(bits);
  }
}
void decode_row(const bfloat16* elements, std::int64_t width, double* values) {
  decode_row(reinterpret_cast<const std::byte*>(elements), width, values);
}
void decode_row(const LatentRowFormat& format, const std::byte* bytes, double* values) {
  // The vectorised loop serves most checks.
  if (format.format == CacheFormat::bf16) {
    decode_row(bytes, format.latent_dim(), values);
  } else {
    decode_latent_row(format, bytes, values);
  }
}

SPARSE_MLA_REFERENCE_CLONES
double dot(const double* a, const double* b, std::int64_t width) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < width; ++i) sum += a[i] * b[i];
  return sum;
}

/// Two rows of `a` against four of `b` (consecutive rows of `width`): sums[4 · row of a + row of
/// b].
SPARSE_MLA_REFERENCE_CLONES
void dot_2x4(const double* a, const double* b, std::int64_t width, double* sums) {
  double s0 = 0, s1 = 0, s2 = 0, s3 = 0, s4 = 0, s5 = 0, s6 = 0, s7 = 0;
  const double *a1 = a + width, *b1 = b + width, *b2 = b1 + width, *b3 = b2 + width;
#pragma omp simd reduction(+ : s0, s1, s2, s3, s4, s5, s6, s7)
  for (std::int64_t i = 0; i < width; ++i) {
    s0 += a[i] * b[i];
    s1 += a[i] * b1[i];
    s2 += a[i] * b2[i];
    s3 += a[i] * b3[i];
    s4 += a1[i] * b[i];
    s5 += a1[i] * b1[i];
    s6 += a1[i] * b2[i];
    s7 += a1[i] * b3[i];
  }
  const std::array<double, 8> all{s0, s1, s2, s3, s4, s5, s6, s7};
  std::copy(all.begin(), all.end(), sums);
}

/// products [a_rows, b_rows] (rows of `product_stride`) = a [a_rows, width] · b [b_rows, width]ᵀ.
void dot_rows(const double* a, std::int64_t a_rows, const double* b, std::int64_t b_rows,
              std::int64_t width, double* products, std::int64_t product_stride) {
  for (std::int64_t i = 0; i < a_rows; i += 2) {
    const std::int64_t pair = std::min<std::int64_t>(2, a_rows - i);
    std::int64_t j = 0;
    for (; pair == 2 && j + 4 <= b_rows; j += 4) {
      std::array<double, 8> sums{};
      dot_2x4(a + i * width, b + j * width, width, sums.data());
      std::copy_n(sums.data(), 4, products + i * product_stride + j);
      std::copy_n(sums.data() + 4, 4, products + (i + 1) * product_stride + j);
    }
    for (; j < b_rows; ++j) {
      for (std::int64_t r = i; r < i + pair; ++r) {
        products[r * product_stride + j] = dot(a + r * width, b + j * width, width);
      }
    }
  }
}

/// sum [width] += Σ_r weights[r] · rows[r] (rows of `row_stride`).
SPARSE_MLA_REFERENCE_CLONES
void add_weighted_rows(const double* weights, const double* rows, std::int64_t num_rows,
                       std::int64_t row_stride, std::int64_t width, double* sum) {
  std::int64_t r = 0;
  for (; r + 4 <= num_rows; r += 4) {
    const double w0 = weights[r], w1 = weights[r + 1], w2 = weights[r + 2], w3 = weights[r + 3];
    const double *r0 = rows + r * row_stride, *r1 = r0 + row_stride, *r2 = r1 + row_stride,
                 *r3 = r2 + row_stride;
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) {
      sum[i] += w0 * r0[i] + w1 * r1[i] + w2 * r2[i] + w3 * r3[i];
    }
  }
  for (; r < num_rows; ++r) {
    for (std::int64_t i = 0; i < width; ++i) sum[i] += weights[r] * rows[r * row_stride + i];
  }
}

/// Turns logits into softmax weights in place and returns their log-sum-exp. NaN stays NaN.
double softmax(std::span<double> logits) {
  double peak = -kInfinity, sum = 0;
  for (const double logit : logits) {
    if (std::isnan(logit)) peak = logit;
    if (logit > peak) peak = logit;
  }
  if (peak == -kInfinity) {
    std::fill(logits.begin(), logits.end(), 0.0);
    return -kInfinity;
  }
  for (double& logit : logits) {
    logit = std::exp(logit - peak);
    sum += logit;
  }
  for (double& logit : logits) logit /= sum;
  return peak + std::log(sum);
}

std::vector<std::int32_t> all_keys(std::int64_t position) {
  std::vector<std::int32_t> keys(static_cast<std::size_t>(position + 1));
  std::iota(keys.begin(), keys.end(), 0);
  return keys;
}

/// Of the keys, those that the token sees.
std::vector<std::int32_t> visible_keys(TokenPlace at, std::span<const std::int32_t> keys) {
  std::vector<std::int32_t> visible;
  visible.reserve(keys.size());
  for (const std::int32_t key : keys) {
    if (key >= 0 && key <= at.position) visible.push_back(key);
  }
  return visible;
}

std::vector<std::int32_t> keys_of(const LayerData& data, const CheckedToken& token) {
  const TokenPlace at = data.place(token.token);
  return token.all_visible ? all_keys(at.position) : visible_keys(at, data.picks(token.token));
}

std::vector<const std::byte*> latent_rows(const LayerData& data, TokenPlace at,
                                          std::span<const std::int32_t> keys) {
  std::vector<const std::byte*> rows;
  rows.reserve(keys.size());
  for (const std::int32_t key : keys) rows.push_back(data.latent_row(at.request, key));
  return rows;
}

/// The unquantised rows of all keys that some tokens attend, each generated once.
class UnquantisedRows {
 public:
  UnquantisedRows(const LayerData& data, std::span<const CheckedToken> tokens)
      : width_(data.problem().dims.latent_dim()),
        row_of_(static_cast<std::size_t>(data.problem().num_requests())) {
    std::vector<std::array<std::int64_t, 2>> places;  // request, position
    for (const CheckedToken& token : tokens) {
      const TokenPlace at = data.place(token.token);
      auto& rows = row_of_[static_cast<std::size_t>(at.request)];
      rows.resize(std::max(rows.size(), static_cast<std::size_t>(at.position + 1)), -1);
      for (const std::int32_t key : keys_of(data, token)) {
        std::int64_t& row = rows[static_cast<std::size_t>(key)];
        if (row >= 0) continue;
        row = static_cast<std::int64_t>(places.size());
        places.push_back({at.request, key});
      }
    }
    values_ = Buffer<bfloat16>(static_cast<std::int64_t>(places.size()) * width_);
#pragma omp parallel for schedule(static)
    for (std::size_t i = 0; i < places.size(); ++i) {
      data.latent_values(places[i][0], places[i][1],
                         values_.data() + static_cast<std::int64_t>(i) * width_);
    }
  }
  std::vector<const std::byte*> rows(TokenPlace at, std::span<const std::int32_t> keys) const {
    std::vector<const std::byte*> rows;
    rows.reserve(keys.size());
    for (const std::int32_t key : keys) {
      const std::int64_t row =
          row_of_[static_cast<std::size_t>(at.request)][static_cast<std::size_t>(key)];
      rows.push_back(reinterpret_cast<const std::byte*>(values_.data() + row * width_));
    }
    return rows;
  }

 private:
  std::int64_t width_;
  std::vector<std::vector<std::int64_t>> row_of_;  // [requests][positions], −1 = not generated
  Buffer<bfloat16> values_;                        // [rows, L+R]
};

/// Heads [first, end) of one token.
void attend_heads(const LayerData& data, std::int64_t token, const LatentRowFormat& format,
                  std::span<const std::byte* const> rows, std::int64_t first, std::int64_t end,
                  TokenAttention& result) {
  const ModelDims& d = data.problem().dims;
  const std::int64_t l = d.kv_lora_rank, r = d.qk_rope_head_dim, p = d.qk_nope_head_dim,
                     v = d.v_head_dim;
  std::vector<double> queries(static_cast<std::size_t>((end - first) * (l + r)));
  std::vector<double> q(static_cast<std::size_t>(p + r)), weights(static_cast<std::size_t>(l));
  const auto projection = [&](std::int64_t head, std::int64_t row) {
    decode_row(data.weights().kv_b_proj.data() + (head * (p + v) + row) * l, l, weights.data());
    return weights.data();
  };
  for (std::int64_t head = first; head < end; ++head) {
    // q_nope · (W_UK c) = (W_UKᵀ q_nope) · c
    double* query = queries.data() + (head - first) * (l + r);
    decode_row(data.q(token, head), p + r, q.data());
    for (std::int64_t i = 0; i < p; ++i) {
      add_weighted_rows(q.data() + i, projection(head, i), 1, l, l, query);
    }
    std::copy_n(q.data() + p, r, query + l);
  }
  const LatentAttention latent = reference_mqa(queries, format, d.softmax_scale, rows);
  for (std::int64_t head = first; head < end; ++head) {
    const double* sum = latent.out.data() + (head - first) * l;
    for (std::int64_t i = 0; i < v; ++i) {
      result.out[static_cast<std::size_t>(head * v + i)] = dot(projection(head, p + i), sum, l);
    }
    result.lse[static_cast<std::size_t>(head)] = latent.lse[static_cast<std::size_t>(head - first)];
  }
}

TokenAttention empty_result(const ModelDims& dims) {
  return {std::vector<double>(static_cast<std::size_t>(dims.num_heads * dims.v_head_dim)),
          std::vector<double>(static_cast<std::size_t>(dims.num_heads), -kInfinity)};
}

}  // namespace

LatentAttention reference_mqa(std::span<const double> queries, const LatentRowFormat& format,
                              double softmax_scale, std::span<const std::byte* const> rows) {
  const std::int64_t l = format.kv_lora_rank, width = format.latent_dim();
  const auto heads = static_cast<std::int64_t>(queries.size()) / width;
  const auto num_rows = static_cast<std::int64_t>(rows.size());
  LatentAttention result{std::vector<double>(static_cast<std::size_t>(heads * l)),
                         std::vector<double>(static_cast<std::size_t>(heads))};
  std::vector<double> logits(static_cast<std::size_t>(heads * num_rows));
  std::vector<double> tile(static_cast<std::size_t>(kTileRows * width));
  const auto decode_tile = [&](std::int64_t first) {
    const std::int64_t count = std::min(kTileRows, num_rows - first);
    for (std::int64_t i = 0; i < count; ++i) {
      decode_row(format, rows[static_cast<std::size_t>(first + i)], tile.data() + i * width);
    }
    return count;
  };
  for (std::int64_t first = 0; first < num_rows; first += kTileRows) {
    const std::int64_t count = decode_tile(first);
    dot_rows(queries.data(), heads, tile.data(), count, width, logits.data() + first, num_rows);
  }
  for (double& logit : logits) logit *= softmax_scale;
  for (std::int64_t h = 0; h < heads; ++h) {
    result.lse[static_cast<std::size_t>(h)] =
        softmax({logits.data() + h * num_rows, static_cast<std::size_t>(num_rows)});
  }
  for (std::int64_t first = 0; first < num_rows; first += kTileRows) {
    const std::int64_t count = decode_tile(first);
    for (std::int64_t h = 0; h < heads; ++h) {
      add_weighted_rows(logits.data() + h * num_rows + first, tile.data(), count, width, l,
                        result.out.data() + h * l);
    }
  }
  return result;
}

std::vector<TokenAttention> reference_attention(const LayerData& data,
                                                std::span<const CheckedToken> tokens,
                                                ReferenceRows source) {
  const ModelDims& d = data.problem().dims;
  std::optional<UnquantisedRows> unquantised;
  LatentRowFormat format = data.latent_format();
  if (source == ReferenceRows::unquantised) {
    unquantised.emplace(data, tokens);
    format.format = CacheFormat::bf16;
  }
  const std::int64_t groups = (d.num_heads + kGroupHeads - 1) / kGroupHeads;
  std::vector<TokenAttention> results(tokens.size(), empty_result(d));
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t task = 0; task < static_cast<std::int64_t>(tokens.size()) * groups; ++task) {
    const auto i = static_cast<std::size_t>(task / groups);
    const std::int64_t first = task % groups * kGroupHeads;
    const TokenPlace at = data.place(tokens[i].token);
    const auto keys = keys_of(data, tokens[i]);
    const auto rows = unquantised ? unquantised->rows(at, keys) : latent_rows(data, at, keys);
    attend_heads(data, tokens[i].token, format, rows, first,
                 std::min<std::int64_t>(first + kGroupHeads, d.num_heads), results[i]);
  }
  return results;
}

TokenAttention reference_attention(const LayerData& data, std::int64_t token,
                                   std::span<const std::int32_t> keys) {
  TokenAttention result = empty_result(data.problem().dims);
  const TokenPlace at = data.place(token);
  attend_heads(data, token, data.latent_format(), latent_rows(data, at, visible_keys(at, keys)), 0,
               data.problem().dims.num_heads, result);
  return result;
}

void apply_sinks(std::span<const float> sinks, TokenAttention& token) {
  const std::size_t width = token.out.size() / token.lse.size();
  for (std::size_t head = 0; head < token.lse.size(); ++head) {
    // Share of the keys in the denominator exp(lse) + exp(sink), each exponent relative to the
    // larger, so that none overflows.
    const double sink = sinks[head], lse = token.lse[head];
    if (lse == -kInfinity) continue;
    const double share = sink > lse ? std::exp(lse - sink) / (1 + std::exp(lse - sink))
                                    : 1 / (1 + std::exp(sink - lse));
    for (std::size_t i = 0; i < width; ++i) token.out[head * width + i] *= share;
  }
}

TokenAttention reference_attention_slow(const LayerData& data, std::int64_t token,
                                        std::span<const std::int32_t> keys) {
  const ModelDims& d = data.problem().dims;
  const int l = d.kv_lora_rank, r = d.qk_rope_head_dim, p = d.qk_nope_head_dim, v = d.v_head_dim;
  const TokenPlace at = data.place(token);
  const auto rows = latent_rows(data, at, visible_keys(at, keys));
  const LatentRowFormat format = data.latent_format();
  TokenAttention result = empty_result(d);
  std::vector<double> latent(static_cast<std::size_t>(l + r)), q(static_cast<std::size_t>(p + r)),
      projection(static_cast<std::size_t>((p + v) * l)), logits(rows.size()), value;
  for (int head = 0; head < d.num_heads; ++head) {
    decode_row(data.q(token, head), p + r, q.data());
    decode_row(data.weights().kv_b_proj.data() + std::int64_t{head} * (p + v) * l, (p + v) * l,
               projection.data());
    value.assign(rows.size() * static_cast<std::size_t>(v), 0.0);
    for (std::size_t key = 0; key < rows.size(); ++key) {
      decode_row(format, rows[key], latent.data());
      double logit = 0;
      for (int i = 0; i < p + v; ++i) {
        double projected = 0;
        for (int j = 0; j < l; ++j) {
          projected +=
              projection[static_cast<std::size_t>(i * l + j)] * latent[static_cast<std::size_t>(j)];
        }
        if (i < p) {
          logit += q[static_cast<std::size_t>(i)] * projected;
        } else {
          value[key * static_cast<std::size_t>(v) + static_cast<std::size_t>(i - p)] = projected;
        }
      }
      for (int i = 0; i < r; ++i) {
        logit += q[static_cast<std::size_t>(p + i)] * latent[static_cast<std::size_t>(l + i)];
      }
      logits[key] = logit * d.softmax_scale;
    }
    result.lse[static_cast<std::size_t>(head)] = softmax(logits);
    for (std::size_t key = 0; key < rows.size(); ++key) {
      for (int i = 0; i < v; ++i) {
        result.out[static_cast<std::size_t>(head * v + i)] +=
            logits[key] * value[key * static_cast<std::size_t>(v) + static_cast<std::size_t>(i)];
      }
    }
  }
  return result;
}

TokenScores reference_scores(const LayerData& data, std::int64_t token) {
  const ModelDims& d = data.problem().dims;
  const std::int64_t heads = d.index_n_heads, width = d.index_head_dim;
  const TokenPlace at = data.place(token);
  const std::int64_t num_keys = at.position + 1;
  TokenScores result{std::vector<double>(static_cast<std::size_t>(num_keys)),
                     std::vector<double>(static_cast<std::size_t>(num_keys))};
  std::vector<double> queries(static_cast<std::size_t>(heads * width));
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t i = 0; i < width; ++i) {
      queries[static_cast<std::size_t>(h * width + i)] =
          decode_e4m3(std::bit_cast<std::uint8_t>(data.index_q(token, h)[i]));
    }
  }
  const float* weights = data.index_weights(token);
#pragma omp parallel for schedule(static)
  for (std::int64_t tile = 0; tile < (num_keys + kTileRows - 1) / kTileRows; ++tile) {
    const std::int64_t first = tile * kTileRows, count = std::min(kTileRows, num_keys - first);
    std::vector<double> keys(static_cast<std::size_t>(count * width)),
        products(static_cast<std::size_t>(heads * count));
    for (std::int64_t j = 0; j < count; ++j) {
      const std::byte* bytes = data.index_key(at.request, first + j);
      for (std::int64_t i = 0; i < width; ++i) {
        keys[static_cast<std::size_t>(j * width + i)] =
            decode_e4m3(std::to_integer<std::uint8_t>(bytes[i]));
      }
    }
    dot_rows(queries.data(), heads, keys.data(), count, width, products.data(), count);
    for (std::int64_t j = 0; j < count; ++j) {
      double score = 0, magnitude = 0;
      for (std::int64_t h = 0; h < heads; ++h) {
        const double product = products[static_cast<std::size_t>(h * count + j)];
        const double relu = product < 0 ? 0 : product;  // NaN stays NaN
        score += weights[h] * relu;
        magnitude += std::fabs(weights[h]) * relu;
      }
      const double scale = data.index_scale(at.request, first + j);
      result.score[static_cast<std::size_t>(first + j)] = scale * score;
      result.bound[static_cast<std::size_t>(first + j)] = 1e-3 * scale * magnitude;
    }
  }
  double squares = 0;
  for (const double score : result.score) squares += score * score;
  const double rms = std::sqrt(squares / static_cast<double>(num_keys));
  for (double& bound : result.bound) bound += 1e-3 * rms;
  return result;
}

std::vector<std::int32_t> reference_topk(std::span<const float> scores, std::int64_t k) {
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    const float left = scores[static_cast<std::size_t>(a)],
                right = scores[static_cast<std::size_t>(b)];
    if (std::isnan(left) || std::isnan(right)) return !std::isnan(left);
    return left > right;
  });
  order.resize(static_cast<std::size_t>(std::min<std::int64_t>(
      std::max<std::int64_t>(k, 0), static_cast<std::int64_t>(order.size()))));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace sparse_mla::support
