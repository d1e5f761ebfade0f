/// Numbers of the threshold selector, each with its reason.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace sparse_mla::topk {

constexpr std::int64_t ceil_sqrt(std::int64_t n) {
  std::int64_t root = 0;
  while (root * root < n) ++root;
  return root;
}

/// The sample is taken in runs of this many neighbours: a place costs a cache and a TLB miss when
/// the row comes from memory, its neighbours cost nothing.
inline constexpr std::int64_t kSampleRun = 8;

/// Elements to look at before the pass (whole runs), 0 = start without a threshold. About 36 of the
/// sample should rank above the k-th score: with the margin of sample_rank, some 2 k keys survive;
/// more samples would cost more than the keys they would save. At most 4,096 for the same reason,
/// and at most an eighth of the row. When k is more than a quarter of the row, a threshold would
/// drop too little to pay.
constexpr std::int64_t sample_size(std::int64_t len, std::int64_t k) {
  if (len < 1024 || len < 4 * k) return 0;
  const std::int64_t size = std::min({36 * len / k, len / 8, std::int64_t{4096}});
  return size / kSampleRun * kSampleRun;
}

/// Where the i-th of the sample lies. Its run is at a scattered place of one of equal pieces: a
/// fixed step would see only one phase of scores that repeat.
constexpr std::int64_t sample_place(std::int64_t i, std::int64_t sample, std::int64_t len) {
  const std::int64_t run = i / kSampleRun;
  const std::int64_t piece = len / (sample / kSampleRun);
  const std::uint32_t scatter =
      static_cast<std::uint32_t>(run) * 0x9E3779B1u;  // 2^32 / golden ratio
  const auto choices = static_cast<std::uint64_t>(piece - kSampleRun + 1);
  return run * piece + static_cast<std::int64_t>((std::uint64_t{scatter} * choices) >> 32) +
         i % kSampleRun;
}

/// Which of the sample, counted from the largest, becomes the threshold: the expected number above
/// the k-th score and six standard deviations of a Poisson count. Of independent scores fewer than
/// one row in a million then finds too few survivors and must be read again; of neighbours so alike
/// that a run of eight counts as one, where the deviation is √8 times that, one in sixty.
constexpr std::int64_t sample_rank(std::int64_t sample, std::int64_t len, std::int64_t k) {
  const std::int64_t expected = (sample * k + len - 1) / len;
  return std::min(sample, expected + 6 * ceil_sqrt(expected) + 2);
}

/// Survivors to hold before they are cut back to k. Each cut frees at least three quarters, so even
/// a row whose every key beats all before it costs 4/3 of one selection over its keys; the floor
/// makes cuts rare for small k (two int32 arrays of 16,384 fit a 256 KB L2).
constexpr std::int64_t survivor_capacity(std::int64_t max_row_len, std::int64_t k) {
  return std::min(max_row_len, std::max<std::int64_t>(4 * k, 16384));
}

/// Digit of the selection among `count` survivors: about a bin a key, so that clearing and
/// searching the bins costs no more than counting; at most 2,048 counters of 4 bytes, a quarter of
/// a 32 KB L1.
inline constexpr int kMaxDigitBits = 11;
constexpr int digit_bits(std::int64_t count) {
  return std::clamp(static_cast<int>(std::bit_width(static_cast<std::uint64_t>(count))), 4,
                    kMaxDigitBits);
}

}  // namespace sparse_mla::topk
