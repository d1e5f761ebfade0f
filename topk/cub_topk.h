/// CUB's device top-k behind plain types: the one source that is compiled with the CCCL which has
/// it shares no view types with the rest of the library, which may be built with another CCCL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <cuda_runtime_api.h>

namespace sparse_mla::cuda {

/// Is there a cub::DeviceTopK in this build? Without one the functions below throw.
bool has_cub_topk();

/// CUB's temporary storage for rows of at most `len` keys.
std::size_t cub_topk_bytes(std::int64_t len, std::int64_t k);

/// best [k] ← positions of the k largest of keys [len], in any order, any of several equals; k ≤
/// len. best_keys [k] is scratch. Launches only.
void cub_topk(std::span<std::byte> temporary, const std::uint32_t* keys, std::int64_t len,
              std::int64_t k, std::uint32_t* best_keys, std::int32_t* best, cudaStream_t stream);

}  // namespace sparse_mla::cuda
