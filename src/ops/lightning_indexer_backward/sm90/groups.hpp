// lightning_indexer_backward for Hopper without indices: what both kernels for groups of queries share. Neighbouring queries see
// the same keys, so that a CTA takes up to eight of them together: 128 rows are their heads, and tiles of keys come once for all.
//
// Group     as many queries as have their heads, padded to 16, 32 or 64, in 128 rows; fewer where multiprocessors would be left
//           over. A block is 64 of the rows, of one query or of several
// Sets      Queries of a group whose keys begin at the same one go through them together, each as far as it sees; others after
//           them. So a query's tiles are those that it has alone, and so are the bits of all that belongs to it.
// Apart     A query that has no score at an entry has zeros in the products there, which is as good as no entry unless the other
//           factor is infinite or NaN: where score_groups finds keys, q or weights that are, the group's queries are taken one
//           by one.
#pragma once

#include "ops/lightning_indexer_backward/sm90/entries.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

constexpr int kGroupRows = 128, kBlocks = kGroupRows / kHeadTile;
template <int kRows>  // of a query
constexpr int kGroupQueries = kGroupRows / kRows;

struct GroupParams : Params<bf16> {
  int queries, group;  // of the pass, of a CTA
  uint32_t* apart;     // [groups], not 0: one by one
};

// The queries of a CTA, and how many blocks they have.
struct Group {
  int first, queries, blocks;
};
template <int kRows>
HOPWELL_DEVICE Group group_of(const GroupParams& p, int index) {
  const int first = index * p.group, left = p.queries - first;
  return {first, left < p.group ? left : p.group, (p.group * kRows + kHeadTile - 1) / kHeadTile};
}

// In shared memory: what each query sees.
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

// Queries that go through their keys together: `keys` of them, from `first` on, as far as one sees.
struct QuerySet {
  uint32_t members = 0;  // a bit each
  int first = 0, keys = 0;

  HOPWELL_DEVICE bool has(int member) const { return members >> member & 1; }
  HOPWELL_DEVICE int tiles() const { return (keys + kTileEntries - 1) / kTileEntries; }
};
// The first of those that are left, with all that may go with it.
template <int kQueries>
HOPWELL_DEVICE QuerySet next_set(const GroupKeys<kQueries>& keys, uint32_t left, bool apart) {
  QuerySet set;
  for (int member = 0; member < kQueries; ++member) {
    if (!(left >> member & 1) || (set.members != 0 && (apart || keys.first[member] != set.first))) continue;
    set.members |= 1U << member, set.first = keys.first[member];
    set.keys = keys.count[member] > set.keys ? keys.count[member] : set.keys;
  }
  return set;
}
// Calls work(set, number of its first tile) for one set after the other.
template <int kQueries, class Work>
HOPWELL_DEVICE void for_each_set(const Group& group, const GroupKeys<kQueries>& keys, bool apart, const Work& work) {
  int number = 0;
  HOPWELL_NO_UNROLL
  for (uint32_t left = (1U << group.queries) - 1; left != 0;) {
    const QuerySet set = next_set(keys, left, apart);
    work(set, number);
    number += set.tiles(), left &= ~set.members;
  }
}

// The heads of all queries and their weights, zeros where there is none, by all threads of the CTA. A barrier follows; who waits
// for a tile fences these, too.
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

// Two neighbours in shared memory, from an even place on.
struct alignas(8) FloatPair {
  float of[2];
};
HOPWELL_DEVICE FloatPair pair_at(const float* place) { return *reinterpret_cast<const FloatPair*>(place); }

// Of the 64 keys of a tile, for the gradients.
template <int kTheQueries>
struct GroupTile {
  static constexpr int kQueries = kTheQueries;
  int key[kTileEntries];                                         // −1: none has a score there
  alignas(8) float g[kQueries][kTileEntries];                    // or no_score()
  uint32_t g_limbs[kQueries][kGradientLimbs][kTileEntries / 2];  // bf16, of two neighbours; zeros without a score
  alignas(16) uint32_t positive[8][kGroupRows / 16][2][2];       // ballots of 16 rows: see note_positive
};
// … and for scores, which need no more than the rows.
struct NoNumbers {};

// Tiles of keys; with the gradients' numbers a stage has a second part, what the products' signs are.
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
constexpr uint32_t kGroupArrivals = 4 * 33;  // of each of four warps its lanes' copies, and the numbers

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

// Puts a lane's gradients where they belong; returns whether any query has a score at the lane's key.
template <int kQueries>
HOPWELL_DEVICE bool store_gradients(GroupTile<kQueries>& tile, int row, const KeyGradients<kQueries>& all) {
  int any = 0;
  HOPWELL_UNROLL
  for (int i = 0; i < kQueries / 2; ++i) {
    const int member = 2 * i + arch::lane_index() / 16;
    const bool exists = has_score(all.g[i]);
    any |= exists;
    tile.g[member][row] = all.g[i];
    store_limbs(tile.g_limbs[member], row, exists ? all.g[i] : 0);
  }
  return (any | arch::shuffle_xor(any, 16)) != 0;
}

// Four warps bring tiles in, 16 keys each.
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
