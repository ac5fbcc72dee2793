// sparse_mla_backward on the CPU: one tile of one query's entries at a time, window keys first, its gradients added in
// a fixed order.
//
//     K  = gather(window_kv, kv)               [keys, d_qk] fp32, valid entries only
//     S  = sm_scale (q . K^T)                  [h_q, keys]
//     dP = d_out . K[:, :d_v]^T                [h_q, keys]
//     P  = exp(S - lse) / (1 + exp(sink - lse)),  dS = sm_scale P * (dP - delta)
//     dq           += dS . K                   [h_q, d_qk]
//     dkv[keys, :] += [dS; P]^T . [q; d_out]   [keys, d_qk]    the two products of the first d_v columns as one
//     d_window_kv  the same for the window's keys
//
// Threads compute tiles at the same time, and each tile adds to dq, dkv and d_window_kv. The additions are ordered:
// each column stripe receives the tiles in ascending order of query and tile. So results do not depend on the number
// of threads, and every call is deterministic. This costs a few percent.
//
// Scratch of a thread, in floats: (3 h_q + tile) * d_qk + 2 h_q * tile with tile = min(window + topk, 512), and as
// many keys; 2.6 MB for h_q 128, d_qk 576. One call adds h_q * d_qk if window + topk > 512, and (s_kv + s_w) * d_qk if
// dkv and d_window_kv are bf16, since sums are fp32.
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "ops/common/selected_rows.hpp"
#include "ops/sparse_mla_backward/op.hpp"
#include "tile/cpu/product.hpp"
#include "tile/cpu/turns.hpp"
#include "tile/cpu/vector.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

using namespace hopwell::cpu;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kStripe = 128;  // columns of dq and dkv that one thread at a time adds to

float at(const View& matrix, std::int64_t row, std::int64_t column) {
  return matrix.as<const float>()[row * matrix.stride[0] + column * matrix.stride[1]];
}

// Divides a problem into items of work. The shape alone decides, so that results do not depend on the number of
// threads. An item is a tile of one query's entries. If a query has one tile, an item is as many queries as fill a
// tile, because ordered additions have a cost per item.
struct Items {
  explicit Items(const Problem& p) {
    constexpr std::int64_t kEnough = 16;
    const std::int64_t entries = SelectedRows::entries(p.topk, p.window);
    tiles = SelectedRows::tiles(entries);
    const std::int64_t fitting = kTileEntries / std::max<std::int64_t>(entries, 1);
    queries = std::max<std::int64_t>(1, std::min(fitting, p.s_q / kEnough));
    count = tiles > 1 ? p.s_q * tiles : (p.s_q + queries - 1) / queries;
  }
  std::int64_t tiles;    // of a query
  std::int64_t queries;  // an item; 1 if there are several tiles
  std::int64_t count;
};

// fp32 sums of a gradient of keys: in the output, or in memory of their own if it is bf16.
struct KeySums {
  explicit KeySums(const View& view) : output(view) {
    if (!output) return;
    if (output.dtype == DType::kFloat32) {
      sums = output.as<float>();
      stride = output.stride[0];
    } else {
      wide.emplace(output.shape[0] * output.shape[1]);
      sums = wide->get();
      stride = output.shape[1];
    }
  }

  void clear() const {
    for_row_blocks([&](std::int64_t t) { std::fill_n(sums + t * stride, output.shape[1], 0.0F); });
  }
  void round() const {
    if (!wide) return;
    for_row_blocks([&](std::int64_t t) {
      from_float(sums + t * stride, output.as<bfloat16>() + t * output.stride[0],
                 static_cast<std::size_t>(output.shape[1]));
    });
  }
  void add_columns(const float* rows, std::int64_t row_stride, const std::int32_t* keys, std::int64_t count,
                   std::int64_t first, std::int64_t width) const {
    scatter_add_rows(rows + first, static_cast<std::size_t>(row_stride), keys, static_cast<std::size_t>(count),
                     static_cast<std::size_t>(width), sums + first, stride);
  }

  const View& output;  // [rows, d_qk], or absent
  std::optional<Scratch<float>> wide;
  float* sums = nullptr;
  std::int64_t stride = 0;

 private:
  // Calls body(t) for all rows, blocks of rows in parallel.
  template <class Body>
  void for_row_blocks(Body body) const {
    constexpr std::int64_t kBlock = 64;
    const std::int64_t rows = output ? output.shape[0] : 0;
    parallel_for((rows + kBlock - 1) / kBlock, [&](std::int64_t block) {
      for (std::int64_t t = block * kBlock; t < std::min(rows, (block + 1) * kBlock); ++t) body(t);
    });
  }
};

// State shared by the threads: the sums, and the order in which threads add to them.
struct Sums {
  Sums(const Problem& p, const Items& items)
      : several_tiles(items.tiles > 1),
        stripes(p.dkv || p.d_window_kv || (p.dq && several_tiles) ? (p.d_qk + kStripe - 1) / kStripe
                : p.d_sink                                        ? 1
                                                                  : 0),
        turns(stripes),
        dkv(p.dkv),
        d_window_kv(p.d_window_kv),
        d_sink(static_cast<std::size_t>(p.h_q)) {
    if (p.dq && several_tiles) dq.emplace(p.h_q * p.d_qk);
  }

  bool several_tiles;
  std::int64_t stripes;
  Turns turns;                       // a station a stripe; d_sink is added to at the first
  std::optional<Scratch<float>> dq;  // [h_q, d_qk] of the query whose turn it is, if it has several tiles
  KeySums dkv, d_window_kv;
  std::vector<double> d_sink;  // [h_q]
};

class Worker {
 public:
  Worker(const Problem& problem, const Items& items, Sums& sums)
      : p_(problem),
        items_(items),
        sums_(sums),
        selected_(problem.selection, problem.kv, problem.window, problem.window_kv, items.queries),
        parts_(static_cast<std::size_t>(items.queries)),
        queries_(2 * problem.h_q * problem.d_qk),
        weights_(2 * problem.h_q * selected_.tile_entries()),
        dq_(problem.h_q * problem.d_qk),
        distribution_(selected_.tile_entries()),
        heads_(static_cast<std::size_t>(problem.h_q)),
        d_sink_(static_cast<std::size_t>(problem.h_q)) {}

  // Must not throw: other threads wait for this item's turn to pass.
  void differentiate(std::int64_t item) {
    selected_.clear();
    std::fill(d_sink_.begin(), d_sink_.end(), 0.0);
    const std::int64_t first = item / items_.tiles * items_.queries, last = std::min(first + items_.queries, p_.s_q);
    std::fill(parts_.begin(), parts_.end(), SelectedRows::Part{});
    for (std::int64_t s = first; s < last; ++s) {
      SelectedRows::Part& part = parts_[static_cast<std::size_t>(s - first)];
      part = selected_.append(s, item % items_.tiles);
      count_ = part.count();
      differentiate(s, item % items_.tiles);
    }
    for (std::int64_t stripe = 0; stripe < sums_.stripes; ++stripe) {
      sums_.turns.in_turn(stripe, item, [&] { commit(stripe, first, item % items_.tiles); });
    }
  }

 private:
  struct Head {
    float lse = 0;
    float delta = 0;       // sum_d out * d_out
    float sink_scale = 1;  // 1 / (1 + exp(sink - lse)), the share of the softmax that the sink leaves to the keys
    double sink_probability = 0;  // 1 / (1 + exp(lse - sink)), its own
  };

  float* q() const { return queries_.get(); }                                // [h_q, d_qk]
  float* d_out() const { return queries_.get() + p_.h_q * p_.d_qk; }         // [h_q, d_v], row stride d_qk
  float* ds() const { return weights_.get(); }                               // [h_q, count]; before, dP
  float* probabilities() const { return weights_.get() + p_.h_q * count_; }  // [h_q, count]; before, q . K^T
  float* k() const { return selected_.rows() + (selected_.count() - count_) * p_.d_qk; }  // [count, d_qk]; later, dkv

  void differentiate(std::int64_t s, std::int64_t tile) {
    const bool counts_for_sink = p_.d_sink && tile == 0;
    if (count_ > 0 || counts_for_sink) load_query(s);
    if (counts_for_sink) add_d_sink();
    if (count_ > 0) compute();
    if (p_.attn && p_.topk > 0) store_attn(s, tile);
    if (p_.dq && !sums_.several_tiles) store_dq(s);
  }

  // Converts q and d_out, and computes what each head needs beside the scores. A sink only scales P.
  void load_query(std::int64_t s) {
    load_heads(p_.q, s, q(), p_.d_qk);
    load_heads(p_.d_out, s, d_out(), p_.d_qk);
    load_heads(p_.out, s, dq_.get(), p_.d_qk);
    for (std::int64_t h = 0; h < p_.h_q; ++h) {
      const float lse = at(p_.lse, s, h);
      Head& head = heads_[static_cast<std::size_t>(h)];
      head = {.lse = lse,
              .delta = dot(dq_.get() + h * p_.d_qk, d_out() + h * p_.d_qk, static_cast<std::size_t>(p_.d_v))};
      if (!p_.attn_sink || lse == kInfinity) continue;
      const double above = sink(h) - static_cast<double>(lse);
      head.sink_scale = static_cast<float>(1 / (1 + std::exp(above)));
      head.sink_probability = 1 / (1 + std::exp(-above));
    }
  }

  [[nodiscard]] double sink(std::int64_t h) const {
    return static_cast<double>(p_.attn_sink.as<const float>()[h * p_.attn_sink.stride[0]]);
  }

  void add_d_sink() {
    for (std::int64_t h = 0; h < p_.h_q; ++h) {
      const Head& head = heads_[static_cast<std::size_t>(h)];
      if (std::isfinite(sink(h)) && head.lse != kInfinity)
        d_sink_[static_cast<std::size_t>(h)] -= head.sink_probability * static_cast<double>(head.delta);
    }
  }

  // The tile's dq, its rows of dkv (in place of K), and the distribution.
  void compute() {
    const bool of_keys = p_.dkv || p_.d_window_kv, gradients = p_.dq || of_keys;
    if (!gradients && !p_.attn) return;
    products_.nt(p_.h_q, count_, p_.d_qk, q(), p_.d_qk, k(), p_.d_qk, false, probabilities(), count_);
    if (gradients) products_.nt(p_.h_q, count_, p_.d_v, d_out(), p_.d_qk, k(), p_.d_qk, false, ds(), count_);
    weigh(gradients);
    if (p_.dq) products_.nn(p_.h_q, p_.d_qk, count_, ds(), count_, k(), p_.d_qk, false, dq_.get(), p_.d_qk);
    if (!of_keys) return;
    products_.tn(count_, p_.d_v, 2 * p_.h_q, ds(), count_, q(), p_.d_qk, false, k(), p_.d_qk);
    if (p_.d_v == p_.d_qk) return;
    products_.tn(count_, p_.d_qk - p_.d_v, p_.h_q, ds(), count_, q() + p_.d_v, p_.d_qk, false, k() + p_.d_v, p_.d_qk);
  }

  // q . K^T and dP become P and dS, row by row; their sums over heads the distribution.
  void weigh(bool gradients) {
    const auto n = static_cast<std::size_t>(count_);
    std::fill_n(distribution_.get(), n, 0.0F);
    for (std::int64_t h = 0; h < p_.h_q; ++h) {
      const Head& head = heads_[static_cast<std::size_t>(h)];
      float* row = probabilities() + h * count_;
      if (head.lse == kInfinity)
        std::fill_n(row, n, 0.0F);  // all of its scores are -inf
      else
        exp_sum(row, p_.sm_scale, head.lse, n);
      if (p_.attn && !p_.attn_with_sink) add(row, distribution_.get(), n);
      if (gradients)
        softmax_gradient(row, ds() + h * count_, head.sink_scale, head.delta, p_.sm_scale, n);
      else if (p_.attn_with_sink)
        scale(row, head.sink_scale, n);
      if (p_.attn_with_sink) add(row, distribution_.get(), n);
    }
  }

  void store_attn(std::int64_t s, std::int64_t tile) {
    selected_.spread(s, tile, distribution_.get(), p_.attn.as<float>() + s * p_.attn.stride[0]);
  }

  void store_dq(std::int64_t s) {
    if (count_ == 0) std::fill_n(dq_.get(), p_.h_q * p_.d_qk, 0.0F);
    store_heads(dq_.get(), p_.d_qk, p_.dq, s, 0, p_.d_qk);
  }

  // Adds one column stripe of the item to the sums.
  void commit(std::int64_t stripe, std::int64_t s, std::int64_t tile) {
    const std::int64_t first = stripe * kStripe, width = std::min(kStripe, p_.d_qk - first);
    std::int64_t from = 0;  // row of the item
    for (const SelectedRows::Part& part : parts_) {
      if (p_.d_window_kv) add_to(sums_.d_window_kv, from, part.of_window, first, width);
      if (p_.dkv) add_to(sums_.dkv, from + part.of_window, part.selected, first, width);
      from += part.count();
    }
    if (sums_.dq) add_dq(s, tile, first, width);
    for (std::size_t h = 0; p_.d_sink && stripe == 0 && h < d_sink_.size(); ++h) sums_.d_sink[h] += d_sink_[h];
  }

  void add_to(const KeySums& sums, std::int64_t from, std::int64_t count, std::int64_t first, std::int64_t width) {
    sums.add_columns(selected_.rows() + from * p_.d_qk, p_.d_qk, selected_.keys() + from, count, first, width);
  }

  // Columns of the running query's dq: set by its first tile, added to by the others that have keys, and written to the
  // output by the last. So tiles of padding change no bit: 0 + -0.0 would be 0.
  void add_dq(std::int64_t s, std::int64_t tile, std::int64_t first, std::int64_t width) {
    const auto n = static_cast<std::size_t>(width);
    for (std::int64_t h = 0; h < p_.h_q; ++h) {
      float* sum = sums_.dq->get() + h * p_.d_qk + first;
      const float* own = dq_.get() + h * p_.d_qk + first;
      if (tile > 0 && count_ > 0)
        add(own, sum, n);
      else if (tile == 0 && count_ > 0)
        std::copy_n(own, n, sum);
      else if (tile == 0)
        std::fill_n(sum, n, 0.0F);
    }
    if (tile == items_.tiles - 1) store_heads(sums_.dq->get() + first, p_.d_qk, p_.dq, s, first, width);
  }

  const Problem& p_;
  const Items& items_;
  Sums& sums_;
  SelectedRows selected_;
  std::vector<SelectedRows::Part> parts_;  // of the item's queries
  std::int64_t count_ = 0;                 // valid entries of the tile at hand
  Scratch<float> queries_, weights_;       // q and d_out; dS and P
  Scratch<float> dq_;                      // [h_q, d_qk]; before, out [h_q, d_v]
  Scratch<float> distribution_;            // [count]
  std::vector<Head> heads_;                // [h_q]
  std::vector<double> d_sink_;             // [h_q], of the item
  Products products_;
};

void launch(const Problem& p, Stream) {
  const Items items(p);
  Sums sums(p, items);
  if (!p.accumulate) {
    sums.dkv.clear();
    sums.d_window_kv.clear();
  }
  const auto make_worker = [&] { return Worker(p, items, sums); };
  parallel_for(items.count, make_worker, [](std::int64_t item, Worker& worker) { worker.differentiate(item); });
  sums.dkv.round();
  sums.d_window_kv.round();
  for (std::int64_t h = 0; p.d_sink && h < p.h_q; ++h) {
    p.d_sink.as<float>()[h * p.d_sink.stride[0]] = static_cast<float>(sums.d_sink[static_cast<std::size_t>(h)]);
  }
}

const runtime::Registration cpu{"cpu", launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward
