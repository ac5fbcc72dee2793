// Whether tensors share memory, compared with a test of all of their bytes.
#include "runtime/overlap.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace hopwell {
namespace {

std::array<std::byte, 4096> memory{};

View view_of(std::int64_t offset, const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides,
             DType dtype) {
  View view;
  view.data = memory.data() + memory.size() / 2 + offset * static_cast<std::int64_t>(size_of(dtype));
  view.dtype = dtype;
  view.ndim = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::copy(strides.begin(), strides.end(), view.stride.begin());
  return view;
}

std::set<const std::byte*> bytes_of(const View& view) {
  std::set<const std::byte*> bytes;
  const auto width = static_cast<std::int64_t>(size_of(view.dtype));
  for (std::int64_t element = 0; element < view.size(); ++element) {
    std::int64_t offset = 0, rest = element;
    for (auto i = static_cast<std::size_t>(view.ndim); i-- > 0; rest /= view.shape[i])
      offset += rest % view.shape[i] * view.stride[i];
    for (std::int64_t byte = 0; byte < width; ++byte) bytes.insert(view.as<std::byte>() + offset * width + byte);
  }
  return bytes;
}

TEST(Overlap, IsThatOfTheBytes) {
  std::mt19937 random(1);
  const auto number = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  const auto any_view = [&] {
    const DType dtypes[] = {DType::kUInt8, DType::kBFloat16, DType::kFloat32};
    std::vector<std::int64_t> shape, strides;
    for (std::int64_t dims = number(0, 3); dims > 0; --dims) {
      shape.push_back(number(0, 19) == 0 ? 0 : number(1, 5));
      strides.push_back(number(-30, 30));
    }
    return view_of(number(-60, 60), shape, strides, dtypes[number(0, 2)]);
  };
  int found = 0;
  for (int i = 0; i < 20'000; ++i) {
    const View a = any_view(), b = any_view();
    const auto in_a = bytes_of(a), in_b = bytes_of(b);
    const bool expected = std::any_of(in_a.begin(), in_a.end(), [&](const auto* byte) { return in_b.contains(byte); });
    ASSERT_EQ(overlap(a, b), expected) << i;
    ASSERT_EQ(overlap(b, a), expected) << i;
    found += expected;
  }
  EXPECT_GT(found, 2'000);
  EXPECT_LT(found, 18'000);
}

TEST(Overlap, NotInOneAnothersGaps) {
  const View q = view_of(0, {5, 3, 8}, {3 * 12, 12, 1}, DType::kFloat32);
  EXPECT_FALSE(overlap(q, view_of(8, {5, 3, 4}, {3 * 12, 12, 1}, DType::kFloat32)));
  EXPECT_TRUE(overlap(q, view_of(7, {5, 3, 4}, {3 * 12, 12, 1}, DType::kFloat32)));
  EXPECT_TRUE(overlap(q, view_of(9, {5, 3, 4}, {3 * 12, 12, 1}, DType::kFloat32)));
  EXPECT_FALSE(overlap(view_of(0, {6}, {0}, DType::kFloat32), view_of(1, {3}, {1}, DType::kFloat32)));
}

// For the sanitizer of make test-asan: products with such a stride overflow.
TEST(Overlap, NobodyStepsAlongADimensionOfOne) {
  const View row = view_of(0, {1, 4}, {INT64_MIN, 1}, DType::kFloat32);
  EXPECT_TRUE(overlap(row, view_of(3, {4, 1}, {1, INT64_MAX}, DType::kFloat32)));
  EXPECT_FALSE(overlap(row, view_of(4, {4, 1}, {1, INT64_MAX}, DType::kFloat32)));
}

}  // namespace
}  // namespace hopwell
