// The screen of a weight against the whole product.
#include "kvloom/screen.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "check.hpp"

namespace kvloom {
namespace {

using testing::Random;

constexpr int kRows = kMaxTileRows + 1;

// Rows and a weight, whose whole product is known.
struct Fixture {
  Fixture(int num_outputs, int num_inputs)
      : panels(packed_weight_bytes(Format::BF16, OutputOrder::Plain, num_outputs, num_inputs)),
        packed(packed_rows_bytes(RowFormat::BF16, kRows, num_inputs)),
        coarse(packed_rows_bytes(RowFormat::S8, kRows, num_inputs)),
        all(static_cast<size_t>(kRows * num_outputs)),
        kept(all.size()),
        bounds_memory(OutputBounds::num_kept(num_panels(OutputOrder::Plain, num_outputs), kRows)) {
    weight = {Format::BF16, OutputOrder::Plain, num_outputs, num_inputs, panels.data()};
    rows = {RowFormat::BF16, kRows, num_inputs, packed.data()};
    coarse_rows = {RowFormat::S8, kRows, num_inputs, coarse.data()};
  }

  void fill(const std::vector<float>& weights, const std::vector<float>& x) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(weights.data());
    pack_outputs(weight, {SourceFormat::F32, bytes, 0, weight.num_outputs});
    for (int row = 0; row < kRows; ++row) pack_row(rows, row, x.data() + row * weight.num_inputs);
    Epilogue epilogue;
    epilogue.out = all.data();
    run({weight, rows, epilogue});
  }

  void run(Gemm gemm) const {
    gemm.epilogue.out_stride = static_cast<size_t>(weight.num_outputs);
    const GemmPlan plan = plan_gemm(gemm, 2);
    for (int item = 0; item < plan.num_items; ++item) run_gemm_item(gemm, plan, item, nullptr);
  }

  // The bounds of all rows in `kept`.
  void estimate(const Screen& screen) {
    std::vector<uint16_t> values(static_cast<size_t>(padded_inputs(weight.num_inputs)));
    for (int row = 0; row < kRows; ++row) {
      unpack_bf16_row(rows, row, values.data());
      row_bounds[row] = pack_coarse_row(coarse_rows, row, values.data());
    }
    bounds = {screen.norms(), screen.errors(),
              row_bounds,     num_panels(weight.order, weight.num_outputs),
              kRows,          bounds_memory.data()};
    bounds.clear();
    Epilogue epilogue;
    epilogue.kind = EpilogueKind::Bounds;
    epilogue.bounds = &bounds;
    run({screen.coarse(), coarse_rows, epilogue});
  }

  BestOutputs<float> kept_of(int row) {
    return {kept.data() + row * weight.num_outputs, weight.num_outputs};
  }
  const float* all_of(int row) const { return all.data() + row * weight.num_outputs; }

  Region panels, packed, coarse;
  PackedWeight weight;
  PackedRows rows, coarse_rows;
  RowBound row_bounds[kRows];
  OutputBounds bounds{};
  std::vector<float> all, kept, bounds_memory;
};

bool is_within(float greatest, const PanelBounds& bounds, int panel) {
  const int block = panel / PanelBounds::kBlockPanels, place = panel % PanelBounds::kBlockPanels;
  return greatest <= bounds.most(block)[place] && greatest >= bounds.least(block)[place];
}

void make_all(Screen& screen) {
  const PackedWeight& weight = screen.exact();
  std::vector<float> values(static_cast<size_t>(padded_inputs(weight.num_inputs)));
  for (int i = 0; i < num_panels(weight.order, weight.num_outputs); ++i) {
    screen.make_panel(i, values.data());
  }
}

KVLOOM_TEST(f16_numbers_below) {
  Random random(3);
  const auto check = [](float value) {
    const uint16_t bits = truncate_to_f16(value);
    CHECK(f16_to_f32(bits) <= value);
    CHECK(bits == 0x7bff || f16_to_f32(static_cast<uint16_t>(bits + 1)) > value);
  };
  for (const float value : {0.0f, 1e-40f, 5.9e-8f, 6e-8f, 6.1e-5f, 1.0f, 65504.0f, 7e4f, 1e30f}) {
    check(value);
  }
  for (int i = 0; i < 1000; ++i) {
    check(std::fabs(std::ldexp(random.real(), static_cast<int>(random.integer(-30, 20)))));
  }
}

KVLOOM_TEST(bounds_hold_and_the_best_is_that_of_the_whole_product) {
  for (const int num_outputs : {2, 33, 640}) {
    for (const int num_inputs : {7, 64, 200}) {
      Random random(static_cast<uint64_t>(num_outputs + num_inputs));
      Fixture fixture(num_outputs, num_inputs);
      std::vector<float> weights = random.reals(int64_t{num_outputs} * num_inputs);
      std::vector<float> x = random.reals(int64_t{kRows} * num_inputs);
      // Outliers, equal outputs, a row of zeros, and numbers so small that f16 scales vanish.
      for (size_t i = 0; i < x.size(); i += 37) x[i] *= 100.0f;
      std::copy_n(weights.begin(), num_inputs, weights.end() - num_inputs);
      std::fill_n(x.begin() + num_inputs, num_inputs, 0.0f);
      for (int i = 0; i < num_inputs; ++i) x[static_cast<size_t>(2 * num_inputs + i)] *= 1e-30f;
      fixture.fill(weights, x);
      Screen screen(fixture.weight);
      make_all(screen);
      CHECK(screen.is_usable());
      fixture.estimate(screen);
      std::vector<uint16_t> values(static_cast<size_t>(padded_inputs(num_inputs)));
      for (int row = 0; row < kRows; ++row) {
        const PanelBounds bounds = fixture.bounds.of_row(row);
        const float* all = fixture.all_of(row);
        for (int panel = 0; panel < bounds.num_panels(); ++panel) {
          const float greatest =
              *std::max_element(all + panel * kPanelOutputs,
                                all + std::min((panel + 1) * kPanelOutputs, num_outputs));
          CHECK(is_within(greatest, bounds, panel));
        }
        const float least = least_maximum(bounds);
        const int count = count_candidates(bounds, least);
        CHECK(count >= 1 && count <= bounds.num_panels());
        unpack_bf16_row(fixture.rows, row, values.data());
        const BestOutputs<float> kept = fixture.kept_of(row);
        finish_candidates({fixture.weight, values.data(), kept}, bounds, least);
        const auto best = std::max_element(kept.greatest, kept.greatest + kept.num_panels);
        const int panel = static_cast<int>(best - kept.greatest);
        CHECK(panel * kPanelOutputs + kept.lane(panel) ==
              std::max_element(all, all + num_outputs) - all);
        CHECK(*best == *std::max_element(all, all + num_outputs));
      }
    }
  }
}

KVLOOM_TEST(bounds_hold_where_products_are_taken_for_0) {
  // Of output 0 thirty products of 2^-127 each, which some machines flush; of output 40 one of
  // 2^-126, which they keep.
  constexpr int kOutputs = 64, kInputs = 32;
  std::vector<float> weights(kOutputs * kInputs), x(kRows * kInputs);
  for (size_t i = 1; i < kInputs; ++i) x[i] = (i == 1 ? 127.0f : 8.0f) * 0x1p-106f;
  for (size_t i = 2; i < kInputs; ++i) weights[i] = 0x1p-24f;
  weights[0] = weights[40 * kInputs] = 127.0f * 0x1p-24f;
  weights[40 * kInputs + 2] = 0x1p-23f;
  Fixture fixture(kOutputs, kInputs);
  fixture.fill(weights, x);
  Screen screen(fixture.weight);
  make_all(screen);
  fixture.estimate(screen);
  const PanelBounds bounds = fixture.bounds.of_row(0);
  for (int panel = 0; panel < bounds.num_panels(); ++panel) {
    const float* all = fixture.all_of(0) + panel * kPanelOutputs;
    const float greatest = *std::max_element(all, all + kPanelOutputs);
    CHECK(is_within(greatest, bounds, panel));
  }
}

KVLOOM_TEST(what_is_no_number_is_not_screened) {
  for (const float strange : {std::nanf(""), INFINITY, -3e38f}) {
    Fixture fixture(40, 64);
    std::vector<float> weights(40 * 64, 0.5f), x(kRows * 64, 1.0f);
    x[64 * 3 + 5] = strange;
    fixture.fill(weights, x);
    Screen screen(fixture.weight);
    make_all(screen);
    CHECK(screen.is_usable());
    fixture.estimate(screen);
    for (int row = 0; row < kRows; ++row) {
      CHECK(std::isfinite(least_maximum(fixture.bounds.of_row(row))) == (row != 3));
    }
    weights[70] = strange;
    fixture.fill(weights, x);
    make_all(screen);
    CHECK(!screen.is_usable());
  }
}

}  // namespace
}  // namespace kvloom
