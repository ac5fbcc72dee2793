// sparse_mla_backward on GPUs: values that a CTA needs before its first step: the last valid entry, and three numbers
// for each of its heads, including delta. A memory access takes a thousand clocks, so all loads are issued before the
// first result is used.
#pragma once

#include <cmath>

#include "arch/sm80/memory.hpp"
#include "ops/sparse_mla_backward/params.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

// Per head, in shared memory: values for the softmax and its derivative.
template <int kHeads>
struct HeadValues {
  float shift[kHeads];  // lse_log2: log2(e) lse', or log2(e) lse with attn that is without the sink
  float kept[kHeads];   // sink_scale: exp(lse − lse'), or 1; only with attn
  float delta[kHeads];  // Σ out · d_out, times sm_scale
};

// ---- the last valid entry

// A thread's entries, every kThreads-th, in batches of kEntryBatch.
constexpr int kEntryBatch = 6;
template <int kThreads, class List>
HOPWELL_DEVICE void load_entries(int (&batch)[kEntryBatch], const List& entries, int first) {
  HOPWELL_UNROLL
  for (int i = 0; i < kEntryBatch; ++i) batch[i] = entries.at(first + i * kThreads);
}

// The last valid one among this thread's entries; the first batch is already loaded. Writes the maximum over the warp
// to shared memory.
template <int kWarps, class List>
HOPWELL_DEVICE void find_last_valid(int (&last_valid)[kWarps], int (&batch)[kEntryBatch], const List& entries) {
  constexpr int kThreads = 32 * kWarps;
  const int warp = arch::warp_index();  // executed by all lanes: it is a shuffle
  int last = -1;
  for (int first = arch::thread_index(); first < entries.length; first += kEntryBatch * kThreads) {
    if (first >= kEntryBatch * kThreads) load_entries<kThreads>(batch, entries, first);
    HOPWELL_UNROLL
    for (int i = 0; i < kEntryBatch; ++i)
      last = counts(entries, first + i * kThreads, batch[i]) ? first + i * kThreads : last;
  }
  last = tile::max_of_warp(last);
  if (arch::lane_index() == 0) last_valid[warp] = last;
}
// Called after a barrier: number of entries up to the last valid one.
template <int kWarps>
HOPWELL_DEVICE int length_of(const int (&last_valid)[kWarps]) {
  int last = -1;
  for (int warp = 0; warp < kWarps; ++warp) last = last_valid[warp] > last ? last_valid[warp] : last;
  return last + 1;
}

// ---- heads

// This lane's part of the dot product of 512 columns of two rows.
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

// delta of a warp's heads: lane i gets the delta of head warp + kWarps · i.
template <int kHeads, int kWarps>
HOPWELL_DEVICE float delta_of_heads(const Params& p, const WorkTile& work, int heads, int warp, int lane) {
  constexpr int kRows = (kHeads + kWarps - 1) / kWarps;
  const bf16* out = p.out + work.query * p.out_stride_s + work.first_head * p.out_stride_h + 8 * lane;
  const bf16* d_out = p.d_out + work.query * p.d_out_stride_s + work.first_head * p.d_out_stride_h + 8 * lane;
  arch::Words4 x[kRows][2], y[kRows][2];
  HOPWELL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const int row = warp + kWarps * i;
    HOPWELL_UNROLL
    for (int half = 0; half < 2 && row < heads; ++half) {
      x[i][half] = arch::load_streaming(out + row * p.out_stride_h + 256 * half);
      y[i][half] = arch::load_streaming(d_out + row * p.d_out_stride_h + 256 * half);
    }
  }
  float delta = 0;
  HOPWELL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const float sum = tile::sum_of_warp(warp + kWarps * i < heads ? dot(x[i], y[i]) : 0.F);
    delta = lane == i ? sum : delta;
  }
  return delta;
}

// Computes the values of each head. The delta of heads that see no key (lse = +inf) is 0.
template <bool kAttn, int kWarps, int kHeads>
HOPWELL_DEVICE void prepare_heads(const Params& p, HeadValues<kHeads>& values, const WorkTile& work) {
  const int lane = arch::lane_index(), warp = arch::warp_index(), row = warp + kWarps * lane;
  const int heads = p.h_q - work.first_head < kHeads ? p.h_q - work.first_head : kHeads;
  const int head = work.first_head + row;
  const float given_lse = row < heads ? p.lse[work.query * p.lse_stride_s + head * p.lse_stride_h] : INFINITY;
  const float given_sink = row < heads && p.sink ? p.sink[head % p.heads_of_member * p.sink_stride] : -INFINITY;
  const float lse = given_lse * tile::kLog2E, sink = given_sink * tile::kLog2E;  // infinite, too, from 2.4e38 on
  float delta = delta_of_heads<kHeads, kWarps>(p, work, heads, warp, lane);
  if (row < kHeads) {
    float kept = 1, shift = lse, taken = 0;
    if (given_lse == INFINITY) delta = 0;
    if (sink != -INFINITY && given_lse != INFINITY) {
      const float high = lse > sink ? lse : sink, low = lse > sink ? sink : lse;
      if (!kAttn || p.attn_with_sink) shift = high + arch::log2_approx(1 + arch::exp2_approx(low - high));
      if (!kAttn || !p.attn_with_sink) kept = 1 / (1 + arch::exp2_approx(sink - lse));
      taken = given_sink == INFINITY ? 0 : 1 / (1 + arch::exp2_approx(lse - sink));
    }
    if (p.sink_parts && row < heads && work.first_entry == 0)
      p.sink_parts[int64_t{work.query} * p.h_q + head] = taken == 0 ? 0 : -taken * delta;
    values.shift[row] = shift, values.kept[row] = kept, values.delta[row] = delta * p.sm_scale;
  }
  arch::syncwarp();  // kept: the lanes converge again; the following shuffles would converge them too
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
