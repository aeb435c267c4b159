// Norms, embedding and element-wise operations, where Python's tests cannot run: arrays end where
// the values end, so that a sanitizer sees each value too many.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "check.hpp"
#include "kvloom/embedding.hpp"
#include "kvloom/norm.hpp"
#include "kvloom/rowwise.hpp"
#include "kvloom/select_rows.hpp"

namespace kvloom {
namespace {

using testing::Random;

constexpr int kSizes[] = {1, 2, 15, 31, 32, 40, 96, 100};

std::vector<float> normalised(const std::vector<float>& x, const std::vector<float>& weight,
                              float eps) {
  double sum = 0.0;
  for (const float value : x) sum += double{value} * value;
  const double root = std::sqrt(sum / static_cast<double>(x.size()) + eps);
  std::vector<float> y;
  for (size_t i = 0; i < x.size(); ++i) y.push_back(static_cast<float>(x[i] / root * weight[i]));
  return y;
}

KVLOOM_TEST(rms_norm_by_definition) {
  Random random(1);
  for (const int size : kSizes) {
    const std::vector<float> x = random.reals(size);
    const std::vector<float> weight = random.reals(size);
    const std::vector<float> expected = normalised(x, weight, 1e-5f);
    std::vector<float> y(x.size());
    rms_norm_row(x.data(), weight.data(), size, 1e-5f, y.data());
    for (size_t i = 0; i < y.size(); ++i) CHECK_NEAR(y[i], expected[i], 1e-5);
  }
}

KVLOOM_TEST(the_fused_norm_packs_what_the_norm_gives) {
  Random random(2);
  for (const RowFormat format : {RowFormat::F32, RowFormat::BF16, RowFormat::S8}) {
    for (const int size : kSizes) {
      constexpr int kNumRows = kMaxTileRows + 2;
      const std::vector<float> weight = random.reals(size), x = random.reals(kNumRows * size);
      std::vector<uint8_t> fused(packed_rows_bytes(format, kNumRows, size), 0xaa);
      std::vector<uint8_t> apart(fused.size(), 0xaa);
      for (int row = 0; row < kNumRows; ++row) {
        std::vector<float> y(static_cast<size_t>(size));
        rms_norm_row(x.data() + row * size, weight.data(), size, 1e-6f, y.data());
        pack_row({format, kNumRows, size, apart.data()}, row, y.data());
      }
      // In two parts, as two threads may do it.
      const PackedRows rows{format, kNumRows, size, fused.data()};
      const int half = num_groups(size) / 2;
      for (int tile = 0; tile < num_tiles(kNumRows); ++tile) {
        for (const GroupRange part : {GroupRange{0, half}, GroupRange{half, num_groups(size)}}) {
          rms_norm_pack_tile(x.data(), size, {weight.data(), size, 1e-6f}, rows, tile, part);
        }
      }
      CHECK(fused == apart);
    }
  }
}

KVLOOM_TEST(elementwise_operations_end_where_their_arrays_end) {
  Random random(3);
  for (const int size : kSizes) {
    const std::vector<float> a = random.reals(2 * size);
    const std::vector<float> b = random.reals(2 * size);
    std::vector<float> sum(a.size());
    map_run(MapKind::Add, a.data(), b.data(), false, 2 * size, sum.data());
    for (size_t i = 0; i < sum.size(); ++i) CHECK(sum[i] == a[i] + b[i]);

    std::vector<float> gated(static_cast<size_t>(size));
    gated_run(Activation::Silu, a.data(), a.data() + size, size, gated.data());
    for (int i = 0; i < size; ++i) {
      const double gate = a[static_cast<size_t>(i)];
      const double expected = gate / (1.0 + std::exp(-gate)) * a[static_cast<size_t>(size + i)];
      CHECK_NEAR(gated[static_cast<size_t>(i)], expected, 1e-6);
    }
  }
}

// One panel whose codes and scales are easy to tell apart.
KVLOOM_TEST(embedding_reads_each_format) {
  constexpr int kSize = 40;
  constexpr int kRow = 9;
  for (const Format format : {Format::F32, Format::BF16, Format::Q8, Format::Q4}) {
    std::vector<uint8_t> panels(packed_weight_bytes(format, OutputOrder::Plain, 20, kSize));
    const PackedWeight table{format, OutputOrder::Plain, 20, kSize, panels.data()};
    for (int i = 0; i < kSize; ++i) {
      uint8_t* group = group_at(table, 0, i / 32);
      const float value = static_cast<float>(i % 7);
      const uint16_t bf16 = f32_to_bf16(value);
      const uint16_t half = 0x3800;  // 0.5
      const uint8_t code = static_cast<uint8_t>(i % 7);
      uint8_t& nibbles = group[q4_offset(i % 32, kRow)];
      if (format == Format::F32) std::memcpy(group + f32_offset(i % 32, kRow), &value, 4);
      if (format == Format::BF16) std::memcpy(group + bf16_offset(i % 32, kRow), &bf16, 2);
      if (format == Format::Q8) group[q8_offset(i % 32, kRow)] = static_cast<uint8_t>(code + 128);
      if (format == Format::Q4) nibbles |= static_cast<uint8_t>(i % 32 < 16 ? code : code << 4);
      if (format == Format::Q8) std::memcpy(group + kQ8CodeBytes + 2 * kRow, &half, 2);
      if (format == Format::Q4) std::memcpy(group + kQ4CodeBytes + 2 * kRow, &half, 2);
    }
    const float scale = format == Format::Q8 || format == Format::Q4 ? 0.5f : 1.0f;
    const std::vector<int32_t> ids = {109, 99, 120};
    std::vector<float> out(3 * kSize, -1.0f);
    const EmbeddingArgs args{table, 100, ids.data(), 3, out.data(), kSize};
    for (int64_t item = 0; item < embedding_num_items(args); ++item) embedding_run_item(args, item);
    for (int i = 0; i < kSize; ++i) {
      CHECK(out[static_cast<size_t>(i)] == scale * static_cast<float>(i % 7));
    }
    CHECK(std::all_of(out.begin() + kSize, out.end(), [](float x) { return x == 0.0f; }));
  }
}

}  // namespace
}  // namespace kvloom
