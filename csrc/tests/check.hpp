// The least that tests need. They are for what Python's tests cannot do: run under sanitizers, and
// on machines that are only emulated. Each test_X.cpp registers its tests; main.cpp runs them.
//
//   KVLOOM_TEST(norm_of_zero_is_zero) {
//     CHECK(y[0] == 0.0f);
//     CHECK_NEAR(y[1], expected, 1e-6);
//   }
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace kvloom::testing {

struct Test {
  const char* name;
  void (*function)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
inline int& num_failures() {
  static int count = 0;
  return count;
}

struct Registration {
  Registration(const char* name, void (*function)()) { tests().push_back({name, function}); }
};

inline void fail(const char* file, int line, const char* what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
  ++num_failures();
}

// Numbers that look random and are the same everywhere (splitmix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t x = (state_ += 0x9e3779b97f4a7c15u);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  // In [low, high]
  int64_t integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  // In [-1, 1)
  float real() { return static_cast<float>(static_cast<int64_t>(bits()) >> 40) * 0x1p-23f; }

  std::vector<float> reals(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = real();
    return values;
  }

 private:
  uint64_t state_;
};

}  // namespace kvloom::testing

#define KVLOOM_TEST(name)                                                         \
  static void name();                                                             \
  static const kvloom::testing::Registration kvloom_register_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) kvloom::testing::fail(__FILE__, __LINE__, #condition); \
  } while (false)

// Also fails if either is NaN.
#define CHECK_NEAR(actual, expected, tolerance)                                      \
  do {                                                                               \
    const double check_actual = (actual), check_expected = (expected);               \
    if (!(std::fabs(check_actual - check_expected) <= (tolerance))) {                \
      kvloom::testing::fail(__FILE__, __LINE__, #actual " is not near " #expected);  \
      std::fprintf(stderr, "  %.9g, expected %.9g\n", check_actual, check_expected); \
    }                                                                                \
  } while (false)
