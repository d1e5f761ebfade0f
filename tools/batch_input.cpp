#include "tools/batch_input.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <stdexcept>

#include "tools/batch_spec.h"
#include "tools/quote.h"

namespace sparse_mla::command {
namespace {

// The library counts a batch's tokens in int32.
void check_tokens(const std::vector<RequestLengths>& batch) {
  int64_t tokens = 0;
  for (const RequestLengths& request : batch) tokens += request.query_len;
  if (tokens > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("batch: got " + std::to_string(tokens) +
                                " new tokens, expected at most " +
                                std::to_string(std::numeric_limits<int32_t>::max()));
  }
}

}  // namespace

void BatchInput::add_options(CLI::App& command) {
  spec_option_ = command.add_option(
      "--spec", spec_,
      "One batch: items [count]q<len>[k][s<len>[k]] joined by '_'; q new tokens, s whole sequence");
  trace_option_ = command.add_option(
      "--trace", trace_, "Requests as CSV: timestamp_ms,context_len,query_len,output_len");
  batch_tokens_option_ =
      command
          .add_option("--batch-tokens", batch_tokens_,
                      "New tokens of each batch cut from the trace")
          ->check(CLI::Range(int64_t{1}, int64_t{std::numeric_limits<int32_t>::max()}));
}

void BatchInput::open() {
  const bool has_spec = spec_option_->count() > 0;
  const bool has_trace = trace_option_->count() > 0;
  const bool has_tokens = batch_tokens_option_->count() > 0;
  if (has_spec && has_trace) {
    throw std::invalid_argument("input: got both --spec and --trace, expected one of them");
  }
  if (!has_spec && !has_trace) {
    throw std::invalid_argument("input: got neither --spec nor --trace, expected one of them");
  }
  if (has_trace != has_tokens) {
    throw std::invalid_argument(has_trace ? "--batch-tokens: got none, expected it with --trace"
                                          : "--batch-tokens: got it with --spec, expected --trace");
  }
  if (has_spec) {
    spec_batch_ = parse_batch_spec(spec_);
    check_tokens(spec_batch_);
    return;
  }
  if (std::filesystem::is_directory(trace_)) {
    throw std::invalid_argument("--trace: got the folder " + quote(trace_, 200) +
                                ", expected a file");
  }
  errno = 0;
  file_.open(trace_, std::ios::binary);
  if (!file_) {
    throw std::invalid_argument("--trace: got " + quote(trace_, 200) + " (" + std::strerror(errno) +
                                "), expected a readable file");
  }
  reader_.emplace(file_, trace_);
  cutter_.emplace(*reader_, batch_tokens_);
}

bool BatchInput::next(std::vector<RequestLengths>& batch) {
  if (cutter_) return cutter_->next(batch);
  batch.clear();
  if (spec_done_) return false;
  spec_done_ = true;
  batch = spec_batch_;
  return true;
}

int64_t BatchInput::num_requests() const {
  return reader_ ? reader_->num_requests() : static_cast<int64_t>(spec_batch_.size());
}

}  // namespace sparse_mla::command
