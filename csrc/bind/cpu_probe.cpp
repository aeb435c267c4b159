// Which instruction sets this machine can run, operating system included; compiled without any of
// their flags.
#include <nanobind/nanobind.h>

#include <nanobind/stl/string.h>

#include <string>

namespace {

bool can_run(const std::string& isa) {
  if (isa == "generic") return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (isa == "avx2") return has_avx2;
  if (isa == "avx512") return has_avx512;
  if (isa == "avx512bf16") {
    return has_avx512 && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("avx512vnni");
  }
#endif
  return false;
}

}  // namespace

NB_MODULE(_cpu, module) {
  module.def("can_run", &can_run, nanobind::arg("isa"),
             "Whether processor and operating system run the module of this instruction set.");
}
