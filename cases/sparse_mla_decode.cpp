// sparse_mla_decode: inputs, float64 reference, tolerance and cost.
#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>
#include <cstring>

#include "nvfp4.hpp"
#include "suites.hpp"
#include "tile/cpu/parallel.hpp"
#include "vectors.hpp"

namespace hopwell::cases {
namespace {

enum class Rows { kPlain, kPerTensor, kV32, kV4, kV41 };

struct Decode {
  Rows rows = Rows::kPlain;
  std::int64_t b = 2, q_len = 2, h_q = 16, d_qk = 576, d_v = 512, topk = 70;
  std::int64_t blocks = 9, block = 16, gap = 0;                     // gap: elements between two blocks
  std::int64_t extra_topk = -1, extra_blocks = 5, extra_block = 7;  // -1: no second cache
  std::int64_t keys_per_split = 4096;
  DType dtype = DType::kBFloat16, cache = DType::kBFloat16;  // of q; of rows that are not quantised
  bool out_fp32 = false, flat = false, strided = false, lse = true;
  std::int64_t strides_gap = 8, out_gap = 8;  // of strided q, and of strided out, elements
  std::int64_t max_blocks = 0;                // 0: entries are slots
  enum class Lens { kNone, kSequence, kQuery } context_lens = Lens::kNone, topk_length = Lens::kNone;
  enum class Sink { kNone, kAny, kExtreme } sink = Sink::kNone;
  // Peaked, for rows of V4: the first entry has score 0, and all others are one row with a score of -7.7.
  enum class Entries { kAny, kEmptyRows, kTwice, kOne, kPeaked } entries = Entries::kAny;
  // Any: also negative ones and 0. Some: now and then one that GPUs decode in another way. Small: the smallest that
  // mla_cache_append writes.
  enum class Scales { kPow2, kAny, kSome, kSmall } scales = Scales::kPow2;
  float kv_scale = 0;  // 0: not given
  bool scale_array = false, rope_cache = false;
  bool planted_nan = false, nan_scale = false;  // in a selected row: a number or a code, or a scale
  double q_size = 0.1;
  float sm_scale = 0.5F;

  [[nodiscard]] std::int64_t row_elements() const {
    constexpr std::int64_t kBytes[] = {0, 0, 656, 584, 528};
    const std::int64_t bytes = kBytes[static_cast<int>(rows)];
    return bytes > 0 ? bytes : rope_cache ? d_v : d_qk;
  }
  [[nodiscard]] double row_bytes() const {
    return static_cast<double>(rows == Rows::kPlain ? d_qk * static_cast<std::int64_t>(size_of(cache))
                                                    : row_elements());
  }
};

// One cache with the entries that select its rows.
struct CacheData {
  std::int64_t blocks = 0, block = 1, topk = 0;
  Array *cache = nullptr, *rope = nullptr, *indices = nullptr, *topk_length = nullptr, *block_tables = nullptr;
  std::vector<double> values = {};  // [slots, d_qk]; 0 where no row is selected
};

struct Inputs {
  Array *q = nullptr, *context_lens = nullptr, *attn_sink = nullptr, *kv_scale = nullptr;
  CacheData keys, extra;
};

// ---- which slots a query selects ----

std::int64_t clamped(double x, std::int64_t most) {
  return static_cast<std::int64_t>(std::clamp(x, 0.0, static_cast<double>(most)));
}

double per_query(const Array& array, const Decode& p, std::int64_t b, std::int64_t i) {
  return array.get(array.shape().size() == 1 ? b : b * p.q_len + i);
}

// Slots of the valid entries of query i of sequence b, in order.
std::vector<std::int64_t> slots_of(const Decode& p, const CacheData& c, const Array* context_lens, std::int64_t b,
                                   std::int64_t i) {
  std::vector<std::int64_t> slots;
  const std::int64_t length = c.topk_length == nullptr ? c.topk : clamped(per_query(*c.topk_length, p, b, i), c.topk);
  const std::int64_t max_blocks = c.block_tables == nullptr ? 0 : c.block_tables->shape()[1];
  std::int64_t visible = c.block_tables == nullptr ? c.blocks * c.block : max_blocks * c.block;
  if (context_lens != nullptr) {
    const double before = context_lens->shape().size() == 1 ? static_cast<double>(p.q_len - 1 - i) : 0.0;
    visible = clamped(per_query(*context_lens, p, b, i) - before, visible);
  }
  for (std::int64_t j = 0; j < length; ++j) {
    const auto entry = static_cast<std::int64_t>(c.indices->get((b * p.q_len + i) * c.topk + j));
    if (entry < 0 || entry >= visible) continue;
    if (c.block_tables == nullptr) {
      slots.push_back(entry);
      continue;
    }
    const auto page = static_cast<std::int64_t>(c.block_tables->get(b * max_blocks + entry / c.block));
    if (page >= 0 && page < c.blocks) slots.push_back(page * c.block + entry % c.block);
  }
  return slots;
}

// ---- rows ----

// Bytes of blocks in the order of [blocks, block, row].
struct Bytes {
  Array& of;
  std::int64_t row_bytes, block;
  void put(std::int64_t slot, std::int64_t at, double value) const {
    of.set(slot / block * block * row_bytes + at, value);
  }
  void put(std::int64_t slot, std::int64_t at, std::uint32_t bits, int bytes) const {
    for (int i = 0; i < bytes; ++i) put(slot, at + i, bits >> 8 * i & 0xFF);
  }
};

double as_bf16(double x) {
  const float nearest = static_cast<float>(x);  // the product of a code and a scale, rounded to fp32
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  return double{std::bit_cast<float>((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000U)};
}

// The only element of a row that q multiplies if entries are peaked, and its number. As small as codes times 2^-22.
constexpr double kPeakedElement = -0x1.ECp2 * 0x1p-17;
constexpr std::int64_t kPeakedColumn = 448;

// Random codes and bf16 elements for a row, and their values. Reserved bytes stay NaN. plants: this row has the NaN.
void put_row(const Decode& p, Random& random, const Bytes& bytes, std::int64_t slot, bool plants, double* values) {
  const std::int64_t row = slot % bytes.block;
  const auto codes = [&](std::int64_t at, std::int64_t count, double scale, double* to) {
    for (std::int64_t j = 0; j < count; ++j) {
      auto code = static_cast<unsigned>(random.below(254));
      code += code >= 0x7F ? 1 : 0;  // 0x7F and 0xFF are NaN
      const bool is_nan = plants && p.planted_nan && to + j == values + 261;
      if (is_nan) code = 0xFF;
      bytes.put(slot, at + j, code);
      const double value = is_nan ? static_cast<double>(NAN) : e4m3_value(code & 0x7FU) * (code >= 0x80 ? -1 : 1);
      to[j] = p.rows == Rows::kPerTensor ? value * scale : as_bf16(value * scale);
    }
  };
  const auto plain = [&](std::int64_t at, double* to) {
    for (std::int64_t j = 0; j < 64; ++j) {
      to[j] = as_bf16(random.normal());
      if (p.entries == Decode::Entries::kPeaked) to[j] = j > 0 || slot == 0 ? 0 : kPeakedElement;
      bytes.put(slot, at + 2 * j, std::bit_cast<std::uint32_t>(static_cast<float>(to[j])) >> 16, 2);
    }
  };
  const auto exponent = [&] {
    if (p.scales == Decode::Scales::kSome && random.below(40) == 0) return -24;
    if (p.scales == Decode::Scales::kSmall) return -22;
    return static_cast<int>(random.below(4)) - 10;
  };
  const auto exponent_byte = [&](std::int64_t g) {
    if (plants && p.nan_scale && g == 3) return 255U;
    return static_cast<unsigned>(127 + (p.scales == Decode::Scales::kAny && g == 2 ? -127 : exponent()));
  };
  const auto value_of = [](unsigned byte) {
    return byte == 255 ? static_cast<double>(NAN) : std::ldexp(1.0, static_cast<int>(byte) - 127);
  };
  switch (p.rows) {
    case Rows::kPlain:
      return;
    case Rows::kPerTensor:
      codes(p.d_qk * row, p.d_qk, p.kv_scale == 0 ? 1.0 : static_cast<double>(p.kv_scale), values);
      return;
    case Rows::kV32:
      for (std::int64_t g = 0; g < 4; ++g) {
        float scale = std::ldexp(1.0F, exponent());
        if (p.scales == Decode::Scales::kAny)
          scale = g == 1 ? 0.0F : static_cast<float>(0.004 * (random.uniform() - 0.5));
        if (p.scales == Decode::Scales::kSome && random.below(60) == 0) scale *= -1.2345F;
        if (plants && p.nan_scale && g == 3) scale = NAN;
        bytes.put(slot, 656 * row + 512 + 4 * g, std::bit_cast<std::uint32_t>(scale), 4);
        codes(656 * row + 128 * g, 128, static_cast<double>(scale), values + 128 * g);
      }
      if (p.d_qk == 576) plain(656 * row + 528, values + 512);
      return;
    case Rows::kV4:
      for (std::int64_t g = 0; g < 7; ++g) {
        const unsigned byte = exponent_byte(g);
        bytes.put(slot, 576 * bytes.block + 8 * row + g, byte);
        codes(576 * row + 64 * g, 64, value_of(byte), values + 64 * g);
      }
      plain(576 * row + 448, values + 448);
      return;
    case Rows::kV41:
      for (std::int64_t g = 0; g < 16; ++g) {
        const unsigned byte = exponent_byte(g);
        bytes.put(slot, 512 * bytes.block + 16 * row + g, byte);
        codes(512 * row + 32 * g, 32, value_of(byte), values + 32 * g);
      }
      return;
  }
}

// Fills a selected row.
void fill_row(const Decode& p, Random& random, CacheData& c, std::int64_t slot, bool plants) {
  double* values = c.values.data() + slot * p.d_qk;
  const std::int64_t width = p.row_elements();
  put_row(p, random, {*c.cache, width, c.block}, slot, plants, values);
  for (std::int64_t d = 0; p.rows == Rows::kPlain && d < p.d_qk; ++d) {
    Array& array = d < width ? *c.cache : *c.rope;
    const std::int64_t at = d < width ? slot * width + d : slot * (p.d_qk - width) + d - width;
    array.set(at, plants && d == 5 ? static_cast<double>(NAN) : random.normal());
    values[d] = array.get(at);
  }
}

// Fills the selected rows. All other bytes are NaN in every type. All threads fill large caches, each row from its own
// seed.
void fill_cache(const Decode& p, Random& random, CacheData& c, const std::vector<bool>& selected) {
  for (Array* array : {c.cache, c.rope})
    if (array != nullptr) array->fill(p.rows == Rows::kPlain ? static_cast<double>(NAN) : 255.0);
  c.values.assign(static_cast<std::size_t>(c.blocks * c.block * p.d_qk), 0.0);
  std::vector<std::int64_t> slots;
  for (std::int64_t slot = 0; slot < c.blocks * c.block; ++slot)
    if (selected[static_cast<std::size_t>(slot)]) slots.push_back(slot);
  const auto count = static_cast<std::int64_t>(slots.size());
  const auto plants = [&](std::int64_t i) { return i == 0 && (p.planted_nan || p.nan_scale); };
  if (count * p.d_qk <= kElementsOfOneThread) {
    for (std::int64_t i = 0; i < count; ++i) fill_row(p, random, c, slots[static_cast<std::size_t>(i)], plants(i));
    return;
  }
  const std::uint64_t seed = random.bits();
  cpu::parallel_for(count, [&](std::int64_t i) {
    Random own(seed + static_cast<std::uint64_t>(i));
    fill_row(p, own, c, slots[static_cast<std::size_t>(i)], plants(i));
  });
}

// ---- inputs ----

std::vector<std::int64_t> strides_of(const std::vector<std::int64_t>& shape, bool strided, std::int64_t gap) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t i = shape.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * shape[i + 1] + (strided ? gap : 0);
  return strides;
}

Array& add_tensor(Instance& instance, const Decode& p, const char* name, DType dtype,
                  const std::vector<std::int64_t>& shape, std::int64_t gap = 8) {
  return instance.add({name, dtype, shape, strides_of(shape, p.strided, gap)});
}

std::vector<std::int64_t> query_shape(const Decode& p, std::initializer_list<std::int64_t> rest) {
  std::vector<std::int64_t> shape{p.b};
  if (!p.flat) shape.push_back(p.q_len);
  shape.insert(shape.end(), rest);
  return shape;
}

// An int32 [b] or [b, q_len] of random numbers up to `most`, and the given special ones.
Array* add_counts(Instance& instance, const Decode& p, Random& random, const char* name, Decode::Lens kind,
                  std::int64_t most, const std::vector<std::int64_t>& special) {
  if (kind == Decode::Lens::kNone) return nullptr;
  const std::vector<std::int64_t> shape =
      kind == Decode::Lens::kSequence ? std::vector{p.b} : std::vector{p.b, p.q_len};
  Array& array = add_tensor(instance, p, name, DType::kInt32, shape, 3);
  for (std::int64_t j = 0; j < array.size(); ++j) {
    const std::int64_t number = j % (static_cast<std::int64_t>(special.size()) + 1);
    const std::int64_t value = number == 0 ? random.below(most + 1) : special[static_cast<std::size_t>(number - 1)];
    array.set(j, static_cast<double>(value));
  }
  return &array;
}

void fill_indices(const Decode& p, Random& random, CacheData& c, std::int64_t limit) {
  const std::int64_t invalid[] = {INT_MIN, -123456, -1, limit, limit + 1, INT_MAX};
  for (std::int64_t j = 0; j < c.indices->size(); ++j) {
    const std::int64_t row = j / std::max<std::int64_t>(c.topk, 1);
    std::int64_t entry = limit == 0 ? -1 : random.below(limit);
    if (random.below(6) == 0) entry = invalid[random.below(6)];
    if (p.entries == Decode::Entries::kEmptyRows && row % 2 == 0) entry = invalid[random.below(6)];
    if (p.entries == Decode::Entries::kTwice && j % 2 == 1) entry = static_cast<std::int64_t>(c.indices->get(j - 1));
    if (p.entries == Decode::Entries::kOne) entry = 3;
    if (p.entries == Decode::Entries::kPeaked) entry = j % c.topk == 0 ? 0 : 1;
    c.indices->set(j, static_cast<double>(entry));
  }
}

void add_cache(Instance& instance, const Decode& p, Random& random, CacheData& c, bool extra, const Array* lens) {
  const DType type = p.rows == Rows::kPlain ? p.cache : DType::kUInt8;
  const std::int64_t row = p.row_elements();
  c.cache =
      &instance.add({extra ? "extra_cache" : "cache", type, {c.blocks, c.block, row}, {c.block * row + p.gap, row, 1}});
  if (p.rope_cache) {
    const std::int64_t width = p.d_qk - row;
    c.rope = &instance.add({"rope_cache", type, {c.blocks, c.block, width}, {c.block * width + p.gap, width, 1}});
  }
  c.indices = &add_tensor(instance, p, extra ? "extra_indices" : "indices", DType::kInt32, query_shape(p, {c.topk}), 5);
  c.topk_length = add_counts(instance, p, random, extra ? "extra_topk_length" : "topk_length", p.topk_length, c.topk,
                             {0, c.topk, c.topk + 5, 1, -3, INT_MAX, INT_MIN});
  if (p.max_blocks > 0) {
    c.block_tables =
        &add_tensor(instance, p, extra ? "extra_block_tables" : "block_tables", DType::kInt32, {p.b, p.max_blocks}, 2);
    const std::int64_t bad[] = {-1, c.blocks, INT_MAX, INT_MIN};
    for (std::int64_t j = 0; j < c.block_tables->size(); ++j)
      c.block_tables->set(j, static_cast<double>(j % 5 == 4 ? bad[random.below(4)] : random.below(c.blocks)));
  }
  fill_indices(p, random, c, p.max_blocks > 0 ? p.max_blocks * c.block : c.blocks * c.block);
  std::vector<bool> selected(static_cast<std::size_t>(c.blocks * c.block));
  for (std::int64_t s = 0; s < p.b * p.q_len; ++s)
    for (const std::int64_t slot : slots_of(p, c, lens, s / p.q_len, s % p.q_len))
      selected[static_cast<std::size_t>(slot)] = true;
  fill_cache(p, random, c, selected);
}

Inputs add_inputs(Instance& instance, const Decode& p, Random& random) {
  Inputs in;
  in.q = &add_tensor(instance, p, "q", p.dtype, query_shape(p, {p.h_q, p.d_qk}), p.strides_gap)
              .fill_normal(random, p.q_size);
  for (std::int64_t j = 0; p.entries == Decode::Entries::kPeaked && j < in.q->size(); ++j)
    in.q->set(j, j % p.d_qk == kPeakedColumn ? 0x1p17 / static_cast<double>(p.sm_scale) : 0);
  if (p.max_blocks > 0)
    in.context_lens =
        add_counts(instance, p, random, "context_lens", p.context_lens, p.max_blocks * p.block,
                   {0, 1, p.block - 1, p.block + 1, p.q_len - 1, p.max_blocks * p.block + 7, INT_MAX, INT_MIN});
  in.keys = {.blocks = p.blocks, .block = p.block, .topk = p.topk};
  add_cache(instance, p, random, in.keys, false, in.context_lens);
  if (p.extra_topk >= 0) {
    in.extra = {.blocks = p.extra_blocks, .block = p.extra_block, .topk = p.extra_topk};
    add_cache(instance, p, random, in.extra, true, nullptr);
  }
  if (p.sink != Decode::Sink::kNone) {
    in.attn_sink = &instance.add({"attn_sink", DType::kFloat32, {p.h_q}, {p.strided ? 3 : 1}});
    const double extreme[] = {0, INFINITY, -INFINITY, 1e38, -1e38};
    for (std::int64_t h = 0; h < p.h_q; ++h)
      in.attn_sink->set(h, p.sink == Decode::Sink::kAny ? 2 * random.normal() : extreme[h % 5]);
  }
  if (p.scale_array) {
    in.kv_scale = &instance.add({"kv_scale", DType::kFloat32, {}});
    in.kv_scale->set(0, static_cast<double>(p.kv_scale));
  }
  return in;
}

// ---- the definition ----

// Keys of one query: rows of values [d_qk].
std::vector<const double*> keys_of(const Decode& p, const Inputs& in, std::int64_t s) {
  std::vector<const double*> keys;
  const std::int64_t b = s / p.q_len, i = s % p.q_len;
  for (const std::int64_t slot : slots_of(p, in.keys, in.context_lens, b, i))
    keys.push_back(in.keys.values.data() + slot * p.d_qk);
  if (p.extra_topk >= 0)
    for (const std::int64_t slot : slots_of(p, in.extra, nullptr, b, i))
      keys.push_back(in.extra.values.data() + slot * p.d_qk);
  return keys;
}

struct Results {
  std::vector<double> out, out_magnitude, lse, lse_magnitude;
};

Results reference(const Decode& p, const Inputs& in) {
  Results r;
  const std::vector<double> q = values_of(*in.q);
  for (std::int64_t s = 0; s < p.b * p.q_len; ++s) {
    const std::vector<const double*> keys = keys_of(p, in, s);
    for (std::int64_t h = 0; h < p.h_q; ++h) {
      std::vector<double> score;
      double most = -INFINITY, magnitude = 0, sum = 0;
      const double scale = static_cast<double>(p.sm_scale);
      for (const double* key : keys) {
        const Sum product = dot(q.data() + (s * p.h_q + h) * p.d_qk, key, p.d_qk);
        score.push_back(scale * product.value);
        most = std::isnan(score.back()) ? score.back() : std::isnan(most) ? most : std::max(most, score.back());
        magnitude = std::max(magnitude, std::abs(scale) * product.magnitude);
      }
      for (const double x : score) sum += std::exp(x - most);
      const double lse = keys.empty() ? INFINITY : most + std::log(sum);
      const double sink = in.attn_sink == nullptr ? -INFINITY : in.attn_sink->get(h);
      const double factor = 1 / (1 + std::exp(sink - lse));
      std::vector<double> out(static_cast<std::size_t>(p.d_v)), size(static_cast<std::size_t>(p.d_v));
      for (std::size_t j = 0; j < keys.size(); ++j) {
        const double weight = std::exp(score[j] - lse) * factor;
        add_scaled(weight, weight, keys[j], out.data(), size.data(), p.d_v);
      }
      r.out.insert(r.out.end(), out.begin(), out.end());
      r.out_magnitude.insert(r.out_magnitude.end(), size.begin(), size.end());
      r.lse.push_back(lse), r.lse_magnitude.push_back(magnitude);
    }
  }
  return r;
}

// ---- the call ----

Tensor view_of_optional(const Array* array) { return array == nullptr ? Tensor{} : array->view(); }

Tolerance tolerance(const Decode& p, double size) {
  if (p.dtype == DType::kFloat32) return {.norm = 1e-4, .absolute = 1e-3 * size, .relative = 1e-3};
  return {.norm = p.out_fp32 ? 2e-3 : 4e-3, .absolute = 8e-3 * size, .relative = 3.0 / 128};
}

double rms_of_keys(const Decode& p, const Inputs& in) {
  std::vector<double> values;
  for (std::int64_t s = 0; s < p.b * p.q_len; ++s)
    for (const double* key : keys_of(p, in, s)) values.insert(values.end(), key, key + p.d_v);
  return values.empty() ? 1 : rms(values);
}

Instance make(Random& random, const Decode& p, bool timed) {
  Instance instance;
  const Inputs in = add_inputs(instance, p, random);
  const DType out_type = p.out_fp32 ? DType::kFloat32 : p.dtype;
  Array& out = add_tensor(instance, p, "out", out_type, query_shape(p, {p.h_q, p.d_v}), p.out_gap);
  instance.expect(out, tolerance(p, timed ? 1 : rms_of_keys(p, in)));
  Array* lse = nullptr;
  if (p.lse) {
    lse = &add_tensor(instance, p, "lse", DType::kFloat32, query_shape(p, {p.h_q}), 3);
    instance.expect(*lse, kLogarithm).on_gpus = kLogarithmOnGpus;
  }
  instance.reference = [p, in](Instance& self) {
    Results r = reference(p, in);
    self.outputs[0].expected = std::move(r.out), self.outputs[0].magnitude = std::move(r.out_magnitude);
    if (!p.lse) return;
    self.outputs[1].expected = std::move(r.lse), self.outputs[1].magnitude = std::move(r.lse_magnitude);
  };
  instance.call = [p, in, &out, lse, &workspace = *instance.workspace](const char* backend, Stream stream) {
    SparseMlaDecodeArgs args;
    args.q = in.q->view(), args.cache = in.keys.cache->view(), args.indices = in.keys.indices->view();
    args.sm_scale = p.sm_scale, args.d_v = p.d_v;
    args.block_tables = view_of_optional(in.keys.block_tables);
    args.context_lens = view_of_optional(in.context_lens);
    args.topk_length = view_of_optional(in.keys.topk_length);
    args.extra_cache = view_of_optional(in.extra.cache), args.extra_indices = view_of_optional(in.extra.indices);
    args.extra_topk_length = view_of_optional(in.extra.topk_length);
    args.extra_block_tables = view_of_optional(in.extra.block_tables);
    args.attn_sink = view_of_optional(in.attn_sink), args.rope_cache = view_of_optional(in.keys.rope);
    args.kv_scale = view_of_optional(in.kv_scale);
    if (p.kv_scale != 0 && !p.scale_array) args.kv_scale_value = p.kv_scale;
    args.keys_per_split = p.keys_per_split;
    args.out = out.view(), args.lse = view_of_optional(lse), args.backend = backend;
    run_with_workspace<SparseMlaDecodeArgs>(hopwell::sparse_mla_decode, hopwell::sparse_mla_decode_workspace_bytes,
                                            workspace, args, stream);
  };
  const auto queries = static_cast<double>(p.b * p.q_len), heads = static_cast<double>(p.h_q);
  const auto keys = static_cast<double>(p.topk + std::max<std::int64_t>(p.extra_topk, 0));
  instance.flops = 2 * queries * heads * keys * static_cast<double>(p.d_qk + p.d_v);
  instance.bytes = queries * (keys * (p.row_bytes() + 4) + heads * static_cast<double>(2 * (p.d_qk + p.d_v) + 4));
  return instance;
}

using Problems = std::vector<std::pair<std::string, Decode>>;

// Tiles of 64 heads: several tiles of keys, partial ones too.
Problems problems_of_many_heads() {
  using Lens = Decode::Lens;
  Problems all;
  const auto add = [&](const std::string& name, const Decode& p) { all.emplace_back("many_heads_" + name, p); };
  for (const auto& [name, rows, d, h_q] :
       {std::tuple{"v32", Rows::kV32, 576, 64}, std::tuple{"v32_without_rope", Rows::kV32, 512, 40},
        std::tuple{"v4", Rows::kV4, 512, 64}, std::tuple{"v41", Rows::kV41, 512, 100},
        std::tuple{"per_tensor_576", Rows::kPerTensor, 576, 50},
        std::tuple{"per_tensor_512", Rows::kPerTensor, 512, 64}})
    add(name, {.rows = rows,
               .b = 1,
               .h_q = h_q,
               .d_qk = d,
               .topk = 420,
               .blocks = 30,
               .topk_length = Lens::kQuery,
               .sink = Decode::Sink::kAny,
               .kv_scale = rows == Rows::kPerTensor ? 0.37F : 0,
               .scale_array = rows == Rows::kPerTensor,
               .q_size = rows == Rows::kPerTensor ? 1e-3 : 0.1});
  add("v4_many_tiles", {.rows = Rows::kV4, .b = 1, .h_q = 64, .d_qk = 512, .topk = 300, .blocks = 30});
  add("bf16_splits", {.b = 1, .h_q = 64, .topk = 420, .blocks = 30, .keys_per_split = 320});
  add("v32_splits_many_queries",
      {.rows = Rows::kV32, .b = 133, .q_len = 1, .h_q = 17, .topk = 65, .keys_per_split = 64});
  add("bf16_512_two_caches", {.b = 1, .h_q = 33, .d_qk = 512, .topk = 200, .extra_topk = 70});
  add("rope_cache_splits", {.b = 1, .h_q = 50, .topk = 300, .blocks = 30, .keys_per_split = 256, .rope_cache = true});
  add("v32_some_scales",
      {.rows = Rows::kV32, .b = 1, .h_q = 33, .topk = 300, .blocks = 30, .scales = Decode::Scales::kSome});
  add("v32_any_scales", {.rows = Rows::kV32, .b = 1, .h_q = 33, .scales = Decode::Scales::kAny});
  add("v4_any_scales", {.rows = Rows::kV4, .b = 1, .h_q = 33, .d_qk = 512, .scales = Decode::Scales::kAny});
  add("v41_some_scales",
      {.rows = Rows::kV41, .b = 1, .h_q = 33, .d_qk = 512, .topk = 300, .blocks = 30, .scales = Decode::Scales::kSome});
  add("v32_nan_code", {.rows = Rows::kV32, .b = 2, .h_q = 40, .planted_nan = true});
  add("v4_nan_scale_splits",
      {.rows = Rows::kV4, .b = 2, .h_q = 40, .d_qk = 512, .topk = 130, .keys_per_split = 64, .nan_scale = true});
  add("per_tensor_nan_code", {.rows = Rows::kPerTensor, .b = 2, .h_q = 33, .planted_nan = true, .q_size = 1e-3});
  add("v32_empty_rows_splits", {.rows = Rows::kV32,
                                .b = 2,
                                .h_q = 48,
                                .topk = 200,
                                .keys_per_split = 128,
                                .sink = Decode::Sink::kExtreme,
                                .entries = Decode::Entries::kEmptyRows});
  add("v32_empty_rows", {.rows = Rows::kV32, .b = 2, .h_q = 48, .entries = Decode::Entries::kEmptyRows});
  add("bf16_empty_rows_two_caches",
      {.b = 2, .h_q = 48, .extra_topk = 20, .lse = false, .entries = Decode::Entries::kEmptyRows});
  add("v32_tables", {.rows = Rows::kV32,
                     .b = 2,
                     .h_q = 64,
                     .topk = 257,
                     .block = 53,
                     .gap = 96,
                     .extra_topk = 65,
                     .keys_per_split = 192,
                     .max_blocks = 6,
                     .context_lens = Lens::kSequence});
  add("v32_strided", {.rows = Rows::kV32, .b = 1, .q_len = 3, .h_q = 40, .out_fp32 = true, .strided = true});
  add("v32_unaligned_q",
      {.rows = Rows::kV32, .b = 1, .h_q = 40, .d_qk = 512, .strided = true, .strides_gap = 2, .out_gap = 2});
  add("v32_large_scores", {.rows = Rows::kV32, .b = 1, .h_q = 33, .topk = 200, .q_size = 100});
  add("v32_negative_scale", {.rows = Rows::kV32, .b = 1, .h_q = 33, .topk = 130, .sm_scale = -0.5F});
  return all;
}

// Rows of bf16 in one cache, without splits.
Problems plain_problems() {
  using Lens = Decode::Lens;
  Problems all{
      {"bf16", {}},
      {"bf16_d_qk_512", {.d_qk = 512}},
      {"bf16_sink", {.h_q = 20, .sink = Decode::Sink::kAny}},
      {"bf16_sink_extreme_empty_rows",
       {.b = 3, .sink = Decode::Sink::kExtreme, .entries = Decode::Entries::kEmptyRows}},
      {"bf16_twice", {.entries = Decode::Entries::kTwice}},
      {"bf16_one_slot", {.topk = 130, .entries = Decode::Entries::kOne}},
      {"bf16_topk_0", {.topk = 0, .sink = Decode::Sink::kAny}},
      {"bf16_no_sequences", {.b = 0}},
      {"bf16_no_blocks", {.blocks = 0}},
      {"bf16_lengths", {.b = 8, .q_len = 1, .topk_length = Lens::kSequence}},
      {"bf16_lengths_of_queries", {.b = 3, .q_len = 3, .topk_length = Lens::kQuery}},
      {"bf16_flat", {.b = 3, .q_len = 1, .flat = true}},
      {"bf16_without_lse", {.lse = false}},
      {"bf16_tables", {.max_blocks = 11}},
      {"bf16_tables_lens", {.b = 9, .q_len = 2, .max_blocks = 7, .context_lens = Lens::kSequence}},
      {"bf16_tables_lens_of_queries",
       {.b = 3, .q_len = 4, .block = 5, .max_blocks = 13, .context_lens = Lens::kQuery, .topk_length = Lens::kQuery}},
      {"bf16_tables_h_q_64", {.h_q = 64, .block = 61, .max_blocks = 4, .context_lens = Lens::kSequence}},
      {"bf16_many_tiles", {.b = 7, .q_len = 1, .h_q = 65, .topk = 200, .block = 61, .max_blocks = 4}},
      {"bf16_unaligned_h_q_40", {.b = 3, .h_q = 40, .topk = 200, .gap = 3, .topk_length = Lens::kSequence}},
      {"bf16_blocks_apart", {.blocks = 40, .block = 1, .gap = 24}},
      {"bf16_block_256", {.blocks = 2, .block = 256, .gap = 64}},
      {"bf16_nan_row", {.planted_nan = true}},
      {"bf16_large_scores", {.topk = 200, .q_size = 200}},
      {"bf16_negative_scale", {.topk = 130, .sm_scale = -0.5F}},
      {"bf16_strided", {.b = 3, .q_len = 1, .strided = true}},
      {"bf16_out_unaligned", {.b = 3, .q_len = 1, .strided = true, .out_gap = 1}},
      {"bf16_one_block", {.blocks = 1, .block = 90, .gap = 3}},
      {"bf16_q_len_8", {.b = 1, .q_len = 8}},
  };
  for (const std::int64_t h_q : {1, 5, 8, 32, 33, 64, 96, 128})
    all.emplace_back("bf16_h_q_" + std::to_string(h_q), Decode{.b = 1, .h_q = h_q, .sink = Decode::Sink::kAny});
  for (const std::int64_t topk : {1, 63, 64, 65, 127, 256, 257})
    all.emplace_back("bf16_topk_" + std::to_string(topk), Decode{.b = 1, .q_len = 2, .topk = topk});
  return all;
}

// Other rows, two caches, splits, and what GPUs do not support.
Problems other_problems() {
  using Lens = Decode::Lens;
  Problems all;
  const auto add = [&](const std::string& name, const Decode& p) { all.emplace_back(name, p); };
  for (const auto& [name, rows, d] :
       {std::tuple{"v32", Rows::kV32, 576}, std::tuple{"v32_without_rope", Rows::kV32, 512},
        std::tuple{"v4", Rows::kV4, 512}, std::tuple{"v41", Rows::kV41, 512},
        std::tuple{"per_tensor", Rows::kPerTensor, 576}}) {
    const std::string format = name;
    const double size = rows == Rows::kPerTensor ? 1e-3 : 0.1;
    const bool v4 = rows == Rows::kV4;  // GPUs need blocks at distances of 16 bytes
    add(format, {.rows = rows, .d_qk = d, .q_size = size});
    add(format + "_two_caches", {.rows = rows,
                                 .d_qk = d,
                                 .extra_topk = 130,
                                 .extra_block = v4 ? 6 : 7,
                                 .topk_length = Lens::kQuery,
                                 .sink = Decode::Sink::kAny,
                                 .q_size = size});
    add(format + "_tables_splits", {.rows = rows,
                                    .b = 5,
                                    .h_q = 5,
                                    .d_qk = d,
                                    .topk = 257,
                                    .block = 53,
                                    .gap = v4 ? 104 : 96,
                                    .extra_topk = 65,
                                    .keys_per_split = 64,
                                    .max_blocks = 6,
                                    .context_lens = Lens::kSequence,
                                    .q_size = size});
    add(format + "_any_scales", {.rows = rows,
                                 .d_qk = d,
                                 .block = 7,
                                 .gap = v4 ? 8 : 0,
                                 .scales = Decode::Scales::kAny,
                                 .kv_scale = rows == Rows::kPerTensor ? 0.037F : 0,
                                 .q_size = size});
  }
  add("per_tensor_array",
      {.rows = Rows::kPerTensor, .d_qk = 512, .kv_scale = 0.37F, .scale_array = true, .q_size = 1e-3});
  add("splits", {.topk = 257, .keys_per_split = 64, .sink = Decode::Sink::kAny});
  add("splits_256", {.topk = 2049, .blocks = 100, .keys_per_split = 256});
  add("v32_splits_of_three_tiles",
      {.rows = Rows::kV32, .b = 1, .h_q = 8, .topk = 700, .blocks = 50, .keys_per_split = 192});
  // So few queries that each split has a CTA, and the CTAs of a query are a cluster on Hopper.
  add("v32_clusters", {.rows = Rows::kV32,
                       .b = 1,
                       .q_len = 1,
                       .h_q = 5,
                       .topk = 230,
                       .keys_per_split = 64,
                       .sink = Decode::Sink::kAny});
  add("v4_clusters", {.rows = Rows::kV4,
                      .b = 1,
                      .q_len = 1,
                      .h_q = 13,
                      .d_qk = 512,
                      .topk = 128,

                      .extra_topk = 65,
                      .extra_block = 6,
                      .keys_per_split = 64,
                      .lse = false,
                      .entries = Decode::Entries::kEmptyRows});
  add("bf16_clusters", {.b = 2, .q_len = 1, .h_q = 16, .topk = 128, .keys_per_split = 64, .out_fp32 = true});
  add("splits_of_two_tiles", {.topk = 2176, .blocks = 100, .keys_per_split = 1024});
  add("splits_320", {.b = 9, .topk = 1000, .keys_per_split = 320, .topk_length = Lens::kQuery});
  add("splits_empty_rows", {.topk = 200, .keys_per_split = 64, .entries = Decode::Entries::kEmptyRows});
  add("splits_many_queries", {.b = 321, .q_len = 1, .h_q = 3, .topk = 65, .keys_per_split = 64});
  add("splits_longest", {.topk = 600, .keys_per_split = INT64_MAX / 64 * 64});
  add("two_caches", {.extra_topk = 128, .extra_blocks = 3, .extra_block = 64});
  add("two_caches_lengths", {.b = 8, .q_len = 1, .extra_topk = 20, .topk_length = Lens::kSequence});
  add("two_caches_first_empty", {.topk = 0, .extra_topk = 70});
  add("two_caches_second_empty", {.extra_topk = 0});
  add("two_caches_tables", {.b = 5, .extra_topk = 64, .max_blocks = 9, .context_lens = Lens::kSequence});
  add("fp32", {.dtype = DType::kFloat32, .cache = DType::kFloat32});
  add("fp32_q", {.dtype = DType::kFloat32});
  add("fp32_cache", {.cache = DType::kFloat32});
  add("fp32_v32", {.rows = Rows::kV32, .dtype = DType::kFloat32});
  add("fp32_out", {.out_fp32 = true});
  add("d_qk_40", {.h_q = 3, .d_qk = 40, .d_v = 23});
  add("d_v_100", {.d_v = 100});
  add("rope_cache", {.gap = 32, .rope_cache = true});
  add("strided_q_len_3", {.q_len = 3, .gap = 3, .strided = true});
  add("strided_q_len_3_aligned", {.q_len = 3, .gap = 24, .strided = true});
  for (const std::int64_t h_q : {1, 8, 16, 33, 64, 96, 128}) {
    const std::string heads = "_h_q_" + std::to_string(h_q);
    add("v32" + heads, {.rows = Rows::kV32, .b = 1, .q_len = 2, .h_q = h_q, .topk = 100, .sink = Decode::Sink::kAny});
    add("v4_splits" + heads, {.rows = Rows::kV4,
                              .b = 1,
                              .h_q = h_q,
                              .d_qk = 512,
                              .topk = 200,
                              .extra_topk = 65,
                              .extra_block = 6,
                              .keys_per_split = 64});
  }
  add("v4_blocks_of_7", {.rows = Rows::kV4, .d_qk = 512, .block = 7});
  add("bf16_splits_h_q_8", {.b = 3, .h_q = 8, .topk = 300, .blocks = 30, .keys_per_split = 128});
  add("rope_cache_splits", {.topk = 300, .blocks = 30, .keys_per_split = 128, .rope_cache = true});
  add("v32_some_scales", {.rows = Rows::kV32, .b = 3, .topk = 300, .blocks = 30, .scales = Decode::Scales::kSome});
  add("v41_some_scales",
      {.rows = Rows::kV41, .b = 3, .h_q = 5, .d_qk = 512, .topk = 300, .blocks = 30, .scales = Decode::Scales::kSome});
  add("v4_small_scales", {.rows = Rows::kV4,
                          .b = 1,
                          .q_len = 1,
                          .h_q = 8,
                          .d_qk = 512,
                          .topk = 256,
                          .entries = Decode::Entries::kPeaked,
                          .scales = Decode::Scales::kSmall});
  add("v32_nan_code", {.rows = Rows::kV32, .b = 3, .planted_nan = true});
  add("v32_nan_scale", {.rows = Rows::kV32, .b = 3, .nan_scale = true});
  add("v4_nan_scale_splits",
      {.rows = Rows::kV4, .b = 3, .d_qk = 512, .topk = 130, .keys_per_split = 64, .nan_scale = true});
  add("per_tensor_nan_code", {.rows = Rows::kPerTensor, .b = 3, .h_q = 8, .planted_nan = true, .q_size = 1e-3});
  add("v32_one_slot", {.rows = Rows::kV32, .topk = 130, .entries = Decode::Entries::kOne});
  add("v32_empty_rows_splits", {.rows = Rows::kV32,
                                .b = 3,
                                .topk = 200,
                                .keys_per_split = 64,
                                .sink = Decode::Sink::kExtreme,
                                .entries = Decode::Entries::kEmptyRows});
  add("v32_lists",
      {.rows = Rows::kV32, .b = 1, .h_q = 8, .topk = 700, .blocks = 50, .q_size = 30});  // rescales its output
  add("v32_large_q", {.rows = Rows::kV32, .b = 1, .h_q = 8, .q_size = 1e9, .sm_scale = 1e-10F});
  add("v32_small_q", {.rows = Rows::kV32, .b = 1, .h_q = 8, .q_size = 1e-9, .sm_scale = 1e9F});
  add("v32_out_fp32_splits", {.rows = Rows::kV32, .topk = 130, .keys_per_split = 64, .out_fp32 = true, .lse = false});
  add("v32_no_sequences", {.rows = Rows::kV32, .b = 0});
  return all;
}

}  // namespace

Suite sparse_mla_decode() {
  Suite suite{"sparse_mla_decode", {}, {}, {}};
  for (const auto& problems : {plain_problems(), other_problems(), problems_of_many_heads()})
    for (const auto& [name, problem] : problems)
      suite.cases.emplace_back(suite.op, name, [p = problem](Random& random) { return make(random, p, false); });
  const auto shape = [](const char* rows, const char* h_q, const char* b, const char* q_len) {
    return Settings{{"rows", rows},
                    {"h_q", h_q},
                    {"b", b},
                    {"q_len", q_len},
                    {"d_qk", "576"},
                    {"topk", "2048"},
                    {"context", "4096"},
                    {"keys_per_split", "4096"}};
  };
  suite.shapes = {{"bf16_h8", shape("0", "8", "8", "1")},
                  {"bf16_h64", shape("0", "64", "8", "1")},
                  {"v32_h8", shape("2", "8", "8", "1")}};
  suite.bench = [](const Settings& settings, Random& random) {
    const std::int64_t b = number(settings, "b"), context = number(settings, "context"), block = 64;
    return make(random,
                {.rows = static_cast<Rows>(number(settings, "rows")),
                 .b = b,
                 .q_len = number(settings, "q_len"),
                 .h_q = number(settings, "h_q"),
                 .d_qk = number(settings, "d_qk"),
                 .topk = number(settings, "topk"),
                 .blocks = b * context / block,
                 .block = block,
                 .keys_per_split = number(settings, "keys_per_split")},
                true);
  };
  leave_to_nightly(suite, {"splits_256"});  // splits_320 has splits of several tiles too
  leave_to_nightly(suite, {"splits_many_queries", "splits_of_two_tiles", "bf16_many_tiles", "v4_splits_h_q_96"},
                   "sm80");
  suite.unsupported = {
      {"sm80 sm90", "needs q of bfloat16", "fp32 fp32_q fp32_v32"},
      {"sm80 sm90", "needs a cache of bfloat16 or of bytes", "fp32_cache"},
      {"sm80 sm90", "needs d_qk 576 or 512", "d_qk_40"},
      {"sm80 sm90", "needs d_v 512", "d_v_100"},
      {"sm80", "needs base and block stride of cache in multiples of 16 bytes", "bf16_unaligned_*"},
      {"sm80 sm90", "needs base and block stride of cache in multiples of 16 bytes", "strided_q_len_3 v4_blocks_of_7"}};
  suite.allocating = {"splits", "v4_two_caches"};
  suite.subjects = {
      // The forward's kernels with block tables. On sm90: several queries per CTA, steps that wrap around the rings.
      {"sparse_mla_decode_sm80", "emu:sm80", {"bf16_topk_127", "bf16_tables"}, 20, 6},
      // The split kernel and the merge: steps that wrap around the ring, lists of entries, scales of both kinds.
      {"sparse_mla_decode_splits_sm80",
       "emu:sm80",
       {"v32_lists", "v32_some_scales", "v4_splits_h_q_16", "bf16_splits_h_q_8"},
       4,
       9,
       "ops/sparse_mla_decode/"},
      // The kernel for few heads: the same, with and without splits.
      {"sparse_mla_decode_few_heads_sm90",
       "emu:sm90",
       {"v32_lists", "v32_some_scales", "v4_two_caches", "v4_splits_h_q_16", "bf16_splits_h_q_8", "v32_clusters",
        "bf16_clusters"},
       2,
       9,
       "ops/sparse_mla_decode/"},
      // The kernel for many heads: tiles that wrap around the ring, several lists of entries, scales of both kinds,
      // rows of bf16 and of codes, with and without splits.
      {"sparse_mla_decode_many_heads_sm90",
       "emu:sm90",
       {"many_heads_v32", "many_heads_v4_many_tiles", "many_heads_per_tensor_576", "many_heads_bf16_splits",
        "many_heads_v32_some_scales"},
       2,
       20,
       "ops/sparse_mla_decode/"},
      {"sparse_mla_decode_sm90",
       "emu:sm90",
       {"bf16_tables_h_q_64", "bf16_large_scores", "bf16_h_q_33", "bf16_many_tiles", "bf16_unaligned_h_q_40"},
       3,
       12},
  };
  return suite;
}

}  // namespace hopwell::cases
