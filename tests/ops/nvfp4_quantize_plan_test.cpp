// Which kernel nvfp4_quantize takes on a GPU. None of these GPUs is needed.
#include "ops/nvfp4_quantize/plan.hpp"

#include <gtest/gtest.h>

namespace hopwell::ops::nvfp4_quantize {
namespace {

constexpr int kH100 = 132;

View matrix(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  View view;
  view.data = reinterpret_cast<void*>(std::uintptr_t{1} << 20);
  view.dtype = dtype;
  view.shape = {rows, columns}, view.stride = {stride, 1};
  return view;
}

QuantizeProblem problem(std::int64_t rows, std::int64_t k, DType dtype = DType::kBFloat16) {
  QuantizeProblem p;
  p.rows = rows, p.k = k;
  p.x = matrix(dtype, rows, k, k);
  p.codes = matrix(DType::kUInt8, rows, k / 2, k / 2);
  p.scales.data = reinterpret_cast<std::uint8_t*>(std::uintptr_t{1} << 21);
  p.scales.row_stride = k / 16;
  p.device.location = {kDLCUDA, 0};
  p.device.capability = 90, p.device.sms = kH100, p.device.shared_bytes = std::size_t{227} * 1024;
  return p;
}

TEST(Nvfp4QuantizePlan, OnePassKeepsAllOfX) {
  EXPECT_TRUE(takes_one_pass(problem(4096, 4096)));
  EXPECT_TRUE(takes_one_pass(problem(4096, 4096, DType::kFloat16)));
  EXPECT_TRUE(takes_one_pass(problem(1, 4096 * 4096)));
  // 5 items of 1,024 numbers a warp, 28 warps a multiprocessor.
  EXPECT_TRUE(takes_one_pass(problem(5 * 28 * kH100, 1024)));
  EXPECT_FALSE(takes_one_pass(problem(5 * 28 * kH100 + 1, 1024)));
  EXPECT_TRUE(takes_pairs(problem(5 * 28 * kH100 + 1, 1024)));
  // 40 a multiprocessor are enough, so that none of its warps has nothing to do.
  EXPECT_TRUE(takes_one_pass(problem(40 * kH100, 1024)));
  EXPECT_FALSE(takes_one_pass(problem(40 * kH100 - 1, 1024)));
  // Half an item would be left.
  EXPECT_FALSE(takes_one_pass(problem(8191, 1536)));
  EXPECT_TRUE(takes_pairs(problem(8191, 1536)));
}

TEST(Nvfp4QuantizePlan, OnePassNeedsRowsWithoutGaps) {
  const auto change = [](auto set) {
    QuantizeProblem p = problem(4096, 4096);
    set(p);
    return p;
  };
  const QuantizeProblem gaps[] = {
      change([](auto& p) { p.x.stride[0] += 16; }), change([](auto& p) { p.codes.stride[0] += 16; }),
      change([](auto& p) { p.scales.row_stride += 2; }), change([](auto& p) { p.scales.blocked = true; })};
  for (const QuantizeProblem& p : gaps) {
    EXPECT_FALSE(takes_one_pass(p));
    EXPECT_TRUE(takes_pairs(p));
  }
  // Rows that are one may have any stride.
  QuantizeProblem row = problem(1, 4096 * 4096);
  row.x.stride[0] = 5;
  EXPECT_TRUE(takes_one_pass(row));
}

TEST(Nvfp4QuantizePlan, OnePassNeedsSharedMemoryAndX) {
  QuantizeProblem p = problem(4096, 4096);
  p.device.shared_bytes = std::size_t{163} * 1024;
  EXPECT_FALSE(takes_one_pass(p));
  EXPECT_TRUE(takes_pairs(p));
  p = problem(4096, 4096);
  p.has_global = true;
  EXPECT_FALSE(takes_one_pass(p));
  EXPECT_FALSE(takes_one_pass(problem(4096, 4096, DType::kFloat32)));
  p = problem(4096, 4096);
  p.x.data = reinterpret_cast<void*>((std::uintptr_t{1} << 20) + 2);
  EXPECT_FALSE(takes_one_pass(p));
}

TEST(Nvfp4QuantizePlan, OnePassWhereTheEmulatorRunsAllCtasTogether) {
  QuantizeProblem p = problem(270, 1024);
  p.device.concurrent_ctas = false;
  p.device.sms = 4;
  EXPECT_TRUE(takes_one_pass(p));
  p = problem(4096, 4096);
  p.device.concurrent_ctas = false;
  EXPECT_FALSE(takes_one_pass(p));
}

}  // namespace
}  // namespace hopwell::ops::nvfp4_quantize
