// kv_compress_backward on GPUs: with the weights w_e and out of each window, computed again,
//
//     d_kv[t_e, c] = w_e * d_out[j, c],   d_gate[t_e, c] = w_e * d_out[j, c] * (kv[t_e, c] - out[j, c])
//
// and d_position_bias, the sum of d_gate over all windows.
//
// Roles     the first CTAs: a key tile of compressed keys and a slab of columns each. Every element of d_kv and d_gate
//           belongs to one window at most, so it is written once.
//           the other CTAs: zeros for elements that are in no window
// Sums      of d_position_bias: a thread adds its own entries, in exact forms in shared memory, in others in a plane of
//           the workspace for each key that the CTA processes at a time. The CTA adds the sums of these keys and
//           writes a plane. kv_compress_sum_planes adds the planes of all CTAs in a fixed order.
// Bits      are the same in all forms: the same additions in the same order
#pragma once

#include <algorithm>

#include "ops/kv_compress/window.hpp"
#include "tile/gpu/dependency.hpp"

namespace hopwell::ops::kv_compress::HOPWELL_TARGET {

template <class T>
struct BackwardParams {
  Operands<T> operands;
  const void* d_out;  // bf16 or fp32 [n, d]
  T *d_kv, *d_gate;   // [s, w], or null
  float* planes;      // [key tiles, planes of a tile, ratio, w]; null: no d_position_bias
  int64_t d_out_stride, d_kv_stride, d_gate_stride;
  KeyTiles key_tiles;
  bool d_out_is_bf16, d_out_aligned, gradients_aligned;
};

template <class T, class F>
struct BackwardStorage : Storage<T, F> {
  Float4 sums[Config::kEntries][Config::kThreads];  // of d_position_bias, in exact forms
};

// A thread's sums of d_position_bias, one for each of its entries.
template <class T, class F>
struct BiasSums {
  const Operands<T>& o;
  const Thread& thread;
  Float4 (*shared)[Config::kThreads] = nullptr;  // of exact forms
  float* plane;

  HOPWELL_DEVICE BiasSums(const BackwardParams<T>& p, const Thread& of_thread, int key_tile, BackwardStorage<T, F>& s)
      : o(p.operands), thread(of_thread), plane(p.planes) {
    if (plane == nullptr) return;
    if constexpr (F::exact) shared = s.sums;
    plane += int64_t{key_tile} * (F::exact ? 1 : o.shape.keys_at_once()) * o.ratio * o.w;
    for (int batch = 0; batch < o.shape.batches; ++batch)
      for (int e = 0; e < F::entries; ++e)
        if (Float4* sum = of_entry(batch, e)) *sum = {};
  }
  HOPWELL_DEVICE Float4* of_entry(int batch, int e) const {
    return F::exact ? &shared[e][arch::thread_index()] : in_plane(batch, e, thread.key);
  }
  // In the plane of a key of the CTA. Null if no window has such an entry.
  HOPWELL_DEVICE Float4* in_plane(int batch, int e, int key) const {
    const Batch<T, F> entries(o, thread, batch);
    if (!entries.has(e, true) || thread.column >= o.d) return nullptr;
    return reinterpret_cast<Float4*>(plane + (int64_t{key} * o.ratio + entries.bias_row(e)) * o.w + entries.column(e) +
                                     thread.column);
  }
};

// Gradients of a thread's entries of one batch: `entries.gate` times `weighted_d_out`, which weigh_d_out has made, is
// weight times d_out.
template <class T, class F>
HOPWELL_DEVICE void store_gradients(const BackwardParams<T>& p, const Window& window, const Thread& thread, int batch,
                                    const Entries<T, F>& entries, const Pool& pool,
                                    const float (&weighted_d_out)[kColumns], const BiasSums<T, F>& sums) {
  const Batch<T, F> of(p.operands, thread, batch);
  const bool aligned = F::exact || p.gradients_aligned;
  T* to_kv = p.d_kv + of.token(window) * p.d_kv_stride + thread.column;
  T* to_gate = p.d_gate + of.token(window) * p.d_gate_stride + thread.column;
  HOPWELL_UNROLL
  for (int e = 0; e < F::entries; ++e) {
    if ((!F::exact || F::overlap) && !of.has(e, window.has_previous)) continue;
    const Columns<T> kv = entries.kv(e);
    float d_kv[kColumns], d_gate[kColumns];
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      d_kv[i] = entries.gate[e][i] * weighted_d_out[i];
      d_gate[i] = d_kv[i] * (kv[i] - pool.out[i]);
    }
    if (p.d_kv != nullptr) Columns<T>::store(d_kv, to_kv + e * p.d_kv_stride + of.column(e), aligned);
    if (p.d_gate != nullptr) Columns<T>::store(d_gate, to_gate + e * p.d_gate_stride + of.column(e), aligned);
    if (p.planes == nullptr) continue;
    Float4* const sum = sums.of_entry(batch, e);
    Float4 total = *sum;
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) total.x[i] += d_gate[i];
    *sum = total;
  }
}

// Adds the sums of a CTA's keys and writes them to its first plane. The threads of different keys share out the
// entries.
template <class T, class F>
HOPWELL_DEVICE void write_plane(const BiasSums<T, F>& sums) {
  const Shape& shape = sums.o.shape;
  arch::syncthreads();
  const int of_key_0 = arch::thread_index() - (sums.thread.key << shape.vector_bits);  // thread with the same columns
  for (int batch = 0; batch < shape.batches; ++batch) {
    for (int e = sums.thread.key; e < F::entries; e += shape.keys_at_once()) {
      Float4* const to = sums.in_plane(batch, e, 0);
      if (to == nullptr) continue;
      Float4 total{};
      for (int key = 0; key < shape.keys_at_once(); ++key)
        total += F::exact ? sums.shared[e][of_key_0 + (key << shape.vector_bits)] : *sums.in_plane(batch, e, key);
      *to = total;
    }
  }
}

// Zeros for d columns of a token, written by a warp.
template <class T>
HOPWELL_DEVICE void clear_columns(const BackwardParams<T>& p, int64_t token, int first) {
  const float zeros[kColumns] = {};
  for (int c = first + arch::lane_index() * kColumns; c < first + p.operands.d; c += 32 * kColumns) {
    if (p.d_kv != nullptr) Columns<T>::store(zeros, p.d_kv + token * p.d_kv_stride + c, p.gradients_aligned);
    if (p.d_gate != nullptr) Columns<T>::store(zeros, p.d_gate + token * p.d_gate_stride + c, p.gradients_aligned);
  }
}

// Zeros for the elements of the CTA's tokens that are in no window. A lane looks at one token, a warp writes its row.
template <class T>
HOPWELL_DEVICE void clear_unused(const BackwardParams<T>& p, int64_t first) {
  const Operands<T>& o = p.operands;
  const int64_t warp_first = first + arch::warp_index() * 32, mine = warp_first + arch::lane_index();
  const Blocks::Use use = mine < o.blocks.s ? o.blocks.use(mine) : Blocks::Use{true, true};
  const uint32_t own = arch::ballot(!use.own), next = arch::ballot(o.blocks.overlap && !use.next);
  for (int lane = 0; lane < 32; ++lane) {
    const int64_t token = warp_first + lane;
    if ((own >> lane & 1) != 0) clear_columns(p, token, o.blocks.overlap ? o.d : 0);
    if ((next >> lane & 1) != 0) clear_columns(p, token, 0);
  }
}

// d_out of a compressed key that is made.
template <class T>
HOPWELL_DEVICE void load_d_out(const BackwardParams<T>& p, int64_t key, const Thread& thread, float (&x)[kColumns]) {
  const int64_t at = key * p.d_out_stride + thread.column;
  if (p.d_out_is_bf16) {
    const auto columns = Columns<arch::bf16>::load(static_cast<const arch::bf16*>(p.d_out) + at, p.d_out_aligned);
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) x[i] = columns[i];
  } else {
    const auto columns = Columns<float>::load(static_cast<const float*>(p.d_out) + at, p.d_out_aligned);
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) x[i] = columns[i];
  }
}

// Multiplies d_out of a window by the factor of the entries' exponentials.
HOPWELL_DEVICE void weigh_d_out(const Pool& pool, const float (&entries_max)[kColumns], float (&d_out)[kColumns]) {
  HOPWELL_UNROLL
  for (int i = 0; i < kColumns; ++i) d_out[i] *= pool.sum[i] * exponential(entries_max[i], finite_max(pool.max[i]));
}

template <class T, class F>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasOfSm)
    kv_compress_backward(const __grid_constant__ BackwardParams<T> p) {
  auto& s = arch::dynamic_smem<BackwardStorage<T, F>>();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const Operands<T>& o = p.operands;
  const auto [key_tile, slab, unused] = arch::block_index_3d();
  if (key_tile >= p.key_tiles.count)
    return clear_unused(p, ((key_tile - p.key_tiles.count) * o.shape.slabs + slab) * Config::kThreads);
  const Thread thread(o.shape, slab);
  const BiasSums<T, F> sums(p, thread, key_tile, s);
  const int64_t first = key_tile * p.key_tiles.keys, end = std::min(first + p.key_tiles.keys, o.blocks.n);
  // Completes the softmax of a window, whose entries of this thread have the maximum own.max, and weighs its d_out.
  // False if the thread has no entry.
  const auto complete = [&](Pool& pool, const Pool& own, const Window& window, int64_t key, float (&d_out)[kColumns]) {
    combine_groups<T, F>(o, pool, s);
    pool.divide();
    if (!window.made || thread.column >= o.d) return false;
    load_d_out(p, key, thread, d_out);
    weigh_d_out(pool, own.max, d_out);
    return true;
  };
  if constexpr (F::exact) {
    for_each_window<F>(o, int(first), int(end), thread, s.stages,
                       [&](Entries<T, F>& entries, const Window& window, int key) {
                         Pool pool;
                         pool.add(entries);
                         const Pool own = pool;
                         float d_out[kColumns];
                         if (complete(pool, own, window, key, d_out))
                           store_gradients(p, window, thread, 0, entries, pool, d_out, sums);
                       });
  } else {
    for_each_long_window(o, first, end, thread, [&](const Window& window, int64_t key) {
      Pool pool;
      for_each_batch<F>(o, window, thread, s.stages[0],
                        [&](Entries<T, F>& entries, int /*batch*/) { pool.add(entries); });
      const Pool own = pool;
      float d_out[kColumns];
      if (!complete(pool, own, window, key, d_out)) return;
      for_each_batch<F>(o, window, thread, s.stages[0], [&](Entries<T, F>& entries, int batch) {
        own.exponentiate(entries);
        store_gradients(p, window, thread, batch, entries, pool, d_out, sums);
      });
    });
  }
  if (p.planes != nullptr) write_plane(sums);
}

// ---- d_position_bias ------------------------------------------------------------------------------------------------

struct SumParams {
  static constexpr int kUnroll = 4;  // planes whose loads a thread has in flight

  const float* planes;  // [count], every `stride` elements a plane [rows, w]
  float* out;           // [rows, w]
  int64_t count, stride, size, out_stride;
  int w;
  int splits;  // of the planes, for a CTA's threads: a power of two
};

// Adds the planes. Each split of a CTA's threads adds a range of planes. Then split 0 adds the splits in order.
__global__ void __launch_bounds__(Config::kThreads) kv_compress_sum_planes(const __grid_constant__ SumParams p) {
  constexpr int kUnroll = SumParams::kUnroll;
  auto& sums = arch::dynamic_smem<Float4[Config::kThreads]>();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const int thread = arch::thread_index(), vectors = Config::kThreads / p.splits, split = thread / vectors;
  const int64_t at = (int64_t{arch::block_index()} * vectors + thread % vectors) * kColumns;
  Float4 sum{};
  if (at < p.size) {
    const int64_t end = (split + 1) * p.count / p.splits;
    for (int64_t plane = split * p.count / p.splits; plane < end; plane += kUnroll) {
      Float4 x[kUnroll];
      HOPWELL_UNROLL
      for (int i = 0; i < kUnroll; ++i)
        x[i] = plane + i < end ? arch::load_vector<Float4>(p.planes + (plane + i) * p.stride + at) : Float4{};
      HOPWELL_UNROLL
      for (int i = 0; i < kUnroll; ++i) sum += x[i];
    }
  }
  sums[thread] = sum;
  arch::syncthreads();
  if (split != 0 || at >= p.size) return;
  for (int i = 1; i < p.splits; ++i) sum += sums[thread + i * vectors];
  float* const to = p.out + at / p.w * p.out_stride + at % p.w;
  HOPWELL_UNROLL
  for (int i = 0; i < kColumns; ++i) to[i] = sum.x[i];
}

}  // namespace hopwell::ops::kv_compress::HOPWELL_TARGET
