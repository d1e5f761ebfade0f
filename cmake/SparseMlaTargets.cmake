# Targets and functions that every folder uses.
add_library(sparse_mla_warnings INTERFACE)
target_compile_options(sparse_mla_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow $<$<BOOL:${SPARSE_MLA_WERROR}>:-Werror>>)

# sparse_mla_add_test(name): tests/<name>.cpp, one executable and one ctest entry.
function(sparse_mla_add_test name)
  add_executable(${name} ${name}.cpp)
  target_link_libraries(${name} PRIVATE sparse_mla_test_main)
  target_precompile_headers(${name} REUSE_FROM sparse_mla_test_main)
  add_test(NAME ${name} COMMAND ${name})
endfunction()
