// The part of kv_compress that its forward and backward share on GPUs: a window's softmax and its weighted sum.
//
// Tile      slab vectors x keys x groups threads (terms: plan.hpp). A thread has 4 columns of a window, and up to 8 of
//           its entries at a time
// Roles     every thread: load its entries, then their maximum, exponentials and weighted sum, column by column
//           groups > 1: the groups' results are combined in shared memory, in a fixed order
// Stages    exact forms (Form) have two: the next window is copied by cp.async while one is computed. With bf16 kv two
//           neighbouring lanes copy 16 bytes for each other, because copies of 8 bytes take twice as many instructions.
//           Other forms have one stage, and each thread reads only its own copies, which need no barrier
// Budget    shared: 32,768 B (bf16) or 65,536 B (fp32) a stage, 12,288 B for the groups' results, in the exact backward
//           32,768 B for d_position_bias. Registers: 32 of gates, with bf16 kv up to 32 of position_bias; of 128
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

  HOPWELL_DEVICE void operator+=(const Float4& other) {
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) x[i] += other.x[i];
  }
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

// Template parameters of a kernel. kExact: each group has exactly kEntries entries of a window, rows of kv, gate and
// position_bias are 16-byte aligned, a thread's columns of d_kv and d_gate are aligned, and a window with overlap has
// one group. Otherwise ratio and overlap are read at run time, and a thread processes its entries in batches.
template <int kEntries, bool kOverlap, bool kExact>
struct Form {
  static constexpr int entries = kEntries;
  static constexpr bool overlap = kOverlap, exact = kExact;
  static constexpr bool has_groups = !kExact || !kOverlap;  // whether there may be more than one
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
  int key, group;  // in the CTA
  int column;      // its first; d or more: it has none

  HOPWELL_DEVICE Thread(const Shape& shape, int slab) {
    const int t = arch::thread_index();
    key = t >> shape.vector_bits & (shape.keys_at_once() - 1);
    group = t >> (shape.vector_bits + shape.key_bits);
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
  HOPWELL_DEVICE int bias_row(int e) const { return first + e - (p.blocks.overlap && is_own(e) ? p.ratio : 0); }
  // position_bias of an entry that a window has; 0 without one.
  HOPWELL_DEVICE Columns<float> bias(int e, const Thread& thread) const {
    if (p.position_bias == nullptr || thread.column >= p.d) return {};
    return Columns<float>::load(p.position_bias + bias_row(e) * p.bias_stride + column(e) + thread.column,
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

// position_bias of a thread's entries, in registers, if a thread has the same entries of every window (F::exact) and
// kv is bf16. With fp32 kv it would not fit.
template <class T, class F>
struct Bias {
  static constexpr int kKept = F::exact && sizeof(T) == 2 ? F::entries : 0;
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
  static constexpr bool kCopiesPairs = F::exact && sizeof(T) == 2;

  Stage<T>& stage;
  float gate[F::entries][kColumns];

  // Starts to copy the entries. Of two lanes the first copies the even entries for both, the second the odd ones.
  static HOPWELL_DEVICE void copy(const Operands<T>& p, const Window& window, const Thread& thread, int batch,
                                  Stage<T>& stage) {
    const Batch<T, F> of(p, thread, batch);
    const bool any = window.made && thread.column < p.d;
    const int odd = kCopiesPairs ? arch::thread_index() % 2 : 0;
    const T* kv = p.kv + (of.token(window) + odd) * p.kv_stride + thread.column - kColumns * odd;
    const T* gate = p.gate + (of.token(window) + odd) * p.gate_stride + thread.column - kColumns * odd;
    HOPWELL_UNROLL
    for (int e = 0; e < F::entries; e += kCopiesPairs ? 2 : 1) {
      const bool present = any && of.has(e, window.has_previous);  // of both entries of a pair
      copy(kv + e * p.kv_stride + of.column(e), present, p.aligned, stage.kv[e + odd]);
      copy(gate + e * p.gate_stride + of.column(e), present, p.aligned, stage.gate[e + odd]);
    }
    arch::cp_async_commit();
  }
  static HOPWELL_DEVICE void converge() {
    if constexpr (kCopiesPairs) arch::syncwarp();
  }

  // The entries that have been copied.
  HOPWELL_DEVICE Entries(const Operands<T>& p, const Window& window, const Thread& thread, int batch, Stage<T>& from,
                         const Bias<T, F>& bias)
      : stage(from) {
    const Batch<T, F> of(p, thread, batch);
    const bool any = window.made && thread.column < p.d;
    float least = 0;
    HOPWELL_UNROLL
    for (int e = 0; e < F::entries; ++e) {
      const bool present = any && of.has(e, window.has_previous);
      const Columns<T> given = stage.gate[e][arch::thread_index()];
      Columns<float> added{};
      if (e < bias.kKept)
        added = bias.of_entry[e < bias.kKept ? e : 0];
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
    if constexpr (kCopiesPairs)
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

// Calls use(entries, window, key) for the compressed keys `first` to end - 1 of an exact form. All threads make the
// same number of calls. A thread without a window gets absent entries. The next window is copied meanwhile.
template <class F, class T, class Use>
HOPWELL_DEVICE void for_each_window(const Operands<T>& o, int first, int end, const Thread& thread,
                                    Stage<T> (&stages)[2], const Use& use) {
  const auto window_of = [&](int key) { return key < end ? o.blocks.window(key) : Window{}; };
  const Bias<T, F> bias(o, thread);
  int key = first + thread.key;
  Window window = window_of(key);
  Entries<T, F>::copy(o, window, thread, 0, stages[0]);
  HOPWELL_NO_UNROLL
  for (int step = 0; first < end; first += o.shape.keys_at_once(), ++step) {
    const Window next = window_of(key + o.shape.keys_at_once());
    Entries<T, F>::converge();
    Entries<T, F>::copy(o, next, thread, 0, stages[(step + 1) % 2]);
    arch::cp_async_wait<1>();
    Entries<T, F>::converge();
    Entries<T, F> entries(o, window, thread, 0, stages[step % 2], bias);
    use(entries, window, key);
    window = next, key += o.shape.keys_at_once();
  }
  arch::cp_async_wait<0>();  // the copy beyond the last window, which is all zeros
}

// Calls use(window, key) in the same way for a form that is not exact.
template <class T, class Use>
HOPWELL_DEVICE void for_each_long_window(const Operands<T>& o, int64_t first, int64_t end, const Thread& thread,
                                         const Use& use) {
  HOPWELL_NO_UNROLL
  for (; first < end; first += o.shape.keys_at_once()) {
    const int64_t key = first + thread.key;
    use(key < end ? o.blocks.window(key) : Window{}, key);
  }
}

// Calls use(entries, batch) for all batches of a window of such a form.
template <class F, class T, class Use>
HOPWELL_DEVICE void for_each_batch(const Operands<T>& o, const Window& window, const Thread& thread, Stage<T>& stage,
                                   const Use& use) {
  const Bias<T, F> none(o, thread);
  HOPWELL_NO_UNROLL
  for (int batch = 0; batch < o.shape.batches; ++batch) {
    Entries<T, F>::copy(o, window, thread, batch, stage);
    arch::cp_async_wait<0>();
    Entries<T, F> entries(o, window, thread, batch, stage, none);
    use(entries, batch);
  }
}

// Results of the groups of a CTA. If a warp has two groups, they are combined first.
struct Partials {
  Float4 max[Config::kThreads], sum[Config::kThreads], out[Config::kThreads];

  // Every thread gets the result of all groups, with the same bits.
  HOPWELL_DEVICE void combine(Pool& pool, int groups) {
    const int threads = Config::kThreads / groups, lane = arch::lane_index();  // threads: of a group
    const bool two_in_warp = threads < 32;
    const int at = two_in_warp ? arch::warp_index() * threads + lane : arch::thread_index();
    // If a warp has two groups, each of the two threads with the same columns reads half of the results.
    const int count = two_in_warp ? groups / 4 : groups;
    const int from = (arch::thread_index() & (threads - 1)) + (two_in_warp && lane >= threads ? count * threads : 0);
    float most[kColumns];
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) most[i] = pool.max[i];
    if (two_in_warp) join(most, Larger{});
    if (!two_in_warp || lane < threads) put(most, max[at]);
    arch::syncthreads();
    fill(most, -INFINITY);
    for (int i = 0; i < count; ++i) add(max[from + i * threads], most, Larger{});
    if (two_in_warp) join(most, Larger{});
    pool.rescale(most);
    if (two_in_warp) join(pool.sum, tile::Plus{}), join(pool.out, tile::Plus{});
    if (!two_in_warp || lane < threads) put(pool.sum, sum[at]), put(pool.out, out[at]);
    arch::syncthreads();
    fill(pool.sum, 0), fill(pool.out, 0);
    for (int i = 0; i < count; ++i) {
      add(sum[from + i * threads], pool.sum, tile::Plus{});
      add(out[from + i * threads], pool.out, tile::Plus{});
    }
    if (two_in_warp) join(pool.sum, tile::Plus{}), join(pool.out, tile::Plus{});
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
    Float4 vector;
    HOPWELL_UNROLL
    for (int i = 0; i < kColumns; ++i) vector.x[i] = x[i];
    to = vector;  // in one store
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

// Shared memory of both kernels.
template <class T, class F>
struct Stages {
  Stage<T> stages[F::exact ? 2 : 1];
};
template <class T, class F, bool kHasGroups = F::has_groups>
struct Storage : Stages<T, F> {
  Partials partials;
};
template <class T, class F>
struct Storage<T, F, false> : Stages<T, F> {};

// Combines the groups' results for a window.
template <class T, class F>
HOPWELL_DEVICE void combine_groups(const Operands<T>& o, Pool& pool, Storage<T, F>& s) {
  if constexpr (F::has_groups)
    if (o.shape.groups > 1) s.partials.combine(pool, o.shape.groups);
}

}  // namespace hopwell::ops::kv_compress::HOPWELL_TARGET
