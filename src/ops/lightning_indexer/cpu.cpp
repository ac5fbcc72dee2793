// The lightning indexer and its backward on the CPU.
//
// Forward: a block of queries walks over the keys in tiles of kKeyTile. One product gives q.k for all its (query, head)
// rows, a relu-weighted sum over the heads makes scores of it, and each query's candidate list takes the scores that
// may still be among its topk. Candidates stay in ascending order of key, so that the result needs no sorting. With few
// queries the keys are split, too.
//
// Backward: queries in waves. Each query of a wave gathers its keys and writes its part of dk, a row an entry, into a
// slot of its own; then the wave's slots are added into dk in the order of queries and entries, each range of keys by
// one thread. So the sums do not depend on the number of threads, `deterministic` or not.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "ops/lightning_indexer/op.hpp"
#include "tile/cpu/gemm.hpp"
#include "tile/cpu/index_score.hpp"
#include "tile/cpu/parallel.hpp"
#include "tile/cpu/vector.hpp"

namespace hopwell::ops {
namespace lightning_indexer {
namespace {

using cpu::kLaneBlock;
using cpu::Scratch;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kKeyTile = 256;    // keys a product
constexpr std::int64_t kRowTile = 256;    // (query, head) rows a product
constexpr std::int64_t kMaxQueries = 64;  // queries a block, each with a candidate list
constexpr std::int64_t kMinItems = 16;    // fewer blocks of queries than this: the keys are split
constexpr std::int64_t kMinSplit = 4096;  // into no fewer keys than this

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t padded(std::int64_t n) { return ceil_div(n, kLaneBlock) * kLaneBlock; }

// `count` contiguous elements from `offset` on, as float.
void load(const View& from, std::int64_t offset, float* to, std::int64_t count) {
  const auto n = static_cast<std::size_t>(count);
  if (from.dtype == DType::kFloat32)
    cpu::to_float(from.as<const float>() + offset, to, n);
  else
    cpu::to_float(from.as<const bfloat16>() + offset, to, n);
}

void store(const float* from, const View& to, std::int64_t offset, std::int64_t count) {
  const auto n = static_cast<std::size_t>(count);
  if (to.dtype == DType::kFloat32)
    cpu::from_float(from, to.as<float>() + offset, n);
  else
    cpu::from_float(from, to.as<bfloat16>() + offset, n);
}

// A list of candidates in ascending order of key that never holds more than its topk best and a tile or topk more.
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

  // The scores of the keys from first_key on, at most kKeyTile of them, all after those before.
  void append(const float* score, std::int64_t count, std::int64_t first_key) {
    if (size_ + count > capacity_) keep_best();
    size_ += cpu::append_above(score, count, threshold_, static_cast<std::int32_t>(first_key), scores() + size_,
                               keys() + size_);
  }

  // Another list, whose keys come after those before.
  void append(const float* score, const std::int32_t* key, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      if (size_ == capacity_) keep_best();
      if (score[i] <= threshold_) continue;
      scores()[size_] = score[i];
      keys()[size_++] = key[i];
    }
  }

  // Drops all but the topk of largest score, of equal ones those that came first, which are the smaller keys.
  void keep_best() {
    if (size_ <= topk_) return;
    threshold_ =
        cpu::kth_largest(scores(), size_, topk_, order_.get());  // now a key must beat it: an equal one is too late
    std::int64_t better = 0, kept = 0;
    for (std::int64_t i = 0; i < size_; ++i) better += scores()[i] > threshold_;
    std::int64_t equal = topk_ - better;  // of those equal to the threshold, so many are kept
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
  float threshold_ = std::numeric_limits<float>::quiet_NaN();  // NaN: nothing is refused yet
  Scratch<float> scores_;
  Scratch<std::int32_t> keys_;
  Scratch<std::int32_t> order_;
};

// How the work is cut, by the problem alone.
struct Plan {
  std::int64_t topk;     // no more than there are keys
  std::int64_t queries;  // a block
  std::int64_t blocks;
  std::int64_t splits;      // of the keys
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

// A thread's scratch: one block of queries against one tile of keys.
struct State {
  State(const Problem& p, const Plan& plan)
      : q(plan.queries * p.h_index * p.d_index),
        weights(plan.queries * p.h_index),
        k(kKeyTile * p.d_index),
        dot(std::min(kRowTile, plan.queries * p.h_index) * kKeyTile),
        score(plan.queries * kKeyTile) {
    for (std::int64_t i = 0; i < plan.queries; ++i) candidates.emplace_back(plan.topk, plan.split_keys);
  }
  Scratch<float> q, weights, k, dot, score;
  std::vector<Candidates> candidates;
};

// Keys first .. first + count - 1 as float rows, with zeros up to a multiple of kLaneBlock rows.
void load_keys(const Problem& p, std::int64_t first, std::int64_t count, float* k) {
  for (std::int64_t t = 0; t < count; ++t) load(p.k, (first + t) * p.k.stride[0], k + t * p.d_index, p.d_index);
  std::fill(k + count * p.d_index, k + padded(count) * p.d_index, 0.0F);
}

// state.score[i, 0 .. padded(count)) of the block's `queries` queries against the keys in state.k.
void score_tile(const Problem& p, std::int64_t queries, std::int64_t count, State& state) {
  const std::int64_t rows = queries * p.h_index, n = padded(count);
  std::fill_n(state.score.get(), queries * kKeyTile, 0.0F);
  for (std::int64_t row = 0; row < rows;) {
    const std::int64_t end = std::min(rows, row + kRowTile);
    const float* dot = state.dot.get();
    cpu::gemm_nt(end - row, n, p.d_index, 1, state.q.get() + row * p.d_index, p.d_index, state.k.get(), p.d_index, 0,
                 state.dot.get(), kKeyTile);
    while (row < end) {
      const std::int64_t query = row / p.h_index, heads = std::min(end, (query + 1) * p.h_index) - row;
      cpu::add_relu_sum(dot, kKeyTile, state.weights.get() + row, heads, state.score.get() + query * kKeyTile, n);
      dot += heads * kKeyTile;
      row += heads;
    }
  }
}

// Fills state.candidates with the topk best of the keys [first_key, last_key) for the queries from s0 on.
void search(const Problem& p, std::int64_t s0, std::int64_t queries, std::int64_t first_key, std::int64_t last_key,
            State& state) {
  std::array<std::int64_t, kMaxQueries> visible{};
  std::int64_t end = first_key;
  for (std::int64_t i = 0; i < queries; ++i) {
    state.candidates[static_cast<std::size_t>(i)].clear();
    visible[static_cast<std::size_t>(i)] = std::min(last_key, p.causality.visible_keys(s0 + i, p.s_kv));
    end = std::max(end, visible[static_cast<std::size_t>(i)]);
    load(p.weights, (s0 + i) * p.weights.stride[0], state.weights.get() + i * p.h_index, p.h_index);
    for (std::int64_t j = 0; j < p.h_index; ++j)
      load(p.q, (s0 + i) * p.q.stride[0] + j * p.q.stride[1], state.q.get() + (i * p.h_index + j) * p.d_index,
           p.d_index);
  }
  for (std::int64_t t = first_key; t < end; t += kKeyTile) {
    const std::int64_t count = std::min(kKeyTile, end - t);
    load_keys(p, t, count, state.k.get());
    score_tile(p, queries, count, state);
    for (std::int64_t i = 0; i < queries; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const std::int64_t seen = std::min(count, visible[at] - t);
      if (seen > 0) state.candidates[at].append(state.score.get() + i * kKeyTile, seen, t);
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

// Few queries, many keys: every (block, split) finds its own topk, then each query merges those of its splits.
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

const runtime::Registration<Problem> cpu_backend{{.name = "cpu", .launch = launch}};

}  // namespace
}  // namespace lightning_indexer

namespace lightning_indexer_backward {
namespace {

using cpu::kLaneBlock;
using cpu::Scratch;
using lightning_indexer::ceil_div;
using lightning_indexer::kInfinity;
using lightning_indexer::load;
using lightning_indexer::padded;
using lightning_indexer::store;

constexpr std::int64_t kMaxEntryTile = 2048;   // gathered keys a product; a row of more entries computes q.k twice
constexpr std::int64_t kDotFloats = 1 << 18;   // of q.k a tile
constexpr std::int64_t kWaveFloats = 8 << 20;  // of dk parts a wave
constexpr std::int64_t kMinWave = 4, kMaxWave = 4096;  // queries
constexpr std::int64_t kKeyRanges = 16;                // that add up a wave's parts side by side

// A thread's scratch: one query and a tile of its keys.
struct State {
  explicit State(const Problem& p)
      : tile(std::clamp(kDotFloats / p.h_index / kLaneBlock * kLaneBlock, kLaneBlock,
                        std::min(kMaxEntryTile, padded(p.topk)))),
        q(p.h_index * p.d_index),
        weights(p.h_index),
        target(p.topk),
        score(padded(p.topk)),
        g(padded(p.topk)),
        k(tile * p.d_index),
        dot(p.h_index * tile),
        d_q(p.h_index * p.d_index),
        d_weights(p.h_index) {}
  std::int64_t tile;  // entries, a multiple of kLaneBlock
  Scratch<float> q, weights, target, score, g, k, dot, d_q, d_weights;
};

// Into `keys` and state.target the entries of row s that name a key; returns how many, or 0 if their targets are all
// zero.
std::int64_t load_entries(const Problem& p, std::int64_t s, std::int32_t* keys, State& state) {
  const auto* indices = p.indices.as<const std::int32_t>() + s * p.indices.stride[0];
  const auto* target = p.target.as<const float>() + s * p.target.stride[0];
  std::int64_t count = 0;
  bool any = false;
  for (std::int64_t i = 0; i < p.topk; ++i) {
    if (indices[i] < 0 || indices[i] >= p.s_kv) continue;
    any = any || target[i] != 0;
    state.target.get()[count] = target[i];
    keys[count++] = indices[i];
  }
  return any ? count : 0;
}

// state.k: the keys as float rows, zeros up to a multiple of kLaneBlock. state.dot[j, i] = q_j . k_i.
void multiply(const Problem& p, const std::int32_t* keys, std::int64_t count, State& state) {
  for (std::int64_t i = 0; i < count; ++i) load(p.k, keys[i] * p.k.stride[0], state.k.get() + i * p.d_index, p.d_index);
  std::fill(state.k.get() + count * p.d_index, state.k.get() + padded(count) * p.d_index, 0.0F);
  cpu::gemm_nt(p.h_index, padded(count), p.d_index, 1, state.q.get(), p.d_index, state.k.get(), p.d_index, 0,
               state.dot.get(), state.tile);
}

// state.score of all entries; NaN counts as -inf.
void score_entries(const Problem& p, const std::int32_t* keys, std::int64_t count, State& state) {
  float* score = state.score.get();
  std::fill_n(score, padded(count), 0.0F);
  for (std::int64_t first = 0; first < count; first += state.tile) {
    const std::int64_t n = std::min(state.tile, count - first);
    multiply(p, keys + first, n, state);
    cpu::add_relu_sum(state.dot.get(), state.tile, state.weights.get(), p.h_index, score + first, padded(n));
  }
  std::replace_if(score, score + count, [](float x) { return std::isnan(x); }, -kInfinity);
}

// state.g = d_loss * (softmax of the scores - target), 0 for entries of score -inf, and the row's loss. False: it has
// no entry with a score and a target, so no loss and no gradient.
bool softmax_gradient(const Problem& p, std::int64_t count, State& state, double& loss) {
  const float *score = state.score.get(), *target = state.target.get();
  float* g = state.g.get();
  bool any = false;
  for (std::int64_t i = 0; i < count; ++i) any = any || (target[i] != 0 && score[i] != -kInfinity);
  if (!any) return false;
  const auto n = static_cast<std::size_t>(count);
  std::copy_n(score, count, g);
  const float peak = cpu::max(score, n), sum = cpu::exp_sum(g, 1, peak, n);
  const double lse = static_cast<double>(peak) + std::log(static_cast<double>(sum));
  for (std::int64_t i = 0; i < count; ++i) {
    if (score[i] == -kInfinity) {
      g[i] = 0;
      continue;
    }
    const auto wanted = static_cast<double>(target[i]);
    if (wanted != 0) loss += wanted * (std::log(wanted) - (static_cast<double>(score[i]) - lse));
    g[i] = p.d_loss * (g[i] / sum - target[i]);
  }
  std::fill(g + count, g + padded(count), 0.0F);
  return true;
}

// From state.g: state.d_q, state.d_weights and part[i, :], what entry i adds to dk; the key of an entry without a score
// becomes -1.
void input_gradients(const Problem& p, std::int32_t* keys, std::int64_t count, State& state, float* part) {
  const std::int64_t d = p.d_index, ld = state.tile;
  std::fill_n(state.d_weights.get(), p.h_index, 0.0F);
  for (std::int64_t first = 0; first < count; first += state.tile) {
    const std::int64_t n = std::min(state.tile, count - first);
    float *dot = state.dot.get(), *k = state.k.get();
    if (count > state.tile) multiply(p, keys + first, n, state);
    for (std::int64_t i = 0; i < n; ++i) {  // keys without a score may hold NaN
      if (state.score.get()[first + i] != -kInfinity) continue;
      keys[first + i] = -1;
      std::fill_n(k + i * d, d, 0.0F);
      for (std::int64_t j = 0; j < p.h_index; ++j) dot[j * ld + i] = 0;
    }
    for (std::int64_t j = 0; j < p.h_index; ++j)
      state.d_weights.get()[j] +=
          cpu::relu_gradient(state.g.get() + first, state.weights.get()[j], dot + j * ld, padded(n));
    cpu::gemm_nn(p.h_index, d, padded(n), 1, dot, ld, k, d, first == 0 ? 0.0F : 1.0F, state.d_q.get(), d);
    cpu::gemm_tn(n, d, p.h_index, 1, dot, ld, state.q.get(), d, 0, part + first * d, d);
  }
}

// Query s: its rows of d_q and d_weights, its loss, and keys[i], part[i, :] for the entries that add to dk. Returns how
// many.
std::int64_t query_gradients(const Problem& p, std::int64_t s, State& state, std::int32_t* keys, float* part,
                             double& loss) {
  loss = 0;
  std::int64_t count = load_entries(p, s, keys, state);
  if (count > 0) {
    load(p.weights, s * p.weights.stride[0], state.weights.get(), p.h_index);
    for (std::int64_t j = 0; j < p.h_index; ++j)
      load(p.q, s * p.q.stride[0] + j * p.q.stride[1], state.q.get() + j * p.d_index, p.d_index);
    score_entries(p, keys, count, state);
    if (!softmax_gradient(p, count, state, loss)) count = 0;
  }
  if (count > 0) {
    input_gradients(p, keys, count, state, part);
  } else {
    std::fill_n(state.d_q.get(), p.h_index * p.d_index, 0.0F);
    std::fill_n(state.d_weights.get(), p.h_index, 0.0F);
  }
  store(state.d_weights.get(), p.d_weights, s * p.d_weights.stride[0], p.h_index);
  for (std::int64_t j = 0; j < p.h_index; ++j)
    store(state.d_q.get() + j * p.d_index, p.d_q, s * p.d_q.stride[0] + j * p.d_q.stride[1], p.d_index);
  return count;
}

void launch(const Problem& p, Stream /*stream*/) {
  const std::int64_t part_floats = std::max(p.topk, std::int64_t{1}) * p.d_index;
  const std::int64_t wave = std::min(std::clamp(kWaveFloats / part_floats, kMinWave, kMaxWave), p.s_q);
  const Scratch<float> parts(wave * part_floats);
  const Scratch<std::int32_t> keys(wave * p.topk);
  const Scratch<std::int64_t> counts(wave);
  const Scratch<double> losses(p.s_q);
  auto* d_k = p.d_k.as<float>();
  for (std::int64_t t = 0; t < p.s_kv; ++t) std::fill_n(d_k + t * p.d_k.stride[0], p.d_index, 0.0F);

  for (std::int64_t s0 = 0; s0 < p.s_q; s0 += wave) {
    const std::int64_t queries = std::min(wave, p.s_q - s0);
    cpu::parallel_for(
        queries, [&] { return State(p); },
        [&](std::int64_t i, State& state) {
          counts.get()[i] = query_gradients(p, s0 + i, state, keys.get() + i * p.topk, parts.get() + i * part_floats,
                                            losses.get()[s0 + i]);
        });
    const std::int64_t range = ceil_div(p.s_kv, kKeyRanges);
    cpu::parallel_for(kKeyRanges, [&](std::int64_t item) {
      const std::int64_t first = item * range, last = first + range;
      for (std::int64_t i = 0; i < queries; ++i) {
        const std::int32_t* key = keys.get() + i * p.topk;
        const float* part = parts.get() + i * part_floats;
        for (std::int64_t e = 0; e < counts.get()[i]; ++e)
          if (key[e] >= first && key[e] < last)
            cpu::add(part + e * p.d_index, d_k + key[e] * p.d_k.stride[0], static_cast<std::size_t>(p.d_index));
      }
    });
  }
  double loss = 0;
  for (std::int64_t s = 0; s < p.s_q; ++s) loss += losses.get()[s];
  *p.loss.as<float>() = static_cast<float>(loss);
}

const runtime::Registration<Problem> cpu_backend{{.name = "cpu", .launch = launch}};

}  // namespace
}  // namespace lightning_indexer_backward
}  // namespace hopwell::ops
