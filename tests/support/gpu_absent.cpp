#include <stdexcept>

#include "tests/support/gpu.h"

namespace sparse_mla::support {
namespace {

[[noreturn]] void refuse() { throw std::runtime_error("this build has no CUDA backend"); }

}  // namespace

bool gpu_present() { return false; }
bool under_sanitizer() { return false; }

DeviceMemory::DeviceMemory(std::size_t) { refuse(); }
void DeviceMemory::Free::operator()(std::byte*) const {}

void copy_to_device(std::byte*, const void*, std::size_t) { refuse(); }
void copy_to_host(void*, const std::byte*, std::size_t) { refuse(); }
void fill_device(std::byte*, int, std::size_t) { refuse(); }

DeviceStream::DeviceStream() { refuse(); }
DeviceStream::~DeviceStream() = default;
void DeviceStream::synchronize() const { refuse(); }

DeviceClock::~DeviceClock() = default;
std::size_t DeviceClock::mark(Stream) { refuse(); }
double DeviceClock::seconds_between(std::size_t, std::size_t) const { refuse(); }

}  // namespace sparse_mla::support
