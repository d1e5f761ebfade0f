/// Runs the layer over host memory, wherever its capacity says: on the CPU in place, on the GPU
/// over a mirror of the tensors.
#pragma once

#include <chrono>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "sparse_mla/layer.h"

#include "tests/support/device_mirror.h"
#include "tests/support/gpu.h"

namespace sparse_mla::support {

class LayerRunner {
 public:
  /// `capacity` has to outlive this object. `poison`: before every run the workspace is filled with
  /// NaN.
  explicit LayerRunner(const Capacity& capacity, bool poison = true)
      : capacity_(capacity), poison_(poison) {
    if (capacity.backend() == Backend::cpu) {
      host_.emplace(capacity.workspace_bytes());
    } else {
      device_ = DeviceMemory(capacity.workspace_bytes());
      stream_.emplace();
    }
  }

  /// `options` without an arena; its on_stage is called as on the CPU.
  void run(const BatchMetadata& batch, const LayerTensors& tensors, RunOptions options = {}) {
    const BatchMetadata* const only[] = {&batch};
    run(only, tensors, std::move(options));
  }
  /// One after the other over the same tensors, which the last one leaves behind.
  void run(std::span<const BatchMetadata* const> batches, const LayerTensors& tensors,
           RunOptions options = {}) {
    seconds_.clear();
    capacity_.backend() == Backend::cpu ? run_on_host(batches, tensors, std::move(options))
                                        : run_on_device(batches, tensors, std::move(options));
  }

  /// Of the last run, without copies to and from the device.
  double seconds() const { return seconds_.back(); }
  /// Of every batch of it.
  const std::vector<double>& seconds_of_each() const { return seconds_; }
  /// Of each stage's stretches in order; a stage may have several.
  const std::vector<std::pair<Stage, double>>& stage_seconds() const { return stage_seconds_; }
  /// For a scratch of the caller's own between two runs.
  std::span<std::byte> host_workspace() const { return host_->span(); }

 private:
  void run_on_host(std::span<const BatchMetadata* const> batches, const LayerTensors& tensors,
                   RunOptions options) {
    using Clock = std::chrono::steady_clock;
    const auto on_stage = options.on_stage;
    Clock::time_point stage_begin;
    options.on_stage = [&](Stage stage, bool begin) {
      if (on_stage) on_stage(stage, begin);
      const Clock::time_point now = Clock::now();
      if (begin)
        stage_begin = now;
      else
        stage_seconds_.emplace_back(stage,
                                    std::chrono::duration<double>(now - stage_begin).count());
    };
    for (const BatchMetadata* batch : batches) {
      if (poison_) std::memset(host_->span().data(), 0xFF, host_->span().size());
      stage_seconds_.clear();
      const Clock::time_point begin = Clock::now();
      run_layer(capacity_, *batch, tensors, host_->span(), nullptr, options);
      seconds_.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    }
  }

  void run_on_device(std::span<const BatchMetadata* const> batches, const LayerTensors& tensors,
                     const RunOptions& options) {
    DeviceMirror mirror;
    const LayerTensors moved = mirror_call(capacity_.limits(), tensors, mirror);
    for (const BatchMetadata* batch : batches) run_on_device(*batch, moved, options);
    mirror.download();
  }

  /// `moved`: on the device.
  void run_on_device(const BatchMetadata& batch, const LayerTensors& moved, RunOptions options) {
    if (poison_ && !under_sanitizer()) fill_device(device_.data(), 0xFF, device_.size());
    DeviceMemory arena(batch.arena().size());
    copy_to_device(arena.data(), batch.arena().data(), batch.arena().size());
    options.arena = arena.data();
    const auto on_stage = options.on_stage;
    std::vector<std::pair<Stage, std::size_t>> begins;
    std::vector<std::size_t> ends;
    clock_.clear();
    options.on_stage = [&](Stage stage, bool begin) {
      if (on_stage) on_stage(stage, begin);
      if (begin)
        begins.emplace_back(stage, clock_.mark(stream_->get()));
      else
        ends.push_back(clock_.mark(stream_->get()));
    };
    const std::size_t first = clock_.mark(stream_->get());
    run_layer(capacity_, batch, moved, device_.span(), stream_->get(), options);
    const std::size_t last = clock_.mark(stream_->get());
    stream_->synchronize();
    seconds_.push_back(clock_.seconds_between(first, last));
    stage_seconds_.clear();
    for (std::size_t i = 0; i < ends.size(); ++i)
      stage_seconds_.emplace_back(begins[i].first,
                                  clock_.seconds_between(begins[i].second, ends[i]));
  }

  const Capacity& capacity_;
  bool poison_;
  std::optional<HostWorkspace> host_;
  DeviceMemory device_;
  std::optional<DeviceStream> stream_;
  DeviceClock clock_;
  std::vector<double> seconds_;
  std::vector<std::pair<Stage, double>> stage_seconds_;
};

}  // namespace sparse_mla::support
