// Splits of a CTA in sparse_mla_decode.
#include <gtest/gtest.h>

#include "ops/sparse_mla_decode/splits.hpp"

namespace hopwell::ops::sparse_mla_decode {
namespace {

constexpr Clocks kClocks{.of_cta = 12'000, .of_tile = 4'000};

std::int64_t of_cta(std::int64_t queries, std::int64_t splits, std::int64_t keys_of_split = 256, int sms = 132) {
  return distribute_splits({queries, 8, 1, splits, keys_of_split, sms}, kClocks).splits_of_cta;
}

// 8 splits; 15 clusters of 8 CTAs run at the same time, as on an H200.
bool in_cluster(std::int64_t queries) {
  return distribute_splits({queries, 8, 1, 8, 256, 132, 15}, kClocks).in_cluster;
}

TEST(SparseMlaDecodePlan, FewQueriesMergeInClusters) {
  EXPECT_TRUE(in_cluster(1));
  EXPECT_TRUE(in_cluster(15));
  EXPECT_FALSE(in_cluster(16));
  EXPECT_FALSE(in_cluster(128));
}

TEST(SparseMlaDecodePlan, FewQueriesHaveACtaForEachSplit) {
  EXPECT_EQ(of_cta(1, 8), 1);
  EXPECT_EQ(of_cta(8, 8), 1);
  EXPECT_EQ(of_cta(1, 8, 256, 8), 1);
}

TEST(SparseMlaDecodePlan, ManyQueriesHaveOneCtaEach) {
  EXPECT_EQ(of_cta(128, 8), 8);
  EXPECT_EQ(of_cta(1000, 8), 8);
  EXPECT_EQ(of_cta(8, 8, 256, 8), 8);
}

TEST(SparseMlaDecodePlan, ALongRowIsSpread) { EXPECT_LE(of_cta(1, 256), 2); }

// 128 CTAs for 132 SMs, in one wave.
TEST(SparseMlaDecodePlan, QueriesForHalfOfTheSmsHaveTwoCtasEach) { EXPECT_EQ(of_cta(64, 8), 4); }

TEST(SparseMlaDecodePlan, ShortSplitsNeedNoMergeKernel) { EXPECT_EQ(of_cta(1, 2, 64), 2); }

// The kernel for 64 heads stores a partial result of each split. With many queries a CTA has all splits of one, because
// it loads Q once.
TEST(SparseMlaDecodePlan, SplitsThatACtaDoesNotMerge) {
  const auto stored = [](std::int64_t queries, std::int64_t splits) {
    return distribute_splits({queries, 64, 1, splits, 256, 132, 0, false}, {.of_cta = 8'000, .of_tile = 4'500})
        .splits_of_cta;
  };
  EXPECT_EQ(stored(8, 8), 1);
  EXPECT_EQ(stored(64, 8), 4);
  EXPECT_EQ(stored(128, 8), 8);
}

TEST(SparseMlaDecodePlan, IsANumberOfSplits) {
  for (const std::int64_t queries : {0, 1, 7, 64, 5000}) {
    for (const std::int64_t splits : {1, 2, 3, 17, 63, 65, 1000, 33'554'432}) {
      for (const int sms : {1, 8, 132}) {
        const std::int64_t found = of_cta(queries, splits, 64, sms);
        EXPECT_GE(found, 1);
        EXPECT_LE(found, splits);
      }
    }
  }
}

}  // namespace
}  // namespace hopwell::ops::sparse_mla_decode
