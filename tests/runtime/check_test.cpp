// The argument checks: what passes, and the exact words of what does not.
#include "runtime/check.hpp"

#include <gtest/gtest.h>
#include <hopwell/tensor.hpp>

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>

namespace hopwell {
namespace {

std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), HOPWELL_INVALID_ARGUMENT);
    return error.what();
  }
  return "no error";
}

std::array<float, 64> memory{};

TEST(Checker, BindsDimensionsAndReportsThem) {
  Checker check("op");
  const Tensor q(memory.data(), {2, 3, 4}), kv(memory.data(), {5, 4}), wrong(memory.data(), {5, 3});
  const View view = check.input("q", q, {DType::kFloat32}, {"s_q", "h_q", "d"});
  EXPECT_EQ(view.stride[0], 12);
  EXPECT_EQ(check["h_q"], 3);
  EXPECT_EQ(check.input("kv", kv, {DType::kFloat32}, {"s_kv", "d"}).shape[0], 5);
  EXPECT_EQ(message([&] { check.input("kv", wrong, {DType::kFloat32}, {"s_kv", "d"}); }),
            "op: kv must be float32 [s_kv=5, d=4]; got float32 [5, 3]");
}

TEST(Checker, AFailedShapeBindsNothing) {
  Checker check("op");
  const Tensor x(memory.data(), {2, 3});
  EXPECT_EQ(message([&] { check.input("x", x, {DType::kInt32}, {"n", "d"}); }),
            "op: x must be int32 [n, d]; got float32 [2, 3]");
  EXPECT_EQ(message([&] { check.input("x", x, {DType::kFloat32}, {"n", 4}); }),
            "op: x must be float32 [n, 4]; got float32 [2, 3]");
  EXPECT_EQ(message([&] { check.input("x", nullptr, {DType::kFloat32, DType::kBFloat16}, {"n"}); }),
            "op: x must be float32 or bfloat16 [n]; got nothing");
}

TEST(Checker, NamesTypesNoOperatorTakes) {
  Checker check("op");
  const std::array<std::int64_t, 4> indices{};
  const Tensor x(indices.data(), {4, 1});
  EXPECT_EQ(message([&] { check.input("indices", x, {DType::kInt32}, {"s_q", "topk"}); }),
            "op: indices must be int32 [s_q, topk]; got int64 [4, 1]");
}

TEST(Checker, Layouts) {
  Checker check("op");
  const Tensor columns(memory.data(), {4, 4}, {.strides = {1, 4}}), gaps(memory.data(), {4, 4}, {.strides = {8, 1}}),
      expanded(memory.data(), {4, 4}, {.strides = {0, 1}});
  EXPECT_EQ(message([&] { check.input("x", columns, {DType::kFloat32}, {4, 4}); }),
            "op: x must be contiguous in its last dimension; got a stride of 4");
  EXPECT_NO_THROW(check.input("x", columns, {DType::kFloat32}, {4, 4}, Layout::kAny));
  EXPECT_NO_THROW(check.input("x", gaps, {DType::kFloat32}, {4, 4}));
  EXPECT_EQ(message([&] { check.input("x", gaps, {DType::kFloat32}, {4, 4}, Layout::kDense); }),
            "op: x must be contiguous; got a stride of 8 in dimension 0");
  EXPECT_NO_THROW(check.input("x", expanded, {DType::kFloat32}, {4, 4}));
  EXPECT_EQ(message([&] { check.output("x", expanded, {DType::kFloat32}, {4, 4}); }),
            "op: x must be an output whose elements do not overlap; got strides that make them share memory");
  EXPECT_NO_THROW(check.output("x", columns, {DType::kFloat32}, {4, 4}, Layout::kAny));
}

TEST(Checker, DevicesAndMemory) {
  Checker check("op");
  const Tensor host(memory.data(), {4}), device(memory.data(), {4}, {.device = {kDLCUDA, 1}}),
      vulkan(memory.data(), {4}, {.device = {kDLVulkan, 0}});
  EXPECT_EQ(message([&] { Checker("op").input("x", vulkan, {DType::kFloat32}, {4}); }),
            "op: x must be on a cpu or cuda device; got device type 7:0");
  check.input("q", host, {DType::kFloat32}, {4});
  EXPECT_EQ(message([&] { check.input("kv", device, {DType::kFloat32}, {4}); }),
            "op: kv must be on cpu as q is; got cuda:1");
  const Tensor none(static_cast<float*>(nullptr), {4}), empty(static_cast<float*>(nullptr), {0});
  EXPECT_EQ(message([&] { check.input("x", none, {DType::kFloat32}, {4}); }),
            "op: x must be given memory; got a null data pointer");
  EXPECT_NO_THROW(check.input("x", empty, {DType::kFloat32}, {0}));
  const Tensor crooked(reinterpret_cast<float*>(reinterpret_cast<char*>(memory.data()) + 2), {4});
  EXPECT_EQ(message([&] { check.input("x", crooked, {DType::kFloat32}, {4}); }),
            "op: x must be aligned to its element size; got an address that is not");
}

TEST(Checker, Scalars) {
  const Checker check("op");
  EXPECT_EQ(message([&] { check.finite("scale", std::nanf("")); }), "op: scale must be finite; got nan");
  EXPECT_EQ(message([&] { check.require(false, "window", "at least 1", std::int64_t{-3}); }),
            "op: window must be at least 1; got -3");
  EXPECT_EQ(message([&] { check.rule(false, "bias and r exclude each other"); }), "op: bias and r exclude each other");
}

TEST(Checker, MissingStridesMeanRowMajor) {
  Checker check("op");
  std::array<std::int64_t, 2> shape{3, 4};
  const DLTensor tensor{memory.data(), {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape.data(), nullptr, 8};
  const View view = check.input("x", &tensor, {DType::kFloat32}, {"n", "d"});
  EXPECT_EQ(view.stride[0], 4);
  EXPECT_EQ(view.as<float>(), memory.data() + 2);  // byte_offset
}

}  // namespace
}  // namespace hopwell
