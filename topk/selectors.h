/// The variants of selection on a GPU that topk/choice.h chooses from.
#pragma once

#include <cstdint>

namespace sparse_mla::topk {

enum class Selector {
  cta,      ///< a row in the registers of one CTA
  cluster,  ///< a row streamed through a cluster of CTAs
  stream,   ///< a row streamed through one CTA
  radix,    ///< digit histograms: any k, any length, any device
};

/// From so many rows of so many scores on, the selector is the fastest.
struct ChoiceRow {
  std::int64_t rows_from, row_len_from;
  Selector selector;
};

}  // namespace sparse_mla::topk
