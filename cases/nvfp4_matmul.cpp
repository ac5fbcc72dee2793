// nvfp4_gemv, nvfp4_linear and nvfp4_matmul: inputs, float64 reference, tolerance and cost.
#include <cmath>
#include <optional>

#include "nvfp4.hpp"
#include "suites.hpp"
#include "tile/cpu/parallel.hpp"
#include "vectors.hpp"

namespace hopwell::cases {
namespace {

// ---- nvfp4_gemv ---------------------------------------------------------------------------------------------------

struct Gemv {
  std::int64_t m = 7, k = 64, l = 1;
  DType out = DType::kFloat16;
  bool blocked = false, padded = false, strided = false;
  float alpha = 1;
  ScaleBytes scale_bytes = ScaleBytes::kUsual;
  std::int64_t row_gap = 0;
  bool one_hot = false;  // each row of b selects one k: the result is a's decoded values, exactly
  bool reciprocal = false;
};

void make_one_hot(const Gemv& p, Matrix& a, Matrix& b) {
  for (std::int64_t l = 0; l < p.l; ++l) {
    for (std::int64_t column = 0; column < p.k; ++column) b.set_code(0, column, l, column == l % p.k ? 2 : 0);
    for (std::int64_t block = 0; block < p.k / 16; ++block) b.scale(0, block, l) = 0x38;  // 1
    for (std::int64_t row = 0; row < p.m; ++row) {
      a.set_code(row, l % p.k, l, static_cast<unsigned>(row % 16));
      for (std::int64_t block = 0; block < p.k / 16; ++block) {
        const auto byte = static_cast<std::uint8_t>(row / 16);
        a.scale(row, block, l) = (byte & 0x7F) == 0x7F && block != l % p.k / 16 ? std::uint8_t{0} : byte;
      }
    }
  }
}

Instance make_gemv(Random& random, const Gemv& p) {
  Instance instance;
  Matrix a{
      .rows = p.m, .k = p.k, .batch = p.l, .blocked = p.blocked, .scale_bytes = p.scale_bytes, .row_gap = p.row_gap};
  Matrix b{.rows = p.padded ? 128 : 1,
           .k = p.k,
           .batch = p.l,
           .blocked = p.blocked,
           .scale_bytes = p.scale_bytes,
           .row_gap = p.row_gap};
  a.add(instance, random, "a", "sfa");
  b.add(instance, random, "b", "sfb");
  for (std::int64_t l = 0; l < p.l; ++l)
    for (std::int64_t row = 1; row < b.rows; ++row)
      for (std::int64_t block = 0; block < p.k / 16; ++block) b.scale(row, block, l) = 0x7F;
  if (p.one_hot) make_one_hot(p, a, b);
  Array& c = instance.add(p.strided ? Array("out", p.out, {p.m, 1, p.l}, {3 * p.l, 1, 3})
                                    : Array("out", p.out, {p.m, 1, p.l}));
  instance.expect(c, p.one_hot ? Tolerance{.exact = true} : nvfp4_tolerance(p.out));
  instance.reference = [p, a, b](Instance& self) {
    std::vector<double>& expected = self.outputs[0].expected;
    for (std::int64_t i = 0; i < p.m * p.l; ++i) {
      const std::int64_t row = i / p.l, l = i % p.l;
      double sum = 0, magnitude = 0;
      for (std::int64_t column = 0; column < p.k; ++column) {
        const double product = a.value(row, column, l) * b.value(0, column, l);
        sum += product, magnitude += std::abs(product);
      }
      const double factor = factor_of(p.alpha, p.reciprocal);
      expected.push_back(factor * sum);
      self.outputs[0].magnitude.push_back(std::abs(factor) * magnitude);
    }
  };
  instance.call = [p, a, b, &c](const char* backend, Stream stream) {
    const auto layout = p.blocked ? HOPWELL_SCALES_BLOCKED : HOPWELL_SCALES_PLAIN;
    hopwell::nvfp4_gemv({.a = a.codes->view(),
                         .b = b.codes->view(),
                         .sfa = a.scales->view(),
                         .sfb = b.scales->view(),
                         .alpha = p.alpha,
                         .global_is_reciprocal = p.reciprocal,
                         .scale_layout = layout,
                         .out = c.view(),
                         .backend = backend},
                        stream);
  };
  instance.flops = 2.0 * static_cast<double>(p.m * p.k * p.l);
  instance.bytes = a.bytes() + b.bytes() / static_cast<double>(b.rows) +
                   static_cast<double>(c.size()) * static_cast<double>(size_of(p.out));
  return instance;
}

// ---- nvfp4_linear -------------------------------------------------------------------------------------------------

enum class X {
  kNormal,
  kIdentity,   // selects single weights, which must come out exactly
  kOutliers,   // one in sixteen is 2^20 times larger and meets weights of zero
  kNonFinite,  // some +-inf and NaN
  kWide,       // exponents over the whole range of the type
  kHuge,       // bf16 up to 2^120
  kTiny,       // bf16 down to 2^-120
  kCancelling  // half of each block of 16 cancels; the remainder is 2^-13 times smaller and has all its digits
};

struct Linear {
  std::int64_t n = 1, rows = 7, k = 64;
  DType dtype = DType::kBFloat16;
  bool blocked = false, bias = false, strided = false;
  GlobalAs global_as = GlobalAs::kNumber;
  float global = 0.25F;
  ScaleBytes scale_bytes = ScaleBytes::kUsual;
  X x = X::kNormal;
};

void fill_x(const Linear& p, Random& random, Array& x, Matrix& weight) {
  x.fill_normal(random);
  for (std::int64_t i = 0; i < x.size(); ++i) {
    const std::int64_t row = i / p.k, column = i % p.k;
    if (p.x == X::kIdentity) x.set(i, row == column % p.n ? 1 : 0);
    if (p.x == X::kNonFinite && random.below(60) == 0)
      x.set(i, random.below(2) == 0 ? INFINITY : random.below(2) == 0 ? -INFINITY : NAN);
    if (p.x == X::kWide)
      x.set(i, std::ldexp(random.normal(), static_cast<int>(random.below(p.dtype == DType::kFloat16 ? 18 : 100)) -
                                               (p.dtype == DType::kFloat16 ? 14 : 60)));
    if (p.x == X::kHuge || p.x == X::kTiny)
      x.set(i, std::ldexp(random.normal(), static_cast<int>(random.below(80)) + (p.x == X::kHuge ? 38 : -120)));
    if (p.x == X::kCancelling)
      x.set(i, column % 16 < 8 ? 1 : std::ldexp(1 + static_cast<double>(random.below(128)) / 128, -13));
    if (p.x == X::kOutliers && column % 16 == 5)
      x.set(i, std::ldexp(random.normal(), p.dtype == DType::kFloat16 ? 12 : 20));
  }
  if (p.x == X::kOutliers) {
    for (std::int64_t row = 0; row < p.rows; ++row)
      for (std::int64_t column = 5; column < p.k; column += 16)
        weight.set_code(row, column, 0, 8 * static_cast<unsigned>(row % 2));
  }
  if (p.x == X::kCancelling) {
    for (std::int64_t row = 0; row < p.rows; ++row)
      for (std::int64_t column = 0; column < p.k; ++column)
        weight.set_code(row, column, 0,
                        static_cast<unsigned>(column % 16 < 8 ? 1 + column % 2 * 8
                                                              : 7 + static_cast<std::int64_t>(random.below(2)) * 8));
  }
  if (p.x == X::kIdentity) {  // every code with every scale: row r has scale r / 16 and code r % 16
    for (std::int64_t row = 0; row < p.rows; ++row) {
      for (std::int64_t column = 0; column < p.k; ++column)
        weight.set_code(row, column, 0, static_cast<unsigned>(row % 16));
      weight.scale(row, 0) = static_cast<std::uint8_t>(row / 16);
    }
  }
}

Instance make_linear(Random& random, const Linear& p) {
  Instance instance;
  Matrix weight{
      .rows = p.rows, .k = p.k, .blocked = p.blocked, .scale_bytes = p.scale_bytes, .row_gap = p.strided ? 8 : 0};
  weight.add(instance, random, "weight", "weight_scale");
  const std::int64_t gap = p.strided ? 5 : 0;
  Array& x = instance.add({"x", p.dtype, {p.n, p.k}, {p.k + gap, 1}});
  fill_x(p, random, x, weight);
  Array& global = instance.add({"weight_global", DType::kFloat32, {}}).fill(static_cast<double>(p.global));
  Array* bias = p.bias ? &instance.add({"bias", p.dtype, {p.rows}, {p.strided ? 2 : 1}}).fill_normal(random) : nullptr;
  Array& y = instance.add({"out", p.dtype, {p.n, p.rows}, {p.rows + gap, 1}});
  instance.expect(y, p.x == X::kIdentity ? Tolerance{.exact = true} : nvfp4_tolerance(p.dtype));
  const bool reciprocal = p.global_as == GlobalAs::kReciprocal || p.global_as == GlobalAs::kReciprocalArray;
  instance.reference = [p, weight, reciprocal, bias, &x](Instance& self) {
    const double factor = factor_of(p.global, reciprocal);
    self.outputs[0].expected.resize(static_cast<std::size_t>(p.n * p.rows));
    self.outputs[0].magnitude.resize(static_cast<std::size_t>(p.n * p.rows));
    const std::vector<double> rows_of_x = values_of(x);
    cpu::parallel_for(p.rows, [&](std::int64_t row) {
      std::vector<double> values(static_cast<std::size_t>(p.k));
      for (std::int64_t column = 0; column < p.k; ++column)
        values[static_cast<std::size_t>(column)] = weight.value(row, column);
      const double offset = bias != nullptr ? bias->get(row) : 0;
      for (std::int64_t i = 0; i < p.n; ++i) {
        const auto [sum, magnitude] = dot(rows_of_x.data() + i * p.k, values.data(), p.k);
        const auto at = static_cast<std::size_t>(i * p.rows + row);
        self.outputs[0].expected[at] = factor * sum + offset;
        self.outputs[0].magnitude[at] = std::abs(factor) * magnitude + std::abs(offset);
        if (!std::isfinite(magnitude)) self.outputs[0].magnitude[at] = 0;
      }
    });
  };
  Workspace& workspace = *instance.workspace;
  instance.call = [p, weight, reciprocal, bias, &x, &global, &y, &workspace](const char* backend, Stream stream) {
    const bool as_array = p.global_as == GlobalAs::kArray || p.global_as == GlobalAs::kReciprocalArray;
    run_with_workspace<Nvfp4LinearArgs>(hopwell::nvfp4_linear, nvfp4_linear_workspace_bytes, workspace,
                                        {.x = x.view(),
                                         .weight = weight.codes->view(),
                                         .weight_scale = weight.scales->view(),
                                         .weight_global = as_array ? global.view() : Tensor(),
                                         .weight_global_value = as_array ? 1 : p.global,
                                         .global_is_reciprocal = reciprocal,
                                         .bias = bias != nullptr ? bias->view() : Tensor(),
                                         .scale_layout = p.blocked ? HOPWELL_SCALES_BLOCKED : HOPWELL_SCALES_PLAIN,
                                         .out = y.view(),
                                         .backend = backend},
                                        stream);
  };
  instance.flops = 2.0 * static_cast<double>(p.n * p.rows * p.k);
  instance.bytes = weight.bytes() + static_cast<double>((x.size() + y.size() + (p.bias ? p.rows : 0)) *
                                                        static_cast<std::int64_t>(size_of(p.dtype)));
  return instance;
}

// ---- nvfp4_matmul -------------------------------------------------------------------------------------------------

struct Matmul {
  std::int64_t m = 7, n = 9, k = 64;
  DType out = DType::kBFloat16;
  bool blocked = false, bias = false, strided = false;
  float alpha = 1;
  ScaleBytes scale_bytes = ScaleBytes::kUsual;
  bool one_hot = false;  // each row of b selects one k: the result is a's decoded values, exactly
  bool reciprocal = false;
};

void make_one_hot(const Matmul& p, Matrix& a, Matrix& b) {
  for (std::int64_t row = 0; row < p.n; ++row) {
    for (std::int64_t column = 0; column < p.k; ++column) b.set_code(row, column, 0, column == row % p.k ? 2 : 0);
    for (std::int64_t block = 0; block < p.k / 16; ++block) b.scale(row, block) = 0x38;  // 1
  }
  for (std::int64_t row = 0; row < p.m; ++row) {
    for (std::int64_t column = 0; column < p.k; ++column)
      a.set_code(row, column, 0, static_cast<unsigned>(row + column) % 16);
    for (std::int64_t block = 0; block < p.k / 16; ++block) a.scale(row, block) = static_cast<std::uint8_t>(row / 16);
  }
}

std::vector<double> values_of(const Matrix& matrix) {
  std::vector<double> values(static_cast<std::size_t>(matrix.rows * matrix.k));
  for (std::int64_t i = 0; i < matrix.rows * matrix.k; ++i)
    values[static_cast<std::size_t>(i)] = matrix.value(i / matrix.k, i % matrix.k);
  return values;
}

Instance make_matmul(Random& random, const Matmul& p) {
  Instance instance;
  const std::int64_t gap = p.strided ? 16 : 0;
  Matrix a{.rows = p.m, .k = p.k, .blocked = p.blocked, .scale_bytes = p.scale_bytes, .row_gap = gap};
  Matrix b{.rows = p.n, .k = p.k, .blocked = p.blocked, .scale_bytes = p.scale_bytes, .row_gap = 2 * gap};
  a.add(instance, random, "a", "sfa");
  b.add(instance, random, "b", "sfb");
  if (p.one_hot) make_one_hot(p, a, b);
  Array* bias = p.bias ? &instance.add({"bias", p.out, {p.n}, {p.strided ? 3 : 1}}).fill_normal(random, 50) : nullptr;
  Array& c = instance.add({"out", p.out, {p.m, p.n}, {p.n + gap, 1}});
  instance.expect(c, p.one_hot ? Tolerance{.exact = true} : nvfp4_tolerance(p.out));
  instance.reference = [p, a, b, bias](Instance& self) {
    const std::vector<double> values_a = values_of(a), values_b = values_of(b);
    const double alpha = factor_of(p.alpha, p.reciprocal);
    self.outputs[0].expected.resize(static_cast<std::size_t>(p.m * p.n));
    self.outputs[0].magnitude.resize(static_cast<std::size_t>(p.m * p.n));
    cpu::parallel_for(p.m * p.n, [&](std::int64_t i) {
      const double *row_a = values_a.data() + i / p.n * p.k, *row_b = values_b.data() + i % p.n * p.k;
      const double offset = bias != nullptr ? bias->get(i % p.n) : 0;
      const auto [sum, magnitude] = dot(row_a, row_b, p.k);
      self.outputs[0].expected[static_cast<std::size_t>(i)] = alpha * sum + offset;
      self.outputs[0].magnitude[static_cast<std::size_t>(i)] = std::abs(alpha) * magnitude + std::abs(offset);
    });
  };
  Workspace& workspace = *instance.workspace;
  instance.call = [p, a, b, bias, &c, &workspace](const char* backend, Stream stream) {
    run_with_workspace<Nvfp4MatmulArgs>(hopwell::nvfp4_matmul, nvfp4_matmul_workspace_bytes, workspace,
                                        {.a = a.codes->view(),
                                         .b = b.codes->view(),
                                         .sfa = a.scales->view(),
                                         .sfb = b.scales->view(),
                                         .alpha = p.alpha,
                                         .global_is_reciprocal = p.reciprocal,
                                         .bias = bias != nullptr ? bias->view() : Tensor(),
                                         .scale_layout = p.blocked ? HOPWELL_SCALES_BLOCKED : HOPWELL_SCALES_PLAIN,
                                         .out = c.view(),
                                         .backend = backend},
                                        stream);
  };
  instance.flops = 2.0 * static_cast<double>(p.m * p.n * p.k);
  instance.bytes = a.bytes() + b.bytes() +
                   static_cast<double>((c.size() + (p.bias ? p.n : 0)) * static_cast<std::int64_t>(size_of(p.out)));
  return instance;
}

// ---- problems -----------------------------------------------------------------------------------------------------

std::vector<std::pair<std::string, Gemv>> gemv_problems() {
  return {
      {"basic", {}},
      {"one_row_one_block", {.m = 1, .k = 16}},
      {"k_tails", {.m = 5, .k = 272, .l = 2, .out = DType::kFloat32}},
      {"rows_129_blocked", {.m = 129, .k = 80, .l = 3, .blocked = true}},
      {"rows_257_padded_b", {.m = 257, .k = 128, .l = 2, .padded = true}},
      {"blocked_padded_b_bf16", {.m = 130, .k = 192, .l = 2, .out = DType::kBFloat16, .blocked = true, .padded = true}},
      {"strided_c", {.m = 33, .k = 96, .l = 3, .strided = true, .row_gap = 16}},
      {"alpha", {.m = 40, .k = 256, .out = DType::kFloat32, .alpha = -0.37F}},
      {"alpha_zero", {.m = 9, .k = 64, .alpha = 0}},
      {"reciprocal_alpha", {.m = 40, .k = 256, .out = DType::kFloat32, .alpha = -3, .reciprocal = true}},
      {"reciprocal_alpha_blocked", {.m = 9, .k = 96, .l = 2, .blocked = true, .alpha = 0.7F, .reciprocal = true}},
      {"all_codes_all_scales", {.m = 4096, .k = 32, .l = 18, .one_hot = true}},
      {"all_codes_all_scales_bf16_blocked",
       {.m = 4096, .k = 16, .out = DType::kBFloat16, .blocked = true, .one_hot = true}},
      {"full_range_fp16", {.m = 96, .k = 1024, .alpha = 0x1p-12F, .scale_bytes = ScaleBytes::kAny}},
      {"full_range_bf16", {.m = 96, .k = 1024, .out = DType::kBFloat16, .scale_bytes = ScaleBytes::kAny}},
      {"subnormal_scales", {.m = 64, .k = 512, .out = DType::kFloat32, .scale_bytes = ScaleBytes::kSubnormal}},
      {"nan_scales", {.m = 70, .k = 64, .l = 2, .scale_bytes = ScaleBytes::kSomeNan}},
      {"nan_scales_blocked", {.m = 70, .k = 48, .l = 2, .blocked = true, .scale_bytes = ScaleBytes::kSomeNan}},
      {"slices_end_anywhere", {.m = 50, .k = 4800, .l = 3, .out = DType::kBFloat16}},
      {"many_tiles_blocked", {.m = 300, .k = 192, .l = 2, .out = DType::kFloat32, .blocked = true}},
      {"long_k", {.m = 24, .k = 16384, .alpha = 0.0625F}},
      {"longer_k", {.m = 130, .k = 32800, .out = DType::kFloat32, .scale_bytes = ScaleBytes::kAny}},
      {"tail_blocked", {.m = 200, .k = 352, .l = 2, .blocked = true, .scale_bytes = ScaleBytes::kSomeNan}},
      {"reference_data", {.m = 256, .k = 2048, .l = 2, .blocked = true, .padded = true, .alpha = 0.0625F}},
  };
}

std::vector<std::pair<std::string, Linear>> linear_problems() {
  constexpr DType kFp16 = DType::kFloat16, kFp32 = DType::kFloat32;
  return {
      {"basic", {}},
      {"one_of_everything", {.n = 1, .rows = 1, .k = 16, .dtype = kFp16}},
      {"k_tail_fp16_bias", {.n = 1, .rows = 37, .k = 272, .dtype = kFp16, .bias = true}},
      {"fp32_blocked_bias", {.n = 1, .rows = 130, .k = 144, .dtype = kFp32, .blocked = true, .bias = true}},
      {"n_1_slices_end_anywhere", {.n = 1, .rows = 37, .k = 4800, .bias = true}},
      {"n_1_many_tiles_blocked", {.n = 1, .rows = 601, .k = 192, .blocked = true}},
      {"n_1_many_tiles_fp16", {.n = 1, .rows = 601, .k = 192, .dtype = kFp16}},
      {"n_2_pair", {.n = 2, .rows = 70, .k = 4800, .bias = true, .global_as = GlobalAs::kArray}},
      {"n_3_pair_16_warps", {.n = 3, .rows = 300, .k = 4352}},
      {"n_3_pair_long", {.n = 3, .rows = 40, .k = 8448}},
      {"n_8_many_tiles", {.n = 8, .rows = 1100, .k = 288, .dtype = kFp16}},
      {"n_8_chunks", {.n = 8, .rows = 10400, .k = 64}},
      {"n_16_pair_chunks", {.n = 16, .rows = 1600, .k = 2304, .bias = true}},
      {"n_16_blocked", {.n = 16, .rows = 100, .k = 576, .dtype = kFp16, .blocked = true}},
      {"n_20_pair", {.n = 20, .rows = 40, .k = 4224, .bias = true}},
      {"wide_range_x_n_5", {.n = 5, .rows = 50, .k = 512, .x = X::kWide}},
      {"outliers_n_9", {.n = 9, .rows = 40, .k = 1024, .x = X::kOutliers}},
      {"non_finite_x_n_3", {.n = 3, .rows = 60, .k = 128, .x = X::kNonFinite}},
      {"full_range_n_8_fp16",
       {.n = 8, .rows = 64, .k = 1024, .dtype = kFp16, .global = 0x1p-8F, .scale_bytes = ScaleBytes::kAny}},
      {"nan_scales_n_4", {.n = 4, .rows = 50, .k = 192, .scale_bytes = ScaleBytes::kSomeNan}},
      {"n_2", {.n = 2, .rows = 33, .k = 1040, .bias = true, .global_as = GlobalAs::kArray}},
      {"n_3_blocked",
       {.n = 3,
        .rows = 129,
        .k = 208,
        .dtype = kFp16,
        .blocked = true,
        .global_as = GlobalAs::kReciprocal,
        .global = 3}},
      {"n_8", {.n = 8, .rows = 64, .k = 512, .dtype = kFp16, .strided = true}},
      {"n_16_strided",
       {.n = 16,
        .rows = 45,
        .k = 304,
        .bias = true,
        .strided = true,
        .global_as = GlobalAs::kReciprocalArray,
        .global = 1.7F}},
      {"n_17_fp32", {.n = 17, .rows = 31, .k = 96, .dtype = kFp32}},
      {"n_17", {.n = 17, .rows = 2900, .k = 320, .bias = true}},
      {"n_24_few_rows", {.n = 24, .rows = 270, .k = 1056, .dtype = kFp16, .blocked = true}},
      {"n_40_cluster", {.n = 40, .rows = 2100, .k = 1088, .bias = true, .global_as = GlobalAs::kArray}},
      {"n_70_nan_scales",
       {.n = 70, .rows = 300, .k = 2080, .dtype = kFp16, .blocked = true, .scale_bytes = ScaleBytes::kSomeNan}},
      {"non_finite_x_n_1200", {.n = 1200, .rows = 60, .k = 640, .x = X::kNonFinite}},
      {"huge_x_n_33", {.n = 33, .rows = 60, .k = 128, .x = X::kHuge}},
      {"n_70", {.n = 70, .rows = 65, .k = 1104, .blocked = true, .bias = true}},
      {"n_300", {.n = 300, .rows = 40, .k = 64, .dtype = kFp16}},
      {"all_codes_all_scales_n_1_bf16", {.n = 1, .rows = 4096, .k = 16, .global = 1, .x = X::kIdentity}},
      {"all_codes_all_scales_n_16_fp16",
       {.n = 16, .rows = 4096, .k = 16, .dtype = kFp16, .global = 1, .x = X::kIdentity}},
      {"full_range_fp16",
       {.n = 1, .rows = 96, .k = 2048, .dtype = kFp16, .global = 0x1p-8F, .scale_bytes = ScaleBytes::kAny}},
      {"full_range_bf16_n_4", {.n = 4, .rows = 96, .k = 2048, .scale_bytes = ScaleBytes::kAny}},
      {"full_range_fp32", {.n = 1, .rows = 60, .k = 1024, .dtype = kFp32, .scale_bytes = ScaleBytes::kAny}},
      {"subnormal_scales",
       {.n = 1, .rows = 50, .k = 256, .dtype = kFp16, .global = 8, .scale_bytes = ScaleBytes::kSubnormal}},
      {"nan_scales", {.n = 1, .rows = 50, .k = 128, .scale_bytes = ScaleBytes::kSomeNan}},
      {"nan_scales_blocked_n_5",
       {.n = 5, .rows = 50, .k = 112, .dtype = kFp16, .blocked = true, .scale_bytes = ScaleBytes::kSomeNan}},
      {"outliers_bf16", {.n = 1, .rows = 60, .k = 1024, .x = X::kOutliers}},
      {"outliers_fp16_n_6", {.n = 6, .rows = 60, .k = 1024, .dtype = kFp16, .x = X::kOutliers}},
      {"wide_range_x_bf16", {.n = 1, .rows = 60, .k = 512, .x = X::kWide}},
      {"wide_range_x_fp16", {.n = 1, .rows = 60, .k = 512, .dtype = kFp16, .x = X::kWide}},
      {"non_finite_x", {.n = 1, .rows = 60, .k = 96, .x = X::kNonFinite}},
      {"non_finite_x_n_7", {.n = 7, .rows = 60, .k = 96, .dtype = kFp16, .x = X::kNonFinite}},
      {"huge_x", {.n = 1, .rows = 60, .k = 512, .x = X::kHuge}},
      {"huge_x_n_6", {.n = 6, .rows = 60, .k = 512, .x = X::kHuge}},
      {"huge_x_n_12", {.n = 12, .rows = 60, .k = 272, .x = X::kHuge}},
      {"tiny_x", {.n = 1, .rows = 60, .k = 512, .x = X::kTiny}},
      {"tiny_x_n_6", {.n = 6, .rows = 60, .k = 512, .x = X::kTiny}},
      {"tiny_x_n_12", {.n = 12, .rows = 60, .k = 272, .x = X::kTiny}},
      {"cancelling_x", {.n = 1, .rows = 60, .k = 512, .x = X::kCancelling}},
      {"cancelling_x_n_4", {.n = 4, .rows = 60, .k = 512, .x = X::kCancelling}},
      {"long_k", {.n = 1, .rows = 40, .k = 16384}},
      {"k_of_21_stages", {.n = 1, .rows = 40, .k = 5184, .bias = true}},
      {"k_of_28_stages", {.n = 1, .rows = 40, .k = 7168, .dtype = kFp16, .blocked = true, .x = X::kOutliers}},
      {"long_k_n_9", {.n = 9, .rows = 20, .k = 16384, .dtype = kFp16, .global = 0.0625F}},
      {"longer_k_n_10", {.n = 10, .rows = 20, .k = 18496, .global = 0.0625F}},
      {"empty_n", {.n = 0, .rows = 5, .k = 32}},
      {"empty_k", {.n = 2, .rows = 5, .k = 0, .bias = true}},
  };
}

std::vector<std::pair<std::string, Matmul>> matmul_problems() {
  constexpr DType kFp16 = DType::kFloat16, kFp32 = DType::kFloat32;
  constexpr auto kAny = ScaleBytes::kAny, kSomeNan = ScaleBytes::kSomeNan;
  return {
      {"basic", {}},
      {"one_of_everything", {.m = 1, .n = 1, .k = 16, .out = kFp16, .bias = true}},
      {"m_1_bias", {.m = 1, .n = 301, .k = 1056, .bias = true, .alpha = 0.37F}},
      {"n_1_bias_blocked", {.m = 301, .n = 1, .k = 1056, .out = kFp16, .blocked = true, .bias = true}},
      {"m_1_k_tail", {.m = 1, .n = 40, .k = 272, .out = kFp32}},
      {"k_tail_fp16", {.m = 5, .n = 37, .k = 272, .out = kFp16, .bias = true}},
      {"k_tail_blocked", {.m = 130, .n = 20, .k = 80, .blocked = true, .bias = true}},
      {"few_rows_of_a", {.m = 6, .n = 300, .k = 1088, .bias = true}},
      {"few_rows_of_a_blocked", {.m = 16, .n = 260, .k = 2080, .out = kFp16, .blocked = true, .alpha = -0.25F}},
      {"few_rows_of_b", {.m = 300, .n = 6, .k = 1088, .bias = true}},
      {"few_rows_of_b_blocked", {.m = 260, .n = 13, .k = 576, .out = kFp16, .blocked = true, .bias = true}},
      {"long_k", {.m = 3, .n = 20, .k = 16384, .alpha = 0.0625F}},
      {"longer_k", {.m = 9, .n = 140, .k = 18496, .out = kFp32, .scale_bytes = kAny}},
      {"long_k_40_rows_of_a", {.m = 40, .n = 130, .k = 4096, .blocked = true, .alpha = 0.5F}},
      {"long_k_many_rows_of_both", {.m = 200, .n = 135, .k = 4096, .out = kFp16, .bias = true, .alpha = 0x1p-4F}},
      {"rows_129_columns_129", {.m = 129, .n = 129, .k = 320, .blocked = true}},
      {"rows_257_columns_513", {.m = 257, .n = 513, .k = 1088, .blocked = true, .bias = true, .scale_bytes = kSomeNan}},
      {"longer_k_rows_140_columns_130", {.m = 140, .n = 130, .k = 8256, .out = kFp32, .scale_bytes = kAny}},
      {"many_tiles", {.m = 40, .n = 700, .k = 448, .out = kFp16, .bias = true}},
      {"many_rows_of_both", {.m = 300, .n = 270, .k = 224, .bias = true, .strided = true}},
      {"more_rows_of_a", {.m = 600, .n = 70, .k = 352, .blocked = true, .alpha = 0.5F}},
      {"strided_k_tail", {.m = 33, .n = 21, .k = 48, .out = kFp16, .bias = true, .strided = true}},
      {"fp32_blocked", {.m = 34, .n = 50, .k = 192, .out = kFp32, .blocked = true, .bias = true}},
      {"alpha_zero", {.m = 20, .n = 24, .k = 64, .bias = true, .alpha = 0}},
      {"reciprocal_alpha", {.m = 40, .n = 130, .k = 128, .bias = true, .alpha = 3, .reciprocal = true}},
      {"reciprocal_alpha_m_1", {.m = 1, .n = 24, .k = 256, .alpha = -0.3F, .reciprocal = true}},
      {"all_codes_all_scales", {.m = 4096, .n = 18, .k = 64, .one_hot = true}},
      {"all_codes_all_scales_few_rows_of_b", {.m = 4096, .n = 3, .k = 64, .out = kFp16, .one_hot = true}},
      {"all_codes_all_scales_blocked", {.m = 4096, .n = 20, .k = 16, .out = kFp16, .blocked = true, .one_hot = true}},
      {"full_range_fp16", {.m = 20, .n = 96, .k = 1024, .out = kFp16, .alpha = 0x1p-12F, .scale_bytes = kAny}},
      {"full_range_bf16", {.m = 70, .n = 96, .k = 512, .scale_bytes = kAny}},
      {"subnormal_scales", {.m = 24, .n = 40, .k = 512, .out = kFp32, .scale_bytes = ScaleBytes::kSubnormal}},
      {"nan_scales", {.m = 40, .n = 50, .k = 64, .bias = true, .scale_bytes = kSomeNan}},
      {"nan_scales_blocked", {.m = 12, .n = 70, .k = 96, .out = kFp16, .blocked = true, .scale_bytes = kSomeNan}},
      {"nan_scales_few_rows_of_b", {.m = 70, .n = 2, .k = 352, .blocked = true, .scale_bytes = kSomeNan}},
      {"empty_m", {.m = 0, .n = 5, .k = 32, .bias = true}},
      {"empty_n", {.m = 5, .n = 0, .k = 32}},
      {"empty_k", {.m = 3, .n = 5, .k = 0, .bias = true}},
  };
}

}  // namespace

namespace {
constexpr std::pair<const char*, const char*> kBarShapes[] = {{"7168", "16384"}, {"4096", "7168"},  {"7168", "2048"},
                                                              {"8192", "8192"},  {"28672", "4096"}, {"1536", "7168"}};
}  // namespace

Suite nvfp4_gemv() {
  Suite suite{"nvfp4_gemv", {}, {}, {}};
  for (const auto& [name, problem] : gemv_problems())
    suite.cases.push_back({suite.op, name, [p = problem](Random& random) { return make_gemv(random, p); }});
  suite.shapes = {{"7168x16384", {{"M", "7168"}, {"K", "16384"}, {"L", "1"}}},
                  {"4096x7168", {{"M", "4096"}, {"K", "7168"}, {"L", "8"}}},
                  {"7168x2048", {{"M", "7168"}, {"K", "2048"}, {"L", "4"}}}};
  for (const auto& [rows, k] : kBarShapes)
    for (const char* l : {"1", "8"})
      suite.device_shapes.push_back({std::string(rows) + "x" + k + " L " + l, {{"M", rows}, {"K", k}, {"L", l}}});
  suite.bench = [](const Settings& settings, Random& random) {
    return make_gemv(random, {.m = number(settings, "M"), .k = number(settings, "K"), .l = number(settings, "L")});
  };
  suite.unsupported = {{"sm100", "needs rows and batches of a and b 16-byte aligned",
                        "all_codes_all_scales_bf16_blocked k_tails nan_scales_blocked rows_129_blocked"}};
  suite.allocating = {"nan_scales_blocked"};
  suite.subjects = {
      {"nvfp4_gemv", "emu:sm80", {"many_tiles_blocked"}, 8, 4},
      // Steps that wrap around the ring, scales with and without signs, clusters; blocked scales that end in NaN.
      {"nvfp4_gemv_sm100", "emu:sm100", {"longer_k", "tail_blocked", "many_tiles_blocked"}, 8, 15},
  };
  return suite;
}

Suite nvfp4_linear() {
  Suite suite{"nvfp4_linear", {}, {}, {}};
  for (const auto& [name, problem] : linear_problems())
    suite.cases.push_back({suite.op, name, [p = problem](Random& random) { return make_linear(random, p); }});
  for (const auto& [rows, k] : kBarShapes) {
    suite.shapes.push_back({std::string(rows) + "x" + k, {{"n", "1"}, {"N", rows}, {"K", k}}});
    for (const char* n : {"1", "8", "16"})
      suite.device_shapes.push_back({std::string(rows) + "x" + k + " n " + n, {{"n", n}, {"N", rows}, {"K", k}}});
  }
  suite.bench = [](const Settings& settings, Random& random) {
    return make_linear(random, {.n = number(settings, "n"), .rows = number(settings, "N"), .k = number(settings, "K")});
  };
  // longer_k_n_10 is a subject, which also runs on larger devices.
  leave_to_nightly(suite, {"longer_k_n_10", "n_3_pair_16_warps"}, "sm90");
  suite.unsupported = {
      {"sm90",
       "needs x and weight rows 16-byte aligned, a non-negative weight stride, scale rows 4-byte aligned, K at "
       "most 65536",
       "all_codes_all_scales_n_16_fp16 empty_k huge_x_n_12 n_16_strided n_2 n_3_blocked n_70 n_8 n_8_many_tiles "
       "nan_scales_blocked_n_5 non_finite_x_n_7 tiny_x_n_12"},
      {"sm90", "needs n from 2 to 524288, n * N at most 2^38, x of 16 bits",
       "all_codes_all_scales_n_1_bf16 basic cancelling_x empty_n fp32_blocked_bias full_range_fp16 "
       "full_range_fp32 huge_x k_of_21_stages k_of_28_stages k_tail_fp16_bias long_k n_17_fp32 "
       "n_1_many_tiles_blocked n_1_many_tiles_fp16 n_1_slices_end_anywhere nan_scales non_finite_x "
       "one_of_everything outliers_bf16 subnormal_scales tiny_x wide_range_x_bf16 wide_range_x_fp16"},
      {"sm90", "slower than sm80 for n <= 32 and N at most 2048", "n_20_pair n_24_few_rows"},
      {"sm90", "slower than sm80 for n <= 8 and N above 4096", "n_8_chunks"},
      {"sm100",
       "needs x and weight rows 16-byte aligned, a non-negative weight stride, scale rows 4-byte aligned, K at "
       "most 65536",
       "all_codes_all_scales_n_1_bf16 k_tail_fp16_bias non_finite_x"},
      {"sm100", "needs n = 1, x of 16 bits",
       "all_codes_all_scales_n_16_fp16 cancelling_x_n_4 empty_k empty_n fp32_blocked_bias full_range_bf16_n_4 "
       "full_range_fp32 full_range_n_8_fp16 huge_x_n_12 huge_x_n_33 huge_x_n_6 long_k_n_9 longer_k_n_10 "
       "n_16_blocked n_16_pair_chunks n_16_strided n_17 n_17_fp32 n_2 n_20_pair n_24_few_rows n_2_pair n_300 "
       "n_3_blocked n_3_pair_16_warps n_3_pair_long n_40_cluster n_70 n_70_nan_scales n_8 n_8_chunks "
       "n_8_many_tiles nan_scales_blocked_n_5 nan_scales_n_4 non_finite_x_n_1200 non_finite_x_n_3 "
       "non_finite_x_n_7 outliers_fp16_n_6 outliers_n_9 tiny_x_n_12 tiny_x_n_6 wide_range_x_n_5"}};
  suite.allocating = {"outliers_bf16", "nan_scales_n_4", "huge_x_n_33"};
  suite.subjects = {
      {"nvfp4_linear",
       "emu:sm80",
       {"n_1_slices_end_anywhere", "n_1_many_tiles_blocked", "wide_range_x_bf16", "n_2_pair", "longer_k_n_10",
        "wide_range_x_n_5", "n_16_blocked"},
       3,
       8},
      // Clusters, slots of x and rings that wrap around; several warpgroups per tile in one CTA.
      {"nvfp4_linear_sm90", "emu:sm90", {"longer_k_n_10", "nan_scales_n_4"}, 3, 10},
      // Split K over a cluster and over warpgroups, with a ring that wraps around; split K over warpgroups alone; tiles
      // of one CTA that wrap around the ring.
      {"nvfp4_linear_sm90_matmul", "emu:sm90", {"n_40_cluster", "huge_x_n_33", "non_finite_x_n_1200"}, 3, 14},
  };
  return suite;
}

Suite nvfp4_matmul() {
  Suite suite{"nvfp4_matmul", {}, {}, {}};
  for (const auto& [name, problem] : matmul_problems())
    suite.cases.push_back({suite.op, name, [p = problem](Random& random) { return make_matmul(random, p); }});
  for (const std::int64_t rows : {128, 256}) {  // a tile
    for (const std::int64_t k : {1024, 2048}) {
      Case& tile =
          suite.cases.emplace_back(suite.op, "tile_" + std::to_string(rows) + "_k_" + std::to_string(k),
                                   [=](Random& random) { return make_matmul(random, {.m = rows, .n = rows, .k = k}); });
      tile.for_model = true;
    }
  }
  for (const auto& [rows, k] : kBarShapes) {
    suite.shapes.push_back({std::string(rows) + "x" + k, {{"M", "1"}, {"N", rows}, {"K", k}}});
    for (const char* m : {"1", "16", "128", "2048"})
      suite.device_shapes.push_back({std::string(rows) + "x" + k + " M " + m, {{"M", m}, {"N", rows}, {"K", k}}});
  }
  suite.bench = [](const Settings& settings, Random& random) {
    return make_matmul(random, {.m = number(settings, "M"), .n = number(settings, "N"), .k = number(settings, "K")});
  };
  leave_to_nightly(suite, {"rows_257_columns_513", "longer_k_rows_140_columns_130", "many_rows_of_both"}, "sm80");
  leave_to_nightly(suite, {"few_rows_of_a_blocked"}, "sm90");
  suite.unsupported = {
      {"sm90", "slower than sm80 for M = 1 or N = 1, which decodes nothing first",
       "m_1_bias m_1_k_tail n_1_bias_blocked one_of_everything reciprocal_alpha_m_1"},
      {"sm90",
       "as nvfp4_linear with decoded x: needs x and weight rows 16-byte aligned, a non-negative weight stride, "
       "scale rows 4-byte aligned, K at most 65536",
       "all_codes_all_scales_blocked empty_k k_tail_blocked k_tail_fp16 many_rows_of_both strided_k_tail"},
      {"sm90", "as nvfp4_linear with decoded x: needs n from 2 to 524288, n * N at most 2^38, x of 16 bits",
       "empty_m empty_n fp32_blocked longer_k longer_k_rows_140_columns_130 subnormal_scales"},
      {"sm90", "as nvfp4_linear with decoded x: slower than sm80 for n <= 32 and N at most 2048",
       "alpha_zero full_range_fp16"},
      {"sm100", "needs rows and batches of a and b 16-byte aligned",
       "all_codes_all_scales_blocked k_tail_blocked k_tail_fp16 m_1_k_tail strided_k_tail"},
      {"sm100", "needs K from 16 to 2^30, M at most 2^28, N at most 2^23", "empty_k"}};
  suite.allocating = {"m_1_k_tail", "few_rows_of_a"};
  suite.subjects = {
      // Codes decoded to a workspace that the next kernel reads.
      {"nvfp4_matmul", "emu:sm80", {"few_rows_of_a", "few_rows_of_b"}, 4, 3},
      // Tiles of one CTA of every width, in clusters and alone, with negative scales.
      {"nvfp4_matmul_sm100", "emu:sm100", {"few_rows_of_a", "longer_k", "long_k_40_rows_of_a"}, 4, 15},
      // Pairs alone and in clusters, wrapping around the ring, with negative scales.
      {"nvfp4_matmul_sm100_pairs", "emu:sm100", {"many_rows_of_both", "longer_k_rows_140_columns_130"}, 4, 15},
  };
  return suite;
}

}  // namespace hopwell::cases
