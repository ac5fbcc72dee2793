// sparse_mla_backward on GPUs: values that a CTA needs before its first step: the last valid entry, and three numbers
// for each of its heads, including delta. A memory access takes a thousand clocks, so all loads are issued before the
// first result is used.
#pragma once

#include <cmath>

#include "arch/sm80/matrix.hpp"
#include "arch/sm80/memory.hpp"
#include "ops/sparse_mla_backward/params.hpp"
#include "tile/gpu/fragment.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

// Per head, in shared memory: values for the softmax and its derivative.
template <int kHeads>
struct HeadValues {
  float lse_log2[kHeads];    // log2(e) lse', or log2(e) lse with attn that is without the sink
  float sink_scale[kHeads];  // exp(lse − lse'), or 1; only with attn
  float delta[kHeads];       // Σ out · d_out, times sm_scale
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

// This lane's part of the dot product of 512 columns of two rows: the sum over its quad in one lane of each quad, 0 in
// the others. By mma.sync, which multiplies all quads of x with all quads of y; the diagonal has the products of a quad
// with itself. Multiplications by threads would take more instructions.
HOPWELL_DEVICE float dot(const arch::Words4 (&x)[2], const arch::Words4 (&y)[2]) {
  float products[4] = {};  // rows of x and columns of y: fragment_row(). Rows 8 to 15 are zeros
  HOPWELL_UNROLL
  for (int i = 0; i < 8; i += 2) {
    const uint32_t a[4] = {x[i / 4].w[i % 4], 0, x[i / 4].w[i % 4 + 1], 0},
                   b[2] = {y[i / 4].w[i % 4], y[i / 4].w[i % 4 + 1]};
    arch::mma_m16n8k16_bf16(products, a, b);
  }
  const int of_diagonal = tile::fragment_row() - tile::fragment_column();
  return of_diagonal == 0 ? products[0] : of_diagonal == 1 ? products[1] : 0;
}

// The sum of a warp's parts of one dot product, in the order in which delta_of_heads adds them. So delta and dq have the
// same bits whether the preprocess (passes/fixed_point_units.hpp) or the main kernel computes delta.
HOPWELL_DEVICE float sum_of_dot(float part) {
  return tile::reduce<8, 16>(tile::reduce<4, 1>(part, tile::Plus{}), tile::Plus{});
}

// Inputs of a warp's heads. They are in flight until they are used. `out`, `d_out`: rows of the heads warp + kWarps ·
// i; a lane has columns 8 lane and 256 + 8 lane, eight each. They are not loaded if Params has delta. `lse`, `sink`,
// `delta`: of the head warp + kWarps · lane.
template <int kHeads, int kWarps>
struct HeadInputs {
  static constexpr int kRows = (kHeads + kWarps - 1) / kWarps;
  arch::Words4 out[kRows][2], d_out[kRows][2];
  float lse, sink, delta;
};

HOPWELL_DEVICE int heads_of_tile(const Params& p, const WorkTile& work, int most) {
  return p.h_q - work.first_head < most ? p.h_q - work.first_head : most;
}

// Starts the loads of a warp's rows from `source`: out or d_out.
template <int kWarps, int kRows>
HOPWELL_DEVICE void load_rows(arch::Words4 (&rows)[kRows][2], const WorkTile& work, int heads, const bf16* source,
                              int64_t stride_s, int64_t stride_h) {
  const bf16* from = source + work.query * stride_s + work.first_head * stride_h + 8 * arch::lane_index();
  HOPWELL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const int row = arch::warp_index() + kWarps * i;
    HOPWELL_UNROLL
    for (int half = 0; half < 2 && row < heads; ++half)
      rows[i][half] = arch::load_streaming(from + row * stride_h + 256 * half);
  }
}
// Starts the loads of all inputs but d_out.
template <int kHeads, int kWarps>
HOPWELL_DEVICE void load_out(HeadInputs<kHeads, kWarps>& inputs, const Params& p, const WorkTile& work) {
  const int heads = heads_of_tile(p, work, kHeads), row = arch::warp_index() + kWarps * arch::lane_index();
  const int head = work.first_head + row;
  inputs.lse = row < heads ? p.lse[work.query * p.lse_stride_s + head * p.lse_stride_h] : INFINITY;
  inputs.sink = row < heads && p.sink ? p.sink[head % p.heads_of_member * p.sink_stride] : -INFINITY;
  if (p.delta)
    inputs.delta = row < heads ? p.delta[int64_t{work.query} * p.h_q + head] : 0;
  else
    load_rows<kWarps>(inputs.out, work, heads, p.out, p.out_stride_s, p.out_stride_h);
}
template <int kHeads, int kWarps>
HOPWELL_DEVICE void load_d_out(HeadInputs<kHeads, kWarps>& inputs, const Params& p, const WorkTile& work) {
  if (p.delta) return;
  load_rows<kWarps>(inputs.d_out, work, heads_of_tile(p, work, kHeads), p.d_out, p.d_out_stride_s, p.d_out_stride_h);
}

// delta of a warp's heads: lane i gets the delta of head warp + kWarps · i.
template <int kHeads, int kWarps>
HOPWELL_DEVICE float delta_of_heads(const HeadInputs<kHeads, kWarps>& inputs, int heads) {
  constexpr int kRows = 8;  // the rows after inputs.kRows are zeros
  static_assert(HeadInputs<kHeads, kWarps>::kRows <= kRows);
  float sums[kRows] = {};
  HOPWELL_UNROLL
  for (int i = 0; i < inputs.kRows; ++i)
    if (arch::warp_index() + kWarps * i < heads) sums[i] = dot(inputs.out[i], inputs.d_out[i]);
  const int lane = arch::lane_index();
  tile::share_sums(sums, 4, 4, lane & 4);
  tile::share_sums(sums, 2, 2, lane & 2);
  tile::share_sums(sums, 1, 1, lane & 1);
  return tile::reduce<8, 16>(sums[0], tile::Plus{});  // over the lanes i, i + 8, i + 16 and i + 24, of row i
}

// Computes the values of each head. The delta of heads that see no key (lse = +inf) is 0.
template <bool kAttn, int kWarps, int kHeads>
HOPWELL_DEVICE void prepare_heads(const Params& p, HeadValues<kHeads>& values, const WorkTile& work,
                                  const HeadInputs<kHeads, kWarps>& inputs) {
  const int row = arch::warp_index() + kWarps * arch::lane_index();
  const int heads = heads_of_tile(p, work, kHeads), head = work.first_head + row;
  const float given_lse = inputs.lse, given_sink = inputs.sink;
  const float lse = given_lse * tile::kLog2E, sink = given_sink * tile::kLog2E;  // infinite, too, from 2.4e38 on
  float delta = p.delta ? inputs.delta : delta_of_heads(inputs, heads);
  if (row < kHeads) {
    float sink_scale = 1, lse_log2 = lse, sink_probability = 0;
    if (given_lse == INFINITY) delta = 0;
    if (sink != -INFINITY && given_lse != INFINITY) {
      const float high = lse > sink ? lse : sink, low = lse > sink ? sink : lse;
      if (!kAttn || p.attn_with_sink) lse_log2 = high + arch::log2_approx(1 + arch::exp2_approx(low - high));
      if (!kAttn || !p.attn_with_sink) sink_scale = 1 / (1 + arch::exp2_approx(sink - lse));
      sink_probability = given_sink == INFINITY ? 0 : 1 / (1 + arch::exp2_approx(lse - sink));
    }
    if (p.sink_parts && row < heads && work.first_entry == 0)
      p.sink_parts[int64_t{work.query} * p.h_q + head] = sink_probability == 0 ? 0 : -sink_probability * delta;
    values.lse_log2[row] = lse_log2, values.sink_scale[row] = sink_scale, values.delta[row] = delta * p.sm_scale;
  }
  arch::syncwarp();  // kept: the lanes converge again; the following shuffles would converge them too
}
// The same with all inputs from global memory.
template <bool kAttn, int kWarps, int kHeads>
HOPWELL_DEVICE void prepare_heads(const Params& p, HeadValues<kHeads>& values, const WorkTile& work) {
  HeadInputs<kHeads, kWarps> inputs;
  load_out(inputs, p, work);
  load_d_out(inputs, p, work);
  prepare_heads<kAttn, kWarps>(p, values, work, inputs);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
