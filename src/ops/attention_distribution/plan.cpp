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
  if (rest > 0 && !problem.normalize_l1) {
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

// How long rows of random keys keep memory busy, of the time that the kernel takes where all keys are in L2. That holds two
// copies of what both of its halves are asked for. 0 where nothing is known.
double memory_load(const Problem& p) {
  const double ns_of_entry = (p.h_q <= kTileHeads ? 0.13 : 0.215) * 132 / p.device.sms;  // by all SMs; seen on an H200
  const double row_bytes = static_cast<double>(p.d_qk) * 2, kv_bytes = row_bytes * static_cast<double>(p.s_kv);
  const double missing = 1 - static_cast<double>(p.device.l2_bytes) / 2 / kv_bytes;
  return p.device.memory_bytes_per_ns > 0 ? row_bytes * missing / (p.device.memory_bytes_per_ns * ns_of_entry) : 0;
}

// Whether CTAs stay together well enough by themselves, so that a common pace would cost more than the bytes that it spares:
// with more heads, or where not much more is read than memory can give. Seen on an H200, whose load is 1.30 with 96 K keys
// and 1.43 with 128 K.
bool stays_together(const Problem& p) {
  constexpr double kLoadOfPace = 1.35;
  return p.h_q > kTileHeads || memory_load(p) <= kLoadOfPace;
}

// The emulator's own profile, which is no chip and knows no speed, has such rows as soon as there are two, for keys beyond its
// L2. Rows that ascend are only copied if CTAs throttle: that needs rows with a known number of valid entries.
bool orders_rows(const Problem& p) {
  if (p.keeps_order || p.selection.indices == nullptr || p.topk > tile::kLongestOrderedRow) return false;
  if (p.device.capability == 0)
    return p.s_q >= 2 && p.topk > 0 && static_cast<std::size_t>(p.s_kv * p.d_qk * 2) > p.device.l2_bytes;
  return p.s_q >= p.device.sms && p.topk >= 256 && memory_load(p) > 1 && !(p.indices_ascending && stays_together(p));
}

}  // namespace

Ordering ordering_of(const Problem& p) {
  Ordering o;
  o.orders_rows = orders_rows(p);
  if (!o.orders_rows) return o;
  o.steps = static_cast<int>((p.topk + kTileKeys * kPaceTiles - 1) / (kTileKeys * kPaceTiles));
  // The count of all steps must fit; and the emulator runs CTAs in turn, where waiting for others is in vain.
  o.paces = !stays_together(p) && !p.device.emulated() && p.s_q * o.steps < std::int64_t{1} << 31;
  const auto take = [&o](std::int64_t bytes) {
    const std::size_t offset = o.bytes;
    o.bytes += (static_cast<std::size_t>(bytes) + 255) / 256 * 256;
    return offset;
  };
  o.rows = take(4 * p.s_q * p.topk), o.sources = take(2 * p.s_q * p.topk), o.lengths = take(4 * p.s_q);
  if (o.paces) o.progress = take(sizeof(std::uint32_t));
  return o;
}

}  // namespace hopwell::ops::attention_distribution
