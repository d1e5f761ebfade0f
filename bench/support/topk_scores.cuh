/// Rows of scores for selectors on a GPU: single sets, sequences in which the best change little
/// from step to step, and the comparison of picks with a reference's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "sparse_mla/random.h"
#include "sparse_mla/select.h"
#include "topk/ordered_key.h"

#include "bench/support/gpu.cuh"

namespace sparse_mla::bench {

struct Shape {
  std::int64_t rows, len;
  friend bool operator==(const Shape&, const Shape&) = default;
};
inline std::string to_string(const Shape& shape) {
  return std::to_string(shape.rows) + "x" + std::to_string(shape.len);
}

enum class Data {
  normal,
  narrow,  ///< 1 + 1e-4 · normal
  ties,    ///< normal on a grid of 0.5
  relu,    ///< max(0, normal): half of a row is equal
  ramp,    ///< ascending
  ragged,  ///< normal, lengths uniform in [0, len], one row full
};
inline constexpr Data kAllData[] = {Data::normal, Data::narrow, Data::ties,
                                    Data::relu,   Data::ramp,   Data::ragged};
inline std::string to_string(Data data) {
  constexpr const char* kNames[] = {"normal", "narrow", "ties", "relu", "ramp", "ragged"};
  return kNames[static_cast<int>(data)];
}

/// Standard normal with real tails (Box and Muller, 1958): random_normal's end at ±3.46, where the
/// best of a long row are.
__device__ inline float gaussian(std::uint64_t seed, std::uint64_t stream, std::int64_t i) {
  const RandomBlock block = random_block(seed, stream, static_cast<std::uint64_t>(i) >> 2);
  const int pair = static_cast<int>(i >> 1 & 1) * 2;
  const float radius =
      sqrtf(-2.0f * logf((static_cast<float>(block.word[pair] >> 8) + 0.5f) * 0x1p-24f));
  float sine, cosine;
  sincospif(static_cast<float>(block.word[pair + 1] >> 8) * 0x1p-23f, &sine, &cosine);
  return radius * ((i & 1) != 0 ? sine : cosine);
}

template <class T>
struct MakeScore {
  Data data;
  std::int64_t len;
  __device__ T operator()(std::int64_t i) const {
    if (data == Data::ramp) return static_cast<T>(static_cast<float>(i % len));
    const float x = gaussian(7, 0, i);
    return static_cast<T>(data == Data::narrow ? 1.0f + 1e-4f * x
                          : data == Data::ties ? 0.5f * rintf(2.0f * x)
                          : data == Data::relu ? fmaxf(x, 0.0f)
                                               : x);
  }
};

/// One set of scores on the device.
class ScoreSet {
 public:
  ScoreSet(const Shape& shape, Data data, ScoreType type)
      : shape_(shape), data_(data), type_(type) {
    const std::int64_t size = shape.rows * shape.len;
    if (type == ScoreType::f32) {
      floats_ = DeviceBuffer<float>(size);
      fill(floats_, MakeScore<float>{data, shape.len});
    } else {
      halves_ = DeviceBuffer<bfloat16>(size);
      fill(halves_, MakeScore<bfloat16>{data, shape.len});
    }
    std::int64_t elements = size;
    if (data == Data::ragged) {
      std::vector<std::int32_t> ends(static_cast<std::size_t>(shape.rows));
      elements = 0;
      for (std::size_t r = 0; r < ends.size(); ++r) {
        ends[r] = static_cast<std::int32_t>(
            r == 0 ? shape.len : random_bits(7, 1, r) % static_cast<std::uint64_t>(shape.len + 1));
        elements += ends[r];
      }
      ends_ = DeviceBuffer<std::int32_t>(ends);
    }
    bytes_ = static_cast<double>(elements) * (type == ScoreType::f32 ? 4 : 2);
  }

  bool holds(const Shape& shape, Data data, ScoreType type) const {
    return shape == shape_ && data == data_ && type == type_;
  }
  /// Selection into picks [rows, k].
  SelectCall call(std::int32_t* picks, int k) const {
    SelectCall call;
    const void* const data = type_ == ScoreType::f32 ? static_cast<const void*>(floats_.data())
                                                     : static_cast<const void*>(halves_.data());
    call.scores = {data, type_, shape_.rows, shape_.len, shape_.len, nullptr};
    call.ends = ends_.data();
    call.indices = contiguous(picks, shape_.rows, static_cast<std::int64_t>(k));
    return call;
  }
  /// Of all candidates.
  double bytes() const { return bytes_; }

 private:
  Shape shape_;
  Data data_;
  ScoreType type_;
  DeviceBuffer<float> floats_;  // [rows, len], or halves_
  DeviceBuffer<bfloat16> halves_;
  DeviceBuffer<std::int32_t> ends_;  // [rows], ragged alone
  double bytes_ = 0;
};

/// How the scores of one step follow from those of the step before.
struct Change {
  /// Per cent of the best that stay the best, wanted; the counter `overlap` says what it became.
  int kept;
  /// Each of the others changes places with any score that is not among the best. Else every score
  /// moves a little.
  bool replaces;
  friend bool operator==(const Change&, const Change&) = default;
};
inline constexpr Change kAllChanges[] = {
    {60, false}, {80, false}, {90, false}, {95, false}, {90, true}};
inline std::string to_string(const Change& change) {
  return (change.replaces ? "replace" : "overlap") + std::to_string(change.kept);
}

/// e of step t + 1 = sqrt(1 − e²) · step t + e · noise. The scores stay normal; with correlation ρ
/// = sqrt(1 − e²) and the quantile z of the best share p, P(next > z | now > z) = ∫_z^∞ φ(x) (1 −
/// Φ((z − ρx) / e)) dx / p was solved for e: p = 1/64 is 2,048 of 131,072, p = 1/16 of 32,768.
inline float noise_share(const Change& change, const Shape& shape) {
  const bool one_in_64 = shape.len >= 65536;
  switch (change.kept) {
    case 60:
      return one_in_64 ? 0.401f : 0.500f;
    case 80:
      return one_in_64 ? 0.200f : 0.254f;
    case 90:
      return one_in_64 ? 0.100f : 0.127f;
    default:
      return one_in_64 ? 0.050f : 0.064f;
  }
}

struct MakeNext {
  const float* before;
  float kept, noise;
  std::uint64_t step;
  __device__ float operator()(std::int64_t i) const {
    return kept * before[i] + noise * gaussian(8, step, i);
  }
};

struct MakeCopy {
  const float* before;
  __device__ float operator()(std::int64_t i) const { return before[i]; }
};

/// One thread per row: picks [rows, k] change places with scores that are not among the best, each
/// with probability 1 − kept. One after the other, so that no two take the same place.
__global__ inline void replace_kernel(float* scores, std::int64_t rows, std::int64_t len,
                                      const std::int32_t* picks, int k, float kept,
                                      std::uint64_t step) {
  const std::int64_t r = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (r >= rows) return;
  float* const row = scores + r * len;
  const std::int32_t* const best = picks + r * k;
  float least = row[best[0]];
  for (int j = 1; j < k; ++j) least = fminf(least, row[best[j]]);
  const auto stream = static_cast<std::uint64_t>(r);
  std::uint64_t draw = 0;
  for (int j = 0; j < k; ++j) {
    if (random_uniform(9 + step, stream, draw++) < kept) continue;
    std::int64_t other;
    do other = random_bits(9 + step, stream, draw++) % static_cast<std::uint64_t>(len);
    while (row[other] >= least);
    const float score = row[best[j]];
    row[best[j]] = row[other];
    row[other] = score;
  }
}

/// Scores of successive steps, with the exact picks of each.
class StepScores {
 public:
  /// `select` fills call.indices with a call's picks, ascending, and waits.
  StepScores(const Shape& shape, const Change& change, int steps, int k,
             const std::function<void(const SelectCall&)>& select)
      : shape_(shape), change_(change), k_(k) {
    const std::int64_t size = shape.rows * shape.len;
    const float noise = noise_share(change, shape);
    for (int step = 0; step <= steps; ++step) {
      scores_.emplace_back(size);
      picks_.emplace_back(shape.rows * k);
      if (step == 0) {
        fill(scores_[0], MakeScore<float>{Data::normal, shape.len});
      } else {
        const auto number = static_cast<std::uint64_t>(step);
        const float* const before = (scores_.end() - 2)->data();
        if (change.replaces) {
          fill(scores_.back(), MakeCopy{before});
          constexpr int kThreads = 32;
          const auto blocks = static_cast<unsigned>((shape.rows + kThreads - 1) / kThreads);
          replace_kernel<<<blocks, kThreads>>>(scores_.back().data(), shape.rows, shape.len,
                                               (picks_.end() - 2)->data(), k,
                                               0.01f * static_cast<float>(change.kept), number);
          cuda::check_launch("replace_kernel");
        } else {
          fill(scores_.back(), MakeNext{before, std::sqrt(1.0f - noise * noise), noise, number});
        }
      }
      SelectCall call;
      call.scores = scores(step);
      call.indices = contiguous(picks_.back().data(), shape.rows, static_cast<std::int64_t>(k));
      select(call);
    }
    measure_overlap();
  }

  bool holds(const Shape& shape, const Change& change) const {
    return shape == shape_ && change == change_;
  }
  /// Selection of step 0 … steps − 1 into picks [rows, k]; the hints are the picks before it.
  SelectCall call(int step, std::int32_t* picks, bool hinted) const {
    SelectCall call;
    call.scores = scores(step + 1);
    call.indices = contiguous(picks, shape_.rows, std::int64_t{k_});
    if (hinted)
      call.hints = contiguous(
          static_cast<const std::int32_t*>(picks_[static_cast<std::size_t>(step)].data()),
          shape_.rows, std::int64_t{k_});
    return call;
  }
  /// [rows, k] what that selection has to give, ascending.
  const std::int32_t* picks_of(int step) const {
    return picks_[static_cast<std::size_t>(step + 1)].data();
  }
  /// Mean share of a row's picks that were picks one step before.
  double overlap() const { return overlap_; }

 private:
  ScoreRows scores(int number) const {
    return {scores_[static_cast<std::size_t>(number)].data(),
            ScoreType::f32,
            shape_.rows,
            shape_.len,
            shape_.len,
            nullptr};
  }
  void measure_overlap() {
    std::int64_t common = 0;
    std::vector<std::int32_t> before = picks_[0].to_host();
    for (std::size_t step = 1; step < picks_.size(); ++step) {
      const std::vector<std::int32_t> now = picks_[step].to_host();
      for (std::int64_t r = 0; r < shape_.rows; ++r) {
        std::vector<std::int32_t> both;
        std::set_intersection(before.begin() + r * k_, before.begin() + (r + 1) * k_,
                              now.begin() + r * k_, now.begin() + (r + 1) * k_,
                              std::back_inserter(both));
        common += static_cast<std::int64_t>(both.size());
      }
      before = now;
    }
    overlap_ = static_cast<double>(common) /
               (static_cast<double>(picks_.size() - 1) * static_cast<double>(shape_.rows * k_));
  }

  Shape shape_;
  Change change_;
  int k_;
  std::vector<DeviceBuffer<float>> scores_;        // [rows, len] each
  std::vector<DeviceBuffer<std::int32_t>> picks_;  // [rows, k] each, ascending
  double overlap_ = 0;
};

/// One CTA per row: adds 1 to `wrong` where picks [k] are not the set of reference [k] (whose −1
/// come last), or, with `any`, no set that may stand for it where scores are equal. seen [rows,
/// (len + 31) / 32] is zero at first.
template <class Element>
__global__ void compare_picks_kernel(const std::byte* scores, std::int64_t len,
                                     const std::int32_t* picks, const std::int32_t* reference,
                                     std::int64_t k, bool any, std::uint32_t* seen,
                                     unsigned long long* wrong) {
  __shared__ std::uint32_t least;  // key of the reference's last
  __shared__ int count, bad;
  const std::int64_t r = blockIdx.x;
  scores += r * len * Element::kBytes;
  picks += r * k;
  reference += r * k;
  seen += r * ((len + 31) / 32);
  const auto key = [&](std::int32_t i) { return topk::ordered_key(Element::bits(scores, i)); };
  if (threadIdx.x == 0) {
    least = ~0u;
    count = bad = 0;
  }
  __syncthreads();
  for (std::int64_t j = threadIdx.x; j < k; j += blockDim.x)
    if (reference[j] >= 0) {
      atomicAdd(&count, 1);
      atomicMin(&least, key(reference[j]));
    }
  __syncthreads();
  for (std::int64_t j = threadIdx.x; j < k; j += blockDim.x) {
    const std::int32_t pick = picks[j];
    if (j >= count) {
      if (pick != -1) bad = 1;
    } else if (pick < 0 || pick >= len || key(pick) < least) {
      bad = 1;
    } else {
      const std::uint32_t bit = 1u << pick % 32;
      if ((atomicOr(&seen[pick / 32], bit) & bit) != 0) bad = 1;  // picked twice
    }
  }
  __syncthreads();
  for (std::int64_t j = threadIdx.x; j < count; j += blockDim.x) {
    const std::int32_t wanted = reference[j];
    if ((seen[wanted / 32] >> wanted % 32 & 1) == 0 && (!any || key(wanted) > least)) bad = 1;
  }
  __syncthreads();
  if (threadIdx.x == 0 && bad != 0) atomicAdd(wrong, 1ull);
}

/// Rows of call.indices (contiguous scores and picks) that differ from the reference's. Waits.
inline std::int64_t count_wrong_rows(const SelectCall& call, const std::int32_t* reference,
                                     bool any) {
  const ScoreRows& scores = call.scores;
  const DeviceBuffer<std::uint32_t> seen(scores.num_rows * ((scores.row_len + 31) / 32));
  const DeviceBuffer<unsigned long long> wrong(1);
  cuda::check(cudaMemset(seen.data(), 0, seen.bytes()), "cudaMemset");
  cuda::check(cudaMemset(wrong.data(), 0, wrong.bytes()), "cudaMemset");
  auto* const kernel = scores.type == ScoreType::f32 ? compare_picks_kernel<topk::Float32>
                                                     : compare_picks_kernel<topk::BFloat16>;
  kernel<<<static_cast<unsigned>(scores.num_rows), 256>>>(
      static_cast<const std::byte*>(scores.data), scores.row_len, call.indices.data_handle(),
      reference, call.indices.extent(1), any, seen.data(), wrong.data());
  cuda::check_launch("compare_picks_kernel");
  return static_cast<std::int64_t>(wrong.to_host().front());
}

}  // namespace sparse_mla::bench
