#include "sparse_mla/error.h"

namespace sparse_mla {

void throw_invalid(std::string_view argument, std::string_view got, std::string_view expected) {
  std::string text(argument);
  text.append(": got ").append(got).append(", expected ").append(expected);
  throw std::invalid_argument(text);
}

}  // namespace sparse_mla
