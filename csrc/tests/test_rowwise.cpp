// Operations on rows by their definitions, where arrays end where the values end.
#include <algorithm>
#include <cmath>
#include <vector>

#include "check.hpp"
#include "kvloom/rowwise.hpp"

namespace kvloom {
namespace {

using testing::Random;

constexpr int kSizes[] = {1, 2, 15, 31, 32, 40, 96, 100};

double mapped(MapKind kind, double a, double b) {
  switch (kind) {
    case MapKind::Add:
      return a + b;
    case MapKind::Multiply:
      return a * b;
    case MapKind::SoftCap:
      return b * std::tanh(a / b);
    case MapKind::Silu:
      return a / (1.0 + std::exp(-a));
    case MapKind::Gelu:
      return a * 0.5 * (1.0 + std::erf(a * std::sqrt(0.5)));
    case MapKind::GeluTanh:
      return a * 0.5 * (1.0 + std::tanh(0.7978845608028654 * (a + 0.044715 * a * a * a)));
    case MapKind::Tanh:
      return std::tanh(a);
  }
  return 0.0;
}

KVLOOM_TEST(maps_by_definition) {
  Random random(1);
  for (const MapKind kind : {MapKind::Add, MapKind::Multiply, MapKind::SoftCap, MapKind::Silu,
                             MapKind::Gelu, MapKind::GeluTanh, MapKind::Tanh}) {
    for (const int size : kSizes) {
      const std::vector<float> a = random.reals(size), b = random.reals(size);
      std::vector<float> each(a.size()), one(a.size());
      map_run(kind, a.data(), b.data(), false, size, each.data());
      map_run(kind, a.data(), b.data(), true, size, one.data());
      for (size_t i = 0; i < a.size(); ++i) {
        CHECK_NEAR(each[i], mapped(kind, a[i], b[i]), 2e-6);
        CHECK_NEAR(one[i], mapped(kind, a[i], b[0]), 2e-6);
      }
    }
  }
}

struct Statistics {
  double mean = 0.0, deviation = 0.0, root = 0.0;
};

Statistics statistics_of(const std::vector<float>& x) {
  Statistics s;
  const double count = static_cast<double>(x.size());
  for (const float value : x) s.mean += value / count;
  for (const float value : x) {
    s.deviation += (value - s.mean) * (value - s.mean) / count;
    s.root += double{value} * value / count;
  }
  s.deviation = std::sqrt(s.deviation);
  s.root = std::sqrt(s.root);
  return s;
}

KVLOOM_TEST(operations_on_whole_runs_by_definition) {
  Random random(2);
  for (const int size : kSizes) {
    const std::vector<float> x = random.reals(size), y = random.reals(size);
    const std::vector<float> weight = random.reals(size);
    const Statistics s = statistics_of(x), target = statistics_of(y);
    std::vector<float> normed(x.size()), top(x.size()), matched(x.size()), sum(x.size());
    layer_norm_run(x.data(), weight.data(), size, 1e-3f, normed.data());
    gaussian_top_run(x.data(), 0.5f, size, top.data());
    match_rms_run(x.data(), y.data(), 1e-3f, size, matched.data());
    add_norm_run(y.data(), x.data(), {weight.data(), size, 1e-3f}, sum.data());
    for (size_t i = 0; i < x.size(); ++i) {
      const double spread = std::sqrt(s.deviation * s.deviation + 1e-3);
      CHECK_NEAR(normed[i], (x[i] - s.mean) / spread * weight[i], 1e-5);
      CHECK_NEAR(top[i], std::max(x[i] - (s.mean + 0.5 * s.deviation), 0.0), 1e-5);
      CHECK_NEAR(matched[i], x[i] * target.root / std::max(s.root, 1e-3), 1e-5);
      CHECK_NEAR(sum[i], y[i] + x[i] / std::sqrt(s.root * s.root + 1e-3) * weight[i], 1e-5);
    }
  }
}

KVLOOM_TEST(the_clamped_gate_by_definition) {
  Random random(3);
  for (const int size : kSizes) {
    std::vector<float> gate = random.reals(size), up = random.reals(size);
    for (float& value : gate) value *= 9.0f;
    for (float& value : up) value *= 9.0f;
    std::vector<float> out(gate.size());
    gated_run(Activation::SwigluClamped, gate.data(), up.data(), size, out.data());
    for (size_t i = 0; i < out.size(); ++i) {
      const double g = std::min(gate[i], 7.0f), u = std::max(-7.0f, std::min(up[i], 7.0f));
      CHECK_NEAR(out[i], (u + 1.0) * g / (1.0 + std::exp(-1.702 * g)), 1e-5);
    }
  }
}

}  // namespace
}  // namespace kvloom
