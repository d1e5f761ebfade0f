// The reference: sorts a row by the contract's own words and takes the front. It shares no trick
// with the other selectors (no integer keys).
#include <bit>
#include <cmath>

#include "topk/algorithms.h"
#include "topk/select_rows.h"

namespace sparse_mla::topk {
namespace {

/// Larger scores first, NaN after everything else, equal ones by index.
bool ranks_before(float a, std::int32_t index_a, float b, std::int32_t index_b) {
  const bool nan_a = std::isnan(a), nan_b = std::isnan(b);
  if (nan_a != nan_b) return nan_b;
  if (!nan_a && a != b) return a > b;
  return index_a < index_b;
}

struct Sort {
  struct Scratch {
    std::int32_t* order = nullptr;  // [threads, max_row_len]
    std::int64_t stride = 0;
    Scratch of_thread(int t) const { return {order + t * stride, stride}; }
  };
  static constexpr bool kAscending = false;

  static Scratch carve(const SelectProblem& problem, int threads, WorkspaceCarver& carver) {
    return {carver.take<std::int32_t>("sort order", threads * problem.max_row_len),
            problem.max_row_len};
  }

  static void select_row(const RowScores& row, int k, Scratch scratch, std::int32_t* picks) {
    std::int32_t* const order = scratch.order;
    std::iota(order, order + row.len, 0);
    // The order is total (indices differ), so this equals a stable sort, without its allocation.
    std::sort(order, order + row.len, [&row](std::int32_t a, std::int32_t b) {
      return ranks_before(std::bit_cast<float>(row.bits(a)), a, std::bit_cast<float>(row.bits(b)),
                          b);
    });
    std::copy(order, order + k, picks);
  }
};

}  // namespace

SelectEntry cpu_sort_entry() {
  return {"cpu_sort",
          Backend::cpu,
          "full sort of each row: the reference",
          [](const SelectProblem&) { return std::string(); },
          workspace_bytes<Sort>,
          select_rows<Sort>};
}

}  // namespace sparse_mla::topk
