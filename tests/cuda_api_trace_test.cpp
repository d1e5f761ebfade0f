// Every driver call that one run of the layer makes, listed by CUPTI: launches, and nothing that
// allocates, frees or waits. CUPTI comes with the toolkit; it is opened at run time, so that this
// program starts without it.
#include <map>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

#include <cupti.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sparse_mla/device_arena.h"
#include "sparse_mla/layer.h"

#include "tests/support/layer_runner.h"
#include "tests/support/problem.h"
#include "tests/support/run_entry.h"

namespace sparse_mla {
namespace {

using support::DeviceMemory;
using support::DeviceMirror;
using support::DeviceStream;
using support::LayerData;
using support::LayerProblem;

/// Counts driver calls by name between start() and stop().
class ApiTrace {
 public:
  ApiTrace() {
    for (const char* name :
         {"libcupti.so.13", "libcupti.so", "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so"})
      if (library_ == nullptr) library_ = dlopen(name, RTLD_NOW);
  }
  bool available() const { return library_ != nullptr; }

  void start() {
    calls_.clear();
    call(function<decltype(&cuptiSubscribe)>("cuptiSubscribe")(&subscriber_, &ApiTrace::on_call,
                                                               this));
    call(function<decltype(&cuptiEnableDomain)>("cuptiEnableDomain")(1, subscriber_,
                                                                     CUPTI_CB_DOMAIN_DRIVER_API));
  }
  std::map<std::string, int> stop() {
    call(function<decltype(&cuptiUnsubscribe)>("cuptiUnsubscribe")(subscriber_));
    return calls_;
  }

 private:
  template <class Function>
  Function function(const char* name) const {
    void* const symbol = dlsym(library_, name);
    if (symbol == nullptr) throw std::runtime_error(std::string("no ") + name + " in libcupti");
    return reinterpret_cast<Function>(symbol);
  }
  static void call(CUptiResult result) {
    if (result != CUPTI_SUCCESS) throw std::runtime_error("CUPTI: " + std::to_string(result));
  }
  static void CUPTIAPI on_call(void* trace, CUpti_CallbackDomain, CUpti_CallbackId,
                               const void* data) {
    const auto* info = static_cast<const CUpti_CallbackData*>(data);
    if (info->callbackSite == CUPTI_API_ENTER)
      ++static_cast<ApiTrace*>(trace)->calls_[info->functionName];
  }

  void* library_ = nullptr;
  CUpti_SubscriberHandle subscriber_ = nullptr;
  std::map<std::string, int> calls_;
};

TEST(CudaApiTrace, ARunOnlyLaunches) {
  ApiTrace trace;
  ASSERT_TRUE(trace.available()) << "no libcupti beside the driver or in the toolkit";
  Limits limits;
  limits.dims.num_heads = 16;
  limits.dims.index_topk = 256;
  limits.dims.index_n_heads = 16;
  limits.max_num_tokens = 2048;
  limits.max_num_seqs = 16;
  limits.max_model_len = 3000;
  limits.workspace_rows = 1000;
  const Dispatch dispatch = support::tested_dispatch();
  const Capacity capacity(limits, dispatch);
  const DeviceMemory workspace(capacity.workspace_bytes());
  const DeviceStream stream;
  DeviceArena arena(capacity.max_arena_bytes());
  for (const AttentionPath path :
       {AttentionPath::dense, AttentionPath::masked, AttentionPath::sparse}) {
    LayerProblem problem;
    problem.dims = limits.dims;
    problem.query_lens = {1, 30, 64, 2};
    problem.context_lens = path == AttentionPath::dense
                               ? std::vector<std::int32_t>{2000, 200, 0, 9}
                               : std::vector<std::int32_t>{2000, 1100, 0, 900};
    LayerData data(problem);
    DeviceMirror mirror;
    const LayerTensors tensors = mirror_call(limits, data.tensors(), mirror);
    BatchOptions options;
    options.path = path;
    for (const bool first : {true, false}) {  // the first run also loads kernels
      const BatchMetadata batch(capacity, problem.query_lens, problem.context_lens, options, {},
                                arena.next());
      trace.start();
      RunOptions run_options;
      run_options.arena = arena.upload(batch, stream.get());
      run_layer(capacity, batch, tensors, workspace.span(), stream.get(), run_options);
      const std::map<std::string, int> calls = trace.stop();
      stream.synchronize();
      if (first) continue;
      int launches = 0, copies = 0;
      const std::regex forbidden("Alloc|Free|Synchronize|StreamQuery|EventQuery|Wait|HostRegister");
      std::string list;
      for (const auto& [name, count] : calls) {
        EXPECT_FALSE(std::regex_search(name, forbidden)) << name << " × " << count;
        if (name.find("Launch") != std::string::npos) launches += count;
        if (name.find("Memcpy") != std::string::npos) copies += count;
        list += "  " + name + " × " + std::to_string(count) + "\n";
      }
      EXPECT_GT(launches, 5);
      EXPECT_EQ(copies, 1) << "the batch's integers, one copy";
      RecordProperty("calls_" + to_string(path), list);
      std::printf("driver calls of one run, path %s:\n%s", to_string(path).c_str(), list.c_str());
    }
  }
}

}  // namespace
}  // namespace sparse_mla
