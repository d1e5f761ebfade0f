#include "tests/support/select_oracle.h"

#include <algorithm>
#include <cmath>

namespace sparse_mla::support {

std::vector<std::int32_t> select_oracle(std::span<const float> row, std::int64_t start,
                                        std::int64_t end, std::int64_t k) {
  const auto size = static_cast<std::int64_t>(row.size());
  const std::int64_t first = std::min(std::max<std::int64_t>(start, 0), size);
  const std::int64_t last = std::max(first, std::min(end, size));

  struct Candidate {
    double score;
    std::int32_t index;
  };
  std::vector<Candidate> candidates;
  candidates.reserve(static_cast<std::size_t>(last - first));
  for (std::int64_t i = first; i < last; ++i)
    candidates.push_back({row[static_cast<std::size_t>(i)], static_cast<std::int32_t>(i - first)});

  const auto better = [](const Candidate& a, const Candidate& b) {
    if (std::isnan(a.score) || std::isnan(b.score)) {
      if (std::isnan(a.score) && std::isnan(b.score)) return a.index < b.index;
      return std::isnan(b.score);
    }
    if (a.score == b.score) return a.index < b.index;
    return a.score > b.score;
  };
  const std::int64_t count = std::min(k, last - first);
  // The order is total, so sorting only the front gives what sorting everything would.
  if (count < last - first)
    std::nth_element(candidates.begin(), candidates.begin() + count, candidates.end(), better);
  std::sort(candidates.begin(), candidates.begin() + count, better);

  std::vector<std::int32_t> picks;
  for (std::int64_t i = 0; i < count; ++i)
    picks.push_back(candidates[static_cast<std::size_t>(i)].index);
  return picks;
}

}  // namespace sparse_mla::support
