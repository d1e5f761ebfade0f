/// How the library reports faults. Nothing in it prints, exits or aborts.
///
/// Bad arguments: std::invalid_argument, "argument: got …, expected …", thrown before anything is
/// launched or written. A failed CUDA call: CudaError with the call and the runtime's text.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace sparse_mla {

class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws std::invalid_argument("<argument>: got <got>, expected <expected>").
[[noreturn]] void throw_invalid(std::string_view argument, std::string_view got,
                                std::string_view expected);

/// `require(k >= 1, "k", k, "at least 1")`
template <class Got>
void require(bool condition, std::string_view argument, const Got& got, std::string_view expected) {
  if (condition) return;
  std::ostringstream text;
  text << got;
  throw_invalid(argument, text.str(), expected);
}

}  // namespace sparse_mla
