/// An operation's CUDA entry, ready to be launched on one problem.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "sparse_mla/operation.h"

#include "bench/support/gpu.cuh"

namespace sparse_mla::bench {

/// An entry with a workspace: the one that `forced` names, else the one that the environment
/// forces, else the fastest.
template <class Problem, class Call>
class Prepared {
 public:
  Prepared(const Operation<Problem, Call>& operation, const Problem& problem,
           const std::string& forced = "")
      : operation_(operation),
        problem_(problem),
        entry_(operation.choose(problem, cuda_only(operation.name(), forced))) {
    workspace_ =
        DeviceBuffer<std::byte>(static_cast<std::int64_t>(entry_.workspace_bytes(problem)));
  }
  const char* name() const { return entry_.name; }
  void run(const Call& call, Stream stream) const {
    operation_.run(entry_, problem_, call, workspace_.span(), stream);
  }

 private:
  static Dispatch cuda_only(const std::string& operation, const std::string& forced) {
    Dispatch dispatch = Dispatch::from_environment();
    if (!forced.empty()) dispatch.forced[operation] = forced;
    dispatch.backend = Backend::cuda;
    return dispatch;
  }
  const Operation<Problem, Call>& operation_;
  Problem problem_;
  const Entry<Problem, Call>& entry_;
  DeviceBuffer<std::byte> workspace_;
};

}  // namespace sparse_mla::bench
