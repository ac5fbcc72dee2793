// lightning_indexer_backward for Hopper: what both of its kernels share. A ring of tiles, the rows of k of 64 entries of a
// query as wgmma reads them, with the entries' keys and g; and 64 heads of the query.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/lightning_indexer_backward/params.hpp"
#include "tile/gpu/panel.hpp"
#include "tile/gpu/ring.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

constexpr int kTileEntries = tile::kTileRows, kSteps = 128 / 16;
constexpr uint32_t kTileBytes = 2 * tile::kPanelBytes;

// Of the 64 entries of a tile.
struct EntryTile {
  int key[kTileEntries];  // −1: none, or one without a score
  float g[kTileEntries];
  uint32_t g_limbs[kGradientLimbs][kTileEntries / 2];  // bf16, of two neighbours
};

// The limbs of number `i` of 64.
HOPWELL_DEVICE void store_limbs(uint32_t (&limbs)[kGradientLimbs][32], int i, float x) {
  HOPWELL_UNROLL
  for (auto& limb : limbs) reinterpret_cast<uint16_t*>(limb)[i] = uint16_t(tile::take_limb(x) >> 16);
}

template <int kTheStages>
struct EntryRing {
  static constexpr int kStages = kTheStages;
  alignas(1024) unsigned char rows[kStages][kTileBytes];
  EntryTile entries[kStages];
  tile::RingBarriers<kStages> barriers;
};

// Tile `number` since the CTA began.
template <class Ring>
struct EntrySlot : tile::RingSlot<Ring::kStages> {
  Ring& ring;

  HOPWELL_DEVICE EntrySlot(Ring& ring, int number) : tile::RingSlot<Ring::kStages>{ring.barriers, number}, ring(ring) {}
  HOPWELL_DEVICE uint32_t rows() const { return arch::shared_address(ring.rows[this->stage()]); }
  HOPWELL_DEVICE EntryTile& entries() const { return ring.entries[this->stage()]; }
};
constexpr uint32_t kEntryArrivals = 33;  // each lane's copies, and the entries

HOPWELL_DEVICE int entry_tiles(const tile::Entries& entries) {
  return (entries.length + kTileEntries - 1) / kTileEntries;
}

// A lane's two entries of a tile, l and l + 32; g is 0 where it is not known yet.
struct EntryPair {
  int key[2];
  float g[2];
};
template <bool kWithGradients>
HOPWELL_DEVICE EntryPair load_entries(const tile::Entries& all, const float* gradients, int tile) {
  EntryPair entries{};
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int entry = tile * kTileEntries + arch::lane_index() + 32 * i;
    entries.key[i] = all.at(entry);
    if constexpr (kWithGradients) entries.g[i] = entry < all.length ? gradients[entry] : no_score();
  }
  return entries;
}

// A row's chunks of 16 bytes past the last column are zeros.
HOPWELL_DEVICE void copy_chunk(uint32_t to, const bf16* row, int chunk, bool exists, int columns) {
  const bool wanted = exists && 8 * chunk < columns;
  arch::cp_async(to, row + (wanted ? 8 * chunk : 0), wanted ? 16 : 0);
}
HOPWELL_DEVICE uint32_t chunk_in_tile(uint32_t row, uint32_t chunk) {
  return chunk / 8 * tile::kPanelBytes + tile::swizzled(row, chunk % 8);
}

// A warp brings tiles in, from slot `number` on.
template <bool kWithGradients, class Ring>
HOPWELL_DEVICE void gather_tiles(const Params<bf16>& p, Ring& ring, int query, const tile::Entries& all, int number) {
  const int lane = arch::lane_index(), tiles = entry_tiles(all);
  const float* const gradients = p.d_scores + int64_t{query} * p.topk + all.place();
  EntryPair next = load_entries<kWithGradients>(all, gradients, 0);
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < tiles; ++tile) {
    const EntrySlot<Ring> slot{ring, number + tile};
    EntryPair entries = next;
    next = load_entries<kWithGradients>(all, gradients, tile + 1);
    slot.wait_empty();
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const bool counts = kWithGradients ? has_score(entries.g[i]) : all.counts(entries.key[i]);
      if (!counts) entries.key[i] = -1, entries.g[i] = 0;
      slot.entries().key[lane + 32 * i] = entries.key[i];
      if constexpr (kWithGradients) {
        slot.entries().g[lane + 32 * i] = entries.g[i];
        store_limbs(slot.entries().g_limbs, lane + 32 * i, entries.g[i]);
      }
    }
    constexpr int kTogether = 4;  // loads of four rows each; more take registers
    HOPWELL_NO_UNROLL
    for (int first = 0; first < kTileEntries / 4; first += kTogether) {
      HOPWELL_UNROLL
      for (int i = first; i < first + kTogether; ++i) {
        const int row = 4 * i + lane / 8, key = arch::shuffle(i < 8 ? entries.key[0] : entries.key[1], row);
        const bf16* from = p.k.data + (key < 0 ? 0 : key) * p.k.stride;
        HOPWELL_UNROLL
        for (int panel = 0; panel < 2; ++panel) {
          const int chunk = 8 * panel + lane % 8;
          copy_chunk(slot.rows() + chunk_in_tile(uint32_t(row), uint32_t(chunk)), from, chunk, key >= 0, p.columns);
        }
      }
    }
    arch::cp_async_mbarrier_arrive_noinc(slot.full());
    arch::syncwarp();
    if (lane == 0) arch::mbarrier_arrive(slot.full());
  }
}

// 64 heads from `first` on, zeros past the last one, and their weights, by all threads of the CTA. A barrier follows; who
// waits for a tile fences these, too.
HOPWELL_DEVICE void load_heads(const Params<bf16>& p, unsigned char* q, float* weights, int query, int first,
                               int threads) {
  const uint32_t to = arch::shared_address(q);
  for (int i = arch::thread_index(); i < kHeadTile * 16; i += threads) {
    const int row = i / 16, chunk = i % 16, head = first + row;
    copy_chunk(to + chunk_in_tile(uint32_t(row), uint32_t(chunk)),
               p.q.data + (head < p.heads ? query * p.q_stride + head * p.q.stride : 0), chunk, head < p.heads,
               p.columns);
    if (chunk == 0)
      weights[row] = head < p.heads ? tile::load_fp32(p.weights, p.weights_bf16, query * p.weights_stride + head) : 0;
  }
  arch::cp_async_wait_all();
}

// Starts d = rows of one tile · rows of another, 64 × 64.
HOPWELL_DEVICE void start_scores(float (&d)[32], uint32_t left, uint32_t right) {
  const uint64_t a = arch::at_address(tile::kRowsAlongK, left), b = arch::at_address(tile::kRowsAlongK, right);
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int step = 0; step < kSteps; ++step)
    arch::wgmma_ss(d, a + tile::columns_on(step), b + tile::columns_on(step), step > 0);
  arch::wgmma_commit();
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
