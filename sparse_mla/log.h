/// The library's only way to say something: a callback that the application installs.
#pragma once

#include <functional>
#include <string_view>

namespace sparse_mla {

enum class LogLevel { debug, info, warning };
using LogCallback = std::function<void(LogLevel level, std::string_view message)>;

/// Replaces the process-wide callback (empty = silent, the default). Thread-safe; the callback may
/// be called from any thread that uses the library, never concurrently with itself. It must not
/// call the library: a message from inside the callback would wait for itself.
void set_log_callback(LogCallback callback);

/// Hands `message` to the callback, if there is one.
void log(LogLevel level, std::string_view message);

}  // namespace sparse_mla
