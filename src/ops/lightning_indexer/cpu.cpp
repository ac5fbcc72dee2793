// lightning_indexer on the CPU. A block of queries iterates over its visible keys in tiles of kKeyTile. Our own vector
// code computes a query's scores as sums of products over its heads: the order of BLAS's sums depends on the position
// inside a product, but a score must depend neither on other queries nor, for ties, on the position of its key. A list
// per query collects the candidates that may still be among its topk, in ascending order of key, so that the result
// needs no sorting. If there are few queries, the keys are split too.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "ops/lightning_indexer/op.hpp"
#include "tile/ceil_div.hpp"
#include "tile/cpu/index_score.hpp"
#include "tile/cpu/parallel.hpp"
#include "tile/cpu/vector.hpp"

namespace hopwell::ops::lightning_indexer {
namespace {

using cpu::kLaneBlock, cpu::load, cpu::padded;
using cpu::Scratch;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
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
    size_ += cpu::append_above(score, count, threshold_, static_cast<std::int32_t>(first_key), scores() + size_,
                               keys() + size_);
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
    threshold_ =
        cpu::kth_largest(scores(), size_, topk_, order_.get());  // later keys must beat it, since they lose ties
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
  std::int64_t topk;     // at most the number of keys
  std::int64_t queries;  // per block
  std::int64_t blocks;
  std::int64_t splits;      // splits of the keys
  std::int64_t split_keys;  // a multiple of kKeyTile

  explicit Plan(const Problem& p)
      : topk(std::min(p.topk, p.s_kv)),
        queries(std::clamp<std::int64_t>(kRowTile / p.h_index, 1, std::min(kMaxQueries, p.s_q))),
        blocks(ceil_div(p.s_q, queries)) {
    const std::int64_t wanted =
        std::clamp<std::int64_t>(kMinItems / std::max<std::int64_t>(blocks, 1), 1, p.s_kv / kMinSplit + 1);
    split_keys = std::max(ceil_div(ceil_div(p.s_kv, wanted), kKeyTile), std::int64_t{1}) * kKeyTile;
    splits = ceil_div(p.s_kv, split_keys);
  }
};

// A thread's scratch: one block of queries and one tile of keys.
struct State {
  State(const Problem& p, const Plan& plan)
      : q(plan.queries * p.h_index * p.d_index),
        weights(plan.queries * p.h_index),
        key(p.d_index),
        k(kKeyPitch * p.d_index),
        k_scale(kKeyTile + kLaneBlock),
        score(plan.queries * kKeyTile + kLaneBlock) {
    for (std::int64_t i = 0; i < plan.queries; ++i) candidates.emplace_back(plan.topk, plan.split_keys);
  }
  Scratch<float> q, weights, key, k, k_scale, score;
  std::vector<Candidates> candidates;
};

// Loads a tile's keys as columns of floats, with zeros up to a multiple of kLaneBlock columns, and their scales.
void load_keys(const Problem& p, std::int64_t first, std::int64_t count, State& state) {
  float* const key = state.key.get();
  for (std::int64_t t = 0; t < padded(count); ++t) {
    if (t < count) load(p.k, (first + t) * p.k.stride[0], key, p.d_index);
    if (t == count) std::fill_n(key, p.d_index, 0.0F);
    for (std::int64_t c = 0; c < p.d_index; ++c) state.k.get()[c * kKeyPitch + t] = key[c];
  }
  if (!p.k_scale) return;
  for (std::int64_t t = 0; t < count; ++t)
    state.k_scale.get()[t] = p.k_scale.as<const float>()[(first + t) * p.k_scale.stride[0]];
}

// For each query of a block: its visible keys [from, to) among the searched keys.
struct Block {
  std::int64_t queries = 0;
  std::array<std::int64_t, kMaxQueries> from{}, to{};
};
Block block_of(const Problem& p, std::int64_t s0, std::int64_t queries, std::int64_t first_key, std::int64_t last_key) {
  Block block{.queries = queries};
  for (std::int64_t i = 0; i < queries; ++i) {
    const KeyRange visible = p.visibility.keys(s0 + i, p.s_kv);
    const auto at = static_cast<std::size_t>(i);
    block.from[at] = std::max<std::int64_t>(first_key, visible.first);
    block.to[at] = std::min<std::int64_t>(last_key, visible.end());
  }
  return block;
}

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

// Computes state.score[i, 0 .. padded(keys)) for the tile's queries and keys, which are in state.k. The scores of a
// query do not depend on other queries, nor on the position of a key in a tile.
void score_tile(const Problem& p, const Tile& tile, State& state) {
  const std::int64_t keys = tile.end_key - tile.first_key;
  for (std::int64_t query = tile.first_query; query < tile.end_query; ++query) {
    float* const score = state.score.get() + query * kKeyTile;
    const std::int64_t row = query * p.h_index;
    cpu::score_keys(state.q.get() + row * p.d_index, state.weights.get() + row, p.h_index, p.d_index, state.k.get(),
                    kKeyPitch, p.relu, score, padded(keys));
    for (std::int64_t t = 0; t < keys && p.k_scale; ++t) score[t] *= state.k_scale.get()[t];
  }
}

// Starts a block: clears the candidates, loads q of its queries and their weights, which include q's scales.
void load_queries(const Problem& p, std::int64_t s0, std::int64_t queries, State& state) {
  for (std::int64_t i = 0; i < queries; ++i) {
    state.candidates[static_cast<std::size_t>(i)].clear();
    float* weights = state.weights.get() + i * p.h_index;
    load(p.weights, (s0 + i) * p.weights.stride[0], weights, p.h_index);
    for (std::int64_t j = 0; j < p.h_index && p.q_scale; ++j)
      weights[j] *= p.q_scale.as<const float>()[(s0 + i) * p.q_scale.stride[0] + j];
    for (std::int64_t j = 0; j < p.h_index; ++j)
      load(p.q, (s0 + i) * p.q.stride[0] + j * p.q.stride[1], state.q.get() + (i * p.h_index + j) * p.d_index,
           p.d_index);
  }
}

// Fills state.candidates with the topk best of the keys [first_key, last_key) for the queries from s0 on. Keys that no
// query sees are not read.
void search(const Problem& p, std::int64_t s0, std::int64_t queries, std::int64_t first_key, std::int64_t last_key,
            State& state) {
  const Block block = block_of(p, s0, queries, first_key, last_key);
  load_queries(p, s0, queries, state);
  Tile tile = next_tile(block, first_key);
  for (; tile.first_key < tile.end_key; tile = next_tile(block, tile.end_key)) {
    cpu::interruption_point();  // an item may be all keys
    load_keys(p, tile.first_key, tile.end_key - tile.first_key, state);
    score_tile(p, tile, state);
    for (std::int64_t i = tile.first_query; i < tile.end_query; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const std::int64_t first = std::max(tile.first_key, block.from[at]);
      const std::int64_t seen = std::min(tile.end_key, block.to[at]) - first;
      if (seen > 0) state.candidates[at].append(state.score.get() + i * kKeyTile + first - tile.first_key, seen, first);
    }
  }
  for (std::int64_t i = 0; i < queries; ++i) state.candidates[static_cast<std::size_t>(i)].keep_best();
}

void write_row(const Problem& p, std::int64_t s, const Candidates& best) {
  auto* indices = p.indices.as<std::int32_t>() + s * p.indices.stride[0];
  std::fill(std::copy_n(best.keys(), best.size(), indices), indices + p.topk, -1);
  if (!p.scores) return;
  float* scores = p.scores.as<float>() + s * p.scores.stride[0];
  std::fill(std::copy_n(best.scores(), best.size(), scores), scores + p.topk, -kInfinity);
}

// Few queries, many keys: every (block, split) finds its own topk, then each query merges the lists of its splits.
void launch_split(const Problem& p, const Plan& plan) {
  const std::int64_t width = std::min(plan.topk, plan.split_keys), lists = p.s_q * plan.splits;
  const Scratch<float> scores(lists * width);
  const Scratch<std::int32_t> keys(lists * width);
  const Scratch<std::int64_t> sizes(lists);
  cpu::parallel_for(
      plan.blocks * plan.splits, [&] { return State(p, plan); },
      [&](std::int64_t item, State& state) {
        const std::int64_t split = item / plan.blocks, s0 = item % plan.blocks * plan.queries;
        const std::int64_t queries = std::min(plan.queries, p.s_q - s0), first = split * plan.split_keys;
        search(p, s0, queries, first, std::min(p.s_kv, first + plan.split_keys), state);
        for (std::int64_t i = 0; i < queries; ++i) {
          const Candidates& best = state.candidates[static_cast<std::size_t>(i)];
          const std::int64_t list = (s0 + i) * plan.splits + split;
          std::copy_n(best.scores(), best.size(), scores.get() + list * width);
          std::copy_n(best.keys(), best.size(), keys.get() + list * width);
          sizes.get()[list] = best.size();
        }
      });
  cpu::parallel_for(
      p.s_q, [&] { return Candidates(plan.topk, p.s_kv); },
      [&](std::int64_t s, Candidates& best) {
        best.clear();
        for (std::int64_t list = s * plan.splits; list < (s + 1) * plan.splits; ++list)
          best.append(scores.get() + list * width, keys.get() + list * width, sizes.get()[list]);
        best.keep_best();
        write_row(p, s, best);
      });
}

void launch(const Problem& p, Stream /*stream*/) {
  if (p.s_q == 0 || p.topk == 0) return;
  const Plan plan(p);
  if (plan.splits > 1) return launch_split(p, plan);
  cpu::parallel_for(
      plan.blocks, [&] { return State(p, plan); },
      [&](std::int64_t block, State& state) {
        const std::int64_t s0 = block * plan.queries, queries = std::min(plan.queries, p.s_q - s0);
        search(p, s0, queries, 0, p.s_kv, state);
        for (std::int64_t i = 0; i < queries; ++i) write_row(p, s0 + i, state.candidates[static_cast<std::size_t>(i)]);
      });
}

const runtime::Registration cpu_backend{"cpu", launch};

}  // namespace
}  // namespace hopwell::ops::lightning_indexer
