// Selection of 2,048 from rows of scores on a GPU. "GB/s" counts one read of the scores, so that
// selectors which read them more often show it.
#include <cstdint>
#include <string>

#include "sparse_mla/select.h"

#include "bench/support/gpu.cuh"
#include "bench/support/prepared.cuh"

namespace sparse_mla::bench {
namespace {

constexpr int kTopk = 2048;

/// Plain, all within a thousandth of each other, and a grid of a dozen values.
enum class Scores { normal, narrow, ties };
constexpr const char* name_of(Scores scores) {
  return scores == Scores::normal ? "normal" : scores == Scores::narrow ? "narrow" : "ties";
}

template <class T>
struct MakeScore {
  Scores scores;
  __device__ T operator()(std::int64_t i) const {
    const float x = random_normal(7, 0, static_cast<std::uint64_t>(i));
    return static_cast<T>(scores == Scores::normal   ? x
                          : scores == Scores::narrow ? 1.0f + 1e-4f * x
                                                     : 0.5f * rintf(2.0f * x));
  }
};

template <class T>
void select(benchmark::State& state, std::int64_t rows, std::int64_t len, Scores scores) {
  constexpr ScoreType kType = sizeof(T) == 4 ? ScoreType::f32 : ScoreType::bf16;
  const DeviceBuffer<T> data(rows * len);
  fill(data, MakeScore<T>{scores});
  const DeviceBuffer<std::int32_t> picks(rows * kTopk);
  SelectProblem problem;
  problem.max_rows = rows;
  problem.max_row_len = len;
  problem.k = kTopk;
  problem.score_type = kType;
  SelectCall call;
  call.scores = {data.data(), kType, rows, len, len, nullptr};
  call.indices = contiguous(picks.data(), rows, kTopk);
  const Prepared<SelectProblem, SelectCall> prepared(select_operation(), problem);
  const GpuTimes times =
      time_on_gpu(state, [&](int, Stream stream) { prepared.run(call, stream); });
  state.SetLabel(prepared.name());
  count_bytes(state, times, static_cast<double>(data.bytes()));
}

struct Shape {
  std::int64_t rows, len;
};
constexpr Shape kShapes[] = {{1, 8192},    {1, 32768},    {1, 131072},   {1, 524288},
                             {16, 32768},  {16, 131072},  {64, 8192},    {64, 32768},
                             {64, 131072}, {64, 524288},  {128, 262144}, {256, 8192},
                             {256, 32768}, {256, 131072}, {1024, 32768}, {1024, 131072},
                             {4096, 8192}, {4096, 32768}, {4096, 131072}};

[[maybe_unused]] const bool registered = [] {
  for (const Shape& shape : kShapes)
    for (const Scores scores : {Scores::normal, Scores::narrow, Scores::ties}) {
      const std::string name = std::string("select/") + std::to_string(shape.rows) + "x" +
                               std::to_string(shape.len) + "/" + name_of(scores);
      register_gpu_bench(
          name,
          [=](benchmark::State& state) { select<float>(state, shape.rows, shape.len, scores); },
          20);
      if (shape.len == 131072 && scores == Scores::normal)
        register_gpu_bench(
            name + "/bf16",
            [=](benchmark::State& state) {
              select<bfloat16>(state, shape.rows, shape.len, scores);
            },
            20);
    }
  return true;
}();

}  // namespace
}  // namespace sparse_mla::bench
