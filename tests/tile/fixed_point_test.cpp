// tile/gpu/fixed_point.hpp: the same bits in any order, within the headroom and error that its comment promises.
#include "tile/gpu/fixed_point.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

namespace hopwell::tile {
namespace {

TEST(FixedPoint, PairsAddWithoutMeeting) {
  const int numbers[] = {0, 1, -1, 12345, -54321, (1 << 30) - 1, -(1 << 30)};
  for (const int a : numbers) {
    for (const int b : numbers) {
      EXPECT_EQ(unpack_pair(pack_pair(a, b), false), a);
      EXPECT_EQ(unpack_pair(pack_pair(a, b), true), b);
      for (const int c : numbers) {
        if (std::abs(int64_t{a} + c) >= int64_t{1} << 31 || std::abs(int64_t{b} + a) >= int64_t{1} << 31) continue;
        const int64_t sum = int64_t(uint64_t(pack_pair(a, b)) + uint64_t(pack_pair(c, a)));
        EXPECT_EQ(unpack_pair(sum, false), a + c);
        EXPECT_EQ(unpack_pair(sum, true), b + a);
      }
    }
  }
}

TEST(FixedPoint, TheUnitIsTheSmallestThatTheBoundAllows) {
  for (const float bound : {1e-30F, 0.1F, 0.99F, 1.0F, 1.01F, 3.0F, 1024.0F, 1e30F}) {
    const double paired = std::ldexp(1.0, unit_exponent<kPairedBits>(bound));
    EXPECT_LT(double(bound) * paired, 0x1p29);
    EXPECT_GE(double(bound) * paired, 0x1p28);
    const double wide = wide_power_of_two(unit_exponent<kWideBits>(bound));
    EXPECT_LT(double(bound) * wide, 0x1p61);
    EXPECT_GE(double(bound) * wide, 0x1p60);
  }
  EXPECT_EQ(paired_scale(1.0F), 0x1p28F);
  EXPECT_EQ(paired_scale(0.0F), 0x1p126F);
  EXPECT_EQ(paired_scale(std::numeric_limits<float>::denorm_min()), 0x1p126F);
  EXPECT_TRUE(std::isnan(paired_scale(INFINITY)));
  EXPECT_TRUE(std::isnan(paired_scale(NAN)));
}

TEST(FixedPoint, BoundsAreOfMagnitudesAndLargestForWhatIsNoNumber) {
  uint32_t largest[3] = {}, count[3] = {};
  const SumBounds bounds{largest, count};
  bounds.note(0, 2), bounds.note(0, -3), bounds.note(0, 1);
  bounds.note(1, 2), bounds.note(1, -INFINITY);
  bounds.note(2, INFINITY), bounds.note(2, -NAN);
  EXPECT_EQ(bounds.bound(0), 9);
  EXPECT_EQ(bounds.bound(1), INFINITY);
  EXPECT_TRUE(std::isnan(bounds.bound(2)));
}

TEST(FixedPoint, TheSameBitsInAnyOrderAndWithinTheError) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int n : {1, 2, 1000, 100000}) {
    uint32_t largest[1] = {}, count[1] = {};
    const SumBounds bounds{largest, count};
    std::vector<float> contributions(static_cast<std::size_t>(n));
    double exact = 0;
    for (float& x : contributions) x = normal(random) * 1e-3F, bounds.note(0, x), exact += double(x);
    const float bound = bounds.bound(0), scale = paired_scale(bound);
    const int exponent = unit_exponent<kWideBits>(bound);
    float paired[2], wide[2];
    for (int order = 0; order < 2; ++order) {
      int64_t pairs = 0, sum = 0;
      for (const float x : contributions) {
        pairs = int64_t(uint64_t(pairs) + uint64_t(pack_pair(to_fixed(x, scale), to_fixed(-x, scale))));
        sum += to_wide_fixed(x, wide_power_of_two(exponent));
      }
      paired[order] = from_fixed(unpack_pair(pairs, false), scale), wide[order] = from_wide_fixed(sum, exponent);
      EXPECT_EQ(unpack_pair(pairs, true), -unpack_pair(pairs, false));
      std::shuffle(contributions.begin(), contributions.end(), random);
    }
    EXPECT_EQ(paired[0], paired[1]);
    EXPECT_EQ(wide[0], wide[1]);
    const double rounding = std::abs(exact) * 0x1p-24;
    EXPECT_LE(std::abs(double(paired[0]) - exact), double(n) * double(bound) * 0x1p-29 + rounding);
    EXPECT_LE(std::abs(double(wide[0]) - exact), double(n) * double(bound) * 0x1p-60 + rounding + 1e-12);
  }
}

}  // namespace
}  // namespace hopwell::tile
