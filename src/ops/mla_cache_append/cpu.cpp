// mla_cache_append on the CPU, row by row. One work item writes all rows with the same slot, in order.
#include <algorithm>
#include <bit>
#include <cstring>

#include "ops/mla_cache_append/op.hpp"
#include "ops/mla_cache_append/row.hpp"
#include "tile/cpu/parallel.hpp"
#include "tile/cpu/vector.hpp"
#include "tile/cpu/views.hpp"
#include "tile/float16.hpp"

namespace hopwell::ops::mla_cache_append {
namespace {

using cpu::Scratch, cpu::unsigned_size;

// Row `row` of a view [n, columns] as fp32.
void load_row(const View& view, std::int64_t row, float* to) {
  cpu::with_type(
      view, [&](const auto* data) { cpu::to_float(data + row * view.stride[0], to, unsigned_size(view.shape[1])); });
}

// Rounds columns to the dtype of kv.
void round_row(const Problem& p, float* x, std::int64_t columns) {
  if (p.kv.dtype != DType::kBFloat16) return;
  for (std::int64_t i = 0; i < columns; ++i) x[i] = to_float(rounded<bfloat16>(x[i]));
}

void rotate(const Problem& p, const Rotation& rotation, const float* cos_sin, float* x) {
  const std::int64_t half = rotation.columns / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    float& x0 = x[rotation.interleaved ? 2 * i : i];
    float& x1 = x[rotation.interleaved ? 2 * i + 1 : i + half];
    const float cosine = cos_sin[i], sine = cos_sin[half + i], y0 = x0 * cosine - x1 * sine;
    x1 = x1 * cosine + x0 * sine;
    x0 = y0;
  }
  round_row(p, x, rotation.columns);
}

// An element of kv as bf16. An element that is bf16 already keeps its bits, also if it is a NaN.
bfloat16 as_bf16(const Problem& p, float x) {
  if (p.kv.dtype != DType::kBFloat16) return rounded<bfloat16>(x);
  return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16)};
}

// Writes `count` elements in the type of a cache that is not quantised.
void store_plain(const Problem& p, DType type, const float* x, std::int64_t count, std::uint8_t* to) {
  if (type == DType::kFloat32) {
    std::memcpy(to, x, unsigned_size(count) * sizeof(float));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const bfloat16 element = as_bf16(p, x[i]);
    std::memcpy(to + 2 * i, &element, sizeof element);
  }
}

void store_codes(const Problem& p, const mla_cache::Format& format, const float* x, std::uint8_t* row,
                 std::uint8_t* scales) {
  if (format.scale == mla_cache::Scale::none) {
    const float scale = p.kv_scale != nullptr ? *p.kv_scale : p.kv_scale_value;
    for (int i = 0; i < format.codes; ++i) row[i] = code_of_quotient(x[i], x[i] / scale);
    return;
  }
  for (int tile = 0; tile < format.tiles(); ++tile) {
    const float* from = x + tile * format.tile;
    float amax = 0;
    for (int i = 0; i < format.tile; ++i) amax = std::max(amax, finite_magnitude(from[i]));
    const float scale = scale_of(amax, p.pow2, p.least_exponent);
    for (int i = 0; i < format.tile; ++i) row[tile * format.tile + i] = code_of_quotient(from[i], from[i] / scale);
    if (format.scale == mla_cache::Scale::fp32)
      std::memcpy(scales + 4 * tile, &scale, sizeof scale);
    else
      scales[tile] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(scale) >> 23);
  }
  if (format.scale == mla_cache::Scale::ue8m0)  // padding
    std::fill(scales + format.tiles(), scales + format.scale_pitch, std::uint8_t{0});
}

void store_row(const Problem& p, std::int64_t slot, const float* x) {
  if (!p.format) {
    store_plain(p, p.row_type, x, p.d, p.cache.row(slot, p.d * static_cast<std::int64_t>(size_of(p.row_type))));
    return;
  }
  const mla_cache::Format& format = *p.format;
  std::uint8_t* row = p.cache.row(slot, format.data_pitch);
  store_codes(p, format, x, row, p.cache.scales(slot, format));
  store_plain(p, DType::kBFloat16, x + format.codes, format.plain, row + format.plain_at);
  std::fill_n(row + format.data_pitch - format.reserved, format.reserved, std::uint8_t{0});
}

// Writes row i of kv to its slot, unless the slot or the position is out of range.
void append(const Problem& p, std::int64_t i, float* x, float* cos_sin) {
  const std::int64_t columns = p.kv.shape[1];
  load_row(p.kv, i, x);
  if (p.k_rope) load_row(p.k_rope, i, x + columns);
  if (p.rotation) {
    const std::int64_t position = p.rotation->positions[i];
    if (position < 0 || position >= p.rotation->cos_sin.shape[0]) return;
    load_row(p.rotation->cos_sin, position, cos_sin);
    rotate(p, *p.rotation, cos_sin, x + p.rotation->first);
  }
  store_row(p, p.slots[i], x);
}

void launch(const Problem& p, Stream /*stream*/) {
  // An item writes the rows of every kOwners-th slot in order, so that the later of two rows with one slot remains.
  constexpr std::int64_t kOwners = 64;
  const std::int64_t owners = std::min(kOwners, p.n), slots = p.cache.slots();
  struct State {
    Scratch<float> x, cos_sin;
  };
  cpu::parallel_for(
      owners, [&] { return State{Scratch<float>(p.d), Scratch<float>(p.rotation ? p.rotation->columns : 0)}; },
      [&](std::int64_t owner, State& state) {
        for (std::int64_t i = 0; i < p.n; ++i) {
          const std::int64_t slot = p.slots[i];
          if (slot < 0 || slot >= slots || slot % owners != owner) continue;
          append(p, i, state.x.get(), state.cos_sin.get());
        }
      });
}

const runtime::Registration cpu{"cpu", launch};

}  // namespace
}  // namespace hopwell::ops::mla_cache_append
