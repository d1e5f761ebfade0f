#include "sparse_mla/workspace.h"

#include "sparse_mla/error.h"

namespace sparse_mla {

WorkspaceCarver::WorkspaceCarver(std::span<std::byte> memory) : memory_(memory), counting_(false) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  require(
      address % kWorkspaceAlignment == 0, "workspace", address % kWorkspaceAlignment,
      "an address that is a multiple of " + std::to_string(kWorkspaceAlignment) + " (remainder 0)");
}

std::byte* WorkspaceCarver::take_bytes(std::string_view name, std::size_t bytes) {
  const std::size_t offset = used_;
  const std::size_t padded =
      (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  if (!counting_ && (padded < bytes || padded > memory_.size() - offset))
    throw_invalid(
        "workspace", std::to_string(memory_.size()) + " bytes",
        "at least " + std::to_string(offset + padded) + " bytes, for buffer " + std::string(name));
  used_ += padded;
  if (!counting_) return memory_.data() + offset;
  buffers_.push_back({std::string(name), offset, bytes});
  return nullptr;
}

}  // namespace sparse_mla
