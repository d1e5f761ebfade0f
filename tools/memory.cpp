#include "tools/memory.h"

#include <fstream>
#include <limits>
#include <stdexcept>

#include "tools/table.h"

namespace sparse_mla::command {

std::int64_t available_memory_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  std::int64_t kibibytes = 0;
  while (file >> name >> kibibytes) {
    if (name == "MemAvailable:") return kibibytes * 1024;
    std::getline(file, unit);
  }
  return std::numeric_limits<std::int64_t>::max();
}

void require_memory(const std::string& argument, double bytes) {
  const auto available = static_cast<double>(available_memory_bytes());
  if (bytes <= available) return;
  constexpr double kGibi = 1 << 30;
  throw std::invalid_argument(argument + ": got a problem of " + format_number(bytes / kGibi, 1) +
                              " GiB, expected at most the " + format_number(available / kGibi, 1) +
                              " GiB of memory that are free");
}

}  // namespace sparse_mla::command
