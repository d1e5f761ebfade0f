#include "tools/batch_spec.h"

#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace sparse_mla::command {

void PrintTo(const RequestLengths& request, std::ostream* out) {
  *out << "{q " << request.query_len << ", context " << request.context_len << "}";
}

namespace {

using Batch = std::vector<RequestLengths>;

std::string error_of(std::string_view spec) {
  try {
    parse_batch_spec(spec);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

TEST(BatchSpec, ReadsTheNotationOfEngineBenchmarks) {
  EXPECT_EQ(parse_batch_spec("8q1s32k"), Batch(8, {1, 32767}));
  EXPECT_EQ(parse_batch_spec("q2k"), (Batch{{2048, 0}}));
  EXPECT_EQ(parse_batch_spec("q1ks2k"), (Batch{{1024, 1024}}));
  EXPECT_EQ(parse_batch_spec("q7s7"), (Batch{{7, 0}}));
  EXPECT_EQ(parse_batch_spec("q007s0010"), (Batch{{7, 3}}));
  EXPECT_EQ(parse_batch_spec("q2147483647"), (Batch{{2147483647, 0}}));
  EXPECT_EQ(parse_batch_spec("q0s2147483647"), (Batch{{0, 2147483647}}));
  EXPECT_EQ(parse_batch_spec("q2097151k"), (Batch{{2097151 * 1024, 0}}));

  Batch worst_case(32, {513, 16});
  worst_case[0] = {513, 60000};
  EXPECT_EQ(parse_batch_spec("q513s60513_31q513s529"), worst_case);
  EXPECT_EQ(parse_batch_spec("3q1s4100_q33s2081_q64s4160_q7"),
            (Batch{{1, 4099}, {1, 4099}, {1, 4099}, {33, 2048}, {64, 4096}, {7, 0}}));
}

TEST(BatchSpec, MembersWithoutNewTokensAreAllowed) {
  EXPECT_EQ(parse_batch_spec("q0_2q0s100_q1"), (Batch{{0, 0}, {0, 100}, {0, 100}, {1, 0}}));
}

struct BadSpec {
  std::string spec;
  std::string error;

  friend void PrintTo(const BadSpec& bad, std::ostream* out) { *out << '"' << bad.spec << '"'; }
};

class BadSpecs : public testing::TestWithParam<BadSpec> {};

TEST_P(BadSpecs, AreNamedExactly) { EXPECT_EQ(error_of(GetParam().spec), GetParam().error); }

INSTANTIATE_TEST_SUITE_P(
    BatchSpec, BadSpecs,
    testing::Values(
        BadSpec{"", "spec: got an empty text, expected items such as 8q1s32k joined by '_'"},
        BadSpec{"_",
                "spec: item 1 \"\", character 1: got an empty item, expected "
                "[count]q<len>[k][s<len>[k]]"},
        BadSpec{"q1_",
                "spec: item 2 \"\", character 4: got an empty item, expected "
                "[count]q<len>[k][s<len>[k]]"},
        BadSpec{"q1__q2",
                "spec: item 2 \"\", character 4: got an empty item, expected "
                "[count]q<len>[k][s<len>[k]]"},
        BadSpec{"x", "spec: item 1 \"x\", character 1: got \"x\", expected a count or 'q'"},
        BadSpec{"-1q1", "spec: item 1 \"-1q1\", character 1: got \"-\", expected a count or 'q'"},
        BadSpec{"q1_3",
                "spec: item 2 \"3\", character 5: got the end of the spec, expected 'q' "
                "after the count"},
        BadSpec{"q1_3x",
                "spec: item 2 \"3x\", character 5: got \"x\", expected 'q' after the count"},
        BadSpec{"0q1",
                "spec: item 1 \"0q1\", character 1: got \"0\", expected a count of at "
                "least 1"},
        BadSpec{"q",
                "spec: item 1 \"q\", character 2: got the end of the spec, expected a digit, "
                "the length after 'q'"},
        BadSpec{"q_q1",
                "spec: item 1 \"q\", character 2: got \"_\", expected a digit, the length "
                "after 'q'"},
        BadSpec{"qk",
                "spec: item 1 \"qk\", character 2: got \"k\", expected a digit, the length "
                "after 'q'"},
        BadSpec{"q-5",
                "spec: item 1 \"q-5\", character 2: got \"-\", expected a digit, the length "
                "after 'q'"},
        BadSpec{"q5s",
                "spec: item 1 \"q5s\", character 4: got the end of the spec, expected a "
                "digit, the length after 's'"},
        BadSpec{"q1_q10s9",
                "spec: item 2 \"q10s9\", character 8: got \"9\", expected the whole "
                "sequence, at least the 10 new tokens of the request"},
        BadSpec{"q2ks2047",
                "spec: item 1 \"q2ks2047\", character 5: got \"2047\", expected the "
                "whole sequence, at least the 2048 new tokens of the request"},
        BadSpec{"q2147483648",
                "spec: item 1 \"q2147483648\", character 2: got \"2147483648\", "
                "expected a length of at most 2147483647"},
        BadSpec{"q99999999999999999999999999999999",
                "spec: item 1 \"q99999999999999999999999999999999\", character 2: got "
                "\"99999999999999999999999999999999\", expected a length of at most 2147483647"},
        BadSpec{"q1s2097152k",
                "spec: item 1 \"q1s2097152k\", character 4: got \"2097152k\", "
                "expected a length of at most 2147483647"},
        BadSpec{"1048577q1",
                "spec: item 1 \"1048577q1\", character 1: got \"1048577\", expected a "
                "count of at most 1048576"},
        BadSpec{"1048576q1_q2",
                "spec: item 2 \"q2\", character 11: got 1048577 requests, expected "
                "at most 1048576 in all"},
        BadSpec{"q1x",
                "spec: item 1 \"q1x\", character 3: got \"x\", expected a digit, 'k', 's', "
                "'_' or the end of the spec"},
        BadSpec{"q1kk",
                "spec: item 1 \"q1kk\", character 4: got \"k\", expected 's', '_' or the "
                "end of the spec"},
        BadSpec{"q1s2s3",
                "spec: item 1 \"q1s2s3\", character 5: got \"s\", expected a digit, 'k', "
                "'_' or the end of the spec"},
        BadSpec{"q1 ",
                "spec: item 1 \"q1 \", character 3: got \" \", expected a digit, 'k', 's', "
                "'_' or the end of the spec"},
        BadSpec{"Q1", "spec: item 1 \"Q1\", character 1: got \"Q\", expected a count or 'q'"},
        BadSpec{"q1\n",
                "spec: item 1 \"q1\\x0a\", character 3: got \"\\x0a\", expected a digit, "
                "'k', 's', '_' or the end of the spec"}));

TEST(BatchSpec, PrintsTheCanonicalForm) {
  EXPECT_EQ(to_spec(parse_batch_spec("q513s60513_31q513s529")), "q513s60513_31q513s529");
  EXPECT_EQ(to_spec(parse_batch_spec("8q1s32768")), "8q1s32k");
  EXPECT_EQ(to_spec(parse_batch_spec("1q2048s2048_q1024_2q1k_q0_q0s1")), "q2k_3q1k_q0_q0s1");
}

TEST(BatchSpec, RefusesToPrintWhatNoSpecCanSay) {
  EXPECT_THROW(to_spec({}), std::invalid_argument);
  EXPECT_THROW(to_spec(Batch{{-1, 0}}), std::invalid_argument);
  EXPECT_THROW(to_spec(Batch{{0, -1}}), std::invalid_argument);
  EXPECT_THROW(to_spec(Batch{{2147483647, 1}}), std::invalid_argument);
  EXPECT_THROW(to_spec(Batch(kMaxSpecRequests + 1)), std::invalid_argument);
}

TEST(BatchSpec, PrintedBatchesReadBackTheSame) {
  std::mt19937_64 random(20250101);
  for (int round = 0; round < 2000; ++round) {
    Batch batch;
    const size_t size = 1 + random() % 40;
    while (batch.size() < size) {
      // Magnitudes from single tokens to the limit, many multiples of 1024, many repeats.
      const auto draw = [&](int64_t max) {
        int64_t value = static_cast<int64_t>(random() % (uint64_t{1} << (random() % 32)));
        if (random() % 3 == 0) value &= ~int64_t{1023};
        return static_cast<int32_t>(std::min(value, max));
      };
      const int64_t limit = std::numeric_limits<int32_t>::max();
      RequestLengths request;
      request.query_len = draw(limit);
      request.context_len = draw(limit - request.query_len);
      batch.insert(batch.end(), random() % 3 == 0 ? 1 + random() % 5 : 1, request);
    }
    const std::string spec = to_spec(batch);
    ASSERT_EQ(parse_batch_spec(spec), batch) << spec;
    ASSERT_EQ(to_spec(parse_batch_spec(spec)), spec);
  }
}

// Whatever the bytes: either a batch that prints and reads back the same, or one line of error.
TEST(BatchSpec, RandomTextsParseOrThrowInvalidArgument) {
  constexpr std::string_view kAlphabet = "qsk_0123456789";
  std::mt19937_64 random(7);
  int parsed = 0;
  int refused = 0;
  for (int round = 0; round < 50000; ++round) {
    std::string spec;
    const size_t length = random() % 16;
    for (size_t i = 0; i < length; ++i) {
      spec += random() % 64 == 0 ? static_cast<char>(random() % 256)
                                 : kAlphabet[random() % kAlphabet.size()];
    }
    if (round % 2 == 1) {  // mutate a valid spec instead
      spec = "3q1s4100_q33s2081_q64k_q7";
      for (size_t edits = 1 + random() % 3; edits > 0 && !spec.empty(); --edits) {
        const size_t at = random() % spec.size();
        if (random() % 2 == 0) {
          spec.erase(at, 1);
        } else {
          spec[at] = kAlphabet[random() % kAlphabet.size()];
        }
      }
    }
    try {
      const Batch batch = parse_batch_spec(spec);
      ++parsed;
      ASSERT_EQ(parse_batch_spec(to_spec(batch)), batch) << spec;
    } catch (const std::invalid_argument& error) {
      ++refused;
      const std::string_view text = error.what();
      ASSERT_TRUE(text.starts_with("spec: ")) << text;
      ASSERT_EQ(text.find('\n'), std::string_view::npos) << text;
    }
  }
  EXPECT_GT(parsed, 1000);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace sparse_mla::command
