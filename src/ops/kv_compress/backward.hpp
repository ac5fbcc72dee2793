// kv_compress_backward on GPUs: with the weights w_e and out of each window, made again,
//
//     d_kv[t_e, c] = w_e * d_out[j, c],   d_gate[t_e, c] = w_e * d_out[j, c] * (kv[t_e, c] - out[j, c])
//
// and d_position_bias, the sum of d_gate over all windows.
//
// Roles     the first CTAs: a strip of compressed keys and a slab of columns each. Every element of d_kv and d_gate
//           belongs to one window at most, so it is written once.
//           the other CTAs: zeros for elements that are in no window
// Sums      of d_position_bias: a thread adds its own entries in shared memory, or in its plane of the workspace where a
//           window has more than 128 entries. A CTA adds its rows and writes a plane. sum_planes adds planes in order.
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
  float* planes;      // [planes, ratio, w]; null: no d_position_bias
  int64_t d_out_stride, d_kv_stride, d_gate_stride;
  int strip_rows, window_ctas;
  bool d_out_is_bf16, gradients_aligned;
};

struct BackwardStorage {
  Partials partials;
  Float4 sums[Config::kEntries][Config::kThreads];  // of d_position_bias
};

// A thread's sums of d_position_bias: for each of its entries in shared memory, or in its plane if it has more than one
// batch of entries.
template <class T>
struct BiasSums {
  const Operands<T>& o;
  const Thread& thread;
  Float4* shared;
  float* plane;

  HOPWELL_DEVICE BiasSums(const BackwardParams<T>& p, const Thread& of, int strip, BackwardStorage& s)
      : o(p.operands), thread(of), shared(&s.sums[0][arch::thread_index()]), plane(p.planes) {
    if (plane == nullptr) return;
    plane += (o.shape.batches == 1 ? strip : int64_t{strip} * o.shape.rows + thread.row) * o.ratio * o.w;
    for (int batch = 0; batch < o.shape.batches; ++batch)
      for (int e = 0; e < Config::kEntries; ++e)
        if (Float4* sum = of_entry(batch, e)) *sum = {};
  }
  HOPWELL_DEVICE Float4* of_entry(int batch, int e) const {
    return o.shape.batches == 1 ? shared + e * Config::kThreads : in_plane(batch, e);
  }
  // Null if no window has such an entry.
  HOPWELL_DEVICE Float4* in_plane(int batch, int e) const {
    const int entry = first_entry(o, thread, batch) + e;
    if (!entries_of(o, true).has(entry) || thread.column >= o.d) return nullptr;
    return reinterpret_cast<Float4*>(plane + int64_t{row_of(o, entry)} * o.w + column_of(o, entry) + thread.column);
  }
};

// Gradients of a thread's entries of one batch.
template <class T>
HOPWELL_DEVICE void store_gradients(const BackwardParams<T>& p, const Window& window, const Thread& thread, int batch,
                                    const Entries<T>& entries, const Pool& pool, const float (&d_out)[kColumns],
                                    const BiasSums<T>& sums) {
  const Operands<T>& o = p.operands;
  const int first = first_entry(o, thread, batch);
  const EntryRange range = entries_of(o, window.has_previous);
  const int64_t token = first_token(o, window) + first;
  HOPWELL_UNROLL
  for (int e = 0; e < Config::kEntries; ++e) {
    if (!range.has(first + e)) continue;
    float d_kv[kColumns], d_gate[kColumns];
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      const float weight = exponential(entries.gate[e][i], pool.max[i]) * pool.sum[i];
      const bool absent = entries.gate[e][i] == -INFINITY;
      d_kv[i] = absent ? 0.F : weight * d_out[i];
      d_gate[i] = absent ? 0.F : d_kv[i] * (entries.kv[e][i] - pool.out[i]);
    }
    const int column = column_of(o, first + e) + thread.column;
    if (p.d_kv != nullptr) Columns<T>::store(d_kv, p.d_kv + (token + e) * p.d_kv_stride + column, p.gradients_aligned);
    if (p.d_gate != nullptr)
      Columns<T>::store(d_gate, p.d_gate + (token + e) * p.d_gate_stride + column, p.gradients_aligned);
    if (p.planes == nullptr) continue;
    Float4* sum = sums.of_entry(batch, e);
    Float4 total = *sum;
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) total.x[i] += d_gate[i];
    *sum = total;
  }
}

// Adds the sums of a CTA's rows and writes them to its plane.
template <class T>
HOPWELL_DEVICE void write_plane(const BiasSums<T>& sums, const BackwardStorage& s) {
  const Shape& shape = sums.o.shape;
  arch::syncthreads();
  if (sums.thread.row != 0) return;
  for (int e = 0; e < Config::kEntries; ++e) {
    Float4* to = sums.in_plane(0, e);
    if (to == nullptr) continue;
    Float4 total{};
    for (int row = 0; row < shape.rows; ++row) {
      const Float4& of_row = s.sums[e][arch::thread_index() + row * shape.vectors];
      HOPWELL_UNROLL
      for (int i = 0; i < kColumns; ++i) total.x[i] += of_row.x[i];
    }
    *to = total;
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

template <class T>
__global__ void __launch_bounds__(Config::kThreads, 2)
    kv_compress_backward(const __grid_constant__ BackwardParams<T> p) {
  auto& s = arch::dynamic_smem<BackwardStorage>();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const Operands<T>& o = p.operands;
  if (arch::block_index() >= p.window_ctas)
    return clear_unused(p, int64_t{arch::block_index() - p.window_ctas} * Config::kThreads);
  const int slabs = int(o.shape.slabs), strip = arch::block_index() / slabs;
  const Thread thread(o.shape, arch::block_index() % slabs);
  const BiasSums<T> sums(p, thread, strip, s);
  const int64_t end = std::min((strip + 1) * int64_t{p.strip_rows}, o.blocks.n);
  HOPWELL_NO_UNROLL
  for (int64_t first = strip * int64_t{p.strip_rows}; first < end; first += o.shape.rows) {
    const int64_t row = first + thread.row;
    const Window window = row < end ? o.blocks.window(row) : Window{};
    Entries<T> entries;
    Pool pool;
    pool_window(o, window, thread, entries, pool, s.partials);
    if (!window.made || thread.column >= o.d) continue;
    float d_out[kColumns];
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i)
      d_out[i] = tile::load_fp32(p.d_out, p.d_out_is_bf16, row * p.d_out_stride + thread.column + i);
    HOPWELL_NO_UNROLL
    for (int batch = 0; batch < o.shape.batches; ++batch) {
      if (o.shape.batches > 1) entries.load(o, window, thread, batch);
      store_gradients(p, window, thread, batch, entries, pool, d_out, sums);
    }
  }
  if (p.planes != nullptr && o.shape.batches == 1) write_plane(sums, s);
}

struct SumParams {
  const float* planes;  // [count, rows, w]
  float* out;           // [rows, w]
  int64_t count, out_stride;
  int rows, w;
};

// d_position_bias: a CTA adds 32 columns. Each warp adds a range of planes, then warp 0 adds the warps' sums in order.
__global__ void __launch_bounds__(Config::kThreads) kv_compress_sum_planes(const __grid_constant__ SumParams p) {
  constexpr int kWarps = Config::kThreads / 32;
  struct Storage {
    float sums[kWarps][32];
  };
  auto& s = arch::dynamic_smem<Storage>();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const int64_t size = int64_t{p.rows} * p.w, at = int64_t{arch::block_index()} * 32 + arch::lane_index();
  const int warp = arch::warp_index();
  float sum = 0;
  if (at < size) {
    const int64_t first = warp * p.count / kWarps, end = (warp + 1) * p.count / kWarps;
    for (int64_t plane = first; plane < end; plane += 8) {
      float x[8];
      HOPWELL_UNROLL
      for (int i = 0; i < 8; ++i) x[i] = plane + i < end ? p.planes[(plane + i) * size + at] : 0.F;
      HOPWELL_UNROLL
      for (int i = 0; i < 8; ++i) sum += x[i];
    }
  }
  s.sums[warp][arch::lane_index()] = sum;
  arch::syncthreads();
  if (warp != 0 || at >= size) return;
  float total = 0;
  HOPWELL_UNROLL
  for (int i = 0; i < kWarps; ++i) total += s.sums[i][arch::lane_index()];
  p.out[at / p.w * p.out_stride + at % p.w] = total;
}

}  // namespace hopwell::ops::kv_compress::HOPWELL_TARGET
