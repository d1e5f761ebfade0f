// One read of the row. A sample gives a threshold a little below the k-th score; the pass collects
// the indices at or above it (the survivors), in order; a radix selection among them is exact.
//
// Nothing is lost on the way: survivors that fill their buffer are cut back to the best k, and the
// threshold rises above the worst of those (a later equal score would lose the tie anyway). If the
// sample misled and fewer than k survive, the row is read again without a threshold.
#include <array>
#include <bit>

#include "kernels/cpu/cpu_features.h"
#include "topk/algorithms.h"
#include "topk/select_rows.h"
#include "topk/threshold_scan.h"
#include "topk/threshold_tuning.h"

namespace sparse_mla::topk {
namespace {

struct ThresholdScratch {
  std::int32_t* survivors = nullptr;  // [threads, stride] indices
  std::uint32_t* keys = nullptr;      // [threads, stride] their keys; before the pass, the sample's
  std::uint32_t* digits = nullptr;    // [threads, stride] keys that a digit left undecided
  std::int64_t capacity = 0;
  std::int64_t stride = 0;

  ThresholdScratch of_thread(int t) const {
    return {survivors + t * stride, keys + t * stride, digits + t * stride, capacity, stride};
  }
};

ThresholdScratch carve_threshold(const SelectProblem& problem, int threads,
                                 WorkspaceCarver& carver) {
  ThresholdScratch scratch;
  scratch.capacity = survivor_capacity(problem.max_row_len, problem.k);
  scratch.stride = scratch.capacity + kScanBlock;
  scratch.survivors = carver.take<std::int32_t>("threshold survivors", threads * scratch.stride);
  scratch.keys = carver.take<std::uint32_t>("threshold keys", threads * scratch.stride);
  scratch.digits = carver.take<std::uint32_t>("threshold digits", threads * scratch.stride);
  return scratch;
}

/// Where a list of keys is cut: everything above `key` belongs, and the first `num_equal` equals.
struct Cut {
  std::uint32_t key = 0;
  std::int64_t num_equal = 0;
};

struct KeyRange {
  std::uint32_t lowest = ~0u, highest = 0;
  void include(std::uint32_t key) {
    lowest = std::min(lowest, key);
    highest = std::max(highest, key);
  }
};

/// The cut that leaves the `wanted` largest of keys[0, count), 1 ≤ wanted ≤ count, which span
/// `range`. Histograms over that range, not over fixed digits: survivors share their leading bits.
Cut find_cut(const std::uint32_t* keys, std::int64_t count, KeyRange range, std::int64_t wanted,
             std::uint32_t* undecided) {
  std::array<std::uint32_t, 1 << kMaxDigitBits> histogram;
  for (;;) {
    const std::uint32_t span = range.highest - range.lowest;
    const int shift = std::max(0, static_cast<int>(std::bit_width(span)) - digit_bits(count));
    std::uint32_t bin = span >> shift;
    std::fill_n(histogram.begin(), bin + 1, 0u);
    for (std::int64_t i = 0; i < count; ++i) ++histogram[(keys[i] - range.lowest) >> shift];
    while (histogram[bin] < wanted) wanted -= histogram[bin--];
    if (shift == 0) return {range.lowest + bin, wanted};

    const std::uint32_t lowest = range.lowest;
    range = {};
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      // Written always, kept when its bin matches: no branch to mispredict.
      const std::uint32_t key = keys[i];
      const bool keep = (key - lowest) >> shift == bin;
      undecided[kept] = key;
      kept += keep;
    }
    for (std::int64_t i = 0; i < kept; ++i) range.include(undecided[i]);
    keys = undecided;
    count = kept;
  }
}

/// Cuts survivors[0, count) back to the best `k`, in order, into `out` (may be `survivors`).
/// Returns the key of the worst that stays.
template <class Element>
std::uint32_t cut_back(const RowScores& row, const ThresholdScratch& scratch, std::int64_t count,
                       int k, std::int32_t* out) {
  KeyRange range;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t key = ordered_key(Element::bits(row.data, scratch.survivors[i]));
    scratch.keys[i] = key;
    range.include(key);
  }
  Cut cut = find_cut(scratch.keys, count, range, k, scratch.digits);
  const std::uint32_t worst = cut.key;
  for (std::int64_t i = 0, kept = 0; kept < k; ++i) {
    const bool equal = (scratch.keys[i] == worst) & (cut.num_equal > 0);
    cut.num_equal -= equal;
    // Written always, kept when it stays: a branch here would be mispredicted half of the time.
    out[kept] = scratch.survivors[i];
    kept += equal | (scratch.keys[i] > worst);
  }
  return worst;
}

/// A key that probably ranks a little below the row's k-th, or kNanKey = no threshold.
template <class Element>
std::uint32_t sampled_threshold(const RowScores& row, int k, const ThresholdScratch& scratch) {
  const std::int64_t sample = sample_size(row.len, k);
  if (sample == 0) return kNanKey;
  // All misses at once: the loop below has too few loads in flight to overlap them.
  for (std::int64_t i = 0; i < sample; i += kSampleRun)
    __builtin_prefetch(row.data + sample_place(i, sample, row.len) * Element::kBytes);
  KeyRange range;
  for (std::int64_t i = 0; i < sample; ++i) {
    const std::uint32_t key =
        ordered_key(Element::bits(row.data, sample_place(i, sample, row.len)));
    scratch.keys[i] = key;
    range.include(key);
  }
  return find_cut(scratch.keys, sample, range, sample_rank(sample, row.len, k), scratch.digits).key;
}

/// ThresholdScan::floor of a key above kNanKey.
std::int32_t scan_floor(std::uint32_t threshold) {
  const std::uint32_t at_least = std::max(threshold, kNegativeInfinityKey);
  // −0 sits just below +0 in the scan's integers; a threshold of zero admits both.
  const std::uint32_t zero = ordered_key(0);
  return std::bit_cast<std::int32_t>((at_least == zero ? zero - 1 : at_least) ^ 0x80000000u) - 1;
}

template <class Element>
void select(const RowScores& row, int k, const ThresholdScratch& scratch, ScanFunction scan_row,
            std::int32_t* picks) {
  std::uint32_t threshold = sampled_threshold<Element>(row, k, scratch);
  ThresholdScan scan;
  scan.row = row.data;
  scan.len = row.len;
  scan.indices = scratch.survivors;
  for (;;) {
    scan.position = scan.count = 0;
    if (threshold == kNanKey) {
      scan.position = scan.count = std::min(row.len, scratch.capacity);
      std::iota(scan.indices, scan.indices + scan.count, 0);
    } else {
      scan.floor = scan_floor(threshold);
      scan.stop = k;
      scan_row(scan);
      // k are in: from here on an equal of the threshold would lose the tie.
      ++threshold;
    }
    while (scan.position < row.len && threshold <= kPositiveInfinityKey) {
      if (scan.count >= scratch.capacity) {
        threshold = cut_back<Element>(row, scratch, scan.count, k, scan.indices) + 1;
        scan.count = k;
      }
      scan.floor = scan_floor(threshold);
      scan.stop = scratch.capacity;
      scan_row(scan);
    }
    if (scan.count >= k) break;
    threshold = kNanKey;
  }
  cut_back<Element>(row, scratch, scan.count, k, picks);
}

/// `kAvx2` picks the build of the scan.
template <bool kAvx2>
struct Threshold {
  using Scratch = ThresholdScratch;
  static constexpr bool kAscending = true;

  static Scratch carve(const SelectProblem& problem, int threads, WorkspaceCarver& carver) {
    return carve_threshold(problem, threads, carver);
  }

  static void select_row(const RowScores& row, int k, const Scratch& scratch, std::int32_t* picks) {
    row.type == ScoreType::f32
        ? select<Float32>(row, k, scratch, kAvx2 ? scan_f32_avx2 : scan_f32_baseline, picks)
        : select<BFloat16>(row, k, scratch, kAvx2 ? scan_bf16_avx2 : scan_bf16_baseline, picks);
  }
};

}  // namespace

SelectEntry cpu_threshold_avx2_entry() {
  return {"cpu_threshold_avx2",
          Backend::cpu,
          "one read behind a sampled threshold, 8 lanes",
          [](const SelectProblem&) { return cpu::why_not_avx2_fma(); },
          workspace_bytes<Threshold<true>>,
          select_rows<Threshold<true>>};
}

SelectEntry cpu_threshold_entry() {
  return {"cpu_threshold",
          Backend::cpu,
          "one read behind a sampled threshold, 4 lanes",
          [](const SelectProblem&) { return std::string(); },
          workspace_bytes<Threshold<false>>,
          select_rows<Threshold<false>>};
}

}  // namespace sparse_mla::topk
