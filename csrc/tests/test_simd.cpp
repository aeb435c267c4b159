// The vector operations against scalar twins; tests/kernels/test_simd.py does more where Python
// runs.
#include "kvloom/simd.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.hpp"

namespace kvloom {
namespace {

using testing::Random;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Equal, or both NaN.
bool is_same(float a, float b) { return a == b || (a != a && b != b); }

float lane(vf32 x, int i) {
  float lanes[kLanes];
  store(lanes, x);
  return lanes[i];
}
int32_t lane(vi32 x, int i) {
  int32_t lanes[kLanes];
  store_i32(lanes, x);
  return lanes[i];
}

}  // namespace

KVLOOM_TEST(half_precision_numbers_are_read_exactly) {
  for (uint32_t first = 0; first < 65536; first += kLanes) {
    uint16_t bits[kLanes];
    for (int i = 0; i < kLanes; ++i) bits[i] = static_cast<uint16_t>(first + i);
    const vf32 from_f16 = load_f16(bits), from_bf16 = load_bf16(bits);
    for (int i = 0; i < kLanes; ++i) {
      CHECK(is_same(lane(from_f16, i), f16_to_f32(bits[i])));
      CHECK(is_same(lane(from_bf16, i), bf16_to_f32(bits[i])));
    }
  }
  CHECK(f16_to_f32(0x3c00) == 1.0f && f16_to_f32(0xc000) == -2.0f && f16_to_f32(0x7bff) == 65504);
  CHECK(f16_to_f32(0x0001) == 0x1p-24f && f16_to_f32(0x03ff) == 1023 * 0x1p-24f);
  CHECK(f16_to_f32(0xfc00) == -kInfinity && std::isnan(f16_to_f32(0x7e00)));
}

KVLOOM_TEST(bf16_is_stored_nearest_even) {
  Random random(1);
  for (int round = 0; round < 2000; ++round) {
    float x[kLanes], other[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const uint32_t mantissa = static_cast<uint32_t>(random.bits()) & 0x7fffff;
      const uint32_t tie = round % 3 == 0 ? (mantissa & 0x7f8000) : mantissa;
      x[i] = bit_cast<float>(0x3f000000u + (static_cast<uint32_t>(round) << 13) + tie);
      other[i] = -x[i];
    }
    if (round == 0) x[0] = kNan, x[1] = kInfinity, x[2] = 0, x[3] = -kInfinity;
    uint16_t bits[kLanes];
    store_bf16(bits, load(x));
    const vi32 pairs = pack_bf16_pairs(load(x), load(other));
    for (int i = 0; i < kLanes; ++i) {
      CHECK(is_same(bf16_to_f32(bits[i]), bf16_to_f32(f32_to_bf16(x[i]))));
      const uint32_t pair = static_cast<uint32_t>(lane(pairs, i));
      CHECK((pair & 0xffff) == bits[i] && pair >> 16 == f32_to_bf16(other[i]));
    }
  }
}

// Units that say where they come from.
vi32 numbered(int first) { return lane_index() + broadcast(int32_t{first}); }

KVLOOM_TEST(zips_take_lanes_in_turn) {
  const vi32 low = zip_low(numbered(0), numbered(100));
  const vi32 high = zip_high(numbered(0), numbered(100));
  for (int i = 0; i < kLanes; ++i) {
    CHECK(lane(low, i) == i / 2 + i % 2 * 100);
    CHECK(lane(high, i) == kLanes / 2 + i / 2 + i % 2 * 100);
  }
}

KVLOOM_TEST(a_transposed_matrix_has_its_columns_in_rows) {
  vi32 units[8], wide[32];
  for (int i = 0; i < 8; ++i) units[i] = numbered(i * kLanes);
  for (int i = 0; i < 32; ++i) wide[i] = numbered(i * kLanes);
  transpose(units);
  transpose(wide);
  for (int row = 0; row < kLanes; ++row) {
    for (int i = 0; i < 8; ++i) CHECK(lane(units[i], row) == row * 8 + i);
    for (int i = 0; i < 32; ++i) CHECK(lane(wide[i], row) == row * 32 + i);
  }
}

KVLOOM_TEST(each_row_is_reduced_to_its_lane) {
  vi32 rows[kLanes];
  for (int r = 0; r < kLanes; ++r) rows[r] = numbered(1000 * r);
  const vi32 sums = reduce_each(rows, [](vi32 a, vi32 b) { return a + b; });
  for (int r = 0; r < kLanes; ++r) {
    CHECK(lane(sums, r) == 1000 * r * kLanes + kLanes * (kLanes - 1) / 2);
  }
}

KVLOOM_TEST(quads_are_packed_in_order_and_saturate) {
  const vi32 packed = pack_quads(numbered(-130), numbered(-kLanes), numbered(0), numbered(120));
  int8_t bytes[4 * kLanes];
  store_i32(bytes, packed);
  for (int i = 0; i < kLanes; ++i) {
    CHECK(bytes[i] == std::max(-130 + i, -128) && bytes[kLanes + i] == i - kLanes);
    CHECK(bytes[2 * kLanes + i] == i && bytes[3 * kLanes + i] == std::min(120 + i, 127));
  }
}

KVLOOM_TEST(a_partial_store_leaves_what_follows) {
  for (int n = 0; n <= kLanes; ++n) {
    std::vector<float> memory(kLanes, -1.0f);
    store_partial(memory.data(), to_f32(numbered(0)), n);
    for (int i = 0; i < kLanes; ++i) CHECK(memory[static_cast<size_t>(i)] == (i < n ? i : -1));
  }
}

KVLOOM_TEST(exp2_is_accurate_and_exact_at_its_ends) {
  for (float x = -126.0f; x < 127.4f; x += 0.0137f) {
    const double expected = std::exp2(static_cast<double>(x));
    CHECK_NEAR(lane(exp2(broadcast(x)), 0) / expected, 1.0, 3e-7);
  }
  CHECK(lane(exp2(broadcast(-150.0f)), 0) == 0 && lane(exp2(broadcast(-kInfinity)), 0) == 0);
  CHECK(lane(exp2(broadcast(0.0f)), 0) == 1 && lane(exp2(broadcast(kInfinity)), 0) == kInfinity);
  CHECK(std::isnan(lane(exp2(broadcast(kNan)), 0)));
}

KVLOOM_TEST(dots_of_bytes_are_exact) {
  Random random(2);
  for (int round = 0; round < 500; ++round) {
    uint8_t u[kLanes * 4], u7[kLanes * 4];
    int8_t s[kLanes * 4];
    for (int i = 0; i < kLanes * 4; ++i) {
      u[i] = round == 0 ? 255 : static_cast<uint8_t>(random.bits());
      u7[i] = u[i] & 127;
      s[i] = round == 0 ? -128 : static_cast<int8_t>(random.bits());
    }
    const vi32 before = broadcast(int32_t{round});
    const vi32 wide = dot_u8s8(before, load_i32(u), load_i32(s));
    const vi32 narrow = dot_u7s8(before, load_i32(u7), load_i32(s));
    for (int i = 0; i < kLanes; ++i) {
      int32_t expected = round, expected7 = round;
      for (int j = 4 * i; j < 4 * i + 4; ++j) expected += u[j] * s[j], expected7 += u7[j] * s[j];
      CHECK(lane(wide, i) == expected && lane(narrow, i) == expected7);
    }
  }
}

KVLOOM_TEST(dot_bf16_adds_two_products) {
  Random random(3);
  for (int round = 0; round < 500; ++round) {
    float a[2][kLanes], b[2][kLanes], c[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < 2; ++j) {
        a[j][i] = bf16_to_f32(f32_to_bf16(random.real()));
        b[j][i] = bf16_to_f32(f32_to_bf16(random.real()));
      }
      c[i] = random.real();
    }
    const vf32 sum = dot_bf16(load(c), pack_bf16_pairs(load(a[0]), load(a[1])),
                              pack_bf16_pairs(load(b[0]), load(b[1])));
    for (int i = 0; i < kLanes; ++i) {
      CHECK_NEAR(lane(sum, i), c[i] + double{a[0][i]} * b[0][i] + double{a[1][i]} * b[1][i], 5e-7);
    }
  }
}

KVLOOM_TEST(bytes_nibbles_and_saturation) {
  uint8_t bytes[kLanes];
  int8_t stored[kLanes];
  int32_t wide[kLanes];
  const int32_t ends[] = {0,
                          127,
                          128,
                          -128,
                          -129,
                          std::numeric_limits<int32_t>::max(),
                          std::numeric_limits<int32_t>::min()};
  for (int i = 0; i < kLanes; ++i) {
    bytes[i] = static_cast<uint8_t>(250 + i);
    wide[i] = ends[i % 7];
  }
  store_i8(stored, load_i32(wide));
  const vi32 from_signed = widen_s8(reinterpret_cast<const int8_t*>(bytes));
  for (int i = 0; i < kLanes; ++i) {
    CHECK(lane(widen_u8(bytes), i) == bytes[i]);
    CHECK(lane(from_signed, i) == static_cast<int8_t>(bytes[i]));
    CHECK(stored[i] == (wide[i] > 127 ? 127 : wide[i] < -128 ? -128 : wide[i]));
  }
  const vi32 codes = broadcast(static_cast<int32_t>(0xfedcba98u));
  CHECK(lane(low_nibbles(codes), 0) == 0x0e0c0a08 && lane(high_nibbles(codes), 0) == 0x0f0d0b09);
}

KVLOOM_TEST(halves_are_stored_beside_others) {
  std::vector<uint16_t> x, expected(2 * kLanes, 0xabcd), units(2 * kLanes, 0xabcd);
  for (int i = 0; i < kLanes; ++i) x.push_back(static_cast<uint16_t>(0xff00 + i));
  for (const int half : {0, 1}) {
    for (size_t i = 0; i < x.size(); ++i) expected[2 * i + static_cast<size_t>(half)] = x[i];
    store_halves(units.data(), x.data(), half);
    CHECK(units == expected);
  }
}

KVLOOM_TEST(partial_vectors_stay_within_their_memory) {
  for (int n = 0; n <= kLanes; ++n) {
    // As large as needed and no larger: AddressSanitizer sees a step beyond.
    std::vector<float> x(static_cast<size_t>(n), 2.0f), y(static_cast<size_t>(n), 0.0f);
    const vf32 loaded = load_partial(x.data(), n, -1.0f);
    store_partial(y.data(), loaded, n);
    CHECK(x == y);
    CHECK(reduce_add(loaded) == 2.0f * static_cast<float>(n) - static_cast<float>(kLanes - n));
    CHECK(reduce_max(loaded) == (n > 0 ? 2.0f : -1.0f));
    CHECK(reduce_add(first_lanes(n)) == -n);
    CHECK(reduce_max(first_lanes(n)) == (n < kLanes ? 0 : -1));
  }
}

KVLOOM_TEST(reductions_reach_every_lane) {
  for (int i = 0; i < kLanes; ++i) {
    const vf32 one = lane_index() == broadcast(i) ? broadcast(5.0f) : broadcast(-1.0f);
    CHECK(reduce_max(one) == 5.0f);
    CHECK(reduce_max(as_i32(one)) == bit_cast<int32_t>(5.0f));
    CHECK(reduce_add(one) == 5.0f - static_cast<float>(kLanes - 1));
    CHECK(lanes_of(one == broadcast(5.0f)) == 1u << i);
    CHECK(lanes_of(one != broadcast(5.0f)) == (1u << kLanes) - 1 - (1u << i));
  }
}

KVLOOM_TEST(comparisons_rounding_and_fused_sums) {
  CHECK(is_same(lane(vmax(broadcast(1.0f), broadcast(kNan)), 0), kNan));
  CHECK(lane(vmax(broadcast(kNan), broadcast(1.0f)), 0) == 1.0f);
  CHECK(lane(vmin(broadcast(2.0f), broadcast(1.0f)), 0) == 1.0f);
  CHECK(lane(vabs(broadcast(-3.5f)), 0) == 3.5f);
  CHECK(lane(fma(broadcast(2.0f), broadcast(3.0f), broadcast(4.0f)), kLanes - 1) == 10.0f);
  const float halves[] = {0.5f, 1.5f, -2.5f, 126.49f, -4194304.0f};
  const int32_t rounded[] = {0, 2, -2, 126, -4194304};
  for (int i = 0; i < 5; ++i) CHECK(lane(round_to_i32(broadcast(halves[i])), 0) == rounded[i]);
}

}  // namespace kvloom
