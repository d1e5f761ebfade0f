/// How a batch's integers reach the device: planned into pinned memory, sent in one copy.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "sparse_mla/metadata.h"
#include "sparse_mla/types.h"

namespace sparse_mla {

/// Pinned host arenas, used in turn, and one device arena. All memory is allocated by the
/// constructor, on the current device. One object serves one stream (the device arena is written in
/// its order) and one thread at a time.
///
///   BatchMetadata batch(capacity, query_lens, context_lens, {}, {}, arena.next());
///   options.arena = arena.upload(batch, stream);
///   run_layer(capacity, batch, tensors, workspace, stream, options);
class DeviceArena {
 public:
  /// `bytes` of each arena: Capacity::max_arena_bytes(). Throws std::invalid_argument for fewer
  /// than one host arena and CudaError where the memory cannot be had.
  explicit DeviceArena(std::size_t bytes, int num_host_arenas = 2);
  ~DeviceArena();
  DeviceArena(DeviceArena&&) noexcept;
  DeviceArena& operator=(DeviceArena&&) noexcept;

  /// Memory for the next batch's arena. Waits while a copy out of it is still in flight: with two
  /// host arenas that is the copy before the last one.
  std::span<std::byte> next();

  /// Enqueues the one copy of `batch`, which must have been planned into the last next(). The
  /// device's address, always the same: RunOptions::arena. Throws std::invalid_argument for a batch
  /// whose arena lies elsewhere (one that did not fit).
  const std::byte* upload(const BatchMetadata& batch, Stream stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sparse_mla
