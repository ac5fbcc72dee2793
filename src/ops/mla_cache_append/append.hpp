// mla_cache_append on GPUs.
//
// Tile      slots s with s mod (number of CTAs) = CTA index. A CTA reads all slot numbers of the call and writes the
//           rows of its slots
// Roles     all warps are alike. A warp searches 1,024 of 8,192 rows of the call for rows of its CTA, then writes them,
//           one at a time
// Row       a lane has four adjacent columns of 128. The lanes of a group of codes compute the group's amax together
// Order     one CTA writes both of two rows with the same slot. A warp skips a row if a later row of the same 8,192 has
//           its slot. A barrier precedes the next 8,192 rows. So a slot never holds parts of two rows
// Budget    64 KB of shared memory for row numbers and slots
// Bound     memory: each row of kv is read once
#pragma once

#include "arch/sm80/convert.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm80/threads.hpp"
#include "ops/mla_cache_append/op.hpp"
#include "ops/mla_cache_append/row.hpp"
#include "tile/gpu/numbers.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::mla_cache_append::HOPWELL_TARGET {

using arch::bf16;

struct Config {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kRowsOfWarp = 1024, kRows = kWarps * kRowsOfWarp;  // searched by a warp, by a CTA
  static constexpr int kColumns = 4;                                      // per lane
};

struct Params {
  const bf16 *kv, *k_rope;  // [n, kv_columns], [n, d - kv_columns] or null
  int64_t kv_stride, k_rope_stride;
  mla_cache::Blocks cache;
  mla_cache::Format format;  // rows that are not quantised have no codes, only `plain` columns
  Integers slots, positions;
  const void* cos_sin;  // [max_positions, rope_columns], or null
  int64_t cos_sin_stride, max_positions;
  const float* kv_scale;
  float kv_scale_value;
  int64_t n;
  int d, kv_columns;
  int rope_first, rope_columns;
  int least_exponent;
  bool pow2, interleaved, cos_sin_is_bf16;
  bool aligned;  // four columns of every row of kv and k_rope are 8-byte aligned
};

// The rows of a CTA among those that it looks at, in ascending order, in a list for each warp.
struct SharedStorage {
  struct Entry {
    int row, slot;
  };
  Entry entries[Config::kWarps][Config::kRowsOfWarp];
  int counts[Config::kWarps];
};

HOPWELL_DEVICE bool has_position(const Params& p, int64_t row) {
  if (p.cos_sin == nullptr) return true;
  const int64_t position = p.positions[row];
  return position >= 0 && position < p.max_positions;
}

// Lists the rows of this warp's part whose slots the CTA owns.
HOPWELL_DEVICE void list_rows(const Params& p, SharedStorage& s, int64_t first) {
  constexpr int kUnroll = 8;
  const int warp = arch::warp_index(), lane = arch::lane_index();
  const int owners = arch::grid_size(), owner = arch::block_index();
  const int64_t slots = p.cache.slots();
  int count = 0;
  for (int step = 0; step < Config::kRowsOfWarp; step += 32 * kUnroll) {
    int64_t slot[kUnroll];
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t row = first + step + 32 * i + lane;
      slot[i] = row < p.n ? p.slots[row] : -1;
    }
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t row = first + step + 32 * i + lane;
      const bool own = slot[i] >= 0 && slot[i] < slots && int(slot[i]) % owners == owner && has_position(p, row);
      const uint32_t all = arch::ballot(own);
      const int before = std::popcount(all & ((1U << lane) - 1));
      if (own) s.entries[warp][count + before] = {int(row), int(slot[i])};
      count += std::popcount(all);
    }
  }
  if (lane == 0) s.counts[warp] = count;
}

// True if a later row of the lists has the slot of entry `at` of this warp. The result is the same in all lanes.
HOPWELL_DEVICE bool is_replaced(const SharedStorage& s, int warp, int at, int slot) {
  bool found = false;
  for (int other = warp; other < Config::kWarps; ++other)
    for (int i = (other == warp ? at + 1 : 0) + arch::lane_index(); i < s.counts[other]; i += 32)
      found |= s.entries[other][i].slot == slot;
  return arch::ballot(found) != 0;
}

// Four columns of a row, before rotation.
struct Columns {
  float x[Config::kColumns];
};
struct alignas(8) Pack {
  bf16 x[Config::kColumns];
};

HOPWELL_DEVICE bf16 load_element(const Params& p, int64_t row, int c) {
  return c < p.kv_columns ? p.kv[row * p.kv_stride + c] : p.k_rope[row * p.k_rope_stride + c - p.kv_columns];
}
HOPWELL_DEVICE float load_column(const Params& p, int64_t row, int c) {
  return arch::to_float(load_element(p, row, c));
}
HOPWELL_DEVICE bool is_rotated(const Params& p, int c) {
  return p.cos_sin != nullptr && c >= p.rope_first && c < p.rope_first + p.rope_columns;
}
HOPWELL_DEVICE Columns load_columns(const Params& p, int64_t row, int c) {
  Columns columns;
  if (p.aligned && (c + Config::kColumns <= p.kv_columns || c >= p.kv_columns)) {
    const bf16* from =
        c < p.kv_columns ? p.kv + row * p.kv_stride + c : p.k_rope + row * p.k_rope_stride + c - p.kv_columns;
    const Pack pack = arch::load_vector<Pack>(from);
    HOPWELL_UNROLL
    for (int i = 0; i < Config::kColumns; ++i) columns.x[i] = arch::to_float(pack.x[i]);
  } else {
    for (int i = 0; i < Config::kColumns; ++i) columns.x[i] = load_column(p, row, c + i);
  }
  return columns;
}

// Column c of a row after its rotation, rounded to bf16.
HOPWELL_DEVICE float rotated(const Params& p, int64_t row, int c, float x) {
  const int at = c - p.rope_first, half = p.rope_columns / 2;
  if (at < 0 || at >= p.rope_columns) return x;
  const bool is_second = p.interleaved ? at % 2 != 0 : at >= half;
  const int pair = p.interleaved ? at / 2 : at % half;
  const int distance = p.interleaved ? 1 : half;
  const float other = load_column(p, row, is_second ? c - distance : c + distance);
  const int64_t entry = p.positions[row] * p.cos_sin_stride + pair;
  const float cosine = tile::load_fp32(p.cos_sin, p.cos_sin_is_bf16, entry);
  const float sine = tile::load_fp32(p.cos_sin, p.cos_sin_is_bf16, entry + half);
  return arch::to_float(arch::to_bf16(is_second ? x * cosine + other * sine : x * cosine - other * sine));
}

HOPWELL_DEVICE Columns columns_of(const Params& p, int64_t row, int c) {
  Columns columns = load_columns(p, row, c);
  if (p.cos_sin != nullptr && c + Config::kColumns > p.rope_first && c < p.rope_first + p.rope_columns)
    for (int i = 0; i < Config::kColumns; ++i) columns.x[i] = rotated(p, row, c + i, columns.x[i]);
  return columns;
}

// The largest magnitude of the lanes that have a group of codes.
HOPWELL_DEVICE float max_of_group(float x, int lanes) {
  for (int distance = 1; distance < lanes; distance *= 2) x = fmaxf(x, arch::shuffle_xor(x, distance));
  return x;
}

HOPWELL_DEVICE void store_codes(const Params& p, int64_t row, int slot) {
  const mla_cache::Format& f = p.format;
  uint8_t* const data = p.cache.row(slot, f.data_pitch);
  uint8_t* const scales = p.cache.scales(slot, f);
  const int lane = arch::lane_index(), lanes = f.tile / Config::kColumns;
  for (int first = 0; first < f.codes; first += 32 * Config::kColumns) {
    const int c = first + lane * Config::kColumns;
    const bool has = c < f.codes;
    const Columns columns = has ? columns_of(p, row, c) : Columns{};
    float scale = p.kv_scale != nullptr ? *p.kv_scale : p.kv_scale_value;
    if (f.tile > 0) {
      float amax = 0;
      HOPWELL_UNROLL
      for (int i = 0; i < Config::kColumns; ++i) amax = fmaxf(amax, finite_magnitude(columns.x[i]));
      scale = scale_of(max_of_group(amax, lanes), p.pow2, p.least_exponent);
      if (has && c % f.tile == 0) {
        if (f.scale == mla_cache::Scale::fp32)
          *reinterpret_cast<float*>(scales + 4 * (c / f.tile)) = scale;
        else
          scales[c / f.tile] = uint8_t(std::bit_cast<uint32_t>(scale) >> 23);
      }
    }
    uint32_t codes = 0;
    HOPWELL_UNROLL
    for (int i = 0; i < Config::kColumns; ++i) codes |= uint32_t{code_of(columns.x[i], scale)} << 8 * i;
    if (has) *reinterpret_cast<uint32_t*>(data + c) = codes;
  }
  if (f.scale == mla_cache::Scale::ue8m0 && f.tiles() + lane < f.scale_pitch) scales[f.tiles() + lane] = 0;
}

HOPWELL_DEVICE void store_row(const Params& p, int64_t row, int slot) {
  const mla_cache::Format& f = p.format;
  if (f.codes > 0) store_codes(p, row, slot);
  uint8_t* const data = p.cache.row(slot, f.data_pitch);
  const int lane = arch::lane_index();
  for (int c = lane * Config::kColumns; c < f.plain; c += 32 * Config::kColumns) {
    Pack pack;
    HOPWELL_UNROLL
    for (int i = 0; i < Config::kColumns; ++i) {
      const int column = f.codes + c + i;
      pack.x[i] = load_element(p, row, column);  // keeps the bits of a NaN
      if (is_rotated(p, column)) pack.x[i] = arch::to_bf16(rotated(p, row, column, arch::to_float(pack.x[i])));
    }
    arch::store_vector(data + f.plain_at + 2 * c, pack);
  }
  for (int byte = 4 * lane; byte < f.reserved; byte += 4 * 32)
    *reinterpret_cast<uint32_t*>(data + f.data_pitch - f.reserved + byte) = 0;
}

__global__ void __launch_bounds__(Config::kThreads) mla_cache_append_rows(const __grid_constant__ Params p) {
  auto& s = arch::dynamic_smem<SharedStorage>();
  const int warp = arch::warp_index();
  for (int64_t first = 0; first < p.n; first += Config::kRows) {
    list_rows(p, s, first + warp * Config::kRowsOfWarp);
    arch::syncthreads();
    const int count = s.counts[warp];
    for (int i = 0; i < count; ++i) {
      const SharedStorage::Entry entry = s.entries[warp][i];
      if (!is_replaced(s, warp, i, entry.slot)) store_row(p, entry.row, entry.slot);
    }
    arch::syncthreads();  // the next round may write the lists and the slots of these rows
  }
}

}  // namespace hopwell::ops::mla_cache_append::HOPWELL_TARGET
