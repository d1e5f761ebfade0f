#include <gmock/gmock.h>
#include <gtest/gtest.h>

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);  // initialises GoogleTest too
  return RUN_ALL_TESTS();
}
