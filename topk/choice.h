/// Which variant of selection is the fastest on a GPU: a pure function over a measured table.
#pragma once

#include <cstdint>

#include "topk/choice_table.h"
#include "topk/selectors.h"

namespace sparse_mla::topk {

/// The largest k of the variants that stream: their picks are in shared memory while they select.
inline constexpr int kMaxStreamedPicks = 4096;
/// The longest row that one CTA holds in registers.
inline constexpr std::int64_t kMaxCtaRowLen = 16384;

/// Never a variant that cannot serve the shape on a device of that compute capability (80 or more).
constexpr Selector choose(std::int64_t rows, std::int64_t row_len, int k, int compute_capability) {
  constexpr int kWithClusters = 90;
  const bool fits_cta = row_len <= kMaxCtaRowLen;
  if (k > kMaxStreamedPicks) return fits_cta ? Selector::cta : Selector::radix;
  // Ascending by rows, then by length; the first of each group serves every length. Hence the last
  // line that does not begin beyond the shape is the one that holds it.
  Selector selector = Selector::radix;
  for (const ChoiceRow& line : kChoiceTable)
    if (line.rows_from <= rows && line.row_len_from <= row_len) selector = line.selector;
  if (selector == Selector::cta && !fits_cta) return Selector::stream;
  if (selector == Selector::cluster && compute_capability < kWithClusters)
    return fits_cta ? Selector::cta : Selector::stream;
  return selector;
}

}  // namespace sparse_mla::topk
