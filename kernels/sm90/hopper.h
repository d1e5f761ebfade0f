/// What the entries for compute capability 9.0 ask of the machine and of the build.
#pragma once

#include <string>

namespace sparse_mla::sm90 {

/// Why a kernel of Hopper's own instructions, whose blocks need that much shared memory, static and
/// dynamic, cannot run on the current device; empty = it can. For Entry::why_not.
std::string why_no_hopper(int shared_bytes);

}  // namespace sparse_mla::sm90
