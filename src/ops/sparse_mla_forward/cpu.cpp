// sparse_mla_forward on the CPU: processes one tile of a query's entries at a time, window keys first, each with its own
// softmax, and merges the softmaxes of a query in order (Milakov & Gimelshein 2018, arXiv:1805.02867; tile by tile: Dao et al. 2022,
// arXiv:2205.14135).
//
//     for each tile of entries:   K = gather(window_kv, kv)       [keys, d_qk] fp32, valid entries only
//                                 S = sm_scale (q . K^T)          [h_q, keys]
//                                 P = exp(S - max)
//                                 O = P . K[:, :d_v]              [h_q, d_v]
//
// If there are few queries, threads share the tiles of a query and merge them in order. Scratch per thread, in floats:
// (h_q + tile) * d_qk + h_q * (tile + 2 d_v) with tile = min(window + topk, 512); 2.4 MB for h_q 128, d_qk 576, d_v 512.
#include <cmath>
#include <limits>
#include <vector>

#include "ops/common/selected_rows.hpp"
#include "ops/sparse_mla_forward/op.hpp"
#include "tile/cpu/product.hpp"
#include "tile/cpu/turns.hpp"
#include "tile/cpu/vector.hpp"

namespace hopwell::ops::sparse_mla_forward {
namespace {

using namespace hopwell::cpu;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// exp(x - shift), where x may be -inf. A shift of -inf means that all values are -inf.
double weight(double x, double shift) { return shift == -kInfinity ? 0 : std::exp(x - shift); }

// softmax(scores) . V over some of a query's tiles, before the division by the sum. A NaN score makes all results of
// its head NaN.
class PartialSoftmax {
 public:
  PartialSoftmax(std::int64_t heads, std::int64_t width)
      : heads_(heads),
        width_(width),
        out_(heads * width),
        max_(static_cast<std::size_t>(heads)),
        sum_(static_cast<std::size_t>(heads)) {
    clear();
  }

  void clear() {
    empty_ = true;
    std::fill(max_.begin(), max_.end(), -kInfinity);
    std::fill(sum_.begin(), sum_.end(), 0.0);
  }

  // Sets the softmax of one tile: products [heads, count] of queries and keys, which are overwritten, and values
  // [count, width].
  void set(const Products& products, float* scores, std::int64_t score_stride, float sm_scale, const float* values,
           std::int64_t value_stride, std::int64_t count) {
    const auto n = static_cast<std::size_t>(count);
    for (std::int64_t h = 0; h < heads_; ++h) {
      float* row = scores + h * score_stride;
      max(h) = max_or_nan(row, sm_scale, n);
      sum(h) = static_cast<double>(exp_sum(row, sm_scale, max(h) == -kInfinity ? 0 : max(h), n));
    }
    products.nn(heads_, width_, count, scores, score_stride, values, value_stride, false, out_.get(), width_);
    empty_ = false;
  }

  // Merges `later` as if its tiles had been added here. Changes `later`.
  void merge(PartialSoftmax& later) {
    if (later.empty_) return;
    if (empty_) {
      std::swap(*this, later);
      return;
    }
    for (std::int64_t h = 0; h < heads_; ++h) {
      raise_max(h, later.max(h));
      later.raise_max(h, max(h));
      sum(h) += later.sum(h);
      cpu::add(later.out(h), out(h), static_cast<std::size_t>(width_));
    }
  }

  [[nodiscard]] double lse(std::int64_t h) { return sum(h) == 0 ? kInfinity : max(h) + std::log(sum(h)); }
  double& max(std::int64_t h) { return max_[static_cast<std::size_t>(h)]; }
  double& sum(std::int64_t h) { return sum_[static_cast<std::size_t>(h)]; }
  float* out(std::int64_t h) { return out_.get() + h * width_; }

 private:
  void raise_max(std::int64_t h, double other) {
    if (!(other > max(h)) && !std::isnan(other)) return;
    const double factor = weight(max(h), other);
    max(h) = other;
    sum(h) *= factor;
    scale(out(h), static_cast<float>(factor), static_cast<std::size_t>(width_));
  }

  std::int64_t heads_, width_;
  Scratch<float> out_;       // [heads, width]; not initialised while empty
  std::vector<double> max_;  // [heads], not rounded
  std::vector<double> sum_;  // [heads], of exp(score - max)
  bool empty_ = true;
};

class Worker {
 public:
  explicit Worker(const Problem& problem)
      : p_(problem),
        selected_(problem.selection, problem.kv, problem.window, problem.window_kv),
        q_(problem.h_q * problem.d_qk),
        score_stride_(selected_.tile_entries()),
        scores_(problem.h_q * score_stride_) {}

  void attend(std::int64_t s, std::int64_t tile, PartialSoftmax& softmax) {
    softmax.clear();
    selected_.clear();
    const std::int64_t count = selected_.append(s, tile).count();
    if (count == 0) return;
    load_heads(p_.q, s, q_.get(), p_.d_qk);
    products_.nt(p_.h_q, count, p_.d_qk, q_.get(), p_.d_qk, selected_.rows(), p_.d_qk, false, scores_.get(),
                 score_stride_);
    softmax.set(products_, scores_.get(), score_stride_, p_.sm_scale, selected_.rows(), p_.d_qk, count);
  }

 private:
  const Problem& p_;
  SelectedRows selected_;
  Scratch<float> q_;  // [h_q, d_qk]
  std::int64_t score_stride_;
  Scratch<float> scores_;  // [h_q, tile]
  Products products_;
};

// Writes query s from its complete softmax.
void store(const Problem& p, std::int64_t s, PartialSoftmax& softmax) {
  for (std::int64_t h = 0; h < p.h_q; ++h) {
    const double lse = softmax.lse(h), sum = softmax.sum(h);
    if (sum == 0) {
      std::fill_n(softmax.out(h), p.d_v, 0.0F);
    } else {
      const double sink =
          p.attn_sink ? static_cast<double>(p.attn_sink.as<const float>()[h * p.attn_sink.stride[0]]) : -kInfinity;
      scale(softmax.out(h), static_cast<float>(1 / (sum * (1 + std::exp(sink - lse)))),
            static_cast<std::size_t>(p.d_v));
    }
    if (p.max_logits)
      p.max_logits.as<float>()[s * p.max_logits.stride[0] + h * p.max_logits.stride[1]] =
          static_cast<float>(softmax.max(h));
    if (p.lse) p.lse.as<float>()[s * p.lse.stride[0] + h * p.lse.stride[1]] = static_cast<float>(lse);
  }
  store_heads(softmax.out(0), p.d_v, p.out, s, 0, p.d_v);
}

// Every tile has its own softmax. The softmaxes of a query are merged in order, for any assignment to threads.
// So neither the number of threads nor the number of queries changes a bit.
void launch(const Problem& p, Stream) {
  constexpr std::int64_t kEnoughItems = 16;
  if (p.s_q == 0) return;
  const std::int64_t tiles = SelectedRows::tiles(SelectedRows::entries(p.topk, p.window));
  struct State {
    Worker worker;
    PartialSoftmax tile, query;
  };
  const auto make_state = [&] { return State{Worker(p), PartialSoftmax(p.h_q, p.d_v), PartialSoftmax(p.h_q, p.d_v)}; };
  if (tiles == 1 || p.s_q >= kEnoughItems) {
    parallel_for(p.s_q, make_state, [&](std::int64_t s, State& state) {
      state.query.clear();
      for (std::int64_t tile = 0; tile < tiles; ++tile) {
        interruption_point();  // an item may be all keys
        state.worker.attend(s, tile, state.tile);
        state.query.merge(state.tile);
      }
      store(p, s, state.query);
    });
    return;
  }
  PartialSoftmax query(p.h_q, p.d_v);  // softmax of the current query
  Turns turns(1);
  parallel_for(p.s_q * tiles, make_state, [&](std::int64_t item, State& state) {
    const std::int64_t s = item / tiles, tile = item % tiles;
    state.worker.attend(s, tile, state.tile);
    turns.in_turn(0, item, [&] {
      if (tile == 0) query.clear();
      query.merge(state.tile);
      if (tile == tiles - 1) store(p, s, query);
    });
  });
}

const runtime::Registration cpu{"cpu", launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward
