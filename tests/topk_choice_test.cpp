// topk/choice.h: the table's form, and what no table may change.
#include <cstddef>
#include <iterator>
#include <limits>

#include <gtest/gtest.h>

#include "topk/choice.h"

namespace sparse_mla::topk {
namespace {

constexpr bool is_ordered() {
  if (kChoiceTable[0].rows_from != 0) return false;
  for (std::size_t i = 0; i < std::size(kChoiceTable); ++i) {
    const ChoiceRow& line = kChoiceTable[i];
    const bool starts_group = i == 0 || kChoiceTable[i - 1].rows_from != line.rows_from;
    if (starts_group) {
      if (line.row_len_from != 0) return false;
      if (i > 0 && kChoiceTable[i - 1].rows_from > line.rows_from) return false;
    } else if (kChoiceTable[i - 1].row_len_from >= line.row_len_from) {
      return false;
    }
  }
  return true;
}
static_assert(is_ordered(), "ascending by rows, then by length; every group starts at length 0");

// Points far from any border.
static_assert(choose(64, 2048, 2048, 90) == Selector::cta);
static_assert(choose(1, 131072, 2048, 90) == Selector::cluster);
static_assert(choose(4096, 131072, 2048, 90) == Selector::stream);
// What the table does not decide: what a variant cannot serve.
static_assert(choose(1, 131072, kMaxStreamedPicks, 90) != Selector::radix);
static_assert(choose(1, 131072, kMaxStreamedPicks + 1, 90) == Selector::radix);
static_assert(choose(1, kMaxCtaRowLen, kMaxStreamedPicks + 1, 90) == Selector::cta);
static_assert(choose(1, kMaxCtaRowLen + 1, kMaxStreamedPicks + 1, 90) == Selector::radix);
static_assert(choose(1, 131072, 2048, 80) == Selector::stream);
static_assert(choose(1, 2048, 2048, 80) == Selector::cta);
static_assert(choose(1, 131072, 2048, 100) == choose(1, 131072, 2048, 90));

TEST(TopkChoice, NoVariantGetsWhatItCannotServe) {
  for (const std::int64_t rows : {0, 1, 132, 133, 100000})
    for (const std::int64_t len : {std::int64_t{0}, kMaxCtaRowLen, kMaxCtaRowLen + 1,
                                   2 * kMaxCtaRowLen, std::int64_t{1} << 31})
      for (const int k : {1, kMaxStreamedPicks, kMaxStreamedPicks + 1})
        for (const int capability : {80, 89, 90, 120}) {
          const Selector selector = choose(rows, len, k, capability);
          SCOPED_TRACE(testing::Message()
                       << rows << "x" << len << ", k " << k << ", " << capability);
          const bool streams = selector == Selector::cluster || selector == Selector::stream;
          EXPECT_TRUE(selector != Selector::cta || len <= kMaxCtaRowLen);
          EXPECT_TRUE(selector != Selector::cluster || capability >= 90);
          EXPECT_TRUE(!streams || k <= kMaxStreamedPicks);
        }
}

TEST(TopkChoice, EveryLineHoldsItsOwnCorner) {
  for (const ChoiceRow& line : kChoiceTable)
    EXPECT_EQ(choose(line.rows_from, line.row_len_from, 2048, 90), line.selector)
        << line.rows_from << "x" << line.row_len_from;
}

TEST(TopkChoice, TheLastLineReachesToTheEnd) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(choose(kMost, kMost, 2048, 90), std::end(kChoiceTable)[-1].selector);
}

}  // namespace
}  // namespace sparse_mla::topk
