// kv_compress on GPUs: out[j, c] = sum_e softmax_e(gate[t_e, c] + bias)[c] * kv[t_e, c] over the window of block j.
//
// A CTA takes `rows` compressed keys and a slab of columns. See window.hpp.
#pragma once

#include "ops/kv_compress/window.hpp"
#include "tile/gpu/dependency.hpp"

namespace hopwell::ops::kv_compress::HOPWELL_TARGET {

template <class T>
struct ForwardParams {
  Operands<T> operands;
  void* out;  // bf16 or fp32 [n, d]
  int64_t out_stride;
  bool out_is_bf16, out_aligned;
};

template <class T>
__global__ void __launch_bounds__(Config::kThreads, 2) kv_compress_forward(const __grid_constant__ ForwardParams<T> p) {
  auto& partials = arch::dynamic_smem<Partials>();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const Operands<T>& o = p.operands;
  const Thread thread(o.shape, arch::block_index() % int(o.shape.slabs));
  const int64_t row = arch::block_index() / int(o.shape.slabs) * int64_t{o.shape.rows} + thread.row;
  const Window window = row < o.blocks.n ? o.blocks.window(row) : Window{};
  Entries<T> entries;
  Pool pool;
  pool_window(o, window, thread, entries, pool, partials);
  if (thread.group != 0 || row >= o.blocks.n || thread.column >= o.d) return;
  const int64_t at = row * p.out_stride + thread.column;
  if (p.out_is_bf16)
    Columns<arch::bf16>::store(pool.out, static_cast<arch::bf16*>(p.out) + at, p.out_aligned);
  else
    Columns<float>::store(pool.out, static_cast<float*>(p.out) + at, p.out_aligned);
}

}  // namespace hopwell::ops::kv_compress::HOPWELL_TARGET
