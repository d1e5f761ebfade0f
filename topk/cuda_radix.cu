// Selector "cuda_radix": exact radix selection, one CTA per row.
//
//   row (global) ──narrow──▶ cut after 11, 22, 32 bits ──compact──▶ candidates (shared memory)
//                                                        candidates ──narrow, compact──▶ picks
//
// `narrow` counts the digits of the keys that are still in play and finds the digit of the k-th
// key. As soon as the keys at or above the cut fit shared memory, which the counts say before
// anything is stored, they are compacted there and the row is not read again: normal data are read
// twice, rows that fit at once are read once. Data that never fit (ties by the thousand) are read
// once per digit and once more: nothing depends on a buffer being large enough.
//
// `compact` keeps the order of the indices (a block-wide prefix sum per tile), so picks ascend, the
// lowest indices win ties, and the result does not depend on the launch. Descending order is a
// bitonic sort of (key, index) afterwards. (Radix selection: Alabi, Blanchard, Gordon, Steinbach,
// "Fast k-selection algorithms for graphics processing units", JEA 17, 2012.)
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "kernels/cuda/device.h"
#include "sparse_mla/workspace.h"
#include "topk/cuda_algorithms.h"
#include "topk/device_rows.cuh"
#include "topk/order_by_value.cuh"
#include "topk/ordered_key.h"
#include "topk/select_checks.h"
#include "topk/why_rather_not.h"

namespace sparse_mla::cuda {
namespace {

using topk::ordered_key;

constexpr int kMaxThreads = 1024;
/// Digits of 11, 11 and 10 bits. bf16 keys differ in their upper 16 bits alone: two digits do.
constexpr int kBins = 1 << 11;
__host__ __device__ constexpr int digit_shift(int digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}
__host__ __device__ constexpr std::uint32_t digit_mask(int digit) {
  return digit == 2 ? 1023 : 2047;
}
template <class Element>
__host__ __device__ constexpr int num_digits() {
  return Element::kBytes == 2 ? 2 : 3;
}

/// What a row's work shares beside its candidates.
struct Shared {
  std::uint32_t histogram[kBins];
  std::uint32_t warp_sums[2][32];
  std::uint32_t bin, above, in_bin;
};

/// How much of the row a block holds in shared memory, 8 bytes each.
struct Capacity {
  int candidates;  // keys with their indices; a multiple of 4
  int ranks;       // picks that are sorted there, a power of two; more are sorted in the workspace
  constexpr int bytes() const { return 8 * (candidates + ranks); }
};

/// Normal data leave some 3,000 of 131,072 keys after one digit at k = 2048, some 5,100 of a
/// million. With the sort's 32 KiB and the histogram 6,144 stay within the 99 KiB of the smaller
/// cards, and two CTAs fit an SM of the larger. Less shared memory is shared out evenly.
constexpr Capacity capacity_for(int max_shared_bytes) {
  const int room = (max_shared_bytes - static_cast<int>(sizeof(Shared))) / 8;
  const int ranks =
      std::min(4096, static_cast<int>(std::bit_floor(static_cast<unsigned>(room) / 2)));
  return {std::min(6144, (room - ranks) / 4 * 4), ranks};
}
static_assert(capacity_for(99 * 1024).candidates == 6144 && capacity_for(99 * 1024).ranks == 4096);
static_assert(capacity_for(48 * 1024).candidates >= 2048);
Capacity capacity() { return capacity_for(current_device().max_shared_bytes); }

/// Threads of a CTA: enough that a row's prefix sums span few tiles, few enough that several short
/// rows share an SM. A few long rows get all the threads that a CTA may have.
int threads_for(std::int64_t rows, std::int64_t row_len, int num_sms) {
  if (row_len <= 2048) return 128;
  if (rows <= num_sms) return kMaxThreads;
  return row_len <= 16384 ? 256 : 512;
}

/// CTAs whose picks are sorted in the workspace: two per SM, each with scratch of its own.
std::int64_t sorting_ctas(const SelectProblem& problem) {
  return std::min<std::int64_t>(problem.max_rows, 2 * current_device().num_sms);
}
bool sorts_in_workspace(const SelectProblem& problem) {
  return problem.order == SelectOrder::by_value && sort_size(problem) > capacity().ranks;
}

struct Settings {
  int k;
  std::int64_t max_row_len;
  bool by_value;
  int candidates;        // capacity, a multiple of 4
  std::uint64_t* ranks;  // [grid, ranks_stride] in the workspace; null: in shared memory
  std::int64_t ranks_stride;
};

/// Keys in global memory, 16 bytes at a time where the row allows it. The first vector starts at
/// the 16-byte boundary at or before the row; its elements before the row are not valid.
template <class Element>
struct RowSource {
  static constexpr int kVector = static_cast<int>(16 / Element::kBytes);
  const std::byte* data;
  std::int64_t len;
  int head;      // elements between that boundary and the row
  bool aligned;  // to the element: else elements are read byte by byte

  __device__ RowSource(const std::byte* row, std::int64_t row_len) : data(row), len(row_len) {
    const auto odd = static_cast<int>(reinterpret_cast<std::uintptr_t>(row) % 16);
    aligned = odd % static_cast<int>(Element::kBytes) == 0;
    head = aligned ? odd / static_cast<int>(Element::kBytes) : 0;
  }

  __device__ int num_vectors() const {
    return static_cast<int>((len + head + kVector - 1) / kVector);
  }
  /// Bit i of the result: element i of vector v belongs to the row.
  __device__ unsigned load(int v, uint4& raw) const {
    const std::int64_t first = std::int64_t{v} * kVector - head;
    if (aligned && first >= 0 && first + kVector <= len) {
      raw = *reinterpret_cast<const uint4*>(data + first * Element::kBytes);
      return (1u << kVector) - 1;
    }
    std::uint32_t words[4] = {};
    unsigned valid = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (first + i < 0 || first + i >= len) continue;
      valid |= 1u << i;
      const std::uint32_t bits = Element::bits(data, first + i);
      if constexpr (kVector == 4)
        words[i] = bits;
      else
        words[i / 2] |= i % 2 == 0 ? bits >> 16 : bits;
    }
    raw = make_uint4(words[0], words[1], words[2], words[3]);
    return valid;
  }
  __device__ static std::uint32_t key(const uint4& raw, int i) {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    if constexpr (kVector == 4)
      return ordered_key(words[i]);
    else
      return ordered_key(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000u);
  }
  __device__ std::int32_t index(int v, int i) const {
    return static_cast<std::int32_t>(std::int64_t{v} * kVector - head + i);
  }
};

/// Candidates in shared memory, by ascending index.
struct SharedSource {
  static constexpr int kVector = 4;
  const std::uint32_t* keys;      // [len], 16-byte aligned, readable to a multiple of 4
  const std::int32_t* positions;  // [len] their indices in the row
  int len;

  __device__ int num_vectors() const { return (len + kVector - 1) / kVector; }
  __device__ unsigned load(int v, uint4& raw) const {
    raw = *reinterpret_cast<const uint4*>(keys + v * kVector);
    const int valid = min(len - v * kVector, kVector);
    return (1u << valid) - 1;
  }
  __device__ static std::uint32_t key(const uint4& raw, int i) {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    return words[i];
  }
  __device__ std::int32_t index(int v, int i) const { return positions[v * kVector + i]; }
};

/// What is known of the k-th key: of keys whose `known` bits are `value`, the first `wanted` are
/// selected; keys above are selected, keys below are not.
struct Cut {
  std::uint32_t value, known, wanted;
  std::uint32_t equal;  // keys whose known bits are `value`
};

/// Prefix sums over a block's threads. The two rows of `warp_sums` take turns, so that one barrier
/// per sum is enough: who writes a row again has passed the barrier that followed its last reading.
class BlockScan {
 public:
  __device__ explicit BlockScan(Shared& shared) : shared_(shared) {}

  /// The sum over the threads before this one; `total` over all. Every thread calls it.
  __device__ std::uint32_t exclusive(std::uint32_t value, std::uint32_t& total) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    std::uint32_t* const sums = shared_.warp_sums[turn_];
    turn_ ^= 1;
    const std::uint32_t inclusive = inclusive_in_warp(value, lane);
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    const std::uint32_t of_warps =
        inclusive_in_warp(lane < static_cast<int>(blockDim.x) / 32 ? sums[lane] : 0, lane);
    total = __shfl_sync(~0u, of_warps, 31);
    const std::uint32_t before = __shfl_sync(~0u, of_warps, max(warp - 1, 0));
    return inclusive - value + (warp == 0 ? 0 : before);
  }

 private:
  __device__ static std::uint32_t inclusive_in_warp(std::uint32_t value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const std::uint32_t other = __shfl_up_sync(~0u, value, step);
      if (lane >= step) value += other;
    }
    return value;
  }

  Shared& shared_;
  int turn_ = 0;
};

/// Adds the digits of all keys in play to the histogram.
template <class Source>
__device__ void count_digits(const Source& source, int digit, const Cut& cut,
                             std::uint32_t* histogram) {
  constexpr int kLoads = 4;  // vectors in flight per thread
  const int shift = digit_shift(digit);
  const std::uint32_t mask = digit_mask(digit);
  const int threads = static_cast<int>(blockDim.x), vectors = source.num_vectors();
  // Neighbours with one digit are added at once: rows of equal scores would queue at one counter.
  std::uint32_t run_bin = 0, run = 0;
  for (std::int64_t v = threadIdx.x; v < vectors; v += kLoads * threads) {
    uint4 raw[kLoads];
    unsigned valid[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const std::int64_t w = v + std::int64_t{u} * threads;
      valid[u] = w < vectors ? source.load(static_cast<int>(w), raw[u]) : 0;
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u)
#pragma unroll
      for (int i = 0; i < Source::kVector; ++i) {
        if ((valid[u] >> i & 1) == 0) continue;
        const std::uint32_t key = Source::key(raw[u], i);
        if ((key & cut.known) != cut.value) continue;
        const std::uint32_t bin = key >> shift & mask;
        if (bin != run_bin && run != 0) {
          atomicAdd(&histogram[run_bin], run);
          run = 0;
        }
        run_bin = bin;
        ++run;
      }
  }
  if (run != 0) atomicAdd(&histogram[run_bin], run);
}

/// One more digit of the k-th key. Every thread returns with the same cut.
template <class Source>
__device__ void narrow(const Source& source, int digit, Cut& cut, Shared& shared, BlockScan& scan) {
  const int threads = static_cast<int>(blockDim.x), t = static_cast<int>(threadIdx.x);
  for (int bin = t; bin < kBins; bin += threads) shared.histogram[bin] = 0;
  __syncthreads();
  count_digits(source, digit, cut, shared.histogram);
  __syncthreads();
  // Thread t owns `per_thread` bins, the first thread the highest ones.
  const int per_thread = kBins / threads, top = kBins - 1 - t * per_thread;
  std::uint32_t sum = 0, total = 0;
  for (int j = 0; j < per_thread; ++j) sum += shared.histogram[top - j];
  std::uint32_t above = scan.exclusive(sum, total);
  if (above < cut.wanted && cut.wanted - above <= sum) {
    int bin = top;
    while (cut.wanted - above > shared.histogram[bin]) above += shared.histogram[bin--];
    shared.bin = static_cast<std::uint32_t>(bin);
    shared.above = above;
    shared.in_bin = shared.histogram[bin];
  }
  __syncthreads();
  cut.value |= shared.bin << digit_shift(digit);
  cut.known |= digit_mask(digit) << digit_shift(digit);
  cut.wanted -= shared.above;
  cut.equal = shared.in_bin;
}

/// Calls sink(place, key, index) for `count` keys, places 0 … count − 1 by ascending index: those
/// above the cut and the first `wanted` of those at it.
template <class Source, class Sink>
__device__ void compact(const Source& source, const Cut& cut, std::uint32_t wanted,
                        std::uint32_t count, BlockScan& scan, Sink sink) {
  constexpr int kVector = Source::kVector;
  static_assert(kVector * kMaxThreads < 1 << 16, "two counts of a tile share a word");
  const int threads = static_cast<int>(blockDim.x), vectors = source.num_vectors();
  std::uint32_t greater = 0, equal = 0;  // in the tiles before
  const auto load = [&](std::int64_t v, uint4& raw) {
    return v < vectors ? source.load(static_cast<int>(v), raw) : 0u;
  };
  uint4 next{};
  unsigned next_valid = load(threadIdx.x, next);
  for (std::int64_t first = 0; first < vectors; first += threads) {
    const uint4 raw = next;
    const unsigned valid = next_valid;
    next_valid = load(first + threads + threadIdx.x, next);  // while this tile is summed
    unsigned above = 0, at = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const std::uint32_t known = Source::key(raw, i) & cut.known;
      above |= static_cast<unsigned>(known > cut.value) << i;
      at |= static_cast<unsigned>(known == cut.value) << i;
    }
    above &= valid;
    at &= valid;
    std::uint32_t total = 0;
    const std::uint32_t before = scan.exclusive(
        static_cast<std::uint32_t>(__popc(above)) | static_cast<std::uint32_t>(__popc(at)) << 16,
        total);
    if ((above | at) != 0) {
      std::uint32_t g = greater + (before & 0xFFFFu), e = equal + (before >> 16);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const bool is_above = above >> i & 1, is_at = at >> i & 1;
        if (is_above || (is_at && e < wanted))
          sink(g + min(e, wanted), Source::key(raw, i),
               source.index(static_cast<int>(first) + static_cast<int>(threadIdx.x), i));
        g += is_above;
        e += is_at;
      }
    }
    greater += total & 0xFFFFu;
    equal += total >> 16;
    if (greater + min(equal, wanted) >= count) break;  // the same for every thread
  }
}

template <class Element>
__device__ void select_row(const SelectCall& call, const Settings& settings, std::int64_t r,
                           const DeviceRow& where, Shared& shared, std::uint32_t* dynamic) {
  const int t = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const std::byte* const row = where.scores;
  const std::int64_t len = where.len;
  std::int32_t* const picks = address(call.indices, where.out_row, 0);
  const std::int64_t count = len < settings.k ? len : settings.k;

  if (len <= settings.k) {
    for (std::int64_t j = t; j < count; j += threads) picks[j] = static_cast<std::int32_t>(j);
  } else {
    const auto k = static_cast<std::uint32_t>(settings.k);
    const RowSource<Element> source(row, len);
    BlockScan scan(shared);
    const auto emit = [&](std::uint32_t place, std::uint32_t, std::int32_t index) {
      picks[place] = index;
    };
    Cut cut{0, 0, k, static_cast<std::uint32_t>(len)};
    int digit = 0;
    const auto done = [&] { return digit == num_digits<Element>() || cut.equal == cut.wanted; };
    const auto at_or_above = [&] { return k - cut.wanted + cut.equal; };
    const auto capacity = static_cast<std::uint32_t>(settings.candidates);
    while (!done() && at_or_above() > capacity) narrow(source, digit++, cut, shared, scan);
    if (done()) {
      compact(source, cut, cut.wanted, k, scan, emit);
    } else {
      std::uint32_t* const keys = dynamic;
      auto* const positions = reinterpret_cast<std::int32_t*>(dynamic + settings.candidates);
      compact(source, cut, cut.equal, at_or_above(), scan,
              [&](std::uint32_t place, std::uint32_t key, std::int32_t index) {
                keys[place] = key;
                positions[place] = index;
              });
      __syncthreads();
      const SharedSource candidates{keys, positions, static_cast<int>(at_or_above())};
      while (!done()) narrow(candidates, digit++, cut, shared, scan);
      compact(candidates, cut, cut.wanted, k, scan, emit);
    }
  }
  if (settings.by_value) {
    if (settings.ranks != nullptr)
      order_by_value<Element>(row, picks, count,
                              settings.ranks + std::int64_t{blockIdx.x} * settings.ranks_stride);
    else
      order_by_value<Element>(
          row, picks, count,
          reinterpret_cast<std::uint64_t*>(dynamic + 2 * std::int64_t{settings.candidates}));
  }
  // Made here, not above: it would hold registers during the selection.
  const PickWriter writer(call, r, where.out_row);
  if (writer.wants_extras()) put_extras<Element>(writer, row, count);
  writer.pad(count, settings.k, t, threads);
  __syncthreads();  // the next row uses the same shared memory
}

template <class Element>
__global__ void __launch_bounds__(kMaxThreads)
    select_kernel(const __grid_constant__ SelectCall call,
                  const __grid_constant__ Settings settings) {
  extern __shared__ __align__(16) std::uint32_t dynamic[];  // candidates, then ranks
  __shared__ Shared shared;
  for (std::int64_t r = blockIdx.x; r < call.scores.num_rows; r += gridDim.x) {
    const DeviceRow row = row_of<Element>(call, settings.max_row_len, r);
    if (row.out_row >= 0) select_row<Element>(call, settings, r, row, shared, dynamic);
  }
}

std::uint64_t* carve(const SelectProblem& problem, WorkspaceCarver& carver) {
  return carver.take<std::uint64_t>(
      "select ranks", sorts_in_workspace(problem) ? sorting_ctas(problem) * sort_size(problem) : 0);
}

std::size_t workspace_bytes(const SelectProblem& problem) { return carved_bytes(problem, carve); }

template <class Element>
void launch(const SelectProblem& problem, const SelectCall& call, std::span<std::byte> workspace,
            Stream stream) {
  const std::int64_t rows = call.scores.num_rows;
  const std::int64_t row_len = std::min(call.scores.row_len, problem.max_row_len);
  const bool by_value = problem.order == SelectOrder::by_value;
  Settings settings{problem.k, problem.max_row_len, by_value, 0, nullptr, 0};
  settings.candidates =
      static_cast<int>(std::min<std::int64_t>(capacity().candidates, (row_len + 3) / 4 * 4));
  std::int64_t shared_ranks = 0;
  // Beyond this many rows CTAs loop; below, the hardware balances rows of unlike lengths.
  std::int64_t grid = std::min<std::int64_t>(rows, 1 << 20);
  if (sorts_in_workspace(problem)) {
    WorkspaceCarver carver(workspace);
    settings.ranks = carve(problem, carver);
    settings.ranks_stride = sort_size(problem);
    grid = std::min(grid, sorting_ctas(problem));
  } else if (by_value) {
    shared_ranks = sort_size(problem);
  }
  const auto shared_bytes = static_cast<std::size_t>(8 * (settings.candidates + shared_ranks));
  // Always the kernel's maximum: a smaller wish of another thread must not fail this launch.
  allow_shared(select_kernel<Element>, capacity().bytes());
  select_kernel<Element>
      <<<static_cast<unsigned>(grid), threads_for(rows, row_len, current_device().num_sms),
         shared_bytes, stream>>>(call, settings);
  check_launch("select_kernel");
}

void run(const SelectProblem& problem, const SelectCall& call, std::span<std::byte> workspace,
         Stream stream) {
  run_for_type(problem, call,
               [&]<class Element>(Element) { launch<Element>(problem, call, workspace, stream); });
}

}  // namespace
}  // namespace sparse_mla::cuda

namespace sparse_mla::topk {

SelectEntry cuda_radix_entry() {
  return {"cuda_radix",
          Backend::cuda,
          "a CTA per row: digit histograms, then ordered compaction",
          [](const SelectProblem&) { return cuda::why_no_device(); },
          cuda::workspace_bytes,
          cuda::run,
          why_rather_not<Selector::radix>};
}

}  // namespace sparse_mla::topk
