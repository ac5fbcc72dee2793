// hopwell::Tensor: a view that argument structs store by value.
#include <gtest/gtest.h>
#include <hopwell/hopwell.hpp>

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace hopwell {
namespace {

std::array<float, 24> memory{};

std::string refusal(const std::function<void()>& make) {
  try {
    make();
  } catch (const Error& error) {
    return error.status() == HOPWELL_INVALID_ARGUMENT ? error.what() : "wrong status";
  }
  return "no error";
}

std::vector<std::int64_t> strides_of(const Tensor& x) { return {x->strides, x->strides + x->ndim}; }

TEST(Tensor, NoStridesMeanRowMajor) {
  const std::vector<std::int64_t> row_major = {12, 4, 1};
  const std::vector<std::int64_t> shape = {2, 3, 4};
  EXPECT_EQ(strides_of({memory.data(), {2, 3, 4}}), row_major);
  EXPECT_EQ(strides_of(Tensor(memory.data(), {2, 3, 4}, {})), row_major);
  EXPECT_EQ(strides_of(Tensor(memory.data(), {kDLFloat, 32, 1}, shape, {})), row_major);
  EXPECT_EQ(strides_of(Tensor(memory.data(), {kDLFloat, 32, 1}, {}, {})), std::vector<std::int64_t>());
}

TEST(Tensor, OtherNumbersOfStridesAreAnError) {
  const std::vector<std::int64_t> shape = {2, 3}, one = {1}, nine(9, 1);
  const std::string message = "Tensor: strides must be as many as dimensions, or none; got 1";
  EXPECT_EQ(refusal([] { Tensor(memory.data(), {2, 3}, {.strides = {1}}); }), message);
  EXPECT_EQ(refusal([&] { Tensor(memory.data(), {kDLFloat, 32, 1}, shape, one); }), message);
  EXPECT_EQ(refusal([&] { Tensor(memory.data(), {kDLFloat, 32, 1}, nine, {}); }),
            "Tensor: shape must be of at most 8 dimensions; got 9");
}

TEST(Tensor, AbsenceAndCopies) {
  EXPECT_EQ(Tensor(), nullptr);
  Tensor copy = Tensor(static_cast<float*>(nullptr), {0, 4});
  EXPECT_NE(copy, nullptr);  // empty is not absent
  copy = Tensor(memory.data(), {2, 3}, {.strides = {5, 1}});
  const Tensor second = copy;
  copy = nullptr;
  EXPECT_EQ(copy, nullptr);
  EXPECT_EQ(strides_of(second), (std::vector<std::int64_t>{5, 1}));
  EXPECT_EQ(second->shape[1], 3);
}

// A function that makes its views: an argument struct that pointed to them would dangle.
NormalizeL1Args args_of(std::vector<float>& rows, std::vector<float>& out) {
  return {.attn = Tensor(rows.data(), {2, 2}), .out = Tensor(out.data(), {2, 2})};
}

TEST(Tensor, ArgumentStructsOwnTheirViews) {
  std::vector<float> rows = {1, 3, 0, 0}, out(4, -1);
  const NormalizeL1Args args = args_of(rows, out);
  normalize_l1(args);
  EXPECT_EQ(out, (std::vector<float>{0.25, 0.75, 0, 0}));
}

}  // namespace
}  // namespace hopwell
