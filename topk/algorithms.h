/// The CPU selectors, one source file each; entries.cpp lists them. All are exact, deterministic
/// and give ties to the lower index.
#pragma once

#include "sparse_mla/select.h"

namespace sparse_mla::topk {

using SelectEntry = Entry<SelectProblem, SelectCall>;

SelectEntry cpu_threshold_avx2_entry();
SelectEntry cpu_threshold_entry();
SelectEntry cpu_radix_entry();
SelectEntry cpu_nth_element_entry();
SelectEntry cpu_thrust_sort_entry();
SelectEntry cpu_sort_entry();

}  // namespace sparse_mla::topk
