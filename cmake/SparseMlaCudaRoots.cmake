# Where a CUDA toolkit may be: what the user names, what the environment names, the usual place, and
# the folder of the PyPI wheels that `./dev setup` installs. Read by the build and by the installed
# package. Sets SPARSE_MLA_CUDA_ROOTS, best guess first.
set(SPARSE_MLA_CUDA_ROOTS ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} $ENV{CUDA_PATH} $ENV{CUDA_HOME}
                          /usr/local/cuda)
file(GLOB sparse_mla_wheel_roots ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu13)
list(APPEND SPARSE_MLA_CUDA_ROOTS ${sparse_mla_wheel_roots})
unset(sparse_mla_wheel_roots)
