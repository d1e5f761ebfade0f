/// The caller owns memory; the library carves it. The same code counts and carves, so a size that
/// was asked for is a size that fits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sparse_mla {

/// Every sub-buffer starts on such a boundary: a CUDA allocation's, and enough for any vector load.
inline constexpr std::size_t kWorkspaceAlignment = 256;

/// One named piece of a workspace.
struct WorkspaceBuffer {
  std::string name;
  std::size_t offset = 0;  ///< bytes from the workspace's base
  std::size_t bytes = 0;
};

/// Without memory it counts, with memory it hands out pointers. Not thread-safe; cheap, made per
/// call: handing out allocates nothing.
class WorkspaceCarver {
 public:
  WorkspaceCarver() = default;
  /// Throws std::invalid_argument when `memory` is not aligned to kWorkspaceAlignment.
  explicit WorkspaceCarver(std::span<std::byte> memory);

  /// The next sub-buffer of `count` elements; nullptr while counting. Throws std::invalid_argument
  /// naming the buffer when the memory ends before it.
  template <class T>
  T* take(std::string_view name, std::int64_t count) {
    return reinterpret_cast<T*>(
        take_bytes(name, static_cast<std::size_t>(count < 0 ? 0 : count) * sizeof(T)));
  }

  /// The next `bytes`, for an operation's own scratch.
  std::span<std::byte> take_span(std::string_view name, std::size_t bytes) {
    return {take_bytes(name, bytes), counting_ ? 0 : bytes};
  }

  /// What nothing has taken; empty while counting.
  std::span<std::byte> rest() const { return memory_.subspan(counting_ ? 0 : used_); }

  std::size_t bytes() const { return used_; }
  /// What was counted.
  const std::vector<WorkspaceBuffer>& buffers() const { return buffers_; }

 private:
  std::byte* take_bytes(std::string_view name, std::size_t bytes);

  std::span<std::byte> memory_;
  bool counting_ = true;
  std::size_t used_ = 0;
  std::vector<WorkspaceBuffer> buffers_;
};

/// Host memory for a workspace of the CPU backend, aligned as it has to be. Not cleared.
class HostWorkspace {
 public:
  explicit HostWorkspace(std::size_t bytes)
      : data_(static_cast<std::byte*>(::operator new(bytes, kAlignment))), bytes_(bytes) {}

  std::span<std::byte> span() const { return {data_.get(), bytes_}; }

 private:
  static constexpr std::align_val_t kAlignment{kWorkspaceAlignment};
  struct Delete {
    void operator()(std::byte* data) const { ::operator delete(data, kAlignment); }
  };

  std::unique_ptr<std::byte, Delete> data_;
  std::size_t bytes_;
};

}  // namespace sparse_mla
