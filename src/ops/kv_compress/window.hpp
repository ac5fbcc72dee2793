// The part of kv_compress that its forward and backward share on GPUs: a window's softmax and its weighted sum.
//
// Tile      slab vectors x rows x groups of threads: a thread has 4 columns of a window, and up to 8 entries
// Roles     every thread: load its entries, then their maximum, sum of exponentials and weighted sum, column by column
//           groups > 1: the groups' partial results meet in shared memory and are combined in the order of the groups
// Budget    8 entries: 16 registers of bf16 kv, 32 of gates; 12 KB of shared memory for groups
// Bound     memory
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
};

// Where a thread works.
struct Thread {
  int vector, row, group;  // in the CTA
  int column;              // its first; d or more: it has none

  HOPWELL_DEVICE Thread(const Shape& shape, int slab) {
    const int t = arch::thread_index();
    vector = t & (shape.vectors - 1);
    row = t / shape.vectors & (shape.rows - 1);
    group = t / (shape.vectors * shape.rows);
    column = (slab * shape.vectors + vector) * kColumns;
  }
};

// Entries of a window in the order of their tokens: with overlap, those of the previous block come first. A thread's
// entries are neighbours, so their addresses are a base and a stride.
struct EntryRange {
  int first, end;  // of the window: with overlap and without a previous block, first is `ratio`
  HOPWELL_DEVICE bool has(int entry) const { return entry >= first && entry < end; }
};
template <class T>
HOPWELL_DEVICE EntryRange entries_of(const Operands<T>& p, bool has_previous) {
  return {p.blocks.overlap && !has_previous ? p.ratio : 0, p.blocks.overlap ? 2 * p.ratio : p.ratio};
}
// Number of a thread's first entry of a batch.
template <class T>
HOPWELL_DEVICE int first_entry(const Operands<T>& p, const Thread& thread, int batch) {
  return (batch * p.shape.groups + thread.group) * Config::kEntries;
}
// The token of entry 0.
template <class T>
HOPWELL_DEVICE int64_t first_token(const Operands<T>& p, const Window& window) {
  return window.start - (p.blocks.overlap ? p.ratio : 0);
}
// Column 0 of an entry, and its row of position_bias.
template <class T>
HOPWELL_DEVICE int column_of(const Operands<T>& p, int entry) {
  return entry >= p.ratio ? p.d : 0;
}
template <class T>
HOPWELL_DEVICE int row_of(const Operands<T>& p, int entry) {
  return entry >= p.ratio ? entry - p.ratio : entry;
}

// Up to 8 entries of a window in registers: values, and gates with their bias. Absent entries have a gate of -inf.
template <class T>
struct Entries {
  Columns<T> kv[Config::kEntries];
  float gate[Config::kEntries][kColumns];

  HOPWELL_DEVICE void load(const Operands<T>& p, const Window& window, const Thread& thread, int batch) {
    const int first = first_entry(p, thread, batch);
    const EntryRange range = entries_of(p, window.has_previous);
    const bool has_columns = window.made && thread.column < p.d;
    const int64_t token = first_token(p, window) + first;
    const T* from_kv = p.kv + token * p.kv_stride + thread.column;
    const T* from_gate = p.gate + token * p.gate_stride + thread.column;
    Columns<T> gates[Config::kEntries];
    HOPWELL_UNROLL
    for (int e = 0; e < Config::kEntries; ++e) {
      kv[e] = gates[e] = {};
      if (!has_columns || !range.has(first + e)) continue;
      kv[e] = Columns<T>::load(from_kv + e * p.kv_stride + column_of(p, first + e), p.aligned);
      gates[e] = Columns<T>::load(from_gate + e * p.gate_stride + column_of(p, first + e), p.aligned);
    }
    HOPWELL_UNROLL
    for (int e = 0; e < Config::kEntries; ++e) {
      const bool present = has_columns && range.has(first + e);
      Columns<float> bias{};
      if (present && p.position_bias != nullptr)
        bias = Columns<float>::load(
            p.position_bias + row_of(p, first + e) * p.bias_stride + column_of(p, first + e) + thread.column,
            p.aligned);
      HOPWELL_UNROLL
      for (int i = 0; i < kColumns; ++i) gate[e][i] = present ? gates[e][i] + bias[i] : -INFINITY;
    }
  }
};

HOPWELL_DEVICE float finite_max(float max) { return max == -INFINITY ? 0.F : max; }
HOPWELL_DEVICE float exponential(float gate, float max) { return arch::exp2_approx((gate - max) * tile::kLog2E); }

// Running softmax of a window, column by column. An entry with a gate of -inf adds nothing, whatever its value.
struct Pool {
  float max[kColumns], sum[kColumns], out[kColumns];

  HOPWELL_DEVICE Pool() {
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) max[i] = -INFINITY, sum[i] = out[i] = 0;
  }
  template <class T>
  HOPWELL_DEVICE void add(const Entries<T>& entries) {
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      float most = max[i];
      HOPWELL_UNROLL
      for (int e = 0; e < Config::kEntries; ++e) most = fmaxf(most, entries.gate[e][i]);  // ignores NaN
      const float shift = finite_max(most), scale = exponential(max[i], shift);
      max[i] = most, sum[i] *= scale, out[i] *= scale;
      HOPWELL_UNROLL
      for (int e = 0; e < Config::kEntries; ++e) {
        const float weight = exponential(entries.gate[e][i], shift);
        sum[i] += weight;
        out[i] += entries.gate[e][i] == -INFINITY ? 0.F : weight * entries.kv[e][i];
      }
    }
  }
  // Divides by the sums, which become their reciprocals. A column without an entry gets 0.
  HOPWELL_DEVICE void divide() {
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      sum[i] = sum[i] == 0 ? 0.F : 1.F / sum[i];
      out[i] *= sum[i];
      max[i] = finite_max(max[i]);
    }
  }
};

// Partial results of the groups.
struct Partials {
  float max[kColumns][Config::kThreads], sum[kColumns][Config::kThreads], out[kColumns][Config::kThreads];

  // Combines the groups of each window in their order. Every thread of a window gets the result.
  HOPWELL_DEVICE void combine(Pool& pool, int groups) {
    const int t = arch::thread_index(), windows = Config::kThreads / groups;
    arch::syncthreads();  // earlier results have been read
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) max[i][t] = pool.max[i], sum[i][t] = pool.sum[i], out[i][t] = pool.out[i];
    arch::syncthreads();
    for (int item = t; item < windows * kColumns; item += Config::kThreads)
      combine(item / windows, item % windows, groups, windows);
    arch::syncthreads();
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      const int window = t & (windows - 1);
      pool.max[i] = max[i][window], pool.sum[i] = sum[i][window], pool.out[i] = out[i][window];
    }
  }

 private:
  HOPWELL_DEVICE void combine(int i, int window, int groups, int windows) {
    float most = -INFINITY, total = 0, value = 0;
    for (int g = 0; g < groups; ++g) most = fmaxf(most, max[i][g * windows + window]);
    for (int g = 0; g < groups; ++g) {
      const float scale = exponential(max[i][g * windows + window], finite_max(most));
      total += scale * sum[i][g * windows + window];
      value += scale * out[i][g * windows + window];
    }
    max[i][window] = most, sum[i][window] = total, out[i][window] = value;
  }
};

// The softmax of a window over all of its entries, divided. `entries` are the thread's last ones.
template <class T>
HOPWELL_DEVICE void pool_window(const Operands<T>& p, const Window& window, const Thread& thread, Entries<T>& entries,
                                Pool& pool, Partials& partials) {
  HOPWELL_NO_UNROLL
  for (int batch = 0; batch < p.shape.batches; ++batch) {
    entries.load(p, window, thread, batch);
    pool.add(entries);
  }
  if (p.shape.groups > 1) partials.combine(pool, p.shape.groups);
  pool.divide();
}

}  // namespace hopwell::ops::kv_compress::HOPWELL_TARGET
