// kv_compress and kv_compress_backward on the CPU: a window at a time, a few vectors of columns at a time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kv_compress/cpu.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "tile/cpu/vector-inl.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "ops/kv_compress/op.hpp"
#include "tile/cpu/parallel.hpp"
#include "tile/cpu/vector.hpp"
#include "tile/cpu/views.hpp"

#ifndef HOPWELL_KV_COMPRESS_ENTRIES
#define HOPWELL_KV_COMPRESS_ENTRIES
namespace hopwell::ops::kv_compress {

// One entry of a window: pointers to its first column. Null pointers are absent arguments.
template <class T>
struct Entry {
  const T *kv, *gate;
  const float* bias;
  T *d_kv = nullptr, *d_gate = nullptr;
  float* d_bias = nullptr;  // is added to
};

}  // namespace hopwell::ops::kv_compress
#endif

HWY_BEFORE_NAMESPACE();
namespace hopwell::ops::kv_compress::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace vec = cpu::HWY_NAMESPACE;

// Some vectors of neighbouring columns of a window.
template <class D, class T, int kVectors>
class Columns {
 public:
  using V = hn::Vec<D>;

  Columns(const std::vector<Entry<T>>& entries, std::size_t first) : entries_(entries), first_(first) {
    for (int i = 0; i < kVectors; ++i) max_[i] = hn::Set(d_, -std::numeric_limits<float>::infinity());
    for (const Entry<T>& entry : entries_)
      for (int i = 0; i < kVectors; ++i) {
        const V g = gate(entry, i);
        max_[i] = hn::IfThenElse(hn::Gt(g, max_[i]), g, max_[i]);  // false for NaN
      }
    for (int i = 0; i < kVectors; ++i) {
      max_[i] = hn::IfThenZeroElse(hn::Eq(max_[i], hn::Set(d_, -std::numeric_limits<float>::infinity())), max_[i]);
      sum_[i] = out_[i] = hn::Zero(d_);
    }
    for (const Entry<T>& entry : entries_)
      for (int i = 0; i < kVectors; ++i) {
        const V g = gate(entry, i), e = vec::SafeExp(d_, hn::Sub(g, max_[i]));
        sum_[i] = hn::Add(sum_[i], e);
        out_[i] = hn::Add(out_[i], hn::Mul(e, kv(entry, i, g)));
      }
    for (int i = 0; i < kVectors; ++i) {
      const auto empty = hn::Eq(sum_[i], hn::Zero(d_));
      inverse_[i] = hn::IfThenZeroElse(empty, hn::Div(hn::Set(d_, 1.0F), sum_[i]));
      out_[i] = hn::Mul(out_[i], inverse_[i]);
    }
  }

  void store(float* out) const {
    for (int i = 0; i < kVectors; ++i) hn::StoreU(out_[i], d_, out + column(i));
  }

  void backward(const float* d_out) const {
    for (const Entry<T>& entry : entries_)
      for (int i = 0; i < kVectors; ++i) {
        const V g = gate(entry, i), e = vec::SafeExp(d_, hn::Sub(g, max_[i]));
        const V weight = hn::Mul(hn::Mul(e, inverse_[i]), hn::LoadU(d_, d_out + column(i)));
        const V d_gate = hn::Mul(weight, hn::Sub(kv(entry, i, g), out_[i]));
        if (entry.d_kv != nullptr) vec::StoreFloat(weight, d_, entry.d_kv + column(i));
        if (entry.d_gate != nullptr) vec::StoreFloat(d_gate, d_, entry.d_gate + column(i));
        if (entry.d_bias == nullptr) continue;
        float* sum = entry.d_bias + column(i);
        hn::StoreU(hn::Add(hn::LoadU(d_, sum), d_gate), d_, sum);
      }
  }

 private:
  [[nodiscard]] std::size_t column(int i) const { return first_ + static_cast<std::size_t>(i) * hn::Lanes(d_); }
  // The value of an entry with gate g: 0 if the gate is -inf, because the entry is absent then.
  [[nodiscard]] V kv(const Entry<T>& entry, int i, V g) const {
    const auto absent = hn::Eq(g, hn::Set(d_, -std::numeric_limits<float>::infinity()));
    return hn::IfThenZeroElse(absent, vec::LoadFloat(d_, entry.kv + column(i)));
  }
  [[nodiscard]] V gate(const Entry<T>& entry, int i) const {
    const V g = vec::LoadFloat(d_, entry.gate + column(i));
    return entry.bias == nullptr ? g : hn::Add(g, hn::LoadU(d_, entry.bias + column(i)));
  }

  D d_;
  const std::vector<Entry<T>>& entries_;
  std::size_t first_;
  V max_[kVectors], sum_[kVectors], out_[kVectors], inverse_[kVectors];
};

template <class T>
void Forward(const std::vector<Entry<T>>& entries, std::size_t d, float* out) {
  const hn::ScalableTag<float> wide;
  constexpr int kVectors = 4;
  const std::size_t step = kVectors * hn::Lanes(wide);
  std::size_t c = 0;
  for (; c + step <= d; c += step) Columns<hn::ScalableTag<float>, T, kVectors>(entries, c).store(out);
  for (; c < d; ++c) Columns<hn::CappedTag<float, 1>, T, 1>(entries, c).store(out);
}

template <class T>
void Backward(const std::vector<Entry<T>>& entries, std::size_t d, const float* d_out) {
  const hn::ScalableTag<float> wide;
  constexpr int kVectors = 4;
  const std::size_t step = kVectors * hn::Lanes(wide);
  std::size_t c = 0;
  for (; c + step <= d; c += step) Columns<hn::ScalableTag<float>, T, kVectors>(entries, c).backward(d_out);
  for (; c < d; ++c) Columns<hn::CappedTag<float, 1>, T, 1>(entries, c).backward(d_out);
}

void ForwardF32(const std::vector<Entry<float>>& entries, std::size_t d, float* out) { Forward(entries, d, out); }
void ForwardBF16(const std::vector<Entry<bfloat16>>& entries, std::size_t d, float* out) { Forward(entries, d, out); }
void BackwardF32(const std::vector<Entry<float>>& entries, std::size_t d, const float* d_out) {
  Backward(entries, d, d_out);
}
void BackwardBF16(const std::vector<Entry<bfloat16>>& entries, std::size_t d, const float* d_out) {
  Backward(entries, d, d_out);
}

}  // namespace hopwell::ops::kv_compress::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace hopwell::ops::kv_compress {
namespace {

HWY_EXPORT(ForwardF32);
HWY_EXPORT(ForwardBF16);
HWY_EXPORT(BackwardF32);
HWY_EXPORT(BackwardBF16);

using cpu::Scratch, cpu::unsigned_size;

void forward(const std::vector<Entry<float>>& entries, std::size_t d, float* out) {
  HWY_DYNAMIC_DISPATCH(ForwardF32)(entries, d, out);
}
void forward(const std::vector<Entry<bfloat16>>& entries, std::size_t d, float* out) {
  HWY_DYNAMIC_DISPATCH(ForwardBF16)(entries, d, out);
}
void backward(const std::vector<Entry<float>>& entries, std::size_t d, const float* d_out) {
  HWY_DYNAMIC_DISPATCH(BackwardF32)(entries, d, d_out);
}
void backward(const std::vector<Entry<bfloat16>>& entries, std::size_t d, const float* d_out) {
  HWY_DYNAMIC_DISPATCH(BackwardBF16)(entries, d, d_out);
}

constexpr std::int64_t kRowsPerItem = 16;

// Calls function(T{}) with the element type of a view.
template <class Function>
void with_element(const View& view, Function function) {
  view.dtype == DType::kBFloat16 ? function(bfloat16{}) : function(float{});
}

template <class T>
T* element(const View& view, std::int64_t row, std::int64_t column) {
  return view ? view.as<T>() + row * view.stride[0] + column : nullptr;
}

// The entries of a window. The entries of its own block come first.
template <class T, class MakeEntry>
void list_entries(const Blocks& blocks, const Window& window, std::int64_t d, std::vector<Entry<T>>& entries,
                  MakeEntry make_entry) {
  entries.clear();
  for (std::int64_t r = 0; r < blocks.ratio; ++r)
    entries.push_back(make_entry(window.start + r, r, blocks.overlap ? d : 0));
  for (std::int64_t r = 0; window.has_previous && r < blocks.ratio; ++r)
    entries.push_back(make_entry(window.start - blocks.ratio + r, r, 0));
}

template <class T>
struct State {
  explicit State(const Blocks& blocks, std::int64_t d) : row(d) {
    const std::int64_t most = std::min(blocks.ratio, blocks.s);
    entries.reserve(unsigned_size(blocks.overlap ? 2 * most : most));
  }
  std::vector<Entry<T>> entries;
  Scratch<float> row;
};

template <class Function>
void with_row(const View& view, std::int64_t row, Function function) {
  cpu::with_type(view, [&]<class T>(T* data) { function(data + row * view.stride[0]); });
}

void launch(const Problem& p, Stream /*stream*/) {
  with_element(p.kv, [&]<class T>(T) {
    const std::int64_t items = (p.blocks.n + kRowsPerItem - 1) / kRowsPerItem;
    cpu::parallel_for(
        items, [&] { return State<T>(p.blocks, p.d); },
        [&](std::int64_t item, State<T>& state) {
          const std::int64_t end = std::min((item + 1) * kRowsPerItem, p.blocks.n);
          for (std::int64_t row = item * kRowsPerItem; row < end; ++row) {
            const Window window = p.blocks.window(row);
            state.entries.clear();
            if (window.made)
              list_entries(p.blocks, window, p.d, state.entries, [&](std::int64_t t, std::int64_t r, std::int64_t o) {
                return Entry<T>{element<const T>(p.kv, t, o), element<const T>(p.gate, t, o),
                                element<const float>(p.position_bias, r, o)};
              });
            forward(state.entries, unsigned_size(p.d), state.row.get());
            with_row(p.out, row, [&](auto* to) { cpu::from_float(state.row.get(), to, unsigned_size(p.d)); });
          }
        });
  });
}

// Writes zeros to the elements of d_kv and d_gate that are in no window.
template <class T>
void clear_unused(const BackwardProblem& p) {
  cpu::parallel_for((p.blocks.s + kRowsPerItem - 1) / kRowsPerItem, [&](std::int64_t item) {
    const std::int64_t end = std::min((item + 1) * kRowsPerItem, p.blocks.s);
    for (std::int64_t t = item * kRowsPerItem; t < end; ++t) {
      const Blocks::Use use = p.blocks.use(t);
      for (const View* view : {&p.d_kv, &p.d_gate}) {
        if (!*view) continue;
        if (p.blocks.overlap && !use.next) std::fill_n(element<T>(*view, t, 0), p.d, T{});
        if (!use.own) std::fill_n(element<T>(*view, t, p.blocks.overlap ? p.d : 0), p.d, T{});
      }
    }
  });
}

// Rows of d_out up to the last one that a document makes. There may be any number of rows after it.
std::int64_t rows_made(const Blocks& blocks) {
  if (!blocks.packed) return std::min(blocks.n, blocks.most);
  std::int64_t rows = 0;
  for (std::int64_t i = 0; i < blocks.documents; ++i) {
    const Blocks::Document d = blocks.document(i);
    rows = std::max(rows, std::min(d.key + (d.end - d.begin) / blocks.ratio, d.key_end));
  }
  return rows;
}

// Strips of compressed keys, each with a sum of d_position_bias of its own. Their number depends on the problem only.
std::int64_t key_tiles_of(const BackwardProblem& p, std::int64_t rows) {
  if (!p.d_position_bias) return (rows + kRowsPerItem - 1) / kRowsPerItem;
  constexpr std::int64_t kMostStrips = 32, kMostFloats = std::int64_t{1} << 23;
  const std::int64_t plane = std::max<std::int64_t>(p.blocks.ratio * p.w, 1);
  return std::min(rows, std::clamp<std::int64_t>(kMostFloats / plane, 1, kMostStrips));
}

void launch_backward(const BackwardProblem& p, Stream /*stream*/) {
  const std::int64_t rows = rows_made(p.blocks), key_tiles = key_tiles_of(p, rows);
  const std::int64_t plane = p.d_position_bias ? p.blocks.ratio * p.w : 0;
  std::vector<float> sums(unsigned_size(key_tiles * plane), 0.0F);
  with_element(p.kv, [&]<class T>(T) {
    clear_unused<T>(p);
    cpu::parallel_for(
        key_tiles, [&] { return State<T>(p.blocks, p.d); },
        [&](std::int64_t key_tile, State<T>& state) {
          float* d_bias = plane == 0 ? nullptr : sums.data() + key_tile * plane;
          for (std::int64_t row = key_tile * rows / key_tiles; row < (key_tile + 1) * rows / key_tiles; ++row) {
            const Window window = p.blocks.window(row);
            if (!window.made) continue;
            list_entries(p.blocks, window, p.d, state.entries, [&](std::int64_t t, std::int64_t r, std::int64_t o) {
              return Entry<T>{element<const T>(p.kv, t, o),
                              element<const T>(p.gate, t, o),
                              element<const float>(p.position_bias, r, o),
                              element<T>(p.d_kv, t, o),
                              element<T>(p.d_gate, t, o),
                              d_bias == nullptr ? nullptr : d_bias + r * p.w + o};
            });
            with_row(p.d_out, row, [&](const auto* from) { cpu::to_float(from, state.row.get(), unsigned_size(p.d)); });
            backward(state.entries, unsigned_size(p.d), state.row.get());
          }
        });
  });
  for (std::int64_t r = 0; r < p.d_position_bias.shape[0]; ++r) {
    float* to = p.d_position_bias.as<float>() + r * p.d_position_bias.stride[0];
    std::fill_n(to, p.w, 0.0F);
    for (std::int64_t key_tile = 0; r < p.blocks.ratio && key_tile < key_tiles; ++key_tile)
      cpu::add(sums.data() + key_tile * plane + r * p.w, to, unsigned_size(p.w));
  }
}

const runtime::Registration compress{"cpu", launch};
const runtime::Registration compress_backward{"cpu", launch_backward};

}  // namespace
}  // namespace hopwell::ops::kv_compress
#endif  // HWY_ONCE
