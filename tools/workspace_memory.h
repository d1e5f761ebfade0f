#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>

#include "sparse_mla/workspace.h"

namespace sparse_mla::command {

/// Host memory for a workspace, aligned as the library asks. Not cleared.
class WorkspaceMemory {
 public:
  explicit WorkspaceMemory(std::size_t bytes)
      : data_(static_cast<std::byte*>(::operator new(bytes, kAlignment))), bytes_(bytes) {}

  std::span<std::byte> span() { return {data_.get(), bytes_}; }

 private:
  static constexpr std::align_val_t kAlignment{kWorkspaceAlignment};
  struct Delete {
    void operator()(std::byte* data) const { ::operator delete(data, kAlignment); }
  };

  std::unique_ptr<std::byte, Delete> data_;
  std::size_t bytes_;
};

}  // namespace sparse_mla::command
