// kv_compress on GPUs: out[j, c] = sum_e softmax_e(gate[t_e, c] + bias)[c] * kv[t_e, c] over the window of block j.
//
// A CTA takes a few compressed keys and a slab of columns. See window.hpp.
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
struct ForwardStorage {
  Stage<T> stage;
  Partials partials;
};

template <class T, class F>
__global__ void __launch_bounds__(Config::kThreads, F::exact ? 4 : 2)
    kv_compress_forward(const __grid_constant__ ForwardParams<T> p) {
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const Operands<T>& o = p.operands;
  const auto [key_tile, slab, unused] = arch::block_index_3d();
  const Thread thread(o.shape, slab);
  const int64_t row = (int64_t{key_tile} << o.shape.row_bits) + thread.row;
  const Window window = row < o.blocks.n ? o.blocks.window(row) : Window{};
  auto& s = arch::dynamic_smem<ForwardStorage<T>>();
  const Bias<T, F, false> bias(o, thread);
  Pool pool;
  HOPWELL_NO_UNROLL
  for (int batch = 0; batch < (F::exact ? 1 : o.shape.batches); ++batch) {
    Entries<T, F>::copy(o, window, thread, batch, s.stage);
    arch::cp_async_wait<0>();
    Entries<T, F> entries(o, window, thread, batch, s.stage, bias);
    pool.add(entries);
  }
  if (o.shape.groups > 1) s.partials.combine(pool, o.shape.groups);
  if (thread.group != 0 || row >= o.blocks.n || thread.column >= o.d) return;
  pool.divide();
  const int64_t at = row * p.out_stride + thread.column;
  if (p.out_is_bf16)
    Columns<arch::bf16>::store(pool.out, static_cast<arch::bf16*>(p.out) + at, p.out_aligned);
  else
    Columns<float>::store(pool.out, static_cast<float*>(p.out) + at, p.out_aligned);
}

}  // namespace hopwell::ops::kv_compress::HOPWELL_TARGET
