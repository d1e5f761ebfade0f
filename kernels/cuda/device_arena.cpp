#include "sparse_mla/device_arena.h"

#include <vector>

#include <cuda_runtime_api.h>

#include "kernels/cuda/device.h"
#include "sparse_mla/error.h"

namespace sparse_mla {
namespace {

struct FreePinned {
  void operator()(std::byte* data) const { cudaFreeHost(data); }
};
struct FreeDevice {
  void operator()(std::byte* data) const { cudaFree(data); }
};
struct DestroyEvent {
  void operator()(CUevent_st* event) const { cudaEventDestroy(event); }
};

struct HostArena {
  std::unique_ptr<std::byte, FreePinned> memory;
  std::unique_ptr<CUevent_st, DestroyEvent> sent;  ///< after the last copy out of `memory`
};

HostArena make_host_arena(std::size_t bytes) {
  HostArena arena;
  void* memory = nullptr;
  cuda::check(cudaHostAlloc(&memory, bytes, cudaHostAllocDefault), "cudaHostAlloc");
  arena.memory.reset(static_cast<std::byte*>(memory));
  cudaEvent_t event = nullptr;
  cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  arena.sent.reset(event);
  return arena;
}

}  // namespace

struct DeviceArena::State {
  std::size_t bytes = 0;
  std::vector<HostArena> host;
  std::size_t current = 0;
  std::unique_ptr<std::byte, FreeDevice> device;
};

DeviceArena::DeviceArena(std::size_t bytes, int num_host_arenas)
    : state_(std::make_unique<State>()) {
  require(num_host_arenas >= 1, "num_host_arenas", num_host_arenas, "at least 1");
  state_->bytes = bytes == 0 ? 1 : bytes;
  for (int i = 0; i < num_host_arenas; ++i) state_->host.push_back(make_host_arena(state_->bytes));
  void* device = nullptr;
  cuda::check(cudaMalloc(&device, state_->bytes), "cudaMalloc");
  state_->device.reset(static_cast<std::byte*>(device));
}

DeviceArena::~DeviceArena() = default;
DeviceArena::DeviceArena(DeviceArena&&) noexcept = default;
DeviceArena& DeviceArena::operator=(DeviceArena&&) noexcept = default;

std::span<std::byte> DeviceArena::next() {
  state_->current = (state_->current + 1) % state_->host.size();
  const HostArena& arena = state_->host[state_->current];
  cuda::check(cudaEventSynchronize(arena.sent.get()), "cudaEventSynchronize");
  return {arena.memory.get(), state_->bytes};
}

const std::byte* DeviceArena::upload(const BatchMetadata& batch, Stream stream) {
  const HostArena& arena = state_->host[state_->current];
  require(batch.arena().empty() || batch.arena().data() == arena.memory.get(), "batch",
          "an arena of " + std::to_string(batch.arena().size()) + " bytes of its own",
          "one planned into next(), of at most " + std::to_string(state_->bytes) + " bytes");
  cuda::check(cudaMemcpyAsync(state_->device.get(), arena.memory.get(), batch.arena().size(),
                              cudaMemcpyHostToDevice, stream),
              "cudaMemcpyAsync");
  cuda::check(cudaEventRecord(arena.sent.get(), stream), "cudaEventRecord");
  return state_->device.get();
}

}  // namespace sparse_mla
