// The part of kv_compress that its forward and backward share on GPUs: a window's softmax and its weighted sum.
//
// Tile      slab vectors x rows x groups threads (terms: plan.hpp). A thread has 4 columns of a window, and up to 8 of
//           its entries at a time
// Roles     every thread: load its entries, then their maximum, exponentials and weighted sum, column by column
//           groups > 1: the groups' results are combined in shared memory, in the order of the groups
// Stages    two, so that the next window is copied while one is computed. Entries are copied to shared memory asynchronously. If kv is bf16 and rows are 16-byte aligned, two lanes that
//           are neighbours copy for each other, 16 bytes at a time, because copies of 8 bytes take twice as many
//           instructions. Otherwise each thread reads only its own copies, which need no barrier
// Budget    shared memory: 32 KB (bf16) a stage, 12 KB for the groups' results; registers: 32 of gates, in the
//           backward up to 20 of position_bias
// Bound     memory
#pragma once

#include <algorithm>

#include "arch/sm80/async_copy.hpp"
#include "ops/kv_compress/plan.hpp"
#include "tile/gpu/numbers.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::kv_compress::HOPWELL_TARGET {

constexpr int kColumns = Config::kColumns;

struct alignas(16) Float4 {
  float x[kColumns];
};

// A thread's columns of a row.
template <class T>
struct alignas(sizeof(T) * kColumns) Columns {
  T x[kColumns];

  HOPWELL_DEVICE float operator[](int i) const { return tile::to_fp32(x[i]); }
  static HOPWELL_DEVICE Columns load(const T* from, bool aligned) {
    if (aligned) return arch::load_vector<Columns>(from);
    Columns columns;
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) columns.x[i] = from[i];
    return columns;
  }
  // Stores x, rounded.
  static HOPWELL_DEVICE void store(const float (&x)[kColumns], T* to, bool aligned) {
    Columns rounded;
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) tile::from_fp32(x[i], &rounded.x[i]);
    using Words = std::conditional_t<sizeof(Columns) == 8, arch::Words2, arch::Words4>;
    if (aligned) return arch::store_vector<true>(to, arch::bit_cast<Words>(rounded));
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) to[i] = rounded.x[i];
  }
};

// Template parameters of a kernel. kExact: each group has exactly kEntries entries of a window, all rows are 16-byte
// aligned, and a window with overlap has one group. Otherwise ratio and overlap are read at run time, and a thread processes its
// entries in batches.
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

// A thread's entries of one batch. A window's entries are numbered in the order of their tokens: with overlap, the
// entries of the previous block come first.
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
  // position_bias of an entry that a window has; 0 without one.
  HOPWELL_DEVICE Columns<float> bias(int e, const Thread& thread) const {
    if (p.position_bias == nullptr || thread.column >= p.d) return {};
    return Columns<float>::load(p.position_bias + row(e) * p.bias_stride + column(e) + thread.column,
                                F::exact || p.aligned);
  }
  // Token of the first entry.
  HOPWELL_DEVICE int64_t token(const Window& window) const {
    return window.start + first - (p.blocks.overlap ? p.ratio : 0);
  }
};

// Entries of one window for each thread of a CTA, in shared memory.
template <class T>
struct alignas(16) Stage {
  Columns<T> kv[Config::kEntries][Config::kThreads], gate[Config::kEntries][Config::kThreads];
};

// position_bias of a thread's first five entries, in registers, if a thread has the same entries of every window
// (F::exact). More would not fit in registers. With fp32 kv none is kept.
template <class T, class F, bool kKeep = true>
struct Bias {
  static constexpr int kKept = kKeep && F::exact && sizeof(T) == 2 ? std::min(F::entries, 5) : 0;
  Columns<float> of_entry[kKept > 0 ? kKept : 1];

  HOPWELL_DEVICE Bias(const Operands<T>& p, const Thread& thread) {
    const Batch<T, F> of(p, thread, 0);
    HOPWELL_UNROLL
    for (int e = 0; e < kKept; ++e) of_entry[e] = of.bias(e, thread);
  }
};

// A thread's entries of one batch: values in shared memory, gates with their bias in registers. An absent entry has a
// gate of -inf and a value of 0.
template <class T, class F>
struct Entries {
  // Whether neighbouring lanes copy for each other. Then the warp must converge after it has waited for its copies, and
  // before it overwrites a stage.
  static constexpr bool kPaired = F::exact && sizeof(T) == 2;

  Stage<T>& stage;
  float gate[F::entries][kColumns];

  // Starts to copy the entries. Of two lanes the first copies the even entries for both, the second the odd ones.
  static HOPWELL_DEVICE void copy(const Operands<T>& p, const Window& window, const Thread& thread, int batch,
                                  Stage<T>& stage) {
    const Batch<T, F> of(p, thread, batch);
    const bool any = window.made && thread.column < p.d;
    const int odd = kPaired ? arch::thread_index() % 2 : 0;
    const T* kv = p.kv + (of.token(window) + odd) * p.kv_stride + thread.column - kColumns * odd;
    const T* gate = p.gate + (of.token(window) + odd) * p.gate_stride + thread.column - kColumns * odd;
    HOPWELL_UNROLL
    for (int e = 0; e < F::entries; e += kPaired ? 2 : 1) {
      const bool present = any && of.has(e, window.has_previous);  // of both entries of a pair
      copy(kv + e * p.kv_stride + of.column(e), present, p.aligned, stage.kv[e + odd]);
      copy(gate + e * p.gate_stride + of.column(e), present, p.aligned, stage.gate[e + odd]);
    }
    arch::cp_async_commit();
  }
  static HOPWELL_DEVICE void converge() {
    if constexpr (kPaired) arch::syncwarp();
  }

  // The entries that have been copied.
  template <class AnyBias>
  HOPWELL_DEVICE Entries(const Operands<T>& p, const Window& window, const Thread& thread, int batch, Stage<T>& from,
                         const AnyBias& bias)
      : stage(from) {
    const Batch<T, F> of(p, thread, batch);
    const bool any = window.made && thread.column < p.d;
    float least = 0;
    HOPWELL_UNROLL
    for (int e = 0; e < F::entries; ++e) {
      const bool present = any && of.has(e, window.has_previous);
      const Columns<T> given = stage.gate[e][arch::thread_index()];
      Columns<float> added{};
      if (e < AnyBias::kKept)
        added = bias.of_entry[e < AnyBias::kKept ? e : 0];
      else if (present)
        added = of.bias(e, thread);
      HOPWELL_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        gate[e][i] = present ? given[i] + added[i] : -INFINITY;
        least = fminf(least, gate[e][i]);
      }
    }
    if (least == -INFINITY) clear_absent_values();
  }
  HOPWELL_DEVICE Columns<T> kv(int e) const { return stage.kv[e][arch::thread_index()]; }

 private:
  static HOPWELL_DEVICE void copy(const T* from, bool present, bool aligned, Columns<T> (&to)[Config::kThreads]) {
    Columns<T>& mine = to[arch::thread_index()];
    if constexpr (kPaired)
      arch::cp_async<16>(arch::shared_address(&to[arch::thread_index() & ~1]), from, present ? 16 : 0);
    else if (F::exact || aligned)
      arch::cp_async<sizeof mine>(arch::shared_address(&mine), from, present ? sizeof mine : 0);
    else
      mine = present ? Columns<T>::load(from, false) : Columns<T>{};
  }
  // The value of an entry with a gate of -inf may be NaN or infinite.
  HOPWELL_DEVICE void clear_absent_values() {
    HOPWELL_UNROLL
    for (int e = 0; e < F::entries; ++e) {
      HOPWELL_UNROLL
      for (int i = 0; i < kColumns; ++i)
        if (gate[e][i] == -INFINITY) stage.kv[e][arch::thread_index()].x[i] = T{};
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
      const Columns<T> kv = entries.kv(e);
      HOPWELL_UNROLL
      for (int i = 0; i < kColumns; ++i) sum[i] += entries.gate[e][i], out[i] += entries.gate[e][i] * kv[i];
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
  // Changes the maximum that the sums are relative to.
  HOPWELL_DEVICE void rescale(const float (&most)[kColumns]) {
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      const float scale = exponential(max[i], finite_max(most[i]));
      max[i] = most[i], sum[i] *= scale, out[i] *= scale;
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

// Calls use(entries, window, row) for the windows of a key tile, rows `first` to end - 1, whose threads have one batch of
// entries. All threads make the same number of calls; those without a window have none of its entries. The next window
// is copied while one is used.
template <class F, class T, class AnyBias, class Use>
HOPWELL_DEVICE void for_each_window(const Operands<T>& o, int first, int end, const Thread& thread,
                                    Stage<T> (&stages)[2], const AnyBias& bias, const Use& use) {
  const auto window_of = [&](int row) { return row < end ? o.blocks.window(row) : Window{}; };
  int row = first + thread.row;
  Window window = window_of(row);
  Entries<T, F>::copy(o, window, thread, 0, stages[0]);
  HOPWELL_NO_UNROLL
  for (int step = 0; first < end; first += o.shape.rows(), ++step) {
    const Window next = window_of(row + o.shape.rows());
    Entries<T, F>::converge();
    Entries<T, F>::copy(o, next, thread, 0, stages[(step + 1) % 2]);
    arch::cp_async_wait<1>();
    Entries<T, F>::converge();
    Entries<T, F> entries(o, window, thread, 0, stages[step % 2], bias);
    use(entries, window, row);
    window = next, row += o.shape.rows();
  }
  arch::cp_async_wait<0>();  // the copy beyond the last window, which is all zeros
}

// Results of the groups of a CTA. If two groups share a warp, they are combined first.
struct Partials {
  Float4 max[Config::kThreads], sum[Config::kThreads], out[Config::kThreads];

  // Every thread gets the result of all groups, with the same bits.
  HOPWELL_DEVICE void combine(Pool& pool, int groups) {
    const bool paired = groups == Config::kMaxGroups;  // 16 threads have a group
    const int threads = Config::kThreads / groups, lane = arch::lane_index();
    const int at = paired ? arch::warp_index() * threads + lane : arch::thread_index();
    // If groups are paired, each of the two threads with the same columns reads half of the results.
    const int count = paired ? groups / 4 : groups;
    const int from = (arch::thread_index() & (threads - 1)) + (paired && lane >= threads ? count * threads : 0);
    float most[kColumns];
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) most[i] = pool.max[i];
    if (paired) join(most, Larger{});
    if (!paired || lane < threads) put(most, max[at]);
    arch::syncthreads();
    fill(most, -INFINITY);
    for (int i = 0; i < count; ++i) add(max[from + i * threads], most, Larger{});
    if (paired) join(most, Larger{});
    pool.rescale(most);
    if (paired) join(pool.sum, tile::Plus{}), join(pool.out, tile::Plus{});
    if (!paired || lane < threads) put(pool.sum, sum[at]), put(pool.out, out[at]);
    arch::syncthreads();
    fill(pool.sum, 0), fill(pool.out, 0);
    for (int i = 0; i < count; ++i) {
      add(sum[from + i * threads], pool.sum, tile::Plus{});
      add(out[from + i * threads], pool.out, tile::Plus{});
    }
    if (paired) join(pool.sum, tile::Plus{}), join(pool.out, tile::Plus{});
  }

 private:
  struct Larger {
    HOPWELL_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }  // ignores NaN
  };
  static HOPWELL_DEVICE void fill(float (&x)[kColumns], float value) {
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) x[i] = value;
  }
  static HOPWELL_DEVICE void put(const float (&x)[kColumns], Float4& to) {
    Float4 rounded;
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) rounded.x[i] = x[i];
    to = rounded;
  }
  template <class Join>
  static HOPWELL_DEVICE void add(const Float4& from, float (&x)[kColumns], const Join& join_two) {
    const Float4 other = from;
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) x[i] = join_two(x[i], other.x[i]);
  }
  // Joins the values of the lanes 16 apart.
  template <class Join>
  static HOPWELL_DEVICE void join(float (&x)[kColumns], const Join& join_two) {
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) x[i] = join_two(x[i], arch::shuffle_xor(x[i], 16));
  }
};

}  // namespace hopwell::ops::kv_compress::HOPWELL_TARGET
