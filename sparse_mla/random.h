/// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random
/// numbers: as easy as 1, 2, 3", SC 2011). A value depends only on (seed, stream, index), so tests,
/// benchmarks and the command draw the same inputs on the CPU and on a GPU, in any order.
#pragma once

#include <cstdint>

#include "sparse_mla/host_device.h"

namespace sparse_mla {

struct RandomBlock {
  std::uint32_t word[4];
};

/// The four 32-bit words at `index` of stream `stream` under `seed`.
SPARSE_MLA_HOST_DEVICE constexpr RandomBlock random_block(std::uint64_t seed, std::uint64_t stream,
                                                          std::uint64_t index) {
  std::uint32_t counter[4] = {
      static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
      static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)};
  std::uint32_t key[2] = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * counter[2];
    const std::uint32_t next0 = static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0];
    const std::uint32_t next2 = static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1];
    counter[1] = static_cast<std::uint32_t>(product1);
    counter[3] = static_cast<std::uint32_t>(product0);
    counter[0] = next0;
    counter[2] = next2;
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return {{counter[0], counter[1], counter[2], counter[3]}};
}

/// 32 random bits.
SPARSE_MLA_HOST_DEVICE constexpr std::uint32_t random_bits(std::uint64_t seed, std::uint64_t stream,
                                                           std::uint64_t index) {
  return random_block(seed, stream, index >> 2).word[index & 3];
}

/// Uniform in [0, 1), 24 bits.
SPARSE_MLA_HOST_DEVICE constexpr float random_uniform(std::uint64_t seed, std::uint64_t stream,
                                                      std::uint64_t index) {
  return static_cast<float>(random_bits(seed, stream, index) >> 8) * 0x1p-24f;
}

/// Approximately standard normal: the sum of four 16-bit uniforms (Irwin–Hall), centred and scaled
/// to variance 1. Only additions of integers and one multiplication, hence the same bits on every
/// backend; the tails end at ±3.46.
SPARSE_MLA_HOST_DEVICE constexpr float random_normal(std::uint64_t seed, std::uint64_t stream,
                                                     std::uint64_t index) {
  const RandomBlock block = random_block(seed, stream, index >> 1);
  const std::uint32_t first = block.word[(index & 1) * 2], second = block.word[(index & 1) * 2 + 1];
  const std::int32_t sum = static_cast<std::int32_t>((first & 0xFFFFu) + (first >> 16) +
                                                     (second & 0xFFFFu) + (second >> 16)) -
                           131070;
  return static_cast<float>(sum) * 2.6428996e-5f;  // sqrt(3) / 65536
}

}  // namespace sparse_mla
