/// Which variant of selection is the fastest on a GPU: a pure function over a measured table.
#pragma once

#include <cstdint>

#include "topk/choice_table.h"
#include "topk/selectors.h"

namespace sparse_mla::topk {

/// Picks that the variants other than radix hold in shared memory while they select.
inline constexpr int kMaxSharedPicks = 4096;

constexpr Selector choose(std::int64_t rows, std::int64_t row_len, int k, int compute_capability) {
  constexpr int kWithClusters = 90;
  if (k > kMaxSharedPicks || compute_capability < kWithClusters) return Selector::radix;
  // Ascending by rows, then by length; the first of each group serves every length. Hence the last
  // line that does not begin beyond the shape is the one that holds it.
  Selector selector = Selector::radix;
  for (const ChoiceRow& line : kChoiceTable)
    if (line.rows_from <= rows && line.row_len_from <= row_len) selector = line.selector;
  return selector;
}

}  // namespace sparse_mla::topk
