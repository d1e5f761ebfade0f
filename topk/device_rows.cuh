/// What the CUDA selectors share: where a row's candidates lie, and how its picks leave.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/request_pages.h"
#include "sparse_mla/select.h"
#include "sparse_mla/workspace.h"
#include "topk/ordered_key.h"
#include "topk/select_checks.h"

namespace sparse_mla::cuda {

/// The candidates of row r and the row of the outputs that is theirs.
struct DeviceRow {
  const std::byte* scores;  ///< [len] elements, any element alignment
  std::int32_t len;
  std::int64_t out_row;  ///< −1: outside of the outputs, where the CPU throws; nothing is written
};

/// Starts and ends are read on the device and clamped there: a captured graph is replayed with any.
template <class Element>
__device__ inline DeviceRow row_of(const SelectCall& call, std::int64_t max_row_len,
                                   std::int64_t r) {
  const ScoreRows& scores = call.scores;
  const auto clamped = [&](std::int64_t i) {
    return i < 0 ? 0 : i > scores.row_len ? scores.row_len : i;
  };
  const std::int64_t begin = call.starts != nullptr ? clamped(call.starts[r]) : 0;
  const std::int64_t end = call.ends != nullptr ? clamped(call.ends[r]) : scores.row_len;
  const std::int64_t len = end <= begin ? 0 : end - begin < max_row_len ? end - begin : max_row_len;
  const std::int64_t offset =
      scores.row_offsets != nullptr ? scores.row_offsets[r] : r * scores.row_stride;
  std::int64_t out_row = call.out_rows != nullptr ? call.out_rows[r] : r;
  if (out_row < 0 || out_row >= call.indices.extent(0) ||
      (call.values.data_handle() != nullptr && out_row >= call.values.extent(0)) ||
      (call.slot_map.slots.data_handle() != nullptr && out_row >= call.slot_map.slots.extent(0)))
    out_row = -1;
  return {static_cast<const std::byte*>(scores.data) + (offset + begin) * Element::kBytes,
          static_cast<std::int32_t>(len), out_row};
}

/// Writes a row's picks: index, and where the call wants them score and slot.
class PickWriter {
 public:
  __device__ PickWriter(const SelectCall& call, std::int64_t r, std::int64_t out_row)
      : indices_(address(call.indices, out_row, 0)),
        values_(call.values.data_handle() != nullptr
                    ? reinterpret_cast<std::uint32_t*>(address(call.values, out_row, 0))
                    : nullptr) {
    const SlotMap& map = call.slot_map;
    if (map.slots.data_handle() == nullptr) return;
    slots_ = address(map.slots, out_row, 0);
    const std::int64_t request = map.request_of_row != nullptr ? map.request_of_row[r] : r;
    pages_ = RequestPages(map.block_tables, request, map.block_size, map.num_blocks);
  }

  /// Does the call want scores?
  __device__ bool wants_values() const { return values_ != nullptr; }
  /// Does it want anything beside indices?
  __device__ bool wants_extras() const { return values_ != nullptr || slots_ != nullptr; }

  /// Pick number `place`, with its score's bits (as they are in memory: −0 stays −0, a NaN keeps
  /// its payload), which only wants_values() reads.
  __device__ void put(std::int64_t place, std::int32_t index, std::uint32_t score_bits) const {
    indices_[place] = index;
    put_extras(place, index, score_bits);
  }
  /// The same, where the index is in place already.
  __device__ void put_extras(std::int64_t place, std::int32_t index,
                             std::uint32_t score_bits) const {
    if (values_ != nullptr) values_[place] = score_bits;
    if (slots_ != nullptr) slots_[place] = pages_.slot_of(index);
  }

  /// Places [count, k) of a row that has fewer than k candidates; all threads call it.
  __device__ void pad(std::int64_t count, std::int64_t k, int thread, int threads) const {
    constexpr std::uint32_t kNegativeInfinity = 0xFF800000u;
    for (std::int64_t j = count + thread; j < k; j += threads) {
      indices_[j] = -1;
      if (values_ != nullptr) values_[j] = kNegativeInfinity;
      if (slots_ != nullptr) slots_[j] = -1;
    }
  }

  __device__ std::int32_t* indices() const { return indices_; }

 private:
  std::int32_t* indices_;          // [k]
  std::uint32_t* values_;          // [k] or null
  std::int32_t* slots_ = nullptr;  // [k] or null
  RequestPages pages_;
};

/// Entry::workspace_bytes by the code that carves: carve(problem, carver).
template <class Carve>
std::size_t carved_bytes(const SelectProblem& problem, Carve carve) {
  topk::validate(problem);
  WorkspaceCarver counter;
  carve(problem, counter);
  return counter.bytes();
}

/// Entry::run: checks the call and, unless it has no rows, calls launch(element) with the element
/// type of its scores.
template <class Launch>
void run_for_type(const SelectProblem& problem, const SelectCall& call, Launch launch) {
  topk::validate_shapes(problem, call);
  if (call.scores.num_rows == 0) return;
  if (problem.score_type == ScoreType::f32)
    launch(topk::Float32{});
  else
    launch(topk::BFloat16{});
}

}  // namespace sparse_mla::cuda
