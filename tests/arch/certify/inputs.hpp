// Inputs of the certification cases: the same on every machine for the same case.
#pragma once

#include <random>

#include "arch/platform.hpp"
#include "cases.hpp"

namespace hopwell::arch::certify {

inline std::vector<uint32_t> make_inputs(const Case& c) {
  uint32_t seed = 1;
  for (char letter : c.name) seed = seed * 31 + uint32_t(letter);
  std::mt19937 random(seed);
  constexpr uint32_t kSpecial[] = {0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f7fffff, 0x00000001,
                                   0x00800000, 0xffffffff, 0x3f800000, 0x477fefff, 0x477ff000, 0x33000000, 0x33000001,
                                   0x387fe000, 0x3f7f8000, 0x3f808000, 0x3f818000, 0x43e80000, 0x0000ffff};
  const auto half = [&](bool bf) {  // a multiple of 2^-7 from -1 to 1, exact in both formats
    const float v = float(int(random() % 257) - 128) * 0x1p-7f;
    const uint32_t u = bit_cast<uint32_t>(v);
    if (bf) return u >> 16;
    return v == 0 ? 0u : (u >> 16 & 0x8000) | (((u & 0x7fffffff) - 0x38000000) >> 13);
  };
  std::vector<uint32_t> words(c.in_words);
  for (size_t i = 0; i < words.size(); ++i) {
    uint32_t& w = words[i];
    switch (c.inputs) {
      case Inputs::bits:
        w = random() % 8 ? uint32_t(random()) : kSpecial[random() % std::size(kSpecial)];
        break;
      case Inputs::float_wide:
        w = random() % 3 ? uint32_t(random()) : kSpecial[random() % std::size(kSpecial)];
        break;
      case Inputs::bf16_unit:
        w = half(true) << 16 | half(true);
        break;
      case Inputs::fp16_unit:
        w = half(false) << 16 | half(false);
        break;
      case Inputs::integers:
        w = bit_cast<uint32_t>(float(int(random() % 17) - 8));
        break;
    }
  }
  return words;
}

}  // namespace hopwell::arch::certify
