// Any file is a trace or a std::invalid_argument that names file and line; cut into batches, every
// new token comes once, in order, with all that ran before as its context.
#include <algorithm>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/fuzz/expect.h"
#include "tools/trace.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace sparse_mla::command;
  using sparse_mla::fuzz::expect;
  if (size < 4) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 4, size - 4);
  std::int64_t batch_tokens = 1 + data[0] + (std::int64_t{data[1]} << (data[2] % 24));
  try {
    std::istringstream rows_input(text);
    TraceReader rows_reader(rows_input, "trace");
    std::vector<RequestLengths> expected;
    std::int64_t tokens = 0;
    while (const auto row = rows_reader.next()) {
      expect(row->timestamp_ms >= 0 && row->output_len >= 0, "values are at least 0");
      if (row->query_len > 0) expected.push_back({row->query_len, row->context_len});
      tokens += row->query_len;
    }
    batch_tokens = std::max(batch_tokens, tokens / 10000);  // no millions of batches

    std::istringstream input(text);
    TraceReader reader(input, "trace");
    BatchCutter cutter(reader, batch_tokens);
    std::vector<RequestLengths> batch;
    std::size_t request = 0;
    std::int32_t done = 0;
    while (cutter.next(batch)) {
      std::int64_t batch_sum = 0;
      for (const RequestLengths& piece : batch) {
        expect(request < expected.size(), "no request is invented");
        expect(piece.query_len > 0, "no empty members");
        expect(piece.context_len == expected[request].context_len + done, "what ran is context");
        done += piece.query_len;
        batch_sum += piece.query_len;
        expect(done <= expected[request].query_len, "no token comes twice");
        if (done == expected[request].query_len) ++request, done = 0;
      }
      tokens -= batch_sum;
      expect(batch_sum == batch_tokens || tokens == 0, "only the last batch may be smaller");
    }
    expect(request == expected.size() && tokens == 0, "every token comes");
  } catch (const std::invalid_argument& error) {
    const std::string what = error.what();
    expect(what.starts_with("trace:"), "the error names file and line");
    expect(what.find('\n') == std::string::npos, "the error is one line");
  }
  return 0;
}
