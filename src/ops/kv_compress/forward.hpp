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

// Completes the softmax of a window and writes its compressed key. A key without a window gets zeros.
template <class T, class F>
HOPWELL_DEVICE void store_key(const ForwardParams<T>& p, int64_t key, int64_t end, const Thread& thread, Pool& pool,
                              Storage<T, F>& s) {
  combine_groups<T, F>(p.operands, pool, s);
  if (thread.group != 0 || key >= end || thread.column >= p.operands.d) return;
  pool.divide();
  const int64_t at = key * p.out_stride + thread.column;
  if (p.out_is_bf16)
    Columns<arch::bf16>::store(pool.out, static_cast<arch::bf16*>(p.out) + at, p.out_aligned);
  else
    Columns<float>::store(pool.out, static_cast<float*>(p.out) + at, p.out_aligned);
}

template <class T, class F>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasOfSm)
    kv_compress_forward(const __grid_constant__ ForwardParams<T> p) {
  auto& s = arch::dynamic_smem<Storage<T, F>>();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const Operands<T>& o = p.operands;
  const auto [key_tile, slab, unused] = arch::block_index_3d();
  const Thread thread(o.shape, slab);
  const int64_t first = key_tile * p.key_tiles.keys, end = std::min(first + p.key_tiles.keys, o.blocks.n);
  if constexpr (F::exact) {
    const auto use = [&](Entries<T, F>& entries, const Window& /*window*/, int key) {
      Pool pool;
      pool.add(entries);
      store_key<T, F>(p, key, end, thread, pool, s);
    };
    for_each_window<F>(o, int(first), int(end), thread, s.stages, use);
  } else {
    for_each_long_window(o, first, end, thread, [&](const Window& window, int64_t key) {
      Pool pool;
      for_each_batch<F>(o, window, thread, s.stages[0],
                        [&](Entries<T, F>& entries, int /*batch*/) { pool.add(entries); });
      store_key<T, F>(p, key, end, thread, pool, s);
    });
  }
}

}  // namespace hopwell::ops::kv_compress::HOPWELL_TARGET
