#include "kernels/cuda/entries.h"

namespace sparse_mla::cuda {

std::vector<Entry<MapSlotsProblem, MapSlotsCall>> map_slots_entries() { return {}; }

}  // namespace sparse_mla::cuda
