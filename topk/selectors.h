/// The variants of selection on a GPU that topk/choice.h chooses from.
#pragma once

#include <cstdint>

namespace sparse_mla::topk {

enum class Selector {
  cta,      ///< a row in one CTA's shared memory
  cluster,  ///< a row in the shared memory of a cluster of CTAs
  stream,   ///< a row streamed through one CTA
  radix,    ///< digit histograms: any k, any device
};

/// From so many rows of so many scores on, the selector is the fastest.
struct ChoiceRow {
  std::int64_t rows_from, row_len_from;
  Selector selector;
};

}  // namespace sparse_mla::topk
