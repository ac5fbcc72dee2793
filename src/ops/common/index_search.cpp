// A block of queries of a sequence iterates over its visible keys in tiles of kKeyTile. Our own vector code computes a
// query's scores as sums of products over its heads: the order of BLAS's sums depends on the position inside a product,
// but a score must depend neither on other queries nor, for ties, on the position of its key. A list per query collects
// the candidates that may still be among its topk, in ascending order of key, so that the result needs no sorting. If
// there are few queries, the keys are split too.
#include "ops/common/index_search.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "tile/ceil_div.hpp"
#include "tile/cpu/index_score.hpp"
#include "tile/cpu/parallel.hpp"

namespace hopwell::cpu {
namespace {

constexpr std::int64_t kKeyTile = 256;  // keys loaded at a time, one per column
// Row pitch of the key tile in floats: padded, so that one column uses all sets of the cache.
constexpr std::int64_t kKeyPitch = kKeyTile + 16;
constexpr std::int64_t kRowTile = 256;    // (query, head) rows that share a tile of keys
constexpr std::int64_t kMaxQueries = 64;  // queries per block, each with a candidate list
constexpr std::int64_t kMinItems = 16;    // for fewer blocks of queries the keys are split
constexpr std::int64_t kMinSplit = 4096;  // minimum number of keys per split

using tile::ceil_div;

// A list of candidates in ascending order of key. It holds the topk best and at most a tile or topk more.
class Candidates {
 public:
  Candidates(std::int64_t topk, std::int64_t keys)
      : topk_(topk),
        capacity_(std::min(topk + std::max(topk, kKeyTile), keys + kKeyTile)),
        scores_(capacity_ + kLaneBlock),
        keys_(capacity_ + kLaneBlock),
        order_(capacity_ + kLaneBlock) {}

  void clear() {
    size_ = 0;
    threshold_ = std::numeric_limits<float>::quiet_NaN();
  }

  // Appends the scores of the keys from first_key on, at most kKeyTile keys, all larger than the keys before.
  void append(const float* score, std::int64_t count, std::int64_t first_key) {
    if (size_ + count > capacity_) keep_best();
    size_ +=
        append_above(score, count, threshold_, static_cast<std::int32_t>(first_key), scores() + size_, keys() + size_);
  }

  // Appends another list, whose keys are larger than the keys before.
  void append(const float* score, const std::int32_t* key, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      if (size_ == capacity_) keep_best();
      if (score[i] <= threshold_) continue;
      scores()[size_] = score[i];
      keys()[size_++] = key[i];
    }
  }

  // Keeps the topk largest scores, ties to the candidates appended first, which have the smaller keys.
  void keep_best() {
    if (size_ <= topk_) return;
    threshold_ = kth_largest(scores(), size_, topk_, order_.get());  // later keys must beat it, since they lose ties
    std::int64_t better = 0, kept = 0;
    for (std::int64_t i = 0; i < size_; ++i) better += scores()[i] > threshold_;
    std::int64_t equal = topk_ - better;  // number of candidates equal to the threshold that stay
    for (std::int64_t i = 0; i < size_; ++i) {
      const float score = scores()[i];
      scores()[kept] = score;
      keys()[kept] = keys()[i];
      kept += score > threshold_ || (score == threshold_ && equal > 0);
      equal -= score == threshold_;
    }
    size_ = kept;
  }

  [[nodiscard]] float* scores() const { return scores_.get(); }
  [[nodiscard]] std::int32_t* keys() const { return keys_.get(); }
  [[nodiscard]] std::int64_t size() const { return size_; }

 private:
  std::int64_t topk_, capacity_, size_ = 0;
  float threshold_ = std::numeric_limits<float>::quiet_NaN();  // NaN: no candidate is rejected yet
  Scratch<float> scores_;
  Scratch<std::int32_t> keys_;
  Scratch<std::int32_t> order_;
};

// Division of the work; depends on the problem only.
struct Plan {
  std::int64_t topk;         // at most the number of keys
  std::int64_t queries;      // per block
  std::int64_t of_sequence;  // blocks of a sequence
  std::int64_t blocks;       // of all sequences
  std::int64_t splits;       // splits of the keys
  std::int64_t split_keys;   // a multiple of kKeyTile

  explicit Plan(const IndexSearch& p)
      : topk(std::min(p.topk, p.keys)),
        queries(std::clamp<std::int64_t>(kRowTile / p.h_index, 1, std::min(kMaxQueries, p.queries))),
        of_sequence(ceil_div(p.queries, queries)),
        blocks(p.sequences * of_sequence) {
    const std::int64_t wanted = std::clamp<std::int64_t>(kMinItems / blocks, 1, p.keys / kMinSplit + 1);
    split_keys = std::max(ceil_div(ceil_div(p.keys, wanted), kKeyTile), std::int64_t{1}) * kKeyTile;
    splits = ceil_div(p.keys, split_keys);
  }
};

// Consecutive queries of a sequence.
struct Queries {
  std::int64_t sequence, first, count;
};

// A thread's scratch: one block of queries and one tile of keys.
struct State {
  State(const IndexSearch& p, const Plan& plan)
      : q(plan.queries * p.h_index * p.d_index),
        weights(plan.queries * p.h_index),
        key(p.d_index),
        k(kKeyPitch * p.d_index),
        k_scale(kKeyTile + kLaneBlock),
        score(plan.queries * kKeyTile + kLaneBlock),
        absent(kKeyTile + 1) {
    for (std::int64_t i = 0; i < plan.queries; ++i) candidates.emplace_back(plan.topk, plan.split_keys);
  }
  Scratch<float> q, weights, key, k, k_scale, score;
  Scratch<std::int32_t> absent;  // keys of the tile that do not exist, ascending; then a key after all others
  std::vector<Candidates> candidates;
};

// For each query of a block: its visible keys [from, to) among the searched keys.
struct Block {
  std::int64_t queries = 0;
  std::array<std::int64_t, kMaxQueries> from{}, to{};
};

// Consecutive keys, and the queries from the first to the last that sees any of them.
struct Tile {
  std::int64_t first_key = 0, end_key = 0, first_query = 0, end_query = 0;
};
// The tile at the first key, from `key` on, that any query sees; empty if there is no such key.
Tile next_tile(const Block& block, std::int64_t key) {
  Tile tile{.first_key = INT64_MAX};
  for (std::size_t i = 0; i < block.to.size(); ++i) {
    const std::int64_t first = std::max(block.from[i], key);
    if (first < block.to[i]) tile.first_key = std::min(tile.first_key, first);
  }
  for (std::int64_t i = 0; i < block.queries && tile.first_key < INT64_MAX; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const std::int64_t end = std::min(tile.first_key + kKeyTile, block.to[at]);
    if (std::max(block.from[at], tile.first_key) >= end) continue;
    if (tile.end_query == 0) tile.first_query = i;
    tile.end_query = i + 1, tile.end_key = std::max(tile.end_key, end);
  }
  return tile;
}

// Appends the scores of the keys first … end − 1 but for absent ones. `score` points to the score of `first`.
void append(const float* score, std::int64_t first, std::int64_t end, const std::int32_t* absent, Candidates& to) {
  while (*absent < first) ++absent;
  while (first < end) {
    const std::int64_t count = std::min<std::int64_t>(end, *absent) - first;
    if (count > 0) to.append(score, count, first);
    score += count + 1, first += count + 1, ++absent;
  }
}

}  // namespace

// The parts of a search.
class IndexSearchRun {
 public:
  explicit IndexSearchRun(const IndexSearch& search) : p_(search), plan_(search) {}

  void run() const {
    if (plan_.splits > 1) return run_split();
    parallel_for(
        plan_.blocks, [&] { return State(p_, plan_); },
        [&](std::int64_t block, State& state) {
          const Queries queries = queries_of(block);
          search(queries, 0, p_.keys, state);
          for (std::int64_t i = 0; i < queries.count; ++i)
            write(queries.sequence, queries.first + i, state.candidates[static_cast<std::size_t>(i)]);
        });
  }

 private:
  [[nodiscard]] Queries queries_of(std::int64_t block) const {
    const std::int64_t first = block % plan_.of_sequence * plan_.queries;
    return {block / plan_.of_sequence, first, std::min(plan_.queries, p_.queries - first)};
  }

  [[nodiscard]] Block block_of(const Queries& queries, std::int64_t first_key, std::int64_t last_key) const {
    Block block{.queries = queries.count};
    for (std::int64_t i = 0; i < queries.count; ++i) {
      const KeyRange visible = p_.visible(queries.sequence, queries.first + i);
      const auto at = static_cast<std::size_t>(i);
      block.from[at] = std::max<std::int64_t>(first_key, visible.first);
      block.to[at] = std::min<std::int64_t>(last_key, visible.end());
    }
    return block;
  }

  // Loads a tile's keys as columns of floats, with zeros for absent keys and up to a multiple of kLaneBlock columns.
  void load_keys(std::int64_t sequence, const Tile& tile, State& state) const {
    float* const key = state.key.get();
    std::int32_t* absent = state.absent.get();
    const std::int64_t count = tile.end_key - tile.first_key;
    for (std::int64_t t = 0; t < padded(count); ++t) {
      state.k_scale.get()[t] = 1;
      const bool wanted = t < count;
      const bool found = wanted && p_.load_key(sequence, tile.first_key + t, key, state.k_scale.get() + t);
      if (!found) std::fill_n(key, p_.d_index, 0.0F);
      if (wanted && !found) *absent++ = static_cast<std::int32_t>(tile.first_key + t);
      for (std::int64_t c = 0; c < p_.d_index; ++c) state.k.get()[c * kKeyPitch + t] = key[c];
    }
    *absent = std::numeric_limits<std::int32_t>::max();
  }

  // Computes state.score[i, 0 .. padded(keys)) for the tile's queries and keys, which are in state.k. The scores of a
  // query do not depend on other queries, nor on the position of a key in a tile.
  void score_tile(const Tile& tile, State& state) const {
    const std::int64_t keys = tile.end_key - tile.first_key;
    for (std::int64_t query = tile.first_query; query < tile.end_query; ++query) {
      float* const score = state.score.get() + query * kKeyTile;
      const std::int64_t row = query * p_.h_index;
      score_keys(state.q.get() + row * p_.d_index, state.weights.get() + row, p_.h_index, p_.d_index, state.k.get(),
                 kKeyPitch, p_.relu, score, padded(keys));
      for (std::int64_t t = 0; t < keys && p_.has_key_scales; ++t) score[t] *= state.k_scale.get()[t];
    }
  }

  // Starts a block: clears the candidates and loads its queries.
  void load_queries(const Queries& queries, State& state) const {
    for (std::int64_t i = 0; i < queries.count; ++i) {
      state.candidates[static_cast<std::size_t>(i)].clear();
      p_.load_query(queries.sequence, queries.first + i, state.q.get() + i * p_.h_index * p_.d_index,
                    state.weights.get() + i * p_.h_index);
    }
  }

  // Fills state.candidates with the topk best of the keys [first_key, last_key). Keys that no query sees are not read.
  void search(const Queries& queries, std::int64_t first_key, std::int64_t last_key, State& state) const {
    const Block block = block_of(queries, first_key, last_key);
    load_queries(queries, state);
    Tile tile = next_tile(block, first_key);
    for (; tile.first_key < tile.end_key; tile = next_tile(block, tile.end_key)) {
      interruption_point();  // an item may be all keys
      load_keys(queries.sequence, tile, state);
      score_tile(tile, state);
      for (std::int64_t i = tile.first_query; i < tile.end_query; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const std::int64_t first = std::max(tile.first_key, block.from[at]);
        append(state.score.get() + i * kKeyTile + first - tile.first_key, first, std::min(tile.end_key, block.to[at]),
               state.absent.get(), state.candidates[at]);
      }
    }
    for (std::int64_t i = 0; i < queries.count; ++i) state.candidates[static_cast<std::size_t>(i)].keep_best();
  }

  void write(std::int64_t sequence, std::int64_t query, const Candidates& best) const {
    p_.write(sequence, query, {best.scores(), best.keys(), best.size()});
  }

  // Few queries, many keys: every (block, split) finds its own topk, then each query merges the lists of its splits.
  void run_split() const {
    const std::int64_t queries = p_.sequences * p_.queries;
    const std::int64_t width = std::min(plan_.topk, plan_.split_keys), lists = queries * plan_.splits;
    const Scratch<float> scores(lists * width);
    const Scratch<std::int32_t> keys(lists * width);
    const Scratch<std::int64_t> sizes(lists);
    parallel_for(
        plan_.blocks * plan_.splits, [&] { return State(p_, plan_); },
        [&](std::int64_t item, State& state) {
          const std::int64_t split = item / plan_.blocks, first = split * plan_.split_keys;
          const Queries of_block = queries_of(item % plan_.blocks);
          search(of_block, first, std::min(p_.keys, first + plan_.split_keys), state);
          for (std::int64_t i = 0; i < of_block.count; ++i) {
            const Candidates& best = state.candidates[static_cast<std::size_t>(i)];
            const std::int64_t list = (of_block.sequence * p_.queries + of_block.first + i) * plan_.splits + split;
            std::copy_n(best.scores(), best.size(), scores.get() + list * width);
            std::copy_n(best.keys(), best.size(), keys.get() + list * width);
            sizes.get()[list] = best.size();
          }
        });
    parallel_for(
        queries, [&] { return Candidates(plan_.topk, p_.keys); },
        [&](std::int64_t s, Candidates& best) {
          best.clear();
          for (std::int64_t list = s * plan_.splits; list < (s + 1) * plan_.splits; ++list)
            best.append(scores.get() + list * width, keys.get() + list * width, sizes.get()[list]);
          best.keep_best();
          write(s / p_.queries, s % p_.queries, best);
        });
  }

  const IndexSearch& p_;
  Plan plan_;
};

void IndexSearch::run() const {
  if (sequences > 0 && queries > 0) IndexSearchRun(*this).run();
}

}  // namespace hopwell::cpu
