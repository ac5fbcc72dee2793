// Plans of nvfp4_linear_backward: every row of weights is in one chunk, chunks depend on N alone, workspaces stay
// small.
#include <gtest/gtest.h>

#include "ops/nvfp4_linear_backward/plan.hpp"

namespace hopwell::ops::nvfp4_linear_backward {
namespace {

Plan plan_of(std::int64_t n, std::int64_t rows, std::int64_t k, int sms) {
  Problem p;
  p.n = n, p.rows = rows, p.k = k;
  p.device.sms = sms;
  return make_plan(p);
}

TEST(Nvfp4LinearBackwardPlan, ChunksAreAllRowsAndDependOnThemAlone) {
  for (const std::int64_t rows : {0, 1, 16, 256, 257, 300, 1000, 4096, 4097, 7168, 28672, 151936}) {
    const Plan one = plan_of(1, rows, 16, 132);
    EXPECT_EQ(one.chunk % Config::kStageRows, 0) << rows;
    EXPECT_GE(std::int64_t{one.chunk} * one.chunks, rows);
    EXPECT_TRUE(one.chunks == 1 || std::int64_t{one.chunk} * (one.chunks - 1) < rows) << rows;
    EXPECT_LE(one.chunks, Config::kMaxChunks);
    for (const std::int64_t n : {2, 17, 40, 5000}) {
      for (const std::int64_t k : {48, 4096, 7168}) {
        for (const int sms : {1, 4, 108, 148}) {
          const Plan plan = plan_of(n, rows, k, sms);
          EXPECT_EQ(plan.chunk, one.chunk);
          EXPECT_EQ(plan.chunks, one.chunks);
          EXPECT_GE(std::int64_t{plan.row_tiles} * 16 * plan.blocks, n);
          EXPECT_GE(std::int64_t{plan.column_tiles} * Config::kColumns, k);
          EXPECT_EQ(plan.ctas, std::int64_t{plan.row_tiles} * plan.column_tiles * (plan.splits ? plan.chunks : 1));
          EXPECT_EQ(plan.workspace_bytes > 0, plan.splits);
          // Half of the multiprocessors, a tile of 64 × 256 sums each, for all chunks.
          EXPECT_LE(plan.workspace_bytes, static_cast<std::size_t>(sms) / 2 * 64 * 256 * 4 * Config::kMaxChunks);
        }
      }
    }
  }
}

TEST(Nvfp4LinearBackwardPlan, ChunksHaveCtasWhereTilesAreFew) {
  EXPECT_TRUE(plan_of(1, 28672, 4096, 132).splits);   // 16 tiles
  EXPECT_TRUE(plan_of(16, 7168, 16384, 132).splits);  // 64
  EXPECT_FALSE(plan_of(4096, 7168, 2048, 132).splits);
  EXPECT_FALSE(plan_of(1, 256, 4096, 132).splits);  // a chunk
}

}  // namespace
}  // namespace hopwell::ops::nvfp4_linear_backward
