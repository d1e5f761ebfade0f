#include <cstdio>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/run_entry.h"

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);  // initialises GoogleTest too
  // Every program of the `gpu` label is the same as the CPU's, with this variable: 77 = skipped.
  if (sparse_mla::support::backend_under_test() == sparse_mla::Backend::cuda &&
      !sparse_mla::support::gpu_present()) {
    std::puts("skipped: no GPU");
    return 77;
  }
  return RUN_ALL_TESTS();
}
