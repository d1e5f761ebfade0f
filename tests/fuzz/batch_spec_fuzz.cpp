// Any text is a batch or a std::invalid_argument of one line; a batch prints as a spec that reads
// back the same.
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "tests/fuzz/expect.h"
#include "tools/batch_spec.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace sparse_mla::command;
  using sparse_mla::fuzz::expect;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto batch = parse_batch_spec(text);
    if (batch.size() > 4096) return 0;  // large counts are slow, not interesting
    expect(!batch.empty(), "a spec describes a request");
    for (const RequestLengths& request : batch) {
      expect(request.query_len >= 0 && request.context_len >= 0, "lengths are at least 0");
      expect(std::int64_t{request.query_len} + request.context_len <= 2147483647,
             "a sequence fits an int32");
    }
    const std::string printed = to_spec(batch);
    expect(parse_batch_spec(printed) == batch, "a printed batch reads back the same");
    expect(to_spec(parse_batch_spec(printed)) == printed, "the canonical form is canonical");
  } catch (const std::invalid_argument& error) {
    const std::string_view what = error.what();
    expect(what.starts_with("spec: "), "the error names the spec");
    expect(what.find('\n') == std::string_view::npos, "the error is one line");
  }
  return 0;
}
