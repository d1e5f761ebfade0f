#include "sparse_mla/attention.h"

namespace sparse_mla {

std::string to_string(AttendMode mode) {
  switch (mode) {
    case AttendMode::dense:
      return "dense";
    case AttendMode::causal:
      return "causal";
    case AttendMode::masked:
      return "masked";
  }
  return "unknown";
}

}  // namespace sparse_mla
