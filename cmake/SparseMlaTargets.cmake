# Targets and functions that every folder uses.
add_library(sparse_mla_warnings INTERFACE)
set(sparse_mla_host_warnings -Wall -Wextra -Wshadow)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # "literal" + std::string: g++ 12 warns of an impossible overlap in libstdc++ (GCC bug 105651).
  list(APPEND sparse_mla_host_warnings -Wno-restrict)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_DEBUG}" MATCHES "-fsanitize")
  # Instrumented std::regex looks uninitialised to g++ 12 (GCC bug 105562).
  list(APPEND sparse_mla_host_warnings -Wno-maybe-uninitialized)
endif()
if(SPARSE_MLA_WERROR)
  list(APPEND sparse_mla_host_warnings -Werror)
endif()
target_compile_options(sparse_mla_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:${sparse_mla_host_warnings} -Wpedantic>
  # No -Wpedantic: the host code that nvcc generates uses GNU line markers.
  $<$<COMPILE_LANGUAGE:CUDA>:$<$<BOOL:${SPARSE_MLA_WERROR}>:-Werror=all-warnings>
                             -Xcompiler=$<JOIN:${sparse_mla_host_warnings},$<COMMA>>>)

# sparse_mla_add_test(name): tests/<name>.cpp, one executable and one ctest entry.
function(sparse_mla_add_test name)
  add_executable(${name} ${name}.cpp)
  target_link_libraries(${name} PRIVATE sparse_mla_test_main)
  target_precompile_headers(${name} REUSE_FROM sparse_mla_test_main)
  # Not among what travels: there gpu_tests is all of them.
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})
  add_test(NAME ${name} COMMAND ${name})
endfunction()

# sparse_mla_test_on_every_backend(name…): these tests' entries are parameters. In a build with CUDA
# each is a second ctest entry, <name>_gpu with the label `gpu`, that tests the CUDA entries; where
# there is no GPU it is reported as skipped.
function(sparse_mla_test_on_every_backend)
  if(SPARSE_MLA_HAS_CUDA)
    foreach(name IN LISTS ARGN)
      add_test(NAME ${name}_gpu COMMAND ${name})
      set_tests_properties(${name} PROPERTIES ENVIRONMENT SPARSE_MLA_TEST_BACKEND=cpu)
      set_tests_properties(${name}_gpu PROPERTIES ENVIRONMENT SPARSE_MLA_TEST_BACKEND=cuda
                                                  LABELS gpu SKIP_RETURN_CODE 77)
      set_property(GLOBAL APPEND PROPERTY sparse_mla_gpu_tests ${name})
    endforeach()
  endif()
endfunction()

# sparse_mla_add_cuda_test(name): tests/<name>.cu or .cpp, what only a device has, labelled `gpu`;
# nothing without a CUDA compiler, skipped without a GPU.
function(sparse_mla_add_cuda_test name)
  if(SPARSE_MLA_HAS_CUDA)
    if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${name}.cu)
      add_executable(${name} ${name}.cu)
    else()
      add_executable(${name} ${name}.cpp)
    endif()
    target_link_libraries(${name} PRIVATE sparse_mla_test_main CUDA::cudart_static)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES LABELS gpu SKIP_RETURN_CODE 77
                                            ENVIRONMENT SPARSE_MLA_TEST_BACKEND=cuda)
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})
    add_dependencies(sparse_mla_cuda_tests ${name})
    set_property(GLOBAL APPEND PROPERTY sparse_mla_gpu_tests ${name})
  endif()
endfunction()

# sparse_mla_add_soak(name): tests/<name>.cpp, random cases for as long as one likes, labelled
# `soak`. Not among the tests that ctest runs unasked (`ctest -C soak -L soak`), but among what
# travels.
function(sparse_mla_add_soak name)
  add_executable(${name} ${name}.cpp)
  target_link_libraries(${name} PRIVATE sparse_mla_test_main)
  target_precompile_headers(${name} REUSE_FROM sparse_mla_test_main)
  add_test(NAME ${name} COMMAND ${name} CONFIGURATIONS soak)
  set_tests_properties(${name} PROPERTIES LABELS soak)
endfunction()

# sparse_mla_add_gpu_tests(): gpu_tests, one program of all tests with the label `gpu`, to be run on
# another machine (`./dev gpu-test`): much smaller than all of them.
function(sparse_mla_add_gpu_tests)
  if(SPARSE_MLA_HAS_CUDA)
    get_property(names GLOBAL PROPERTY sparse_mla_gpu_tests)
    list(TRANSFORM names REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
    add_executable(gpu_tests ${objects})
    target_link_libraries(gpu_tests PRIVATE sparse_mla_test_main CUDA::cudart_static
                                            ${CMAKE_DL_LIBS})
  endif()
endfunction()

# sparse_mla_add_python_test(name [args…]): tests/<name>.py, run by the Python that has numpy.
find_program(SPARSE_MLA_PYTHON python3 HINTS ${PROJECT_SOURCE_DIR}/.venv/bin)
mark_as_advanced(SPARSE_MLA_PYTHON)
function(sparse_mla_add_python_test name)
  add_test(NAME ${name}
           COMMAND ${SPARSE_MLA_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/${name}.py ${ARGN})
endfunction()

# sparse_mla_add_bench(name): bench/<name>.cpp, or <name>.cu where that exists and CUDA is on.
function(sparse_mla_add_bench name)
  if(NOT EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${name}.cu)
    add_executable(${name} ${name}.cpp)
    target_link_libraries(${name} PRIVATE sparse_mla_bench_main)
  elseif(SPARSE_MLA_HAS_CUDA)
    add_executable(${name} ${name}.cu)
    target_link_libraries(${name} PRIVATE sparse_mla_gpu_bench_main)
  else()
    return()
  endif()
  add_dependencies(sparse_mla_benches ${name})
endfunction()
