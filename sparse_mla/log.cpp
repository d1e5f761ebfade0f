#include "sparse_mla/log.h"

#include <mutex>
#include <utility>

namespace sparse_mla {
namespace {
std::mutex log_mutex;
LogCallback log_callback;
}  // namespace

void set_log_callback(LogCallback callback) {
  const std::lock_guard lock(log_mutex);
  log_callback = std::move(callback);
}

void log(LogLevel level, std::string_view message) {
  const std::lock_guard lock(log_mutex);
  if (log_callback) log_callback(level, message);
}

}  // namespace sparse_mla
