/// An operation's CUDA entry, ready to be launched on one problem.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparse_mla/operation.h"

#include "bench/support/gpu.cuh"

namespace sparse_mla::bench {

/// The entry that the environment forces, else the fastest, with a workspace.
template <class Problem, class Call>
class Prepared {
 public:
  Prepared(const Operation<Problem, Call>& operation, const Problem& problem)
      : operation_(operation), problem_(problem), entry_(operation.choose(problem, cuda_only())) {
    workspace_ =
        DeviceBuffer<std::byte>(static_cast<std::int64_t>(entry_.workspace_bytes(problem)));
  }
  const char* name() const { return entry_.name; }
  void run(const Call& call, Stream stream) const {
    operation_.run(entry_, problem_, call, workspace_.span(), stream);
  }

 private:
  static Dispatch cuda_only() {
    Dispatch dispatch = Dispatch::from_environment();
    dispatch.backend = Backend::cuda;
    return dispatch;
  }
  const Operation<Problem, Call>& operation_;
  Problem problem_;
  const Entry<Problem, Call>& entry_;
  DeviceBuffer<std::byte> workspace_;
};

}  // namespace sparse_mla::bench
