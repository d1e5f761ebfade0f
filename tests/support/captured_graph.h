/// A CUDA graph of what a piece of work enqueues, captured in the strictest mode: a call that
/// allocates, synchronises or touches the default stream is an error there.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <vector>

#include <cuda_runtime_api.h>

#include "tests/support/gpu.h"

namespace sparse_mla::support {

/// Throws std::runtime_error with the runtime's text.
inline void check_runtime(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// A captured graph, ready to launch.
class CapturedGraph {
 public:
  template <class Work>
  CapturedGraph(const DeviceStream& stream, Work&& work) {
    check_runtime(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
    work();
    check_runtime(cudaStreamEndCapture(stream.get(), &graph_));
    check_runtime(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  ~CapturedGraph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void launch(const DeviceStream& stream) const {
    check_runtime(cudaGraphLaunch(executable_, stream.get()));
  }
  std::vector<cudaGraphNodeType> node_types() const {
    std::size_t count = 0;
    check_runtime(cudaGraphGetNodes(graph_, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    check_runtime(cudaGraphGetNodes(graph_, nodes.data(), &count));
    std::vector<cudaGraphNodeType> types(count);
    for (std::size_t i = 0; i < count; ++i)
      check_runtime(cudaGraphNodeGetType(nodes[i], &types[i]));
    return types;
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace sparse_mla::support
