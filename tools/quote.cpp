#include "tools/quote.h"

#include <cstdio>

namespace sparse_mla::command {

std::string quote(std::string_view text, size_t max_bytes) {
  std::string quoted = "\"";
  for (const char c : text.substr(0, max_bytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte > 0x7e) {
      char escaped[5];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", byte);
      quoted += escaped;
    } else if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else {
      quoted += c;
    }
  }
  quoted += '"';
  if (text.size() > max_bytes) quoted += "…";
  return quoted;
}

}  // namespace sparse_mla::command
