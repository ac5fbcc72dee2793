// lightning_indexer_backward on the CPU: queries in waves. Each query of a wave gathers its keys and writes its
// contribution to dk, one row per entry, into its own slot. Then the slots of the wave are added to dk in the order of
// queries and entries; one thread adds each range of keys. So the sums do not depend on the number of threads, with or
// without `deterministic`.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/lightning_indexer_backward/op.hpp"
#include "tile/cpu/index_score.hpp"
#include "tile/cpu/parallel.hpp"
#include "tile/cpu/product.hpp"
#include "tile/cpu/vector.hpp"

namespace hopwell::ops::lightning_indexer_backward {
namespace {

using cpu::kLaneBlock, cpu::load, cpu::padded, cpu::store;
using cpu::Scratch;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kMaxEntryTile = 2048;   // gathered keys per product; a row with more entries computes q.k twice
constexpr std::int64_t kDotFloats = 1 << 18;   // floats of q.k per tile
constexpr std::int64_t kWaveFloats = 8 << 20;  // floats of dk contributions per wave
constexpr std::int64_t kMinWave = 4, kMaxWave = 4096;  // queries
constexpr std::int64_t kKeyRanges = 16;                // ranges that are added in parallel

// A thread's scratch: one query and one tile of its keys.
struct State {
  explicit State(const PassProblem& p)
      : tile(std::clamp(kDotFloats / p.h_index / kLaneBlock * kLaneBlock, kLaneBlock,
                        std::min(kMaxEntryTile, padded(p.topk)))),
        q(p.h_index * p.d_index),
        weights(p.h_index),
        given(p.topk),
        score(padded(p.topk)),
        g(padded(p.topk)),
        k(tile * p.d_index),
        dot(p.h_index * tile),
        d_q(p.h_index * p.d_index),
        d_weights(p.h_index) {}
  std::int64_t tile;  // entries, a multiple of kLaneBlock
  Scratch<float> q, weights, given, score, g, k, dot, d_q, d_weights;
  cpu::Products products;
};

// Lists the entries of row s with visible keys in `keys` and their targets or gradients in state.given. Returns their
// number, or 0 if all targets or gradients are zero.
std::int64_t load_entries(const PassProblem& p, std::int64_t s, std::int32_t* keys, State& state) {
  const View& given = p.d_scores ? p.d_scores : p.target;
  const auto* row = given.as<const float>() + s * given.stride[0];
  const KeyRange visible = p.visibility.keys(s, p.s_kv);
  std::int64_t count = 0;
  bool any = false;
  const auto take = [&](std::int32_t key, float of_key) {
    any = any || of_key != 0;
    state.given.get()[count] = p.target_scale * of_key;
    keys[count++] = key;
  };
  if (p.indices) {
    const auto* indices = p.indices.as<const std::int32_t>() + s * p.indices.stride[0];
    for (std::int64_t i = 0; i < p.topk; ++i)
      if (visible.has(indices[i])) take(indices[i], row[i]);
  } else {
    for (std::uint32_t key = visible.first; key < visible.end(); ++key) take(static_cast<std::int32_t>(key), row[key]);
  }
  return any ? count : 0;
}

// state.k: the keys as float rows, padded with zeros to a multiple of kLaneBlock. state.dot[j, i] = q_j . k_i.
void multiply(const PassProblem& p, const std::int32_t* keys, std::int64_t count, State& state) {
  for (std::int64_t i = 0; i < count; ++i) load(p.k, keys[i] * p.k.stride[0], state.k.get() + i * p.d_index, p.d_index);
  std::fill(state.k.get() + count * p.d_index, state.k.get() + padded(count) * p.d_index, 0.0F);
  state.products.nt(p.h_index, padded(count), p.d_index, state.q.get(), p.d_index, state.k.get(), p.d_index, false,
                    state.dot.get(), state.tile);
}

// state.score of all entries; NaN counts as -inf.
void score_entries(const PassProblem& p, const std::int32_t* keys, std::int64_t count, State& state) {
  float* score = state.score.get();
  std::fill_n(score, padded(count), 0.0F);
  for (std::int64_t first = 0; first < count; first += state.tile) {
    const std::int64_t n = std::min(state.tile, count - first);
    multiply(p, keys + first, n, state);
    cpu::add_head_scores(state.dot.get(), state.tile, state.weights.get(), p.h_index, p.relu, score + first, padded(n));
  }
  std::replace_if(score, score + count, [](float x) { return std::isnan(x); }, -kInfinity);
}

float row_weight(const PassProblem& p, std::int64_t s) {
  return p.row_weights ? p.row_weights.as<const float>()[s * p.row_weights.stride[0]] : 1.0F;
}

// Factor of the gradients of query s.
float factor_of(const PassProblem& p, std::int64_t s) {
  const float d_loss = p.d_loss_array ? *p.d_loss_array.as<const float>() : p.d_loss;
  return d_loss * row_weight(p, s);
}

// A gradient of a score; NaN if it is beyond fp32's range.
float finite_or_nan(float g) { return std::isfinite(g) ? g : std::numeric_limits<float>::quiet_NaN(); }

// state.g = factor * (softmax of the scores - target), 0 for entries with score -inf; computes the row's loss. Returns
// false if no entry has a score and a target: then there is no loss and no gradient.
bool softmax_gradient(float factor, std::int64_t count, State& state, double& loss) {
  const float *score = state.score.get(), *target = state.given.get();
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
    g[i] = finite_or_nan(factor * (g[i] / sum - target[i]));
  }
  std::fill(g + count, g + padded(count), 0.0F);
  return true;
}

// state.g = factor * given gradients, 0 for entries with score -inf. Returns false if there are no other entries.
bool scale_gradient(float factor, std::int64_t count, State& state) {
  float* g = state.g.get();
  for (std::int64_t i = 0; i < count; ++i)
    g[i] = state.score.get()[i] == -kInfinity ? 0 : finite_or_nan(factor * state.given.get()[i]);
  std::fill(g + count, g + padded(count), 0.0F);
  return std::any_of(state.score.get(), state.score.get() + count, [](float x) { return x != -kInfinity; });
}

// From state.g: state.d_q, state.d_weights, and part[i, :], the contribution of entry i to dk. The key of an entry
// without a score is set to -1.
void input_gradients(const PassProblem& p, std::int32_t* keys, std::int64_t count, State& state, float* part) {
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
    for (std::int64_t j = 0; j < p.h_index; ++j) {
      float *row = dot + j * ld, weight = state.weights.get()[j];
      if (!p.relu) std::fill(row + n, row + padded(n), 0.0F);  // q may be infinite
      state.d_weights.get()[j] += cpu::head_gradient(state.g.get() + first, weight, row, padded(n), p.relu);
      if (!std::isinf(weight)) continue;  // an infinite weight has turned the zeros of invalid entries into NaN
      std::fill(row + n, row + padded(n), 0.0F);
      for (std::int64_t i = 0; i < n; ++i) row[i] = keys[first + i] < 0 ? 0 : row[i];
    }
    state.products.nn(p.h_index, d, padded(n), dot, ld, k, d, first > 0, state.d_q.get(), d);
    state.products.tn(n, d, p.h_index, dot, ld, state.q.get(), d, false, part + first * d, d);
  }
}

// Query s: writes its rows of d_q and d_weights, its unweighted loss, and keys[i], part[i, :] for the entries that
// contribute to dk. Returns their number.
std::int64_t query_gradients(const PassProblem& p, std::int64_t s, State& state, std::int32_t* keys, float* part,
                             double& loss) {
  loss = 0;
  std::int64_t count = load_entries(p, s, keys, state);
  if (count > 0) {
    load(p.weights, s * p.weights.stride[0], state.weights.get(), p.h_index);
    for (std::int64_t j = 0; j < p.h_index; ++j)
      load(p.q, s * p.q.stride[0] + j * p.q.stride[1], state.q.get() + j * p.d_index, p.d_index);
    score_entries(p, keys, count, state);
    const float factor = factor_of(p, s);
    const bool any = p.d_scores ? scale_gradient(factor, count, state) : softmax_gradient(factor, count, state, loss);
    if (!any) count = 0;
  }
  if (row_weight(p, s) == 0) count = 0;
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

// Contributions of a wave of queries to dk: rows of entries, and their keys.
struct Wave {
  Wave(const PassProblem& p, std::int64_t part_floats)
      : queries(std::min(std::clamp(kWaveFloats / part_floats, kMinWave, kMaxWave), p.s_q)),
        part_floats(part_floats),
        parts(queries * part_floats),
        keys(queries * p.topk),
        counts(queries) {}
  std::int64_t queries, part_floats;  // queries: at most; part_floats: per query
  Scratch<float> parts;
  Scratch<std::int32_t> keys;
  Scratch<std::int64_t> counts;
};

void add_wave(const PassProblem& p, const Wave& wave, std::int64_t queries) {
  auto* d_k = p.d_k.as<float>();
  const std::int64_t range = (p.s_kv + kKeyRanges - 1) / kKeyRanges;
  cpu::parallel_for(kKeyRanges, [&](std::int64_t item) {
    const std::int64_t first = item * range, last = first + range;
    for (std::int64_t i = 0; i < queries; ++i) {
      const std::int32_t* key = wave.keys.get() + i * p.topk;
      const float* part = wave.parts.get() + i * wave.part_floats;
      for (std::int64_t e = 0; e < wave.counts.get()[i]; ++e)
        if (key[e] >= first && key[e] < last)
          cpu::add(part + e * p.d_index, d_k + key[e] * p.d_k.stride[0], static_cast<std::size_t>(p.d_index));
    }
  });
}

// The loss over all passes; losses [s_q] are not weighted yet.
void store_loss(const PassProblem& p, const double* losses) {
  double loss = 0;
  for (std::int64_t s = 0; s < p.s_q; ++s) {
    if (p.row_loss) p.row_loss.as<float>()[s * p.row_loss.stride[0]] = static_cast<float>(losses[s]);
    if (const float weight = row_weight(p, s); weight != 0) loss += double{weight} * losses[s];
  }
  if (p.loss) *p.loss.as<float>() = static_cast<float>(loss);
}

// Processes the queries of a pass as a separate problem: their gradients and losses, and their contributions to d_k.
void add_queries(const PassProblem& p, double* losses) {
  const Wave wave(p, std::max(p.topk, std::int64_t{1}) * p.d_index);
  for (std::int64_t s0 = 0; s0 < p.s_q; s0 += wave.queries) {
    const std::int64_t queries = std::min(wave.queries, p.s_q - s0);
    cpu::parallel_for(
        queries, [&] { return State(p); },
        [&](std::int64_t i, State& state) {
          wave.counts.get()[i] = query_gradients(p, s0 + i, state, wave.keys.get() + i * p.topk,
                                                 wave.parts.get() + i * wave.part_floats, losses[s0 + i]);
        });
    add_wave(p, wave, queries);
  }
}

void launch_pass(const PassProblem& p, Stream /*stream*/) {
  const Scratch<double> own(p.losses ? 0 : p.s_q);
  double* const losses = p.losses ? p.losses.as<double>() : own.get();
  for (std::int64_t t = 0; t < p.s_kv && p.first_pass(); ++t)
    std::fill_n(p.d_k.as<float>() + t * p.d_k.stride[0], p.d_index, 0.0F);
  add_queries(queries_of_pass(p), losses + p.first_query);
  if (p.last_pass()) store_loss(p, losses);
}

void launch(const Problem& p, Stream stream) { launch_pass(single_pass(p), stream); }

const runtime::Registration passes{"cpu", launch_pass};
const runtime::Registration cpu_backend{"cpu", launch};

}  // namespace
}  // namespace hopwell::ops::lightning_indexer_backward
