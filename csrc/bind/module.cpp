// The Python module of one instruction set: what the files bind_*.cpp beside this one offer.
#include <nanobind/nanobind.h>

#include "kvloom/simd.hpp"

namespace kvloom {
#define KVLOOM_BIND(name) void name(nanobind::module_& module);
#include "bind_list.inc"
#undef KVLOOM_BIND
}  // namespace kvloom

NB_MODULE(KVLOOM_MODULE, module) {
  module.attr("isa") = kvloom::kIsaName;
  module.attr("num_lanes") = kvloom::kLanes;
#define KVLOOM_BIND(name) kvloom::name(module);
#include "bind_list.inc"
#undef KVLOOM_BIND
}
