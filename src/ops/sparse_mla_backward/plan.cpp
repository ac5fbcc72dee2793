#include "ops/sparse_mla_backward/plan.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tile/ceil_div.hpp"
#include "tile/gpu/views.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

using tile::ceil_div;

constexpr std::int64_t kLimit = std::int64_t{1} << 31;  // kernels store smaller numbers in ints

bool needs_dkv_accum(const Problem& p) { return p.dkv || p.d_window_kv; }

// Whether attn is the distribution that bounds the sums of dkv.
bool attn_bounds_sums(const Problem& p) { return p.attn && (p.attn_with_sink || !p.attn_sink); }

// Entries of the longest list: window keys and the index row.
std::int64_t most_entries(const Problem& p) { return p.topk + p.window.most_keys(); }

DkvAccum dkv_accum_of(const Problem& p) {
  if (!needs_dkv_accum(p)) return DkvAccum::none;
  if (p.deterministic && p.s_q > 0 && most_entries(p) > 0) return DkvAccum::fixed_point;
  if (p.window) return DkvAccum::scratch;
  const bool aligned = reinterpret_cast<std::uintptr_t>(p.dkv.data) % 16 == 0 && p.dkv.stride[0] % 4 == 0;
  // Kernels index dkv_accum in units of four fp32. A negative row offset marks a key without a gradient.
  const std::int64_t stride = p.dkv.stride[0];
  const bool fits = stride >= 0 && stride < kLimit && p.s_kv * (stride / 4) < kLimit;
  const bool output = !p.accumulate && p.dkv.dtype == DType::kFloat32 && aligned && fits;
  return output ? DkvAccum::output : DkvAccum::scratch;
}

// Bytes of dkv_accum for the rows of kv. The rows of window_kv do not count, because CTAs add to a few adjacent ones at
// a time.
std::int64_t sum_bytes(const Problem& p) { return p.s_kv * p.d_qk * 4; }

// A setting of plan_order or plan_throttle pays if dkv_accum exceeds `numerator / denominator` of L2, and if memory is
// busy for at least `least` and less than `most` of the main kernel's time.
struct Rule {
  std::int64_t numerator, denominator;
  double least = 0, most = std::numeric_limits<double>::infinity();

  [[nodiscard]] bool holds(const Problem& p, double memory_share) const {
    return sum_bytes(p) > static_cast<std::int64_t>(p.device.l2_bytes) * numerator / denominator &&
           memory_share >= least && memory_share < most;
  }
};

// Measured with s_q 4,096, topk 2,048 and random indices.
//
//     setting                 figures, before → after
//     ascending, throttled    64 heads, 32 K, 64 K, 128 K keys: 12.2, 14.6, 16.0 → 9.1, 9.6, 12.0 ms (H200)
//     kv_evict_first          64 heads, 128 K: 14.25 → 11.21 ms (H100), 9.39 → 9.18 to 9.29 ms (H200). The
//                             largest lead is 0 then: a CTA waits for the slowest of its wave
//     prefetch_dkv_accum      64 heads, 128 K: 11.4 → 9.5 ms, 32 K: 8 % slower (H200); 64 K: 10.36 → 8.81 ms (H100).
//                             The pair adds to a row half as often. Without kv_evict_first it is slower if memory is
//                             busy. With share_keys memory is mostly idle
constexpr Rule kAscending{2, 3};
constexpr Rule kEvictsKeysFirst{2, 3, 0.55};
constexpr Rule kPrefetches{2, 1, 0.4, 0.75}, kPrefetchesAndEvicts{2, 1, 0.3}, kPrefetchesForSharedKeys{10, 3};
constexpr std::int64_t kLeastOrderedTopk = 256;
constexpr std::int64_t kPartOfL2 = 8, kMostLead = 8;  // largest lead of a CTA: an eighth of L2, 1 to 8 steps
// Time of one key of one query if kv and dkv_accum are in L2. Measured: pair 104, single CTA 118 (H100).
constexpr double kNanosecondsOfKey = 110;

// Estimated part of a main kernel's time in which memory is busy. It assumes that queries select keys at random, and
// that the CTAs of a wave, in step, read each selected row of kv and dkv_accum once and write the latter back once.
double memory_share(const Problem& p, int ctas) {
  const double s_kv = static_cast<double>(p.s_kv), topk = static_cast<double>(p.topk);
  const double keys = s_kv * (1 - std::exp(-p.device.sms / ctas * topk / s_kv));
  const double bytes = keys * static_cast<double>(p.d_qk) * (2 + 4 + 4);
  const double ns = static_cast<double>(most_entries(p)) * kNanosecondsOfKey;
  return p.device.memory_bytes_per_ns > 0 ? bytes / p.device.memory_bytes_per_ns / ns : 0;
}

// On the emulator's own profile (capability 0) a plan takes every path that the call allows, so that test cases cover
// all paths. On a GPU it takes the paths that pay.
bool takes_every_path(const Problem& p) { return p.device.capability == 0; }

// The largest lead of a CTA, so that the rows of dkv_accum that CTAs add to stay in L2, and how misses are hidden.
void plan_throttle(Plan& plan, const Problem& p, const MainKernels& kernels, bool ascending_pays) {
  const int ctas = plan.pairs.head_blocks > 0 ? 2 : 1;
  const double memory = ascending_pays ? memory_share(p, ctas) : 0;
  const bool can_evict = needs_dkv_accum(p) && kernels.single_evicts_keys_first && ctas == 1;
  plan.kv_evict_first = can_evict && ((kEvictsKeysFirst.holds(p, memory) && !p.share_keys) || takes_every_path(p));
  const Rule& prefetches = p.share_keys ? kPrefetchesForSharedKeys : can_evict ? kPrefetchesAndEvicts : kPrefetches;
  plan.prefetch_dkv_accum = needs_dkv_accum(p) && (prefetches.holds(p, memory) || takes_every_path(p));
  const std::int64_t step_bytes = sum_bytes(p) / std::max<std::int64_t>(p.topk / kernels.keys, 1);
  const std::int64_t steps =
      static_cast<std::int64_t>(p.device.l2_bytes) / kPartOfL2 / std::max<std::int64_t>(step_bytes, 1);
  plan.max_lead = plan.kv_evict_first ? 0 : static_cast<int>(std::clamp<std::int64_t>(steps, 1, kMostLead));
}

// The order in which CTAs go through keys, and the largest lead of a CTA.
//
//     deterministic   in order, always: dq of a query must not depend on the other queries, the outputs or the device
//     otherwise       in order if dkv_accum exceeds 2/3 of L2, there is a query for each SM, topk is at least 256, and
//                     the sort takes rows of this length or rows ascend already
void plan_order(Plan& plan, const Problem& p, const MainKernels& kernels) {
  const bool pays =
      needs_dkv_accum(p) && kAscending.holds(p, 0) && p.s_q >= p.device.sms && p.topk >= kLeastOrderedTopk;
  const bool for_speed =
      needs_dkv_accum(p) && (pays || takes_every_path(p)) && (p.topk <= kLongestOrderedRow || p.indices_ascending);
  const bool for_bits = p.deterministic && (p.dq || needs_dkv_accum(p)) && p.topk > 0;
  plan.ascending = p.s_q > 0 && (for_speed || for_bits);
  // Entries before a query's k_start are not valid. Ordered rows do not have them, so dq is summed in other steps.
  const bool begins_later = p.selection.indices != nullptr && p.selection.visibility.k_start != nullptr;
  plan.orders_rows = plan.ascending && (!p.indices_ascending || (for_bits && begins_later));
  plan.order_clears_dkv_accum = plan.orders_rows && p.s_q >= p.device.sms;
  // The steps of all CTAs are counted in one int32.
  const std::int64_t steps =
      p.s_q * (ceil_div(p.h_q, kernels.single_heads) + 1) * ceil_div(most_entries(p), kernels.keys);
  plan.throttles = plan.ascending && pays && p.device.concurrent_ctas && steps < kLimit;
  plan_throttle(plan, p, kernels, plan.ascending && pays);
}

// Serpentine wave order: every other wave processes keys in descending order, because it then finds in L2 the rows that
// the wave before added to last. Not used with two kernels, because their waves end at different queries, nor by
// deterministic calls, because dq must not depend on the wave of its query.
void plan_serpentine(Plan& plan, const Problem& p) {
  const bool two_kernels = plan.pairs.head_blocks > 0 && plan.singles.head_blocks > 0;
  if (!plan.orders_rows || two_kernels || plan.groups.count > 0 || p.deterministic) return;
  plan.serpentine_tiles =
      std::max(p.device.sms / (plan.pairs.head_blocks > 0 ? plan.pairs.ctas : plan.singles.ctas), 1);
}

// Groups adjacent queries with up to 32 heads. The device decides for each group whether the selections overlap enough.
// Not used with attn, which each query has of its own, nor by deterministic calls.
void plan_groups(Plan& plan, const Problem& p, const MainKernels& kernels) {
  if (!kernels.merges_rows || p.attn || p.deterministic) return;
  plan.groups = query_groups(p, kernels.single_heads, {p.q, p.out, p.d_out, p.lse, p.dq});
  plan.grouped = {.heads = kernels.single_heads, .head_blocks = 1, .members = plan.groups.members};
  plan.grouped.whole_tiles = static_cast<int>(plan.groups.count);
}

// Divides the tiles of a pass into whole tiles and split tiles. Deterministic calls have no splits, because the number
// of queries and the device determine which queries are split, and into how many splits. Without window keys, the
// workspace has dkv_accum or dq of splits, not both, because it should stay small.
MainPass schedule(MainPass pass, const Problem& p, const MainKernels& kernels, DkvAccum dkv_accum) {
  constexpr std::int64_t kMostSplits = 8;
  const std::int64_t tiles = p.s_q * pass.head_blocks, steps = ceil_div(most_entries(p), kernels.keys),
                     at_a_time = std::max(p.device.sms / pass.ctas, 1), rest = tiles % at_a_time;
  std::int64_t splits = 1;
  if (rest > 0 && !p.deterministic && (dkv_accum == DkvAccum::none || dkv_accum == DkvAccum::output || p.window)) {
    // Limit: dq of the splits takes at most as many bytes as dkv_accum, or 2.4 MB.
    const std::int64_t fit = std::max<std::int64_t>(rows_of_dkv_accum(p), 1024) / (rest * pass.heads);
    splits = std::max<std::int64_t>(std::min({kMostSplits, at_a_time / rest, steps, fit}), 1);
    if (splits > 1) splits = ceil_div(steps, ceil_div(steps, splits));  // no empty split
  }
  const std::int64_t split_tiles = splits > 1 ? rest : 0;
  pass.whole_tiles = static_cast<int>(tiles - split_tiles), pass.split_tiles = static_cast<int>(split_tiles);
  pass.splits = static_cast<int>(splits), pass.split_entries = static_cast<int>(ceil_div(steps, splits) * kernels.keys);
  return pass;
}

// Pairs process 65 heads or more at a time, single CTAs the remaining heads.
void plan_heads(Plan& plan, const Problem& p, const MainKernels& kernels) {
  const bool has_pairs = kernels.pair_heads > 0 && (!p.deterministic || kernels.deterministic_pairs);
  const auto h_q = static_cast<int>(p.h_q);
  plan.pairs = {.heads = kernels.pair_heads, .ctas = 2};
  plan.pairs.head_blocks = has_pairs ? (h_q + kernels.pair_heads - kernels.single_heads - 1) / kernels.pair_heads : 0;
  plan.singles = {.heads = kernels.single_heads, .first_head = plan.pairs.head_blocks * kernels.pair_heads};
  plan.singles.head_blocks =
      static_cast<int>(ceil_div(std::max(h_q - plan.singles.first_head, 0), kernels.single_heads));
  plan.pairs = schedule(plan.pairs, p, kernels, plan.dkv_accum);
  plan.singles = schedule(plan.singles, p, kernels, plan.dkv_accum);
}

// Without indices all queries add to the same rows of dkv_accum, in the same order, and neighbours have nearly the same
// window keys as well. Additions to one row wait for each other, so neighbouring clusters process distant
// queries. With indices that is slower, because CTAs in step find each other's rows in L2.
//
//     count                   1, 8, 16, 24, 33, 44, 66, 132 (H200, windows of 128, ratio 128)
//     64 heads, 32 K tokens   14.7, 9.8, 9.4, 8.9, 9.1, 9.0, 9.9, 13.8 ms
//     64 heads, 128 K         84.6, 71.0, 70.6, 69.8, 71.1, 70.5, 73.2, 77.5 ms
//     128 heads, 128 K        138.7, 136.5, 136.5, 137.2, 138.5, 139.7, 140.9, 138.7 ms
void plan_far_queries(Plan& plan, const Problem& p) {
  constexpr int kFarQueries = 24;
  if (!p.window || p.selection.indices) return;
  std::int64_t queries = p.s_q;  // those without splits
  for (const MainPass* pass : {&plan.pairs, &plan.singles})
    if (pass->head_blocks > 0) queries = std::min<std::int64_t>(queries, pass->whole_tiles / pass->head_blocks);
  plan.far_queries.count = takes_every_path(p) ? 2 : kFarQueries;
  plan.far_queries.distance = static_cast<int>(queries / plan.far_queries.count);
}

void lay_out(Plan& plan, const Problem& p) {
  Workspace& w = plan.workspace;
  runtime::WorkspaceLayout layout;
  const auto dq_bytes = [&p](const MainPass& pass) {
    return p.dq ? 4 * p.d_qk * pass.heads * pass.splits * pass.split_tiles : 0;
  };
  const std::int64_t rows = rows_of_dkv_accum(p), window_bytes = 4 * p.s_q * p.window.most_keys();
  if (plan.window_distribution) {
    w.dkv = layout.reserve(std::max(4 * rows * p.d_qk, 2 * window_bytes));
    w.window_rows = w.dkv, w.window_attn = w.dkv + static_cast<std::size_t>(window_bytes);
  } else if (plan.dkv_accum == DkvAccum::scratch || plan.dkv_accum == DkvAccum::fixed_point) {
    w.dkv = layout.reserve(4 * rows * p.d_qk);
  }
  if (plan.dkv_accum == DkvAccum::fixed_point)
    w.scale = layout.reserve(4 * rows), w.largest = layout.reserve(4 * rows), w.count = layout.reserve(4 * rows);
  if (p.d_sink || plan.dkv_accum == DkvAccum::fixed_point) w.delta = w.sink_parts = layout.reserve(4 * p.s_q * p.h_q);
  if (plan.orders_rows || plan.bound_distribution) w.rows = layout.reserve(4 * p.s_q * p.topk);
  if (plan.orders_rows) w.lengths = layout.reserve(4 * p.s_q);
  if (plan.orders_rows && p.attn && !plan.distribution) w.sources = layout.reserve(2 * p.s_q * p.topk);
  w.merged_rows = place_merged_rows(plan.groups, p.topk, layout);
  if (plan.throttles) w.progress = layout.reserve(2 * sizeof(std::uint32_t));
  w.dq_splits = layout.reserve(std::max(dq_bytes(plan.pairs), dq_bytes(plan.singles)));
  plan.workspace_bytes = layout.bytes;
}

}  // namespace

Plan make_plan(const Problem& p, const MainKernels& kernels) {
  Plan plan;
  plan.dkv_accum = dkv_accum_of(p);
  plan.distribution = p.deterministic && p.attn && p.s_q > 0 && p.topk > 0;
  plan.bound_distribution = plan.dkv_accum == DkvAccum::fixed_point && p.topk > 0 && !attn_bounds_sums(p);
  plan.window_distribution = plan.dkv_accum == DkvAccum::fixed_point && p.window.most_keys() > 0;
  plan_heads(plan, p, kernels);
  plan_order(plan, p, kernels);
  plan_groups(plan, p, kernels);
  plan_serpentine(plan, p);
  plan_far_queries(plan, p);
  lay_out(plan, p);
  return plan;
}

namespace {

// fp32 [rows, columns] at an offset of the workspace.
View matrix_at(void* workspace, std::size_t offset, std::int64_t rows, std::int64_t columns) {
  View view;
  view.data = runtime::at_offset<float>(workspace, offset);
  view.dtype = DType::kFloat32, view.ndim = 2, view.present = true;
  view.shape = {rows, columns}, view.stride = {columns, 1};
  return view;
}

}  // namespace

attention_distribution::Problem distribution_problem(const Problem& p) {
  attention_distribution::Problem d;
  d.q = p.q, d.kv = p.kv, d.lse = p.lse, d.attn = p.attn;
  if (p.attn_with_sink) d.attn_sink = p.attn_sink;
  d.selection = p.selection, d.sm_scale = p.sm_scale;
  d.s_q = p.s_q, d.s_kv = p.s_kv, d.h_q = p.h_q, d.d_qk = p.d_qk, d.topk = p.topk;
  d.device = p.device;
  return d;
}

attention_distribution::Problem bound_distribution_problem(const Problem& p, const Plan& plan, void* workspace) {
  attention_distribution::Problem d = distribution_problem(p);
  d.attn_sink = p.attn_sink;
  if (!attn_bounds_sums(p)) d.attn = matrix_at(workspace, plan.workspace.rows, p.s_q, p.topk);
  return d;
}

attention_distribution::Problem window_distribution_problem(const Problem& p, const Plan& plan, void* workspace) {
  attention_distribution::Problem d;
  const std::int64_t most = p.window.most_keys();
  d.q = p.q, d.kv = p.window_kv, d.lse = p.lse, d.attn_sink = p.attn_sink;
  d.attn = matrix_at(workspace, plan.workspace.window_attn, p.s_q, most);
  // A plan, which is made without a workspace, only asks whether there are indices.
  d.selection.indices = non_null_indices(runtime::at_offset<const std::int32_t>(workspace, plan.workspace.window_rows));
  d.selection.indices_stride = most;
  d.selection.s_q = p.s_q, d.selection.s_kv = p.window.s_w, d.selection.topk = most;
  d.sm_scale = p.sm_scale, d.indices_ascending = true;
  d.s_q = p.s_q, d.s_kv = p.window.s_w, d.h_q = p.h_q, d.d_qk = p.d_qk, d.topk = most;
  d.device = p.device;
  return d;
}

std::optional<runtime::Unsupported> unsupported(const Problem& p, const Plan& plan) {
  using runtime::Unsupported;
  if (p.q.dtype != DType::kBFloat16) return Unsupported{"needs bfloat16 q and kv"};
  if (p.d_qk != 576 && p.d_qk != 512) return Unsupported{"needs d_qk 576 or 512"};
  if (p.d_v != 512) return Unsupported{"needs d_v 512"};
  using tile::rows_aligned;
  if (!rows_aligned(p.q, 2) || !rows_aligned(p.kv, 1) || !rows_aligned(p.out, 2) || !rows_aligned(p.d_out, 2) ||
      !rows_aligned(p.dq, 2))
    return Unsupported{"needs rows of q, kv, out, d_out and dq 16-byte aligned"};
  if (!rows_aligned(p.window_kv, 1)) return Unsupported{"needs rows of window_kv 16-byte aligned"};
  // Kernels index dkv_accum in units of four fp32 or two fixed-point sums.
  const std::int64_t row_units = plan.dkv_accum == DkvAccum::none          ? 0
                                 : plan.dkv_accum == DkvAccum::fixed_point ? p.d_qk / 2
                                 : plan.dkv_accum == DkvAccum::output      ? p.dkv.stride[0] / 4
                                                                           : p.d_qk / 4;
  if (rows_of_dkv_accum(p) * row_units >= kLimit)
    return Unsupported{"needs dkv with fewer than 2^33 elements, 2^32 if deterministic"};
  const auto far = [](const View& view, std::int64_t rows) {
    return rows > 1 && (view.stride[0] >= kLimit || view.stride[0] <= -kLimit);
  };
  if (most_entries(p) >= kLimit - 64) return Unsupported{"needs topk plus the window's keys below 2^31 - 64"};
  if (far(p.kv, p.s_kv)) return Unsupported{"needs the row stride of kv below 2^31"};
  if (far(p.window_kv, p.window.s_w)) return Unsupported{"needs the row stride of window_kv below 2^31"};
  if (p.s_q * ceil_div(p.h_q, 32) >= kLimit) return Unsupported{"needs s_q times blocks of 32 heads below 2^31"};
  return {};
}

runtime::PlanOr<Plan> plan_on(const char* backend, const Problem& p, const MainKernels& kernels) {
  using runtime::Unsupported;
  if (p.window && !kernels.takes_windows) return Unsupported{"needs a call without window_kv"};
  Plan plan = make_plan(p, kernels);
  if (auto reason = unsupported(p, plan)) return *std::move(reason);
  const auto plan_distribution = [&](const attention_distribution::Problem& d, auto& call) {
    auto planned = runtime::plan_on(backend, d);
    if (auto* unsupported = std::get_if<Unsupported>(&planned)) return "attention_distribution: " + unsupported->reason;
    call = std::get<0>(std::move(planned));
    return std::string();
  };
  std::string reason;
  if (plan.distribution) reason = plan_distribution(distribution_problem(p), plan.distribution_call);
  if (plan.bound_distribution && reason.empty())
    reason = plan_distribution(bound_distribution_problem(p, plan, nullptr), plan.bound_distribution_call);
  if (plan.window_distribution && reason.empty())
    reason = plan_distribution(window_distribution_problem(p, plan, nullptr), plan.window_distribution_call);
  if (!reason.empty()) return Unsupported{reason};
  return plan;
}

}  // namespace hopwell::ops::sparse_mla_backward
