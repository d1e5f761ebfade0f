/// What the processor at hand can do.
#pragma once

#include <string>

namespace sparse_mla::cpu {

/// AVX2 and FMA: the one vector path beyond the x86-64 baseline.
bool has_avx2_fma();

/// Empty, or why an AVX2 entry cannot run here.
std::string why_not_avx2_fma();

/// The processor's brand string, or "unknown".
std::string cpu_name();

}  // namespace sparse_mla::cpu
