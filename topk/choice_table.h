/// Set by hand after first measurements on an H200 at k 2048, fp32 (bench/topk_choice.py writes it
/// from a whole record): one CTA is the fastest for every row that its registers hold (1 × 8,192:
/// 8.3 µs against a cluster's 13.7; 4,096 × 8,192: 123 µs against 165 streamed). Longer rows get a
/// cluster each as long as they do not outnumber the 132 SMs (64 × 524,288: 48 µs against 99).
#pragma once

#include "topk/selectors.h"

namespace sparse_mla::topk {

inline constexpr ChoiceRow kChoiceTable[] = {
    {0, 0, Selector::cta},
    {0, 16385, Selector::cluster},
    {133, 0, Selector::cta},
    {133, 16385, Selector::stream},
};

}  // namespace sparse_mla::topk
