// paged_attention on Hopper, for few row blocks: one cluster of CTAs per row block. The CTAs exchange partial results
// through distributed shared memory, without a partition and without a workspace, because the latency from the first
// instruction to the last one limits these calls.
//
//     logit_j = (q + u)·k_j · scale + bias_j ;  out = Σ_j exp2(logit_j − m) v_j / Σ_j exp2(logit_j − m)
//
// Work      one row block (schedule.hpp) of one or a few KV heads. Its tiles are dealt round-robin to the warps of the
//           cluster, so that the owner of a tile is known before the length
// Roles     none. Each warp copies and computes its tiles, as in split_kernel.hpp. Then each thread merges the partial
//           results of the CTA's warps for two values and sends the sum to the CTA of the cluster that stores them.
//           That CTA adds the sums in the order of the CTAs, so that results are deterministic
// Guess     The length and the first pages are read before the kernel ahead has ended. That kernel may still be writing
//           them. The addresses of the first copies are computed from this guess, and K and V of the first tile are
//           prefetched to L2. When the kernel ahead has ended, length and pages are read again while the first copies
//           are in flight. If they have changed, the copies are discarded and the work starts again
// Timeline  µs; B 1, H 16, d 64, context 1000, back-to-back calls:
//           −2.5 guess │ 0 kernel ahead ended, copies │ 1.8 first tile │ 2.5 sums │ 3.1 sent │ 3.4 there │ 3.7 stored
// Budget    shared: per warp 2 stages × (8,192 + 256 or more) and its partial result, and 16 B for each pair of
//           values: 8 warps 144 KiB (mma, d 128: 178, with r: 209); 6 warps 108 KiB, so that a CTA of this launch and a
//           CTA of the next launch fit an SM. Registers: < 256
// Bound     short contexts: latencies, one after the other; long ones: memory, by as many SMs as clusters can have
#pragma once

#include "arch/sm90/bulk_copy.hpp"
#include "ops/paged_attention/gpu/merge.hpp"
#include "ops/paged_attention/gpu/prefetch.hpp"
#include "ops/paged_attention/plan.hpp"
#include "ops/paged_attention/tiles/dispatch.hpp"
#include "ops/paged_attention/tiles/warp_tile.hpp"
#include "tile/gpu/dependency.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

template <class Tile>
struct alignas(128) ClusterWarpStorage {
  typename Tile::Stage ring[Tile::kStages];
  typename Tile::Partial partial;
};
template <class Tile>
struct ClusterStorage {
  arch::mbarrier receive_full;
  // [CTAs of the cluster, slice]: two values, then maximum and sum
  alignas(16) arch::Words4 receive_buffer[Tile::Partial::kValues / 2 + kMaxCluster];
  ClusterWarpStorage<Tile> of_warp[kMaxWarps];  // only `warps` of them are allocated
};
template <class Tile>
constexpr SharedBytes kClusterBytes{sizeof(ClusterStorage<Tile>) - kMaxWarps * sizeof(ClusterWarpStorage<Tile>),
                                    sizeof(ClusterWarpStorage<Tile>)};

// The row block of this CTA, and the rank of the CTA in its cluster.
struct ClusterWork {
  int sequence, row_block, rank;
  HOPWELL_DEVICE explicit ClusterWork(const ClusterParams& p) {
    const int cluster = arch::block_index() / p.cluster;
    rank = arch::block_index() - cluster * p.cluster;
    sequence = cluster / p.schedule.row_blocks, row_block = cluster - sequence * p.schedule.row_blocks;
  }
  HOPWELL_DEVICE int pairs(const ClusterParams& p) const {  // number of pairs that this CTA stores
    return larger(0, smaller(p.slice, p.schedule.pairs - rank * p.slice));
  }
};

// Loads an int that the kernel ahead may be writing, from L2, so that no stale copy stays in L1.
HOPWELL_DEVICE int load_unsettled(const int* at) {
  return int(arch::load_relaxed(reinterpret_cast<const uint32_t*>(at)));
}

// Reads the length before the kernel ahead has ended. In the emulator two of three CTAs guess wrong.
HOPWELL_DEVICE int guess_length(const int* length, [[maybe_unused]] int rank) {
  const int guess = load_unsettled(length);
  if constexpr (HOPWELL_ON_DEVICE) return guess;
  return rank % 3 == 0 ? guess : rank % 3 == 1 ? guess / 2 : guess + 40;
}

// Tiles of a warp and their pages: each lane looks up one page, for `count` tiles at a time.
template <class Tile>
struct DealtTiles {
  const int* table;
  int first, stride, end;   // keys
  int count, tile, lookup;  // tiles at a time; this lane's tile and its look-up
  HOPWELL_DEVICE DealtTiles(const ClusterParams& p, const int* table, const Keys& keys, int warp_of_cluster)
      : table(table),
        first(keys.begin + warp_of_cluster * p.schedule.tile),
        stride(p.cluster * p.schedule.warps * p.schedule.tile),
        end(keys.end),
        count(32 >> p.lookups_log2),
        tile(arch::lane_index() >> p.lookups_log2),
        lookup(arch::lane_index() - (tile << p.lookups_log2)) {}
  // Page for this lane's tile among `count` tiles from tile n on, read from the block table.
  HOPWELL_DEVICE int pages(const ClusterParams& p, int n) const {
    const int key = first + (n + tile) * stride + lookup * Tile::kKeysOfLookup;
    return key < end ? load_unsettled(table + key / p.cache.block) : -1;
  }
};

// Prefetches K and V of the first tile to L2: one line of each per lane.
template <WarpTile Tile>
HOPWELL_DEVICE void prefetch_first_tile(const ClusterParams& p, int kv_head, const DealtTiles<Tile>& tiles, int pages) {
  constexpr int kWidth = int(sizeof(typename Tile::Type));
  const Cache& cache = p.cache;
  const int lines_log2 = 5 - p.lookups_log2, lookup = arch::lane_index() >> lines_log2;
  const int line = arch::lane_index() - (lookup << lines_log2), row = p.row_lines > 1 ? line / 2 : line;
  const int page = arch::shuffle(pages, lookup), key = tiles.first + lookup * Tile::kKeysOfLookup + row;
  if (p.row_lines == 0 || key >= tiles.end || unsigned(page) >= unsigned(cache.blocks)) return;
  const int64_t slot = key % cache.block, of_row = (line - row * p.row_lines) * 128;
  arch::prefetch_l2(static_cast<const char*>(cache.k) + kv_head * cache.k_at.head * kWidth + page * cache.k_page +
                    slot * cache.k_slot + of_row);
  arch::prefetch_l2(static_cast<const char*>(cache.v) + kv_head * cache.v_at.head * kWidth + page * cache.v_page +
                    slot * cache.v_slot + of_row);
}

// Computes a warp's tiles of the row block. The sums stay in `tile`.
template <WarpTile Tile>
HOPWELL_DEVICE void walk_row_block(const ClusterParams& p, const ClusterWork& work, ClusterWarpStorage<Tile>& storage,
                                   Tile& tile) {
  constexpr int kStages = Tile::kStages;
  const uint32_t ring_address =
      arch::shuffle(arch::shared_address(storage.ring), 0) + uint32_t(arch::lane_index() * Tile::kLaneBytes);
  const int* length = p.cache.context_lens + work.sequence * p.cache.lens_stride;
  const int* table = p.cache.block_tables + work.sequence * p.cache.tables_stride;
  Segment segment{};
  segment.sequence = work.sequence, segment.row_block = work.row_block;
  int length_used = guess_length(length, work.rank);
  HOPWELL_NO_UNROLL
  for (bool settled = false, right = false; !right; settled = true) {
    segment.context = larger(0, smaller(length_used, p.cache.max_context));
    segment.keys = keys_of_sequence(p, segment.context);
    const DealtTiles<Tile> tiles(p, table, segment.keys, arch::warp_index() * p.cluster + work.rank);
    const QueryVector vector = query_vector_of(p, segment, tile.head, tile.row);
    const CopySource source = tile.copy_source(p, vector);
    const int first_pages = tiles.pages(p, 0);
    int pages = first_pages, next_pages = -1;
    if (!settled) {
      prefetch_first_tile<Tile>(p, vector.kv_head, tiles, first_pages);
      tile::wait_for_prior_kernels();
    }
    tile.prefetch_query(p, vector);
    const int length_now = load_unsettled(length), first_pages_now = tiles.pages(p, 0);
    int key = tiles.first, ahead = tiles.first;  // first key of the tile to compute; of the tile to copy
    // Step n computes tile n and copies tile n + kStages.
    HOPWELL_NO_UNROLL
    for (int n = -kStages, at = 0;; ++n) {
      auto& stage = storage.ring[at];
      const uint32_t address = ring_address + uint32_t(at) * uint32_t(sizeof(stage));
      if (ahead >= tiles.end) tile::launch_dependents();
      if (n == 0) {
        right = settled || (length_now == length_used && arch::ballot(first_pages_now != first_pages) == 0);
        if (!right) break;
        tile.begin_segment(p, vector, storage.partial, stage);
      }
      if (n >= 0 && key >= tiles.end) break;
      const int m = n + kStages, of_batch = m & (tiles.count - 1);
      if (of_batch == 0) {
        if (m > 0) pages = arch::shuffle(next_pages, arch::lane_index());
        next_pages = tiles.pages(p, m + tiles.count);
      }
      int page = arch::shuffle(pages, (of_batch << p.lookups_log2) + tile.first_key / Tile::kKeysOfLookup);
      if (unsigned(page) >= unsigned(p.cache.blocks)) page = -1;
      // The copies of the first tile include the query, so they are issued even if the tile has no keys.
      const bool wanted = ahead < tiles.end || m == 0;
      KeyTile next{ahead, page, true, m == 0};
      tile.locate(p, source, next);
      tile.step(p, vector, key, stage, address, n >= 0, [&](int part) {
        if (wanted) tile.copy(p, source, next, stage, address, part);
        arch::cp_async_commit();
      });
      if (n >= 0) key += tiles.stride;
      ahead += tiles.stride;
      at = at + 1 == kStages ? 0 : at + 1;
    }
    arch::cp_async_wait<0>();  // copies of a first tile without keys, or of a wrong guess
    if (right) return;
    length_used = length_now;
  }
}

// Merges the partial results of this CTA's warps, two values per thread, and sends them to the CTAs that store them.
template <WarpTile Tile>
HOPWELL_DEVICE void send_sums(const ClusterParams& p, const ClusterWork& work, ClusterStorage<Tile>& s, int pitch) {
  const uint32_t receive_buffer = arch::shared_address(s.receive_buffer),
                 receive_full = arch::shared_address(&s.receive_full);
  HOPWELL_NO_UNROLL
  for (int o = arch::thread_index(); o < p.schedule.pairs; o += p.schedule.threads) {
    const PairIndex at(p, o);
    const int owner = o / p.slice, slot = work.rank * p.slice + o - owner * p.slice;
    const PairSums sums = merge_partials<kMaxWarps>(
        p.schedule.warps, [&](int warp) { return load_sums<2>(s.of_warp[warp].partial, pitch, at); });
    arch::store_async_v4(arch::map_to_rank(receive_buffer + uint32_t(16 * slot), uint32_t(owner)),
                         {arch::bit_cast<uint32_t>(sums.value[0]), arch::bit_cast<uint32_t>(sums.value[1]),
                          arch::bit_cast<uint32_t>(sums.maximum), arch::bit_cast<uint32_t>(sums.sum)},
                         arch::map_to_rank(receive_full, uint32_t(owner)));
  }
}

// Adds the sums of all CTAs of the cluster and stores the results. Addresses are computed before the sums arrive.
template <WarpTile Tile>
HOPWELL_DEVICE void store_slice(const ClusterParams& p, const ClusterWork& work, ClusterStorage<Tile>& s) {
  using T = typename Tile::Type;
  const int pairs = work.pairs(p);
  HOPWELL_NO_UNROLL
  for (int i = arch::thread_index(); i < pairs; i += p.schedule.threads) {
    const PairIndex at(p, work.rank * p.slice + i);
    const OutputRow row = output_row_of(p, work.row_block, at.row);
    T* out = out_at<T>(p.output, work.sequence, row) + 2 * at.pair;
    float* lse = at.pair > 0 || !p.output.lse ? nullptr : lse_at(p.output, work.sequence, row);
    const uint32_t from = arch::shared_address(&s.receive_buffer[i]);
    arch::mbarrier_wait_cluster(s.receive_full, 0);
    const PairSums all = merge_partials<kMaxCluster>(p.cluster, [&](int cta) {
      const arch::Words4 x = arch::load_shared_v4(from + uint32_t(16 * cta * p.slice));
      return PairSums{arch::bit_cast<float>(x.w[2]),
                      arch::bit_cast<float>(x.w[3]),
                      {arch::bit_cast<float>(x.w[0]), arch::bit_cast<float>(x.w[1])}};
    });
    if (!row.exists) continue;
    from_fp32(mean_of(all.sum, all.value[0]), out), from_fp32(mean_of(all.sum, all.value[1]), out + 1);
    if (lse) *lse = all.lse();
    if (all.may_be_infinite()) store_infinite<T>(p, work.sequence, row, 2 * at.pair, 2 * at.pair + 2);
  }
}

template <class Tile>
__global__ void __launch_bounds__(kMaxThreads, 1) paged_attention_cluster(const __grid_constant__ ClusterParams p) {
  static_assert(WarpTile<Tile>);
  auto& s = arch::dynamic_smem<ClusterStorage<Tile>>();
  const ClusterWork work(p);
  if (arch::thread_index() == 0) {
    arch::mbarrier_init(s.receive_full, 1);
    arch::fence_mbarrier_init();
    arch::mbarrier_arrive_expect_tx(s.receive_full, uint32_t(16 * p.cluster * work.pairs(p)));
  }
  arch::cluster_arrive();
  prefetch_inputs(p);
  Tile tile(p);
  auto& storage = s.of_warp[arch::warp_index()];
  walk_row_block<Tile>(p, work, storage, tile);
  tile.store_partial(p, storage.partial);
  arch::syncthreads();
  arch::cluster_wait();  // the receive buffers of all CTAs are ready
  send_sums<Tile>(p, work, s, tile.pitch());
  store_slice<Tile>(p, work, s);
}

template <class Tile>
struct KernelOf<ClusterParams, Tile> {
  static constexpr TileKernel<ClusterParams> value{paged_attention_cluster<Tile>, kClusterBytes<Tile>,
                                                   Tile::kKeysOfLookup};
};

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
