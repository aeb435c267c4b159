# kvloom._native_<isa> for each instruction set, and kvloom._cpu. Every csrc/bind/bind_X.cpp is found here and
# called by module.cpp: it defines void kvloom::bind_X(nanobind::module_&).
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
# Asked anew each time: with build isolation it lies in another folder at each build.
execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_DIR)
find_package(nanobind CONFIG REQUIRED)

set(KVLOOM_BINDS "*" CACHE STRING "Patterns of X: which files bind_X.cpp to build")
list(TRANSFORM KVLOOM_BINDS REPLACE "(.+)" "${CMAKE_CURRENT_SOURCE_DIR}/csrc/bind/bind_\\1.cpp"
  OUTPUT_VARIABLE bind_patterns)
file(GLOB bind_sources CONFIGURE_DEPENDS ${bind_patterns})
set(bind_list "")
foreach(source ${bind_sources})
  get_filename_component(name ${source} NAME_WE)
  string(APPEND bind_list "KVLOOM_BIND(${name})\n")
endforeach()
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/bind_list.inc CONTENT "${bind_list}" @ONLY)

foreach(isa ${KVLOOM_ISAS})
  set(module _native_${isa})
  # A domain of its own: two modules in one process must not share their types. NOMINSIZE: -O3, not -Os.
  nanobind_add_module(${module} NB_STATIC NOMINSIZE NB_DOMAIN kvloom_${isa}
    csrc/bind/module.cpp ${bind_sources})
  kvloom_compile_for(${module} ${isa})
  target_include_directories(${module} PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
  target_compile_definitions(${module} PRIVATE KVLOOM_MODULE=${module})
  install(TARGETS ${module} LIBRARY DESTINATION kvloom)
endforeach()

nanobind_add_module(_cpu NB_STATIC csrc/bind/cpu_probe.cpp)
target_compile_options(_cpu PRIVATE -Wall -Wextra -Werror)
install(TARGETS _cpu LIBRARY DESTINATION kvloom)
