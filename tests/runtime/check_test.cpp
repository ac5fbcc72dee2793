// The argument checks: valid arguments, and the exact error messages for invalid ones.
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
  EXPECT_NO_THROW(Checker("op").output("x", columns, {DType::kFloat32}, {4, 4}, Layout::kAny));
}

TEST(Checker, OutputsLieInMemoryOfTheirOwn) {
  const Tensor rows(memory.data(), {4, 3}, {.strides = {8, 1}}), beside(memory.data() + 3, {4, 3}, {.strides = {8, 1}}),
      across(memory.data() + 2, {4, 3}, {.strides = {8, 1}});
  Checker check("op");
  check.input("x", rows, {DType::kFloat32}, {4, 3});
  check.input("y", across, {DType::kFloat32}, {4, 3});  // inputs may overlap
  EXPECT_EQ(message([&] { check.output("out", rows, {DType::kFloat32}, {4, 3}); }),
            "op: out must be an output in memory of its own; got memory that x lies in too");
  EXPECT_EQ(message([&] { check.any_shape("loss", across, {DType::kFloat32}, Layout::kAny, Access::kWritten); }),
            "op: loss must be an output in memory of its own; got memory that x lies in too");
  Checker later("op");
  later.output("out", rows, {DType::kFloat32}, {4, 3});
  EXPECT_NO_THROW(later.input("x", beside, {DType::kFloat32}, {4, 3}));
  EXPECT_EQ(message([&] { later.input("y", across, {DType::kFloat32}, {4, 3}); }),
            "op: out must be an output in memory of its own; got memory that y lies in too");
}

TEST(Checker, AWorkspaceLiesInMemoryOfItsOwn) {
  struct Place {
    struct {
      DLDevice location;
    } device;
    void* workspace;
    std::size_t workspace_bytes;
  } place{};
  Checker check("op");
  const Tensor x(memory.data() + 4, {4, 2}, {.strides = {8, 1}}), out(memory.data() + 32, {4});
  check.input("x", x, {DType::kFloat32}, {4, 2});
  check.output("out", out, {DType::kFloat32}, {4});
  const auto refusal = [&](float* workspace, std::size_t bytes) {
    place.workspace = workspace, place.workspace_bytes = bytes;
    return message([&] { check.take_workspace(place, Place(place)); });
  };
  EXPECT_EQ(refusal(memory.data() + 36, 28 * sizeof(float)), "no error");
  EXPECT_EQ(refusal(memory.data(), 4 * sizeof(float)), "no error");
  EXPECT_EQ(refusal(memory.data(), 4 * sizeof(float) + 1),
            "op: workspace must be in memory of its own; got memory that x lies in too");
  EXPECT_EQ(refusal(memory.data() + 35, 16),
            "op: workspace must be in memory of its own; got memory that out lies in too");
  EXPECT_EQ(refusal(memory.data(), SIZE_MAX),
            "op: workspace must be in memory of its own; got memory that x lies in too");
  EXPECT_EQ(refusal(nullptr, SIZE_MAX), "no error");
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
  const Tensor other_id(memory.data(), {4}, {.device = {kDLCPU, 3}});
  EXPECT_NO_THROW(check.input("x", other_id, {DType::kFloat32}, {4}));
  const Tensor pinned(memory.data(), {4}, {.device = {kDLCUDAHost, 1}}),
      managed(memory.data(), {4}, {.device = {kDLCUDAManaged, 1}});
  EXPECT_NO_THROW(check.input("x", pinned, {DType::kFloat32}, {4}));
  EXPECT_EQ(message([&] { check.input("kv", managed, {DType::kFloat32}, {4}); }),
            "op: kv must be on cpu as q is; got cuda:1");
  Checker of_managed("op");
  of_managed.input("q", managed, {DType::kFloat32}, {4});
  EXPECT_NO_THROW(of_managed.input("kv", device, {DType::kFloat32}, {4}));
  EXPECT_EQ(of_managed.device().device_type, kDLCUDA);
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

// ---- a C caller's description of a tensor ---------------------------------------------------------------------------

// The error for the shape [2, 3] given with `ndim` dimensions.
std::string refusal(std::int32_t ndim, std::int64_t* shape, std::int64_t* strides = nullptr) {
  const DLTensor tensor{memory.data(), {kDLCPU, 0}, ndim, {kDLFloat, 32, 1}, shape, strides, 0};
  return message([&] { Checker("op").input("x", &tensor, {DType::kFloat32}, {"n", "d"}, Layout::kAny); });
}

TEST(Checker, ADimensionOfOneElementHasStrideZero) {
  Checker check("op");
  const Tensor x(memory.data(), {2, 1, 4}, {.strides = {4, 7, 1}}), row(memory.data(), {1, 1}, {.strides = {-3, 5}});
  const View view = check.input("x", x, {DType::kFloat32}, {"s", "h", "d"});
  EXPECT_EQ(view.stride[0], 4);
  EXPECT_EQ(view.stride[1], 0);
  EXPECT_EQ(view.stride[2], 1);
  EXPECT_EQ(check.input("row", row, {DType::kFloat32}, {"n", "m"}).stride[1], 0);
}

TEST(Checker, DescriptionsWithoutSizes) {
  std::array<std::int64_t, 2> shape{2, 3};
  EXPECT_EQ(refusal(2, nullptr), "op: x must be float32 [n, d]; got float32 of 2 dimensions and no shape");
  EXPECT_EQ(refusal(-1, shape.data()), "op: x must be float32 [n, d]; got float32 of -1 dimensions");
  EXPECT_EQ(refusal(INT32_MAX, shape.data()), "op: x must be float32 [n, d]; got float32 of 2147483647 dimensions");
  const DLTensor scalar{memory.data(), {kDLCPU, 0}, 0, {kDLFloat, 32, 1}, nullptr, nullptr, 0};
  EXPECT_NO_THROW(Checker("op").input("x", &scalar, {DType::kFloat32}, {}));
}

TEST(Checker, SizesWhoseProductsWouldWrap) {
  const std::string expected =
      "op: x must be of less than 2^56 bytes, from its first element to its last; got float32 ";
  std::array<std::int64_t, 2> shape{std::int64_t{1} << 32, std::int64_t{1} << 32};
  EXPECT_EQ(refusal(2, shape.data()), expected + "[4294967296, 4294967296]");
  shape = {std::int64_t{1} << 54, 1};
  EXPECT_EQ(refusal(2, shape.data()), expected + "[18014398509481984, 1]");
  shape = {2, INT64_MAX};
  EXPECT_EQ(refusal(2, shape.data()), expected + "[2, 9223372036854775807]");
  shape = {0, INT64_MAX};  // an empty tensor too, because its other sizes are also multiplied
  EXPECT_EQ(refusal(2, shape.data()), expected + "[0, 9223372036854775807]");
  shape = {0, std::int64_t{1} << 53};
  EXPECT_EQ(refusal(2, shape.data()), "no error");
}

TEST(Checker, StridesThatReachTooFar) {
  const std::string expected =
      "op: x must be of less than 2^56 bytes, from its first element to its last; got float32 ";
  std::array<std::int64_t, 2> shape{2, 3}, strides{std::int64_t{1} << 62, 1};
  EXPECT_EQ(refusal(2, shape.data(), strides.data()), expected + "[2, 3] with strides [4611686018427387904, 1]");
  strides = {3, INT64_MIN};
  EXPECT_EQ(refusal(2, shape.data(), strides.data()), expected + "[2, 3] with strides [3, -9223372036854775808]");
  shape = {1, 3}, strides = {INT64_MIN, 1};  // the stride of a dimension of 1 is not used
  EXPECT_EQ(refusal(2, shape.data(), strides.data()), "no error");
}

}  // namespace
}  // namespace hopwell
