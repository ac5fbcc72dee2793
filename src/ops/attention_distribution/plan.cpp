#include "ops/attention_distribution/plan.hpp"

#include <algorithm>

namespace hopwell::ops::attention_distribution {

// Rows that are normalised stay whole: one warp adds them up.
Plan plan_of(const Problem& problem) {
  const int s_q = static_cast<int>(problem.s_q), topk = static_cast<int>(problem.topk), sms = problem.device.sms;
  const int rest = s_q % sms;
  Plan plan{.whole_queries = s_q - rest,
            .splits = 1,
            .split_entries = topk,
            .work_tiles = s_q,
            .ctas = 0,
            .alternate = problem.h_q <= kTileHeads};
  if (rest > 0 && topk > 0 && !problem.normalize_l1) {
    const int tiles = (topk + kTileKeys - 1) / kTileKeys, most = std::min(sms / rest, tiles);
    const int split_tiles = (tiles + most - 1) / most;
    plan.splits = (tiles + split_tiles - 1) / split_tiles;
    plan.split_entries = split_tiles * kTileKeys;
    plan.work_tiles = plan.whole_queries + rest * plan.splits;
  }
  plan.ctas = std::min(plan.work_tiles, sms);
  return plan;
}

namespace {

// When sorted rows pay. The load of memory is the time that memory needs for rows of random keys, divided by the
// kernel's time if all keys are in L2. Measured on an H200 (132 SMs) with s_q 4,096 and topk 2,048:
//
//     heads       ns per entry      load with 96 K, 128 K keys    setting
//     up to 64    0.13              1.30, 1.43                    sorted above a load of 1, throttled above 1.35
//     more        0.215                                           sorted above a load of 1, never throttled
//
// Throttling costs more than it spares where CTAs stay together by themselves.
constexpr double kNanosecondsOfEntry = 0.13, kNanosecondsOfEntryOfManyHeads = 0.215;
constexpr int kMeasuredSms = 132;
constexpr double kLoadOfOrder = 1, kLoadOfThrottle = 1.35;
constexpr std::int64_t kLeastOrderedTopk = 256;

// L2 holds two copies of the keys that both of its halves read. 0 if the bandwidth of memory is not known.
double memory_load(const Problem& p) {
  const double ns = p.h_q <= kTileHeads ? kNanosecondsOfEntry : kNanosecondsOfEntryOfManyHeads;
  const double ns_of_entry = ns * kMeasuredSms / p.device.sms;
  const double row_bytes = static_cast<double>(p.d_qk) * 2, kv_bytes = row_bytes * static_cast<double>(p.s_kv);
  const double missing = 1 - static_cast<double>(p.device.l2_bytes) / 2 / kv_bytes;
  return p.device.memory_bytes_per_ns > 0 ? row_bytes * missing / (p.device.memory_bytes_per_ns * ns_of_entry) : 0;
}

// True if CTAs stay together well enough without throttling.
bool stays_together(const Problem& p) { return p.h_q > kTileHeads || memory_load(p) <= kLoadOfThrottle; }

// The emulator's own profile (capability 0) has no bandwidth: it sorts if there are two rows or more and the keys do
// not fit in its L2. Rows that ascend already are sorted only if CTAs throttle, because throttling needs to know each
// row's number of valid entries.
bool orders_rows(const Problem& p) {
  if (p.selection.indices == nullptr || p.topk > tile::kLongestOrderedRow) return false;
  if (p.device.capability == 0)
    return p.s_q >= 2 && p.topk > 0 && static_cast<std::size_t>(p.s_kv * p.d_qk * 2) > p.device.l2_bytes;
  return p.s_q >= p.device.sms && p.topk >= kLeastOrderedTopk && memory_load(p) > kLoadOfOrder &&
         !(p.indices_ascending && stays_together(p));
}

}  // namespace

Ordering ordering_of(const Problem& p) {
  Ordering o;
  o.orders_rows = orders_rows(p);
  if (!o.orders_rows) return o;
  o.steps = static_cast<int>((p.topk + kTileKeys * kThrottleTiles - 1) / (kTileKeys * kThrottleTiles));
  // The steps of all CTAs are counted in one int32.
  o.throttles = !stays_together(p) && p.device.concurrent_ctas && p.s_q * o.steps < std::int64_t{1} << 31;
  runtime::WorkspaceLayout layout;
  o.rows = layout.reserve(4 * p.s_q * p.topk), o.sources = layout.reserve(2 * p.s_q * p.topk);
  o.lengths = layout.reserve(4 * p.s_q);
  if (o.throttles) o.progress = layout.reserve(sizeof(std::uint32_t));
  o.bytes = layout.bytes;
  return o;
}

}  // namespace hopwell::ops::attention_distribution
