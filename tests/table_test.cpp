#include "tools/table.h"

#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>

#include <gtest/gtest.h>

#include "tools/progress.h"

namespace sparse_mla::command {
namespace {

TEST(Table, AlignsNumbersRightAndTextLeft) {
  Table table({{"chunk"}, {"time, µs"}, {"why", Table::Align::left}, {"rows"}});
  table.add_row({"0", "1.5", "fits", "65,536"});
  table.add_row({"1,234", "12345678.9", "", "16"});
  std::ostringstream text;
  text << table;
  EXPECT_EQ(text.str(),
            "chunk    time, µs  why     rows\n"
            "    0         1.5  fits  65,536\n"
            "1,234  12345678.9            16\n");
}

TEST(Table, LeavesNoBlanksAtLineEnds) {
  Table table({{"a"}, {"text", Table::Align::left}});
  table.add_row({"1", "x"});
  std::ostringstream text;
  text << table;
  EXPECT_EQ(text.str(), "a  text\n1  x\n");
}

TEST(Table, WithoutRowsIsItsHeader) {
  std::ostringstream text;
  text << Table({{"a"}, {"b"}});
  EXPECT_EQ(text.str(), "a  b\n");
}

TEST(Table, RefusesRowsOfAnotherWidth) {
  Table table({{"a"}, {"b"}});
  EXPECT_THROW(table.add_row({"1"}), std::invalid_argument);
}

TEST(Table, FormatsNumbers) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1,000");
  EXPECT_EQ(format_count(123456), "123,456");
  EXPECT_EQ(format_count(-1234567), "-1,234,567");
  EXPECT_EQ(format_count(-123), "-123");
  EXPECT_EQ(format_number(1.25, 1), "1.2");
  EXPECT_EQ(format_number(-3, 2), "-3.00");
  EXPECT_EQ(format_number(std::numeric_limits<double>::quiet_NaN(), 2), "-");
}

using std::chrono::milliseconds;

TEST(Progress, StaysSilentOffTerminalsAndForShortWork) {
  const Progress::Clock::time_point start{};
  std::ostringstream pipe;
  { Progress("planning", "batches", 10, pipe, false, start).update(5, start + milliseconds(5000)); }
  EXPECT_EQ(pipe.str(), "");
  std::ostringstream terminal;
  {
    Progress progress("planning", "batches", 10, terminal, true, start);
    progress.update(5, start + milliseconds(999));
  }
  EXPECT_EQ(terminal.str(), "");
}

TEST(Progress, RewritesOneLineAndErasesIt) {
  const Progress::Clock::time_point start{};
  std::ostringstream terminal;
  {
    Progress progress("planning", "batches", 11072, terminal, true, start);
    progress.update(1000, start + milliseconds(1000));
    progress.update(1001, start + milliseconds(1050));  // too soon
    progress.update(1100, start + milliseconds(1100));
  }
  EXPECT_EQ(terminal.str(),
            "\r\x1b[Kplanning 1,000 of 11,072 batches\r\x1b[Kplanning 1,100 of 11,072 batches"
            "\r\x1b[K");
  std::ostringstream unknown;
  { Progress("reading", "rows", 0, unknown, true, start).update(7, start + milliseconds(2000)); }
  EXPECT_EQ(unknown.str(), "\r\x1b[Kreading 7 rows\r\x1b[K");
}

}  // namespace
}  // namespace sparse_mla::command
