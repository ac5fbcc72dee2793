// indexer_dense_loss: how its passes are cut, and what it asks of memory.
#include <gtest/gtest.h>

#include "ops/indexer_dense_loss/plan.hpp"

namespace hopwell::ops::indexer_dense_loss {
namespace {

Problem on_gpu(std::int64_t s_q, std::int64_t s_kv) {
  Problem p;
  p.s_q = s_q, p.s_kv = s_kv;
  p.device.location.device_type = kDLCUDA;
  p.device.capability = 90, p.device.sms = 132;
  return p;
}

TEST(IndexerDenseLossPlan, PassesAreWholeRoundsOfQueriesWithinTheMemoryThatWasPromised) {
  for (const std::int64_t s_q : {1, 131, 133, 4096, 8192, 32'768, 131'072}) {
    for (const std::int64_t s_kv : {0, 1, 8192, 32'768, 131'072, 262'144}) {
      const std::int64_t together = queries_at_a_time(on_gpu(s_q, s_kv));
      EXPECT_GE(together, 1);
      EXPECT_LE(together, s_q);
      EXPECT_TRUE(together == s_q || together % 132 == 0) << s_q << " " << s_kv;
      EXPECT_LE(2 * 4 * together * s_kv, std::int64_t{300} << 20) << "of targets and gradients";
    }
  }
  EXPECT_EQ(queries_at_a_time(on_gpu(131'072, 131'072)), 264);
  EXPECT_EQ(queries_at_a_time(on_gpu(8192, 8192)), 2772) << "three passes of about the same length";
  EXPECT_EQ(queries_at_a_time(on_gpu(1 << 20, 1 << 20)), 132) << "at least a round";
}

}  // namespace
}  // namespace hopwell::ops::indexer_dense_loss
