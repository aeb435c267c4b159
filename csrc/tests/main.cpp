// Runs all tests, or those whose names contain the first argument.
#include <cstdio>
#include <cstring>

#include "check.hpp"
#include "kvloom/simd.hpp"

int main(int argc, char** argv) {
  const char* part_of_name = argc > 1 ? argv[1] : "";
  int num_run = 0;
  for (const auto& test : kvloom::testing::tests()) {
    if (std::strstr(test.name, part_of_name) == nullptr) continue;
    const int before = kvloom::testing::num_failures();
    test.function();
    ++num_run;
    if (kvloom::testing::num_failures() > before) std::fprintf(stderr, "FAILED %s\n", test.name);
  }
  const int num_failures = kvloom::testing::num_failures();
  std::printf("%s: %d tests, %d failed checks\n", kvloom::kIsaName, num_run, num_failures);
  return num_run > 0 && num_failures == 0 ? 0 : 1;
}
