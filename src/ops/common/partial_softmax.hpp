// Attention of one query on the CPU, which sparse_mla_forward and sparse_mla_decode share: a softmax for each tile of
// keys, the merge of softmaxes (Milakov & Gimelshein 2018, arXiv:1805.02867), and the final values of a query.
#pragma once

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "runtime/check.hpp"
#include "tile/cpu/parallel.hpp"
#include "tile/cpu/product.hpp"
#include "tile/cpu/vector.hpp"

namespace hopwell::cpu {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

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

  // Divides a head's row by its sum, if all its tiles are merged, and multiplies it by `factor`. Returns its lse.
  double finish(std::int64_t h, const View& attn_sink, double factor = 1) {
    const double lse = this->lse(h);
    if (sum(h) == 0) {
      std::fill_n(out(h), width_, 0.0F);
    } else {
      const double sink =
          attn_sink ? static_cast<double>(attn_sink.as<const float>()[h * attn_sink.stride[0]]) : -kInfinity;
      scale(out(h), static_cast<float>(factor / (sum(h) * (1 + std::exp(sink - lse)))),
            static_cast<std::size_t>(width_));
    }
    return lse;
  }

  [[nodiscard]] double lse(std::int64_t h) { return sum(h) == 0 ? kInfinity : max(h) + std::log(sum(h)); }
  double& max(std::int64_t h) { return max_[static_cast<std::size_t>(h)]; }
  double& sum(std::int64_t h) { return sum_[static_cast<std::size_t>(h)]; }
  float* out(std::int64_t h) { return out_.get() + h * width_; }

 private:
  // exp(x - shift), where x may be -inf. A shift of -inf means that all values are -inf.
  static double weight(double x, double shift) { return shift == -kInfinity ? 0 : std::exp(x - shift); }

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

// Scores of a query's heads and one tile of keys, and their softmax.
class TileAttention {
 public:
  // tile: the most keys of a tile.
  TileAttention(std::int64_t heads, std::int64_t d_qk, std::int64_t tile)
      : heads_(heads), d_qk_(d_qk), tile_(tile), q_(heads * d_qk), scores_(heads * tile) {}

  // Sets `softmax` from `count` keys, rows [count, d_qk]. q() has the query's heads.
  void attend(const float* rows, std::int64_t count, float sm_scale, PartialSoftmax& softmax) {
    products_.nt(heads_, count, d_qk_, q_.get(), d_qk_, rows, d_qk_, false, scores_.get(), tile_);
    softmax.set(products_, scores_.get(), tile_, sm_scale, rows, d_qk_, count);
  }

  [[nodiscard]] float* q() const { return q_.get(); }  // [heads, d_qk]

 private:
  std::int64_t heads_, d_qk_, tile_;
  Scratch<float> q_, scores_;  // [heads, d_qk], [heads, tile]
  Products products_;
};

}  // namespace hopwell::cpu
