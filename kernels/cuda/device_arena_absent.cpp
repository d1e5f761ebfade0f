#include <stdexcept>

#include "sparse_mla/device_arena.h"

namespace sparse_mla {

struct DeviceArena::State {};

DeviceArena::DeviceArena(std::size_t, int) {
  throw std::runtime_error("DeviceArena: this build has no CUDA backend");
}
DeviceArena::~DeviceArena() = default;
DeviceArena::DeviceArena(DeviceArena&&) noexcept = default;
DeviceArena& DeviceArena::operator=(DeviceArena&&) noexcept = default;
std::span<std::byte> DeviceArena::next() { return {}; }
const std::byte* DeviceArena::upload(const BatchMetadata&, Stream) { return nullptr; }

}  // namespace sparse_mla
