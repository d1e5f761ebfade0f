#include "tools/progress.h"

#include <iostream>
#include <utility>

#include <unistd.h>

#include "tools/table.h"

namespace sparse_mla::command {
namespace {

constexpr std::string_view kEraseLine = "\r\x1b[K";

}  // namespace

Progress::Progress(std::string action, std::string unit, int64_t total)
    : Progress(std::move(action), std::move(unit), total, std::cerr, isatty(STDERR_FILENO) == 1,
               Clock::now()) {}

Progress::Progress(std::string action, std::string unit, int64_t total, std::ostream& out,
                   bool terminal, Clock::time_point start)
    : action_(std::move(action)),
      unit_(std::move(unit)),
      total_(total),
      out_(out),
      terminal_(terminal),
      next_(start + std::chrono::seconds(1)) {}

Progress::~Progress() {
  if (visible_) out_ << kEraseLine << std::flush;
}

void Progress::update(int64_t done, Clock::time_point now) {
  if (!terminal_ || now < next_) return;
  next_ = now + std::chrono::milliseconds(100);
  visible_ = true;
  out_ << kEraseLine << action_ << ' ' << format_count(done);
  if (total_ > 0) out_ << " of " << format_count(total_);
  out_ << ' ' << unit_ << std::flush;
}

}  // namespace sparse_mla::command
