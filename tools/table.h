#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

namespace sparse_mla::command {

/// 1234567 → "1,234,567", for people.
std::string format_count(int64_t count);

/// `value` with `decimals` digits after the point, "-" where it is not finite.
std::string format_number(double value, int decimals);

/// A table for people: columns under headers that carry the unit ("time, ms"), numbers right
/// aligned, text left aligned.
///
///   Table table({{"chunk"}, {"rows"}, {"requests", Table::Align::left}});
///   table.add_row({"0", "1,024", "0-3"});
///   std::cout << table;
class Table {
 public:
  enum class Align { left, right };
  struct Column {
    std::string header;  // name and unit
    Align align = Align::right;
  };

  explicit Table(std::vector<Column> columns);

  /// Cells from left to right; throws std::invalid_argument unless there is one per column.
  void add_row(std::vector<std::string> cells);

  friend std::ostream& operator<<(std::ostream& out, const Table& table);

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace sparse_mla::command
