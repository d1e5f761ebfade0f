// What only a device has: streams, graphs, the arena's copies. The layer is captured with every
// path in the strictest mode, in which an allocation or a synchronisation is an error; a decode
// step is captured once and replayed with other lengths.
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/device_arena.h"
#include "sparse_mla/layer.h"

#include "tests/support/captured_graph.h"
#include "tests/support/layer_runner.h"
#include "tests/support/padded_step.h"
#include "tests/support/run_entry.h"

namespace sparse_mla {
namespace {

using support::CapturedGraph;
using support::DeviceMemory;
using support::DeviceMirror;
using support::DeviceStream;
using support::LayerData;
using support::LayerProblem;
using support::LayerWeights;
using support::PaddedStep;
using support::StepLengths;

constexpr std::int32_t kTopk = 256, kLongest = 3000;

Limits limits_of() {
  Limits limits;
  limits.dims.num_heads = 16;
  limits.dims.index_topk = kTopk;
  limits.dims.index_n_heads = 16;
  limits.max_num_tokens = 2048;
  limits.max_num_seqs = 16;
  limits.max_model_len = kLongest;
  limits.workspace_rows = 1000;
  limits.decode_threshold = 2;
  return limits;
}

struct Batch {
  std::vector<std::int32_t> query_lens, context_lens;
  AttentionPath path;
};

Batch batch_of(AttentionPath path) {
  if (path == AttentionPath::dense) return {{1, 20, 64, 100}, {2000, 44, 0, 150}, path};
  return {{1, 300, 64, 2}, {2000, 1100, 0, 900}, path};
}

LayerProblem problem_of(const Limits& limits, const Batch& batch, std::uint64_t seed) {
  LayerProblem problem;
  problem.dims = limits.dims;
  problem.query_lens = batch.query_lens;
  problem.context_lens = batch.context_lens;
  problem.seed = seed;
  return problem;
}

// The layer's choice of paths goes by measured times where Hopper's kernel serves, which goes by
// the device and by the widths.
TEST(CudaRun, ChoosesPathsByWhatServes) {
  int major = 0, minor = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  ASSERT_EQ(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), cudaSuccess);
  Dispatch dispatch;
  dispatch.backend = Backend::cuda;
  Limits limits = limits_of();
  EXPECT_EQ(Capacity(limits, dispatch).path_machine(),
            major == 9 && minor == 0 ? PathMachine::hopper : PathMachine::gpu);
  limits.dims.v_head_dim = 96;
  EXPECT_EQ(Capacity(limits, dispatch).path_machine(), PathMachine::gpu);
  dispatch.backend = Backend::cpu;
  EXPECT_EQ(Capacity(limits, dispatch).path_machine(), PathMachine::cpu);
}

// Stream capture in global mode refuses every call that allocates, synchronises or touches the
// default stream: what a run enqueues is launches alone.
TEST(CudaRun, LaunchesOnly) {
  const Limits limits = limits_of();
  const Dispatch dispatch = support::tested_dispatch();
  const Capacity capacity(limits, dispatch);
  const DeviceMemory workspace(capacity.workspace_bytes());
  const DeviceStream stream;
  for (const AttentionPath path :
       {AttentionPath::dense, AttentionPath::masked, AttentionPath::sparse}) {
    SCOPED_TRACE(to_string(path));
    const Batch b = batch_of(path);
    LayerData eager(problem_of(limits, b, 5)), captured(problem_of(limits, b, 5));
    BatchOptions options;
    options.path = path;
    const BatchMetadata batch(capacity, b.query_lens, b.context_lens, options);
    support::LayerRunner(capacity).run(batch, eager.tensors());

    DeviceMirror mirror;
    const LayerTensors moved = mirror_call(limits, captured.tensors(), mirror);
    DeviceMemory arena(batch.arena().size());
    support::copy_to_device(arena.data(), batch.arena().data(), batch.arena().size());
    RunOptions run_options;
    run_options.arena = arena.data();
    const CapturedGraph graph(stream, [&] {
      run_layer(capacity, batch, moved, workspace.span(), stream.get(), run_options);
    });
    for (const cudaGraphNodeType type : graph.node_types())
      EXPECT_TRUE(type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeMemset) << type;
    graph.launch(stream);
    stream.synchronize();
    mirror.download();
    for (std::int64_t token = 0; token < eager.num_tokens(); ++token)
      for (int head = 0; head < limits.dims.num_heads; ++head) {
        ASSERT_EQ(eager.lse(token, head), captured.lse(token, head)) << token;
        ASSERT_EQ(std::memcmp(eager.out(token, head), captured.out(token, head),
                              sizeof(bfloat16) * limits.dims.v_head_dim),
                  0)
            << token;
      }
  }
}

// Records in host memory would be read by kernels.
TEST(CudaRun, NeedsTheArenaOnTheDevice) {
  const Limits limits = limits_of();
  const Capacity capacity(limits, support::tested_dispatch());
  const Batch b = batch_of(AttentionPath::sparse);
  LayerData data(problem_of(limits, b, 5));
  DeviceMirror mirror;
  const LayerTensors moved = mirror_call(limits, data.tensors(), mirror);
  const BatchMetadata batch(capacity, b.query_lens, b.context_lens);
  const DeviceMemory workspace(capacity.workspace_bytes());
  const DeviceStream stream;
  EXPECT_THROW(run_layer(capacity, batch, moved, workspace.span(), stream.get()),
               std::invalid_argument);
}

struct Results {
  std::vector<std::int32_t> picks;
  std::vector<float> lse;
  std::vector<bfloat16> out;
  bool operator==(const Results& other) const {
    return support::same_bits(picks, other.picks) && support::same_bits(lse, other.lse) &&
           support::same_bits(out, other.out);
  }
};
Results results_of(const PaddedStep& step) { return {step.picks(), step.lse(), step.out()}; }

// Captured with one set of lengths, replayed with others: 0, 1, k − 1, k + 1, the limit.
TEST(CudaGraph, ADecodeStepIsReplayedWithOtherLengths) {
  constexpr std::int32_t kRows = 2;
  const StepLengths steps[] = {
      {{1, 1, 1, 1, 1, 1}, {9, 9, 9, 9, 9, 9}},
      {{0, 1, 1, 2, 2, 2}, {0, 0, kTopk - 2, kTopk - 1, kTopk, kLongest - 2}},
      {{2, 2, 0, 1, 1, 2}, {kLongest - 2, 1300, 0, 0, kTopk, 100}},
      {{0, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 0}},
      {{2, 2, 2, 2, 2, 2}, std::vector<std::int32_t>(6, kLongest - 2)},
  };
  const Limits limits = limits_of();
  const Dispatch dispatch = support::tested_dispatch();
  const Capacity capacity(limits, dispatch);
  const DeviceMemory workspace(capacity.workspace_bytes());
  const DeviceStream stream;
  DeviceArena arena(capacity.max_arena_bytes());
  BatchOptions options;
  options.padded_query_len = kRows;
  const auto weights = std::make_shared<LayerWeights>(limits.dims, 3);
  PaddedStep step(limits, 6, kRows);
  step.fill(steps[0], weights, 1);
  // The tensors' place on the device: taken once, filled again before every step.
  DeviceMirror mirror;
  const LayerTensors moved = mirror_call(limits, step.tensors(), mirror);
  RunOptions run_options;
  const auto plan = [&](const StepLengths& lengths) {
    const BatchMetadata batch(capacity, lengths.query_lens, lengths.context_lens, options, {},
                              arena.next());
    run_options.arena = arena.upload(batch, stream.get());
    return batch.num_tokens();
  };
  ASSERT_EQ(plan(steps[0]), 12);
  const BatchMetadata captured(capacity, steps[0].query_lens, steps[0].context_lens, options);
  const CapturedGraph graph(stream, [&] {
    run_layer(capacity, captured, moved, workspace.span(), stream.get(), run_options);
  });

  std::vector<Results> replayed;
  for (std::size_t i = 0; i < std::size(steps); ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    step.fill(steps[i], weights, 10 + i);
    mirror.refresh();
    support::fill_device(workspace.data(), 0xFF, workspace.size());
    plan(steps[i]);
    graph.launch(stream);
    stream.synchronize();
    mirror.download();
    const auto errors = measure_step(step, limits);
    EXPECT_TRUE(errors.within_bf16()) << errors;
    replayed.push_back(results_of(step));

    step.fill(steps[i], weights, 10 + i);
    const BatchMetadata batch(capacity, steps[i].query_lens, steps[i].context_lens, options);
    support::LayerRunner(capacity).run(batch, step.tensors());
    EXPECT_TRUE(results_of(step) == replayed.back()) << "an eager run gives other bits";
  }

  // A large eager prefill on the same stream and workspace in between changes nothing.
  const Batch b = batch_of(AttentionPath::masked);
  LayerData prefill(problem_of(limits, b, 77));
  DeviceMirror prefill_mirror;
  const LayerTensors prefill_tensors = mirror_call(limits, prefill.tensors(), prefill_mirror);
  for (std::size_t i = 0; i < std::size(steps); ++i) {
    SCOPED_TRACE("again, step " + std::to_string(i));
    {
      BatchOptions masked;
      masked.path = AttentionPath::masked;
      const BatchMetadata batch(capacity, b.query_lens, b.context_lens, masked, {}, arena.next());
      RunOptions prefill_options;
      prefill_options.arena = arena.upload(batch, stream.get());
      run_layer(capacity, batch, prefill_tensors, workspace.span(), stream.get(), prefill_options);
    }
    step.fill(steps[i], weights, 10 + i);
    mirror.refresh();
    plan(steps[i]);
    graph.launch(stream);
    stream.synchronize();
    mirror.download();
    EXPECT_TRUE(results_of(step) == replayed[i]);
  }
}

TEST(DeviceArenaTest, RefusesABatchPlannedElsewhere) {
  const Dispatch dispatch = support::tested_dispatch();
  const Capacity capacity(limits_of(), dispatch);
  const std::vector<std::int32_t> query_lens{1}, context_lens{7};
  DeviceArena small(1);
  const DeviceStream stream;
  const BatchMetadata batch(capacity, query_lens, context_lens, {}, {}, small.next());
  EXPECT_THROW(small.upload(batch, stream.get()), std::invalid_argument);
  EXPECT_THROW(DeviceArena(1, 0), std::invalid_argument);
}

// Batches planned one after the other into two host arenas, their copies behind work that keeps the
// stream busy: none may overwrite a copy in flight.
TEST(DeviceArenaTest, PlanningAheadKeepsWhatIsInFlight) {
  const Dispatch dispatch = support::tested_dispatch();
  const Capacity capacity(limits_of(), dispatch);
  DeviceArena arena(capacity.max_arena_bytes());
  const DeviceStream stream;
  const DeviceMemory busy(std::size_t{1} << 28);
  constexpr int kBatches = 20;
  std::vector<DeviceMemory> seen;
  std::vector<std::vector<std::byte>> expected;
  for (int i = 0; i < kBatches; ++i) {
    const std::vector<std::int32_t> query_lens(8, 100), context_lens(8, 10 * i + 5);
    const BatchMetadata batch(capacity, query_lens, context_lens, {}, {}, arena.next());
    support::check_runtime(cudaMemsetAsync(busy.data(), i, busy.size(), stream.get()));
    const std::byte* on_device = arena.upload(batch, stream.get());
    seen.emplace_back(batch.arena().size());
    support::check_runtime(cudaMemcpyAsync(seen.back().data(), on_device, batch.arena().size(),
                                           cudaMemcpyDeviceToDevice, stream.get()));
    expected.emplace_back(batch.arena().begin(), batch.arena().end());
  }
  stream.synchronize();
  for (int i = 0; i < kBatches; ++i) {
    std::vector<std::byte> got(expected[i].size());
    support::copy_to_host(got.data(), seen[i].data(), got.size());
    EXPECT_TRUE(got == expected[i]) << "batch " << i;
  }
}

}  // namespace
}  // namespace sparse_mla
