// Inputs of the certification cases: the same on every machine for the same case.
#pragma once

#include <random>

#include "arch/platform.hpp"
#include "cases.hpp"

namespace hopwell::arch::certify {

/// Random words of one kind. Each draw is a separate statement, so that every compiler evaluates draws in the same
/// order.
class Words {
 public:
  explicit Words(uint32_t seed) : random_(seed) {}

  uint32_t next(Inputs kind, size_t index) {
    switch (kind) {
      case Inputs::bits:
        return below(8) ? any() : any_special();
      case Inputs::float_wide:
        return below(3) ? any() : any_special();
      case Inputs::float_small:
        return below(8) ? (any() & 0x80ffffff) >> below(4) * 8 | sign() << 16 : any_special();
      case Inputs::integers:
        return bit_cast<uint32_t>(float(int(below(17)) - 8));
      case Inputs::bf16_unit:
      case Inputs::fp16_unit:
        return pair([&] { return unit(kind == Inputs::bf16_unit); });
      case Inputs::e4m3_unit:
        return four([&] { return unit_e4m3(); });
      case Inputs::e4m3_special:
        return four([&] { return below(64) ? unit_e4m3() : special_e4m3(); });
      case Inputs::bf16_special:
      case Inputs::fp16_special:
        return pair(
            [&] { return below(64) ? unit(kind == Inputs::bf16_special) : special(kind == Inputs::bf16_special); });
      default:
        return pair([&] { return factor(kind == Inputs::bf16_subnormal, index % 8 < 4); });
    }
  }

 private:
  uint32_t any() { return uint32_t(random_()); }
  uint32_t below(uint32_t n) { return any() % n; }
  uint32_t sign() { return below(2) << 15; }

  template <class Half>
  static uint32_t pair(Half half) {
    const uint32_t low = half();
    return half() << 16 | low;
  }

  template <class Byte>
  static uint32_t four(Byte byte) {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word = word << 8 | byte();
    return word;
  }

  uint32_t any_special() {
    constexpr uint32_t kSpecial[] = {0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f7fffff, 0x00000001,
                                     0x00800000, 0xffffffff, 0x3f800000, 0x477fefff, 0x477ff000, 0x33000000, 0x33000001,
                                     0x387fe000, 0x3f7f8000, 0x3f808000, 0x3f818000, 0x43e80000, 0x0000ffff};
    return kSpecial[below(std::size(kSpecial))];
  }

  // A multiple of 2^-7 from -1 to 1, exact in both formats.
  uint32_t unit(bool bf) {
    const float value = float(int(below(257)) - 128) * 0x1p-7f;
    const uint32_t u = bit_cast<uint32_t>(value);
    if (bf) return u >> 16;
    return value == 0 ? 0u : (u >> 16 & 0x8000) | (((u & 0x7fffffff) - 0x38000000) >> 13);
  }

  // Any e4m3 up to 1, including subnormals; below: NaN, subnormal or zero.
  uint32_t unit_e4m3() { return below(0x39) | sign() >> 8; }
  uint32_t special_e4m3() {
    constexpr uint32_t kE4m3[] = {0x7f, 0x7f, 1, 7, 0};
    const uint32_t magnitude = kE4m3[below(std::size(kE4m3))];
    return magnitude | sign() >> 8;
  }

  // Infinity, NaN, subnormal or zero, of either sign.
  uint32_t special(bool bf) {
    constexpr uint32_t kBf16[] = {0x7f80, 0x7f80, 0x7fc1, 0x7f81, 1, 0x7f, 0},
                       kFp16[] = {0x7c00, 0x7c00, 0x7e01, 0x7c01, 1, 0x3ff, 0};
    const uint32_t magnitude = (bf ? kBf16 : kFp16)[below(std::size(kBf16))];
    return magnitude | sign();
  }

  // A subnormal number (up to 2^-126 in bf16, 2^-14 in fp16), or the reciprocal of that limit: products reach 1.
  uint32_t factor(bool bf, bool subnormal) {
    const uint32_t magnitude = subnormal ? below(bf ? 128 : 1024) : bf ? 0x7e80 : 0x7400;
    return magnitude | sign();
  }

  std::mt19937 random_;
};

inline std::vector<uint32_t> make_inputs(const Case& c) {
  uint32_t seed = 1;
  for (char letter : c.name) seed = seed * 31 + uint32_t(letter);
  Words source(seed);
  std::vector<uint32_t> words(c.in_words);
  for (size_t i = 0; i < words.size(); ++i) words[i] = source.next(c.inputs, i);
  return words;
}

}  // namespace hopwell::arch::certify
