// mla_cache_append on GPUs.
//
// Tile      neighbouring rows of the call, an equal part for each CTA, at most 256 at a time
// Roles     all warps are alike. They prefetch the CTA's rows of kv to L2 and meanwhile look through the slots of all
//           later rows of the call. Then a warp writes one row at a time
// Row       a warp encodes 128 columns at a time, 4 adjacent ones a lane. If a row has at least 256 codes and their
//           number is a multiple of 16, it encodes 512 columns, 16 a lane. Neighbouring threads compute the amax of a
//           group of codes together
// Order     a row is written only if no later row has its slot. So each slot is written once, and no CTA waits for
//           another
// Budget    22 KB of shared memory for slots and marks
// Bound     instructions. Each row of kv is read once, the slots are read by all CTAs, from L2. 8,192 rows: 11.0 µs by
//           `python -m hopwell.bench`, 15.6 in graphs that write 512 MB before each call (H200). By count, their bytes
//           take 5
#pragma once

#include <algorithm>

#include "arch/sm80/convert.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm80/reduce.hpp"
#include "arch/sm80/threads.hpp"
#include "ops/mla_cache_append/op.hpp"
#include "ops/mla_cache_append/row.hpp"
#include "tile/divisor.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/numbers.hpp"

namespace hopwell::ops::mla_cache_append::HOPWELL_TARGET {

using arch::bf16;

struct Config {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kRows = 256;    // of a CTA at a time
  static constexpr int kMarks = 4096;  // a power of two
  static constexpr int kColumns = 4;   // of a pack
};

struct Params {
  const bf16 *kv, *k_rope;  // [n, kv_columns], [n, d - kv_columns] or null
  int64_t kv_stride, k_rope_stride;
  mla_cache::Blocks cache;
  tile::Divisor block;       // rows of a block
  mla_cache::Format format;  // rows that are not quantised have no codes, only `plain` columns
  Integers slots, positions;
  const void* cos_sin;  // [max_positions, rope_columns], or null
  int64_t cos_sin_stride, max_positions;
  const float* kv_scale;
  float kv_scale_value;
  int64_t n, rows_of_cta;
  int kv_columns;
  int rope_first, rope_columns;
  int least_exponent, tile_bits;  // of a power-of-two scale; log2 of the codes that share a scale
  bool pow2, interleaved, cos_sin_is_bf16;
  bool aligned;               // four columns of every row of kv and k_rope are 8-byte aligned
  bool codes_are_contiguous;  // all columns of codes are in kv, 16-byte aligned, and not rotated
};

struct SharedStorage {
  uint32_t marks[Config::kMarks];                            // of the CTA's rows, at index slot % kMarks: Mark
  uint8_t replaced[Config::kRows];                           // 1 if a later row has the slot of this row
  int slots[Config::kRows];                                  // of the CTA's rows; -1: the row is not written
  int64_t data_at[Config::kRows], scales_at[Config::kRows];  // byte offsets in the cache
};

// Low 16 bits: sum of row + 1; high 16 bits: number of rows. Both over the CTA's rows whose slots have the same index;
// rows count from the CTA's first. If the number is 1, the low bits name the row.
struct Mark {
  uint32_t sum;

  static HOPWELL_DEVICE Mark of(int row) { return {0x10001 + uint32_t(row)}; }
  static HOPWELL_DEVICE int index(int64_t slot) { return int(uint64_t(slot) % Config::kMarks); }
  [[nodiscard]] HOPWELL_DEVICE bool has_one() const { return sum >> 16 == 1; }
  [[nodiscard]] HOPWELL_DEVICE int row() const { return int(sum & 0xffff) - 1; }  // if there is one
};
static_assert(Config::kRows * (Config::kRows + 1) / 2 < 1 << 16);

HOPWELL_DEVICE bool has_position(const Params& p, int64_t row) {
  if (p.cos_sin == nullptr) return true;
  const int64_t position = p.positions[row];
  return position >= 0 && position < p.max_positions;
}

// The slot that a row is written to, or -1.
HOPWELL_DEVICE int slot_of(const Params& p, int64_t row) {
  const int64_t slot = p.slots[row];
  return slot >= 0 && slot < p.cache.slots() && has_position(p, row) ? int(slot) : -1;
}

// Fetches rows to L2. Only a hint: if a row does not begin at a 128-byte line, its last bytes may not be fetched.
HOPWELL_DEVICE void prefetch_rows(const Params& p, int64_t first, int rows) {
  constexpr int kLine = 64;  // elements
  const int lines = (p.kv_columns + kLine - 1) / kLine;
  HOPWELL_NO_UNROLL
  for (int i = arch::thread_index(); i < rows * lines; i += Config::kThreads)
    arch::prefetch_l2(p.kv + (first + i / lines) * p.kv_stride + i % lines * kLine);
}

// Stores the slots of the CTA's rows and marks them.
HOPWELL_DEVICE void store_slots(const Params& p, SharedStorage& s, int64_t first, int rows) {
  const int thread = arch::thread_index();
  static_assert(Config::kThreads == Config::kRows && Config::kMarks % (4 * Config::kThreads) == 0);
  for (int i = 4 * thread; i < Config::kMarks; i += 4 * Config::kThreads)
    arch::store_shared_v4(arch::shared_address(s.marks + i), {});
  s.replaced[thread] = 0;
  const int slot = thread < rows ? slot_of(p, first + thread) : -1;
  s.slots[thread] = slot;
  if (slot >= 0) {
    const mla_cache::Format& f = p.format;
    const int block = slot / p.block, row = slot - block * p.block;
    const int64_t of_block = block * p.cache.stride, data = of_block + int64_t{row} * f.data_pitch;
    s.data_at[thread] = data;
    s.scales_at[thread] = f.scale_pitch == 0
                              ? data + f.scales
                              : of_block + int64_t{p.block} * f.data_pitch + int64_t{row} * f.scale_pitch;
  }
  arch::syncthreads();
  arch::red_add_shared(slot >= 0, arch::shared_address(s.marks + Mark::index(slot)), Mark::of(thread).sum);
}

// Notes that row `later` replaces the CTA's rows with the same slot. mark: at this slot's index. Not inline, because
// few rows behind the CTA's own find a mark.
HOPWELL_NO_INLINE void find_replaced_by(const Params& p, SharedStorage& s, int64_t first, int rows, int64_t later,
                                        int slot, Mark mark) {
  const int begin = mark.has_one() ? mark.row() : 0, end = mark.has_one() ? begin + 1 : rows;
  for (int row = begin; row < end; ++row)
    arch::mark_shared(s.slots[row] == slot && first + row < later && has_position(p, later),
                      arch::shared_address(s.replaced + row));
}

// Looks through the slots of all rows after the first of the CTA. Slot: their type.
template <class Slot>
HOPWELL_DEVICE void find_replaced(const Params& p, SharedStorage& s, int64_t first, int rows) {
  constexpr uint32_t kUnroll = 4, kThreads = Config::kThreads;
  const auto slots = uint64_t(p.cache.slots());
  const auto n = uint32_t(p.n);
  for (uint32_t at = uint32_t(first) + 1; at < n; at += kThreads * kUnroll) {
    const uint32_t mine = at + uint32_t(arch::thread_index());
    Slot slot[kUnroll];
    HOPWELL_UNROLL
    for (uint32_t i = 0; i < kUnroll; ++i)
      slot[i] = mine + kThreads * i < n ? static_cast<const Slot*>(p.slots.data)[(mine + kThreads * i) * p.slots.stride]
                                        : Slot{-1};
    HOPWELL_UNROLL
    for (uint32_t i = 0; i < kUnroll; ++i) {
      const Mark mark{uint64_t(slot[i]) < slots ? s.marks[Mark::index(slot[i])] : 0};  // negative ones are large
      if (mark.sum != 0) [[unlikely]]
        find_replaced_by(p, s, first, rows, mine + kThreads * i, int(slot[i]), mark);
    }
  }
}

// Four columns of a row.
struct alignas(8) Pack {
  bf16 x[Config::kColumns];

  HOPWELL_DEVICE float operator[](int i) const { return arch::to_float(x[i]); }
};

// A row of the call.
struct Row {
  int64_t number;
  const bf16 *kv, *k_rope;

  HOPWELL_DEVICE Row(const Params& p, int64_t number)
      : number(number), kv(p.kv + number * p.kv_stride), k_rope(p.k_rope + number * p.k_rope_stride) {}
};

HOPWELL_DEVICE const bf16* address_of(const Params& p, const Row& row, int c) {
  return c < p.kv_columns ? row.kv + c : row.k_rope + (c - p.kv_columns);
}
HOPWELL_DEVICE float load_column(const Params& p, const Row& row, int c) {
  return arch::to_float(*address_of(p, row, c));
}
HOPWELL_DEVICE bool is_rotated(const Params& p, int c) {
  return p.cos_sin != nullptr && c >= p.rope_first && c < p.rope_first + p.rope_columns;
}
// Before rotation.
HOPWELL_NO_INLINE Pack load_unaligned_pack(const Params& p, Row row, int c) {
  Pack pack;
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kColumns; ++i) pack.x[i] = *address_of(p, row, c + i);
  return pack;
}
HOPWELL_DEVICE Pack load_pack(const Params& p, const Row& row, int c) {
  if (p.aligned && (c + Config::kColumns <= p.kv_columns || c >= p.kv_columns))
    return arch::load_vector<Pack>(address_of(p, row, c));
  return load_unaligned_pack(p, row, c);
}

// Column c of a row after its rotation, rounded to bf16.
HOPWELL_DEVICE float rotated(const Params& p, const Row& row, int c, float x) {
  const int at = c - p.rope_first, half = p.rope_columns / 2;
  if (at < 0 || at >= p.rope_columns) return x;
  const bool is_second = p.interleaved ? at % 2 != 0 : at >= half;
  const int pair = p.interleaved ? at / 2 : at % half;
  const int distance = p.interleaved ? 1 : half;
  const float other = load_column(p, row, is_second ? c - distance : c + distance);
  const int64_t entry = p.positions[row.number] * p.cos_sin_stride + pair;
  const float cosine = tile::load_fp32(p.cos_sin, p.cos_sin_is_bf16, entry);
  const float sine = tile::load_fp32(p.cos_sin, p.cos_sin_is_bf16, entry + half);
  return arch::to_float(arch::to_bf16(is_second ? x * cosine + other * sine : x * cosine - other * sine));
}

// Four columns after their rotation. A column that is not rotated keeps its bits, a NaN too. Not inline: few calls
// rotate, and code that a warp has to pass costs misses of the instruction cache.
HOPWELL_NO_INLINE Pack rotated_pack(const Params& p, Row row, int c, Pack pack) {
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kColumns; ++i)
    if (is_rotated(p, c + i)) pack.x[i] = arch::to_bf16(rotated(p, row, c + i, pack[i]));
  return pack;
}
HOPWELL_DEVICE Pack pack_of(const Params& p, const Row& row, int c) {
  const Pack pack = load_pack(p, row, c);
  if (p.cos_sin != nullptr && c + Config::kColumns > p.rope_first && c < p.rope_first + p.rope_columns)
    return rotated_pack(p, row, c, pack);
  return pack;
}

// The largest magnitude of the lanes that have a group of codes.
HOPWELL_DEVICE float max_of_group(float x, int lanes) {
  for (int distance = 1; distance < lanes; distance *= 2) x = fmaxf(x, arch::shuffle_xor(x, distance));
  return x;
}

// A lane's columns of a group of codes.
template <int kPacks>
struct Columns {
  static constexpr int kCount = kPacks * Config::kColumns;
  Pack packs[kPacks];

  // From a 16-byte aligned address. kPacks is even.
  HOPWELL_DEVICE void load_contiguous(const bf16* from) {
    HOPWELL_UNROLL
    for (int i = 0; i + 1 < kPacks; i += 2) {
      const auto words = arch::load_vector<arch::Words4>(from + i * Config::kColumns);
      packs[i] = arch::bit_cast<Pack>(arch::Words2{words.w[0], words.w[1]});
      packs[i + 1] = arch::bit_cast<Pack>(arch::Words2{words.w[2], words.w[3]});
    }
  }

  // The largest finite magnitude. finite: whether all columns are.
  HOPWELL_DEVICE float amax(bool& finite) const {
    uint32_t largest = 0;  // magnitude as bits of fp32
    HOPWELL_UNROLL
    for (const Pack& pack : packs) {
      HOPWELL_UNROLL
      for (const uint32_t word : arch::bit_cast<arch::Words2>(pack).w)
        largest = std::max({largest, word << 16 & 0x7FFF0000, word & 0x7FFF0000});
    }
    finite = largest < 0x7F800000;
    if (finite) return arch::bit_cast<float>(largest);
    float of_finite = 0;
    HOPWELL_UNROLL
    for (const Pack& pack : packs) {
      HOPWELL_UNROLL
      for (int i = 0; i < Config::kColumns; ++i) of_finite = fmaxf(of_finite, finite_magnitude(pack[i]));
    }
    return of_finite;
  }
};

// The scale of a lane's columns. The first lane of a group of codes stores the scale of the group.
struct GroupScale {
  float scale;
  bool usual;  // the quotients of the lane's columns need no special cases
};
template <int kPacks>
HOPWELL_DEVICE GroupScale store_scale(const Params& p, const Columns<kPacks>& columns, int c, uint8_t* scales) {
  const mla_cache::Format& f = p.format;
  bool finite;
  const float amax = columns.amax(finite);
  if (f.tile == 0) {
    const float scale = p.kv_scale != nullptr ? *p.kv_scale : p.kv_scale_value;
    return {scale, finite && amax < 0x1p60F && scale >= 0x1p-60F && scale <= 0x1p60F};  // no quotient overflows
  }
  const float scale =
      scale_of(max_of_group(amax, (1 << p.tile_bits) / Columns<kPacks>::kCount), p.pow2, p.least_exponent);
  if (c < f.codes && c % (1 << p.tile_bits) == 0) {
    if (f.scale == mla_cache::Scale::fp32)
      *reinterpret_cast<float*>(scales + 4 * (c >> p.tile_bits)) = scale;
    else
      scales[c >> p.tile_bits] = uint8_t(arch::bit_cast<uint32_t>(scale) >> 23);
  }
  return {scale, finite};
}

// The code of a column, whatever the column and the scale are. Not inline, because it is rare.
HOPWELL_NO_INLINE uint32_t code_of(float x, float scale) { return code_of_quotient(x, x / scale); }

// The codes of a lane's columns, four in a word.
template <class Encode, int kPacks>
struct Codes {
  uint32_t words[kPacks];

  HOPWELL_DEVICE Codes(const Columns<kPacks>& columns, const GroupScale& group, bool is_power) {
    const float scale = group.scale;
    if (arch::ballot(!group.usual) != 0) {
      HOPWELL_UNROLL
      for (int n = 0; n < kPacks; ++n) {
        uint32_t codes = 0;
        HOPWELL_UNROLL
        for (int i = 0; i < Config::kColumns; ++i) codes |= code_of(columns.packs[n][i], scale) << 8 * i;
        words[n] = codes;
      }
      return;
    }
    if (is_power) {
      const float reciprocal = arch::bit_cast<float>(0x7f000000 - arch::bit_cast<uint32_t>(scale));
      encode(columns, [&](float x) { return x * reciprocal; });
    } else {
      // The correctly rounded x / scale: x · reciprocal, corrected by the remainder (Markstein).
      const float reciprocal = 1 / scale;
      encode(columns, [&](float x) {
        const float quotient = x * reciprocal;
        return copysignf(fmaf(fmaf(-quotient, scale, x), reciprocal, quotient), x);
      });
    }
  }

 private:
  template <class Divide>
  HOPWELL_DEVICE void encode(const Columns<kPacks>& columns, const Divide& divide) {
    HOPWELL_UNROLL
    for (int n = 0; n < kPacks; ++n) {
      float quotients[Config::kColumns];
      HOPWELL_UNROLL
      for (int i = 0; i < Config::kColumns; ++i) quotients[i] = divide(columns.packs[n][i]);
      words[n] = Encode::codes(quotients);
    }
  }
};

template <class Encode, int kPacks>
HOPWELL_DEVICE void store_codes(const Params& p, const Row& row, uint8_t* data, uint8_t* scales) {
  constexpr int kOfLane = Columns<kPacks>::kCount;
  const mla_cache::Format& f = p.format;
  const int lane = arch::lane_index();
  for (int first = 0; first < f.codes; first += 32 * kOfLane) {
    const int c = first + lane * kOfLane;
    Columns<kPacks> columns{};
    if (kPacks % 2 == 0 && p.codes_are_contiguous) {
      if (c < f.codes) columns.load_contiguous(row.kv + c);
    } else if (c < f.codes) {
      HOPWELL_UNROLL
      for (int i = 0; i < kPacks; ++i) columns.packs[i] = pack_of(p, row, c + i * Config::kColumns);
    }
    const GroupScale group = store_scale(p, columns, c, scales);
    const Codes<Encode, kPacks> codes(columns, group, f.tile > 0 && p.pow2);
    if (c >= f.codes) continue;
    if constexpr (kPacks == 4)
      arch::store_vector(data + c, arch::Words4{{codes.words[0], codes.words[1], codes.words[2], codes.words[3]}});
    else
      *reinterpret_cast<uint32_t*>(data + c) = codes.words[0];
  }
  if (f.scale == mla_cache::Scale::ue8m0 && f.tiles() + lane < f.scale_pitch) scales[f.tiles() + lane] = 0;
}

template <class Encode, int kPacks>
HOPWELL_DEVICE void store_row(const Params& p, const Row& row, uint8_t* data, uint8_t* scales) {
  const mla_cache::Format& f = p.format;
  if (f.codes > 0) store_codes<Encode, kPacks>(p, row, data, scales);
  const int lane = arch::lane_index();
  for (int c = lane * Config::kColumns; c < f.plain; c += 32 * Config::kColumns)
    arch::store_vector(data + f.plain_at + 2 * c, pack_of(p, row, f.codes + c));
  for (int byte = 4 * lane; byte < f.reserved; byte += 4 * 32)
    *reinterpret_cast<uint32_t*>(data + f.data_pitch - f.reserved + byte) = 0;
}

// kPacks: of four columns for each lane.
template <class Encode, int kPacks>
__global__ void __launch_bounds__(Config::kThreads, 4) mla_cache_append_rows(const __grid_constant__ Params p) {
  auto& s = arch::dynamic_smem<SharedStorage>();
  tile::wait_for_prior_kernels();
  tile::launch_dependents();
  const int64_t begin = arch::block_index() * p.rows_of_cta, end = std::min(begin + p.rows_of_cta, p.n);
  for (int64_t first = begin; first < end; first += Config::kRows) {
    const int rows = int(std::min<int64_t>(end - first, Config::kRows));
    prefetch_rows(p, first, rows);
    store_slots(p, s, first, rows);
    arch::syncthreads();
    if (p.slots.wide)
      find_replaced<int64_t>(p, s, first, rows);
    else
      find_replaced<int32_t>(p, s, first, rows);
    arch::syncthreads();
    for (int i = arch::warp_index(); i < rows; i += Config::kWarps)
      if (s.slots[i] >= 0 && s.replaced[i] == 0)
        store_row<Encode, kPacks>(p, Row(p, first + i), p.cache.data + s.data_at[i], p.cache.data + s.scales_at[i]);
    arch::syncthreads();  // the next rows overwrite slots and marks
  }
}

}  // namespace hopwell::ops::mla_cache_append::HOPWELL_TARGET
