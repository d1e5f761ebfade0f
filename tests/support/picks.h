/// Selections that are handed to a layer instead of being found by its indexer.
#pragma once

#include <cstdint>
#include <span>

namespace sparse_mla::support {

/// min(topk, position + 1) distinct picks for the token at `position`, uniform over the keys it
/// sees, the token itself among them; ascending, then −1. `picks` [topk].
void random_picks(std::uint64_t seed, std::int64_t request_id, std::int64_t position,
                  std::span<std::int32_t> picks);

/// The same for the next token of a request, given the picks of the token before it: each of those
/// is kept with probability 0.8, the others are drawn anew.
void clustered_picks(std::uint64_t seed, std::int64_t request_id, std::int64_t position,
                     std::span<const std::int32_t> before, std::span<std::int32_t> picks);

}  // namespace sparse_mla::support
