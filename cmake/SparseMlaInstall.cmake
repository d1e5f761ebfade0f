# Library, public headers, the sparse-mla command, and a package for find_package(sparse_mla).
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(sparse_mla_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/sparse_mla)
install(TARGETS sparse_mla EXPORT sparse_mla-targets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/sparse_mla DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h")
install(EXPORT sparse_mla-targets NAMESPACE sparse_mla:: DESTINATION ${sparse_mla_package_dir})
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/sparse_mla-config.cmake.in
  ${PROJECT_BINARY_DIR}/sparse_mla-config.cmake
  INSTALL_DESTINATION ${sparse_mla_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/sparse_mla-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sparse_mla-config.cmake
              ${PROJECT_BINARY_DIR}/sparse_mla-config-version.cmake
              ${PROJECT_SOURCE_DIR}/cmake/SparseMlaCudaRoots.cmake
              ${PROJECT_SOURCE_DIR}/cmake/SparseMlaOpenBLAS.cmake
        DESTINATION ${sparse_mla_package_dir})
if(TARGET sparse-mla)
  install(TARGETS sparse-mla)
endif()
