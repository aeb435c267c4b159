# The instruction sets that modules are built for, best first, and the flags of each. simd.hpp reads what these
# flags define; src/kvloom/ops/isa.py chooses among the modules by what csrc/bind/cpu_probe.cpp finds.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(KVLOOM_ALL_ISAS avx512bf16 avx512 avx2 generic)
else()
  set(KVLOOM_ALL_ISAS generic)
endif()

set(KVLOOM_FLAGS_generic "")
set(KVLOOM_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(KVLOOM_FLAGS_avx512 ${KVLOOM_FLAGS_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC's own AVX512 headers warn up to version 12; the other modules keep the warning for the same sources.
  list(APPEND KVLOOM_FLAGS_avx512 -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
set(KVLOOM_FLAGS_avx512bf16 ${KVLOOM_FLAGS_avx512} -mavx512bf16 -mavx512vnni)
