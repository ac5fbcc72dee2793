// lightning_indexer_backward for Hopper: shared by both kernels of entries. A ring of tiles: the rows of k of 64
// entries of a query as wgmma operands, with the entries' keys and g. And 64 heads of the query.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/lightning_indexer_backward/params.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/fragment.hpp"
#include "tile/gpu/panel.hpp"
#include "tile/gpu/ring.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

constexpr int kTileEntries = tile::kTileRows, kSteps = 128 / 16;
constexpr uint32_t kTileBytes = 2 * tile::kPanelBytes;

// Signs of the products of a tile's 64 entries with 64 heads: one bit each, computed with the scores and stored for the
// gradients. Words 32 w to 32 w + 31 hold the 16 entries of warp w. A lane's word has its 32 accumulators of wgmma
// (rows: entries, columns: heads): accumulator i is bit 7 − i / 4 + 16 (i / 2 % 2) + 8 (i % 2). So a shift
// by i / 4 moves the bits of all entries and heads of that block to the sign bits of the word's bytes.
constexpr int kPositiveWords = 128;
HOPWELL_DEVICE uint32_t positive_bits(const float (&products)[32]) {
  uint32_t bits = 0;
  HOPWELL_UNROLL
  for (int i = 0; i < 32; ++i) bits |= products[i] > 0 ? 1U << (7 - i / 4 + 16 * (i / 2 % 2) + 8 * (i % 2)) : 0;
  return bits;
}

// Parameters with these words, [queries of the pass, head tiles, entry tiles of topk, kPositiveWords].
struct EntryParams : Params<bf16> {
  uint32_t* positive;
  int head_tiles, entry_tiles;

  HOPWELL_DEVICE uint32_t* positive_of(int query, int head_tile, int tile) const {
    return positive + ((int64_t{query} * head_tiles + head_tile) * entry_tiles + tile) * kPositiveWords;
  }
};

// The 64 entries of a tile.
struct EntryTile {
  int key[kTileEntries];  // −1: invalid, or without a score
  float g[kTileEntries];
  alignas(16) uint32_t g_terms[kGradientTerms][kTileEntries / 2];  // bf16 pairs of entries, at term_place
  alignas(16) uint32_t positive[kPositiveWords];
};

// Stores the bf16 split of a number at slot `place` of 64.
HOPWELL_DEVICE void store_split(uint32_t (&split_terms)[kGradientTerms][32], int place, float x) {
  HOPWELL_UNROLL
  for (auto& split_term : split_terms)
    reinterpret_cast<uint16_t*>(split_term)[place] = uint16_t(tile::take_term(x) >> 16);
}
// Slot of entry i: a lane finds the values of its fragments consecutively: eight pairs of adjacent entries, at a
// distance of eight entries.
HOPWELL_DEVICE int term_place(int i) { return i % 8 / 2 * 16 + i / 8 * 2 + i % 2; }

template <int kTheStages>
struct EntryRing {
  static constexpr int kStages = kTheStages;
  alignas(1024) unsigned char rows[kStages][kTileBytes];
  EntryTile entries[kStages];
  tile::RingBarriers<kStages> barriers;
};

// Tile `number`, counted from the start of the CTA.
template <class Ring>
struct EntrySlot : tile::RingSlot<Ring::kStages> {
  Ring& ring;

  HOPWELL_DEVICE EntrySlot(Ring& ring, int number) : tile::RingSlot<Ring::kStages>{ring.barriers, number}, ring(ring) {}
  HOPWELL_DEVICE uint32_t rows() const { return arch::shared_address(ring.rows[this->stage()]); }
  HOPWELL_DEVICE EntryTile& entries() const { return ring.entries[this->stage()]; }
};
constexpr uint32_t kEntryArrivals = 4 * 33;  // from each of four warps: the copies of its lanes, and its entries

HOPWELL_DEVICE int entry_tiles(const tile::Entries& entries) {
  return (entries.length + kTileEntries - 1) / kTileEntries;
}

// A lane's entry of a tile; g is 0 if it is not known yet.
struct LaneEntry {
  int key;
  float g;
};
template <bool kWithGradients>
HOPWELL_DEVICE LaneEntry load_entry(const tile::Entries& all, const float* gradients, int entry) {
  LaneEntry loaded{all.at(entry), 0};
  if constexpr (kWithGradients) loaded.g = entry < all.length ? gradients[entry] : no_score();
  return loaded;
}

// Copies a 16-byte chunk of a row; chunks past the last column are filled with zeros.
HOPWELL_DEVICE void copy_chunk(uint32_t to, const bf16* row, int chunk, bool exists, int columns) {
  const bool wanted = exists && 8 * chunk < columns;
  arch::cp_async(to, row + (wanted ? 8 * chunk : 0), wanted ? 16 : 0);
}
HOPWELL_DEVICE uint32_t chunk_in_tile(uint32_t row, uint32_t chunk) {
  return chunk / 8 * tile::kPanelBytes + tile::swizzled(row, chunk % 8);
}

// A warp's copies of 16 rows of k from `first_row` of a tile on: a lane copies its chunk of both panels of every fourth
// row.
struct RowCopies {
  const bf16* source;  // the lane's chunk of key 0
  uint32_t row_chunks, place[2];
  bool exists[2];

  HOPWELL_DEVICE RowCopies(const Params<bf16>& p, int first_row) {
    const int row = first_row + arch::lane_index() / 8, chunk = arch::lane_index() % 8;
    source = p.k.data + 8 * chunk, row_chunks = uint32_t(p.k.stride / 8);
    place[0] = tile::swizzled(row, chunk), place[1] = tile::swizzled(row + 4, chunk);
    exists[0] = 8 * chunk < p.columns, exists[1] = 8 * chunk + tile::kPanelColumns < p.columns;
  }
  // own_key: key of row lane % 16; −1: zeros. Keys lie within 64 GiB, so that offsets take one register.
  HOPWELL_DEVICE void start(uint32_t rows, int own_key) const {
    constexpr uint32_t kNone = 0xffffffff;
    const uint32_t own = own_key < 0 ? kNone : uint32_t(own_key) * row_chunks;
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t offset = arch::shuffle(own, 4 * i + arch::lane_index() / 8);
      const bf16* const from = source + (offset != kNone ? uint64_t{offset} * 8 : 0);
      const uint32_t to = rows + place[i % 2] + uint32_t(i / 2) * 8 * 128;
      HOPWELL_UNROLL
      for (int panel = 0; panel < 2; ++panel)
        arch::cp_async(to + uint32_t(panel) * tile::kPanelBytes, from + panel * tile::kPanelColumns,
                       offset != kNone && exists[panel] ? 16 : 0);
    }
  }
};

// Stores a lane's entry; sets `any_nan` if a g of the warp is NaN.
HOPWELL_DEVICE void store_entry(EntryTile& tile, int row, const LaneEntry& entry, bool& any_nan) {
  if (arch::lane_index() < 16) {
    tile.key[row] = entry.key, tile.g[row] = entry.g;
    store_split(tile.g_terms, term_place(row), entry.g);
  }
  if (arch::ballot(entry.g != entry.g) != 0 && arch::lane_index() == 0) any_nan = true;
}

// The producer: four warps load tiles, 16 entries each, from slot `number` on. With gradients, tiles include the signs
// of the products of 64 heads, and `any_nan` is set before the last tile is full.
template <bool kWithGradients, bool kRelu, class Ring>
HOPWELL_DEVICE void gather_tiles(const EntryParams& p, Ring& ring, int query, int head_tile, const tile::Entries& all,
                                 int number, bool* any_nan = nullptr) {
  constexpr int kUnroll = 4;  // tiles whose entries are loaded at the same time, which hides latency
  const int lane = arch::lane_index(), first_row = arch::warp_index() % 4 * 16, own_row = first_row + lane % 16;
  const int tiles = entry_tiles(all);
  const RowCopies copies(p, first_row);
  const float* const gradients = p.d_scores + int64_t{query} * p.topk + all.place();
  const auto bring = [&](int tile, LaneEntry own) {
    const EntrySlot<Ring> slot{ring, number + tile};
    if (!(kWithGradients ? has_score(own.g) : all.counts(own.key))) own = {-1, 0};
    slot.wait_empty();
    copies.start(slot.rows(), own.key);
    if constexpr (kWithGradients) {
      const int word = 2 * first_row + 4 * lane;
      if (kRelu && lane < 8)
        arch::cp_async(arch::shared_address(slot.entries().positive + word),
                       p.positive_of(query, head_tile, tile) + word, 16);
      store_entry(slot.entries(), own_row, own, *any_nan);
    } else if (lane < 16) {
      slot.entries().key[own_row] = own.key;
    }
    arch::cp_async_mbarrier_arrive_noinc(slot.full());
    arch::syncwarp();
    if (lane == 0) arch::mbarrier_arrive(slot.full());
  };
  LaneEntry next[kUnroll], own[kUnroll];
  const auto load = [&](int first) {
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i)
      next[i] = load_entry<kWithGradients>(all, gradients, (first + i) * kTileEntries + own_row);
  };
  load(0);
  HOPWELL_NO_UNROLL
  for (int first = 0; first < tiles; first += kUnroll) {
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) own[i] = next[i];
    load(first + kUnroll);
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i)
      if (first + i < tiles) bring(first + i, own[i]);
  }
}

// Loads 64 heads from `first` on, zeros past the last head, and their weights; executed by all threads of the CTA. A
// barrier must follow; the proxy fence after a wait for a tile covers these too.
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
