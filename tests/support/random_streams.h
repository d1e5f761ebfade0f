/// Streams of the counter-based generator, one per kind of data, and bulk normal values.
#pragma once

#include <cstdint>

#include "sparse_mla/random.h"

namespace sparse_mla::support {

enum class RandomStream : std::uint64_t {
  kv_b_proj = 1,
  latent,
  q,
  index_q,
  index_weights,
  index_k,
  index_k_magnitude,
  pages,
  random_picks,
  clustered_picks,
  checked_tokens,
};

/// The generator's stream of `kind` for one request.
inline std::uint64_t stream_of(RandomStream kind, std::int64_t request_id) {
  return (static_cast<std::uint64_t>(kind) << 56) ^ static_cast<std::uint64_t>(request_id);
}

/// Numbers in [0, bound), drawn one after the other from block `index`'s own sequence.
class RandomSequence {
 public:
  RandomSequence(std::uint64_t seed, std::uint64_t stream, std::uint64_t index)
      : seed_(seed), stream_(stream), next_(index << 32) {}

  std::uint32_t bits() {
    if (used_ == 4) {
      block_ = random_block(seed_, stream_, next_++);
      used_ = 0;
    }
    return block_.word[used_++];
  }
  /// Uniform up to a bias of bound / 2^32.
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>((bits() * static_cast<std::uint64_t>(bound)) >> 32);
  }

 private:
  std::uint64_t seed_, stream_, next_;
  RandomBlock block_{};
  int used_ = 4;
};

/// Row `row` of a table of approximately normal values with standard deviation `deviation`: one
/// value is the sum of the four bytes of a 32-bit word, half the generator's work per value of
/// random_normal and resolution enough for bf16. Tails end at ±3.45 deviations.
inline void normal_row(std::uint64_t seed, std::uint64_t stream, std::int64_t row, int width,
                       float deviation, float* values) {
  const float scale = deviation * 6.7659e-3f;  // 1 / sqrt(4 (256^2 - 1) / 12)
  const int blocks = (width + 3) / 4;
  const std::uint64_t first = static_cast<std::uint64_t>(row) * static_cast<std::uint64_t>(blocks);
  for (int b = 0; b < blocks; ++b) {
    const RandomBlock block = random_block(seed, stream, first + static_cast<std::uint64_t>(b));
    for (int i = 0; i < 4 && 4 * b + i < width; ++i) {
      const std::uint32_t word = block.word[i];
      const std::uint32_t pairs = (word & 0x00FF00FFu) + ((word >> 8) & 0x00FF00FFu);
      const auto sum = static_cast<std::int32_t>((pairs & 0xFFFFu) + (pairs >> 16));
      values[4 * b + i] = static_cast<float>(sum - 510) * scale;
    }
  }
}

}  // namespace sparse_mla::support
