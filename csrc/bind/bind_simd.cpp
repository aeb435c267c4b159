// The operations of simd.hpp on arrays, for tests/kernels/test_simd.py. Lengths are multiples of
// kLanes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "kvloom/simd.hpp"

namespace nb = nanobind;

namespace kvloom {
namespace {

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Number of lanes to go through: `size`, if the others are as long and it is a multiple of kLanes.
template <class First, class... Rest>
size_t checked_size(const First& first, const Rest&... rest) {
  const size_t size = first.shape(0);
  if (size % kLanes != 0 || ((rest.shape(0) != size) || ...)) {
    throw nb::value_error("arrays must have one length, a multiple of num_lanes");
  }
  return size;
}

void unary(const std::string& name, In<float> x, Out<float> y) {
  vf32 (*function)(vf32) = nullptr;
  if (name == "exp2") function = [](vf32 v) { return exp2(v); };
  if (name == "abs") function = [](vf32 v) { return vabs(v); };
  if (name == "round") function = [](vf32 v) { return to_f32(round_to_i32(v)); };
  if (name == "reduce_add") function = [](vf32 v) { return broadcast(reduce_add(v)); };
  if (name == "reduce_max") function = [](vf32 v) { return broadcast(reduce_max(v)); };
  if (function == nullptr) throw nb::value_error("no such function");
  for (size_t i = 0, size = checked_size(x, y); i < size; i += kLanes) {
    store(y.data() + i, function(load(x.data() + i)));
  }
}

void binary(const std::string& name, In<float> a, In<float> b, Out<float> y) {
  vf32 (*function)(vf32, vf32) = nullptr;
  if (name == "max") function = [](vf32 u, vf32 v) { return vmax(u, v); };
  if (name == "min") function = [](vf32 u, vf32 v) { return vmin(u, v); };
  if (name == "fma") function = [](vf32 u, vf32 v) { return fma(u, v, u); };
  if (function == nullptr) throw nb::value_error("no such function");
  for (size_t i = 0, size = checked_size(a, b, y); i < size; i += kLanes) {
    store(y.data() + i, function(load(a.data() + i), load(b.data() + i)));
  }
}

void to_bf16(In<float> x, Out<uint16_t> y) {
  for (size_t i = 0, size = checked_size(x, y); i < size; i += kLanes) {
    store_bf16(y.data() + i, load(x.data() + i));
  }
}

void from_bf16(In<uint16_t> x, Out<float> y) {
  for (size_t i = 0, size = checked_size(x, y); i < size; i += kLanes) {
    store(y.data() + i, load_bf16(x.data() + i));
  }
}

void from_f16(In<uint16_t> x, Out<float> y) {
  for (size_t i = 0, size = checked_size(x, y); i < size; i += kLanes) {
    store(y.data() + i, load_f16(x.data() + i));
  }
}

void to_bf16_pairs(In<float> lo, In<float> hi, Out<uint32_t> y) {
  for (size_t i = 0, size = checked_size(lo, hi, y); i < size; i += kLanes) {
    store_i32(y.data() + i, pack_bf16_pairs(load(lo.data() + i), load(hi.data() + i)));
  }
}

void to_i8(In<int32_t> x, Out<int8_t> y) {
  for (size_t i = 0, size = checked_size(x, y); i < size; i += kLanes) {
    store_i8(y.data() + i, load_i32(x.data() + i));
  }
}

void from_bytes(bool is_signed, In<uint8_t> x, Out<int32_t> y) {
  for (size_t i = 0, size = checked_size(x, y); i < size; i += kLanes) {
    const uint8_t* p = x.data() + i;
    store_i32(y.data() + i, is_signed ? widen_s8(reinterpret_cast<const int8_t*>(p)) : widen_u8(p));
  }
}

// acc[i] += the products within lane i of a and b.
void add_dot_bf16(Out<float> acc, In<uint32_t> a, In<uint32_t> b) {
  for (size_t i = 0, size = checked_size(acc, a, b); i < size; i += kLanes) {
    const vf32 sum = dot_bf16(load(acc.data() + i), load_i32(a.data() + i), load_i32(b.data() + i));
    store(acc.data() + i, sum);
  }
}

void add_dot_bytes(const std::string& name, Out<int32_t> acc, In<uint32_t> a, In<uint32_t> b) {
  if (name != "u8s8" && name != "u7s8") throw nb::value_error("no such function");
  for (size_t i = 0, size = checked_size(acc, a, b); i < size; i += kLanes) {
    const vi32 before = load_i32(acc.data() + i);
    const vi32 u = load_i32(a.data() + i), s = load_i32(b.data() + i);
    store_i32(acc.data() + i, name == "u8s8" ? dot_u8s8(before, u, s) : dot_u7s8(before, u, s));
  }
}

// The first n values of x, the rest of the vector `fill`; then the first n of those stored over y.
void partial(In<float> x, int n, float fill, Out<float> y) {
  checked_size(x, y);
  if (n < 0 || n > kLanes || x.shape(0) != kLanes) throw nb::value_error("n is out of range");
  const vf32 loaded = load_partial(x.data(), n, fill);
  const vf32 expected = first_lanes(n) ? load(x.data()) : broadcast(fill);
  if (reduce_add((loaded == expected)) != -kLanes) throw std::logic_error("load_partial");
  store_partial(y.data(), loaded, n);
}

}  // namespace

void bind_simd(nb::module_& module) {
  using namespace nb::literals;
  // noconvert: nanobind would hand us a converted copy of another dtype, and lose what is written
  // to it.
  nb::module_ simd = module.def_submodule("simd", "The vector operations on arrays, for tests.");
  simd.def("unary", &unary, "name"_a, "x"_a.noconvert(), "y"_a.noconvert());
  simd.def("binary", &binary, "name"_a, "a"_a.noconvert(), "b"_a.noconvert(), "y"_a.noconvert());
  simd.def("to_bf16", &to_bf16, "x"_a.noconvert(), "y"_a.noconvert());
  simd.def("from_bf16", &from_bf16, "x"_a.noconvert(), "y"_a.noconvert());
  simd.def("from_f16", &from_f16, "x"_a.noconvert(), "y"_a.noconvert());
  simd.def("to_bf16_pairs", &to_bf16_pairs, "lo"_a.noconvert(), "hi"_a.noconvert(),
           "y"_a.noconvert());
  simd.def("to_i8", &to_i8, "x"_a.noconvert(), "y"_a.noconvert());
  simd.def("from_bytes", &from_bytes, "is_signed"_a, "x"_a.noconvert(), "y"_a.noconvert());
  simd.def("add_dot_bf16", &add_dot_bf16, "acc"_a.noconvert(), "a"_a.noconvert(),
           "b"_a.noconvert());
  simd.def("add_dot_bytes", &add_dot_bytes, "name"_a, "acc"_a.noconvert(), "a"_a.noconvert(),
           "b"_a.noconvert());
  simd.def("partial", &partial, "x"_a.noconvert(), "n"_a, "fill"_a, "y"_a.noconvert());
}

}  // namespace kvloom
