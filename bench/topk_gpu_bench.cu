// Top-k selectors on a GPU: every CUDA entry of `select`, and what the library takes by itself.
//
//   topk/<entry|auto>/<rows>x<len>/k<k>/<data>[/bf16][/cold]
//   topk/auto/<hinted|unhinted>/<rows>x<len>/<overlap80 …|replace90>
//
// Launches repeat on the same rows, behind 20 warm-ups, unless `cold` (the L2 cache is overwritten
// before each). "GB/s" counts one read of the scores, so that selectors which read them more often
// show it. Before anything is timed, the entry's picks are compared with cuda_radix's; wrong ones
// are an error. Neighbours in the list share their scores: they are made once, on the device.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "sparse_mla/select.h"
#include "topk/choice.h"
#include "topk/cub_topk.h"

#include "bench/support/gpu.cuh"
#include "bench/support/prepared.cuh"
#include "bench/support/topk_scores.cuh"

namespace sparse_mla::bench {
namespace {

using PreparedSelect = Prepared<SelectProblem, SelectCall>;

constexpr const char* kAuto = "auto";
/// An entry of its own for the reference, so that the figures of all others are checked.
constexpr const char* kReference = "cuda_radix";

struct Case {
  std::string entry;  ///< or kAuto
  Shape shape;
  int k;
  Data data;
  ScoreType type = ScoreType::f32;
  bool cold = false;

  std::string name() const {
    return "topk/" + entry + "/" + to_string(shape) + "/k" + std::to_string(k) + "/" +
           to_string(data) + (type == ScoreType::bf16 ? "/bf16" : "") + (cold ? "/cold" : "");
  }
};

SelectProblem problem_for(const Shape& shape, int k, ScoreType type) {
  SelectProblem problem;
  problem.max_rows = shape.rows;
  problem.max_row_len = shape.len;
  problem.k = k;
  problem.score_type = type;
  return problem;
}

/// picks [rows, k] ← the reference's, ascending.
void select_reference(const SelectCall& call, const SelectProblem& problem) {
  SelectProblem ascending = problem;
  ascending.order = SelectOrder::by_index;
  ascending.hinted = false;
  ascending.tie = TieBreak::lowest_index;
  const PreparedSelect prepared(select_operation(), ascending, kReference);
  prepared.run(call, nullptr);
  cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void require_right(std::int64_t wrong_rows) {
  if (wrong_rows != 0)
    throw std::runtime_error("wrong picks in " + std::to_string(wrong_rows) + " rows");
}

/// The scores of the benchmark before, and the picks wanted of them.
struct Current {
  std::unique_ptr<ScoreSet> scores;
  int k = 0;
  DeviceBuffer<std::int32_t> reference;  ///< [rows, k]
};

const Current& scores_and_reference(const Case& c) {
  static Current current;
  if (current.scores == nullptr || !current.scores->holds(c.shape, c.data, c.type)) {
    current = {};  // frees before it allocates
    current.scores = std::make_unique<ScoreSet>(c.shape, c.data, c.type);
  }
  if (current.k != c.k) {
    current.k = c.k;
    current.reference = DeviceBuffer<std::int32_t>(c.shape.rows * c.k);
    select_reference(current.scores->call(current.reference.data(), c.k),
                     problem_for(c.shape, c.k, c.type));
  }
  return current;
}

void select(benchmark::State& state, const Case& c, int warm_ups) {
  SelectProblem problem = problem_for(c.shape, c.k, c.type);
  // The one entry that promises nothing for ties.
  if (c.entry == "cuda_cub_topk") problem.tie = TieBreak::any;
  const PreparedSelect prepared(select_operation(), problem, c.entry == kAuto ? "" : c.entry);
  const Current& current = scores_and_reference(c);
  const DeviceBuffer<std::int32_t> picks(c.shape.rows * c.k);
  const SelectCall call = current.scores->call(picks.data(), c.k);
  prepared.run(call, nullptr);
  require_right(count_wrong_rows(call, current.reference.data(), problem.tie == TieBreak::any));
  const GpuTimes times = time_on_gpu(state, [&](int, Stream stream) { prepared.run(call, stream); },
                                     {.warm_ups = warm_ups, .flush_l2 = c.cold});
  state.SetLabel(prepared.name());
  count_bytes(state, times, current.scores->bytes());
}

/// Successive steps of decoding: each launch selects from the next step's scores, with the exact
/// picks of the step before as hints, or without.
void select_step_by_step(benchmark::State& state, const Shape& shape, const Change& change,
                         bool hinted, const std::string& entry) {
  constexpr int kPicks = 2048, kSteps = 8;
  SelectProblem problem = problem_for(shape, kPicks, ScoreType::f32);
  problem.hinted = hinted;
  const PreparedSelect prepared(select_operation(), problem, entry == kAuto ? "" : entry);

  static std::unique_ptr<StepScores> current;
  if (current == nullptr || !current->holds(shape, change)) {
    current.reset();
    current = std::make_unique<StepScores>(
        shape, change, kSteps, kPicks,
        [&](const SelectCall& call) { select_reference(call, problem); });
  }
  const DeviceBuffer<std::int32_t> picks(shape.rows * kPicks);
  std::vector<SelectCall> calls;
  for (int step = 0; step < kSteps; ++step) {
    calls.push_back(current->call(step, picks.data(), hinted));
    prepared.run(calls.back(), nullptr);
    require_right(count_wrong_rows(calls.back(), current->picks_of(step), false));
  }
  const GpuTimes times = time_on_gpu(
      state,
      [&](int step, Stream stream) { prepared.run(calls[static_cast<std::size_t>(step)], stream); },
      {.num_inputs = kSteps});
  state.SetLabel(prepared.name());
  state.counters["overlap"] = current->overlap();
  count_bytes(state, times, 4.0 * static_cast<double>(shape.rows * shape.len));
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

/// The shapes for which the best public kernels' times are known.
constexpr Shape kShapes[] = {{1, 8192},    {1, 32768},    {1, 131072},   {1, 524288},
                             {16, 32768},  {16, 131072},  {64, 8192},    {64, 32768},
                             {64, 131072}, {64, 524288},  {128, 262144}, {256, 8192},
                             {256, 32768}, {256, 131072}, {1024, 32768}, {1024, 131072},
                             {4096, 8192}, {4096, 32768}, {4096, 131072}};
/// More of them, between which the fastest of the library's own entries changes.
constexpr Shape kCrossovers[] = {{1, 4096},    {1, 16384},   {16, 8192},   {16, 16384},
                                 {64, 16384},  {128, 8192},  {128, 32768}, {128, 131072},
                                 {256, 16384}, {1024, 8192}, {4096, 4096}};
constexpr Shape kColdShapes[] = {{1, 131072}, {64, 32768}, {64, 131072}, {256, 32768}};
constexpr Shape kSmallerShapes[] = {{1, 131072}, {64, 32768}, {64, 131072}, {4096, 32768}};
constexpr Shape kBf16Shapes[] = {{64, 32768}, {64, 131072}, {4096, 131072}};
constexpr Shape kStepShapes[] = {{1, 131072}, {64, 32768}, {64, 131072}};

template <std::size_t kSize>
bool is_among(const Shape& shape, const Shape (&shapes)[kSize]) {
  return std::find(std::begin(shapes), std::end(shapes), shape) != std::end(shapes);
}

/// Names of the entries that are measured: auto, the library's own, then other libraries' ways.
struct Names {
  std::vector<std::string> own{kAuto}, others, hinted{kAuto};
};
Names entry_names() {
  Names names;
  for (const auto& entry : select_operation().entries()) {
    const std::string_view name = entry.name;
    if (entry.backend != Backend::cuda) continue;
    if (name == "cuda_cub_topk" && !cuda::has_cub_topk()) continue;
    (contains(name, "hinted")                            ? names.hinted
     : contains(name, "cub") || contains(name, "thrust") ? names.others
                                                         : names.own)
        .emplace_back(name);
  }
  return names;
}

void register_cases(const Case& c, const Names& names) {
  for (const std::string& entry : names.own) {
    if (entry == "cuda_cta" && c.shape.len > topk::kMaxCtaRowLen) continue;  // cannot
    Case of_entry = c;
    of_entry.entry = entry;
    register_gpu_bench(of_entry.name(),
                       [=](benchmark::State& state) { select(state, of_entry, 20); });
  }
  // Slow ones, for scale: plain calls alone, few launches.
  constexpr std::int64_t kMaxElements = std::int64_t{1} << 26;
  if (c.data != Data::normal || c.cold || c.k != 2048 || c.shape.rows * c.shape.len > kMaxElements)
    return;
  for (const std::string& entry : names.others) {
    // A launch per row and more: beyond this the host is what is measured.
    if (entry == "cuda_cub_topk" && c.shape.rows > 64) continue;
    Case of_entry = c;
    of_entry.entry = entry;
    register_gpu_bench(
        of_entry.name(), [=](benchmark::State& state) { select(state, of_entry, 2); }, 10);
  }
}

[[maybe_unused]] const bool registered = [] {
  const Names names = entry_names();
  for (const Shape& shape : kShapes) {
    for (const Data data : kAllData) {
      register_cases({"", shape, 2048, data}, names);
      if (data != Data::normal) continue;
      if (is_among(shape, kColdShapes))
        register_cases({"", shape, 2048, data, ScoreType::f32, true}, names);
      if (is_among(shape, kSmallerShapes))
        for (const int k : {512, 1024}) register_cases({"", shape, k, data}, names);
    }
    if (is_among(shape, kBf16Shapes))
      register_cases({"", shape, 2048, Data::normal, ScoreType::bf16}, names);
  }
  Names own = names;
  own.others.clear();
  for (const Shape& shape : kCrossovers) register_cases({"", shape, 2048, Data::normal}, own);

  for (const Shape& shape : kStepShapes)
    for (const Change& change : kAllChanges)
      for (const bool hinted : {true, false})
        for (const std::string& entry : names.hinted) {
          if (!hinted && entry != kAuto) continue;
          register_gpu_bench("topk/" + entry + (hinted ? "/hinted/" : "/unhinted/") +
                                 to_string(shape) + "/" + to_string(change),
                             [=](benchmark::State& state) {
                               select_step_by_step(state, shape, change, hinted, entry);
                             });
        }
  return true;
}();

}  // namespace
}  // namespace sparse_mla::bench
