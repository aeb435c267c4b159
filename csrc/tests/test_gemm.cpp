// The GEMM under sanitizers and on emulated machines: every format, epilogue and tile height on
// small odd sizes, each against sums in double precision. tests/kernels/test_gemm.py does more
// where Python runs.
#include "kvloom/gemm.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "check.hpp"
#include "kvloom/pack_weights.hpp"

namespace kvloom {
namespace {

using testing::Random;

// Exactly as many bytes as asked for, so that the address sanitizer sees a step beyond.
struct Buffer {
  explicit Buffer(size_t num_bytes)
      : data(static_cast<uint8_t*>(::operator new(num_bytes, std::align_val_t(kCacheLineBytes)))) {
    std::memset(data, 0, num_bytes);
  }
  ~Buffer() { ::operator delete(data, std::align_val_t(kCacheLineBytes)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  uint8_t* data;
};

struct Case {
  Format format;
  SourceFormat source;
  RowFormat rows;
};

constexpr Case kCases[] = {
    {Format::F32, SourceFormat::F32, RowFormat::F32},
    {Format::BF16, SourceFormat::BF16, RowFormat::BF16},
    {Format::Q8, SourceFormat::Q8_0, RowFormat::S8},
    {Format::Q4, SourceFormat::Q4_0, RowFormat::S8},
    {Format::Q4, SourceFormat::Q4_1, RowFormat::S8},
    {Format::Q8, SourceFormat::Q8_0, RowFormat::BF16},
    {Format::Q4, SourceFormat::Q4_1, RowFormat::BF16},
};

constexpr uint16_t kScale = 0x2c00;   // 1/16 as f16
constexpr uint16_t kOffset = 0xb400;  // -1/4

// Random rows of a source format, and their values [num_outputs, num_inputs].
std::vector<uint8_t> random_rows(SourceFormat format, int num_outputs, int num_inputs,
                                 std::vector<double>* values) {
  Random random(static_cast<uint64_t>(num_outputs * 1000 + num_inputs));
  std::vector<uint8_t> raw(source_row_bytes(format, num_inputs) * static_cast<size_t>(num_outputs));
  uint8_t* to = raw.data();
  const int num_values = num_outputs * num_inputs;
  if (!is_block_format(format)) {
    for (int i = 0; i < num_values; ++i) {
      const float value = bf16_to_f32(f32_to_bf16(random.real()));
      const uint16_t bits = f32_to_bf16(value);
      const bool is_f32 = format == SourceFormat::F32;
      std::memcpy(to, is_f32 ? static_cast<const void*>(&value) : &bits, is_f32 ? 4 : 2);
      to += is_f32 ? 4 : 2;
      values->push_back(value);
    }
    return raw;
  }
  for (int block = 0; block < num_values / 32; ++block) {
    int codes[32];
    for (int& code : codes) {
      code = static_cast<int>(format == SourceFormat::Q8_0 ? random.integer(-128, 127)
                                                           : random.integer(0, 15));
    }
    std::memcpy(to, &kScale, 2);
    to += 2;
    if (format == SourceFormat::Q4_1) {
      std::memcpy(to, &kOffset, 2);
      to += 2;
    }
    const int half = format == SourceFormat::Q8_0 ? 32 : 16;
    for (int i = 0; i < half; ++i) {
      *to++ = static_cast<uint8_t>(half == 32 ? codes[i] : codes[i] | codes[i + 16] << 4);
    }
    const double offset = format == SourceFormat::Q4_0   ? -0.5
                          : format == SourceFormat::Q4_1 ? -0.25
                                                         : 0.0;
    for (int code : codes) values->push_back(code / 16.0 + offset);
  }
  return raw;
}

// One weight and rows, and what their product should be.
class Fixture {
 public:
  Fixture(const Case& format_case, OutputOrder order, int num_rows, int num_outputs, int num_inputs)
      : panels_(packed_weight_bytes(format_case.format, order, num_outputs, num_inputs)),
        packed_(packed_rows_bytes(format_case.rows, num_rows, num_inputs)),
        scratch_(gemm_scratch_bytes(format_case.format, num_inputs)) {
    weight = {format_case.format, order, num_outputs, num_inputs, panels_.data};
    rows = {format_case.rows, num_rows, num_inputs, packed_.data};
    const auto raw = random_rows(format_case.source, num_outputs, num_inputs, &weights_);
    pack_outputs(weight, {format_case.source, raw.data(), 0, num_outputs});
    const std::vector<float> x = Random(7).reals(int64_t{num_rows} * num_inputs);
    for (int row = 0; row < num_rows; ++row) {
      const float* values = x.data() + static_cast<size_t>(row * num_inputs);
      pack_row(rows, row, values);
      for (int k = 0; k < num_inputs; k += kGroupInputs) {
        append_as_packed(values + k, std::min(kGroupInputs, num_inputs - k));
      }
    }
  }

  void run(const Epilogue& epilogue) {
    const Gemm gemm{weight, rows, epilogue};
    const GemmPlan plan = plan_gemm(gemm, 2);
    for (int item = 0; item < plan.num_items; ++item) {
      run_gemm_item(gemm, plan, item, scratch_.data);
    }
  }

  // The product of a row and an output, and the sum of its terms' sizes.
  void expect(int row, int output, double* product, double* size) const {
    *product = *size = 0;
    for (int k = 0; k < weight.num_inputs; ++k) {
      const double x = x_[static_cast<size_t>(row * weight.num_inputs + k)];
      const double term = x * weights_[static_cast<size_t>(output * weight.num_inputs + k)];
      *product += term;
      *size += std::fabs(term);
    }
  }

  PackedWeight weight;
  PackedRows rows;

 private:
  // What the packed rows hold of values that start a group.
  void append_as_packed(const float* values, int count) {
    float group[kGroupInputs] = {};
    std::memcpy(group, values, sizeof(float) * static_cast<size_t>(count));
    S8Group quantised;
    quantise_group(group, &quantised);
    for (int i = 0; i < count; ++i) {
      switch (rows.format) {
        case RowFormat::F32:
          x_.push_back(values[i]);
          break;
        case RowFormat::BF16:
          x_.push_back(bf16_to_f32(f32_to_bf16(values[i])));
          break;
        case RowFormat::S8:
          CHECK_NEAR(quantised.scale * quantised.codes[i], values[i], quantised.scale * 0.51);
          x_.push_back(static_cast<double>(quantised.scale) * quantised.codes[i]);
      }
    }
  }

  Buffer panels_, packed_, scratch_;
  std::vector<double> x_;
  std::vector<double> weights_;
};

KVLOOM_TEST(products_of_all_formats_and_tile_heights) {
  for (const Case& format_case : kCases) {
    const int num_inputs = is_block_format(format_case.source) ? 64 : 40;
    for (int num_rows = 1; num_rows <= kMaxTileRows + 1; ++num_rows) {
      Fixture fixture(format_case, OutputOrder::Plain, num_rows, 40, num_inputs);
      std::vector<float> out(static_cast<size_t>(num_rows) * 40, 1.0f);
      Epilogue epilogue;
      epilogue.kind = EpilogueKind::Add;
      epilogue.out = out.data();
      epilogue.out_stride = 40;
      fixture.run(epilogue);
      for (int row = 0; row < num_rows; ++row) {
        for (int output = 0; output < 40; ++output) {
          double product, size;
          fixture.expect(row, output, &product, &size);
          // All values are exact in their formats: what is left is the rounding of float sums.
          CHECK_NEAR(out[static_cast<size_t>(row * 40 + output)], 1.0 + product,
                     1e-5 * size + 1e-6);
        }
      }
    }
  }
}

KVLOOM_TEST(the_best_of_each_panel_is_that_of_its_outputs) {
  constexpr int kRows = kMaxTileRows + 1;
  for (const Case& format_case : kCases) {
    for (const int num_outputs : {2, 32, 72}) {
      Fixture fixture(format_case, OutputOrder::Plain, kRows, num_outputs, 64);
      const size_t stride = static_cast<size_t>(num_outputs);
      std::vector<float> all(kRows * stride), kept(kRows * stride);
      Epilogue epilogue;
      epilogue.out = all.data();
      epilogue.out_stride = stride;
      fixture.run(epilogue);
      epilogue.kind = EpilogueKind::Best;
      epilogue.out = kept.data();
      fixture.run(epilogue);
      for (size_t row = 0; row < kRows; ++row) {
        const BestOutputs<const float> best(kept.data() + row * stride, num_outputs);
        for (int panel = 0; panel < best.num_panels; ++panel) {
          const auto first = all.begin() + static_cast<int64_t>(row * stride) + panel * 32;
          const auto greatest =
              std::max_element(first, first + std::min(32, num_outputs - panel * 32));
          CHECK(best.greatest[panel] == *greatest);
          CHECK(best.lane(panel) == greatest - first);
        }
      }
    }
  }
}

KVLOOM_TEST(gated_values_are_packed_as_rows_are) {
  constexpr int kSize = 40, kRows = kMaxTileRows + 2;
  for (const Case& format_case : kCases) {
    for (RowFormat packed_format : {RowFormat::F32, RowFormat::BF16, RowFormat::S8}) {
      const int num_inputs = is_block_format(format_case.source) ? 32 : 34;
      Fixture fixture(format_case, OutputOrder::GateUp, kRows, 2 * kSize, num_inputs);
      const std::vector<float> bias = Random(3).reals(2 * kSize);
      std::vector<float> out(kRows * kSize);
      Epilogue epilogue;
      epilogue.kind = EpilogueKind::GatedStore;
      epilogue.activation = Activation::GeluTanh;
      epilogue.bias = bias.data();
      epilogue.out = out.data();
      epilogue.out_stride = kSize;
      fixture.run(epilogue);
      const size_t num_bytes = packed_rows_bytes(packed_format, kRows, kSize);
      Buffer expected(num_bytes), actual(num_bytes);
      const PackedRows rows{packed_format, kRows, kSize, expected.data};
      for (int row = 0; row < kRows; ++row) pack_row(rows, row, out.data() + row * kSize);
      epilogue.kind = EpilogueKind::GatedPack;
      epilogue.packed = {packed_format, kRows, kSize, actual.data};
      fixture.run(epilogue);
      CHECK(std::memcmp(expected.data, actual.data, num_bytes) == 0);
    }
  }
}

KVLOOM_TEST(rows_with_nan_and_infinity_quantise_without_undefined_behaviour) {
  std::vector<float> values(kGroupInputs, 1.0f);
  values[3] = std::nanf("");
  values[17] = -INFINITY;
  values[18] = 3e38f;
  S8Group group;
  quantise_group(values.data(), &group);
  CHECK(std::isnan(group.scale));
}

KVLOOM_TEST(tiles_are_packed_as_their_rows_are) {
  Random random(9);
  for (const RowFormat format : {RowFormat::F32, RowFormat::BF16, RowFormat::S8}) {
    for (int num_rows = 1; num_rows <= 2 * kMaxTileRows; ++num_rows) {
      for (const int size : {1, 32, 70}) {
        std::vector<float> x = random.reals(num_rows * size);
        for (size_t i = 0; i < x.size(); ++i) x[i] *= std::exp2(static_cast<float>(i % 200) - 120);
        if (num_rows % 3 == 0) x[0] = 0.0f, x.back() = num_rows % 2 ? NAN : -INFINITY;
        std::vector<uint8_t> apart(packed_rows_bytes(format, num_rows, size), 0xaa);
        std::vector<uint8_t> together(apart.size(), 0x55);
        const PackedRows rows{format, num_rows, size, together.data()};
        for (int row = 0; row < num_rows; ++row) {
          pack_row({format, num_rows, size, apart.data()}, row, x.data() + row * size);
        }
        for (int tile = 0; tile < num_tiles(num_rows); ++tile) {
          pack_tile(rows, tile, {0, num_groups(size)}, x.data(), size);
        }
        CHECK(together == apart);
      }
    }
  }
}

}  // namespace
}  // namespace kvloom
