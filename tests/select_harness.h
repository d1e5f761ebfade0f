/// Runs one selector on owned, guarded memory and compares it with the oracle, exactly.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "sparse_mla/random.h"
#include "sparse_mla/select.h"
#include "sparse_mla/workspace.h"

#include "tests/support/run_entry.h"
#include "tests/support/select_oracle.h"

namespace sparse_mla {

inline void PrintTo(SelectOrder order, std::ostream* out) {
  *out << (order == SelectOrder::by_index   ? "by_index"
           : order == SelectOrder::by_value ? "by_value"
                                            : "unspecified");
}

inline std::ostream& operator<<(std::ostream& out, const SelectProblem& problem) {
  out << (problem.score_type == ScoreType::f32 ? "fp32" : "bf16") << " rows=" << problem.max_rows
      << " len=" << problem.max_row_len << " k=" << problem.k << " order=";
  PrintTo(problem.order, &out);
  return out;
}

namespace support {

using SelectEntry = Entry<SelectProblem, SelectCall>;

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr std::int32_t kGarbage = 0x7FFFFFFF;  ///< what outputs hold before a call

/// The selectors of the backend under test, those that this machine cannot run included.
inline std::vector<std::string> tested_selectors() {
  const Backend backend = backend_under_test().value_or(Backend::cpu);
  std::vector<std::string> names;
  for (const SelectEntry& entry : select_operation().entries())
    if (entry.backend == backend) names.emplace_back(entry.name);
  return names;
}

inline const SelectEntry& selector(const std::string& name) {
  for (const SelectEntry& entry : select_operation().entries())
    if (name == entry.name) return entry;
  throw std::invalid_argument("no selector " + name);
}

/// Those of them that serve a problem on this machine. Called when tests are listed: what cannot be
/// served is no test.
inline std::vector<std::string> selectors_serving(const SelectProblem& problem) {
  std::vector<std::string> names = tested_selectors();
  std::erase_if(names,
                [&](const std::string& name) { return !selector(name).why_not(problem).empty(); });
  return names;
}

/// Whether the selector cannot serve the problem; if so, a force has to be refused with its reason.
inline bool refuses(const SelectEntry& entry, const SelectProblem& problem) {
  const std::string reason = entry.why_not(problem);
  if (reason.empty()) return false;
  Dispatch dispatch;
  dispatch.forced["select"] = entry.name;
  try {
    select_operation().choose(problem, dispatch);
    ADD_FAILURE() << entry.name << " was taken in spite of: " << reason;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
  }
  return true;
}

/// Exactly as many bytes as an entry asks for, aligned, filled with `fill`, with a guard behind.
class GuardedWorkspace {
 public:
  explicit GuardedWorkspace(std::size_t bytes, int fill = 0xCD)
      : bytes_(bytes), memory_(new std::byte[bytes + kWorkspaceAlignment + kGuard]) {
    void* base = memory_.get();
    std::size_t space = bytes + kWorkspaceAlignment;
    base_ = static_cast<std::byte*>(std::align(kWorkspaceAlignment, bytes, base, space));
    std::memset(base_, fill, bytes);
    std::memset(base_ + bytes, 0xA5, kGuard);
  }
  std::span<std::byte> span() const { return {base_, bytes_}; }
  bool intact() const {
    return std::all_of(base_ + bytes_, base_ + bytes_ + kGuard,
                       [](std::byte b) { return b == std::byte{0xA5}; });
  }

 private:
  static constexpr std::size_t kGuard = 256;
  std::size_t bytes_;
  std::unique_ptr<std::byte[]> memory_;
  std::byte* base_ = nullptr;
};

/// Runs a selector where its backend lives.
inline void run_selector(const SelectEntry& entry, const SelectProblem& problem,
                         const SelectCall& call) {
  if (entry.backend == Backend::cuda)
    return run_on_device(select_operation(), entry, problem, call);
  const GuardedWorkspace workspace(entry.workspace_bytes(problem));
  select_operation().run(entry, problem, call, workspace.span(), nullptr);
  EXPECT_TRUE(workspace.intact()) << "wrote past the workspace";
}

/// The cache behind a case's slots.
struct PageCase {
  std::int32_t block_size = 0;  ///< 0: the call does not ask for slots
  bool identity = false;        ///< block i is page i of every request; else shuffled, with holes
  std::int64_t requests = 0;    ///< rows take turns, some belong to none; 0: one each, no list
  std::int64_t missing_columns = 0;  ///< of the table, against the longest row
};

/// What a case's hints hold. They never change the result.
enum class HintCase {
  none,     ///< the call brings none
  exact,    ///< the very picks
  stale,    ///< half of the picks, and neighbours of the rest: a previous step's
  garbage,  ///< −1, places outside of the row, duplicates, any place
  absent,   ///< −1 throughout
  indices,  ///< `stale`, in the memory of `indices`
};
inline constexpr std::array<HintCase, 5> kAllHintCases{
    HintCase::exact, HintCase::stale, HintCase::garbage, HintCase::absent, HintCase::indices};

inline const char* to_string(HintCase hints) {
  constexpr const char* kNames[] = {"none", "exact", "stale", "garbage", "absent", "indices"};
  return kNames[static_cast<std::size_t>(hints)];
}

/// A batch of rows. `fill` writes the row_len scores of a row; what lies between rows is `gap`.
struct SelectCase {
  std::string name;
  std::int64_t rows = 1;
  std::int64_t row_len = 0;
  int k = 1;
  std::function<void(std::span<float> row, std::int64_t r)> fill;
  ScoreType type = ScoreType::f32;
  std::vector<std::int32_t> starts = {}, ends = {};  ///< [rows] or empty
  std::vector<std::int32_t> out_rows = {};           ///< [rows] or empty
  std::int64_t stride = 0;                           ///< elements; 0 = row_len
  bool ragged = false;  ///< row_offsets: rows in reverse order, one odd element between them
  float gap = 1e30f;
  std::int64_t shift_bytes = 0;  ///< of the base pointer from alignment
  std::int64_t out_stride = 0;   ///< elements of `indices`; 0 = k + 3
  PageCase pages = {};
  HintCase hints = HintCase::none;

  friend std::ostream& operator<<(std::ostream& out, const SelectCase& c) {
    return out << c.name << " rows=" << c.rows << " row_len=" << c.row_len << " k=" << c.k
               << (c.type == ScoreType::f32 ? " fp32" : " bf16") << " stride=" << c.stride
               << (c.starts.empty() ? "" : " starts") << (c.ends.empty() ? "" : " ends")
               << (c.out_rows.empty() ? "" : " out_rows") << (c.ragged ? " ragged" : "")
               << " shift_bytes=" << c.shift_bytes << " block_size=" << c.pages.block_size
               << (c.pages.identity ? " identity" : "") << " requests=" << c.pages.requests
               << " missing_columns=" << c.pages.missing_columns << " hints=" << to_string(c.hints);
  }
};

/// A case's memory, its call, and what the oracle says.
class SelectRun {
 public:
  explicit SelectRun(const SelectCase& c) : case_(c) {
    const std::int64_t stride = c.stride ? c.stride : c.row_len;
    const std::int64_t element = c.type == ScoreType::f32 ? 4 : 2;
    const std::int64_t pitch = c.ragged ? c.row_len + 1 : stride;
    const std::int64_t elements = std::max<std::int64_t>(c.rows * pitch, c.row_len) + 1;
    scores_.resize(static_cast<std::size_t>(elements * element + c.shift_bytes));
    for (std::int64_t i = 0; i < elements; ++i) store(i, c.gap);
    for (std::int64_t r = 0; c.ragged && r < c.rows; ++r)
      offsets_.push_back((c.rows - 1 - r) * pitch);
    rows_.resize(static_cast<std::size_t>(c.rows * c.row_len));
#pragma omp parallel for schedule(dynamic) if (c.rows * c.row_len > 100000)
    for (std::int64_t r = 0; r < c.rows; ++r) {
      const std::span<float> row = score_row(r);
      c.fill(row, r);
      const std::int64_t first = c.ragged ? offsets_[static_cast<std::size_t>(r)] : r * stride;
      for (std::int64_t i = 0; i < c.row_len; ++i) {
        float& score = row[static_cast<std::size_t>(i)];
        if (c.type == ScoreType::bf16)
          score = std::bit_cast<float>(std::bit_cast<std::uint32_t>(score) & 0xFFFF0000u);
        store(first + i, score);
      }
    }

    const std::int64_t out_extent = rows_of_outputs();
    out_stride_ = c.out_stride ? c.out_stride : c.k + 3;
    indices_.resize(static_cast<std::size_t>(out_extent * out_stride_ + 2 * kGuard));
    values_.resize(indices_.size());

    call_.scores = {scores_.data() + c.shift_bytes,      c.type, c.rows, c.row_len, stride,
                    c.ragged ? offsets_.data() : nullptr};
    call_.starts = c.starts.empty() ? nullptr : c.starts.data();
    call_.ends = c.ends.empty() ? nullptr : c.ends.data();
    call_.out_rows = c.out_rows.empty() ? nullptr : c.out_rows.data();
    call_.indices = strided(indices_.data() + kGuard, std::array<std::int64_t, 2>{out_extent, c.k},
                            {out_stride_, 1});
    call_.values = strided(values_.data() + kGuard, std::array<std::int64_t, 2>{out_extent, c.k},
                           {out_stride_, 1});
    expected_.resize(static_cast<std::size_t>(c.rows));
#pragma omp parallel for schedule(dynamic) if (c.rows * c.row_len > 100000)
    for (std::int64_t r = 0; r < c.rows; ++r) {
      const auto i = static_cast<std::size_t>(r);
      expected_[i] =
          select_oracle(score_row(r), start(r), c.ends.empty() ? c.row_len : c.ends[i], c.k);
    }
    if (c.pages.block_size > 0) set_slot_map();
    if (c.hints != HintCase::none) set_hints();
  }

  SelectCall& call() { return call_; }
  const std::vector<std::int32_t>& indices() const { return indices_; }

  /// Fills the outputs with garbage.
  void spoil() {
    std::fill(indices_.begin(), indices_.end(), kGarbage);
    std::fill(values_.begin(), values_.end(), kGarbageValue);
    std::fill(slots_.begin(), slots_.end(), kGarbage);
    if (case_.hints == HintCase::indices)
      for (std::int64_t r = 0; r < case_.rows; ++r)
        std::copy_n(hints_.begin() + out_row(r) * case_.k, case_.k,
                    address(call_.indices, out_row(r), 0));
  }

  /// Spoils the outputs and runs.
  void run(const SelectEntry& entry, SelectOrder order = SelectOrder::unspecified,
           TieBreak tie = TieBreak::lowest_index) {
    spoil();
    run_selector(entry, problem_of(call_, tie, order), call_);
  }

  /// What `run` left must be the oracle's, bit for bit, and nothing else may have been touched.
  void check(SelectOrder order = SelectOrder::unspecified) const {
    std::vector<char> written(indices_.size(), 0);
    int faults = 0;
    for (std::int64_t r = 0; r < case_.rows && faults < 3; ++r) {
      const auto first = static_cast<std::size_t>(kGuard + out_row(r) * out_stride_);
      std::vector<std::int32_t> picks(
          indices_.begin() + static_cast<std::ptrdiff_t>(first),
          indices_.begin() + static_cast<std::ptrdiff_t>(first) + case_.k);
      std::fill_n(written.begin() + static_cast<std::ptrdiff_t>(first), case_.k, 1);
      std::vector<std::int32_t> wanted = expected_[static_cast<std::size_t>(r)];
      if (!values_match(r, picks, wanted.size(), first)) {
        ++faults;
        ADD_FAILURE() << "row " << r << ": values are not the scores of the picks";
      }
      for (std::size_t j = 0; !slots_.empty() && j < picks.size(); ++j) {
        if (slots_[first + j] == slot_of(r, picks[j])) continue;
        ++faults;
        ADD_FAILURE() << "row " << r << ", pick " << picks[j] << ": got slot " << slots_[first + j]
                      << ", expected " << slot_of(r, picks[j]);
        break;
      }
      const auto count = static_cast<std::ptrdiff_t>(wanted.size());
      if (order != SelectOrder::by_value) std::sort(wanted.begin(), wanted.end());
      if (order == SelectOrder::unspecified) std::sort(picks.begin(), picks.begin() + count);
      wanted.resize(static_cast<std::size_t>(case_.k), -1);
      if (picks == wanted) continue;
      ++faults;
      const auto [got, expected] = std::mismatch(picks.begin(), picks.end(), wanted.begin());
      ADD_FAILURE() << "row " << r << ", slot " << got - picks.begin() << ": got " << *got
                    << ", expected " << *expected;
    }
    for (std::size_t i = 0; i < written.size(); ++i) {
      if (written[i]) continue;
      ASSERT_EQ(indices_[i], kGarbage) << "wrote outside of its rows of `indices`";
      ASSERT_EQ(std::bit_cast<std::uint32_t>(values_[i]),
                std::bit_cast<std::uint32_t>(kGarbageValue))
          << "wrote outside of its rows of `values`";
      if (slots_.empty()) continue;
      ASSERT_EQ(slots_[i], kGarbage) << "wrote outside of its rows of `slots`";
    }
  }

 private:
  static constexpr std::int64_t kGuard = 64;
  static constexpr float kGarbageValue = -777.0f;

  std::int64_t rows_of_outputs() const {
    const std::vector<std::int32_t>& out_rows = case_.out_rows;
    return out_rows.empty() ? case_.rows : *std::max_element(out_rows.begin(), out_rows.end()) + 1;
  }
  std::int64_t out_row(std::int64_t r) const {
    return case_.out_rows.empty() ? r : case_.out_rows[static_cast<std::size_t>(r)];
  }
  std::int64_t start(std::int64_t r) const {
    return case_.starts.empty() ? 0 : case_.starts[static_cast<std::size_t>(r)];
  }
  std::span<float> score_row(std::int64_t r) {
    return std::span(rows_).subspan(static_cast<std::size_t>(r * case_.row_len),
                                    static_cast<std::size_t>(case_.row_len));
  }

  void store(std::int64_t i, float score) {
    const auto bits = std::bit_cast<std::uint32_t>(score);
    if (case_.type == ScoreType::f32) {
      std::memcpy(scores_.data() + case_.shift_bytes + i * 4, &bits, 4);
    } else {
      const auto half = static_cast<std::uint16_t>(bits >> 16);
      std::memcpy(scores_.data() + case_.shift_bytes + i * 2, &half, 2);
    }
  }

  bool values_match(std::int64_t r, const std::vector<std::int32_t>& picks, std::size_t count,
                    std::size_t first) const {
    const std::int64_t begin = std::clamp<std::int64_t>(start(r), 0, case_.row_len);
    for (std::size_t j = 0; j < picks.size(); ++j) {
      float wanted = -kInf;
      if (j < count) {
        const std::int64_t i = begin + picks[j];
        if (picks[j] < 0 || i >= case_.row_len) return false;
        wanted = rows_[static_cast<std::size_t>(r * case_.row_len + i)];
      }
      if (std::bit_cast<std::uint32_t>(values_[first + j]) != std::bit_cast<std::uint32_t>(wanted))
        return false;
    }
    return true;
  }

  void set_slot_map() {
    const PageCase& pages = case_.pages;
    const std::int64_t requests = pages.requests ? pages.requests : case_.rows;
    const std::int64_t all_columns = (case_.row_len + pages.block_size - 1) / pages.block_size;
    const std::int64_t columns = std::max<std::int64_t>(all_columns - pages.missing_columns, 0);
    const std::int64_t stride = columns + 3;
    num_blocks_ = all_columns + 11;
    block_tables_.assign(static_cast<std::size_t>(requests * stride), 0);  // gaps: a valid block
    for (std::int64_t q = 0; q < requests; ++q)
      for (std::int64_t c = 0; c < columns; ++c) {
        const std::uint32_t draw =
            random_bits(29, static_cast<std::uint64_t>(q), static_cast<std::uint64_t>(c));
        const auto any = static_cast<std::int32_t>(draw % static_cast<std::uint32_t>(num_blocks_));
        const std::int32_t holes[] = {-1, static_cast<std::int32_t>(num_blocks_),
                                      std::numeric_limits<std::int32_t>::min(),
                                      std::numeric_limits<std::int32_t>::max()};
        block_tables_[static_cast<std::size_t>(q * stride + c)] = pages.identity
                                                                      ? static_cast<std::int32_t>(c)
                                                                  : draw >> 29 == 0 ? holes[c % 4]
                                                                                    : any;
      }
    if (pages.requests > 0)
      for (std::int64_t r = 0; r < case_.rows; ++r)  // −1 and one beyond the table have their turns
        request_of_row_.push_back(static_cast<std::int32_t>(r % (requests + 2) - 1));
    slots_.resize(indices_.size());
    SlotMap& map = call_.slot_map;
    map.block_tables = strided<const std::int32_t>(block_tables_.data(),
                                                   std::array{requests, columns}, {stride, 1});
    map.request_of_row = request_of_row_.empty() ? nullptr : request_of_row_.data();
    map.block_size = pages.block_size;
    map.num_blocks = num_blocks_;
    map.slots = strided(slots_.data() + kGuard,
                        std::array<std::int64_t, 2>{rows_of_outputs(), case_.k}, {out_stride_, 1});
  }

  /// What the header says, in 64-bit arithmetic.
  std::int64_t slot_of(std::int64_t r, std::int64_t pick) const {
    const View2<const std::int32_t>& tables = call_.slot_map.block_tables;
    const std::int64_t size = case_.pages.block_size;
    const std::int64_t request =
        request_of_row_.empty() ? r : request_of_row_[static_cast<std::size_t>(r)];
    if (pick < 0 || request < 0 || request >= tables.extent(0)) return -1;
    if (pick / size >= tables.extent(1)) return -1;
    const std::int64_t block = tables(request, pick / size);
    return block < 0 || block >= num_blocks_ ? -1 : block * size + pick % size;
  }

  void set_hints() {
    const HintCase kind = case_.hints;
    // Hints of their own need not be as wide as the picks.
    const std::int64_t k = case_.k, width = kind == HintCase::garbage ? k + k / 2 + 1 : k;
    const std::int64_t rows = rows_of_outputs(), len = case_.row_len;
    hints_.assign(static_cast<std::size_t>(rows * width), -1);
    for (std::int64_t r = 0; r < case_.rows && kind != HintCase::absent; ++r) {
      const std::vector<std::int32_t>& picks = expected_[static_cast<std::size_t>(r)];
      for (std::int64_t j = 0; j < width; ++j) {
        std::int32_t& hint = hints_[static_cast<std::size_t>(out_row(r) * width + j)];
        const std::uint32_t draw =
            random_bits(31, static_cast<std::uint64_t>(r), static_cast<std::uint64_t>(j));
        if (kind != HintCase::garbage) {
          if (j >= std::ssize(picks)) break;
          hint = picks[static_cast<std::size_t>(j)];
          if (kind != HintCase::exact && draw % 2 == 0) hint += static_cast<int>(draw >> 30) - 1;
          continue;
        }
        const std::int32_t wild[] = {-1,
                                     static_cast<std::int32_t>(len),
                                     static_cast<std::int32_t>(len + j),
                                     std::numeric_limits<std::int32_t>::min(),
                                     std::numeric_limits<std::int32_t>::max(),
                                     0,
                                     static_cast<std::int32_t>(len / 2)};
        hint = draw >> 30 == 0 ? wild[draw % 7]
                               : static_cast<std::int32_t>(draw % static_cast<unsigned>(len + 1));
      }
    }
    call_.hints = kind == HintCase::indices
                      ? View2<const std::int32_t>(call_.indices)
                      : contiguous<const std::int32_t>(hints_.data(), rows, width);
  }

  SelectCase case_;
  std::vector<std::byte> scores_;
  std::vector<std::int64_t> offsets_;
  std::vector<float> rows_;  // [rows, row_len] what the selector sees, as floats
  std::vector<std::int32_t> indices_;
  std::vector<float> values_;
  std::vector<std::int32_t> slots_;           // empty: not asked for
  std::vector<std::int32_t> block_tables_;    // [requests, columns + 3]
  std::vector<std::int32_t> request_of_row_;  // [rows] or empty
  std::int64_t num_blocks_ = 0;
  std::vector<std::int32_t> hints_;  // [rows of the outputs, width]
  std::int64_t out_stride_ = 0;
  SelectCall call_;
  std::vector<std::vector<std::int32_t>> expected_;  // [rows] best first
};

}  // namespace support
}  // namespace sparse_mla
