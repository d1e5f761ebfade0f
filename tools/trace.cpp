#include "tools/trace.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "tools/quote.h"

namespace sparse_mla::command {
namespace {

constexpr std::array<std::string_view, 4> kColumns = {"timestamp_ms", "context_len", "query_len",
                                                      "output_len"};
constexpr size_t kMissing = std::numeric_limits<size_t>::max();
constexpr size_t kMaxLineBytes = size_t{1} << 16;
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

void split(std::string_view line, std::vector<std::string_view>& fields) {
  fields.clear();
  while (true) {
    const size_t comma = line.find(',');
    fields.push_back(line.substr(0, comma));
    if (comma == std::string_view::npos) return;
    line.remove_prefix(comma + 1);
  }
}

// Plain digits only: signs, blanks, quotes and decimal points are the caller's error to report.
std::optional<int64_t> parse_digits(std::string_view text, int64_t max) {
  if (text.empty()) return std::nullopt;
  int64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    const int64_t digit = c - '0';
    if (value > (max - digit) / 10) return std::nullopt;
    value = value * 10 + digit;
  }
  return value;
}

}  // namespace

TraceReader::TraceReader(std::istream& input, std::string name)
    : input_(input), name_(std::move(name)) {
  std::string_view header;
  if (!read_line(header)) {
    line_ = 1;
    fail("header: got an empty file, expected timestamp_ms,context_len,query_len,output_len");
  }
  if (header.starts_with(kByteOrderMark)) header.remove_prefix(kByteOrderMark.size());
  split(header, fields_);
  num_fields_ = fields_.size();
  field_of_.fill(kMissing);
  for (size_t field = 0; field < fields_.size(); ++field) {
    const auto column = std::find(kColumns.begin(), kColumns.end(), fields_[field]);
    if (column == kColumns.end()) continue;
    size_t& found = field_of_[static_cast<size_t>(column - kColumns.begin())];
    if (found != kMissing) fail("header: got " + std::string(*column) + " twice, expected it once");
    found = field;
  }
  std::string missing;
  for (size_t column = 0; column < kColumns.size(); ++column) {
    if (field_of_[column] != kMissing) continue;
    if (!missing.empty()) missing += ", ";
    missing += kColumns[column];
  }
  if (!missing.empty()) {
    fail("header: got " + quote(header, 80) + " without " + missing +
         ", expected the columns timestamp_ms,context_len,query_len,output_len");
  }
}

std::optional<TraceRow> TraceReader::next() {
  std::string_view line;
  if (!read_line(line)) return std::nullopt;
  split(line, fields_);
  if (fields_.size() != num_fields_) {
    fail("row: got " + std::to_string(fields_.size()) +
         (fields_.size() == 1 ? " field" : " fields") + ", expected " +
         std::to_string(num_fields_) + " as in the header");
  }
  std::array<int64_t, kNumColumns> values = {};
  for (size_t column = 0; column < kColumns.size(); ++column) {
    // Times may pass 24 days, lengths may not pass an int32.
    const int64_t max = column == 0 ? std::numeric_limits<int64_t>::max()
                                    : int64_t{std::numeric_limits<int32_t>::max()};
    const std::string_view text = fields_[field_of_[column]];
    const std::optional<int64_t> value = parse_digits(text, max);
    if (!value) {
      fail(std::string(kColumns[column]) + ": got " + quote(text) +
           ", expected an integer from 0 to " + std::to_string(max));
    }
    values[column] = *value;
  }
  if (values[1] + values[2] > std::numeric_limits<int32_t>::max()) {
    fail("context_len + query_len: got " + std::to_string(values[1] + values[2]) +
         ", expected at most " + std::to_string(std::numeric_limits<int32_t>::max()));
  }
  ++num_requests_;
  return TraceRow{.timestamp_ms = values[0],
                  .context_len = static_cast<int32_t>(values[1]),
                  .query_len = static_cast<int32_t>(values[2]),
                  .output_len = static_cast<int32_t>(values[3])};
}

bool TraceReader::read_line(std::string_view& line) {
  // Bounded, unlike std::getline: a device may never end a line.
  buffer_.resize(kMaxLineBytes + 1);
  while (input_.getline(buffer_.data(), static_cast<std::streamsize>(buffer_.size())) ||
         input_.gcount() > 0) {
    ++line_;
    if (input_.fail()) {
      fail("row: got more than " + std::to_string(kMaxLineBytes) +
           " bytes without a line end, expected a CSV file");
    }
    // The end of the line counts, where there is one.
    const auto read = static_cast<size_t>(input_.gcount());
    line = std::string_view(buffer_.data(), input_.eof() ? read : read - 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (!line.empty()) return true;
  }
  if (input_.bad()) fail("row: got a read error, expected a readable file");
  return false;
}

void TraceReader::fail(const std::string& text) const {
  throw std::invalid_argument(name_ + ":" + std::to_string(line_) + ": " + text);
}

BatchCutter::BatchCutter(TraceReader& reader, int64_t batch_tokens)
    : reader_(reader), batch_tokens_(batch_tokens) {
  if (batch_tokens < 1) {
    throw std::invalid_argument("batch_tokens: got " + std::to_string(batch_tokens) +
                                ", expected at least 1");
  }
}

bool BatchCutter::next(std::vector<RequestLengths>& batch) {
  batch.clear();
  int64_t room = batch_tokens_;
  while (room > 0) {
    if (rest_.query_len == 0) {
      const std::optional<TraceRow> row = reader_.next();
      if (!row) break;
      rest_ = {.query_len = row->query_len, .context_len = row->context_len};
      continue;
    }
    const auto tokens = static_cast<int32_t>(std::min<int64_t>(room, rest_.query_len));
    batch.push_back({.query_len = tokens, .context_len = rest_.context_len});
    rest_.query_len -= tokens;
    rest_.context_len += tokens;
    room -= tokens;
  }
  return !batch.empty();
}

}  // namespace sparse_mla::command
