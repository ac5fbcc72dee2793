// paged_attention on GPUs: split-KV kernel. It divides all keys of all sequences equally between the warps of the grid.
//
//     logit_j = (q + u)·k_j · scale + bias_j ;  out = Σ_j exp2(logit_j − m) v_j / Σ_j exp2(logit_j − m)
//
// Tile      per warp (tiles/): 8 chunks of 16 bytes of K and 8 of V per lane, 8 KiB in total. Other d give 4 to 10 KiB.
//           mma tiles are twice as large
// Roles     none: every warp walks along its own share of the tiles (schedule.hpp), copies its tiles and computes them.
//           The warps of a CTA meet only at the end, to merge their partial results of the same row blocks (merge.hpp,
//           combine.hpp)
// Ring      2 stages per warp, more for smaller tiles. A stage is private to each lane: a lane reads only chunks that
//           it copied itself, except for packed rows. mma tiles have one stage, which is refilled in parts
// Timeline  warp   pages 0, 1 │ copy 0, 1 │ wait 0 │ q·k ▓▓▓ softmax ▓ p·v ▓▓▓ │ copy 2 → 0, page 4 │ wait 1 │ q·k …
// Budget    shared: 8 warps × (2 stages × (8,192 + 256 [+ 4,096 of r]) + 2 partial results of 1 KiB) + 6.5 KiB;
//           registers: < 256, one CTA per SM
// Bound     memory: 2 tiles × 8 warps × 8 KiB in flight per SM; 450 to 870 instructions for 8 KiB are half of the issue
//           slots. At the beginning and at the end of a call the instructions are fetched from memory, so short code is
//           faster there
// Launch    cooperative, one CTA per SM: CTAs wait for each other's partial results (combine.hpp)
//
// Hidden keys and keys on missing pages are never read: their copies have length 0 and write zeros.
#pragma once

#include <cstring>
#include <type_traits>

#include "ops/paged_attention/gpu/combine.hpp"
#include "ops/paged_attention/gpu/partition.hpp"
#include "ops/paged_attention/gpu/prefetch.hpp"
#include "ops/paged_attention/plan.hpp"
#include "ops/paged_attention/tiles/dispatch.hpp"
#include "ops/paged_attention/tiles/warp_tile.hpp"
#include "tile/gpu/dependency.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// Shared memory of one warp.
template <class Tile>
struct alignas(128) WarpStorage {
  using Partial = typename Tile::Partial;
  Partial partials[Tile::kStoresResults ? 1 : 2];
  alignas(128) typename Tile::Stage ring[Tile::kStages];

  // If the tile stores whole row blocks itself, a warp writes the second partial result last, and it overlays the ring.
  HOPWELL_DEVICE Partial& partial(int which) {
    if constexpr (Tile::kStoresResults) {
      static_assert(sizeof(ring) >= sizeof(Partial));
      if (which == kBegunHere) return reinterpret_cast<Partial&>(ring);
      return partials[0];
    } else {
      return partials[which];
    }
  }
};
struct CtaStorage {
  PartitionStorage partition;
  MergeStorage merge;
};
template <class Tile>
struct SplitStorage {
  CtaStorage of_cta;
  WarpStorage<Tile> of_warp[kMaxWarps];  // only `warps` of them are allocated
};
template <class Tile>
constexpr SharedBytes kSplitBytes{sizeof(SplitStorage<Tile>) - kMaxWarps * sizeof(WarpStorage<Tile>),
                                  sizeof(WarpStorage<Tile>)};

// Ends a warp's segment: stores the result of a whole row block, or a partial result in shared memory.
template <WarpTile Tile>
HOPWELL_DEVICE void finish_segment(const Params& p, MergeStorage& s, WarpStorage<Tile>& storage, const Tile& tile,
                                   const Segment& segment) {
  const int warp = arch::warp_index(), which = segment.first > 0 ? kBegunBefore : kBegunHere;
  if constexpr (Tile::kStoresResults)
    if (segment.whole()) return tile.store_results(p, segment);
  tile.store_partial(p, storage.partial(which));
  if (!segment.whole()) {
    if (arch::lane_index() > 0 || warp >= p.schedule.shares) return;
    PartialInfo& info = s.info[warp][which];
    info = {segment.ends() ? Extent::ends : Extent::continues, segment.sequence, segment.row_block,
            segment.row_block_begin(p)};
    return;
  }
  arch::syncwarp();
  const int pairs = p.schedule.pairs / p.schedule.interleaved_heads;
  for (int o = 2 * arch::lane_index(); o < pairs; o += 64) {
    PairIndex at(p, o);
    const auto sums = load_sums<4>(storage.partial(kBegunHere), tile.pitch(), at);
    if constexpr (Tile::kInterleavesHeads) at.row += tile.head * p.schedule.queries;
    store_sums<typename Tile::Type>(p, segment.sequence, segment.row_block, at, sums);
  }
  arch::syncwarp();  // kept: before the next segment's partial result; in mma tiles lanes exchange other data before
}

// A value that all lanes of a warp share, held in one register: lane i holds its i-th word.
template <class T>
class InLanes {
  static constexpr int kWords = int(sizeof(T) / 4);
  static_assert(kWords <= 32 && sizeof(T) % 4 == 0 && std::is_trivially_copyable_v<T>);
  uint32_t word = 0;

 public:
  HOPWELL_DEVICE InLanes(const T& all) {  // NOLINT(google-explicit-constructor)
    uint32_t words[kWords];
    std::memcpy(words, &all, sizeof(T));
    HOPWELL_UNROLL
    for (int i = 0; i < kWords; ++i) word = arch::lane_index() == i ? words[i] : word;
  }
  HOPWELL_DEVICE operator T() const {  // NOLINT(google-explicit-constructor)
    uint32_t words[kWords];
    HOPWELL_UNROLL
    for (int i = 0; i < kWords; ++i) words[i] = arch::shuffle(word, i);
    T all;
    std::memcpy(&all, words, sizeof(T));
    return all;
  }
};
// Saves registers in tiles that are short of them: rarely used values are spread over the lanes.
template <class Tile, class T>
using Kept = std::conditional_t<Tile::kRegistersAreScarce, InLanes<T>, T>;

// Iterates over the tiles of a warp's share, each with the page of the lane's first key. Page numbers are requested two
// tiles before they are needed.
template <class Tile>
struct TileCursor {
  Kept<Tile, Segment> kept;  // the segment of the next tile to be requested
  const int* table;
  int key, key_end;
  bool more = true, new_segment = false;

  HOPWELL_DEVICE TileCursor(const Params& p, const Segment& first)
      : kept(first),
        table(p.cache.block_tables + first.sequence * p.cache.tables_stride),
        key(first.keys.begin),
        key_end(first.keys.end) {}
  HOPWELL_DEVICE int page(const Params& p, int first_key) const {
    const int of_lane = key + first_key;
    return more && of_lane < key_end ? table[of_lane / p.cache.block] : -1;
  }
  HOPWELL_DEVICE KeyTile next(const Params& p, const Kept<Tile, WarpWork>& work, int first_key) {
    key += p.schedule.tile;
    if (more && key >= key_end) {
      Segment segment = kept;
      new_segment = more = segment.advance(p, WarpWork(work).tiles.end);
      kept = segment, key = segment.keys.begin, key_end = segment.keys.end;
      table = p.cache.block_tables + segment.sequence * p.cache.tables_stride;
    }
    return {key, page(p, first_key), more, new_segment};
  }
};

// Computes all tiles of a warp's share; `work.segment` is the segment being computed.
template <WarpTile Tile>
HOPWELL_DEVICE void walk_share(const Params& p, MergeStorage& s, WarpStorage<Tile>& storage, Tile& tile,
                               Kept<Tile, WarpWork>& work) {
  constexpr int kStages = Tile::kStages;
  // Address of this lane's first chunk. The shuffle keeps the compiler from computing it again at every use.
  const uint32_t lane_begin = uint32_t(arch::lane_index() * Tile::kLaneBytes);
  const uint32_t ring_address = arch::shuffle(arch::shared_address(storage.ring), 0) + lane_begin;
  const Segment first = WarpWork(work).segment;
  TileCursor<Tile> ahead(p, first);
  KeyTile copied{}, requested{ahead.key, ahead.page(p, tile.first_key), true, true};
  QueryVector vector = query_vector_of(p, first, tile.head, tile.row);
  CopySource source = tile.copy_source(p, vector);  // source of the next tile to copy
  int key = first.keys.begin;
  tile.prefetch_query(p, vector);
  // Step n computes tile n, copies tile n + kStages and requests the page of tile n + kStages + 2.
  HOPWELL_NO_UNROLL
  for (int n = -kStages - 1, at = 0;; ++n) {
    auto& stage = storage.ring[at];
    const uint32_t address = ring_address + uint32_t(at) * uint32_t(sizeof(stage));
    if (n == 0) {
      tile::launch_dependents();  // only now that all copies are in flight, because the next launch slows this one down
      tile.begin_segment(p, vector, storage.partial(kBegunHere), stage);
    }
    if (n >= 0 && key >= vector.end) {
      WarpWork following = work;
      const Segment segment = following.segment;
      const bool more = following.segment.advance(p, following.tiles.end);
      if (more) vector = query_vector_of(p, following.segment, tile.head, tile.row), tile.prefetch_query(p, vector);
      finish_segment(p, s, storage, tile, segment);
      if (!more) return;
      work = following, key = following.segment.keys.begin;
      tile.begin_segment(p, vector, storage.partial(kBegunHere), stage);
    }
    const auto refill = [&](int part) {
      if (copied.exists) tile.copy(p, source, copied, stage, address, part);
      arch::cp_async_commit();
    };
    // Before the first tile there is nothing to compute: either step() skips the computation, or it is not called.
    if (Tile::kPartsApart > 0 && n < 0) {
      HOPWELL_NO_UNROLL
      for (int part = 0; part < Tile::kPartsApart; ++part) refill(part);
    } else {
      tile.step(p, vector, key, stage, address, Tile::kPartsApart > 0 || n >= 0, refill);
    }
    if (n >= 0) key += p.schedule.tile;
    if (n >= -kStages) at = at + 1 == kStages ? 0 : at + 1;
    // The page number requested a step ago. The shuffle keeps the compiler from waiting for the one requested now.
    copied = {requested.key, arch::shuffle(requested.page, arch::lane_index()), requested.exists,
              requested.begins_segment};
    if (unsigned(copied.page) >= unsigned(p.cache.blocks)) copied.page = -1;
    if (ahead.new_segment) {
      source = tile.copy_source(p, query_vector_of(p, ahead.kept, tile.head, tile.row));
      ahead.new_segment = false;
    }
    tile.locate(p, source, copied);
    requested = ahead.next(p, work, tile.first_key);
  }
}

template <class Tile>
__global__ void __launch_bounds__(kMaxThreads, 1) paged_attention_split(const __grid_constant__ Params p) {
  static_assert(WarpTile<Tile>);
  auto& s = arch::dynamic_smem<SplitStorage<Tile>>();
  const int warp = arch::warp_index();
  prefetch_inputs(p);
  if (arch::lane_index() == 0)
    for (PartialInfo& info : s.of_cta.merge.info[warp]) info.extent = Extent::none;
  Tile tile(p);
  if constexpr (Tile::kInterleavesHeads) tile.head = warp / p.schedule.shares;
  tile::wait_for_prior_kernels();
  WarpWork found;
  find_work(p, s.of_cta.partition, found);
  Kept<Tile, WarpWork> work = found;
  if (found.any()) walk_share(p, s.of_cta.merge, s.of_warp[warp], tile, work);
  arch::syncthreads();
  const auto partial_of = [&](int of_warp, int which) -> auto& { return s.of_warp[of_warp].partial(which); };
  merge_cta<typename Tile::Type>(p, s.of_cta.merge, WarpWork(work).partition, partial_of, tile.pitch());
  store_empty<typename Tile::Type>(p);
}

template <class Tile>
struct KernelOf<Params, Tile> {
  static constexpr TileKernel<Params> value{paged_attention_split<Tile>, kSplitBytes<Tile>, Tile::kKeysOfLookup};
};

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
