# What the library is built on: CUDA and CCCL headers (always), OpenBLAS, OpenMP, and a CUDA
# compiler where SPARSE_MLA_CUDA asks for one. Sets SPARSE_MLA_HAS_CUDA.
include(CheckLanguage)

find_package(OpenMP REQUIRED COMPONENTS CXX)
set_target_properties(OpenMP::OpenMP_CXX PROPERTIES IMPORTED_GLOBAL TRUE)

include(SparseMlaOpenBLAS)
if(NOT TARGET sparse_mla_openblas)
  message(FATAL_ERROR "OpenBLAS was not found (Debian: libopenblas-pthread-dev). Elsewhere "
                      "set SPARSE_MLA_OPENBLAS_INCLUDE_DIR (has cblas.h) and "
                      "SPARSE_MLA_OPENBLAS_LIBRARY.")
endif()

include(SparseMlaCudaHeaders)

if(NOT SPARSE_MLA_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "SPARSE_MLA_CUDA: got '${SPARSE_MLA_CUDA}', expected AUTO, ON or OFF")
endif()
set(SPARSE_MLA_HAS_CUDA OFF)
if(NOT SPARSE_MLA_CUDA STREQUAL "OFF")
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    # CMake looks in PATH alone. Through the environment, so that check_language() still tests it.
    find_program(SPARSE_MLA_NVCC nvcc HINTS ${SPARSE_MLA_CUDA_ROOTS} PATH_SUFFIXES bin)
    mark_as_advanced(SPARSE_MLA_NVCC)
    if(SPARSE_MLA_NVCC)
      set(ENV{CUDACXX} ${SPARSE_MLA_NVCC})
    endif()
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      # Hopper's own instructions (wgmma, TMA) need sm_90a; the PTX serves every other card from
      # compute capability 8.0 on.
      set(CMAKE_CUDA_ARCHITECTURES 90a-real 80-virtual CACHE STRING "CUDA architectures")
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set_target_properties(CUDA::cudart_static CUDA::cublasLt PROPERTIES IMPORTED_GLOBAL TRUE)
    # CMake 3.25 knows no C++20 flag for nvcc 13 and drops CUDA_STANDARD 20 without a word
    # (tests/cuda_standard_test.cu would notice).
    unset(CMAKE_CUDA_STANDARD)
    add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>)
    set(SPARSE_MLA_HAS_CUDA ON)
  elseif(SPARSE_MLA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SPARSE_MLA_CUDA=ON, but no CUDA compiler was found. Run ./dev setup, or "
                        "set CMAKE_CUDA_COMPILER; SPARSE_MLA_CUDA=OFF builds the complete CPU "
                        "library.")
  endif()
endif()
message(STATUS "sparse_mla: CUDA backend ${SPARSE_MLA_HAS_CUDA}, headers of "
               "${SPARSE_MLA_CUDA_INCLUDE_DIR}")
