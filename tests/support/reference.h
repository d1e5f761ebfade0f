/// What a layer call should have computed, in fp64, straight from the cache's bytes. Written apart
/// from the library: own page arithmetic, number formats, softmax and selection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sparse_mla/types.h"

#include "tests/support/checked_tokens.h"
#include "tests/support/latent_rows.h"
#include "tests/support/problem.h"

namespace sparse_mla::support {

/// One token's attention. A token without keys has out 0 and lse −inf.
struct TokenAttention {
  std::vector<double> out;  ///< [num_heads, V]
  std::vector<double> lse;  ///< [num_heads] natural logarithm
};

/// The rows that a reference reads.
enum class ReferenceRows {
  cached,       ///< the cache's bytes, decoded
  unquantised,  ///< what they held before they were quantised, bf16: for the error of the format
};

/// Attention of each token over its keys: all that it sees where `all_visible`, else its picks as
/// they stand in `data`; a pick outside [0, position] is no key. Parallel over tokens and heads.
std::vector<TokenAttention> reference_attention(const LayerData& data,
                                                std::span<const CheckedToken> tokens,
                                                ReferenceRows rows = ReferenceRows::cached);

/// One token over given keys (request-local positions; those outside [0, position] are skipped).
TokenAttention reference_attention(const LayerData& data, std::int64_t token,
                                   std::span<const std::int32_t> keys);

/// The same computed in the plain MHA form, key by key and head by head: slow, and the test of the
/// function above, which moves W_UK to the query and W_UV behind the sum.
TokenAttention reference_attention_slow(const LayerData& data, std::int64_t token,
                                        std::span<const std::int32_t> keys);

/// The attention sink: a key of logit sinks[h] [num_heads] without a value. Scales `out`, leaves
/// `lse` and tokens without keys alone.
void apply_sinks(std::span<const float> sinks, TokenAttention& token);

/// MQA form: head g's query attends latent rows directly, the value is the row's first L numbers.
/// `rows` point at one row of `format` each, of any alignment.
struct LatentAttention {
  std::vector<double> out;  ///< [heads, L]
  std::vector<double> lse;  ///< [heads]
};
LatentAttention reference_mqa(std::span<const double> queries,  ///< [heads, L+R]
                              const LatentRowFormat& format, double softmax_scale,
                              std::span<const std::byte* const> rows);

/// Indexer scores of a token for keys 0 … position, and how far fp32 arithmetic may be from them.
struct TokenScores {
  std::vector<double> score;  ///< [position + 1]
  std::vector<double> bound;  ///< 1e-3 · k_scale · Σ_h |w| · relu(q·k) + 1e-3 · rms of the row
};
TokenScores reference_scores(const LayerData& data, std::int64_t token);

/// The exact selection: the k largest; NaN below −inf, −0 equal to +0, ties to the lower index.
/// Ascending, min(k, scores) of them. By a plain sort.
std::vector<std::int32_t> reference_topk(std::span<const float> scores, std::int64_t k);

}  // namespace sparse_mla::support
