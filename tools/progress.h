#pragma once

#include <chrono>
#include <cstdint>
#include <ostream>
#include <string>

namespace sparse_mla::command {

/// One line that tells how far long work is: "replaying 12 of 509 batches". It appears only on a
/// terminal and only once the work has taken a second, is rewritten in place at most ten times a
/// second, and is erased at the end: logs and pipes never see it.
class Progress {
 public:
  using Clock = std::chrono::steady_clock;

  /// On stderr. `total` 0 = unknown.
  Progress(std::string action, std::string unit, int64_t total);
  /// For tests: another stream, and whether it counts as a terminal.
  Progress(std::string action, std::string unit, int64_t total, std::ostream& out, bool terminal,
           Clock::time_point start);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` of `total` units are finished.
  void update(int64_t done, Clock::time_point now = Clock::now());

 private:
  std::string action_;
  std::string unit_;
  int64_t total_;
  std::ostream& out_;
  bool terminal_;
  Clock::time_point next_;  // nothing is written before
  bool visible_ = false;
};

}  // namespace sparse_mla::command
