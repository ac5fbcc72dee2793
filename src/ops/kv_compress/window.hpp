// The part of kv_compress that its forward and backward share on GPUs: a window's softmax and its weighted sum.
//
// Tile      slab vectors x rows x groups of threads: a thread has 4 columns of a window, and up to 8 of its entries
// Roles     every thread: load its entries, then their maximum, exponentials and weighted sum, column by column
//           groups > 1: a tree over the groups combines their results in shared memory
// Budget    8 entries: 16 registers of bf16 values, 32 of gates; 12 KB of shared memory for the tree
// Bound     memory; about 12 instructions an element in the forward, 20 in the backward
#pragma once

#include "arch/sm80/memory.hpp"
#include "ops/kv_compress/plan.hpp"
#include "tile/gpu/numbers.hpp"

namespace hopwell::ops::kv_compress::HOPWELL_TARGET {

constexpr int kColumns = Config::kColumns;

struct alignas(16) Float4 {
  float x[kColumns];
};

// A thread's columns of a row.
template <class T>
struct Columns {
  struct alignas(sizeof(T) * kColumns) Packed {
    T x[kColumns];
  } packed;

  HOPWELL_DEVICE float operator[](int i) const { return tile::to_fp32(packed.x[i]); }
  static HOPWELL_DEVICE Columns load(const T* from, bool aligned) {
    if (aligned) return {arch::load_vector<Packed>(from)};
    Columns columns;
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) columns.packed.x[i] = from[i];
    return columns;
  }
  // Stores x, rounded.
  static HOPWELL_DEVICE void store(const float (&x)[kColumns], T* to, bool aligned) {
    Packed rounded;
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) tile::from_fp32(x[i], &rounded.x[i]);
    if (aligned) return arch::store_vector(to, rounded);
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) to[i] = rounded.x[i];
  }
};

// What a kernel is compiled for: the entries of a thread, and whether they are exact. If they are, the threads of a group
// have exactly these entries, all rows are aligned, and a window with overlap has one group. Otherwise ratio and overlap
// are read at run time, and a thread takes batches of entries.
template <int kEntries, bool kOverlap, bool kExact>
struct Form {
  static constexpr int entries = kEntries;
  static constexpr bool overlap = kOverlap, exact = kExact;
};

// Arguments of both kernels.
template <class T>
struct Operands {
  const T *kv, *gate;          // [s, w]
  const float* position_bias;  // [ratio, w], or null
  int64_t kv_stride, gate_stride, bias_stride;
  Blocks blocks;
  int d, w, ratio;
  Shape shape;
  bool aligned;  // a thread's columns of every row of kv, gate and position_bias

  HOPWELL_DEVICE int entries() const { return blocks.overlap ? 2 * ratio : ratio; }
};

// Where a thread works.
struct Thread {
  int row, group;  // in the CTA
  int column;      // its first; d or more: it has none

  HOPWELL_DEVICE Thread(const Shape& shape, int slab) {
    const int t = arch::thread_index();
    row = t >> shape.vector_bits & (shape.rows() - 1);
    group = t >> (shape.vector_bits + shape.row_bits);
    column = ((slab << shape.vector_bits) + (t & (shape.vectors() - 1))) * kColumns;
  }
};

// A thread's entries of one batch. A window's entries are numbered in the order of their tokens: with overlap, those of
// the previous block come first.
template <class T, class F>
struct Batch {
  const Operands<T>& p;
  int first;  // number of the first one

  HOPWELL_DEVICE Batch(const Operands<T>& operands, const Thread& thread, int batch)
      : p(operands), first((batch * operands.shape.groups + thread.group) * F::entries) {}

  // Whether entry e is of the window's own block.
  HOPWELL_DEVICE bool is_own(int e) const {
    if constexpr (F::exact) return !F::overlap || e >= F::entries / 2;
    return !p.blocks.overlap || first + e >= p.ratio;
  }
  HOPWELL_DEVICE bool has(int e, bool has_previous) const {
    return first + e < p.entries() && (has_previous || is_own(e));
  }
  // Column 0 of an entry, and its row of position_bias.
  HOPWELL_DEVICE int column(int e) const { return p.blocks.overlap && is_own(e) ? p.d : 0; }
  HOPWELL_DEVICE int row(int e) const { return first + e - (p.blocks.overlap && is_own(e) ? p.ratio : 0); }
  // Token of the first entry.
  HOPWELL_DEVICE int64_t token(const Window& window) const {
    return window.start + first - (p.blocks.overlap ? p.ratio : 0);
  }
};

// Entries of a window in registers: values, and gates with their bias. An absent entry has a gate of -inf and a value
// of 0.
template <class T, class F>
struct Entries {
  Columns<T> kv[F::entries];
  float gate[F::entries][kColumns];

  HOPWELL_DEVICE void load(const Operands<T>& p, const Window& window, const Thread& thread, int batch) {
    const Batch<T, F> of(p, thread, batch);
    Columns<T> gates[F::entries];
    if (F::exact && window.made && thread.column < p.d && (window.has_previous || !F::overlap)) {
      load_rows<false>(of, window, thread, gates);
    } else {
      load_rows<true>(of, window, thread, gates);
    }
    clear_absent_values();
  }

 private:
  template <bool kMayBeAbsent>
  HOPWELL_DEVICE void load_rows(const Batch<T, F>& of, const Window& window, const Thread& thread,
                                Columns<T> (&gates)[F::entries]) {
    const Operands<T>& p = of.p;
    const bool aligned = F::exact || p.aligned, any = window.made && thread.column < p.d;
    const T* from_kv = p.kv + of.token(window) * p.kv_stride + thread.column;
    const T* from_gate = p.gate + of.token(window) * p.gate_stride + thread.column;
    HOPWELL_UNROLL
    for (int e = 0; e < F::entries; ++e) {
      if (kMayBeAbsent && !(any && of.has(e, window.has_previous))) continue;
      kv[e] = Columns<T>::load(from_kv + e * p.kv_stride + of.column(e), aligned);
      gates[e] = Columns<T>::load(from_gate + e * p.gate_stride + of.column(e), aligned);
    }
    HOPWELL_UNROLL
    for (int e = 0; e < F::entries; ++e) {
      const bool present = !kMayBeAbsent || (any && of.has(e, window.has_previous));
      Columns<float> bias{};
      if (present && p.position_bias != nullptr)
        bias =
            Columns<float>::load(p.position_bias + of.row(e) * p.bias_stride + of.column(e) + thread.column, aligned);
      HOPWELL_UNROLL
      for (int i = 0; i < kColumns; ++i) gate[e][i] = present ? gates[e][i] + bias[i] : -INFINITY;
    }
  }

  // The value of an entry with a gate of -inf may be NaN or infinite, but the entry is absent.
  HOPWELL_DEVICE void clear_absent_values() {
    float least = 0;
    HOPWELL_UNROLL
    for (int e = 0; e < F::entries; ++e) {
      HOPWELL_UNROLL
      for (int i = 0; i < kColumns; ++i) least = fminf(least, gate[e][i]);
    }
    if (least != -INFINITY) return;
    HOPWELL_UNROLL
    for (int e = 0; e < F::entries; ++e) {
      HOPWELL_UNROLL
      for (int i = 0; i < kColumns; ++i)
        if (gate[e][i] == -INFINITY) kv[e].packed.x[i] = T{};
    }
  }
};

HOPWELL_DEVICE float finite_max(float max) { return max == -INFINITY ? 0.F : max; }
HOPWELL_DEVICE float exponential(float gate, float max) { return arch::exp2_approx((gate - max) * tile::kLog2E); }

// Running softmax of a window, column by column.
struct Pool {
  float max[kColumns], sum[kColumns], out[kColumns];

  HOPWELL_DEVICE Pool() {
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) max[i] = -INFINITY, sum[i] = out[i] = 0;
  }
  // Adds entries, whose gates become their exponentials relative to the new maximum.
  template <class T, class F>
  HOPWELL_DEVICE void add(Entries<T, F>& entries) {
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      float most = max[i];
      HOPWELL_UNROLL
      for (int e = 0; e < F::entries; ++e) most = fmaxf(most, entries.gate[e][i]);  // ignores NaN
      if constexpr (!F::exact) {                                                    // a later batch
        const float scale = exponential(max[i], finite_max(most));
        sum[i] *= scale, out[i] *= scale;
      }
      max[i] = most;
    }
    exponentiate(entries);
    HOPWELL_UNROLL
    for (int e = 0; e < F::entries; ++e) {
      HOPWELL_UNROLL
      for (int i = 0; i < kColumns; ++i) sum[i] += entries.gate[e][i], out[i] += entries.gate[e][i] * entries.kv[e][i];
    }
  }
  template <class T, class F>
  HOPWELL_DEVICE void exponentiate(Entries<T, F>& entries) const {
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      const float shift = finite_max(max[i]);
      HOPWELL_UNROLL
      for (int e = 0; e < F::entries; ++e) entries.gate[e][i] = exponential(entries.gate[e][i], shift);
    }
  }
  HOPWELL_DEVICE void add(const Float4& other_max, const Float4& other_sum, const Float4& other_out) {
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      const float most = fmaxf(max[i], other_max.x[i]), shift = finite_max(most);
      const float scale = exponential(max[i], shift), other_scale = exponential(other_max.x[i], shift);
      max[i] = most;
      sum[i] = sum[i] * scale + other_sum.x[i] * other_scale;
      out[i] = out[i] * scale + other_out.x[i] * other_scale;
    }
  }
  // Divides by the sums, which become their reciprocals. A column without an entry gets 0.
  HOPWELL_DEVICE void divide() {
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      sum[i] = sum[i] == 0 ? 0.F : 1.F / sum[i];
      out[i] *= sum[i];
    }
  }
};

// Results of threads for the tree over the groups.
struct Partials {
  Float4 max[Config::kThreads], sum[Config::kThreads], out[Config::kThreads];

  HOPWELL_DEVICE void put(const Pool& pool) {
    const int t = arch::thread_index();
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) max[t].x[i] = pool.max[i], sum[t].x[i] = pool.sum[i], out[t].x[i] = pool.out[i];
  }
  // Group 0 of each window gets the result of all groups.
  HOPWELL_DEVICE void combine(Pool& pool, int group, int groups) {
    const int t = arch::thread_index(), threads = Config::kThreads / groups;
    for (int half = groups / 2; half > 0; half /= 2) {
      if (group >= half && group < 2 * half) put(pool);
      arch::syncthreads();
      if (group < half) pool.add(max[t + half * threads], sum[t + half * threads], out[t + half * threads]);
    }
  }
  // Every group gets the result of group 0.
  HOPWELL_DEVICE void broadcast(Pool& pool, int group, int groups) {
    const int from = arch::thread_index() & (Config::kThreads / groups - 1);
    if (group == 0) put(pool);
    arch::syncthreads();
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i)
      pool.max[i] = max[from].x[i], pool.sum[i] = sum[from].x[i], pool.out[i] = out[from].x[i];
    arch::syncthreads();  // the next window's results may be written
  }
};

// The softmax of the thread's entries. `entries` are those of the last batch.
template <class T, class F>
HOPWELL_DEVICE void pool_entries(const Operands<T>& p, const Window& window, const Thread& thread,
                                 Entries<T, F>& entries, Pool& pool) {
  if constexpr (F::exact) {
    entries.load(p, window, thread, 0);
    pool.add(entries);
  } else {
    HOPWELL_NO_UNROLL
    for (int batch = 0; batch < p.shape.batches; ++batch) {
      entries.load(p, window, thread, batch);
      pool.add(entries);
    }
  }
}

}  // namespace hopwell::ops::kv_compress::HOPWELL_TARGET
