// attention_distribution on the CPU: one tile of one query's index row at a time.
//
//     K = gather(kv)                          [keys, d_qk] fp32, valid entries only
//     S = sm_scale (q . K^T)                  [h_q, keys]
//     attn[s, entry] = sum_h exp(S - lse)     heads in ascending order; lse' with a sink
//
// Scratch per thread, in floats: (h_q + tile) * d_qk + h_q * tile with tile = min(topk, 512); 1.7 MB for h_q 128, d_qk
// 576.
#include <cmath>

#include "ops/attention_distribution/op.hpp"
#include "ops/common/normalize_row.hpp"
#include "ops/common/selected_rows.hpp"
#include "tile/cpu/product.hpp"
#include "tile/cpu/vector.hpp"

namespace hopwell::ops::attention_distribution {
namespace {

using namespace hopwell::cpu;

class Worker {
 public:
  explicit Worker(const Problem& problem)
      : p_(problem),
        selected_(problem.selection, problem.kv),
        q_(problem.h_q * problem.d_qk),
        scores_(problem.h_q * selected_.tile_entries()) {}

  void distribute(std::int64_t s, std::int64_t tile) {
    selected_.clear();
    const std::int64_t count = selected_.append(s, tile).selected;
    if (count > 0) {
      load_heads(p_.q, s, q_.get(), p_.d_qk);
      products_.nt(p_.h_q, count, p_.d_qk, q_.get(), p_.d_qk, selected_.rows(), p_.d_qk, false, scores_.get(), count);
      sum_over_heads(s, count);
    }
    selected_.spread(s, tile, scores_.get(), p_.attn.as<float>() + s * p_.attn.stride[0]);
  }

 private:
  // Converts the products to probabilities, and the first row to the sum over all rows.
  void sum_over_heads(std::int64_t s, std::int64_t count) {
    const auto n = static_cast<std::size_t>(count);
    float* total = scores_.get();
    for (std::int64_t h = 0; h < p_.h_q; ++h) {
      float* row = scores_.get() + h * count;
      const double lse = lse_of(s, h);
      if (lse == std::numeric_limits<double>::infinity())
        std::fill_n(row, n, 0.0F);
      else
        exp_sum(row, p_.sm_scale, lse, n);
      if (h > 0) add(row, total, n);
    }
  }

  // lse, with a sink log(exp(lse) + exp(attn_sink)).
  [[nodiscard]] double lse_of(std::int64_t s, std::int64_t h) const {
    const auto lse = static_cast<double>(p_.lse.as<const float>()[s * p_.lse.stride[0] + h * p_.lse.stride[1]]);
    if (!p_.attn_sink || lse == std::numeric_limits<double>::infinity()) return lse;
    const auto sink = static_cast<double>(p_.attn_sink.as<const float>()[h * p_.attn_sink.stride[0]]);
    if (sink == -std::numeric_limits<double>::infinity()) return lse;
    const double high = lse > sink ? lse : sink, low = lse > sink ? sink : lse;
    return high + std::log1p(std::exp(low - high));
  }

  const Problem& p_;
  SelectedRows selected_;
  Scratch<float> q_;       // [h_q, d_qk]
  Scratch<float> scores_;  // [h_q, keys]
  Products products_;
};

void launch(const Problem& p, Stream) {
  if (p.s_q == 0 || p.topk == 0) return;
  const std::int64_t tiles = SelectedRows::tiles(p.topk);
  parallel_for(
      p.s_q * tiles, [&] { return Worker(p); },
      [&](std::int64_t item, Worker& worker) { worker.distribute(item / tiles, item % tiles); });
  if (!p.normalize_l1) return;
  parallel_for(p.s_q, [&](std::int64_t s) {
    float* const row = p.attn.as<float>() + s * p.attn.stride[0];
    normalize_row(row, p.topk, row);
  });
}

const runtime::Registration cpu{"cpu", launch};

}  // namespace
}  // namespace hopwell::ops::attention_distribution
