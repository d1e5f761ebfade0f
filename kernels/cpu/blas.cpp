#include "kernels/cpu/blas.h"

#include <mutex>

namespace sparse_mla::cpu {
namespace {
std::mutex guard_mutex;
int guard_count = 0;
int threads_before = 1;
}  // namespace

SingleThreadedBlas::SingleThreadedBlas() {
  const std::lock_guard lock(guard_mutex);
  if (guard_count++ > 0) return;
  threads_before = openblas_get_num_threads();
  if (threads_before != 1) openblas_set_num_threads(1);
}

SingleThreadedBlas::~SingleThreadedBlas() {
  const std::lock_guard lock(guard_mutex);
  if (--guard_count == 0 && threads_before != 1) openblas_set_num_threads(threads_before);
}

}  // namespace sparse_mla::cpu
