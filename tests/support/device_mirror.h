/// A copy of host memory on the device, for as long as a call runs there.
///
/// Pieces that overlap on the host overlap on the device; every piece keeps its address modulo 256,
/// so that a test of unaligned memory stays one; 0xFF bytes (NaN, −1) lie around each piece, and
/// what was written there is found. under_sanitizer(), every piece is an allocation of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/support/call_memory.h"
#include "tests/support/gpu.h"

namespace sparse_mla::support {

class DeviceMirror {
 public:
  /// Step 1: notes a piece of host memory. `written`: it is copied back.
  void note(const void* data, std::size_t bytes, bool written);
  /// Step 2: allocates and copies.
  void upload();
  /// Step 3: where a noted piece lies on the device.
  template <class T>
  T* on_device(T* host) const {
    return reinterpret_cast<T*>(find(host));
  }
  /// Copies the host's bytes again, to the same place.
  void refresh();
  /// Step 4: copies back what is written. Throws std::runtime_error when something was written
  /// between the pieces.
  void download();

 private:
  struct Piece {
    std::uintptr_t begin = 0, end = 0;  ///< host addresses
    bool written = false;
    std::byte* device = nullptr;
  };
  std::byte* find(const void* host) const;

  std::vector<Piece> pieces_;  ///< after upload(): disjoint, ascending
  std::vector<DeviceMemory> memory_;
};

/// `call` with device pointers; the mirror holds what they point to.
template <class Problem, class Call>
Call mirror_call(const Problem& problem, const Call& call, DeviceMirror& mirror) {
  Call noted = call;
  visit_memory(problem, noted, [&]<class T>(T*& data, std::size_t bytes) {
    mirror.note(data, bytes, !std::is_const_v<T>);
  });
  mirror.upload();
  Call moved = call;
  visit_memory(problem, moved,
               [&]<class T>(T*& data, std::size_t) { data = mirror.on_device(data); });
  return moved;
}

}  // namespace sparse_mla::support
