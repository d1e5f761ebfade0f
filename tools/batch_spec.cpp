#include "tools/batch_spec.h"

#include <limits>
#include <stdexcept>

#include "tools/quote.h"

namespace sparse_mla::command {
namespace {

constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max();

// One pass over the text; remembers where it is so that an error can say so.
class Parser {
 public:
  explicit Parser(std::string_view spec) : spec_(spec) {}

  std::vector<RequestLengths> parse() {
    if (spec_.empty()) {
      throw std::invalid_argument(
          "spec: got an empty text, expected items such as 8q1s32k joined by '_'");
    }
    std::vector<RequestLengths> batch;
    while (true) {
      parse_item(batch);
      if (at_end()) return batch;
      ++pos_;  // the '_' that ended the item
      ++item_;
      item_begin_ = pos_;
    }
  }

 private:
  bool at_end() const { return pos_ == spec_.size(); }
  bool at(char c) const { return !at_end() && spec_[pos_] == c; }
  bool at_digit() const { return !at_end() && spec_[pos_] >= '0' && spec_[pos_] <= '9'; }
  bool at_item_end() const { return at_end() || at('_'); }

  [[noreturn]] void fail(size_t pos, const std::string& got, const std::string& expected) const {
    const size_t item_end = spec_.find('_', item_begin_);
    const std::string_view item = spec_.substr(item_begin_, item_end - item_begin_);
    throw std::invalid_argument("spec: item " + std::to_string(item_) + " " + quote(item) +
                                ", character " + std::to_string(pos + 1) + ": got " + got +
                                ", expected " + expected);
  }

  std::string got_here() const {
    return at_end() ? "the end of the spec" : quote(spec_.substr(pos_, 1));
  }

  // The text since `begin`, as it was written.
  std::string written(size_t begin) const { return quote(spec_.substr(begin, pos_ - begin)); }

  // Digits up to `max`. The caller has seen that a digit stands here.
  int64_t parse_number(int64_t max, const std::string& what) {
    const size_t begin = pos_;
    int64_t value = 0;
    bool fits = true;
    while (at_digit()) {
      value = value * 10 + (spec_[pos_++] - '0');
      if (value > max) {
        fits = false;
        value = max;  // keeps the sum from overflowing over the remaining digits
      }
    }
    if (!fits) fail(begin, written(begin), what + " of at most " + std::to_string(max));
    return value;
  }

  int64_t parse_length(const std::string& name) {
    if (!at_digit()) fail(pos_, got_here(), "a digit, the length after '" + name + "'");
    const size_t begin = pos_;
    int64_t value = parse_number(kMaxLength, "a length");
    if (at('k')) {
      ++pos_;
      value *= 1024;
      if (value > kMaxLength) {
        fail(begin, written(begin), "a length of at most " + std::to_string(kMaxLength));
      }
    }
    return value;
  }

  void parse_item(std::vector<RequestLengths>& batch) {
    if (at_item_end()) fail(pos_, "an empty item", "[count]q<len>[k][s<len>[k]]");
    int64_t count = 1;
    const size_t count_begin = pos_;
    if (at_digit()) {
      count = parse_number(kMaxSpecRequests, "a count");
      if (count == 0) fail(count_begin, written(count_begin), "a count of at least 1");
    }
    if (!at('q')) {
      fail(pos_, got_here(), count_begin == pos_ ? "a count or 'q'" : "'q' after the count");
    }
    ++pos_;
    const int64_t query_len = parse_length("q");
    int64_t seq_len = query_len;
    bool has_seq_len = false;
    if (at('s')) {
      ++pos_;
      const size_t begin = pos_;
      seq_len = parse_length("s");
      has_seq_len = true;
      if (seq_len < query_len) {
        fail(begin, written(begin),
             "the whole sequence, at least the " + std::to_string(query_len) +
                 " new tokens of the request");
      }
    }
    if (!at_item_end()) {
      const bool after_k = spec_[pos_ - 1] == 'k';
      std::string expected = after_k ? "" : "a digit, 'k', ";
      if (!has_seq_len) expected += "'s', ";
      fail(pos_, got_here(), expected + "'_' or the end of the spec");
    }
    if (count > kMaxSpecRequests - static_cast<int64_t>(batch.size())) {
      fail(count_begin, std::to_string(static_cast<int64_t>(batch.size()) + count) + " requests",
           "at most " + std::to_string(kMaxSpecRequests) + " in all");
    }
    batch.insert(batch.end(), static_cast<size_t>(count),
                 {.query_len = static_cast<int32_t>(query_len),
                  .context_len = static_cast<int32_t>(seq_len - query_len)});
  }

  std::string_view spec_;
  size_t pos_ = 0;
  size_t item_begin_ = 0;
  int64_t item_ = 1;
};

void append_length(std::string& spec, char name, int64_t length) {
  spec += name;
  const bool in_k = length != 0 && length % 1024 == 0;
  spec += std::to_string(in_k ? length / 1024 : length);
  if (in_k) spec += 'k';
}

}  // namespace

std::vector<RequestLengths> parse_batch_spec(std::string_view spec) { return Parser(spec).parse(); }

std::string to_spec(std::span<const RequestLengths> batch) {
  if (batch.empty() || batch.size() > static_cast<size_t>(kMaxSpecRequests)) {
    throw std::invalid_argument("batch: got " + std::to_string(batch.size()) +
                                " requests, expected 1 to " + std::to_string(kMaxSpecRequests));
  }
  std::string spec;
  for (size_t i = 0; i < batch.size();) {
    const RequestLengths& request = batch[i];
    const int64_t seq_len = int64_t{request.query_len} + request.context_len;
    if (request.query_len < 0 || request.context_len < 0 || seq_len > kMaxLength) {
      throw std::invalid_argument("batch: got request " + std::to_string(i) + " with query_len " +
                                  std::to_string(request.query_len) + " and context_len " +
                                  std::to_string(request.context_len) +
                                  ", expected lengths of at least 0 whose sum is at most " +
                                  std::to_string(kMaxLength));
    }
    size_t end = i + 1;
    while (end < batch.size() && batch[end] == request) ++end;
    if (!spec.empty()) spec += '_';
    if (end - i > 1) spec += std::to_string(end - i);
    append_length(spec, 'q', request.query_len);
    if (request.context_len > 0) append_length(spec, 's', seq_len);
    i = end;
  }
  return spec;
}

}  // namespace sparse_mla::command
