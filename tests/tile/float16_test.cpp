// Conversions to and from the 16-bit types: every value, and every tie between neighbours.
#include "tile/float16.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tile/cpu/vector.hpp"

namespace hopwell {
namespace {

template <class T>
class Float16 : public testing::Test {};
using Types = testing::Types<bfloat16, float16>;
TYPED_TEST_SUITE(Float16, Types);

// The value of a bit pattern, computed from its fields in double.
template <class T>
double value_of(std::uint16_t bits) {
  constexpr int mantissa_bits = std::is_same_v<T, float16> ? 10 : 7, bias = std::is_same_v<T, float16> ? 15 : 127;
  const int exponent = (bits & 0x7FFF) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 2 * bias + 1) return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  const double fraction = std::ldexp(mantissa, -mantissa_bits) + (exponent != 0 ? 1 : 0);
  return sign * std::ldexp(fraction, std::max(exponent, 1) - bias);
}

TYPED_TEST(Float16, EveryValueIsExactAndRoundTrips) {
  std::vector<TypeParam> all;
  for (unsigned bits = 0; bits < 0x10000; ++bits) all.push_back({static_cast<std::uint16_t>(bits)});
  std::vector<float> floats(all.size());
  cpu::to_float(all.data(), floats.data(), all.size());
  std::vector<TypeParam> back(all.size());
  cpu::from_float(floats.data(), back.data(), floats.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double expected = value_of<TypeParam>(all[i].bits);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(to_float(all[i])) && std::isnan(floats[i]) && std::isnan(to_float(back[i]))) << i;
      continue;
    }
    ASSERT_EQ(static_cast<double>(to_float(all[i])), expected) << i;
    ASSERT_EQ(static_cast<double>(floats[i]), expected) << i;
    ASSERT_EQ(rounded<TypeParam>(floats[i]).bits, all[i].bits);
    ASSERT_EQ(back[i].bits, all[i].bits);
  }
}

TYPED_TEST(Float16, RoundsToNearestTiesToEven) {
  std::vector<float> floats;
  std::vector<std::uint16_t> expected;
  for (unsigned bits = 0; bits + 1 < 0x8000; ++bits) {
    const double low = value_of<TypeParam>(static_cast<std::uint16_t>(bits)),
                 high = value_of<TypeParam>(static_cast<std::uint16_t>(bits + 1));
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    const auto tie = static_cast<float>((low + high) / 2);
    ASSERT_EQ(static_cast<double>(tie), (low + high) / 2);
    for (const float sign : {1.0F, -1.0F}) {
      const std::uint16_t sign_bit = sign < 0 ? 0x8000 : 0;
      floats.insert(floats.end(),
                    {sign * tie, sign * std::nextafter(tie, 0.0F), sign * std::nextafter(tie, HUGE_VALF)});
      for (const unsigned up : {bits & 1U, 0U, 1U})
        expected.push_back(static_cast<std::uint16_t>(sign_bit | (bits + up)));
    }
  }
  std::vector<TypeParam> vectorised(floats.size());
  cpu::from_float(floats.data(), vectorised.data(), floats.size());
  for (std::size_t i = 0; i < floats.size(); ++i) {
    ASSERT_EQ(rounded<TypeParam>(floats[i]).bits, expected[i]) << floats[i];
    ASSERT_EQ(vectorised[i].bits, expected[i]) << floats[i];
  }
}

TYPED_TEST(Float16, OverflowIsInfinity) {
  const float largest = std::numeric_limits<float>::max();
  EXPECT_EQ(to_float(rounded<TypeParam>(largest)), HUGE_VALF);
  TypeParam out{};
  cpu::from_float(&largest, &out, 1);
  EXPECT_EQ(to_float(out), HUGE_VALF);
}

}  // namespace
}  // namespace hopwell
