// sparse_mla_forward on the CPU: processes one tile of a query's entries at a time, window keys first, each with its
// own softmax, and merges the softmaxes of a query in order (Milakov & Gimelshein 2018, arXiv:1805.02867; tile by tile:
// Dao et al. 2022, arXiv:2205.14135).
//
//     for each tile of entries:   K = gather(window_kv, kv)       [keys, d_qk] fp32, valid entries only
//                                 S = sm_scale (q . K^T)          [h_q, keys]
//                                 P = exp(S - max)
//                                 O = P . K[:, :d_v]              [h_q, d_v]
//
// If there are few queries, threads share the tiles of a query and merge them in order. Scratch per thread, in floats:
// (h_q + tile) * d_qk + h_q * (tile + 2 d_v) with tile = min(window + topk, 512); 2.4 MB for h_q 128, d_qk 576, d_v
// 512.
#include "ops/common/partial_softmax.hpp"
#include "ops/common/selected_rows.hpp"
#include "ops/sparse_mla_forward/op.hpp"
#include "tile/cpu/turns.hpp"

namespace hopwell::ops::sparse_mla_forward {
namespace {

using namespace hopwell::cpu;

class Worker {
 public:
  explicit Worker(const Problem& problem)
      : p_(problem),
        selected_(problem.selection, problem.kv, problem.window, problem.window_kv),
        attention_(problem.h_q, problem.d_qk, selected_.tile_entries()) {}

  void attend(std::int64_t s, std::int64_t tile, PartialSoftmax& softmax) {
    softmax.clear();
    selected_.clear();
    const std::int64_t count = selected_.append(s, tile).count();
    if (count == 0) return;
    load_heads(p_.q, s, attention_.q(), p_.d_qk);
    attention_.attend(selected_.rows(), count, p_.sm_scale, softmax);
  }

 private:
  const Problem& p_;
  SelectedRows selected_;
  TileAttention attention_;
};

// Writes query s from its complete softmax.
void store(const Problem& p, std::int64_t s, PartialSoftmax& softmax) {
  for (std::int64_t h = 0; h < p.h_q; ++h) {
    const double lse = softmax.finish(h, p.attn_sink);
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
