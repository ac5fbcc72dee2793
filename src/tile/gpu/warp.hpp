// Reductions over the lanes of a warp. All 32 lanes call them. The order of sums is fixed.
#pragma once

#include <bit>

#include "arch/sm80/threads.hpp"

namespace hopwell::tile {

/// Index of the lowest set bit; 32 for 0. nvcc compiles std::countr_zero to the constant 32.
HOPWELL_DEVICE int lowest_bit(uint32_t bits) { return std::popcount(~bits & (bits - 1)); }

/// Butterfly reduction over lane masks kFirst, then doubled or halved, up to kLast. Afterwards each of these lanes has
/// the result. kFirst and kLast are powers of two.
template <int kFirst, int kLast, class T, class Join>
HOPWELL_DEVICE T reduce(T x, const Join& join) {
  constexpr bool kDown = kFirst > kLast;
  HOPWELL_UNROLL
  for (int distance = kFirst; kDown ? distance >= kLast : distance <= kLast;
       distance = kDown ? distance / 2 : distance * 2)
    x = join(x, arch::shuffle_xor(x, distance));
  return x;
}

struct Plus {
  template <class T>
  HOPWELL_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};
/// The larger of two floats; ignores NaN.
struct Larger {
  HOPWELL_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
  HOPWELL_DEVICE int operator()(int a, int b) const { return b > a ? b : a; }
  HOPWELL_DEVICE uint32_t operator()(uint32_t a, uint32_t b) const { return b > a ? b : a; }
};

template <class T>
HOPWELL_DEVICE T sum_of_warp(T x) {
  return reduce<16, 1>(x, Plus{});
}
template <class T>
HOPWELL_DEVICE T max_of_warp(T x) {
  return reduce<16, 1>(x, Larger{});
}
/// Over the four lanes of a quad, which hold columns of the same rows in accumulators of mma and wgmma.
HOPWELL_DEVICE float sum_of_quad(float x) { return reduce<1, 2>(x, Plus{}); }
HOPWELL_DEVICE float max_of_quad(float x) { return reduce<1, 2>(x, Larger{}); }
/// Over the eight lanes with the same index in their quads: the same columns of other rows.
HOPWELL_DEVICE float sum_of_column(float x) { return reduce<4, 16>(x, Plus{}); }

/// Inclusive prefix sum of x over the lanes.
HOPWELL_DEVICE int sum_up_to_lane(int x) {
  const int lane = arch::lane_index();
  HOPWELL_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const int before = arch::shuffle(x, (lane - step) & 31);
    x += lane >= step ? before : 0;
  }
  return x;
}

/// Two lanes at a distance of `distance` add their 2 · width numbers. Each keeps the sums of one half in x[0 … width −
/// 1]; the lane with the higher index (`upper`) keeps the upper half.
template <int kCount>
HOPWELL_DEVICE void share_sums(float (&x)[kCount], int width, int distance, bool upper) {
  HOPWELL_UNROLL
  for (int i = 0; i < width; ++i) {
    const float give = upper ? x[i] : x[i + width], keep = upper ? x[i + width] : x[i];
    x[i] = keep + arch::shuffle_xor(give, distance);
  }
}

/// Adds 32 numbers of each lane over a warp: lane i gets the sum of all x[i]. Overwrites x.
HOPWELL_DEVICE float share_sums_of_warp(float (&x)[32]) {
  const int lane = arch::lane_index();
  HOPWELL_UNROLL
  for (int width = 16; width > 0; width /= 2) share_sums(x, width, width, lane & width);
  return x[0];
}

}  // namespace hopwell::tile
