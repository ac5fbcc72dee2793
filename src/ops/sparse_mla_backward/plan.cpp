#include "ops/sparse_mla_backward/plan.hpp"

#include <algorithm>
#include <cmath>

namespace hopwell::ops::sparse_mla_backward {
namespace {

constexpr std::int64_t kLimit = std::int64_t{1} << 31;  // of what kernels keep in an int

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

DkvSums sums_of(const Problem& p, bool distribution) {
  if (!p.dkv) return DkvSums::none;
  if (distribution) return DkvSums::fixed_point;
  const bool aligned = reinterpret_cast<std::uintptr_t>(p.dkv.data) % 16 == 0 && p.dkv.stride[0] % 4 == 0;
  // A negative row offset marks a key without a gradient, so the row stride of dkv must not be negative.
  const bool ascending = p.dkv.stride[0] >= 0 && p.dkv.stride[0] < kLimit;
  const bool output = !p.accumulate && p.dkv.dtype == DType::kFloat32 && aligned && ascending;
  return output ? DkvSums::output : DkvSums::scratch;
}

std::int64_t sum_bytes(const Problem& p) { return p.s_kv * p.d_qk * 4; }

// True if the sums of dkv exceed `numerator / denominator` of the L2 cache.
bool exceeds_l2(const Problem& p, std::int64_t numerator, std::int64_t denominator) {
  return sum_bytes(p) > static_cast<std::int64_t>(p.device.l2_bytes) * numerator / denominator;
}

// The part of a main kernel's time in which memory is busy, if the CTAs of a wave, at one pace, fetch each key's row of kv
// once and its sums, too, and write these back. Queries select keys at random.
double memory_share(const Problem& p, int ctas) {
  constexpr double kNanosecondsOfKey =
      110;  // of one query, on an H100 where all is in L2: 104 for a pair, 118 for a CTA
  const double s_kv = static_cast<double>(p.s_kv), topk = static_cast<double>(p.topk);
  const double keys = s_kv * (1 - std::exp(-p.device.sms / ctas * topk / s_kv));
  const double bytes = keys * static_cast<double>(p.d_qk) * (2 + 4 + 4);
  return p.device.memory_bytes_per_ns > 0 ? bytes / p.device.memory_bytes_per_ns / (topk * kNanosecondsOfKey) : 0;
}

// A plan for no chip, which is the emulator's own profile, takes every path that the call allows, so that the cases cover
// it. A plan for a chip takes the paths that pay.
bool takes_every_path(const Problem& p) { return p.device.capability == 0; }

// The order in which CTAs go through keys, and the largest lead of a CTA.
//
//     deterministic   in order, always: dq of a query must not depend on the other queries, the outputs or the device
//     otherwise       in order if the sums do not fit in L2 and many queries add to them
void plan_order(Plan& plan, const Problem& p, const MainKernels& kernels) {
  const bool pays = p.dkv && exceeds_l2(p, 2, 3) && p.s_q >= p.device.sms && p.topk >= 256;
  const bool for_speed =
      p.dkv && (pays || takes_every_path(p)) && (p.topk <= kLongestOrderedRow || p.indices_ascending);
  const bool for_bits = p.deterministic && (p.dq || p.dkv) && p.topk > 0;
  plan.ascending = p.s_q > 0 && (for_speed || for_bits);
  plan.orders_rows = plan.ascending && !p.indices_ascending;
  plan.order_clears_sums = plan.orders_rows && p.s_q >= p.device.sms;
  // The count of all steps must fit; and the emulator runs CTAs in turn, where waiting for others is in vain.
  const std::int64_t steps = p.s_q * (ceil_div(p.h_q, kernels.single_heads) + 1) * ceil_div(p.topk, kernels.keys);
  plan.paces = plan.ascending && pays && !p.device.emulated() && steps < kLimit;
  // Limits how far CTAs may drift apart, so that the dkv rows they update stay in L2.
  const std::int64_t window = static_cast<std::int64_t>(p.device.l2_bytes) / 8;
  const std::int64_t step_bytes = sum_bytes(p) / std::max<std::int64_t>(p.topk / kernels.keys, 1);
  plan.pace_slack = static_cast<int>(std::clamp<std::int64_t>(window / std::max<std::int64_t>(step_bytes, 1), 1, 8));
  // Additions that miss L2 are slow. Where many do, rows are fetched a step ahead (the pair, which adds half as often, later);
  // where few do, that costs more, and so it does where memory is busy most of the time. But not if CTAs then wait for the
  // last one instead of the average, and what they only read leaves L2 first; that pays from half of the time on. Neighbours
  // that share keys leave memory idle.
  const int ctas = kernels.pair_heads > 0 && p.h_q > kernels.single_heads ? 2 : 1;
  const double memory = plan.ascending && pays ? memory_share(p, ctas) : 0;
  const bool busy = memory >= 0.75, can_stream = p.dkv && kernels.single_streams_keys && ctas == 1;
  plan.streams_keys = can_stream && ((memory >= 0.55 && !p.share_keys) || takes_every_path(p));
  if (plan.streams_keys) plan.pace_slack = 0;
  const bool pays_ahead =
      p.share_keys ? exceeds_l2(p, 10, 3)
                   : exceeds_l2(p, 2, 1) && memory > (can_stream ? 0.3 : 0.4) && (!busy || plan.streams_keys);
  plan.prefetches_sums = p.dkv && (pays_ahead || takes_every_path(p));
}

// A wave that goes the other way through keys than the one before finds in L2 what that one added to last. Not with two
// kernels, whose waves end at different queries; nor deterministic, where dq must not depend on the wave of its query.
void plan_turns(Plan& plan, const Problem& p) {
  const bool two_kernels = plan.pairs.head_blocks > 0 && plan.singles.head_blocks > 0;
  if (!plan.orders_rows || two_kernels || plan.groups.count > 0 || p.deterministic) return;
  plan.turning_tiles = std::max(p.device.sms / (plan.pairs.head_blocks > 0 ? plan.pairs.ctas : plan.singles.ctas), 1);
}

// Neighbouring queries with up to 32 heads are taken together where their selections share enough, which is found out on
// the device, group by group. Not with attn, which is of each query, nor deterministic.
void plan_groups(Plan& plan, const Problem& p, const MainKernels& kernels) {
  if (!kernels.merges_rows || p.attn || p.deterministic) return;
  plan.groups = query_groups(p, kernels.single_heads, {p.q, p.out, p.d_out, p.lse, p.dq});
  plan.grouped = {.heads = kernels.single_heads, .head_blocks = 1, .members = plan.groups.members};
  plan.grouped.whole_tiles = static_cast<int>(plan.groups.count);
}

// Fills in how the tiles of a pass are shared out. Deterministic calls have no slices, because which queries are sliced,
// and into how many, depends on the other queries and on the device.
MainPass schedule(MainPass pass, const Problem& p, const MainKernels& kernels, DkvSums sums) {
  constexpr std::int64_t kMostSlices = 8;
  const std::int64_t tiles = p.s_q * pass.head_blocks, steps = ceil_div(p.topk, kernels.keys),
                     at_a_time = std::max(p.device.sms / pass.ctas, 1), rest = tiles % at_a_time;
  std::int64_t slices = 1;
  if (rest > 0 && !p.deterministic && (sums == DkvSums::none || sums == DkvSums::output)) {
    // What they give of dq takes no more memory than sums of dkv would that are not added to the output; or 2.4 MB.
    const std::int64_t fit = std::max<std::int64_t>(p.s_kv, 1024) / (rest * pass.heads);
    slices = std::max<std::int64_t>(std::min({kMostSlices, at_a_time / rest, steps, fit}), 1);
  }
  const std::int64_t sliced = slices > 1 ? rest : 0;
  pass.whole_tiles = static_cast<int>(tiles - sliced), pass.sliced_tiles = static_cast<int>(sliced);
  pass.slices = static_cast<int>(slices), pass.slice_entries = static_cast<int>(ceil_div(steps, slices) * kernels.keys);
  return pass;
}

// Pairs take 65 heads or more at a time, single CTAs what is left.
void plan_heads(Plan& plan, const Problem& p, const MainKernels& kernels) {
  const bool has_pairs = kernels.pair_heads > 0 && (!p.deterministic || kernels.deterministic_pairs);
  const auto h_q = static_cast<int>(p.h_q);
  plan.pairs = {.heads = kernels.pair_heads, .ctas = 2};
  plan.pairs.head_blocks = has_pairs ? (h_q + kernels.pair_heads - kernels.single_heads - 1) / kernels.pair_heads : 0;
  plan.singles = {.heads = kernels.single_heads, .first_head = plan.pairs.head_blocks * kernels.pair_heads};
  plan.singles.head_blocks =
      static_cast<int>(ceil_div(std::max(h_q - plan.singles.first_head, 0), kernels.single_heads));
  plan.pairs = schedule(plan.pairs, p, kernels, plan.sums);
  plan.singles = schedule(plan.singles, p, kernels, plan.sums);
}

Workspace lay_out(const Plan& plan, const Problem& p) {
  Workspace w;
  const auto take = [&w](std::int64_t bytes) {
    const std::size_t offset = w.bytes;
    w.bytes += (static_cast<std::size_t>(bytes) + 255) / 256 * 256;
    return offset;
  };
  const auto dq_bytes = [&p](const MainPass& pass) {
    return p.dq ? 4 * p.d_qk * pass.heads * pass.slices * pass.sliced_tiles : 0;
  };
  if (plan.sums == DkvSums::scratch || plan.sums == DkvSums::fixed_point) w.dkv = take(sum_bytes(p));
  if (plan.sums == DkvSums::fixed_point)
    w.scale = take(4 * p.s_kv), w.largest = take(4 * p.s_kv), w.count = take(4 * p.s_kv);
  if (p.d_sink) w.sink_parts = take(4 * p.s_q * p.h_q);
  if (plan.orders_rows || (plan.distribution && !p.attn)) w.rows = take(4 * p.s_q * p.topk);
  if (plan.orders_rows) w.lengths = take(4 * p.s_q);
  if (plan.orders_rows && p.attn && !plan.distribution) w.sources = take(2 * p.s_q * p.topk);
  w.merged_rows = place_merged_rows(plan.groups, p.topk, take);
  if (plan.paces) w.progress = take(2 * sizeof(std::uint32_t));
  w.dq_slices = take(std::max(dq_bytes(plan.pairs), dq_bytes(plan.singles)));
  return w;
}

}  // namespace

Plan make_plan(const Problem& p, const MainKernels& kernels) {
  Plan plan;
  plan.distribution = p.deterministic && p.s_q > 0 && p.topk > 0 && (p.dkv || p.attn);
  plan.sums = sums_of(p, plan.distribution);
  plan_order(plan, p, kernels);
  plan_heads(plan, p, kernels);
  plan_groups(plan, p, kernels);
  plan_turns(plan, p);
  plan.workspace = lay_out(plan, p);
  return plan;
}

runtime::Support check_plan(const Problem& p, const Plan& plan) {
  using runtime::Support;
  if (p.q.dtype != DType::kBFloat16) return Support::no("q and kv must be bfloat16");
  if (p.d_qk != 576 && p.d_qk != 512) return Support::no("d_qk must be 576 or 512");
  if (p.d_v != 512) return Support::no("d_v must be 512");
  const auto aligned = [](const View& v, int dims) {
    bool ok = reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(dims); ++i) ok &= v.shape[i] <= 1 || v.stride[i] % 8 == 0;
    return ok;
  };
  if (!aligned(p.q, 2) || !aligned(p.kv, 1) || !aligned(p.out, 2) || !aligned(p.d_out, 2) || !aligned(p.dq, 2))
    return Support::no("rows of q, kv, out, d_out and dq must be 16-byte aligned");
  // Kernels count what they add to in units of four fp32, or of two fixed-point sums.
  const std::int64_t row_units = plan.sums == DkvSums::none          ? 0
                                 : plan.sums == DkvSums::fixed_point ? p.d_qk / 2
                                 : plan.sums == DkvSums::output      ? p.dkv.stride[0] / 4
                                                                     : p.d_qk / 4;
  if (p.s_kv * row_units >= kLimit) return Support::no("dkv must have fewer than 2^33 elements, 2^32 if deterministic");
  if ((p.s_kv > 1 && (p.kv.stride[0] >= kLimit || p.kv.stride[0] <= -kLimit)) || p.topk >= kLimit - 64)
    return Support::no("the row stride of kv and topk must be below 2^31");
  if (p.s_q * ceil_div(p.h_q, 32) >= kLimit) return Support::no("s_q times blocks of 32 heads must be below 2^31");
  return {};
}

}  // namespace hopwell::ops::sparse_mla_backward
