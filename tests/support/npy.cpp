#include "tests/support/npy.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace sparse_mla::support {
namespace {

constexpr std::size_t kPreamble = 10;  // magic, version, header length
constexpr std::array<char, 8> kMagic{'\x93', 'N', 'U', 'M', 'P', 'Y', 1, 0};

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& why) {
  throw std::runtime_error(path.string() + ": " + why);
}

std::int64_t bytes_of(const std::string& type, const std::vector<std::int64_t>& shape) {
  std::int64_t bytes = type.back() - '0';
  for (const std::int64_t extent : shape) bytes *= extent;
  return bytes;
}

/// The text after `key` in the header's dictionary, up to `end`.
std::string field(const std::filesystem::path& path, const std::string& header,
                  const std::string& key, char end) {
  const std::size_t at = header.find(key);
  if (at == std::string::npos) fail(path, "no " + key + " in its header");
  const std::size_t begin = at + key.size();
  return header.substr(begin, header.find(end, begin) - begin);
}

}  // namespace

NpyWriter::NpyWriter(const std::filesystem::path& path, const std::string& type,
                     const std::vector<std::int64_t>& shape)
    : path_(path), file_(path, std::ios::binary), missing_(bytes_of(type, shape)) {
  std::string header = "{'descr': '" + type + "', 'fortran_order': False, 'shape': (";
  for (const std::int64_t extent : shape) header += std::to_string(extent) + ",";
  header += "), }";
  // The data start at a multiple of 64 bytes; the header ends in a newline.
  while ((kPreamble + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  file_.write(kMagic.data(), kMagic.size());
  file_.put(static_cast<char>(header.size() & 0xFF));
  file_.put(static_cast<char>(header.size() >> 8));
  file_ << header;
  if (!file_) fail(path_, "cannot be written");
}

void NpyWriter::append(const void* bytes, std::size_t count) {
  file_.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(count));
  missing_ -= static_cast<std::int64_t>(count);
}

void NpyWriter::close() {
  file_.close();
  if (!file_) fail(path_, "cannot be written");
  if (missing_ != 0) fail(path_, "the values do not fill the shape");
}

NpyArray read_npy(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::array<char, kPreamble> preamble{};
  file.read(preamble.data(), preamble.size());
  if (!file || !std::equal(kMagic.begin(), kMagic.end(), preamble.begin())) {
    fail(path, "not a version 1.0 .npy file");
  }
  const std::size_t length = static_cast<unsigned char>(preamble[8]) +
                             256 * std::size_t{static_cast<unsigned char>(preamble[9])};
  std::string header(length, '\0');
  file.read(header.data(), static_cast<std::streamsize>(length));
  NpyArray array;
  array.type = field(path, header, "'descr': '", '\'');
  if (field(path, header, "'fortran_order': ", ',') != "False") fail(path, "not in C order");
  std::string shape = field(path, header, "'shape': (", ')');
  for (std::size_t at = 0; at < shape.size();) {
    const std::size_t comma = std::min(shape.find(',', at), shape.size());
    const std::string extent = shape.substr(at, comma - at);
    if (extent.find_first_of("0123456789") != std::string::npos) {
      array.shape.push_back(std::stoll(extent));
    }
    at = comma + 1;
  }
  array.bytes.resize(static_cast<std::size_t>(bytes_of(array.type, array.shape)));
  file.read(reinterpret_cast<char*>(array.bytes.data()),
            static_cast<std::streamsize>(array.bytes.size()));
  if (!file) fail(path, "ends too early");
  return array;
}

}  // namespace sparse_mla::support
