/// The few calls of the CUDA runtime that tests and the command need, so that they compile with the
/// host compiler and in a CPU-only build too. There `gpu_present()` is false and the rest throws.
/// Every failure throws std::runtime_error with the runtime's text.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "sparse_mla/types.h"

namespace sparse_mla::support {

/// A device that the CUDA entries can run on?
bool gpu_present();

/// SPARSE_MLA_TEST_SANITIZER is set: for compute-sanitizer, device memory stays as it was allocated
/// (a read of it is found), and every buffer is an allocation of its own that ends where it ends.
bool under_sanitizer();

/// Device memory, filled with 0xFF bytes (not under_sanitizer()).
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes);

  std::byte* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  std::span<std::byte> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_ = 0;
};

void copy_to_device(std::byte* device, const void* host, std::size_t bytes);
void copy_to_host(void* host, const std::byte* device, std::size_t bytes);
void fill_device(std::byte* device, int byte, std::size_t bytes);

/// A stream that does not wait for the default stream.
class DeviceStream {
 public:
  DeviceStream();
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  Stream get() const { return stream_; }
  /// Waits, and throws what went wrong on the device meanwhile.
  void synchronize() const;

 private:
  Stream stream_ = nullptr;
};

/// Points in a stream's work; read after the stream was synchronised.
class DeviceClock {
 public:
  DeviceClock() = default;
  ~DeviceClock();
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;

  /// Marks the point that `stream` has been given work up to; its number.
  std::size_t mark(Stream stream);
  double seconds_between(std::size_t first, std::size_t second) const;
  void clear() { used_ = 0; }

 private:
  std::vector<void*> events_;
  std::size_t used_ = 0;
};

}  // namespace sparse_mla::support
