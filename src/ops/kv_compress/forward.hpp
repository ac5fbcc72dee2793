// kv_compress on GPUs: out[j, c] = sum_e softmax_e(gate[t_e, c] + bias)[c] * kv[t_e, c] over the window of block j.
//
// A CTA takes a tile of compressed keys and a slab of columns. See window.hpp.
#pragma once

#include <algorithm>

#include "ops/kv_compress/window.hpp"
#include "tile/gpu/dependency.hpp"

namespace hopwell::ops::kv_compress::HOPWELL_TARGET {

template <class T>
struct ForwardParams {
  Operands<T> operands;
  void* out;  // bf16 or fp32 [n, d]
  int64_t out_stride;
  int key_tile_rows;  // compressed keys that a CTA takes
  bool out_is_bf16, out_aligned;
};

template <class T>
struct ForwardStorage {
  Stage<T> stages[2];
  Partials partials;
};

template <class T>
HOPWELL_DEVICE void store_key(const ForwardParams<T>& p, int64_t row, const Thread& thread, Pool& pool) {
  pool.divide();
  const int64_t at = row * p.out_stride + thread.column;
  if (p.out_is_bf16)
    Columns<arch::bf16>::store(pool.out, static_cast<arch::bf16*>(p.out) + at, p.out_aligned);
  else
    Columns<float>::store(pool.out, static_cast<float*>(p.out) + at, p.out_aligned);
}

// The next window's entries are copied while one is computed; of windows with several batches, the next batch's.
template <class T, class F>
__global__ void __launch_bounds__(Config::kThreads, 2) kv_compress_forward(const __grid_constant__ ForwardParams<T> p) {
  auto& s = arch::dynamic_smem<ForwardStorage<T>>();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const Operands<T>& o = p.operands;
  const auto [key_tile, slab, unused] = arch::block_index_3d();
  const Thread thread(o.shape, slab);
  const Bias<T, F> bias(o, thread);
  const int64_t first = key_tile * int64_t{p.key_tile_rows}, end = std::min(first + p.key_tile_rows, o.blocks.n);
  const int batches = F::exact ? 1 : o.shape.batches;
  const auto window_of = [&](int64_t row) { return row < end ? o.blocks.window(row) : Window{}; };
  int64_t row = first + thread.row;
  Window window = window_of(row);
  Entries<T, F>::copy(o, window, thread, 0, s.stages[0]);
  int stage = 0;
  HOPWELL_NO_UNROLL
  for (int64_t step = first; step < end; step += o.shape.rows()) {
    const Window next = window_of(row + o.shape.rows());
    Pool pool;
    HOPWELL_NO_UNROLL
    for (int batch = 0; batch < batches; ++batch, stage ^= 1) {
      const bool last = batch == batches - 1;
      Window following = window;  // field by field: a choice by address would use local memory
      if (last) following = next;
      if (!last || step + o.shape.rows() < end)
        Entries<T, F>::copy(o, following, thread, last ? 0 : batch + 1, s.stages[stage ^ 1]);
      else
        arch::cp_async_commit();
      arch::cp_async_wait<1>();
      Entries<T, F> entries(o, window, thread, batch, s.stages[stage], bias);
      pool.add(entries);
    }
    if (o.shape.groups > 1) s.partials.combine(pool, o.shape.groups);
    if (thread.group == 0 && row < end && thread.column < o.d) store_key(p, row, thread, pool);
    window = next, row += o.shape.rows();
  }
}

}  // namespace hopwell::ops::kv_compress::HOPWELL_TARGET
