include(SparseMlaCudaRoots)

# CUDA headers: cuda_bf16.h, cuda_fp8.h and libcu++ (cuda/std/mdspan). No compiler needed.
find_path(SPARSE_MLA_CUDA_INCLUDE_DIR cuda_bf16.h HINTS ${SPARSE_MLA_CUDA_ROOTS}
          PATH_SUFFIXES include targets/x86_64-linux/include)
find_path(SPARSE_MLA_CCCL_INCLUDE_DIR cuda/std/mdspan
          HINTS ${SPARSE_MLA_CUDA_INCLUDE_DIR} ${SPARSE_MLA_CUDA_ROOTS}
          PATH_SUFFIXES cccl include/cccl include)
mark_as_advanced(SPARSE_MLA_CUDA_INCLUDE_DIR SPARSE_MLA_CCCL_INCLUDE_DIR)
if(NOT SPARSE_MLA_CUDA_INCLUDE_DIR OR NOT SPARSE_MLA_CCCL_INCLUDE_DIR)
  message(FATAL_ERROR "The CUDA headers (cuda_bf16.h) or CCCL (cuda/std/mdspan) were not found; no "
                      "GPU and no CUDA compiler is needed, only headers. Run ./dev setup, or name "
                      "a CUDA 13 toolkit with -DCUDAToolkit_ROOT=DIR.")
endif()
add_library(sparse_mla_cuda_headers INTERFACE IMPORTED GLOBAL)
target_include_directories(sparse_mla_cuda_headers INTERFACE ${SPARSE_MLA_CCCL_INCLUDE_DIR}
                                                             ${SPARSE_MLA_CUDA_INCLUDE_DIR})
