#include "kernels/cpu/cpu_features.h"

#include <array>
#include <cstring>

#include <cpuid.h>

namespace sparse_mla::cpu {

bool has_avx2_fma() {
  // __builtin_cpu_supports also asks whether the system saves the wide registers.
  static const bool supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return supported;
}

std::string why_not_avx2_fma() { return has_avx2_fma() ? "" : "the processor lacks AVX2 or FMA"; }

std::string cpu_name() {
  std::array<unsigned, 12> words{};
  if (__get_cpuid_max(0x80000000u, nullptr) < 0x80000004u) return "unknown";
  for (unsigned leaf = 0; leaf < 3; ++leaf)
    __get_cpuid(0x80000002u + leaf, &words[leaf * 4], &words[leaf * 4 + 1], &words[leaf * 4 + 2],
                &words[leaf * 4 + 3]);
  std::string name(reinterpret_cast<const char*>(words.data()), sizeof words);
  name.resize(std::strlen(name.c_str()));
  const std::size_t first = name.find_first_not_of(' ');
  if (first == std::string::npos) return "unknown";
  return name.substr(first, name.find_last_not_of(' ') - first + 1);
}

}  // namespace sparse_mla::cpu
