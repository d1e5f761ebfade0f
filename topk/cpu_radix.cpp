// MSD radix select: three digit histograms over the row itself fix the k-th key, one more pass
// emits. No sample, no candidate buffer, so the time does not depend on where the scores lie.
#include <array>

#include "topk/algorithms.h"
#include "topk/select_rows.h"

namespace sparse_mla::topk {
namespace {

struct Digit {
  int shift, bits;
};
/// 32 bits in three reads; 2,048 counters of 4 bytes leave most of a 32 KB L1 to the row.
constexpr std::array<Digit, 3> kDigits{{{21, 11}, {10, 11}, {0, 10}}};

struct Radix {
  struct Scratch {
    std::uint32_t* histogram = nullptr;  // [threads, kBins]
    Scratch of_thread(int t) const { return {histogram + std::int64_t{t} * kBins}; }
  };
  static constexpr int kBins = 1 << 11;
  static constexpr bool kAscending = true;

  static Scratch carve(const SelectProblem&, int threads, WorkspaceCarver& carver) {
    return {carver.take<std::uint32_t>("radix histogram", std::int64_t{threads} * kBins)};
  }

  template <class Element>
  static void select(const RowScores& row, int k, std::uint32_t* histogram, std::int32_t* picks) {
    // `cut` gathers the digits of the k-th key; of the keys that share them, `wanted` are selected.
    std::uint32_t cut = 0, known = 0;
    std::int64_t wanted = k;
    for (const Digit& digit : kDigits) {
      const std::uint32_t mask = (1u << digit.bits) - 1;
      std::fill(histogram, histogram + mask + 1, 0u);
      for (std::int64_t i = 0; i < row.len; ++i) {
        const std::uint32_t key = ordered_key(Element::bits(row.data, i));
        // Adding 0 or 1: a branch on whether the key is still in play would be mispredicted.
        histogram[(key >> digit.shift) & mask] += (key & known) == cut;
      }
      std::uint32_t bin = mask;
      while (histogram[bin] < wanted) wanted -= histogram[bin--];
      cut |= bin << digit.shift;
      known |= mask << digit.shift;
    }
    for (std::int64_t i = 0, count = 0; count < k; ++i) {
      const std::uint32_t key = ordered_key(Element::bits(row.data, i));
      const bool equal = (key == cut) & (wanted > 0);
      wanted -= equal;
      // Written always, kept when selected: whether a key is, no branch predictor can guess.
      picks[count] = static_cast<std::int32_t>(i);
      count += equal | (key > cut);
    }
  }

  static void select_row(const RowScores& row, int k, Scratch scratch, std::int32_t* picks) {
    row.type == ScoreType::f32 ? select<Float32>(row, k, scratch.histogram, picks)
                               : select<BFloat16>(row, k, scratch.histogram, picks);
  }
};

}  // namespace

SelectEntry cpu_radix_entry() {
  return {"cpu_radix",
          Backend::cpu,
          "three digit histograms over the row",
          [](const SelectProblem&) { return std::string(); },
          workspace_bytes<Radix>,
          select_rows<Radix>};
}

}  // namespace sparse_mla::topk
