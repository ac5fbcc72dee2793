// paged_lightning_indexer on the CPU: lightning_indexer's search, over keys in the blocks of a cache.
#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/common/index_search.hpp"
#include "ops/common/views.hpp"
#include "ops/paged_lightning_indexer/op.hpp"
#include "tile/cpu/index_score.hpp"

namespace hopwell::ops::paged_lightning_indexer {
namespace {

// Row [b, i] of an output, or null.
template <class T>
T* row_of(const View& view, std::int64_t b, std::int64_t i) {
  return view ? view.as<T>() + b * view.stride[0] + i * view.stride[1] : nullptr;
}

class Search final : public cpu::IndexSearch {
 public:
  explicit Search(const Problem& problem) : p_(problem) {
    sequences = p_.b, queries = p_.q_len, keys = p_.most_positions();
    h_index = p_.h_index, d_index = p_.d_index, topk = p_.topk;
    relu = p_.relu, has_key_scales = p_.format.has_value();
  }

 private:
  [[nodiscard]] KeyRange visible(std::int64_t b, std::int64_t i) const override {
    const std::int64_t count = p_.positions.visible(b, i);
    return p_.selects_all(count) ? KeyRange{} : KeyRange{0, static_cast<std::uint32_t>(count)};
  }

  void load_query(std::int64_t b, std::int64_t i, float* q, float* weights) const override {
    const auto offset = [&](const View& view) { return b * view.stride[0] + i * view.stride[1]; };
    cpu::load(p_.weights, offset(p_.weights), weights, p_.h_index);
    for (std::int64_t j = 0; j < p_.h_index && p_.q_scale; ++j)
      weights[j] *= p_.q_scale.as<const float>()[offset(p_.q_scale) + j];
    for (std::int64_t j = 0; j < p_.h_index; ++j)
      cpu::load(p_.q, offset(p_.q) + j * p_.q.stride[2], q + j * p_.d_index, p_.d_index);
  }

  bool load_key(std::int64_t b, std::int64_t position, float* to, float* scale) const override {
    const std::int32_t slot = slot_of(b, static_cast<std::int32_t>(position));
    if (slot < 0) return false;
    View row;
    row.dtype = p_.q.dtype;
    const std::int64_t pitch = p_.d_index * static_cast<std::int64_t>(size_of(row.dtype));
    row.data = p_.cache.row(slot, pitch);
    cpu::load(row, 0, to, p_.d_index);
    if (p_.format) std::memcpy(scale, p_.cache.scales(slot, *p_.format), sizeof *scale);
    return true;
  }

  void write(std::int64_t b, std::int64_t i, const cpu::BestKeys& best) const override {
    auto* const indices = row_of<std::int32_t>(p_.indices, b, i);
    std::int64_t count = best.size;
    const std::int64_t visible = p_.positions.visible(b, i);
    if (p_.selects_all(visible))
      count = write_all(b, static_cast<std::int32_t>(visible), indices);
    else
      std::transform(best.keys, best.keys + count, indices, [&](std::int32_t key) { return index_of(b, key); });
    std::fill(indices + count, indices + p_.topk, -1);
    if (float* const scores = row_of<float>(p_.scores, b, i))
      std::fill(std::copy_n(best.scores, count, scores), scores + p_.topk, -std::numeric_limits<float>::infinity());
    if (auto* const length = row_of<std::int32_t>(p_.lengths, b, i)) *length = static_cast<std::int32_t>(count);
  }

  // Writes all positions that exist, and returns their number.
  std::int64_t write_all(std::int64_t b, std::int32_t visible, std::int32_t* indices) const {
    std::int64_t count = 0;
    for (std::int32_t position = 0; position < visible; ++position)
      if (slot_of(b, position) >= 0) indices[count++] = index_of(b, position);
    return count;
  }

  [[nodiscard]] std::int32_t slot_of(std::int64_t b, std::int32_t position) const {
    return p_.positions.slots(b, p_.most_positions(), static_cast<int>(p_.positions.block)).of(position);
  }
  [[nodiscard]] std::int32_t index_of(std::int64_t b, std::int32_t position) const {
    return p_.slots ? slot_of(b, position) : position;
  }

  const Problem& p_;
};

void launch(const Problem& p, Stream /*stream*/) {
  if (p.topk > 0) return Search(p).run();
  for (std::int64_t b = 0; b < p.b; ++b)
    for (std::int64_t i = 0; i < p.q_len && p.lengths; ++i) *row_of<std::int32_t>(p.lengths, b, i) = 0;
}

const runtime::Registration cpu_backend{"cpu", launch};

}  // namespace
}  // namespace hopwell::ops::paged_lightning_indexer
