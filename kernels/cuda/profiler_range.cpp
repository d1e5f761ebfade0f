#include "kernels/common/profiler_range.h"

#include <nvtx3/nvToolsExt.h>

namespace sparse_mla {
namespace {

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("sparse_mla");
  return handle;
}

}  // namespace

ProfilerRange::ProfilerRange(Stage stage) {
  const std::string name = to_string(stage);
  nvtxEventAttributes_t event = {};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = name.c_str();
  nvtxDomainRangePushEx(domain(), &event);
}

ProfilerRange::~ProfilerRange() { nvtxDomainRangePop(domain()); }

}  // namespace sparse_mla
