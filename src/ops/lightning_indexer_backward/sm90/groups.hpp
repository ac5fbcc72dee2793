// lightning_indexer_backward for Hopper without indices: shared by both kernels of query groups. Adjacent queries see
// the same keys, so a CTA processes up to eight of them together: 128 rows hold their heads, and each tile of keys is
// loaded once for all.
//
// Group     as many queries as have their heads, padded to 16, 32 or 64, in 128 rows; fewer if SMs would be idle. A
//           block is 64 of the rows, of one query or of several
// Sets      queries of a group with the same first key iterate over their keys together, each as far as it sees. Other
//           queries follow. So a query has the same tiles as if it were alone, and all its results have the same bits.
// Ungrouped a query without a score at an entry has zeros in the products there. This equals no entry
//           unless the other factor is infinite or NaN. If the score kernel finds such keys, q or weights, the group's
//           queries are processed one by one.
#pragma once

#include "ops/lightning_indexer_backward/sm90/entries.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

constexpr int kGroupRows = 128, kBlocks = kGroupRows / kHeadTile;
template <int kRows>  // rows per query
constexpr int kGroupQueries = kGroupRows / kRows;

struct GroupParams : Params<bf16> {
  int queries, group;   // queries of the pass, queries of a CTA
  uint32_t* ungrouped;  // [groups], nonzero: ungrouped
};

// The queries of a CTA, and the number of their blocks.
struct Group {
  int first, queries, blocks;
};
template <int kRows>
HOPWELL_DEVICE Group group_of(const GroupParams& p, int index) {
  const int first = index * p.group, left = p.queries - first;
  return {first, left < p.group ? left : p.group, (p.group * kRows + kHeadTile - 1) / kHeadTile};
}

// In shared memory: the visible keys of each query.
template <int kQueries>
struct GroupKeys {
  int first[kQueries], count[kQueries];
};
template <int kQueries>
HOPWELL_DEVICE void load_keys(const GroupParams& p, const Group& group, GroupKeys<kQueries>& keys) {
  const int member = arch::thread_index();
  if (member >= group.queries) return;
  const KeyRange visible = p.selection.visibility.keys(group.first + member, p.s_kv);
  keys.first[member] = int(visible.first), keys.count[member] = int(visible.count);
}

// Queries that iterate over their keys together: `keys` keys from `first` on, for the query that sees most.
struct QuerySet {
  uint32_t members = 0;  // one bit per query
  int first = 0, keys = 0;

  HOPWELL_DEVICE bool has(int member) const { return members >> member & 1; }
  HOPWELL_DEVICE int tiles() const { return (keys + kTileEntries - 1) / kTileEntries; }
};
// The first of the remaining queries (`left`), and all queries that can be processed with it.
template <int kQueries>
HOPWELL_DEVICE QuerySet next_set(const GroupKeys<kQueries>& keys, uint32_t left, bool ungrouped) {
  QuerySet set;
  for (int member = 0; member < kQueries; ++member) {
    if (!(left >> member & 1) || (set.members != 0 && (ungrouped || keys.first[member] != set.first))) continue;
    set.members |= 1U << member, set.first = keys.first[member];
    set.keys = keys.count[member] > set.keys ? keys.count[member] : set.keys;
  }
  return set;
}
// Calls work(set, number of its first tile) for each set in order.
template <int kQueries, class Work>
HOPWELL_DEVICE void for_each_set(const Group& group, const GroupKeys<kQueries>& keys, bool ungrouped,
                                 const Work& work) {
  int number = 0;
  HOPWELL_NO_UNROLL
  for (uint32_t left = (1U << group.queries) - 1; left != 0;) {
    const QuerySet set = next_set(keys, left, ungrouped);
    work(set, number);
    number += set.tiles(), left &= ~set.members;
  }
}

// Loads the heads of all queries and their weights, zeros for padding; executed by all threads of the CTA. A barrier
// must follow; the proxy fence after a wait for a tile covers these too.
template <int kRows>
HOPWELL_DEVICE void load_group(const GroupParams& p, unsigned char* q, float* weights, const Group& group,
                               int threads) {
  const uint32_t to = arch::shared_address(q);
  for (int i = arch::thread_index(); i < group.blocks * kHeadTile * 16; i += threads) {
    const int row = i / 16, chunk = i % 16, member = row / kRows, head = row % kRows;
    const bool exists = member < group.queries && head < p.heads;
    const int64_t query = exists ? group.first + member : 0;
    copy_chunk(to + uint32_t(row / kHeadTile) * kTileBytes + chunk_in_tile(uint32_t(row % kHeadTile), uint32_t(chunk)),
               p.q.data + (exists ? query * p.q_stride + head * p.q.stride : 0), chunk, exists, p.columns);
    if (chunk == 0)
      weights[row] = exists ? tile::load_fp32(p.weights, p.weights_bf16, query * p.weights_stride + head) : 0;
  }
  arch::cp_async_wait_all();
}

// Two adjacent numbers in shared memory, from an even index on.
struct alignas(8) FloatPair {
  float of[2];
};
HOPWELL_DEVICE FloatPair pair_at(const float* place) { return *reinterpret_cast<const FloatPair*>(place); }

// The 64 keys of a tile, for the gradients.
template <int kTheQueries>
struct GroupTile {
  static constexpr int kQueries = kTheQueries;
  int key[kTileEntries];                                         // −1: no query has a score there
  alignas(8) float g[kQueries][kTileEntries];                    // or no_score()
  uint32_t g_terms[kQueries][kGradientTerms][kTileEntries / 2];  // bf16 pairs of keys; zeros without a score
  alignas(16) uint32_t positive[8][kGroupRows / 16][2][2];       // ballots of 16 rows: see note_positive
};
// … for the scores, which need only the rows.
struct NoNumbers {};

// Tiles of keys. With the gradients' numbers a stage has a second part, the signs of the products.
template <int kTheStages, class TheTile>
struct GroupRing {
  static constexpr int kStages = kTheStages;
  using Tile = TheTile;
  static constexpr bool kWithGradients = !std::is_same_v<Tile, NoNumbers>;
  alignas(1024) unsigned char rows[kStages][kTileBytes];
  Tile numbers[kStages];
  tile::RingBarriers<kStages, kWithGradients ? 2 : 1> barriers;
};
template <class Ring>
struct GroupSlot : tile::RingSlot<Ring::kStages, Ring::kWithGradients ? 2 : 1> {
  Ring& ring;

  HOPWELL_DEVICE GroupSlot(Ring& ring, int number)
      : tile::RingSlot<Ring::kStages, Ring::kWithGradients ? 2 : 1>{ring.barriers, number}, ring(ring) {}
  HOPWELL_DEVICE uint32_t rows() const { return arch::shared_address(ring.rows[this->stage()]); }
  HOPWELL_DEVICE typename Ring::Tile& numbers() const { return ring.numbers[this->stage()]; }
};
constexpr uint32_t kGroupArrivals = 4 * 33;  // from each of four warps: the copies of its lanes, and the numbers

// g of a lane's key for every second query, from lane / 16 on.
template <int kQueries>
struct KeyGradients {
  float g[kQueries / 2];
};
template <int kQueries>
HOPWELL_DEVICE KeyGradients<kQueries> load_gradients(const GroupParams& p, const Group& group,
                                                     const GroupKeys<kQueries>& keys, const QuerySet& set, int entry) {
  KeyGradients<kQueries> all;
  HOPWELL_UNROLL
  for (int i = 0; i < kQueries / 2; ++i) {
    const int member = 2 * i + arch::lane_index() / 16;
    all.g[i] = set.has(member) && entry < keys.count[member]
                   ? p.d_scores[int64_t{group.first + member} * p.topk + set.first + entry]
                   : no_score();
  }
  return all;
}

// Stores a lane's gradients. Returns whether any query has a score at the lane's key.
template <int kQueries>
HOPWELL_DEVICE bool store_gradients(GroupTile<kQueries>& tile, int row, const KeyGradients<kQueries>& all) {
  int any = 0;
  HOPWELL_UNROLL
  for (int i = 0; i < kQueries / 2; ++i) {
    const int member = 2 * i + arch::lane_index() / 16;
    const bool exists = has_score(all.g[i]);
    any |= exists;
    tile.g[member][row] = all.g[i];
    store_split(tile.g_terms[member], row, exists ? all.g[i] : 0);
  }
  return (any | arch::shuffle_xor(any, 16)) != 0;
}

// The producer: four warps load tiles, 16 keys each.
template <class Ring, int kQueries>
HOPWELL_DEVICE void gather_keys(const GroupParams& p, Ring& ring, const Group& group, const GroupKeys<kQueries>& keys,
                                const QuerySet& set, int number) {
  const int lane = arch::lane_index(), first_row = arch::warp_index() % 4 * 16, own_row = first_row + lane % 16;
  [[maybe_unused]] KeyGradients<kQueries> next;
  if constexpr (Ring::kWithGradients) next = load_gradients(p, group, keys, set, own_row);
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < set.tiles(); ++tile) {
    const GroupSlot<Ring> slot{ring, number + tile};
    const int entry = tile * kTileEntries + own_row;
    [[maybe_unused]] const KeyGradients<kQueries> gradients = next;
    if constexpr (Ring::kWithGradients) next = load_gradients(p, group, keys, set, entry + kTileEntries);
    slot.wait_empty();
    bool exists = entry < set.keys;
    if constexpr (Ring::kWithGradients) {
      exists = store_gradients(slot.numbers(), own_row, gradients);
      if (lane < 16) slot.numbers().key[own_row] = exists ? set.first + entry : -1;
    }
    const int own_key = exists ? set.first + entry : -1;
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * i + lane / 8, key = arch::shuffle(own_key, row);
      const bf16* from = p.k.data + (key < 0 ? 0 : key) * p.k.stride;
      HOPWELL_UNROLL
      for (int panel = 0; panel < 2; ++panel) {
        const int chunk = 8 * panel + lane % 8;
        copy_chunk(slot.rows() + chunk_in_tile(uint32_t(first_row + row), uint32_t(chunk)), from, chunk, key >= 0,
                   p.columns);
      }
    }
    arch::cp_async_mbarrier_arrive_noinc(slot.full());
    arch::syncwarp();
    if (lane == 0) arch::mbarrier_arrive(slot.full());
  }
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
