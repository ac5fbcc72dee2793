// mla_cache_append: inputs, the bytes that follow from the definition, and cost.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "nvfp4.hpp"
#include "suites.hpp"

namespace hopwell::cases {
namespace {

// How the rows of the cache are stored.
enum class Rows { kPlain, kPerTensor, kV32, kV4, kV41, kIndex };

enum class Values {
  kNormal,
  kExtreme,    // zeros of both signs, tiny and huge numbers, and whole groups of them
  kNonFinite,  // NaN and infinities here and there, and groups of nothing else
  kHalfway,    // between two codes
  kGrid,       // multiples of 1/16, so that a rotation by multiples of 1/8 has one right result
};

struct Append {
  Rows rows = Rows::kV32;
  std::int64_t n = 9, d = 576, blocks = 5, block = 4, gap = 0;  // gap: bytes between two blocks
  DType dtype = DType::kBFloat16, cache = DType::kUInt8, integers = DType::kInt64;
  std::int64_t d_rope = 0;   // columns given as k_rope
  std::int64_t rotated = 0;  // columns that are rotated
  std::int64_t rope_offset = -1;
  bool interleaved = true, pow2 = true, strided = false, four_dims = false, table_bf16 = false;
  bool duplicates = false, scale_array = false;
  std::int64_t slots_apart = 1;  // distance of the three slots of `duplicates`
  Values values = Values::kNormal;
  float kv_scale = 0;  // 0: not given

  [[nodiscard]] std::int64_t row_elements() const {
    switch (rows) {
      case Rows::kV32:
        return 656;
      case Rows::kV4:
        return 584;
      case Rows::kV41:
        return 528;
      case Rows::kIndex:
        return d + 4;
      default:
        return d;
    }
  }
};

// ---- the definition ----

// The e4m3 code nearest to x, ties to even, saturated.
unsigned nearest_code(double x) {
  if (!std::isfinite(x)) return 0x7F;
  unsigned best = 0;
  for (unsigned code = 1; code < 0x7F; ++code) {
    const double now = std::abs(std::abs(x) - e4m3_value(code)), before = std::abs(std::abs(x) - e4m3_value(best));
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(x) ? 0x80U : 0U);
}

struct Bytes {
  std::vector<double>& of;
  std::int64_t row_bytes, block;

  // Byte `at` of a block, in the order of [blocks, block, row].
  double& operator()(std::int64_t slot, std::int64_t at) const {
    return of[static_cast<std::size_t>(slot / block * block * row_bytes + at)];
  }
  void put_float(std::int64_t slot, std::int64_t at, float value) const {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    for (int i = 0; i < 4; ++i) (*this)(slot, at + i) = bits >> 8 * i & 0xFF;
  }
  void put_bf16(std::int64_t slot, std::int64_t at, double value) const {
    auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
    const bool is_nan = std::isnan(value);
    bits = is_nan ? bits : bits + 0x7FFF + (bits >> 16 & 1);  // nearest, ties to even
    for (int i = 0; i < 2; ++i) (*this)(slot, at + i) = bits >> (16 + 8 * i) & 0xFF;
  }
};

// Codes of x[first .. first + count - 1] from byte `at` on; returns their scale.
float put_codes(const Append& p, const std::vector<double>& x, std::int64_t first, std::int64_t count, int least,
                const Bytes& bytes, std::int64_t slot, std::int64_t at) {
  double amax = 0;
  for (std::int64_t i = first; i < first + count; ++i)
    if (std::isfinite(x[static_cast<std::size_t>(i)])) amax = std::max(amax, std::abs(x[static_cast<std::size_t>(i)]));
  int e = least;
  while (std::ldexp(448.0, e) < amax) ++e;
  const float scale = p.rows == Rows::kPerTensor ? (p.kv_scale == 0 ? 1.0F : p.kv_scale)
                      : p.pow2                   ? std::ldexp(1.0F, e)
                                                 : std::max(static_cast<float>(amax), 1e-4F) / 448.0F;
  for (std::int64_t i = 0; i < count; ++i) {
    const double value = x[static_cast<std::size_t>(first + i)];
    const double quotient = std::isfinite(value) ? double{static_cast<float>(value) / scale} : value;
    bytes(slot, at + i) = std::isfinite(value) ? nearest_code(std::clamp(quotient, -448.0, 448.0)) : 0x7F;
  }
  return scale;
}

void put_row(const Append& p, const std::vector<double>& x, const Bytes& bytes, std::int64_t slot) {
  const std::int64_t i = slot % p.block;
  switch (p.rows) {
    case Rows::kPlain:
      return;
    case Rows::kPerTensor:
      put_codes(p, x, 0, p.d, 0, bytes, slot, p.d * i);
      return;
    case Rows::kV32:
      for (std::int64_t g = 0; g < 4; ++g)
        bytes.put_float(slot, 656 * i + 512 + 4 * g,
                        put_codes(p, x, 128 * g, 128, -13, bytes, slot, 656 * i + 128 * g));
      for (std::int64_t c = 0; c < 64; ++c) {
        if (p.d == 576)
          bytes.put_bf16(slot, 656 * i + 528 + 2 * c, x[static_cast<std::size_t>(512 + c)]);
        else
          bytes(slot, 656 * i + 528 + 2 * c) = bytes(slot, 656 * i + 529 + 2 * c) = 0;
      }
      return;
    case Rows::kV4:
      for (std::int64_t g = 0; g < 7; ++g)
        bytes(slot, 576 * p.block + 8 * i + g) =
            127 + std::ilogb(put_codes(p, x, 64 * g, 64, -22, bytes, slot, 576 * i + 64 * g));
      bytes(slot, 576 * p.block + 8 * i + 7) = 0;
      for (std::int64_t c = 0; c < 64; ++c)
        bytes.put_bf16(slot, 576 * i + 448 + 2 * c, x[static_cast<std::size_t>(448 + c)]);
      return;
    case Rows::kV41:
      for (std::int64_t g = 0; g < 16; ++g)
        bytes(slot, 512 * p.block + 16 * i + g) =
            127 + std::ilogb(put_codes(p, x, 32 * g, 32, -22, bytes, slot, 512 * i + 32 * g));
      return;
    case Rows::kIndex:
      bytes.put_float(slot, p.d * p.block + 4 * i, put_codes(p, x, 0, p.d, -22, bytes, slot, p.d * i));
      return;
  }
}

struct Inputs {
  Array *kv, *k_rope, *slots, *positions, *table, *scale;
};

// Row i of kv after its rotation; empty if its position is out of range.
std::vector<double> row_of(const Append& p, const Inputs& in, std::int64_t i) {
  const std::int64_t columns = p.d - p.d_rope;
  std::vector<double> x;
  for (std::int64_t c = 0; c < columns; ++c) x.push_back(in.kv->get(i * columns + c));
  for (std::int64_t c = 0; c < p.d_rope; ++c) x.push_back(in.k_rope->get(i * p.d_rope + c));
  if (p.rotated == 0) return x;
  const auto position = static_cast<std::int64_t>(in.positions->get(i));
  if (position < 0 || position >= in.table->shape()[0]) return {};
  const std::int64_t first = p.rope_offset < 0 ? p.d - p.rotated : p.rope_offset, half = p.rotated / 2;
  for (std::int64_t pair = 0; pair < half; ++pair) {
    double& x0 = x[static_cast<std::size_t>(first + (p.interleaved ? 2 * pair : pair))];
    double& x1 = x[static_cast<std::size_t>(first + (p.interleaved ? 2 * pair + 1 : pair + half))];
    const double cosine = in.table->get(position * p.rotated + pair);
    const double sine = in.table->get(position * p.rotated + half + pair);
    const double y0 = x0 * cosine - x1 * sine;
    x1 = x1 * cosine + x0 * sine;
    x0 = y0;
  }
  if (p.dtype == DType::kBFloat16) {
    for (std::int64_t c = first; c < first + p.rotated; ++c) {
      double& value = x[static_cast<std::size_t>(c)];
      auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value));
      bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000U;
      value = double{std::bit_cast<float>(bits)};
    }
  }
  return x;
}

// ---- the call ----

void fill_values(const Append& p, Random& random, Array& x) {
  x.fill_normal(random);
  for (std::int64_t i = 0; i < x.size(); ++i) {
    const std::int64_t group = i / 32 % 7, kind = random.below(6);
    if (p.values == Values::kGrid) x.set(i, static_cast<double>(random.below(257) - 128) / 16);
    if (p.values == Values::kExtreme) {
      constexpr double kKinds[] = {0.0, -0.0, 0x1p-30, -0x1p-30, 1e30, -3e38};
      x.set(i, group == 0 ? 0.0 : group == 1 ? -0.0 : group == 2 ? 0x1p-30 : kKinds[kind]);
    }
    if (p.values == Values::kNonFinite && (group == 3 || kind == 0))
      x.set(i, random.below(3) == 0 ? static_cast<double>(NAN) : random.below(2) == 0 ? INFINITY : -INFINITY);
    // 13/8, 15/8, … times powers of two, beside a largest value that makes the scale a power of two.
    if (p.values == Values::kHalfway)
      x.set(i, i % 32 == 0
                   ? 448.0
                   : std::ldexp(static_cast<double>(17 + 2 * random.below(8)), static_cast<int>(random.below(12)) - 8));
  }
}

Inputs add_inputs(const Append& p, Random& random, Instance& instance) {
  Inputs in{};
  const std::int64_t columns = p.d - p.d_rope, gap = p.strided ? 3 : 0, slots = p.blocks * p.block;
  in.kv = &instance.add({"kv", p.dtype, {p.n, columns}, {columns + gap, 1}});
  in.k_rope = &instance.add({"k_rope", p.dtype, {p.n, p.d_rope}, {p.d_rope + gap, 1}});
  fill_values(p, random, *in.kv);
  fill_values(p, random, *in.k_rope);
  in.slots = &instance.add({"slots", p.integers, {p.n}, {p.strided ? 2 : 1}});
  std::vector<std::int64_t> order(static_cast<std::size_t>(std::max<std::int64_t>(slots, 1)));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  for (std::size_t i = order.size(); i-- > 1;)
    std::swap(order[i], order[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i) + 1))]);
  const bool wide = p.integers == DType::kInt64;  // slot 2^32 + 1 is not slot 1
  const double outside[] = {-1, static_cast<double>(slots), static_cast<double>(slots) + 1,
                            wide ? 0x1p32 + 1 : INT32_MAX, wide ? -0x1p62 : INT32_MIN};
  for (std::int64_t i = 0; i < p.n; ++i) {
    const auto own = static_cast<double>(order[static_cast<std::size_t>(i) % order.size()]);
    const bool skips = i >= slots || i % 5 == 3;
    in.slots->set(i, p.duplicates ? static_cast<double>(random.below(3) * p.slots_apart)
                     : skips      ? outside[i % 5]
                                  : own);
  }
  const std::int64_t table_rows = 6;
  in.positions = &instance.add({"positions", p.integers, {p.n}});
  for (std::int64_t i = 0; i < p.n; ++i) in.positions->set(i, static_cast<double>(random.below(table_rows + 2) - 1));
  in.table = &instance.add(
      {"cos_sin", p.table_bf16 ? DType::kBFloat16 : DType::kFloat32, {table_rows, p.rotated}, {p.rotated + gap, 1}});
  for (std::int64_t i = 0; i < in.table->size(); ++i) in.table->set(i, static_cast<double>(random.below(17) - 8) / 8);
  in.scale = &instance.add({"kv_scale", DType::kFloat32, {}});
  in.scale->set(0, static_cast<double>(p.kv_scale));
  return in;
}

Instance make(Random& random, const Append& p) {
  Instance instance;
  const Inputs in = add_inputs(p, random, instance);
  const std::int64_t row = p.row_elements();
  const std::vector<std::int64_t> shape =
      p.four_dims ? std::vector{p.blocks, p.block, std::int64_t{1}, row} : std::vector{p.blocks, p.block, row};
  const std::vector<std::int64_t> strides = p.four_dims ? std::vector{p.block * row + p.gap, row, row, std::int64_t{1}}
                                                        : std::vector{p.block * row + p.gap, row, std::int64_t{1}};
  Array& cache = instance.add({"cache", p.rows == Rows::kPlain ? p.cache : DType::kUInt8, shape, strides});
  instance.expect(cache, {.exact = true});
  instance.reference = [p, in, &cache](Instance& self) {
    std::vector<double>& expected = self.outputs[0].expected;
    cache.poison();
    for (std::int64_t i = 0; i < cache.size(); ++i) expected.push_back(cache.get(i));
    const Bytes bytes{expected, p.row_elements(), p.block};
    for (std::int64_t i = 0; i < p.n; ++i) {
      const auto slot = static_cast<std::int64_t>(in.slots->get(i));
      if (slot < 0 || slot >= p.blocks * p.block) continue;
      const std::vector<double> x = row_of(p, in, i);
      if (x.empty()) continue;
      put_row(p, x, bytes, slot);
      for (std::int64_t c = 0; p.rows == Rows::kPlain && c < p.d; ++c) {
        cache.set(slot * p.d + c, x[static_cast<std::size_t>(c)]);  // rounds to the cache's type
        expected[static_cast<std::size_t>(slot * p.d + c)] = cache.get(slot * p.d + c);
      }
    }
  };
  instance.call = [p, in, &cache, &workspace = *instance.workspace](const char* backend, Stream stream) {
    MlaCacheAppendArgs args;
    args.kv = in.kv->view(), args.cache = cache.view(), args.slots = in.slots->view();
    if (p.d_rope > 0) args.k_rope = in.k_rope->view();
    if (p.rotated > 0) args.positions = in.positions->view(), args.cos_sin = in.table->view();
    if (p.rope_offset >= 0) args.rope_offset = p.rope_offset;
    args.interleaved = p.interleaved;
    args.scale_format = p.pow2 ? HOPWELL_CACHE_SCALE_POW2 : HOPWELL_CACHE_SCALE_FP32;
    if (p.kv_scale != 0 && p.scale_array) args.kv_scale = in.scale->view();
    if (p.kv_scale != 0 && !p.scale_array) args.kv_scale_value = p.kv_scale;
    args.backend = backend;
    run_with_workspace<MlaCacheAppendArgs>(hopwell::mla_cache_append, hopwell::mla_cache_append_workspace_bytes,
                                           workspace, args, stream);
  };
  instance.flops = 4 * static_cast<double>(p.n * p.d);
  instance.bytes =
      static_cast<double>(p.n) * static_cast<double>(p.d * static_cast<std::int64_t>(size_of(p.dtype)) + row);
  return instance;
}

std::vector<std::pair<std::string, Append>> problems() {
  constexpr DType kFp32 = DType::kFloat32, kInt32 = DType::kInt32;
  std::vector<std::pair<std::string, Append>> all{
      {"v32", {}},
      {"v32_without_rope", {.d = 512}},
      {"v4", {.rows = Rows::kV4, .d = 512}},
      {"v41", {.rows = Rows::kV41, .d = 512}},
      {"per_tensor", {.rows = Rows::kPerTensor}},
      {"per_tensor_scale", {.rows = Rows::kPerTensor, .d = 512, .kv_scale = 0.037F}},
      {"per_tensor_array", {.rows = Rows::kPerTensor, .scale_array = true, .kv_scale = 1.7F}},
      {"index_128", {.rows = Rows::kIndex, .d = 128}},
      {"index_64", {.rows = Rows::kIndex, .d = 64, .block = 3}},
      {"index_32_fp32", {.rows = Rows::kIndex, .d = 32, .pow2 = false}},
      {"index_12", {.rows = Rows::kIndex, .d = 12}},
      {"bf16", {.rows = Rows::kPlain, .cache = DType::kBFloat16}},
      {"bf16_d_20", {.rows = Rows::kPlain, .d = 20, .cache = DType::kBFloat16}},
      {"bf16_d_7", {.rows = Rows::kPlain, .d = 7, .cache = DType::kBFloat16}},
      {"fp32_cache", {.rows = Rows::kPlain, .d = 40, .dtype = kFp32, .cache = kFp32}},
      {"fp32_to_bf16", {.rows = Rows::kPlain, .d = 40, .dtype = kFp32, .cache = DType::kBFloat16}},
      {"fp32_v32", {.dtype = kFp32}},
      {"fp32_v4", {.rows = Rows::kV4, .d = 512, .dtype = kFp32}},
      {"v32_fp32_scales", {.pow2 = false}},
      {"v32_k_rope", {.d_rope = 64, .strided = true}},
      {"v32_block_1", {.blocks = 11, .block = 1, .gap = 48}},
      {"v4_blocks_apart", {.rows = Rows::kV4, .d = 512, .blocks = 3, .block = 64, .gap = 256}},
      {"v41_blocks_apart",
       {.rows = Rows::kV41, .n = 70, .d = 512, .blocks = 3, .block = 61, .gap = 32, .four_dims = true}},
      {"index_unaligned", {.rows = Rows::kIndex, .d = 64, .block = 5, .gap = 2}},
      {"int32_slots", {.integers = kInt32, .rotated = 64, .values = Values::kGrid}},
      {"rotated", {.rotated = 64, .values = Values::kGrid}},
      {"rotated_halves", {.d_rope = 64, .rotated = 64, .interleaved = false, .values = Values::kGrid}},
      {"rotated_codes", {.rows = Rows::kV41, .d = 512, .rotated = 64, .table_bf16 = true, .values = Values::kGrid}},
      {"rotated_index",
       {.rows = Rows::kIndex,
        .d = 128,
        .rotated = 64,
        .rope_offset = 0,
        .interleaved = false,
        .values = Values::kGrid}},
      {"rotated_few",
       {.rows = Rows::kPlain,
        .d = 24,
        .cache = DType::kBFloat16,
        .rotated = 6,
        .rope_offset = 5,
        .strided = true,
        .values = Values::kGrid}},
      {"duplicates", {.n = 200, .duplicates = true}},
      // On GPUs these slots have one mark, and a CTA has several rows.
      {"duplicates_apart",
       {.rows = Rows::kIndex, .n = 2000, .d = 32, .blocks = 700, .block = 13, .duplicates = true, .slots_apart = 4096}},
      {"duplicates_rotated",
       {.rows = Rows::kV4, .n = 60, .d = 512, .rotated = 64, .duplicates = true, .values = Values::kGrid}},
      {"no_rows", {.n = 0}},
      {"no_blocks", {.blocks = 0}},
      {"many_rows", {.rows = Rows::kIndex, .n = 9000, .d = 32, .blocks = 700, .block = 13}},
  };
  for (const auto& [name, values] :
       {std::pair{"extreme", Values::kExtreme}, std::pair{"non_finite", Values::kNonFinite},
        std::pair{"halfway", Values::kHalfway}})
    for (const auto& [rows, d] : {std::pair{Rows::kV32, 576}, std::pair{Rows::kV4, 512}, std::pair{Rows::kV41, 512},
                                  std::pair{Rows::kIndex, 128}, std::pair{Rows::kPerTensor, 512}}) {
      constexpr const char* kNames[] = {"", "per_tensor_", "v32_", "v4_", "v41_", "index_"};
      all.emplace_back(kNames[static_cast<int>(rows)] + std::string(name),
                       Append{.rows = rows, .d = d, .values = values});
    }
  return all;
}

}  // namespace

Suite mla_cache_append() {
  Suite suite{"mla_cache_append", {}, {}, {}};
  for (const auto& [name, problem] : problems())
    suite.cases.emplace_back(suite.op, name, [p = problem](Random& random) { return make(random, p); });
  const auto shape = [](const char* rows, const char* d, const char* n) {
    return Settings{{"rows", rows}, {"d", d}, {"n", n}, {"block", "64"}};
  };
  suite.shapes = {{"v32_64", shape("2", "576", "64")},
                  {"v32", shape("2", "576", "8192")},
                  {"v4", shape("3", "512", "8192")},
                  {"index", shape("5", "128", "8192")}};
  suite.bench = [](const Settings& settings, Random& random) {
    const std::int64_t n = number(settings, "n"), block = number(settings, "block");
    return make(random, {.rows = static_cast<Rows>(number(settings, "rows")),
                         .n = n,
                         .d = number(settings, "d"),
                         .blocks = 2 * n / block + 1,
                         .block = block});
  };
  suite.unsupported = {
      {"sm80 sm90", "needs bfloat16 kv", "fp32_cache fp32_to_bf16 fp32_v32 fp32_v4"},
      {"sm80 sm90", "needs d that is a multiple of 4", "bf16_d_7"},
      {"sm80 sm90", "needs index keys of width 32, 64 or 128", "index_12"},
      {"sm80 sm90", "needs base and block stride of the cache in multiples of 4 bytes", "index_unaligned"}};
  suite.allocating = {"v32", "rotated_few"};
  suite.subjects = {
      // More rows than a CTA lists at a time, and rows with equal slots.
      {"mla_cache_append", "emu:sm80", {"many_rows", "duplicates", "rotated_halves"}, 6, 2},
      {"mla_cache_append_sm90", "emu:sm90", {"many_rows", "duplicates", "rotated_halves"}, 6, 2},
  };
  return suite;
}

}  // namespace hopwell::cases
