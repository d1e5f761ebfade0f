# Defines sparse_mla_openblas. Read by the build and by the installed package, so that a library
# built here links against the OpenBLAS of the machine that uses it.
#
# The pthread flavour is looked for first: tiles run one BLAS thread each inside OpenMP regions, and
# the OpenMP flavour would nest a second thread team there.
find_path(SPARSE_MLA_OPENBLAS_INCLUDE_DIR cblas.h PATH_SUFFIXES openblas-pthread openblas)
find_library(SPARSE_MLA_OPENBLAS_LIBRARY NAMES openblas
             PATH_SUFFIXES openblas-pthread x86_64-linux-gnu/openblas-pthread)
mark_as_advanced(SPARSE_MLA_OPENBLAS_INCLUDE_DIR SPARSE_MLA_OPENBLAS_LIBRARY)
if(SPARSE_MLA_OPENBLAS_INCLUDE_DIR AND SPARSE_MLA_OPENBLAS_LIBRARY
   AND NOT TARGET sparse_mla_openblas)
  add_library(sparse_mla_openblas INTERFACE IMPORTED GLOBAL)
  target_include_directories(sparse_mla_openblas INTERFACE ${SPARSE_MLA_OPENBLAS_INCLUDE_DIR})
  target_link_libraries(sparse_mla_openblas INTERFACE ${SPARSE_MLA_OPENBLAS_LIBRARY})
endif()
