// sparse_mla_decode on the CPU: sparse_mla_forward's softmax of a tile of keys, over rows of paged caches.
//
//     for each split of a row's entries, in order, the second cache's last:
//         for each tile of 512 entries:   K = rows of the valid entries, as fp32      [keys, d_qk]
//                                         softmax of the tile, merged into the split's
//         the split's softmax, merged into the query's
//
// A split begins at a multiple of keys_per_split, a tile at a multiple of 512 entries from its split's first. So the
// merges depend on the row alone. If there are few queries, threads share the tiles of a query and merge them in order.
// Scratch per thread, in floats: (h_q + 512) * d_qk + h_q * (512 + 3 d_v).
#include <algorithm>
#include <cmath>

#include "ops/common/latent_rows.hpp"
#include "ops/common/partial_softmax.hpp"
#include "ops/common/selected_rows.hpp"
#include "ops/common/views.hpp"
#include "ops/sparse_mla_decode/op.hpp"
#include "tile/cpu/turns.hpp"

namespace hopwell::ops::sparse_mla_decode {
namespace {

using namespace hopwell::cpu;

// Entries first .. last - 1 of a query's row in one cache.
struct Tile {
  const Keys* keys = nullptr;
  std::int64_t first = 0, last = 0;
  bool begins_split = false, ends_split = false, ends_query = false;
};

// The tiles of a query in the order of their merges. They are the same for all queries.
class Tiles {
 public:
  explicit Tiles(const Problem& p)
      : p_(p),
        split_(std::min(p.keys_per_split, kMostEntries)),
        of_split_(tiles_of(split_)),
        of_keys_(count(p.keys)),
        of_extra_(p.extra ? count(*p.extra) : 0) {}

  [[nodiscard]] std::int64_t size() const { return of_keys_ + of_extra_; }
  // Entries of the longest tile.
  [[nodiscard]] std::int64_t longest() const {
    const std::int64_t topk = std::max(p_.keys.selection.topk, p_.extra ? p_.extra->selection.topk : 0);
    return std::clamp<std::int64_t>(std::min(topk, split_), 1, kTileEntries);
  }
  Tile operator[](std::int64_t i) const {
    const bool is_extra = i >= of_keys_;
    const Keys& keys = is_extra ? *p_.extra : p_.keys;
    const std::int64_t number = is_extra ? i - of_keys_ : i, split = number / of_split_, tile = number % of_split_;
    const std::int64_t end = std::min((split + 1) * split_, keys.selection.topk);
    const std::int64_t first = split * split_ + tile * kTileEntries, last = std::min(first + kTileEntries, end);
    return {&keys, first, last, tile == 0, last == end, i == size() - 1};
  }

 private:
  static constexpr std::int64_t kMostEntries = std::int64_t{1} << 31;  // of a row: fewer

  static std::int64_t tiles_of(std::int64_t entries) { return (entries + kTileEntries - 1) / kTileEntries; }
  [[nodiscard]] std::int64_t count(const Keys& keys) const {
    const std::int64_t topk = keys.selection.topk;
    return topk / split_ * of_split_ + tiles_of(topk % split_);
  }

  const Problem& p_;
  std::int64_t split_, of_split_;  // entries and tiles of a full split
  std::int64_t of_keys_, of_extra_;
};

float kv_scale_of(const Problem& p) { return p.kv_scale != nullptr ? *p.kv_scale : p.kv_scale_value; }

class Worker {
 public:
  Worker(const Problem& problem, std::int64_t longest_tile)
      : p_(problem),
        attention_(problem.h_q, problem.d_qk, longest_tile),
        rows_(longest_tile * problem.d_qk),
        sm_scale_(problem.sm_scale * kv_scale_of(problem)) {}

  // Sets `softmax` from one tile of query i of sequence b.
  void attend(std::int64_t b, std::int64_t i, const Tile& tile, PartialSoftmax& softmax) {
    softmax.clear();
    const std::int64_t count = gather(b, i, tile);
    if (count == 0) return;
    load_heads(element(p_.q, b), i, attention_.q(), p_.d_qk);
    attention_.attend(rows_.get(), count, sm_scale_, softmax);
  }

 private:
  // Loads the rows of a tile's valid entries and returns their number. Rows of other entries are never read.
  std::int64_t gather(std::int64_t b, std::int64_t i, const Tile& tile) {
    const PagedSelection& selection = tile.keys->selection;
    const std::int64_t last = std::min(tile.last, selection.length(b, i));
    const PagedSlots<int> slots = selection.slots(b, selection.visible(b, i), static_cast<int>(selection.block));
    const std::int64_t width = p_.rope_cache ? p_.d_v : p_.d_qk;
    const LatentCache cache{tile.keys->cache, p_.format, p_.row_type, width};
    std::int64_t count = 0;
    for (std::int64_t entry = tile.first; entry < last; ++entry) {
      const std::int32_t slot = slots.of(selection.row(b, i)[entry]);
      if (slot < 0) continue;
      float* row = rows_.get() + count++ * p_.d_qk;
      load_latent_row(cache, slot, row);
      if (p_.rope_cache)
        load_latent_row({*p_.rope_cache, std::nullopt, p_.row_type, p_.d_qk - width}, slot, row + width);
    }
    return count;
  }

  const Problem& p_;
  TileAttention attention_;
  Scratch<float> rows_;  // [keys of a tile, d_qk]
  float sm_scale_;
};

// Writes a query from its complete softmax.
void store(const Problem& p, std::int64_t b, std::int64_t i, PartialSoftmax& softmax) {
  const double factor = static_cast<double>(kv_scale_of(p));
  for (std::int64_t h = 0; h < p.h_q; ++h) {
    const double lse = softmax.finish(h, p.attn_sink, factor);
    if (p.lse)
      p.lse.as<float>()[b * p.lse.stride[0] + i * p.lse.stride[1] + h * p.lse.stride[2]] = static_cast<float>(lse);
  }
  store_heads(softmax.out(0), p.d_v, element(p.out, b), i, 0, p.d_v);
}

// The merges of a query's tiles, in order.
struct Merge {
  explicit Merge(const Problem& p) : split(p.h_q, p.d_v), query(p.h_q, p.d_v) {}

  void begin() { split.clear(), query.clear(); }
  void add(const Tile& of, PartialSoftmax& tile) {
    if (of.begins_split) split.clear();
    split.merge(tile);
    if (of.ends_split) query.merge(split);
  }

  PartialSoftmax split, query;
};

void launch(const Problem& p, Stream /*stream*/) {
  constexpr std::int64_t kEnoughItems = 16;
  const std::int64_t queries = p.b * p.q_len;
  if (queries == 0) return;
  const Tiles tiles(p);
  struct State {
    Worker worker;
    PartialSoftmax tile;
    Merge merge;
  };
  const auto make_state = [&] { return State{Worker(p, tiles.longest()), PartialSoftmax(p.h_q, p.d_v), Merge(p)}; };
  if (tiles.size() <= 1 || queries >= kEnoughItems) {
    parallel_for(queries, make_state, [&](std::int64_t s, State& state) {
      const std::int64_t b = s / p.q_len, i = s % p.q_len;
      state.merge.begin();
      for (std::int64_t t = 0; t < tiles.size(); ++t) {
        interruption_point();  // an item may be all keys
        state.worker.attend(b, i, tiles[t], state.tile);
        state.merge.add(tiles[t], state.tile);
      }
      store(p, b, i, state.merge.query);
    });
    return;
  }
  Merge merge(p);  // of the current query
  Turns turns(1);
  parallel_for(queries * tiles.size(), make_state, [&](std::int64_t item, State& state) {
    const std::int64_t s = item / tiles.size(), b = s / p.q_len, i = s % p.q_len;
    const Tile tile = tiles[item % tiles.size()];
    state.worker.attend(b, i, tile, state.tile);
    turns.in_turn(0, item, [&] {
      if (item % tiles.size() == 0) merge.begin();
      merge.add(tile, state.tile);
      if (tile.ends_query) store(p, b, i, merge.query);
    });
  });
}

const runtime::Registration cpu{"cpu", launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_decode
