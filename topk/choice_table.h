/// Not measured yet; bench/topk_choice.py writes it. Until then: rows of up to 8,192 scores fit one
/// CTA's shared memory; longer ones are worth several CTAs each while at least two per row fit the
/// 132 SMs of an H200; more rows than that keep every SM busy with a row of its own.
#pragma once

#include "topk/selectors.h"

namespace sparse_mla::topk {

inline constexpr ChoiceRow kChoiceTable[] = {
    {0, 0, Selector::cta},
    {0, 8193, Selector::cluster},
    {65, 0, Selector::cta},
    {65, 8193, Selector::stream},
};

}  // namespace sparse_mla::topk
