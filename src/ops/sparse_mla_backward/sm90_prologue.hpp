// sparse_mla_backward on Hopper: what a CTA needs to know before its first step, for either kernel: the last entry that
// counts, and a few numbers for each of 64 heads. Memory answers after a thousand clocks, so everything is asked for
// before the first answer is used.
#pragma once

#include <cmath>

#include "ops/sparse_mla_backward/sm90_tile.hpp"
#include "tile/gpu/numbers.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

#if HOPWELL_HAS_SM90A

// A thread's share of the entries, kShare at a time.
constexpr int kShare = 6;
HOPWELL_DEVICE void load_share(int (&share)[kShare], const Entries& entries, int first) {
  HOPWELL_UNROLL
  for (int i = 0; i < kShare; ++i) share[i] = entries.at(first + i * Config::kThreads);
}

// The last valid entry of this thread's share, whose first part is there; the largest of its warp goes to shared
// memory.
HOPWELL_DEVICE void find_last_valid(int (&last_valid)[Config::kWarps], int (&share)[kShare], const Entries& entries) {
  const int warp = arch::warp_index();  // by all lanes: it is a shuffle
  int last = -1;
  for (int first = arch::thread_index(); first < entries.length; first += kShare * Config::kThreads) {
    if (first >= kShare * Config::kThreads) load_share(share, entries, first);
    HOPWELL_UNROLL
    for (int i = 0; i < kShare; ++i) last = entries.counts(share[i]) ? first + i * Config::kThreads : last;
  }
  last = tile::max_of_warp(last);
  if (arch::lane_index() == 0) last_valid[warp] = last;
}
// After a barrier: how many entries there are up to the last valid one.
HOPWELL_DEVICE int length_of(const int (&last_valid)[Config::kWarps]) {
  int last = -1;
  for (int warp = 0; warp < Config::kWarps; ++warp) last = last_valid[warp] > last ? last_valid[warp] : last;
  return last + 1;
}

// This lane's share of the dot product of 512 columns of two rows.
HOPWELL_DEVICE float dot(const arch::Words4 (&x)[2], const arch::Words4 (&y)[2]) {
  float sum = 0;
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) {
    const uint32_t a = x[i / 4].w[i % 4], b = y[i / 4].w[i % 4];
    sum += arch::bit_cast<float>(a << 16) * arch::bit_cast<float>(b << 16);
    sum += arch::bit_cast<float>(a & 0xffff0000) * arch::bit_cast<float>(b & 0xffff0000);
  }
  return sum;
}

// delta of a warp's rows (heads): lane i gets that of row warp + 12 i.
HOPWELL_DEVICE float delta_of_rows(const Params& p, const Place& place, int heads, int warp, int lane) {
  constexpr int kRows = (Config::kHeads + Config::kWarps - 1) / Config::kWarps;
  const bf16* out = p.out + place.query * p.out_stride_s + place.first_head * p.out_stride_h + 8 * lane;
  const bf16* d_out = p.d_out + place.query * p.d_out_stride_s + place.first_head * p.d_out_stride_h + 8 * lane;
  arch::Words4 x[kRows][2], y[kRows][2];
  HOPWELL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const int row = warp + Config::kWarps * i;
    HOPWELL_UNROLL
    for (int half = 0; half < 2 && row < heads; ++half) {
      x[i][half] = arch::load_streaming(out + row * p.out_stride_h + 256 * half);
      y[i][half] = arch::load_streaming(d_out + row * p.d_out_stride_h + 256 * half);
    }
  }
  float delta = 0;
  HOPWELL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const float sum = tile::sum_of_warp(warp + Config::kWarps * i < heads ? dot(x[i], y[i]) : 0.F);
    delta = lane == i ? sum : delta;
  }
  return delta;
}

// What each head needs beside its row of Q and dO. Heads that see no key (lse = +inf) have no delta.
template <bool kAttn, class Storage>
HOPWELL_DEVICE void prepare_heads(const Params& p, Storage& s, const Place& place) {
  const int lane = arch::lane_index(), warp = arch::warp_index(), row = warp + Config::kWarps * lane;
  const int heads = p.h_q - place.first_head < Config::kHeads ? p.h_q - place.first_head : Config::kHeads;
  const int head = place.first_head + row;
  const float lse = row < heads ? p.lse[place.query * p.lse_stride_s + head * p.lse_stride_h] * tile::kLog2E : INFINITY;
  const float sink = row < heads && p.sink ? p.sink[head * p.sink_stride] * tile::kLog2E : -INFINITY;
  float delta = delta_of_rows(p, place, heads, warp, lane);
  if (row < Config::kHeads) {
    float kept = 1, shift = lse, taken = 0;
    if (lse == INFINITY) delta = 0;
    if (sink != -INFINITY && lse != INFINITY) {
      const float high = lse > sink ? lse : sink, low = lse > sink ? sink : lse;
      if (!kAttn) shift = high + arch::log2_approx(1 + arch::exp2_approx(low - high));
      kept = 1 / (1 + arch::exp2_approx(sink - lse));
      taken = sink == INFINITY ? 0 : 1 / (1 + arch::exp2_approx(lse - sink));
    }
    if (p.sink_parts && row < heads && place.first_entry == 0)
      p.sink_parts[int64_t{place.query} * p.h_q + head] = taken == 0 ? 0 : -taken * delta;
    s.shift[row] = shift, s.kept[row] = kept, s.delta[row] = delta * p.sm_scale;
  }
  arch::syncwarp();  // kept: the lanes meet again; the shuffles that follow would make them
}

#endif

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward
