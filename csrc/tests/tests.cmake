# kernel_tests_<isa> for each instruction set: every csrc/tests/test_*.cpp in one program.
set(KVLOOM_BINDS "*" CACHE STRING "Patterns of X: which files test_X.cpp to build")
list(TRANSFORM KVLOOM_BINDS REPLACE "(.+)" "${CMAKE_CURRENT_SOURCE_DIR}/csrc/tests/test_\\1.cpp"
  OUTPUT_VARIABLE test_patterns)
file(GLOB test_sources CONFIGURE_DEPENDS ${test_patterns})
foreach(isa ${KVLOOM_ISAS})
  add_executable(kernel_tests_${isa} csrc/tests/main.cpp ${test_sources})
  kvloom_compile_for(kernel_tests_${isa} ${isa})
endforeach()
