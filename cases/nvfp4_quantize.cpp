// nvfp4_quantize and nvfp4_dequantize: inputs, reference and cost. The result of quantize is defined bit by bit, so it
// must be equal.
#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>

#include "nvfp4.hpp"
#include "suites.hpp"

namespace hopwell::cases {
namespace {

enum class Values {
  kNormal,
  kZero,
  kZeroBlocks,  // kNormal with blocks of both zeros
  kGrid,        // multiples of a quarter: ties everywhere
  kBits,        // any finite bit pattern of the type
  kHuge,        // up to the type's largest number
  kTiny,        // subnormal numbers only
  kFading,      // each block's numbers are half of the previous block's, 20 blocks long
  kNonFinite    // kNormal, with some +-inf and NaN
};

struct Quantize {
  std::int64_t rows = 5, k = 64;
  DType dtype = DType::kFloat32;
  bool blocked = false, strided = false;
  Values values = Values::kNormal;
  std::optional<float> global = std::nullopt;
  bool global_as_array = false;
  int exponent = 0;  // exponent of the first block of kFading
};

double random_value(const Quantize& p, Random& random, std::int64_t at) {
  const bool half = p.dtype == DType::kFloat16;
  switch (p.values) {
    case Values::kZero:
      return random.below(2) == 0 ? 0.0 : -0.0;
    case Values::kZeroBlocks:
      return at / 16 % 3 == 0 ? (random.below(2) == 0 ? 0.0 : -0.0) : random.normal();
    case Values::kGrid:
      return static_cast<double>(random.below(49) - 24) * 0.25;
    case Values::kBits: {
      const double sign = random.below(2) == 0 ? 1 : -1;
      return sign *
             std::ldexp(1 + random.uniform(), static_cast<int>(random.below(half ? 38 : 270)) - (half ? 24 : 145));
    }
    case Values::kHuge:
      return (random.uniform() * 2 - 1) * (half ? 65504.0 : p.dtype == DType::kBFloat16 ? 0x1.FEp127 : 0x1.FFFFFEp127);
    case Values::kTiny:
      return std::ldexp(random.normal(), half ? -22 : p.dtype == DType::kBFloat16 ? -131 : -146);
    case Values::kFading:
      return std::ldexp(random.normal(), p.exponent - static_cast<int>(at / 16 % 20));
    case Values::kNonFinite:
      if (random.below(100) == 0) return random.below(2) == 0 ? INFINITY : random.below(2) == 0 ? -INFINITY : NAN;
      return random.normal();
    case Values::kNormal:
      break;
  }
  return random.normal();
}

// Index in `grid`, which has `count` ascending values, of the value nearest to x >= 0 in units of `unit`; ties to the
// even index. Everything is exact: a midpoint times a unit has at most 31 significant bits.
template <class Grid>
unsigned nearest(double x, double unit, unsigned count, Grid grid) {
  unsigned code = 0;
  for (unsigned lower = 0; lower + 1 < count; ++lower) {
    const double midpoint = (grid(lower) + grid(lower + 1)) / 2 * unit;
    if (x > midpoint || (x == midpoint && lower % 2 == 1)) code = lower + 1;
  }
  return code;
}

struct Quantized {
  std::vector<double> codes, scales;  // bytes
  float global = 1;
};

Quantized quantized(const Quantize& p, const Array& x) {
  Quantized result;
  const std::int64_t columns = p.k / 16;
  double amax = 0;
  for (std::int64_t i = 0; i < x.size(); ++i)
    if (std::isfinite(x.get(i))) amax = std::max(amax, std::abs(x.get(i)));
  if (p.global)
    result.global = *p.global;
  else if (amax > 0)
    result.global = std::max(static_cast<float>(amax / 2688), std::numeric_limits<float>::denorm_min());
  result.codes.assign(static_cast<std::size_t>(p.rows * p.k / 2), 0);
  const std::int64_t blocked_bytes = (p.rows + 127) / 128 * 128 * ((columns + 3) / 4 * 4);
  result.scales.assign(static_cast<std::size_t>(p.blocked ? blocked_bytes : p.rows * columns), 0);
  for (std::int64_t block = 0; block < p.rows * columns; ++block) {
    double most = 0;
    bool finite = true;
    for (std::int64_t i = 16 * block; i < 16 * block + 16; ++i) {
      most = std::max(most, std::abs(x.get(i)));
      finite = finite && std::isfinite(x.get(i));
    }
    const float quotient = static_cast<float>(most) / (6.0F * result.global);
    const unsigned scale = finite ? nearest(static_cast<double>(quotient), 1, 0x7F, e4m3_value) : 0x7F;
    const std::int64_t place = p.blocked ? blocked_place(block / columns, block % columns, columns) : block;
    result.scales[static_cast<std::size_t>(place)] = scale;
    if (!finite || scale == 0) continue;
    const double unit = e4m3_value(scale) * static_cast<double>(result.global);
    for (std::int64_t i = 16 * block; i < 16 * block + 16; ++i) {
      const unsigned code = nearest(std::abs(x.get(i)), unit, 8, e2m1_value) | (std::signbit(x.get(i)) ? 8U : 0U);
      result.codes[static_cast<std::size_t>(i / 2)] += code << (4 * (i % 2));
    }
  }
  return result;
}

// Blocked scales as one row of bytes, so that a position is an offset.
Array blocked_bytes(const Quantize& p) {
  return {"scales", DType::kFloat8E4m3, {(p.rows + 127) / 128 * 128 * ((p.k / 16 + 3) / 4 * 4)}};
}

Instance make_quantize(Random& random, const Quantize& p) {
  Instance instance;
  const std::int64_t gap = p.strided ? 3 : 0;
  Array& x = instance.add({"x", p.dtype, {p.rows, p.k}, {p.k + gap, 1}});
  if (p.values == Values::kNormal) x.fill_normal(random);
  for (std::int64_t i = 0; p.values != Values::kNormal && i < x.size(); ++i) x.set(i, random_value(p, random, i));
  Array& given = instance.add({"global_in", DType::kFloat32, {}}).fill(static_cast<double>(p.global.value_or(1)));
  Array& codes = instance.add({"codes", DType::kUInt8, {p.rows, p.k / 2}, {p.k / 2 + gap, 1}});
  Array& scales = instance.add(p.blocked ? blocked_bytes(p)
                                         : Array("scales", DType::kUInt8, {p.rows, p.k / 16}, {p.k / 16 + gap, 1}));
  Array& global = instance.add({"global_scale", DType::kFloat32, {}});
  for (Array* output : {&codes, &scales, &global}) instance.expect(*output, {.exact = true});
  instance.reference = [p, &x](Instance& self) {
    Quantized result = quantized(p, x);
    self.outputs[0].expected = std::move(result.codes);
    self.outputs[1].expected = std::move(result.scales);
    self.outputs[2].expected = {static_cast<double>(result.global)};
  };
  Workspace& workspace = *instance.workspace;
  instance.call = [p, &x, &given, &codes, &scales, &global, &workspace](const char* backend, Stream stream) {
    run_with_workspace<Nvfp4QuantizeArgs>(hopwell::nvfp4_quantize, nvfp4_quantize_workspace_bytes, workspace,
                                          {.x = x.view(),
                                           .global_in = p.global_as_array ? given.view() : Tensor(),
                                           .global_in_value = p.global_as_array ? std::nullopt : p.global,
                                           .scale_layout = p.blocked ? HOPWELL_SCALES_BLOCKED : HOPWELL_SCALES_PLAIN,
                                           .codes = codes.view(),
                                           .scales = scales.view(),
                                           .global_scale = global.view(),
                                           .backend = backend},
                                          stream);
  };
  instance.bytes = static_cast<double>(x.size()) * (static_cast<double>(size_of(p.dtype)) + 9.0 / 16);
  instance.flops = 2 * static_cast<double>(x.size());
  return instance;
}

struct Dequantize {
  std::int64_t rows = 5, k = 64;
  DType dtype = DType::kFloat32;
  bool blocked = false, strided = false, all = false;
  float global = 0.3F;
  bool global_as_array = false, reciprocal = false;
  ScaleBytes scale_bytes = ScaleBytes::kUsual;
};

Instance make_dequantize(Random& random, const Dequantize& p) {
  Instance instance;
  Matrix matrix{
      .rows = p.rows, .k = p.k, .blocked = p.blocked, .scale_bytes = p.scale_bytes, .row_gap = p.strided ? 4 : 0};
  matrix.add(instance, random, "codes", "scales");
  for (std::int64_t row = 0; p.all && row < p.rows; ++row) {
    for (std::int64_t column = 0; column < p.k; ++column)
      matrix.set_code(row, column, 0, static_cast<unsigned>(column % 16));
    matrix.scale(row, 0) = static_cast<std::uint8_t>(row);
  }
  Array& global = instance.add({"global_scale", DType::kFloat32, {}}).fill(static_cast<double>(p.global));
  Array& x = instance.add({"x", p.dtype, {p.rows, p.k}, {p.k + (p.strided ? 7 : 0), 1}});
  Tolerance tolerance = p.all ? Tolerance{.exact = true} : nvfp4_tolerance(p.dtype);
  if (std::abs(p.global) < 1e-30F)
    tolerance.norm = std::numeric_limits<double>::infinity();  // subnormals have few digits
  instance.expect(x, tolerance);
  instance.reference = [p, matrix](Instance& self) {
    const double factor = factor_of(p.global, p.reciprocal);
    for (std::int64_t i = 0; i < p.rows * p.k; ++i)
      self.outputs[0].expected.push_back(matrix.value(i / p.k, i % p.k) * factor);
  };
  instance.call = [p, matrix, &global, &x](const char* backend, Stream stream) {
    hopwell::nvfp4_dequantize({.codes = matrix.codes->view(),
                               .scales = matrix.scales->view(),
                               .global_scale = p.global_as_array ? global.view() : Tensor(),
                               .global_value = p.global_as_array ? 1 : p.global,
                               .global_is_reciprocal = p.reciprocal,
                               .scale_layout = p.blocked ? HOPWELL_SCALES_BLOCKED : HOPWELL_SCALES_PLAIN,
                               .x = x.view(),
                               .backend = backend},
                              stream);
  };
  instance.bytes = matrix.bytes() + static_cast<double>(x.size()) * static_cast<double>(size_of(p.dtype));
  instance.flops = 2 * static_cast<double>(x.size());
  return instance;
}

std::vector<std::pair<std::string, Quantize>> quantize_problems() {
  constexpr DType kBf16 = DType::kBFloat16, kFp16 = DType::kFloat16;
  return {
      {"basic", {}},
      {"one_block", {.rows = 1, .k = 16}},
      {"bf16", {.rows = 33, .k = 144, .dtype = kBf16}},
      {"fp16_strided", {.rows = 40, .k = 80, .dtype = kFp16, .strided = true}},
      {"blocked", {.rows = 130, .k = 80, .blocked = true}},
      {"blocked_wide", {.rows = 5, .k = 1136, .dtype = kBf16, .blocked = true}},
      {"zero", {.rows = 3, .k = 32, .values = Values::kZero}},
      {"zero_blocks", {.rows = 6, .k = 160, .values = Values::kZeroBlocks}},
      {"ties", {.rows = 64, .k = 128, .values = Values::kGrid, .global = 1.0F}},
      {"ties_bf16",
       {.rows = 64, .k = 128, .dtype = kBf16, .values = Values::kGrid, .global = 0.5F, .global_as_array = true}},
      {"near_ties_bf16", {.rows = 64, .k = 256, .dtype = kBf16, .global = 3.0F / 2688}},
      {"near_ties_fp16", {.rows = 64, .k = 256, .dtype = kFp16, .global = 3.0F / 2688}},
      {"global_too_small", {.rows = 9, .k = 64, .global = 1e-30F}},
      {"global_smallest", {.rows = 9, .k = 64, .global = 0x1p-149F}},
      {"global_too_large", {.rows = 9, .k = 64, .global = 1e30F}},
      {"global_largest",
       {.rows = 9, .k = 64, .values = Values::kHuge, .global = 0x1.FFFFFEp127F, .global_as_array = true}},
      {"any_bits", {.rows = 200, .k = 64, .values = Values::kBits}},
      {"any_bits_given_global", {.rows = 200, .k = 64, .values = Values::kBits, .global = 0.7F}},
      {"any_bits_bf16", {.rows = 100, .k = 64, .dtype = kBf16, .values = Values::kBits, .global = 1.1e-20F}},
      {"any_bits_fp16", {.rows = 100, .k = 64, .dtype = kFp16, .values = Values::kBits}},
      {"huge", {.rows = 30, .k = 64, .values = Values::kHuge}},
      {"huge_bf16", {.rows = 30, .k = 64, .dtype = kBf16, .values = Values::kHuge}},
      {"huge_fp16", {.rows = 30, .k = 64, .dtype = kFp16, .values = Values::kHuge}},
      {"tiny", {.rows = 30, .k = 64, .values = Values::kTiny}},
      {"tiny_bf16", {.rows = 30, .k = 64, .dtype = kBf16, .values = Values::kTiny}},
      {"tiny_fp16", {.rows = 30, .k = 64, .dtype = kFp16, .values = Values::kTiny}},
      {"non_finite", {.rows = 30, .k = 64, .values = Values::kNonFinite}},
      {"non_finite_fp16_blocked", {.rows = 30, .k = 64, .dtype = kFp16, .blocked = true, .values = Values::kNonFinite}},
      {"empty", {.rows = 0, .k = 32}},
      {"own_global_ties_bf16", {.rows = 64, .k = 128, .dtype = kBf16, .values = Values::kGrid}},
      {"own_global_ties_fp16", {.rows = 64, .k = 128, .dtype = kFp16, .values = Values::kGrid}},
      {"fading_bf16", {.rows = 64, .k = 320, .dtype = kBf16, .values = Values::kFading}},
      {"fading_fp16", {.rows = 64, .k = 320, .dtype = kFp16, .values = Values::kFading}},
      {"fading_blocked", {.rows = 30, .k = 320, .blocked = true, .values = Values::kFading}},
      {"small_bf16", {.rows = 64, .k = 320, .dtype = kBf16, .values = Values::kFading, .exponent = -8}},
      {"smaller_bf16", {.rows = 64, .k = 320, .dtype = kBf16, .values = Values::kFading, .exponent = -11}},
      {"large_bf16", {.rows = 64, .k = 320, .dtype = kBf16, .values = Values::kFading, .exponent = 14}},
      {"larger_bf16", {.rows = 64, .k = 320, .dtype = kBf16, .values = Values::kFading, .exponent = 16}},
      {"pairs_bf16_blocked", {.rows = 520, .k = 352, .dtype = kBf16, .blocked = true, .values = Values::kFading}},
      {"pairs_fp16", {.rows = 520, .k = 352, .dtype = kFp16, .values = Values::kNonFinite}},
      {"large", {.rows = 300, .k = 2048, .dtype = kBf16}},
      // One pass on the emulator's four SMs. The first two cases use the maximum size; the first also fits on two SMs.
      {"one_pass_bf16", {.rows = 270, .k = 1024, .dtype = kBf16}},
      {"one_pass_most_bf16", {.rows = 1456, .k = 384, .dtype = kBf16, .values = Values::kFading}},
      {"one_pass_fp16", {.rows = 512, .k = 352, .dtype = kFp16, .values = Values::kNonFinite}},
      {"one_pass_bf16_non_finite", {.rows = 512, .k = 480, .dtype = kBf16, .values = Values::kNonFinite}},
      {"one_pass_huge_bf16", {.rows = 256, .k = 704, .dtype = kBf16, .values = Values::kHuge}},
      {"one_pass_zero_fp16", {.rows = 160, .k = 1024, .dtype = kFp16, .values = Values::kZero}},
      // Enough pairs for every SM of an H100. Only these sizes reach the kernels for pairs: in one pass, then in two.
      {"many_pairs_bf16", {.rows = 1344, .k = 4064, .dtype = kBf16, .values = Values::kNonFinite}},
      {"many_pairs_fp16_blocked", {.rows = 1344, .k = 4064, .dtype = kFp16, .blocked = true}},
  };
}

std::vector<std::pair<std::string, Dequantize>> dequantize_problems() {
  constexpr DType kBf16 = DType::kBFloat16, kFp16 = DType::kFloat16;
  return {
      {"basic", {}},
      {"one_block", {.rows = 1, .k = 16, .dtype = kFp16}},
      {"bf16_strided", {.rows = 33, .k = 144, .dtype = kBf16, .strided = true, .global_as_array = true}},
      {"fp16_blocked", {.rows = 130, .k = 80, .dtype = kFp16, .blocked = true}},
      {"all_codes_all_scales", {.rows = 256, .k = 16, .all = true, .global = 1}},
      {"all_codes_all_scales_bf16", {.rows = 256, .k = 16, .dtype = kBf16, .blocked = true, .all = true, .global = 1}},
      {"all_codes_all_scales_fp16",
       {.rows = 256, .k = 16, .dtype = kFp16, .all = true, .global = 1, .global_as_array = true}},
      {"full_range", {.rows = 100, .k = 256, .global = 1.7e-3F, .scale_bytes = ScaleBytes::kAny}},
      {"full_range_fp16", {.rows = 100, .k = 256, .dtype = kFp16, .scale_bytes = ScaleBytes::kAny}},
      {"nan_scales_blocked",
       {.rows = 70, .k = 112, .dtype = kBf16, .blocked = true, .scale_bytes = ScaleBytes::kSomeNan}},
      {"subnormal_results", {.rows = 10, .k = 64, .global = 3e-43F}},
      {"reciprocal", {.rows = 10, .k = 64, .global = 3, .reciprocal = true}},
      {"reciprocal_array",
       {.rows = 10, .k = 64, .dtype = kBf16, .global = -1.7F, .global_as_array = true, .reciprocal = true}},
      {"negative_global", {.rows = 10, .k = 64, .dtype = kFp16, .global = -2}},
      {"empty", {.rows = 0, .k = 32}},
  };
}

}  // namespace

Suite nvfp4_quantize() {
  Suite suite{"nvfp4_quantize", {}, {}, {}};
  for (const auto& [name, problem] : quantize_problems())
    suite.cases.push_back({suite.op, name, [p = problem](Random& random) { return make_quantize(random, p); }});
  suite.shapes = {{"4096x4096", {{"rows", "4096"}, {"K", "4096"}, {"given", "0"}}},
                  {"4096x4096 global given", {{"rows", "4096"}, {"K", "4096"}, {"given", "1"}}},
                  {"16x16384", {{"rows", "16"}, {"K", "16384"}, {"given", "0"}}}};
  suite.bench = [](const Settings& settings, Random& random) {
    return make_quantize(random, {.rows = number(settings, "rows"),
                                  .k = number(settings, "K"),
                                  .dtype = DType::kBFloat16,
                                  .global = number(settings, "given") != 0 ? std::optional(1.9e-3F) : std::nullopt});
  };
  leave_to_nightly(suite, {"many_pairs_bf16"});  // on the emulator's four SMs the other size runs the same kernels
  suite.allocating = {"own_global_ties_bf16", "blocked"};
  suite.subjects = {
      {"nvfp4_quantize", "emu:sm80", {"basic", "blocked", "bf16"}, 8, 2},
      // The maximum size for two SMs.
      {"nvfp4_quantize_one_pass", "emu:sm80", {"one_pass_bf16"}, 3, 10, "", "2"},
  };
  return suite;
}

Suite nvfp4_dequantize() {
  Suite suite{"nvfp4_dequantize", {}, {}, {}};
  for (const auto& [name, problem] : dequantize_problems())
    suite.cases.push_back({suite.op, name, [p = problem](Random& random) { return make_dequantize(random, p); }});
  suite.shapes = {{"4096x4096", {{"rows", "4096"}, {"K", "4096"}}}};
  suite.bench = [](const Settings& settings, Random& random) {
    return make_dequantize(random,
                           {.rows = number(settings, "rows"), .k = number(settings, "K"), .dtype = DType::kBFloat16});
  };
  suite.allocating = {"fp16_blocked"};
  return suite;
}

}  // namespace hopwell::cases
