#pragma once

#include <array>
#include <cstdint>
#include <istream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/request_lengths.h"

namespace sparse_mla::command {

/// One request of a trace, as it arrived.
struct TraceRow {
  int64_t timestamp_ms = 0;  // since the start of the trace
  int32_t context_len = 0;   // tokens of the prompt that a prefix cache holds already
  int32_t query_len = 0;     // tokens of the prompt that are left to compute
  int32_t output_len = 0;    // tokens that the model answered

  friend bool operator==(const TraceRow&, const TraceRow&) = default;
};

/// Reads a request trace row by row: CSV with the columns timestamp_ms, context_len, query_len and
/// output_len, found by the names in the first line, in any order; other columns are ignored.
/// Lines may end in CRLF, the last one may lack its end, empty lines are skipped, a UTF-8 byte
/// order mark is accepted. Values are plain decimal integers, not quoted.
///
/// Every error is a std::invalid_argument "NAME:LINE: column: got …, expected …".
class TraceReader {
 public:
  /// `name` stands for the file in errors. Reads the header. `input` has to outlive the reader.
  TraceReader(std::istream& input, std::string name);

  /// The next request in file order, nothing at the end of the file.
  std::optional<TraceRow> next();

  /// Requests read so far.
  int64_t num_requests() const { return num_requests_; }

 private:
  static constexpr int kNumColumns = 4;

  bool read_line(std::string_view& line);
  [[noreturn]] void fail(const std::string& text) const;

  std::istream& input_;
  std::string name_;
  std::string buffer_;
  int64_t line_ = 0;  // counted from 1
  int64_t num_requests_ = 0;
  size_t num_fields_ = 0;                          // of the header
  std::array<size_t, kNumColumns> field_of_ = {};  // column → field index
  std::vector<std::string_view> fields_;
};

/// Cuts a trace into batches of `batch_tokens` new tokens, in file order, as a scheduler with
/// chunked prefill does: a request's new tokens may span batches, and what ran before counts as
/// context of the rest. The last batch may be smaller. Requests with query_len 0 have nothing to
/// compute and are in no batch. Holds one batch at a time.
class BatchCutter {
 public:
  /// `reader` has to outlive the cutter. Throws std::invalid_argument unless batch_tokens ≥ 1.
  BatchCutter(TraceReader& reader, int64_t batch_tokens);

  /// Replaces `batch` by the next one; false (and an empty batch) at the end of the trace.
  bool next(std::vector<RequestLengths>& batch);

 private:
  TraceReader& reader_;
  int64_t batch_tokens_;
  RequestLengths rest_;  // what is left of the request that is being cut
};

}  // namespace sparse_mla::command
