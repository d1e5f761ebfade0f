/// Timings whose ratios can be trusted on a machine that others use too: the variants run in turns,
/// round by round, and medians are compared.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace sparse_mla::bench {

class Interleaved {
 public:
  /// Returns the variant's number.
  std::size_t add(std::function<void()> work) {
    variants_.push_back({std::move(work), {}});
    return variants_.size() - 1;
  }

  /// One untimed round, then `rounds` timed ones.
  void run(int rounds) {
    for (int round = -1; round < rounds; ++round)
      for (Variant& variant : variants_) {
        const auto begin = std::chrono::steady_clock::now();
        variant.work();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        if (round >= 0) variant.seconds.push_back(took.count());
      }
  }

  /// Median seconds of one variant.
  double median(std::size_t variant) const {
    std::vector<double> sorted = variants_[variant].seconds;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }

 private:
  struct Variant {
    std::function<void()> work;
    std::vector<double> seconds;
  };
  std::vector<Variant> variants_;
};

}  // namespace sparse_mla::bench
