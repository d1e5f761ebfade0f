# What the library is built on: CUDA and CCCL headers (always), OpenBLAS, OpenMP.
find_package(OpenMP REQUIRED COMPONENTS CXX)

# OpenBLAS, pthread flavour: tiles run one BLAS thread each inside OpenMP regions; the OpenMP
# flavour would nest a second thread team there.
find_path(SPARSE_MLA_OPENBLAS_INCLUDE_DIR cblas.h PATH_SUFFIXES openblas-pthread REQUIRED)
find_library(SPARSE_MLA_OPENBLAS_LIBRARY openblas PATH_SUFFIXES openblas-pthread REQUIRED)
add_library(sparse_mla_openblas INTERFACE)
target_include_directories(sparse_mla_openblas SYSTEM INTERFACE
                           $<BUILD_INTERFACE:${SPARSE_MLA_OPENBLAS_INCLUDE_DIR}>)
target_link_libraries(sparse_mla_openblas INTERFACE ${SPARSE_MLA_OPENBLAS_LIBRARY})

# CUDA headers: cuda_bf16.h, cuda_fp8.h and libcu++ (cuda/std/mdspan). No compiler needed.
find_path(SPARSE_MLA_CUDA_INCLUDE_DIR cuda_bf16.h
          HINTS ${CUDAToolkit_ROOT} ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES include REQUIRED)
find_path(SPARSE_MLA_CCCL_INCLUDE_DIR cuda/std/mdspan
          HINTS ${SPARSE_MLA_CUDA_INCLUDE_DIR} PATH_SUFFIXES cccl REQUIRED)
add_library(sparse_mla_cuda_headers INTERFACE)
target_include_directories(sparse_mla_cuda_headers SYSTEM INTERFACE
                           $<BUILD_INTERFACE:${SPARSE_MLA_CCCL_INCLUDE_DIR}>
                           $<BUILD_INTERFACE:${SPARSE_MLA_CUDA_INCLUDE_DIR}>)
set(SPARSE_MLA_HAS_CUDA OFF)
