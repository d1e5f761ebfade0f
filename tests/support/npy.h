/// numpy's .npy files (format 1.0, little endian, C order): just enough to hand arrays to a script
/// and to read them back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace sparse_mla::support {

/// numpy's name of an element type: "<f4", "<f8", "<i4", "<i8", "<u2" (also raw bf16), "|u1".
template <class T>
constexpr const char* npy_type() {
  if constexpr (std::is_same_v<T, float>) {
    return "<f4";
  } else if constexpr (std::is_same_v<T, double>) {
    return "<f8";
  } else if constexpr (std::is_same_v<T, std::int32_t>) {
    return "<i4";
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return "<i8";
  } else if constexpr (std::is_same_v<T, std::uint16_t>) {
    return "<u2";
  } else {
    static_assert(std::is_same_v<T, std::uint8_t>, "no .npy element type");
    return "|u1";
  }
}

/// Writes a file piece by piece, so that a large array need not exist as one. Throws
/// std::runtime_error with the file's name when it cannot be written.
class NpyWriter {
 public:
  NpyWriter(const std::filesystem::path& path, const std::string& type,
            const std::vector<std::int64_t>& shape);
  void append(const void* bytes, std::size_t count);
  /// Throws if the bytes appended do not fill the shape.
  void close();

 private:
  std::filesystem::path path_;
  std::ofstream file_;
  std::int64_t missing_ = 0;  // bytes
};

template <class T>
void write_npy(const std::filesystem::path& path, const std::vector<std::int64_t>& shape,
               std::span<const T> values) {
  NpyWriter writer(path, npy_type<T>(), shape);
  writer.append(values.data(), values.size_bytes());
  writer.close();
}

struct NpyArray {
  std::string type;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
};

/// Throws std::runtime_error with the file's name when it is no such file.
NpyArray read_npy(const std::filesystem::path& path);

}  // namespace sparse_mla::support
