// Every CPU selector on rows × length × k × data. `items_per_second` counts rows; `GB/s` counts one
// read of the scores, so that selectors which read them more often show it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <benchmark/benchmark.h>

#include "sparse_mla/select.h"
#include "sparse_mla/workspace.h"

#include "tests/support/score_data.h"

namespace sparse_mla {
namespace {

using support::ScoreData;

struct Shape {
  std::int64_t rows, len;
  int k;
};
/// The first is the one that speed claims refer to; then one decode row, a prefill piece, short
/// rows, one very long row, and k above half of the row.
constexpr Shape kShapes[] = {{64, 131072, 2048}, {1, 131072, 2048},  {256, 32768, 2048},
                             {1024, 4096, 2048}, {1, 1048576, 2048}, {64, 131072, 64},
                             {16, 131072, 80000}};

void select(benchmark::State& state, const std::string& entry_name, const Shape& shape,
            ScoreData data) {
  std::vector<float> scores(static_cast<std::size_t>(shape.rows * shape.len));
  for (std::int64_t r = 0; r < shape.rows; ++r)
    support::fill_scores(data, {scores.data() + r * shape.len, static_cast<std::size_t>(shape.len)},
                         1, static_cast<std::uint64_t>(r));
  std::vector<std::int32_t> picks(static_cast<std::size_t>(shape.rows * shape.k));

  SelectCall call;
  call.scores = {scores.data(), ScoreType::f32, shape.rows, shape.len, shape.len, nullptr};
  call.indices = contiguous(picks.data(), shape.rows, shape.k);
  const SelectProblem problem = problem_of(call);
  Dispatch dispatch;
  dispatch.backend = Backend::cpu;
  dispatch.forced["select"] = entry_name;
  const auto& operation = select_operation();
  const auto& entry = operation.choose(problem, dispatch);
  const std::size_t bytes = entry.workspace_bytes(problem);
  std::vector<std::byte> memory(bytes + kWorkspaceAlignment);
  void* base = memory.data();
  std::size_t space = memory.size();
  std::align(kWorkspaceAlignment, bytes, base, space);
  const std::span<std::byte> workspace(static_cast<std::byte*>(base), bytes);

  for (auto _ : state) {
    operation.run(entry, problem, call, workspace, nullptr);
    benchmark::DoNotOptimize(picks.data());
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * shape.rows);
  state.counters["GB/s"] = benchmark::Counter(static_cast<double>(scores.size() * sizeof(float)) *
                                                  1e-9 * static_cast<double>(state.iterations()),
                                              benchmark::Counter::kIsRate);
}

[[maybe_unused]] const bool registered = [] {
  for (const Shape& shape : kShapes)
    for (const ScoreData data : support::kAllScoreData)
      for (const auto& entry : select_operation().entries()) {
        if (entry.backend != Backend::cpu || !entry.why_not({}).empty()) continue;
        // The reference takes longer than all others together.
        if (std::string_view(entry.name) == "cpu_sort" && &shape != &kShapes[0]) continue;
        const std::string name =
            std::string("select/") + entry.name + "/rows:" + std::to_string(shape.rows) +
            "/len:" + std::to_string(shape.len) + "/k:" + std::to_string(shape.k) + "/" +
            std::string(support::to_string(data));
        benchmark::RegisterBenchmark(
            name.c_str(), [entry_name = std::string(entry.name), shape, data](
                              benchmark::State& state) { select(state, entry_name, shape, data); })
            ->Unit(benchmark::kMicrosecond)
            ->UseRealTime()
            ->MeasureProcessCPUTime();
      }
  return true;
}();

}  // namespace
}  // namespace sparse_mla
