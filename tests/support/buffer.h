/// Owned memory that is not cleared on allocation: big problems are filled in parallel instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace sparse_mla::support {

/// Sets every byte to 0xFF, in parallel.
void poison_bytes(std::byte* bytes, std::size_t count);

/// An array of trivially copyable elements.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t size)
      : bytes_(new std::byte[static_cast<std::size_t>(size) * sizeof(T)]), size_(size) {}

  T* data() { return reinterpret_cast<T*>(bytes_.get()); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.get()); }
  std::int64_t size() const { return size_; }
  std::size_t size_bytes() const { return static_cast<std::size_t>(size_) * sizeof(T); }
  T& operator[](std::int64_t i) { return data()[i]; }
  const T& operator[](std::int64_t i) const { return data()[i]; }
  std::span<T> span() { return {data(), static_cast<std::size_t>(size_)}; }
  std::span<const T> span() const { return {data(), static_cast<std::size_t>(size_)}; }

  /// Every byte 0xFF: NaN as bf16, e4m3 and fp32 alike, −1 as an integer.
  void poison() { poison_bytes(bytes_.get(), size_bytes()); }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  std::int64_t size_ = 0;
};

}  // namespace sparse_mla::support
