#pragma once

#include <string>
#include <string_view>

namespace sparse_mla::command {

/// `text` in double quotes for an error message that must stay one readable line: bytes that are
/// not printable ASCII are shown as \xNN, and everything after `max_bytes` input bytes as "…".
std::string quote(std::string_view text, size_t max_bytes = 40);

}  // namespace sparse_mla::command
