/// The record that gathers, mask builders and attention kernels read: one request's part of a chunk
/// of context, or of the suffix (its new tokens).
#pragma once

#include <cstdint>

namespace sparse_mla {

/// Eight 32-bit integers, so that a member is two 16-byte loads on a device.
struct ChunkMember {
  std::int32_t request = 0;       ///< row of the block tables (the caller's order)
  std::int32_t query_start = 0;   ///< first new token, the caller's token numbering
  std::int32_t query_len = 0;     ///< new tokens; may be 0
  std::int32_t packed_token = 0;  ///< its first row in the running partial
  std::int32_t context_len = 0;   ///< query row j stands at position context_len + j
  std::int32_t first_key = 0;     ///< request-local position of the member's first key
  std::int32_t num_keys = 0;      ///< keys in this chunk; may be 0 (equal split)
  std::int32_t key_row = 0;       ///< first row in the packed workspace
};

}  // namespace sparse_mla
