// tile/gpu/fixed_point.hpp: the same bits in any order, within the headroom and error stated in its header.
#include "tile/gpu/fixed_point.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

namespace hopwell::tile {
namespace {

// A word of two sums, after one contribution to each.
int64_t word_of(int low, int high) { return int64_t((uint64_t(uint32_t(high)) << 32) + uint64_t(int64_t{low})); }

TEST(FixedPoint, PairsAddWithoutMeeting) {
  const int numbers[] = {0, 1, -1, 12345, -54321, (1 << 30) - 1, -(1 << 30)};
  for (const int a : numbers) {
    for (const int b : numbers) {
      EXPECT_EQ(unpack_pair(word_of(a, b), false), a);
      EXPECT_EQ(unpack_pair(word_of(a, b), true), b);
      for (const int c : numbers) {
        if (std::abs(int64_t{a} + c) >= int64_t{1} << 31 || std::abs(int64_t{b} + a) >= int64_t{1} << 31) continue;
        const int64_t sum = int64_t(uint64_t(word_of(a, b)) + uint64_t(word_of(c, a)));
        EXPECT_EQ(unpack_pair(sum, false), a + c);
        EXPECT_EQ(unpack_pair(sum, true), b + a);
      }
    }
  }
}

// A word after these contributions, each added to its low sum and, negated, to its high sum.
int64_t sum_of_pairs(const std::vector<float>& contributions, float scale) {
  int64_t word = 0;
  for (const float x : contributions)
    word = int64_t(uint64_t(word) + uint64_t(pack_pair(to_fixed(x, scale), to_fixed(-x, scale))));
  return without_fixed_zeros(word, uint32_t(contributions.size()));
}

TEST(FixedPoint, AContributionIsRoundedToTheNearestMultipleUpToTheLargest) {
  for (const float x : {0.0F, 0.25F, 0.5F, 0.75F, 1.5F, 2.5F, -0.5F, -1.5F, 1048575.5F, 0x1p22F, -0x1p22F}) {
    for (const float scale : {1.0F, 0x1p126F, 0x1p-100F}) {
      const int64_t word = sum_of_pairs({x / scale}, scale);
      EXPECT_EQ(unpack_pair(word, false), int(std::nearbyint(x)));
      EXPECT_EQ(unpack_pair(word, true), int(std::nearbyint(-x)));
    }
  }
}

TEST(FixedPoint, ManyContributionsWrapAroundAndComeOff) {
  constexpr uint32_t kCount = (1U << 31) + 12345;
  const uint64_t all = uint64_t(pack_pair(to_fixed(0, 1), to_fixed(0, 1))) * kCount + uint64_t(word_of(-7, 9));
  EXPECT_EQ(unpack_pair(without_fixed_zeros(int64_t(all), kCount), false), -7);
  EXPECT_EQ(unpack_pair(without_fixed_zeros(int64_t(all), kCount), true), 9);
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
  EXPECT_EQ(paired_scale(256.0F, 1.0F), 0x1p20F);  // limited by the bound of the sum
  EXPECT_EQ(paired_scale(2.0F, 1.0F), 0x1p21F);    // limited by the bound of one contribution
  EXPECT_EQ(paired_scale(0.0F, 0.0F), 0x1p126F);
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(paired_scale(kLeast, kLeast), 0x1p126F);
  EXPECT_TRUE(std::isnan(paired_scale(INFINITY, INFINITY)));
  EXPECT_TRUE(std::isnan(paired_scale(NAN, NAN)));
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
    const float bound = bounds.bound(0), scale = paired_scale(bound, bounds.bound_of_one(0));
    const int exponent = unit_exponent<kWideBits>(bound);
    float paired[2], wide[2];
    for (int order = 0; order < 2; ++order) {
      const int64_t pairs = sum_of_pairs(contributions, scale);
      int64_t sum = 0;
      for (const float x : contributions) sum += to_wide_fixed(x, wide_power_of_two(exponent));
      paired[order] = from_fixed(unpack_pair(pairs, false), scale), wide[order] = from_wide_fixed(sum, exponent);
      EXPECT_EQ(unpack_pair(pairs, true), -unpack_pair(pairs, false));
      std::shuffle(contributions.begin(), contributions.end(), random);
    }
    EXPECT_EQ(paired[0], paired[1]);
    EXPECT_EQ(wide[0], wide[1]);
    const double rounding = std::abs(exact) * 0x1p-24;
    EXPECT_LE(std::abs(double(paired[0]) - exact),
              double(n) * std::max(double(bound) * 0x1p-29, double(bounds.bound_of_one(0)) * 0x1p-22) + rounding);
    EXPECT_LE(std::abs(double(wide[0]) - exact), double(n) * double(bound) * 0x1p-60 + rounding + 1e-12);
  }
}

}  // namespace
}  // namespace hopwell::tile
