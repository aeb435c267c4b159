// Activation functions of gated layers, on vectors.
#pragma once

#include "kvloom/simd.hpp"

namespace kvloom {

enum class Activation {
  Silu,
  Gelu,
  GeluTanh,
  SwigluClamped,  // of gate and up together: gate <= 7, |up| <= 7, (up + 1) gate / (1 + e^-1.702
                  // gate)
};

constexpr float kLog2E = 1.44269504f;

// x / (1 + e^-z)
KVLOOM_INLINE vf32 times_sigmoid(vf32 x, vf32 z) {
  return x / (broadcast(1.0f) + exp2(z * broadcast(-kLog2E)));
}

// x times the normal distribution function of x. Its tail is Abramowitz and Stegun's 7.1.26 for
// erfc(|x| / sqrt 2), whose error is at most 1.5e-7.
KVLOOM_INLINE vf32 gelu(vf32 x) {
  const vf32 z = vabs(x) * broadcast(0.70710678f);
  const vf32 t = broadcast(1.0f) / fma(z, broadcast(0.3275911f), broadcast(1.0f));
  vf32 p = broadcast(1.061405429f);
  p = fma(p, t, broadcast(-1.453152027f));
  p = fma(p, t, broadcast(1.421413741f));
  p = fma(p, t, broadcast(-0.284496736f));
  p = fma(p, t, broadcast(0.254829592f)) * t;
  const vf32 tail = broadcast(0.5f) * p * exp2(z * z * broadcast(-kLog2E));
  return x * (x < broadcast(0.0f) ? tail : broadcast(1.0f) - tail);
}

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), and (1 + tanh z) / 2 = 1 / (1 + e^-2z).
KVLOOM_INLINE vf32 gelu_tanh(vf32 x) {
  const vf32 inner = x * fma(x * x, broadcast(0.044715f), broadcast(1.0f));
  return times_sigmoid(x, inner * broadcast(2.0f * 0.79788456f));
}

KVLOOM_INLINE vf32 activate(Activation activation, vf32 x) {
  switch (activation) {
    case Activation::Silu:
      return times_sigmoid(x, x);
    case Activation::Gelu:
      return gelu(x);
    case Activation::GeluTanh:
    case Activation::SwigluClamped:  // activate_gated's alone
      break;
  }
  return gelu_tanh(x);
}

// activation(gate) * up.
KVLOOM_INLINE vf32 activate_gated(Activation activation, vf32 gate, vf32 up) {
  if (activation != Activation::SwigluClamped) return activate(activation, gate) * up;
  const vf32 limit = broadcast(7.0f);
  gate = vmin(limit, gate);  // of a NaN, the second
  up = vmax(-limit, vmin(limit, up));
  return (up + broadcast(1.0f)) * times_sigmoid(gate, gate * broadcast(1.702f));
}

}  // namespace kvloom
