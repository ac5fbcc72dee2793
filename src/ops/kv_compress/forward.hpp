// kv_compress on GPUs: out[j, c] = sum_e softmax_e(gate[t_e, c] + bias)[c] * kv[t_e, c] over the window of block j.
//
// A CTA takes a key tile of compressed keys and a slab of columns. See window.hpp.
#pragma once

#include "ops/kv_compress/window.hpp"
#include "tile/gpu/dependency.hpp"

namespace hopwell::ops::kv_compress::HOPWELL_TARGET {

template <class T>
struct ForwardParams {
  Operands<T> operands;
  void* out;  // bf16 or fp32 [n, d]
  int64_t out_stride;
  KeyTiles key_tiles;
  bool out_is_bf16, out_aligned;
};

template <class T>
struct ForwardStorage {
  Stage<T> stages[2];
  Partials partials;
};

// Completes the softmax of a window and writes its compressed key. A row without a window gets zeros.
template <class T>
HOPWELL_DEVICE void store_key(const ForwardParams<T>& p, int64_t row, int64_t end, const Thread& thread, Pool& pool,
                              Partials& partials) {
  if (p.operands.shape.groups > 1) partials.combine(pool, p.operands.shape.groups);
  if (thread.group != 0 || row >= end || thread.column >= p.operands.d) return;
  pool.divide();
  const int64_t at = row * p.out_stride + thread.column;
  if (p.out_is_bf16)
    Columns<arch::bf16>::store(pool.out, static_cast<arch::bf16*>(p.out) + at, p.out_aligned);
  else
    Columns<float>::store(pool.out, static_cast<float*>(p.out) + at, p.out_aligned);
}

// The windows of a key tile whose threads have several batches of entries.
template <class T, class F>
HOPWELL_DEVICE void pool_long_windows(const ForwardParams<T>& p, int64_t first, int64_t end, const Thread& thread,
                                      ForwardStorage<T>& s, const Bias<T, F>& bias) {
  const Operands<T>& o = p.operands;
  HOPWELL_NO_UNROLL
  for (; first < end; first += o.shape.rows()) {
    const int64_t row = first + thread.row;
    const Window window = row < end ? o.blocks.window(row) : Window{};
    Pool pool;
    HOPWELL_NO_UNROLL
    for (int batch = 0; batch < o.shape.batches; ++batch) {
      Entries<T, F>::copy(o, window, thread, batch, s.stages[0]);
      arch::cp_async_wait<0>();
      Entries<T, F> entries(o, window, thread, batch, s.stages[0], bias);
      pool.add(entries);
    }
    store_key(p, row, end, thread, pool, s.partials);
  }
}

template <class T, class F>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasOfSm)
    kv_compress_forward(const __grid_constant__ ForwardParams<T> p) {
  auto& s = arch::dynamic_smem<ForwardStorage<T>>();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const Operands<T>& o = p.operands;
  const auto [key_tile, slab, unused] = arch::block_index_3d();
  const Thread thread(o.shape, slab);
  const int64_t first = key_tile * p.key_tiles.rows, end = std::min(first + p.key_tiles.rows, o.blocks.n);
  const Bias<T, F> bias(o, thread);
  if (!F::exact && o.shape.batches > 1) return pool_long_windows(p, first, end, thread, s, bias);
  for_each_window<F>(o, int(first), int(end), thread, s.stages, bias,
                     [&](Entries<T, F>& entries, const Window& /*window*/, int row) {
                       Pool pool;
                       pool.add(entries);
                       store_key(p, row, end, thread, pool, s.partials);
                     });
}

}  // namespace hopwell::ops::kv_compress::HOPWELL_TARGET
