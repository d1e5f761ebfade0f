#pragma once

#include <cstdint>
#include <string>

namespace sparse_mla::command {

/// Bytes that the machine can still hand out (Linux: MemAvailable); the largest int64 where it does
/// not say.
std::int64_t available_memory_bytes();

/// Throws std::invalid_argument, naming `argument`, when `bytes` are more than the machine has
/// left. An allocation that is too large may succeed and have the process killed only when it is
/// touched.
void require_memory(const std::string& argument, double bytes);

}  // namespace sparse_mla::command
