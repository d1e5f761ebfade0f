// std::nth_element on packed 64-bit (inverted key, index): what one would write first, and the
// yardstick of the faster selectors.
#include "topk/algorithms.h"
#include "topk/select_rows.h"

namespace sparse_mla::topk {
namespace {

struct NthElement {
  struct Scratch {
    std::uint64_t* ranks = nullptr;  // [threads, max_row_len]
    std::int64_t stride = 0;
    Scratch of_thread(int t) const { return {ranks + t * stride, stride}; }
  };
  static constexpr bool kAscending = false;

  static Scratch carve(const SelectProblem& problem, int threads, WorkspaceCarver& carver) {
    return {carver.take<std::uint64_t>("nth_element ranks", threads * problem.max_row_len),
            problem.max_row_len};
  }

  template <class Element>
  static void select(const RowScores& row, int k, std::uint64_t* ranks, std::int32_t* picks) {
    for (std::int64_t i = 0; i < row.len; ++i)
      ranks[i] = packed_rank(ordered_key(Element::bits(row.data, i)), i);
    std::nth_element(ranks, ranks + k, ranks + row.len);
    for (int i = 0; i < k; ++i) picks[i] = packed_index(ranks[i]);
  }

  static void select_row(const RowScores& row, int k, Scratch scratch, std::int32_t* picks) {
    row.type == ScoreType::f32 ? select<Float32>(row, k, scratch.ranks, picks)
                               : select<BFloat16>(row, k, scratch.ranks, picks);
  }
};

}  // namespace

SelectEntry cpu_nth_element_entry() {
  return {"cpu_nth_element",
          Backend::cpu,
          "std::nth_element on packed (score, index)",
          [](const SelectProblem&) { return std::string(); },
          workspace_bytes<NthElement>,
          select_rows<NthElement>};
}

}  // namespace sparse_mla::topk
