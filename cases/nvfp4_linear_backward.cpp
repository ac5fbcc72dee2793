// nvfp4_linear_backward: inputs, float64 reference, tolerance and cost.
#include <cmath>

#include "nvfp4.hpp"
#include "suites.hpp"
#include "tile/cpu/parallel.hpp"
#include "vectors.hpp"

namespace hopwell::cases {
namespace {

enum class DOut {
  kNormal,
  kIdentity,   // picks single rows of weights, which come out exactly
  kNonFinite,  // +-inf and NaN here and there
  kWide,       // exponents all over the type's range
  kHuge,       // bf16 up to 2^120
  kTiny,       // bf16 down to 2^-120
};

struct Backward {
  std::int64_t n = 5, rows = 40, k = 64;
  DType dtype = DType::kBFloat16;
  bool blocked = false, strided = false;
  GlobalAs global_as = GlobalAs::kNumber;
  float global = 0.25F;
  ScaleBytes scale_bytes = ScaleBytes::kUsual;
  DOut d_out = DOut::kNormal;
};

void fill_d_out(const Backward& p, Random& random, Array& d_out) {
  d_out.fill_normal(random);
  const bool is_fp16 = p.dtype == DType::kFloat16;
  for (std::int64_t i = 0; i < d_out.size(); ++i) {
    if (p.d_out == DOut::kIdentity) d_out.set(i, i % p.rows == i / p.rows ? 1 : 0);
    if (p.d_out == DOut::kNonFinite && random.below(500) == 0)
      d_out.set(i, random.below(2) == 0 ? INFINITY : random.below(2) == 0 ? -INFINITY : NAN);
    if (p.d_out == DOut::kWide)
      d_out.set(i,
                std::ldexp(random.normal(), static_cast<int>(random.below(is_fp16 ? 18 : 100)) - (is_fp16 ? 14 : 60)));
    if (p.d_out == DOut::kHuge || p.d_out == DOut::kTiny)
      d_out.set(i,
                std::ldexp(random.normal(), static_cast<int>(random.below(80)) + (p.d_out == DOut::kHuge ? 38 : -120)));
  }
}

// Row r has scale r and all codes.
void set_all_weights(const Backward& p, Matrix& weight) {
  for (std::int64_t row = 0; row < p.rows; ++row) {
    for (std::int64_t column = 0; column < p.k; ++column)
      weight.set_code(row, column, 0, static_cast<unsigned>(row + column) % 16);
    for (std::int64_t block = 0; block < p.k / 16; ++block)
      weight.scale(row, block) = row % 128 == 127 ? std::uint8_t{0} : static_cast<std::uint8_t>(row);
  }
}

void make_reference(const Backward& p, const Matrix& weight, const Array& d_out, bool reciprocal, Output& output) {
  const double factor = factor_of(p.global, reciprocal);
  output.expected.resize(static_cast<std::size_t>(p.n * p.k));
  output.magnitude.resize(static_cast<std::size_t>(p.n * p.k));
  const std::vector<double> rows_of_d_out = values_of(d_out);
  cpu::parallel_for(p.k, [&](std::int64_t column) {
    std::vector<double> values(static_cast<std::size_t>(p.rows));
    for (std::int64_t row = 0; row < p.rows; ++row) values[static_cast<std::size_t>(row)] = weight.value(row, column);
    for (std::int64_t i = 0; i < p.n; ++i) {
      const auto [sum, magnitude] = dot(rows_of_d_out.data() + i * p.rows, values.data(), p.rows);
      const auto at = static_cast<std::size_t>(i * p.k + column);
      output.expected[at] = factor * sum;
      output.magnitude[at] = std::isfinite(magnitude) ? std::abs(factor) * magnitude : 0;
    }
  });
}

Instance make(Random& random, const Backward& p) {
  Instance instance;
  Matrix weight{
      .rows = p.rows, .k = p.k, .blocked = p.blocked, .scale_bytes = p.scale_bytes, .row_gap = p.strided ? 8 : 0};
  weight.add(instance, random, "weight", "weight_scale");
  if (p.d_out == DOut::kIdentity) set_all_weights(p, weight);
  const std::int64_t gap = p.strided ? 5 : 0;
  Array& d_out = instance.add({"d_out", p.dtype, {p.n, p.rows}, {p.rows + gap, 1}});
  fill_d_out(p, random, d_out);
  Array& global = instance.add({"weight_global", DType::kFloat32, {}}).fill(static_cast<double>(p.global));
  Array& d_x = instance.add({"d_x", p.dtype, {p.n, p.k}, {p.k + gap, 1}});
  instance.expect(d_x, p.d_out == DOut::kIdentity ? Tolerance{.exact = true} : nvfp4_tolerance(p.dtype));
  const bool reciprocal = p.global_as == GlobalAs::kReciprocal || p.global_as == GlobalAs::kReciprocalArray;
  instance.reference = [p, weight, reciprocal, &d_out](Instance& self) {
    make_reference(p, weight, d_out, reciprocal, self.outputs[0]);
  };
  Workspace& workspace = *instance.workspace;
  instance.call = [p, weight, reciprocal, &d_out, &global, &d_x, &workspace](const char* backend, Stream stream) {
    const bool as_array = p.global_as == GlobalAs::kArray || p.global_as == GlobalAs::kReciprocalArray;
    run_with_workspace<Nvfp4LinearBackwardArgs>(
        hopwell::nvfp4_linear_backward, nvfp4_linear_backward_workspace_bytes, workspace,
        {.d_out = d_out.view(),
         .weight = weight.codes->view(),
         .weight_scale = weight.scales->view(),
         .weight_global = as_array ? global.view() : Tensor(),
         .weight_global_value = as_array ? 1 : p.global,
         .global_is_reciprocal = reciprocal,
         .scale_layout = p.blocked ? HOPWELL_SCALES_BLOCKED : HOPWELL_SCALES_PLAIN,
         .d_x = d_x.view(),
         .backend = backend},
        stream);
  };
  instance.flops = 2.0 * static_cast<double>(p.n * p.rows * p.k);
  instance.bytes =
      weight.bytes() + static_cast<double>((d_out.size() + d_x.size()) * static_cast<std::int64_t>(size_of(p.dtype)));
  return instance;
}

// Chunks are of 256 rows of weights at least, so 257 are two. On the emulator's four multiprocessors each chunk has a
// CTA where there are up to two tiles, of 16 to 64 rows of d_x and 256 columns of K.
std::vector<std::pair<std::string, Backward>> problems() {
  constexpr DType kFp16 = DType::kFloat16, kFp32 = DType::kFloat32;
  return {
      {"basic", {}},
      {"one_of_everything", {.n = 1, .rows = 1, .k = 16, .dtype = kFp16}},
      {"n_1_chunks", {.n = 1, .rows = 1101, .k = 272, .global_as = GlobalAs::kArray}},
      {"n_3_chunks_blocked",
       {.n = 3,
        .rows = 520,
        .k = 208,
        .dtype = kFp16,
        .blocked = true,
        .global_as = GlobalAs::kReciprocal,
        .global = 3}},
      {"n_16_chunks_of_a_cta", {.n = 16, .rows = 600, .k = 1040}},
      {"n_17_chunks_of_a_cta_fp16", {.n = 17, .rows = 392, .k = 560, .dtype = kFp16, .blocked = true}},
      {"n_30_chunks", {.n = 30, .rows = 264, .k = 64}},
      {"n_40_chunks_fp16", {.n = 40, .rows = 328, .k = 512, .dtype = kFp16}},
      {"n_70_chunks_of_a_cta", {.n = 70, .rows = 584, .k = 320, .blocked = true}},
      {"n_130", {.n = 130, .rows = 136, .k = 96, .dtype = kFp16}},
      {"longer_chunks", {.n = 2, .rows = 4424, .k = 48}},
      {"odd_rows", {.n = 6, .rows = 77, .k = 304, .dtype = kFp16}},
      {"strided",
       {.n = 19, .rows = 300, .k = 272, .strided = true, .global_as = GlobalAs::kReciprocalArray, .global = 1.7F}},
      {"fp32", {.n = 7, .rows = 700, .k = 208, .dtype = kFp32}},
      {"fp32_blocked_strided", {.n = 300, .rows = 50, .k = 80, .dtype = kFp32, .blocked = true, .strided = true}},
      {"all_codes_all_scales", {.n = 256, .rows = 256, .k = 32, .global = 1, .d_out = DOut::kIdentity}},
      {"all_codes_all_scales_fp16",
       {.n = 256, .rows = 256, .k = 16, .dtype = kFp16, .blocked = true, .global = 1, .d_out = DOut::kIdentity}},
      {"full_range_fp16",
       {.n = 4, .rows = 512, .k = 160, .dtype = kFp16, .global = 0x1p-8F, .scale_bytes = ScaleBytes::kAny}},
      {"full_range_bf16", {.n = 18, .rows = 512, .k = 96, .scale_bytes = ScaleBytes::kAny}},
      {"full_range_fp32", {.n = 3, .rows = 300, .k = 64, .dtype = kFp32, .scale_bytes = ScaleBytes::kAny}},
      {"subnormal_scales",
       {.n = 4, .rows = 256, .k = 80, .dtype = kFp16, .global = 8, .scale_bytes = ScaleBytes::kSubnormal}},
      {"nan_scales", {.n = 5, .rows = 30, .k = 640, .scale_bytes = ScaleBytes::kSomeNan}},
      {"nan_scales_blocked",
       {.n = 20, .rows = 9, .k = 848, .dtype = kFp16, .blocked = true, .scale_bytes = ScaleBytes::kSomeNan}},
      {"non_finite_d_out", {.n = 70, .rows = 96, .k = 64, .d_out = DOut::kNonFinite}},
      {"non_finite_d_out_chunks", {.n = 5, .rows = 400, .k = 64, .dtype = kFp16, .d_out = DOut::kNonFinite}},
      {"wide_range_d_out_bf16", {.n = 6, .rows = 300, .k = 80, .d_out = DOut::kWide}},
      {"wide_range_d_out_fp16", {.n = 6, .rows = 300, .k = 80, .dtype = kFp16, .d_out = DOut::kWide}},
      {"huge_d_out", {.n = 6, .rows = 300, .k = 80, .d_out = DOut::kHuge}},
      {"tiny_d_out", {.n = 6, .rows = 300, .k = 80, .d_out = DOut::kTiny}},
      {"no_rows", {.n = 3, .rows = 0}},
      {"empty_n", {.n = 0}},
      {"empty_k", {.k = 0}},
  };
}

}  // namespace

Suite nvfp4_linear_backward() {
  Suite suite{"nvfp4_linear_backward", {}, {}, {}};
  for (const auto& [name, problem] : problems())
    suite.cases.push_back({suite.op, name, [p = problem](Random& random) { return make(random, p); }});
  suite.shapes = {{"64x7168x2048", {{"n", "64"}, {"N", "7168"}, {"K", "2048"}}}};
  for (const auto& [rows, k] : {std::pair{"4096", "7168"}, std::pair{"28672", "4096"}})
    for (const char* n : {"1", "16", "128", "4096"})
      suite.device_shapes.push_back({std::string(rows) + "x" + k + " n " + n, {{"n", n}, {"N", rows}, {"K", k}}});
  suite.bench = [](const Settings& settings, Random& random) {
    return make(random, {.n = number(settings, "n"), .rows = number(settings, "N"), .k = number(settings, "K")});
  };
  suite.unsupported = {{"sm80", "needs d_out of 16 bits", "fp32 fp32_blocked_strided full_range_fp32"}};
  suite.allocating = {"strided"};
  suite.subjects = {
      // Stages round the ring, in CTAs of one chunk and of several.
      {"nvfp4_linear_backward", "emu:sm80", {"longer_chunks", "n_16_chunks_of_a_cta"}, 3, 3},
  };
  return suite;
}

}  // namespace hopwell::cases
