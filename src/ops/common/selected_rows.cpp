#include "ops/common/selected_rows.hpp"

#include <numeric>

#include "tile/cpu/vector.hpp"

namespace hopwell::cpu {
namespace {

// Calls visit(pointer to the first element of x) with x's element type.
template <class Visit>
void with_elements(const View& x, Visit visit) {
  if (x.dtype == DType::kBFloat16)
    visit(x.as<bfloat16>());
  else
    visit(x.as<float>());
}

}  // namespace

void load_heads(const View& x, std::int64_t s, float* rows, std::int64_t row_stride) {
  with_elements(x, [&](const auto* data) {
    for (std::int64_t h = 0; h < x.shape[1]; ++h) {
      to_float(data + s * x.stride[0] + h * x.stride[1], rows + h * row_stride, static_cast<std::size_t>(x.shape[2]));
    }
  });
}

void store_heads(const float* rows, std::int64_t row_stride, const View& x, std::int64_t s, std::int64_t first,
                 std::int64_t width) {
  with_elements(x, [&](auto* data) {
    for (std::int64_t h = 0; h < x.shape[1]; ++h) {
      from_float(rows + h * row_stride, data + s * x.stride[0] + h * x.stride[1] + first,
                 static_cast<std::size_t>(width));
    }
  });
}

void SelectedRows::gather(const View& from, std::int64_t count) {
  const std::int64_t width = kv_.shape[1];
  with_elements(from, [&](const auto* data) {
    gather_rows(data, from.stride[0], keys_.get() + count_, static_cast<std::size_t>(count),
                static_cast<std::size_t>(width), rows_.get() + count_ * width);
  });
  count_ += count;
}

SelectedRows::Part SelectedRows::append(std::int64_t s, std::int64_t tile) {
  appended_ = {};
  std::int64_t window = 0;
  if (window_) {
    const KeyRange seen = window_.keys(s);
    window = seen.count;
    const std::int64_t first = tile * kTileEntries, count = std::clamp<std::int64_t>(window - first, 0, kTileEntries);
    std::iota(keys_.get() + count_, keys_.get() + count_ + count, static_cast<std::int32_t>(seen.first + first));
    gather(window_kv_, count);
    appended_.of_window = count;
  }
  const auto [first, last] = span(tile, window);
  appended_.selected = selection_.valid_entries(s, first, last, keys_.get() + count_, places_.get());
  gather(kv_, appended_.selected);
  return appended_;
}

void SelectedRows::spread(std::int64_t s, std::int64_t tile, const float* of_valid, float* row) const {
  const auto [first, last] = span(tile, window_ ? window_.keys(s).count : 0);
  const float* const of_selected = of_valid + appended_.of_window;
  if (selection_.indices == nullptr) {  // entries are the visible keys: tile 0 covers the slots of all other keys
    float* const visible = row + selection_.place(s);
    if (tile == 0) {
      std::fill(row, visible, 0.0F);
      std::fill(visible + selection_.length(s), row + selection_.topk, 0.0F);
    }
    std::copy_n(of_selected, appended_.selected, visible + first);
    return;
  }
  std::fill(row + first, row + last, 0.0F);
  for (std::int64_t i = 0; i < appended_.selected; ++i) row[first + places_.get()[i]] = of_selected[i];
}

}  // namespace hopwell::cpu
