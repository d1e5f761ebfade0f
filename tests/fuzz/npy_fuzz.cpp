// Any file is an array or a std::runtime_error that names it: no crash, no huge allocation.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include <unistd.h>

#include "tests/fuzz/expect.h"
#include "tests/support/npy.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using sparse_mla::fuzz::expect;
  static const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("npy_fuzz_" + std::to_string(getpid()) + ".npy");
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  try {
    const auto array = sparse_mla::support::read_npy(path);
    expect(array.bytes.size() <= size, "no more bytes than the file has");
  } catch (const std::runtime_error& error) {
    expect(std::string(error.what()).starts_with(path.string()), "the error names the file");
  }
  std::filesystem::remove(path);
  return 0;
}
