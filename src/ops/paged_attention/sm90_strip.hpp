// paged_attention on Hopper, for few strips: a cluster of CTAs for each strip, whose parts meet through distributed shared
// memory. There is no plan, and nothing goes through a workspace; what counts is a short way from the first instruction to
// the last.
//
//     logit_j = (q + u)·k_j · scale + bias_j ;  out = Σ_j exp2(logit_j − m) v_j / Σ_j exp2(logit_j − m)
//
// Strip     of one KV head (sm80_work.hpp). Its tiles are dealt out to the warps of the cluster in turn, so that whose they
//           are is known before the length is
// Roles     none. Each warp copies and computes its tiles, as in sm80_ring.hpp; then each thread joins what the CTA's warps
//           have of two values and sends it to the CTA of the cluster that stores them. That one adds up what it is sent in
//           the order of the CTAs: the same bits every time
// Guess     The length and the first pages are read before the kernel ahead has ended, which may still be writing them. All
//           that follows from them is found out, down to the addresses of copies, and K and V of the first tile are sent
//           for (to L2). When the kernel ahead has ended, length and pages are read again while the first copies are under
//           way; if they have changed, the copies are thrown away and all is done once more
// Timeline  µs; B 1, H 16, d 64, context 1000, calls that follow one another:
//           −2.5 guess │ 0 kernel ahead has ended, copies │ 1.8 first tile │ 2.5 sums │ 3.1 sent │ 3.4 there │ 3.7 stored
// Budget    shared: for each warp 2 stages × (8,192 + 256 or more) and its state, and 16 B for each pair of values: 8 warps
//           144 KiB (fragments, d 128: 178, with r: 209); 6 warps 108 KiB, so that two CTAs fit an SM, this launch's and the
//           next one's. Registers: < 256
// Bound     short contexts: latencies, one after the other; long ones: memory, by as many SMs as clusters can have
#pragma once

#include "arch/sm90/bulk_copy.hpp"
#include "ops/paged_attention/sm80_ring.hpp"

namespace hopwell::ops::paged_attention {
namespace {

constexpr int kMaxCluster = 8;

struct StripParams : Params {
  Divisor cluster, slice;  // CTAs of a cluster; pairs of values that one of them stores
  int lookups_log2;        // how many pages of a tile are looked up
  int row_lines;           // pieces of 128 bytes of a key's row: 1 or 2; 0: nothing is sent for
};

template <class Lanes>
struct alignas(128) StripWarp {
  typename Lanes::Stage ring[Lanes::kStages];
  typename Lanes::State state;
};
template <class Lanes>
struct StripStorage {
  arch::mbarrier all_there;
  // [CTAs of the cluster, slice]: two values, then maximum and sum
  alignas(16) arch::Words4 inbox[Lanes::State::kValues / 2 + kMaxCluster];
  StripWarp<Lanes> of_warp[kMaxWarps];  // as many as there are
};
template <class Lanes>
HOPWELL_HOST_DEVICE constexpr size_t strip_bytes(int warps) {
  return sizeof(StripStorage<Lanes>) - size_t(kMaxWarps - warps) * sizeof(StripWarp<Lanes>);
}

// Which strip, and which of its CTAs this is.
struct Seat {
  int sequence, strip, rank;
  HOPWELL_DEVICE explicit Seat(const StripParams& p) {
    const int cluster = arch::block_index() / p.cluster;
    rank = arch::block_index() - cluster * p.cluster;
    sequence = cluster / p.strips, strip = cluster - sequence * p.strips;
  }
  HOPWELL_DEVICE int pairs(const StripParams& p) const {  // that this CTA stores
    return larger(0, smaller(p.slice, p.pairs - rank * p.slice));
  }
};

// An int that the kernel ahead may be writing, from L2: no copy of it stays in L1.
HOPWELL_DEVICE int peek(const int* at) { return int(arch::load_relaxed(reinterpret_cast<const uint32_t*>(at))); }

// The length before the kernel ahead has ended. The emulator has none ahead: there two CTAs of three are told something else.
HOPWELL_DEVICE int guess_length(const int* length, [[maybe_unused]] int rank) {
  const int guess = peek(length);
  if constexpr (HOPWELL_ON_DEVICE) return guess;
  return rank % 3 == 0 ? guess : rank % 3 == 1 ? guess / 2 : guess + 40;
}

// The tiles of a warp, and the pages that they lie on: each lane looks up one, for `count` tiles at a time.
template <class Lanes>
struct Tiles {
  const int* table;
  int first, stride, end;   // keys
  int count, tile, lookup;  // the lane's
  HOPWELL_DEVICE Tiles(const StripParams& p, const int* table, const Keys& keys, int warp_of_cluster)
      : table(table),
        first(keys.begin + warp_of_cluster * p.unit),
        stride(p.cluster * p.warps * p.unit),
        end(keys.end),
        count(32 >> p.lookups_log2),
        tile(arch::lane_index() >> p.lookups_log2),
        lookup(arch::lane_index() - (tile << p.lookups_log2)) {}
  // Those of tile n and following, as they are in the table.
  HOPWELL_DEVICE int pages(const StripParams& p, int n) const {
    const int key = first + (n + tile) * stride + lookup * Lanes::kKeysOfLookup;
    return key < end ? peek(table + key / p.block) : -1;
  }
};

// K and V of the first tile, on their way to L2: a line of each for every lane.
template <class Lanes>
HOPWELL_DEVICE void send_for(const StripParams& p, int kv_head, const Tiles<Lanes>& tiles, int pages) {
  constexpr int kWidth = int(sizeof(typename Lanes::Type));
  const int lines_log2 = 5 - p.lookups_log2, lookup = arch::lane_index() >> lines_log2;
  const int line = arch::lane_index() - (lookup << lines_log2), row = p.row_lines > 1 ? line / 2 : line;
  const int page = arch::shuffle(pages, lookup), key = tiles.first + lookup * Lanes::kKeysOfLookup + row;
  if (p.row_lines == 0 || key >= tiles.end || unsigned(page) >= unsigned(p.blocks)) return;
  const int64_t slot = key % p.block, of_row = (line - row * p.row_lines) * 128;
  arch::prefetch_l2(static_cast<const char*>(p.k) + kv_head * p.k_at.head * kWidth + page * p.k_page + slot * p.k_slot +
                    of_row);
  arch::prefetch_l2(static_cast<const char*>(p.v) + kv_head * p.v_at.head * kWidth + page * p.v_page + slot * p.v_slot +
                    of_row);
}

// A warp's way through its tiles of the strip. What it has of the result is in `lanes`.
template <class Lanes>
HOPWELL_DEVICE void walk_strip(const StripParams& p, const Seat& seat, StripWarp<Lanes>& own, Lanes& lanes) {
  constexpr int kStages = Lanes::kStages;
  const uint32_t ring_address =
      arch::shuffle(arch::shared_address(own.ring), 0) + uint32_t(arch::lane_index() * Lanes::kLaneBytes);
  const int* length = p.context_lens + seat.sequence * p.lens_stride;
  const int* table = p.block_tables + seat.sequence * p.tables_stride;
  Segment segment{};
  segment.sequence = seat.sequence, segment.strip = seat.strip;
  int length_taken = guess_length(length, seat.rank);
  HOPWELL_NO_UNROLL
  for (bool certain = false, right = false; !right; certain = true) {
    segment.context = larger(0, smaller(length_taken, p.max_context));
    segment.keys = keys_of_sequence(p, segment.context);
    const Tiles<Lanes> tiles(p, table, segment.keys, arch::warp_index() * p.cluster + seat.rank);
    const Source source = source_of(p, segment, lanes.head_of_strip, lanes.row);
    const Feed feed = lanes.feed(p, source);
    const int first_pages = tiles.pages(p, 0);
    int pages = first_pages, next_pages = -1;
    if (!certain) {
      send_for<Lanes>(p, source.kv_head, tiles, first_pages);
      tile::wait_for_prior_kernels();
    }
    lanes.fetch_query(p, source);
    const int length_now = peek(length), first_pages_now = tiles.pages(p, 0);
    int key = tiles.first, ahead = tiles.first;  // of the tile to compute; to copy
    // Step n computes tile n and copies tile n + kStages.
    HOPWELL_NO_UNROLL
    for (int n = -kStages, at = 0;; ++n) {
      auto& stage = own.ring[at];
      const uint32_t address = ring_address + uint32_t(at) * uint32_t(sizeof(stage));
      if (ahead >= tiles.end) tile::launch_dependents();
      if (n == 0) {
        right = certain || (length_now == length_taken && arch::ballot(first_pages_now != first_pages) == 0);
        if (!right) break;
        lanes.begin(p, source, own.state, stage);
      }
      if (n >= 0 && key >= tiles.end) break;
      const int m = n + kStages, of_batch = m & (tiles.count - 1);
      if (of_batch == 0) {
        if (m > 0) pages = arch::shuffle(next_pages, arch::lane_index());
        next_pages = tiles.pages(p, m + tiles.count);
      }
      int page = arch::shuffle(pages, (of_batch << p.lookups_log2) + lanes.first_key / Lanes::kKeysOfLookup);
      if (unsigned(page) >= unsigned(p.blocks)) page = -1;
      // The first tile brings the query, even if it has no keys.
      const bool wanted = ahead < tiles.end || m == 0;
      lanes.step(p, source, key, stage, address, n >= 0, [&](int part) {
        if (wanted) lanes.copy(p, feed, {ahead, page, true, m == 0}, stage, address, part);
        arch::cp_async_commit();
      });
      if (n >= 0) key += tiles.stride;
      ahead += tiles.stride;
      at = at + 1 == kStages ? 0 : at + 1;
    }
    arch::cp_async_wait<0>();  // a first tile without keys; or what a wrong guess has copied
    if (right) return;
    length_taken = length_now;
  }
}

// What the warps of this CTA have, two values a thread, to the CTAs that store them.
template <class Lanes>
HOPWELL_DEVICE void send_sums(const StripParams& p, const Seat& seat, StripStorage<Lanes>& s, int pitch) {
  const uint32_t inbox = arch::shared_address(s.inbox), all_there = arch::shared_address(&s.all_there);
  HOPWELL_NO_UNROLL
  for (int o = arch::thread_index(); o < p.pairs; o += p.threads) {
    const Place at(p, o);
    const int owner = o / p.slice, slot = seat.rank * p.slice + o - owner * p.slice;
    const Pair sums =
        join_parts<kMaxWarps>(p.warps, [&](int warp) { return sums_of_state<2>(s.of_warp[warp].state, pitch, at); });
    arch::store_async_v4(arch::map_to_rank(inbox + uint32_t(16 * slot), uint32_t(owner)),
                         {arch::bit_cast<uint32_t>(sums.value[0]), arch::bit_cast<uint32_t>(sums.value[1]),
                          arch::bit_cast<uint32_t>(sums.maximum), arch::bit_cast<uint32_t>(sums.sum)},
                         arch::map_to_rank(all_there, uint32_t(owner)));
  }
}

// What all CTAs of the cluster have sent becomes results. All that does not depend on it is found out before it is there.
template <class Lanes>
HOPWELL_DEVICE void store_slice(const StripParams& p, const Seat& seat, StripStorage<Lanes>& s) {
  using T = typename Lanes::Type;
  const int pairs = seat.pairs(p);
  HOPWELL_NO_UNROLL
  for (int i = arch::thread_index(); i < pairs; i += p.threads) {
    const Place at(p, seat.rank * p.slice + i);
    const Vector to = vector_of(p, seat.strip, at.vector);
    T* out = static_cast<T*>(p.out) + seat.sequence * p.out_stride[0] + to.query * p.out_stride[1] +
             to.head * p.out_stride[2] + 2 * at.pair;
    float* lse = at.pair > 0 || !p.lse
                     ? nullptr
                     : p.lse + seat.sequence * p.lse_stride[0] + to.query * p.lse_stride[1] + to.head * p.lse_stride[2];
    const uint32_t from = arch::shared_address(&s.inbox[i]);
    arch::mbarrier_wait_cluster(s.all_there, 0);
    const Pair all = join_parts<kMaxCluster>(p.cluster, [&](int cta) {
      const arch::Words4 x = arch::load_shared_v4(from + uint32_t(16 * cta * p.slice));
      return Pair{arch::bit_cast<float>(x.w[2]),
                  arch::bit_cast<float>(x.w[3]),
                  {arch::bit_cast<float>(x.w[0]), arch::bit_cast<float>(x.w[1])}};
    });
    if (!to.exists) continue;
    const float factor = all.sum == 0 ? 0 : 1 / all.sum;
    from_fp32(all.value[0] * factor, out), from_fp32(all.value[1] * factor, out + 1);
    if (lse) *lse = all.sum == 0 ? -INFINITY : (all.maximum + arch::log2_approx(all.sum)) * kLn2;
    if (may_be_infinite(all)) store_infinite<T>(p, seat.sequence, to, 2 * at.pair, 2 * at.pair + 2);
  }
}

template <class Lanes>
__global__ void __launch_bounds__(kMaxThreads, 1) strip_kernel(const __grid_constant__ StripParams p) {
  auto& s = arch::dynamic_smem<StripStorage<Lanes>>();
  const Seat seat(p);
  if (arch::thread_index() == 0) {
    arch::mbarrier_init(s.all_there, 1);
    arch::fence_mbarrier_init();
    arch::mbarrier_arrive_expect_tx(s.all_there, uint32_t(16 * p.cluster * seat.pairs(p)));
  }
  arch::cluster_arrive();
  prefetch(p);
  Lanes lanes(p);
  auto& own = s.of_warp[arch::warp_index()];
  walk_strip<Lanes>(p, seat, own, lanes);
  lanes.leave(p, own.state);
  arch::syncthreads();
  arch::cluster_wait();  // all inboxes are ready
  send_sums<Lanes>(p, seat, s, lanes.pitch());
  store_slice<Lanes>(p, seat, s);
}

}  // namespace
}  // namespace hopwell::ops::paged_attention
