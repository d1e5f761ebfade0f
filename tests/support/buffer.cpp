#include "tests/support/buffer.h"

#include <algorithm>
#include <cstring>

namespace sparse_mla::support {

void poison_bytes(std::byte* bytes, std::size_t count) {
  constexpr std::size_t kPiece = 1 << 20;  // pages belong to the threads that touch them first
#pragma omp parallel for schedule(static)
  for (std::size_t begin = 0; begin < count; begin += kPiece) {
    std::memset(bytes + begin, 0xFF, std::min(kPiece, count - begin));
  }
}

}  // namespace sparse_mla::support
