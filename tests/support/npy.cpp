#include "tests/support/npy.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <stdexcept>
#include <string_view>

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

/// The same for what a file claims, whose bytes cannot be more than `most`.
std::int64_t claimed_bytes(const std::filesystem::path& path, const std::string& type,
                           const std::vector<std::int64_t>& shape, std::int64_t most) {
  static constexpr std::array<std::string_view, 6> kTypes{"<f4", "<f8", "<i4", "<i8", "<u2", "|u1"};
  if (std::find(kTypes.begin(), kTypes.end(), type) == kTypes.end())
    fail(path, "elements of an unknown type");
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::int64_t bytes = type.back() - '0';
  for (const std::int64_t extent : shape) {
    if (extent > most / bytes) fail(path, "ends too early");
    bytes *= extent;
  }
  return bytes;
}

/// The text after `key` in the header's dictionary, up to `end`.
std::string field(const std::filesystem::path& path, const std::string& header,
                  const std::string& key, char end) {
  const std::size_t at = header.find(key);
  if (at == std::string::npos) fail(path, "no " + key + " in its header");
  const std::size_t begin = at + key.size();
  const std::size_t stop = header.find(end, begin);
  if (stop == std::string::npos) fail(path, "no end of " + key + " in its header");
  return header.substr(begin, stop - begin);
}

std::string_view trimmed(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  return text;
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
  if (!file) fail(path, "ends too early");
  NpyArray array;
  array.type = field(path, header, "'descr': '", '\'');
  if (field(path, header, "'fortran_order': ", ',') != "False") fail(path, "not in C order");
  std::string shape = field(path, header, "'shape': (", ')');
  for (std::size_t at = 0; at < shape.size();) {
    const std::size_t comma = std::min(shape.find(',', at), shape.size());
    const std::string_view extent = trimmed(std::string_view(shape).substr(at, comma - at));
    at = comma + 1;
    if (extent.empty()) continue;  // behind the last comma
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(extent.begin(), extent.end(), value);
    if (error != std::errc() || end != extent.end() || value < 0)
      fail(path, "a shape that is no list of integers");
    array.shape.push_back(value);
  }
  const auto data = static_cast<std::int64_t>(kPreamble + length);
  const std::int64_t most =
      std::max<std::int64_t>(static_cast<std::int64_t>(std::filesystem::file_size(path)) - data, 0);
  array.bytes.resize(static_cast<std::size_t>(claimed_bytes(path, array.type, array.shape, most)));
  file.read(reinterpret_cast<char*>(array.bytes.data()),
            static_cast<std::streamsize>(array.bytes.size()));
  if (!file) fail(path, "ends too early");
  return array;
}

}  // namespace sparse_mla::support
