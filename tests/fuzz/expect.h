/// What a fuzzer checks: a failure ends the process, and libFuzzer keeps the input.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace sparse_mla::fuzz {

inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

}  // namespace sparse_mla::fuzz
