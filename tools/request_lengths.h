#pragma once

#include <cstdint>

namespace sparse_mla::command {

/// The lengths of one request in one batch. The whole sequence, query_len + context_len, fits an
/// int32.
struct RequestLengths {
  int32_t query_len = 0;    // tokens; 0 = a member without new tokens
  int32_t context_len = 0;  // tokens that are in the cache already

  friend bool operator==(const RequestLengths&, const RequestLengths&) = default;
};

}  // namespace sparse_mla::command
