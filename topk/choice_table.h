/// Written by bench/topk_choice.py: NVIDIA H200, commit ad03e02, CUDA 13.0, 2026-11-30.
#pragma once

#include "topk/selectors.h"

namespace sparse_mla::topk {

// clang-format off
inline constexpr ChoiceRow kChoiceTable[] = {
    {0, 0, Selector::cta},
    {0, 16385, Selector::cluster},
    {181, 0, Selector::cta},
    {181, 11585, Selector::stream},
    {181, 185364, Selector::cluster},
    {2048, 0, Selector::cta},
    {2048, 11585, Selector::stream},
    {2048, 370728, Selector::cluster},
};
// clang-format on

}  // namespace sparse_mla::topk
