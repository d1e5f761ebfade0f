#include <exception>

#include "bench/support/gpu.cuh"

namespace sparse_mla::bench {
namespace {

/// Holds the stream back while the host enqueues what is timed behind it.
__global__ void wait_kernel(long long clocks) {
  const long long begin = clock64();
  while (clock64() - begin < clocks) {
  }
}
/// 50 µs at 2 GHz: several launches' worth of host time.
constexpr long long kWaitClocks = 100000;

struct OwnStream {
  Stream stream = nullptr;
  OwnStream() {
    cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~OwnStream() { cudaStreamDestroy(stream); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
};

struct Event {
  cudaEvent_t event = nullptr;
  Event() { cuda::check(cudaEventCreate(&event), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(Stream stream) const {
    cuda::check(cudaEventRecord(event, stream), "cudaEventRecord");
  }
};

}  // namespace

GpuTimes time_on_gpu(benchmark::State& state, const Launch& launch, const TimingOptions& options) {
  const OwnStream own;
  const Event begin, end;
  const DeviceBuffer<std::byte> flush(
      options.flush_l2 ? std::int64_t{2} * cuda::current_device().l2_bytes : 0);
  int input = 0;
  const auto next_input = [&] {
    const int current = input;
    input = (input + 1) % std::max(options.num_inputs, 1);
    return current;
  };
  for (int i = 0; i < options.warm_ups; ++i) launch(next_input(), own.stream);
  cuda::check(cudaStreamSynchronize(own.stream), "cudaStreamSynchronize");

  GpuTimes times;
  for (auto _ : state) {
    if (flush.size() > 0)
      cuda::check(cudaMemsetAsync(flush.data(), 0, flush.bytes(), own.stream), "cudaMemsetAsync");
    wait_kernel<<<1, 1, 0, own.stream>>>(kWaitClocks);
    cuda::check_launch("wait_kernel");
    begin.record(own.stream);
    launch(next_input(), own.stream);
    end.record(own.stream);
    cuda::check(cudaEventSynchronize(end.event), "cudaEventSynchronize");
    float milliseconds = 0;
    cuda::check(cudaEventElapsedTime(&milliseconds, begin.event, end.event),
                "cudaEventElapsedTime");
    times.seconds.push_back(1e-3 * double{milliseconds});
    state.SetIterationTime(times.seconds.back());
  }
  std::sort(times.seconds.begin(), times.seconds.end());
  state.counters["median_us"] = 1e6 * times.median();
  state.counters["min_us"] = 1e6 * times.min();
  return times;
}

void count_bytes(benchmark::State& state, const GpuTimes& times, double bytes) {
  if (times.median() > 0) state.counters["GB/s"] = 1e-9 * bytes / times.median();
}

void count_flops(benchmark::State& state, const GpuTimes& times, double flops) {
  if (times.median() > 0) state.counters["TFLOP/s"] = 1e-12 * flops / times.median();
}

void register_gpu_bench(const std::string& name, std::function<void(benchmark::State&)> function,
                        int timed_launches) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [function = std::move(function)](benchmark::State& state) {
                                 try {
                                   function(state);
                                 } catch (const std::exception& error) {
                                   state.SkipWithError(error.what());
                                 }
                               })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(timed_launches);
}

}  // namespace sparse_mla::bench
