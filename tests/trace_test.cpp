#include "tools/trace.h"

#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace sparse_mla::command {

void PrintTo(const RequestLengths& request, std::ostream* out) {
  *out << "{q " << request.query_len << ", context " << request.context_len << "}";
}

void PrintTo(const TraceRow& row, std::ostream* out) {
  *out << "{" << row.timestamp_ms << " ms, context " << row.context_len << ", q " << row.query_len
       << ", output " << row.output_len << "}";
}

namespace {

using Batch = std::vector<RequestLengths>;

const std::string kHeader = "timestamp_ms,context_len,query_len,output_len\n";

std::vector<TraceRow> read_all(const std::string& text) {
  std::istringstream input(text);
  TraceReader reader(input, "t.csv");
  std::vector<TraceRow> rows;
  while (const auto row = reader.next()) rows.push_back(*row);
  return rows;
}

std::string error_of(const std::string& text) {
  try {
    read_all(text);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

std::vector<Batch> cut(const std::string& text, int64_t batch_tokens) {
  std::istringstream input(text);
  TraceReader reader(input, "t.csv");
  BatchCutter cutter(reader, batch_tokens);
  std::vector<Batch> batches;
  for (Batch batch; cutter.next(batch);) batches.push_back(batch);
  return batches;
}

TEST(TraceReader, ReadsRows) {
  const std::vector<TraceRow> expected = {{0, 512, 6758, 500}, {4294967296000, 0, 1, 0}};
  EXPECT_EQ(read_all(kHeader + "0,512,6758,500\n4294967296000,0,1,0\n"), expected);
}

TEST(TraceReader, ToleratesLineEndsBlankLinesAndByteOrderMark) {
  const std::vector<TraceRow> expected = {{1, 2, 3, 4}, {5, 6, 7, 8}};
  EXPECT_EQ(read_all(kHeader + "1,2,3,4\n5,6,7,8"), expected);
  EXPECT_EQ(read_all("timestamp_ms,context_len,query_len,output_len\r\n1,2,3,4\r\n5,6,7,8\r\n"),
            expected);
  EXPECT_EQ(read_all("\n" + kHeader + "\n1,2,3,4\n\r\n5,6,7,8\n\n"), expected);
  EXPECT_EQ(read_all("\xef\xbb\xbf" + kHeader + "1,2,3,4\n5,6,7,8\n"), expected);
}

TEST(TraceReader, FindsColumnsByName) {
  EXPECT_EQ(read_all("query_len,user,timestamp_ms,output_len,context_len\n3,bob,1,4,2\n"),
            (std::vector<TraceRow>{{1, 2, 3, 4}}));
}

TEST(TraceReader, HeaderAloneIsAnEmptyTrace) {
  EXPECT_TRUE(read_all(kHeader).empty());
  EXPECT_TRUE(cut(kHeader, 8).empty());
}

struct BadTrace {
  std::string text;
  std::string error;

  friend void PrintTo(const BadTrace& bad, std::ostream* out) { *out << bad.error; }
};

class BadTraces : public testing::TestWithParam<BadTrace> {};

TEST_P(BadTraces, AreNamedWithTheirLine) { EXPECT_EQ(error_of(GetParam().text), GetParam().error); }

INSTANTIATE_TEST_SUITE_P(
    Trace, BadTraces,
    testing::Values(
        BadTrace{"",
                 "t.csv:1: header: got an empty file, expected "
                 "timestamp_ms,context_len,query_len,output_len"},
        BadTrace{"0,512,6758,500\n",
                 "t.csv:1: header: got \"0,512,6758,500\" without timestamp_ms, context_len, "
                 "query_len, output_len, expected the columns "
                 "timestamp_ms,context_len,query_len,output_len"},
        BadTrace{"timestamp_ms,context_len,query_length,output_len\n",
                 "t.csv:1: header: got \"timestamp_ms,context_len,query_length,output_len\" "
                 "without query_len, expected the columns "
                 "timestamp_ms,context_len,query_len,output_len"},
        BadTrace{"timestamp_ms,context_len,query_len,output_len,query_len\n",
                 "t.csv:1: header: got query_len twice, expected it once"},
        BadTrace{kHeader + "1,2,3,4\n\n1,2,3\n",
                 "t.csv:4: row: got 3 fields, expected 4 as in the header"},
        BadTrace{kHeader + "1,2,3,4,\n", "t.csv:2: row: got 5 fields, expected 4 as in the header"},
        BadTrace{kHeader + "1;2;3;4\n", "t.csv:2: row: got 1 field, expected 4 as in the header"},
        BadTrace{kHeader + "1,-2,3,4\n",
                 "t.csv:2: context_len: got \"-2\", expected an integer from 0 to 2147483647"},
        BadTrace{kHeader + "1,2,2147483648,4\n",
                 "t.csv:2: query_len: got \"2147483648\", expected an integer from 0 to "
                 "2147483647"},
        BadTrace{kHeader + "1,2,3,99999999999999999999999\n",
                 "t.csv:2: output_len: got \"99999999999999999999999\", expected an integer from 0 "
                 "to 2147483647"},
        BadTrace{kHeader + "9223372036854775808,2,3,4\n",
                 "t.csv:2: timestamp_ms: got \"9223372036854775808\", expected an integer from 0 "
                 "to 9223372036854775807"},
        BadTrace{kHeader + "1,2,3.5,4\n",
                 "t.csv:2: query_len: got \"3.5\", expected an integer from 0 to 2147483647"},
        BadTrace{kHeader + "1,, 3,4\n",
                 "t.csv:2: context_len: got \"\", expected an integer from 0 to 2147483647"},
        BadTrace{kHeader + "1,2147483647,1,4\n",
                 "t.csv:2: context_len + query_len: got 2147483648, expected at most 2147483647"}));

TEST(TraceReader, AcceptsTheLargestValues) {
  EXPECT_EQ(read_all(kHeader + "9223372036854775807,2147483646,1,2147483647\n"),
            (std::vector<TraceRow>{{9223372036854775807, 2147483646, 1, 2147483647}}));
}

TEST(BatchCutter, RequestsSpanBatchesAndCarryTheirContext) {
  const std::string text = kHeader + "0,512,10,1\n0,0,3,1\n0,64,2,1\n";
  EXPECT_EQ(cut(text, 4),
            (std::vector<Batch>{{{4, 512}}, {{4, 516}}, {{2, 520}, {2, 0}}, {{1, 2}, {2, 64}}}));
  EXPECT_EQ(cut(text, 8), (std::vector<Batch>{{{8, 512}}, {{2, 520}, {3, 0}, {2, 64}}}));
  EXPECT_EQ(cut(text, 15), (std::vector<Batch>{{{10, 512}, {3, 0}, {2, 64}}}));
  EXPECT_EQ(cut(text, 1 << 20), (std::vector<Batch>{{{10, 512}, {3, 0}, {2, 64}}}));
}

TEST(BatchCutter, ABatchThatFillsExactlyLeavesNothingBehind) {
  EXPECT_EQ(cut(kHeader + "0,5,4,1\n0,6,4,1\n", 4), (std::vector<Batch>{{{4, 5}}, {{4, 6}}}));
}

TEST(BatchCutter, RequestsWithoutNewTokensAreInNoBatch) {
  EXPECT_EQ(cut(kHeader + "0,5,0,1\n0,6,4,1\n0,7,0,1\n", 8), (std::vector<Batch>{{{4, 6}}}));
  EXPECT_TRUE(cut(kHeader + "0,5,0,1\n", 8).empty());
}

TEST(BatchCutter, RefusesBatchesWithoutTokens) {
  EXPECT_THROW(cut(kHeader, 0), std::invalid_argument);
  EXPECT_THROW(cut(kHeader, -1), std::invalid_argument);
}

// Every token of every request exactly once, in order, at the position it has in its request.
TEST(BatchCutter, CoversEveryTokenOnceInOrder) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 300; ++round) {
    std::string text = kHeader;
    std::vector<TraceRow> rows;
    for (size_t i = random() % 30; i > 0; --i) {
      const TraceRow row = {0, static_cast<int32_t>(random() % 1000),
                            static_cast<int32_t>(random() % 50), 1};
      rows.push_back(row);
      text += "0," + std::to_string(row.context_len) + "," + std::to_string(row.query_len) + ",1\n";
    }
    const int64_t batch_tokens = 1 + static_cast<int64_t>(random() % 60);
    const std::vector<Batch> batches = cut(text, batch_tokens);
    std::vector<int64_t> positions;
    for (size_t i = 0; i < batches.size(); ++i) {
      int64_t tokens = 0;
      for (const RequestLengths& request : batches[i]) {
        ASSERT_GT(request.query_len, 0);
        tokens += request.query_len;
        for (int32_t j = 0; j < request.query_len; ++j) {
          positions.push_back(request.context_len + j);
        }
      }
      ASSERT_LE(tokens, batch_tokens);
      if (i + 1 < batches.size()) {
        ASSERT_EQ(tokens, batch_tokens);
      }
    }
    std::vector<int64_t> expected;
    for (const TraceRow& row : rows) {
      for (int32_t j = 0; j < row.query_len; ++j) expected.push_back(row.context_len + j);
    }
    ASSERT_EQ(positions, expected);
  }
}

TEST(Trace, RandomTextsParseOrThrowInvalidArgument) {
  constexpr std::string_view kAlphabet = "0123456789,,,,\n\n\r-\"k";
  std::mt19937_64 random(13);
  int parsed = 0;
  int refused = 0;
  for (int round = 0; round < 30000; ++round) {
    std::string text = kHeader;
    if (round % 3 == 0) {
      for (size_t i = random() % 40; i > 0; --i) {
        text += random() % 50 == 0 ? static_cast<char>(random() % 256)
                                   : kAlphabet[random() % kAlphabet.size()];
      }
    } else {
      text += "0,512,6758,500\r\n30,0,17,3\n61,122880,1,2\n";
      for (size_t edits = 1 + random() % 2; edits > 0; --edits) {
        const size_t at = round % 3 == 1
                              ? random() % text.size()
                              : kHeader.size() + random() % (text.size() - kHeader.size());
        switch (random() % 3) {
          case 0:
            text.erase(at, 1);
            break;
          case 1:
            text[at] = static_cast<char>(random() % 256);
            break;
          default:
            text.insert(at, 1, kAlphabet[random() % kAlphabet.size()]);
        }
      }
    }
    try {
      for (const TraceRow& row : read_all(text)) {
        ASSERT_GE(row.timestamp_ms, 0);
        ASSERT_GE(row.context_len, 0);
        ASSERT_GE(row.query_len, 0);
        ASSERT_GE(row.output_len, 0);
      }
      ++parsed;
    } catch (const std::invalid_argument& error) {
      ++refused;
      const std::string_view what = error.what();
      ASSERT_TRUE(what.starts_with("t.csv:")) << what;
      ASSERT_EQ(what.find('\n'), std::string_view::npos) << what;
    }
  }
  EXPECT_GT(parsed, 1000);
  EXPECT_GT(refused, 1000);
}

void expect_batches(const std::string& path, int64_t requests,
                    const std::vector<std::pair<int64_t, int64_t>>& batches_of) {
  for (const auto& [batch_tokens, batches] : batches_of) {
    std::ifstream file(path, std::ios::binary);
    ASSERT_TRUE(file) << path;
    TraceReader reader(file, path);
    BatchCutter cutter(reader, batch_tokens);
    int64_t count = 0;
    for (Batch batch; cutter.next(batch);) ++count;
    EXPECT_EQ(reader.num_requests(), requests);
    EXPECT_EQ(count, batches) << batch_tokens << " tokens per batch";
  }
}

// The sample that is kept here, and where the environment names it a published trace of 12,031 chat
// requests (9.1e7 new tokens).
TEST(Trace, TracesCutIntoTheKnownBatches) {
  expect_batches(SPARSE_MLA_TESTS_DIR "/../tools/traces/sample_chat.csv", 500,
                 {{8192, 499}, {32768, 125}});
  if (const char* path = std::getenv("SPARSE_MLA_TRACE"); path != nullptr)
    expect_batches(path, 12031, {{8192, 11072}, {32768, 2768}});
}

}  // namespace
}  // namespace sparse_mla::command
