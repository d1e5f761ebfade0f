// Which selector a device takes, and selectors in CUDA graphs: captured once, replayed with other
// scores, ranges and hints.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/random.h"
#include "sparse_mla/select.h"

#include "tests/support/captured_graph.h"
#include "tests/support/run_entry.h"
#include "tests/support/score_data.h"
#include "tests/support/select_oracle.h"

namespace sparse_mla {
namespace {

using support::DeviceMemory;
using support::DeviceMirror;
using support::DeviceStream;
using support::ScoreData;

constexpr std::int32_t kPage = 64;

/// One call's memory on the host. Its contents change from one replay to the next, its shape does
/// not.
class Replays {
 public:
  Replays(std::int64_t rows, std::int64_t row_len, int k)
      : rows_(rows),
        len_(row_len),
        k_(k),
        scores_(static_cast<std::size_t>(rows * row_len)),
        starts_(static_cast<std::size_t>(rows)),
        ends_(starts_),
        requests_(starts_),
        tables_(static_cast<std::size_t>(rows * columns())),
        indices_(static_cast<std::size_t>(rows * k), -1),
        slots_(indices_) {}

  SelectCall call(bool hinted) {
    SelectCall call;
    call.scores = {scores_.data(), ScoreType::f32, rows_, len_, len_, nullptr};
    call.starts = starts_.data();
    call.ends = ends_.data();
    call.indices = contiguous(indices_.data(), rows_, k_);
    call.slot_map = {
        .block_tables = contiguous<const std::int32_t>(tables_.data(), rows_, columns()),
        .request_of_row = requests_.data(),
        .block_size = kPage,
        .num_blocks = kBlocks,
        .slots = contiguous(slots_.data(), rows_, k_)};
    if (hinted) call.hints = call.indices;
    return call;
  }

  /// New contents: row r ends at lens[(r + step) % size]. The indices stay, as the next step's
  /// hints; without hints they are spoiled.
  void next(std::uint64_t step, std::span<const std::int32_t> lens, bool hinted) {
    const auto number = [&](std::uint64_t stream, std::uint64_t i, std::uint32_t range) {
      return static_cast<std::int32_t>(random_bits(step, stream, i) % range);
    };
#pragma omp parallel for schedule(dynamic)
    for (std::size_t r = 0; r < ends_.size(); ++r) {
      ends_[r] = lens[(r + step) % lens.size()];
      starts_[r] = number(1, r, 4) == 0 ? number(2, r, 700) : -2;
      requests_[r] = number(3, r, static_cast<std::uint32_t>(rows_) + 2) - 1;
      support::fill_scores(support::kAllScoreData[(r + step) % 5],
                           std::span(scores_).subspan(r * static_cast<std::size_t>(len_),
                                                      static_cast<std::size_t>(len_)),
                           step, r);
    }
    for (std::size_t i = 0; i < tables_.size(); ++i) tables_[i] = number(4, i, kBlocks + 2) - 1;
    if (!hinted) std::fill(indices_.begin(), indices_.end(), -777);
    std::fill(slots_.begin(), slots_.end(), -777);
  }

  /// The outputs, against the oracle.
  void check(SelectOrder order) const {
    for (std::int64_t r = 0; r < rows_; ++r) {
      const auto i = static_cast<std::size_t>(r);
      std::vector<std::int32_t> wanted =
          support::select_oracle(std::span(scores_).subspan(i * static_cast<std::size_t>(len_),
                                                            static_cast<std::size_t>(len_)),
                                 starts_[i], ends_[i], k_);
      if (order == SelectOrder::by_index) std::sort(wanted.begin(), wanted.end());
      wanted.resize(static_cast<std::size_t>(k_), -1);
      std::vector<std::int32_t> wanted_slots;
      for (const std::int32_t pick : wanted) wanted_slots.push_back(slot_of(requests_[i], pick));
      const auto row_of = [&](const std::vector<std::int32_t>& all) {
        return std::vector(all.begin() + r * k_, all.begin() + (r + 1) * k_);
      };
      ASSERT_EQ(row_of(indices_), wanted) << "row " << r << " to " << ends_[i];
      ASSERT_EQ(row_of(slots_), wanted_slots) << "row " << r << " to " << ends_[i];
    }
  }

 private:
  static constexpr std::int32_t kBlocks = 5000;

  std::int64_t columns() const { return (len_ + kPage - 1) / kPage; }
  std::int32_t slot_of(std::int64_t request, std::int64_t pick) const {
    if (pick < 0 || request < 0 || request >= rows_) return -1;
    const std::int32_t block =
        tables_[static_cast<std::size_t>(request * columns() + pick / kPage)];
    return block < 0 || block >= kBlocks ? -1
                                         : block * kPage + static_cast<std::int32_t>(pick % kPage);
  }

  std::int64_t rows_, len_;
  int k_;
  std::vector<float> scores_;                                    // [rows, len]
  std::vector<std::int32_t> starts_, ends_, requests_, tables_;  // tables [rows, columns]
  std::vector<std::int32_t> indices_, slots_;                    // [rows, k]
};

struct Step {
  std::int64_t rows, row_len;
  int k;
  std::vector<std::int32_t> lens;
};

TEST(CudaSelect, OneIsTakenAndTheOthersSayWhyNot) {
  Dispatch dispatch;
  dispatch.backend = Backend::cuda;
  for (const std::int64_t rows : {0, 1, 64, 4096})
    for (const std::int64_t len : {0, 8192, 131072, 2000000})
      for (const int k : {1, 2048, 6000}) {
        SCOPED_TRACE(std::to_string(rows) + "x" + std::to_string(len) + ", k " + std::to_string(k));
        const SelectProblem problem{rows, len, k};
        for (const EntryReport& line : select_operation().explain(problem, dispatch).entries) {
          EXPECT_EQ(line.why_not.empty(), line.chosen) << line.name << ": " << line.why_not;
        }
      }
}

TEST(CudaSelect, R60ACapturedSelectionIsReplayedWithOtherLengths) {
  constexpr std::int32_t kLowest = std::numeric_limits<std::int32_t>::min();
  const Step steps[] = {
      {6, 262200, 2048, {70000, 0, 511, 512, 513, 16385, 131073, 262145, -1, 262217, 2048, 32769}},
      {5, 20000, 512, {20000, 0, 1, 511, 512, 8193, kLowest, 20017}},
      {140, 5000, 64, {5000, 63, 64, 65, 0, 4097, 2049}}};
  for (const Step& step : steps)
    for (const SelectOrder order : {SelectOrder::by_index, SelectOrder::by_value})
      for (const bool hinted : {false, true}) {
        SelectProblem problem{step.rows, step.row_len, step.k};
        problem.order = order;
        problem.hinted = hinted;
        for (const auto& entry : select_operation().entries()) {
          if (entry.backend != Backend::cuda || !entry.why_not(problem).empty()) continue;
          SCOPED_TRACE(std::string(entry.name) + ", rows of " + std::to_string(step.row_len) +
                       (hinted ? ", hinted" : ""));
          Replays replays(step.rows, step.row_len, step.k);
          const SelectCall call = replays.call(hinted);
          DeviceMirror mirror;
          const SelectCall moved = support::mirror_call(problem, call, mirror);
          const DeviceMemory workspace(entry.workspace_bytes(problem));
          const DeviceStream stream;
          const support::CapturedGraph graph(stream, [&] {
            select_operation().run(entry, problem, moved, workspace.span(), stream.get());
          });
          for (const cudaGraphNodeType type : graph.node_types())
            EXPECT_THAT(type, testing::AnyOf(cudaGraphNodeTypeKernel, cudaGraphNodeTypeMemset));
          for (std::uint64_t replay = 0; replay < 4; ++replay) {
            SCOPED_TRACE("replay " + std::to_string(replay));
            replays.next(replay, step.lens, hinted);
            mirror.refresh();
            graph.launch(stream);
            stream.synchronize();
            mirror.download();
            replays.check(order);
            if (HasFatalFailure()) return;
          }
        }
      }
}

}  // namespace
}  // namespace sparse_mla
