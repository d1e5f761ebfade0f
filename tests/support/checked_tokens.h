/// Which tokens of a batch are compared with the reference.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/problem.h"

namespace sparse_mla::support {

enum class RequestKind {
  decode,  ///< query_len ≤ decode_threshold
  prefill_with_context,
  prefill,  ///< without context
};
std::string to_string(RequestKind kind);

struct CheckedToken {
  std::int64_t token = 0;
  std::int64_t request = 0;
  std::int64_t position = 0;
  RequestKind kind = RequestKind::prefill;
  /// The token attends all keys that it sees instead of its picks (the dense path). Set by the
  /// caller.
  bool all_visible = false;
};

constexpr std::int64_t kSampledTokens = 64;
constexpr std::int64_t kAllTokens = std::numeric_limits<std::int64_t>::max();

/// At least min(count, tokens) seeded tokens of the batch, ascending and distinct, always with the
/// first and the last token of the batch, and of the first and the last request of each kind.
std::vector<CheckedToken> sample_tokens(const LayerProblem& problem, int decode_threshold = 1,
                                        std::int64_t count = kSampledTokens);

}  // namespace sparse_mla::support
