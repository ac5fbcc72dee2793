// Reductions over the lanes of a warp. All 32 lanes call them; the order of sums is always the same.
#pragma once

#include "arch/sm80/threads.hpp"

namespace hopwell::tile {

/// Joins the x of lanes whose numbers differ by kFirst, then by half or twice as much, up to kLast: afterwards each of
/// them has the whole. kFirst and kLast are powers of two.
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
/// Of floats, the one that is a number.
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
/// Over the four lanes of a quad, which in accumulators of mma and wgmma have columns of the same rows.
HOPWELL_DEVICE float sum_of_quad(float x) { return reduce<1, 2>(x, Plus{}); }
HOPWELL_DEVICE float max_of_quad(float x) { return reduce<1, 2>(x, Larger{}); }
/// Over the eight lanes that have the same place in their quads: the same columns of other rows.
HOPWELL_DEVICE float sum_of_column(float x) { return reduce<4, 16>(x, Plus{}); }

/// The sum of x of the lanes before, and of this one.
HOPWELL_DEVICE int sum_up_to_lane(int x) {
  const int lane = arch::lane_index();
  HOPWELL_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const int before = arch::shuffle(x, (lane - step) & 31);
    x += lane >= step ? before : 0;
  }
  return x;
}

/// Two lanes that are `distance` apart add their 2 · width numbers; each keeps the sums of one half, in x[0 … width − 1],
/// the lane whose number is higher (`upper`) those of the upper half.
template <int kCount>
HOPWELL_DEVICE void share_sums(float (&x)[kCount], int width, int distance, bool upper) {
  HOPWELL_UNROLL
  for (int i = 0; i < width; ++i) {
    const float give = upper ? x[i] : x[i + width], keep = upper ? x[i + width] : x[i];
    x[i] = keep + arch::shuffle_xor(give, distance);
  }
}

/// Adds 32 numbers of each lane over a warp: lane i gets the sum of all x[i]. x is used up.
HOPWELL_DEVICE float share_sums_of_warp(float (&x)[32]) {
  const int lane = arch::lane_index();
  HOPWELL_UNROLL
  for (int width = 16; width > 0; width /= 2) share_sums(x, width, width, lane & width);
  return x[0];
}

}  // namespace hopwell::tile
