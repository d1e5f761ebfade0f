/// What benchmarks on a GPU share: device memory filled by the library's counter-based generator,
/// timing by events, counters.
///
///   register_gpu_bench("operation/entry/shape", [](benchmark::State& state) {
///     DeviceBuffer<bfloat16> rows(num_rows * width);
///     fill_normal(rows, 1, 0);
///     const GpuTimes times = time_on_gpu(
///         state, [&](int, Stream stream) { operation.run(…, stream); }, {.flush_l2 = true});
///     count_bytes(state, times, bytes_moved);
///   });
///
/// Registration runs before main(): it must not touch the GPU. The functions that it registers run
/// only where there is one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>
#include <cuda_runtime.h>

#include "kernels/cuda/device.h"
#include "sparse_mla/random.h"
#include "sparse_mla/types.h"

namespace sparse_mla::bench {

/// `size` elements of device memory, owned.
template <class T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::int64_t size) : size_(size) {
    if (size > 0)
      cuda::check(
          cudaMalloc(reinterpret_cast<void**>(&data_), static_cast<std::size_t>(size) * sizeof(T)),
          "cudaMalloc");
  }
  explicit DeviceBuffer(const std::vector<T>& host)
      : DeviceBuffer(static_cast<std::int64_t>(host.size())) {
    if (size_ > 0)
      cuda::check(cudaMemcpy(data_, host.data(), bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  T* data() const { return data_; }
  std::int64_t size() const { return size_; }
  std::size_t bytes() const { return static_cast<std::size_t>(size_) * sizeof(T); }
  /// For the spans of a Call and for workspaces; the host must not read through it.
  std::span<T> span() const { return {data_, static_cast<std::size_t>(size_)}; }

  std::vector<T> to_host() const {
    std::vector<T> host(static_cast<std::size_t>(size_));
    if (size_ > 0)
      cuda::check(cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }

 private:
  T* data_ = nullptr;
  std::int64_t size_ = 0;
};

/// data[i] = make(i)
template <class T, class Make>
__global__ void fill_kernel(T* data, std::int64_t size, Make make) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += step)
    data[i] = make(i);
}

/// Returns when the buffer is filled.
template <class T, class Make>
void fill(const DeviceBuffer<T>& buffer, Make make) {
  if (buffer.size() == 0) return;
  constexpr int kThreads = 256;
  const std::int64_t blocks = (buffer.size() + kThreads - 1) / kThreads;
  fill_kernel<<<static_cast<unsigned>(std::min<std::int64_t>(blocks, 4096)), kThreads>>>(
      buffer.data(), buffer.size(), make);
  cuda::check_launch("fill_kernel");
  cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

template <class T>
struct MakeNormal {
  std::uint64_t seed, stream;
  float mean, deviation;
  __device__ T operator()(std::int64_t i) const {
    return static_cast<T>(mean +
                          deviation * random_normal(seed, stream, static_cast<std::uint64_t>(i)));
  }
};

struct MakeInteger {
  std::uint64_t seed, stream;
  std::int32_t low;
  std::uint32_t count;
  __device__ std::int32_t operator()(std::int64_t i) const {
    return low + static_cast<std::int32_t>(
                     random_bits(seed, stream, static_cast<std::uint64_t>(i)) % count);
  }
};

struct MakeByte {
  std::uint64_t seed, stream;
  __device__ std::byte operator()(std::int64_t i) const {
    return static_cast<std::byte>(random_bits(seed, stream, static_cast<std::uint64_t>(i)) & 0xFFu);
  }
};

/// Normal numbers; T = float, bfloat16 or fp8_e4m3. The same values as on the CPU.
template <class T>
void fill_normal(const DeviceBuffer<T>& buffer, std::uint64_t seed, std::uint64_t stream,
                 float deviation = 1.0f, float mean = 0.0f) {
  fill(buffer, MakeNormal<T>{seed, stream, mean, deviation});
}

/// Uniform in [low, high).
inline void fill_integers(const DeviceBuffer<std::int32_t>& buffer, std::uint64_t seed,
                          std::uint64_t stream, std::int32_t low, std::int32_t high) {
  fill(buffer, MakeInteger{seed, stream, low, static_cast<std::uint32_t>(high - low)});
}

/// Random bytes: as e4m3 they hold NaN.
inline void fill_bytes(const DeviceBuffer<std::byte>& buffer, std::uint64_t seed,
                       std::uint64_t stream) {
  fill(buffer, MakeByte{seed, stream});
}

struct TimingOptions {
  int warm_ups = 20;
  /// Writes twice the L2 cache before every launch, so that inputs come from memory.
  bool flush_l2 = false;
  /// Launches are numbered 0 … num_inputs − 1, over and over: the launch picks its inputs by that
  /// number, which keeps them out of the cache without a flush.
  int num_inputs = 1;
};

/// Seconds of every timed launch, ascending.
struct GpuTimes {
  std::vector<double> seconds;
  double median() const { return seconds.empty() ? 0 : seconds[seconds.size() / 2]; }
  double min() const { return seconds.empty() ? 0 : seconds.front(); }
};

/// Launches enqueue work on the given stream for the input of that number; they do not wait.
using Launch = std::function<void(int input, Stream stream)>;

/// The state's iterations of `launch`, each between two events on a stream of its own; the GPU is
/// kept busy until both events and the launch are enqueued, so that the time of the host's calls
/// does not count (beyond some 50 µs of them it does). Sets the iterations' manual times and the
/// counters median_us and min_us.
GpuTimes time_on_gpu(benchmark::State& state, const Launch& launch,
                     const TimingOptions& options = {});

/// Counter "GB/s" for this many bytes per launch, by the median time.
void count_bytes(benchmark::State& state, const GpuTimes& times, double bytes);

/// Counter "TFLOP/s" for this many operations per launch, by the median time.
void count_flops(benchmark::State& state, const GpuTimes& times, double flops);

/// Registers a benchmark that calls time_on_gpu once: 50 timed launches, manual time. What
/// `function` throws is reported as the benchmark's error.
void register_gpu_bench(const std::string& name, std::function<void(benchmark::State&)> function,
                        int timed_launches = 50);

}  // namespace sparse_mla::bench
