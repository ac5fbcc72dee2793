// Products with a defined order of summation: every bit of every element, on every instruction set of this machine.
#include "tile/cpu/product.hpp"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

namespace hopwell::cpu {
namespace {

// The sum that product.cpp guarantees.
template <class At>
float sum(std::int64_t k, bool fused, bool add, float c, const At& factors) {
  constexpr std::int64_t kDepth = 640;
  for (std::int64_t first = 0; first == 0 || first < k; first += kDepth) {
    float partial = 0;
    for (std::int64_t i = first; i < std::min(k, first + kDepth); ++i) {
      const auto [x, y] = factors(i);
      partial = fused ? std::fma(x, y, partial) : partial + x * y;
    }
    c = add || first > 0 ? c + partial : partial;
  }
  return c;
}

// A matrix in its own memory, with a few unrelated columns between its rows.
struct Matrix {
  Matrix(std::int64_t rows, std::int64_t columns, std::mt19937& random)
      : stride(columns + static_cast<std::int64_t>(random() % 3)),
        offset(static_cast<std::int64_t>(random() % 16)),
        data(static_cast<std::size_t>(offset + rows * stride + 1)) {
    std::normal_distribution<float> normal;
    for (float& x : data) x = normal(random);
  }
  [[nodiscard]] float at(std::int64_t row, std::int64_t column) const {
    return data[static_cast<std::size_t>(offset + row * stride + column)];
  }
  float* get() { return data.data() + offset; }
  std::int64_t stride, offset;
  std::vector<float> data;
};

class Product : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    if (GetParam() != HWY_STATIC_TARGET && (hwy::SupportedTargets() & GetParam()) == 0)
      GTEST_SKIP() << "this processor has no such instructions";
    hwy::GetChosenTarget().Update(GetParam());
  }
  void TearDown() override { hwy::GetChosenTarget().Update(hwy::SupportedTargets()); }
};

TEST_P(Product, HasTheSameSumsInEveryShape) {
  const bool fused = GetParam() == HWY_AVX2 || GetParam() == HWY_AVX3;
  const Products products;
  std::mt19937 random(1);
  for (int round = 0; round < 150; ++round) {
    const auto up_to = [&](std::uint32_t most) { return static_cast<std::int64_t>(random() % (most + 1)); };
    const std::int64_t m = up_to(round % 3 == 0 ? 4 : 70), n = up_to(round % 3 == 1 ? 9 : 120);
    const std::int64_t k = up_to(round % 10 == 0 ? 350 : 17) * (round % 2 == 0 ? 4 : 1);
    const bool add = random() % 2 != 0;
    Matrix a(m, k, random), b(k, n, random), at(k, m, random), bt(n, k, random), before(m, n, random);
    const auto check = [&](const char* name, auto product, auto factors) {
      Matrix c = before;
      product(c);
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < n; ++j) {
          const float expected = sum(k, fused, add, before.at(i, j), [&](std::int64_t l) { return factors(i, j, l); });
          ASSERT_EQ(std::bit_cast<std::uint32_t>(expected), std::bit_cast<std::uint32_t>(c.at(i, j)))
              << name << " of " << m << " x " << n << " x " << k << " at " << i << ", " << j;
          c.get()[i * c.stride + j] = before.at(i, j);
        }
      }
      ASSERT_EQ(c.data, before.data) << name << " wrote beside its result";
    };
    check(
        "nn", [&](Matrix& c) { products.nn(m, n, k, a.get(), a.stride, b.get(), b.stride, add, c.get(), c.stride); },
        [&](std::int64_t i, std::int64_t j, std::int64_t l) { return std::pair(a.at(i, l), b.at(l, j)); });
    check(
        "nt", [&](Matrix& c) { products.nt(m, n, k, a.get(), a.stride, bt.get(), bt.stride, add, c.get(), c.stride); },
        [&](std::int64_t i, std::int64_t j, std::int64_t l) { return std::pair(a.at(i, l), bt.at(j, l)); });
    check(
        "tn", [&](Matrix& c) { products.tn(m, n, k, at.get(), at.stride, b.get(), b.stride, add, c.get(), c.stride); },
        [&](std::int64_t i, std::int64_t j, std::int64_t l) { return std::pair(at.at(l, i), b.at(l, j)); });
  }
}

// The targets in this build: the sanitizers' build omits some.
std::vector<std::int64_t> built_targets() {
  std::vector<std::int64_t> targets = {HWY_SCALAR, HWY_SSSE3, HWY_SSE4, HWY_AVX2, HWY_AVX3};
  std::erase_if(targets, [](std::int64_t target) { return (HWY_TARGETS & target) == 0; });
  return targets;
}
INSTANTIATE_TEST_SUITE_P(Targets, Product, testing::ValuesIn(built_targets()),
                         [](const auto& target) { return hwy::TargetName(target.param); });

}  // namespace
}  // namespace hopwell::cpu
