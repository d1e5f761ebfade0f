#include "tools/table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <utility>

namespace sparse_mla::command {
namespace {

// Characters of UTF-8 text, so that "µs" takes two columns.
size_t width_of(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
}

}  // namespace

std::string format_count(int64_t count) {
  std::string digits = std::to_string(count);
  const size_t first = digits[0] == '-' ? 1 : 0;
  for (size_t at = digits.size(); at > first + 3;) {
    at -= 3;
    digits.insert(at, 1, ',');
  }
  return digits;
}

std::string format_number(double value, int decimals) {
  if (!std::isfinite(value)) return "-";
  const int size = std::snprintf(nullptr, 0, "%.*f", decimals, value);
  std::string text(static_cast<size_t>(size) + 1, '\0');
  std::snprintf(text.data(), text.size(), "%.*f", decimals, value);
  text.pop_back();
  return text;
}

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

void Table::add_row(std::vector<std::string> cells) {
  if (cells.size() != columns_.size()) {
    throw std::invalid_argument("cells: got " + std::to_string(cells.size()) + ", expected " +
                                std::to_string(columns_.size()) + ", one for each column");
  }
  rows_.push_back(std::move(cells));
}

std::ostream& operator<<(std::ostream& out, const Table& table) {
  const std::vector<Table::Column>& columns = table.columns_;
  std::vector<size_t> widths;
  for (size_t column = 0; column < columns.size(); ++column) {
    size_t width = width_of(columns[column].header);
    for (const auto& row : table.rows_) width = std::max(width, width_of(row[column]));
    widths.push_back(width);
  }
  const auto print = [&](const auto& cell_of) {
    std::string line;
    for (size_t column = 0; column < columns.size(); ++column) {
      const std::string& cell = cell_of(column);
      const std::string padding(widths[column] - width_of(cell), ' ');
      if (column > 0) line += "  ";
      line += columns[column].align == Table::Align::right ? padding + cell : cell + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);  // nothing invisible at the end of a line
    out << line << '\n';
  };
  print([&](size_t column) -> const std::string& { return columns[column].header; });
  for (const auto& row : table.rows_) {
    print([&](size_t column) -> const std::string& { return row[column]; });
  }
  return out;
}

}  // namespace sparse_mla::command
