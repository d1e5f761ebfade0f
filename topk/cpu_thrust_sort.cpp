// Thrust on OpenMP: each row's packed (inverted key, index) sorted whole, all threads on one row. A
// library's full sort, kept for comparison.
#define THRUST_DEVICE_SYSTEM THRUST_DEVICE_SYSTEM_OMP
#include <atomic>
#include <new>

#include <thrust/sort.h>
#include <thrust/system/cpp/execution_policy.h>
#include <thrust/system/omp/execution_policy.h>

#include "topk/algorithms.h"
#include "topk/select_rows.h"

namespace sparse_mla::topk {
namespace {

/// Hands out workspace to Thrust's threads. Its need is not documented: what does not fit comes
/// from the heap.
class Arena {
 public:
  using value_type = std::byte;

  explicit Arena(std::span<std::byte> memory) : memory_(memory) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* allocate(std::ptrdiff_t bytes) {
    const std::size_t padded = (static_cast<std::size_t>(bytes) + 63) / 64 * 64;
    const std::size_t begin = used_.fetch_add(padded);
    if (begin + padded <= memory_.size()) return memory_.data() + begin;
    return static_cast<std::byte*>(::operator new(padded));
  }
  void deallocate(std::byte* pointer, std::size_t) {
    if (pointer < memory_.data() || pointer >= memory_.data() + memory_.size())
      ::operator delete(pointer);
  }
  void reset() { used_ = 0; }

 private:
  std::span<std::byte> memory_;
  std::atomic<std::size_t> used_{0};
};

struct Buffers {
  std::uint64_t* ranks;            // [max_row_len]
  std::span<std::byte> temporary;  // Thrust's: two copies of a row have sufficed
};

Buffers carve(const SelectProblem& problem, WorkspaceCarver& carver) {
  Buffers buffers;
  buffers.ranks = carver.take<std::uint64_t>("thrust_sort ranks", problem.max_row_len);
  buffers.temporary = carver.take_span("thrust_sort temporary",
                                       static_cast<std::size_t>(problem.max_row_len) * 16 + 4096);
  return buffers;
}

std::size_t needed_bytes(const SelectProblem& problem) {
  validate(problem);
  WorkspaceCarver counter;
  carve(problem, counter);
  return counter.bytes();
}

void run(const SelectProblem& problem, const SelectCall& call, std::span<std::byte> workspace,
         Stream) {
  validate(problem, call);
  WorkspaceCarver carver(workspace);
  const Buffers buffers = carve(problem, carver);
  Arena arena(buffers.temporary);
  for (std::int64_t r = 0; r < call.scores.num_rows; ++r) {
    const RowScores row = row_scores(call, r);
    std::int32_t* const picks = address(call.indices, output_row(call, r), 0);
    std::uint64_t* const ranks = buffers.ranks;
#pragma omp parallel for schedule(static) if (worth_a_team(2, row.len))
    for (std::int64_t i = 0; i < row.len; ++i) ranks[i] = packed_rank(ordered_key(row.bits(i)), i);
    arena.reset();
    // Short rows stay on this thread: waking a team for each would be most of the time.
    if (worth_a_team(2, row.len))
      thrust::sort(thrust::omp::par(arena), ranks, ranks + row.len);
    else
      thrust::sort(thrust::cpp::par(arena), ranks, ranks + row.len);
    const std::int64_t count = std::min<std::int64_t>(row.len, problem.k);
    for (std::int64_t i = 0; i < count; ++i) picks[i] = packed_index(ranks[i]);
    // The ranks have done their work and are at least `count` long: finish_row's scratch.
    finish_row(problem, call, r, row, false, ranks);
  }
}

}  // namespace

SelectEntry cpu_thrust_sort_entry() {
  return {"thrust_sort",
          Backend::cpu,
          "Thrust on OpenMP: a full sort of each row",
          [](const SelectProblem&) { return std::string(); },
          needed_bytes,
          run};
}

}  // namespace sparse_mla::topk
