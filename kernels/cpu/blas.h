/// Matrix products on the calling thread.
#pragma once

#include <cblas.h>

namespace sparse_mla::cpu {

/// Tiles run in parallel, one BLAS thread each. OpenBLAS's thread count is process-wide, so the
/// first of any number of concurrent guards sets it to 1 and the last restores what it found.
class SingleThreadedBlas {
 public:
  SingleThreadedBlas();
  ~SingleThreadedBlas();
  SingleThreadedBlas(const SingleThreadedBlas&) = delete;
  SingleThreadedBlas& operator=(const SingleThreadedBlas&) = delete;
};

}  // namespace sparse_mla::cpu
