// Random numbers that belong to a request: a function of its seed and of the output token's index.
#pragma once

#include <cstdint>

namespace kvloom {

// One block of Philox4x64 with 10 rounds (Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3", 2011). Key and upper counter words that numpy leaves at zero are zero here as well.
inline uint64_t philox_first_word(uint64_t key, uint64_t counter) {
  constexpr uint64_t kMultiplier0 = 0xD2E7470EE14C6C93ull;
  constexpr uint64_t kMultiplier1 = 0xCA5A826395121157ull;
  constexpr uint64_t kWeyl0 = 0x9E3779B97F4A7C15ull;
  constexpr uint64_t kWeyl1 = 0xBB67AE8584CAA73Bull;
  __extension__ using Wide = unsigned __int128;
  uint64_t words[4] = {counter, 0, 0, 0};
  uint64_t key0 = key;
  uint64_t key1 = 0;
  for (int round = 0; round < 10; ++round) {
    const Wide product0 = Wide{kMultiplier0} * words[0];
    const Wide product1 = Wide{kMultiplier1} * words[2];
    words[0] = static_cast<uint64_t>(product1 >> 64) ^ words[1] ^ key0;
    words[1] = static_cast<uint64_t>(product1);
    words[2] = static_cast<uint64_t>(product0 >> 64) ^ words[3] ^ key1;
    words[3] = static_cast<uint64_t>(product0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return words[0];
}

// Within [0, 1): numpy.random.Generator(Philox(key=seed, counter=output_index)).random(), bit for
// bit. numpy counts up before it generates, and keeps the upper 53 bits.
inline double draw_uniform(uint64_t seed, uint64_t output_index) {
  return static_cast<double>(philox_first_word(seed, output_index + 1) >> 11) * 0x1p-53;
}

}  // namespace kvloom
