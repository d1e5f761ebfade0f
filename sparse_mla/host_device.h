/// Marks what host code and CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define SPARSE_MLA_HOST_DEVICE __host__ __device__
#else
#define SPARSE_MLA_HOST_DEVICE
#endif
