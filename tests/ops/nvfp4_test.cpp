// NVFP4 beyond the shared cases: formats byte by byte, bad input, signs of zero, bits whatever the threads and the
// instruction set.
#include "tile/nvfp4.hpp"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <hopwell/hopwell.hpp>
#include <random>
#include <vector>

#include "cases/nvfp4.hpp"
#include "tile/cpu/nvfp4.hpp"
#include "tile/cpu/parallel.hpp"

namespace hopwell {
namespace {

using Bytes = std::vector<std::uint8_t>;

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), HOPWELL_INVALID_ARGUMENT);
    return error.what();
  }
  return "no error";
}

void expect_error(const std::function<void()>& call, const std::string& message) {
  EXPECT_EQ(message_of(call), message);
}

Bytes random_bytes(std::size_t count, std::uint64_t seed, bool scales = false) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  for (std::uint8_t& byte : bytes) {
    byte = static_cast<std::uint8_t>(random());
    if (scales && (byte & 0x7F) == 0x7F) byte ^= 1;
  }
  return bytes;
}

std::vector<float> random_floats(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& value : x) value = normal(random);
  return x;
}

// ---- formats ------------------------------------------------------------------------------------------------------

TEST(Nvfp4Format, DecodesEveryCodeAndEveryScale) {
  for (unsigned code = 0; code < 16; ++code) {
    EXPECT_EQ(static_cast<double>(nvfp4::decode_e2m1(code)), cases::e2m1_value(code));
    EXPECT_EQ(std::signbit(nvfp4::decode_e2m1(code)), code >= 8);
  }
  for (unsigned byte = 0; byte < 256; ++byte) {
    const float value = nvfp4::decode_e4m3(static_cast<std::uint8_t>(byte));
    EXPECT_EQ(std::isnan(value), (byte & 0x7F) == 0x7F);
    EXPECT_EQ(std::signbit(value), byte >= 0x80);
    if (!std::isnan(value)) {
      EXPECT_EQ(static_cast<double>(value), cases::e4m3_value(byte));
    }
  }
}

TEST(Nvfp4Format, EncodesScalesToTheNearestTiesToEven) {
  for (unsigned byte = 0; byte < 0x7E; ++byte) {
    const float low = nvfp4::decode_e4m3(static_cast<std::uint8_t>(byte)),
                high = nvfp4::decode_e4m3(static_cast<std::uint8_t>(byte + 1));
    const float middle = (low + high) / 2;
    EXPECT_EQ(nvfp4::encode_e4m3(low), byte);
    EXPECT_EQ(nvfp4::encode_e4m3(middle), byte + byte % 2);
    EXPECT_EQ(nvfp4::encode_e4m3(std::nextafter(middle, 0.0F)), byte);
    EXPECT_EQ(nvfp4::encode_e4m3(std::nextafter(middle, 1e9F)), byte + 1);
  }
  for (const float large : {447.9F, 448.0F, 449.0F, 480.0F, 3e38F, INFINITY})
    EXPECT_EQ(nvfp4::encode_e4m3(large), 0x7E);
}

TEST(Nvfp4Format, BlockedOffsetsAreAPermutationAndFollowTheFormula) {
  constexpr std::int64_t kRows = 256, kColumns = 8;
  std::vector<int> seen(static_cast<std::size_t>(nvfp4::blocked_bytes(kRows, kColumns)));
  ASSERT_EQ(seen.size(), kRows * kColumns);
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t column = 0; column < kColumns; ++column) {
      EXPECT_EQ(nvfp4::blocked_offset(row, column, kColumns), cases::blocked_place(row, column, kColumns));
      ++seen[static_cast<std::size_t>(nvfp4::blocked_offset(row, column, kColumns))];
    }
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), kRows * kColumns);
  EXPECT_EQ(nvfp4::blocked_bytes(129, 5), 2 * 2 * 512);
}

TEST(Nvfp4Vectors, EveryInstructionSetDecodesTheSameAndAddsNearlyTheSame) {
  const std::int64_t supported = hwy::SupportedTargets();
  for (const std::size_t k : {16UL, 80UL, 256UL, 1040UL}) {
    const Bytes codes = random_bytes(4 * k / 2, k), scale_bytes = random_bytes(4 * k / 16, k + 1);
    const std::vector<float> x = random_floats(k, k);
    const auto compute = [&] {
      namespace simd = cpu::nvfp4;
      std::vector<float> scales(4 * simd::scale_room(k)), decoded(4 * k), sums(8);
      simd::Row row(k);
      for (std::size_t r = 0; r < 4; ++r) {
        simd::decode_scales(scale_bytes.data() + r * k / 16, nullptr, k, scales.data() + r * simd::scale_room(k));
        simd::decode(codes.data() + r * k / 2, scales.data() + r * simd::scale_room(k), 0.7F, k,
                     decoded.data() + r * k);
      }
      simd::arrange_row(x.data(), k, false, row);
      const std::uint8_t* rows[4] = {codes.data(), codes.data() + k / 2, codes.data() + k, codes.data() + 3 * k / 2};
      for (const bool exact : {true, false}) {
        simd::arrange_row(x.data(), k, exact, row);
        for (std::size_t r = 0; r < 4; ++r) {
          simd::decode_scales(scale_bytes.data() + r * k / 16, row.factors.get(), k,
                              scales.data() + r * simd::scale_room(k));
        }
        for (std::size_t r = 0; r < 4; r += simd::dot_rows(1)) {
          simd::dot_row(rows + r, scales.data() + r * simd::scale_room(k), simd::dot_rows(1), row, k, rows + r,
                        sums.data() + (exact ? 0 : 4) + r);
        }
      }
      return std::pair(decoded, sums);
    };
    const auto best = compute();
    for (std::int64_t targets = supported; targets != 0; targets &= targets - 1) {
      hwy::GetChosenTarget().Update(targets & -targets);
      const auto result = compute();
      for (std::size_t i = 0; i < best.first.size(); ++i) {
        EXPECT_TRUE(result.first[i] == best.first[i] || (std::isnan(result.first[i]) && std::isnan(best.first[i])));
      }
      for (std::size_t r = 0; r < best.second.size(); ++r) {
        EXPECT_EQ(std::isnan(result.second[r]), std::isnan(best.second[r]));
        if (!std::isnan(best.second[r])) {
          EXPECT_NEAR(result.second[r], best.second[r], 1e-4F * std::abs(best.second[r]) + (r < 4 ? 0.05F : 1))
              << "k " << k;
        }
      }
    }
    hwy::GetChosenTarget().Update(supported);
  }
}

// ---- bits ---------------------------------------------------------------------------------------------------------

TEST(Nvfp4, SignsOfZeroSurvive) {
  const Bytes codes(8, 0x80), scales = {0x38};  // even k: +0, odd k: -0
  std::vector<float> x(16, 7.0F);
  nvfp4_dequantize(
      {.codes = Tensor(codes.data(), {1, 8}), .scales = Tensor(scales.data(), {1, 1}), .x = Tensor(x.data(), {1, 16})});
  for (std::size_t k = 0; k < 16; ++k) EXPECT_EQ(std::signbit(x[k]), k % 2 == 1);

  std::vector<float> values(16, 1.0F);
  values[2] = -0.01F, values[3] = -0.0F, values[4] = 0.0F;
  Bytes quantized(8), scale(1);
  float global = 0;
  nvfp4_quantize({.x = Tensor(values.data(), {1, 16}),
                  .codes = Tensor(quantized.data(), {1, 8}),
                  .scales = Tensor(scale.data(), {1, 1}),
                  .global_scale = Tensor(&global, {})});
  EXPECT_EQ(quantized[1], 0x88);
  EXPECT_EQ(quantized[2] & 0xF, 0);
}

TEST(Nvfp4, SameBitsForAnyNumberOfThreads) {
  constexpr std::int64_t kRows = 9001, kK = 592;  // so many that five threads pay
  const Bytes codes = random_bytes(kRows * kK / 2, 1), scales = random_bytes(kRows * kK / 16, 2, true);
  const int before = cpu::max_threads();
  for (const std::int64_t n : {1, 3, 40}) {
    const std::vector<float> x = random_floats(static_cast<std::size_t>(n * kK), 3);
    std::vector<float> first;
    for (const int threads : {1, 2, 3, 5}) {
      cpu::set_max_threads(threads);
      std::vector<float> y(static_cast<std::size_t>(n * kRows));
      nvfp4_linear({.x = Tensor(x.data(), {n, kK}),
                    .weight = Tensor(codes.data(), {kRows, kK / 2}),
                    .weight_scale = Tensor(scales.data(), {kRows, kK / 16}),
                    .out = Tensor(y.data(), {n, kRows})});
      if (first.empty()) first = y;
      EXPECT_EQ(std::memcmp(first.data(), y.data(), y.size() * sizeof(float)), 0)
          << "n " << n << ", " << threads << " threads";
    }
  }
  for (const std::int64_t n : {1, 3, 40}) {  // as b
    std::vector<float> first;
    for (const int threads : {1, 2, 3, 5}) {
      cpu::set_max_threads(threads);
      std::vector<float> c(static_cast<std::size_t>(n * kRows));
      nvfp4_matmul({.a = Tensor(codes.data(), {kRows, kK / 2}),
                    .b = Tensor(codes.data(), {n, kK / 2}),
                    .sfa = Tensor(scales.data(), {kRows, kK / 16}),
                    .sfb = Tensor(scales.data(), {n, kK / 16}),
                    .out = Tensor(c.data(), {kRows, n})});
      if (first.empty()) first = c;
      EXPECT_EQ(std::memcmp(first.data(), c.data(), c.size() * sizeof(float)), 0)
          << "N " << n << ", " << threads << " threads";
    }
  }
  const std::vector<float> x = random_floats(kRows * kK, 4);
  Bytes first;
  for (const int threads : {1, 2, 3, 5}) {
    cpu::set_max_threads(threads);
    Bytes out(kRows * kK / 2 + kRows * kK / 16);
    float global = 0;
    nvfp4_quantize({.x = Tensor(x.data(), {kRows, kK}),
                    .codes = Tensor(out.data(), {kRows, kK / 2}),
                    .scales = Tensor(out.data() + kRows * kK / 2, {kRows, kK / 16}),
                    .global_scale = Tensor(&global, {})});
    if (first.empty()) first = out;
    EXPECT_EQ(first, out);
  }
  cpu::set_max_threads(before);
}

// A row's result depends on that row and on x only, not on what is beside it.
TEST(Nvfp4, RowsAreIndependent) {
  constexpr std::int64_t kRows = 37, kK = 208;
  const Bytes codes = random_bytes(kRows * kK / 2, 5), scales = random_bytes(kRows * kK / 16, 6, true);
  const std::vector<float> x = random_floats(kK, 7);
  std::vector<float> y(kRows), one(1);
  const auto run = [&](std::int64_t first, std::int64_t rows, float* out) {
    nvfp4_linear({.x = Tensor(x.data(), {1, kK}),
                  .weight = Tensor(codes.data() + first * kK / 2, {rows, kK / 2}),
                  .weight_scale = Tensor(scales.data() + first * kK / 16, {rows, kK / 16}),
                  .out = Tensor(out, {1, rows})});
  };
  run(0, kRows, y.data());
  for (std::int64_t row = 0; row < kRows; ++row) {
    run(row, 1, one.data());
    EXPECT_EQ(one[0], y[static_cast<std::size_t>(row)]) << "row " << row;
  }
}

TEST(Nvfp4, GlobalsAtTheEndsOfFloat) {
  const Bytes codes(8, 0x22), scales = {0x38};
  const std::vector<float> x(16, 0.0F);
  float y = NAN;
  const float smallest = 0x1p-126F;  // its reciprocal is the largest power of two but one
  nvfp4_linear({.x = Tensor(x.data(), {1, 16}),
                .weight = Tensor(codes.data(), {1, 8}),
                .weight_scale = Tensor(scales.data(), {1, 1}),
                .weight_global = Tensor(&smallest, {1}),
                .global_is_reciprocal = true,
                .out = Tensor(&y, {1, 1})});
  EXPECT_EQ(y, 0.0F);
  const float nan = NAN;
  nvfp4_linear({.x = Tensor(x.data(), {1, 16}),
                .weight = Tensor(codes.data(), {1, 8}),
                .weight_scale = Tensor(scales.data(), {1, 1}),
                .weight_global = Tensor(&nan, {1, 1}),
                .out = Tensor(&y, {1, 1})});
  EXPECT_TRUE(std::isnan(y));
}

TEST(Nvfp4, RoundTripKeepsWhatTheGridHolds) {
  const std::vector<float> x = random_floats(64 * 256, 8);
  Bytes codes(64 * 128), scales(64 * 16), again_codes(64 * 128), again_scales(64 * 16);
  std::vector<float> back(x.size()), again(x.size());
  float global = 0, same = 0;
  const auto dequantize = [&](Bytes& c, Bytes& s, std::vector<float>& out) {
    nvfp4_dequantize({.codes = Tensor(c.data(), {64, 128}),
                      .scales = Tensor(s.data(), {64, 16}),
                      .global_scale = Tensor(&global, {}),
                      .x = Tensor(out.data(), {64, 256})});
  };
  nvfp4_quantize({.x = Tensor(x.data(), {64, 256}),
                  .codes = Tensor(codes.data(), {64, 128}),
                  .scales = Tensor(scales.data(), {64, 16}),
                  .global_scale = Tensor(&global, {})});
  dequantize(codes, scales, back);
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += std::pow(static_cast<double>(x[i]) - static_cast<double>(back[i]), 2);
    norm += std::pow(static_cast<double>(x[i]), 2);
  }
  EXPECT_LT(std::sqrt(error / norm), 0.11);
  nvfp4_quantize({.x = Tensor(back.data(), {64, 256}),
                  .global_in = Tensor(&global, {}),
                  .codes = Tensor(again_codes.data(), {64, 128}),
                  .scales = Tensor(again_scales.data(), {64, 16}),
                  .global_scale = Tensor(&same, {})});
  dequantize(again_codes, again_scales, again);
  EXPECT_EQ(back, again);
  EXPECT_EQ(global, same);
}

// ---- the C interface ----------------------------------------------------------------------------------------------

TEST(Nvfp4, InCZeroMeansOneAndNegativeZeroZero) {
  const Bytes codes(8, 0x22), scales = {0x38};
  float c = NAN, x[16] = {};
  const Tensor a(codes.data(), {1, 8, 1}), sfa(scales.data(), {1, 1, 1}), out(&c, {1, 1, 1});
  hopwell_nvfp4_gemv_args args = {};
  args.a = a, args.b = a, args.sfa = sfa, args.sfb = sfa, args.out = out;
  args.alpha = 0;
  EXPECT_EQ(hopwell_nvfp4_gemv(&args, nullptr), HOPWELL_OK);
  EXPECT_EQ(c, 16.0F);
  args.alpha = -0.0F;
  EXPECT_EQ(hopwell_nvfp4_gemv(&args, nullptr), HOPWELL_OK);
  EXPECT_EQ(c, 0.0F);
  const Tensor matrix(codes.data(), {1, 8}), plain(scales.data(), {1, 1}), values(x, {1, 16});
  hopwell_nvfp4_dequantize_args dequantize = {};
  dequantize.codes = matrix, dequantize.scales = plain, dequantize.x = values, dequantize.global_value = 0;
  std::size_t bytes = 1;
  EXPECT_EQ(hopwell_nvfp4_dequantize_workspace_bytes(&dequantize, &bytes), HOPWELL_OK);
  EXPECT_EQ(bytes, 0U);
  EXPECT_EQ(hopwell_nvfp4_dequantize(&dequantize, nullptr), HOPWELL_OK);
  EXPECT_EQ(x[5], 1.0F);
}

// ---- bad input ----------------------------------------------------------------------------------------------------

struct LinearInput {
  std::vector<float> x = std::vector<float>(64), y = std::vector<float>(8, 5.0F);
  Bytes codes = Bytes(64), scales = Bytes(512);
  float global = 1;
  Tensor tx{x.data(), {2, 32}}, tw{codes.data(), {4, 16}}, ts{scales.data(), {4, 2}}, ty{y.data(), {2, 4}};
  Nvfp4LinearArgs args{.x = tx, .weight = tw, .weight_scale = ts, .out = ty};
  void expect(const std::string& message) {
    expect_error([&] { nvfp4_linear(args); }, message);
    for (const float value : y) EXPECT_EQ(value, 5.0F);
  }
};

// As PyTorch gives empty tensors. Under the sanitizers nothing may be done with such a pointer, not even for 0 bytes.
TEST(Nvfp4, NoRowsAndNoMemory) {
  float global = 5;
  for (const hopwell_scale_layout layout : {HOPWELL_SCALES_PLAIN, HOPWELL_SCALES_BLOCKED}) {
    const Tensor scales = layout == HOPWELL_SCALES_PLAIN ? Tensor(static_cast<std::uint8_t*>(nullptr), {0, 2})
                                                         : Tensor(static_cast<std::uint8_t*>(nullptr), {0});
    nvfp4_quantize({.x = Tensor(static_cast<float*>(nullptr), {0, 32}),
                    .scale_layout = layout,
                    .codes = Tensor(static_cast<std::uint8_t*>(nullptr), {0, 16}),
                    .scales = scales,
                    .global_scale = Tensor(&global, {})});
    EXPECT_EQ(global, 1.0F);
  }
}

TEST(Nvfp4BadInput, Linear) {
  {
    LinearInput in;
    const Tensor bad(in.codes.data(), {4, 12});
    in.args.weight = bad;
    in.expect("nvfp4_linear: weight must be codes [rows, K/2, ...] with K a multiple of 16; got [4, 12]");
  }
  {
    LinearInput in;
    const Tensor bad(in.x.data(), {2, 16});
    in.args.x = bad;
    in.expect("nvfp4_linear: x must be float32 or float16 or bfloat16 [n, K=32]; got float32 [2, 16]");
  }
  {
    LinearInput in;
    const Tensor bad(in.scales.data(), {4, 3});
    in.args.weight_scale = bad;
    in.expect("nvfp4_linear: weight_scale must be uint8 or float8_e4m3fn [N=4, K/16=2]; got uint8 [4, 3]");
  }
  {
    LinearInput in;
    in.args.scale_layout = HOPWELL_SCALES_BLOCKED;
    in.expect("nvfp4_linear: weight_scale must be 512 bytes of blocked scales; got [4, 2]");
    const Tensor gaps(in.scales.data(), {256, 2}, {.strides = {2, 2}});
    in.args.weight_scale = gaps;
    in.expect("nvfp4_linear: weight_scale must be contiguous; got strides with gaps, or that overlap");
    in.args.weight_scale = nullptr;
    EXPECT_NE(message_of([&] { nvfp4_linear(in.args); }).find("weight_scale must be"), std::string::npos);
  }
  {
    LinearInput in;
    in.args.weight_global_value = NAN;
    in.expect("nvfp4_linear: weight_global_value must be finite; got nan");
    const Tensor two(in.x.data(), {2});
    in.args.weight_global = two;
    in.expect("nvfp4_linear: weight_global must be float32 with one element; got [2]");
  }
  for (const float wrong : {0.0F, -0.0F, 0x1p-149F}) {  // 1 / it is no finite float
    LinearInput in;
    in.args.global_is_reciprocal = true;
    in.args.weight_global_value = wrong;
    const std::string message = " must be finite with a finite reciprocal (global_is_reciprocal); got ";
    EXPECT_NE(message_of([&] { nvfp4_linear(in.args); }).find("weight_global_value" + message), std::string::npos);
    const Tensor array(&wrong, {1});
    in.args.weight_global_value = 1;
    in.args.weight_global = array;
    EXPECT_NE(message_of([&] { nvfp4_linear(in.args); }).find("weight_global" + message), std::string::npos);
  }
  {
    LinearInput in;
    const Tensor bias(in.codes.data(), {4});
    in.args.bias = bias;
    in.expect("nvfp4_linear: bias must be float32 [N=4]; got uint8 [4]");
  }
  {
    LinearInput in;
    const Tensor overlapping(in.y.data(), {2, 4}, {.strides = {0, 1}});
    in.args.out = overlapping;
    in.expect(
        "nvfp4_linear: out must be an output whose elements do not overlap; got strides that make them share memory");
  }
}

TEST(Nvfp4BadInput, Gemv) {
  const Bytes codes(16 * 128), scales(512);
  float c[4] = {5, 5, 5, 5};
  const Tensor a(codes.data(), {4, 8, 1}), b(codes.data(), {1, 8, 1}), sfa(scales.data(), {4, 1, 1}),
      sfb(scales.data(), {1, 1, 1});
  const Tensor out(c, {4, 1, 1});
  const Nvfp4GemvArgs good{.a = a, .b = b, .sfa = sfa, .sfb = sfb, .out = out};
  auto args = good;
  const Tensor three(codes.data(), {3, 8, 1});
  args.b = three;
  expect_error([&] { nvfp4_gemv(args); }, "nvfp4_gemv: b must be of 1 row, or 1 padded to 128; got [3, 8, 1]");
  args = good;
  args.alpha = INFINITY;
  expect_error([&] { nvfp4_gemv(args); }, "nvfp4_gemv: alpha must be finite; got inf");
  args = good;
  const Tensor k_strided(codes.data(), {4, 8, 1}, {.strides = {16, 2, 64}});
  args.a = k_strided;
  expect_error([&] { nvfp4_gemv(args); }, "nvfp4_gemv: a must be contiguous along K; got a stride of 2");
  args = good;
  const Tensor wide(c, {4, 2, 1}, {.strides = {1, 1, 1}});
  args.out = wide;
  expect_error([&] { nvfp4_gemv(args); },
               "nvfp4_gemv: out must be float32 or float16 or bfloat16 [M=4, 1, L=1]; got float32 [4, 2, 1]");
  for (const float value : c) EXPECT_EQ(value, 5.0F);
}

TEST(Nvfp4BadInput, Matmul) {
  const Bytes codes(64), scales(1024);
  std::vector<float> c(8, 5.0F), bias(4);
  const Tensor a(codes.data(), {2, 16}), b(codes.data(), {4, 16}), sfa(scales.data(), {2, 2}),
      sfb(scales.data(), {4, 2}), out(c.data(), {2, 4}), with_bias(bias.data(), {4});
  const Nvfp4MatmulArgs good{.a = a, .b = b, .sfa = sfa, .sfb = sfb, .bias = with_bias, .out = out};
  auto args = good;
  const auto expect = [&](const std::string& message) {
    expect_error([&] { nvfp4_matmul(args); }, "nvfp4_matmul: " + message);
    args = good;
  };
  const Tensor odd(codes.data(), {2, 12}), half(codes.data(), {4, 8}), three(bias.data(), {3}),
      wrong_scales(scales.data(), {4, 1}), tall(c.data(), {4, 2});
  args.a = odd;
  expect("a must be codes [rows, K/2, ...] with K a multiple of 16; got [2, 12]");
  args.b = half;
  expect("b must be uint8 or float4_e2m1fn_x2 [N, K/2=16]; got uint8 [4, 8]");
  args.sfb = wrong_scales;
  expect("sfb must be uint8 or float8_e4m3fn [N=4, K/16=2]; got uint8 [4, 1]");
  args.scale_layout = HOPWELL_SCALES_BLOCKED;
  expect("sfa must be 512 bytes of blocked scales; got [2, 2]");
  args.alpha = NAN;
  expect("alpha must be finite; got nan");
  args.out = tall;
  expect("out must be float32 or float16 or bfloat16 [M=2, N=4]; got float32 [4, 2]");
  args.bias = three;
  expect("bias must be float32 [N=4]; got float32 [3]");
  args.sfa = nullptr;
  expect("sfa must be uint8 or float8_e4m3fn [M=2, K/16=2]; got nothing");
  for (const float value : c) EXPECT_EQ(value, 5.0F);
}

TEST(Nvfp4BadInput, QuantizeAndDequantize) {
  std::vector<float> x(48, 1.0F);
  Bytes codes(24, 9), scales(512, 9);
  float global = 5;
  const Tensor tx(x.data(), {1, 16}), tc(codes.data(), {1, 8}), ts(scales.data(), {1, 1}), tg(&global, {});
  const Nvfp4QuantizeArgs good{.x = tx, .codes = tc, .scales = ts, .global_scale = tg};
  auto args = good;
  const Tensor odd(x.data(), {2, 24});
  args.x = odd;
  expect_error([&] { nvfp4_quantize(args); },
               "nvfp4_quantize: x must be [rows, K] with K a multiple of 16; got [2, 24]");
  args = good;
  args.global_in_value = -1;
  expect_error([&] { nvfp4_quantize(args); }, "nvfp4_quantize: global_in_value must be positive and finite; got -1");
  args = good;
  const float zero = 0;
  const Tensor zero_global(&zero, {});
  args.global_in = zero_global;
  expect_error([&] { nvfp4_quantize(args); }, "nvfp4_quantize: global_in must be positive and finite; got 0");
  args = good;
  args.global_scale = nullptr;
  expect_error([&] { nvfp4_quantize(args); }, "nvfp4_quantize: global_scale must be float32; got nothing");
  EXPECT_EQ(codes, Bytes(24, 9));
  EXPECT_EQ(scales, Bytes(512, 9));
  EXPECT_EQ(global, 5.0F);

  Nvfp4DequantizeArgs back{.codes = tc, .scales = ts, .global_value = INFINITY, .x = tx};
  expect_error([&] { nvfp4_dequantize(back); }, "nvfp4_dequantize: global_value must be finite; got inf");
  back.global_value = 1;
  const Tensor ints(reinterpret_cast<std::int32_t*>(x.data()), {1, 16});
  back.x = ints;
  expect_error([&] { nvfp4_dequantize(back); },
               "nvfp4_dequantize: x must be float32 or float16 or bfloat16 [rows=1, K=16]; got int32 [1, 16]");
  EXPECT_EQ(x, std::vector<float>(48, 1.0F));
}

TEST(Nvfp4, ExplainNamesTheBackend) {
  const Bytes codes(8), scales(1);
  std::vector<float> x(16);
  const Tensor tc(codes.data(), {1, 8}), ts(scales.data(), {1, 1}), tx(x.data(), {1, 16});
  EXPECT_NE(explain(Nvfp4DequantizeArgs{.codes = tc, .scales = ts, .x = tx}).find("cpu: chosen"), std::string::npos);
}

}  // namespace
}  // namespace hopwell
