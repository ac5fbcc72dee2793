#include "ops/common/selected_rows.hpp"

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

std::int64_t SelectedRows::append(std::int64_t s, std::int64_t tile) {
  const std::int64_t first = tile * kTileEntries, last = std::min(first + tile_, selection_.topk), width = kv_.shape[1];
  std::int32_t* const keys = keys_.get() + count_;
  const std::int64_t valid = selection_.valid_entries(s, first, last, keys, places_.get());
  with_elements(kv_, [&](const auto* data) {
    gather_rows(data, kv_.stride[0], keys, static_cast<std::size_t>(valid), static_cast<std::size_t>(width),
                rows_.get() + count_ * width);
  });
  count_ += valid;
  appended_ = valid;
  return valid;
}

void SelectedRows::spread(std::int64_t s, std::int64_t tile, const float* of_valid, float* row) const {
  const std::int64_t first = tile * kTileEntries;
  if (selection_.indices == nullptr) {  // entries are the visible keys: tile 0 covers the slots of all other keys
    float* const visible = row + selection_.place(s);
    if (tile == 0) {
      std::fill(row, visible, 0.0F);
      std::fill(visible + selection_.length(s), row + selection_.topk, 0.0F);
    }
    std::copy_n(of_valid, appended_, visible + first);
    return;
  }
  std::fill_n(row + first, std::min(kTileEntries, selection_.topk - first), 0.0F);
  for (std::int64_t i = 0; i < appended_; ++i) row[first + places_.get()[i]] = of_valid[i];
}

}  // namespace hopwell::cpu
