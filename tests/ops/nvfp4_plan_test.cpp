// Plans of nvfp4_gemv and nvfp4_linear on GPUs of many sizes: every tile once, no cluster without one, all of K, shared
// memory that there is. None of these GPUs is needed.
#include "ops/nvfp4/plan.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace hopwell::ops::nvfp4 {
namespace {

runtime::Device device_with(int sms, int capability = 90, std::size_t shared_bytes = std::size_t{227} * 1024) {
  runtime::Device device;
  device.location = {kDLCUDA, 0};
  device.capability = capability, device.sms = device.cluster_sms = sms, device.shared_bytes = shared_bytes;
  return device;
}

// As on a chip whose multiprocessors come in groups of 16 and fewer: clusters leave some of them idle.
int clusters_in_groups(int sms, int cluster) { return sms / 16 * (16 / cluster) + sms % 16 / cluster; }

Plan plan_for(const ProblemShape& shape, bool has_wgmma, const runtime::Device& device) {
  return make_plan(shape, has_wgmma, device, [&](int cluster) { return clusters_in_groups(device.sms, cluster); });
}

std::string text(const ProblemShape& shape, int sms) {
  return std::to_string(shape.rows) + " x " + std::to_string(shape.k) + ", " + std::to_string(shape.columns) +
         " columns, " + std::to_string(shape.batches) + " batches, " + std::to_string(sms) + " multiprocessors";
}

// Neighbouring tiles for each cluster.
void expect_every_tile_once(const Plan& plan) {
  int next = 0;
  for (int cluster = 0; cluster < plan.clusters; ++cluster) {
    const int tiles = plan.tiles_per_cluster() + (cluster < plan.larger_clusters() ? 1 : 0);
    EXPECT_GT(tiles, 0);
    EXPECT_LE(tiles, plan.most_tiles());
    next += tiles;
  }
  EXPECT_EQ(next, plan.row_tiles);
}

void expect_one_column(const Plan& plan, const ProblemShape& shape, const runtime::Device& device) {
  expect_every_tile_once(plan);
  EXPECT_GE(std::int64_t{plan.row_tiles} * StageConfig::kRows, shape.rows);
  EXPECT_LE(plan.clusters * shape.batches, std::max<std::int64_t>(device.sms, shape.batches));
  // Slices that differ by a stage at most are all of K.
  EXPECT_GT(plan.larger_warps, 0);
  EXPECT_LE(plan.larger_warps, plan.warps);
  const std::int64_t smaller = plan.warps - plan.larger_warps,
                     all = std::int64_t{plan.slice} * plan.warps - smaller * StageConfig::kStageK;
  EXPECT_GE(all, shape.k);
  EXPECT_LT(all - shape.k, StageConfig::kStageK);
  EXPECT_LE(plan.round_tiles, plan.most_tiles());
}

void expect_few_columns(const Plan& plan, const ProblemShape& shape, const runtime::Device& device) {
  expect_every_tile_once(plan);
  EXPECT_GE(std::int64_t{plan.row_tiles} * StageConfig::kRows, shape.rows);
  EXPECT_GE(std::int64_t{plan.column_tiles} * plan.columns, shape.columns);
  EXPECT_LT(std::int64_t{plan.column_tiles - 1} * plan.columns, shape.columns);
  EXPECT_GE(std::int64_t{plan.slice} * plan.cluster * plan.phases, shape.k);
  EXPECT_LE(plan.round_tiles, plan.most_tiles());
  EXPECT_EQ(plan.exchange_offset % 16, 0U);
  EXPECT_TRUE(plan.cluster == 1 || device.has_clusters());
  // Each CTA adds up its steps of the vectors of four sums, as many at a time as it has threads.
  const int threads = 32 * plan.warps, vectors = plan.round_tiles * StageConfig::kRows * plan.columns / 4;
  const int steps = (vectors + threads - 1) / threads,
            steps_of_rank = (steps + plan.cluster - 1) / plan.cluster * plan.cluster;
  if (plan.cluster > 1) {
    EXPECT_LE(plan.exchange_offset + static_cast<std::size_t>(16 * threads * steps_of_rank), plan.shared_bytes);
  }
}

void expect_few_columns_wgmma(const Plan& plan, const ProblemShape& shape) {
  expect_every_tile_once(plan);
  EXPECT_GE(std::int64_t{plan.row_tiles} * StageConfig::kRows, shape.rows);
  EXPECT_GE(plan.columns, shape.columns);
  EXPECT_GE(std::int64_t{plan.slice} * plan.cluster, shape.k);
  EXPECT_EQ(plan.round_tiles, plan.most_tiles());
  EXPECT_LE(plan.round_tiles, 4 * plan.row_groups);
  EXPECT_LE(4 * plan.row_groups * plan.splits, plan.warps);
}

void expect_many_columns(const Plan& plan, const ProblemShape& shape, const runtime::Device& device) {
  EXPECT_GE(std::int64_t{plan.row_tiles} * plan.row_groups * ManyColumnsConfig::kRows, shape.rows);
  EXPECT_GE(std::int64_t{plan.column_tiles} * plan.columns, shape.columns);
  EXPECT_LT(std::int64_t{plan.column_tiles - 1} * plan.columns, shape.columns);
  EXPECT_GE(std::int64_t{plan.slice} * plan.cluster, shape.k);
  EXPECT_EQ(plan.row_groups * plan.splits, ManyColumnsConfig::kGroups);
  EXPECT_EQ(plan.columns % (8 * plan.cluster * plan.splits), 0);  // shares of columns, eight at a time
  // CTAs go from tile to tile by the number of clusters; those that share a tile have only one.
  const int tiles = plan.row_tiles * plan.column_tiles;
  EXPECT_LE(plan.clusters, tiles);
  EXPECT_TRUE(plan.splits_k() ? plan.clusters == tiles : plan.clusters <= device.sms);
  const std::size_t stages =
      static_cast<std::size_t>(shape.k + ManyColumnsConfig::kStageK - 1) / ManyColumnsConfig::kStageK;
  EXPECT_EQ(plan.workspace_bytes,
            static_cast<std::size_t>(plan.column_tiles * plan.columns) * stages * 2 * ManyColumnsConfig::kStageK);
}

void expect_sound(const Plan& plan, const ProblemShape& shape, const runtime::Device& device) {
  SCOPED_TRACE(text(shape, device.sms));
  EXPECT_LE(plan.shared_bytes, device.shared_bytes);
  EXPECT_EQ(plan.slice % (plan.kernel == Kernel::kManyColumns ? ManyColumnsConfig::kStageK : StageConfig::kStageK), 0);
  switch (plan.kernel) {
    case Kernel::kOneColumn:
      return expect_one_column(plan, shape, device);
    case Kernel::kFewColumns:
      return expect_few_columns(plan, shape, device);
    case Kernel::kFewColumnsWgmma:
      return expect_few_columns_wgmma(plan, shape);
    case Kernel::kManyColumns:
      return expect_many_columns(plan, shape, device);
    case Kernel::kGeneral:
      // Only where x of one column does not fit beside the rings of four warps.
      EXPECT_EQ(shape.columns, 1);
      EXPECT_GT(static_cast<std::size_t>(2 * shape.k + 4 * (OneColumnConfig::kRingBytes + 64)), device.shared_bytes);
  }
}

constexpr int kSizes[] = {8, 66, 114, 132, 148};

TEST(Nvfp4Plan, EveryTileOnceAndAllOfK) {
  std::vector<ProblemShape> shapes;
  for (const std::int64_t rows : {1, 16, 17, 1000, 1536, 4096, 4097, 7168, 16385, 28672, 100000})
    for (const std::int64_t k : {16, 256, 272, 2048, 4096, 7168, 16384, 65536})
      for (const std::int64_t columns : {1, 2, 8, 9, 16, 17, 32, 33, 70, 128, 1200, 4096})
        shapes.push_back({.rows = rows, .k = k, .columns = columns});
  for (const std::int64_t batches : {2, 8, 131, 1000}) shapes.push_back({.rows = 4096, .k = 7168, .batches = batches});
  for (const int sms : kSizes) {
    for (const ProblemShape& shape : shapes) {
      const runtime::Device device = device_with(sms), ampere = device_with(sms, 80, std::size_t{163} * 1024);
      expect_sound(plan_for(shape, true, device), shape, device);
      expect_sound(plan_for(shape, false, device), shape, device);
      expect_sound(plan_for(shape, false, ampere), shape, ampere);
    }
  }
}

TEST(Nvfp4Plan, ChoosesTheKernelByShape) {
  const auto with = [](std::int64_t rows, std::int64_t k, std::int64_t columns) {
    return choose_kernel({.rows = rows, .k = k, .columns = columns}, true);
  };
  EXPECT_EQ(with(4096, 4096, 1), Kernel::kOneColumn);
  EXPECT_EQ(with(4096, 4096, 2), Kernel::kFewColumnsWgmma);
  EXPECT_EQ(with(4097, 4096, 8), Kernel::kFewColumns);
  EXPECT_EQ(with(16384, 4096, 9), Kernel::kFewColumnsWgmma);
  EXPECT_EQ(with(16385, 4096, 16), Kernel::kFewColumns);
  EXPECT_EQ(with(16385, 4112, 16), Kernel::kFewColumnsWgmma);
  EXPECT_EQ(with(2048, 4096, 17), Kernel::kFewColumns);
  EXPECT_EQ(with(2049, 4096, 17), Kernel::kManyColumns);
  EXPECT_EQ(with(2048, 4096, 33), Kernel::kManyColumns);
  for (const std::int64_t columns : {2, 16, 17, 1000})
    EXPECT_EQ(choose_kernel({.rows = 4096, .k = 4096, .columns = columns}, false), Kernel::kFewColumns);
  EXPECT_EQ(choose_kernel({.rows = 4096, .k = 4096, .columns = 8, .x_is_16_bit = false}, true), Kernel::kGeneral);
  EXPECT_EQ(choose_kernel({.rows = 4096, .k = 4096, .columns = 8, .can_copy = false}, true), Kernel::kGeneral);
}

TEST(Nvfp4Plan, CopiesOnlyRowsThatAscend) {
  alignas(16) static std::uint8_t somewhere[16];
  const auto can_copy = [](std::int64_t row_stride) {
    LinearProblem p;
    p.n = 1, p.rows = 40, p.k = 128;
    p.x = {.data = somewhere, .dtype = DType::kBFloat16, .ndim = 2, .shape = {1, 128}, .stride = {128, 1}};
    p.weight = {.data = somewhere, .dtype = DType::kUInt8, .ndim = 2, .shape = {40, 64}, .stride = {row_stride, 1}};
    p.weight_scale = {.data = somewhere, .row_stride = 8, .columns = 8};
    return shape_of(p).can_copy;
  };
  EXPECT_TRUE(can_copy(64));
  EXPECT_TRUE(can_copy(0));
  EXPECT_FALSE(can_copy(72));
  EXPECT_FALSE(can_copy(-64));
}

TEST(Nvfp4Plan, MatmulDecodesTheSideOfFewerRowsOrA) {
  const auto with = [](std::int64_t m, std::int64_t n) {
    MatmulProblem p;
    p.m = m, p.n = n;
    return decodes_b(p);
  };
  EXPECT_FALSE(with(1, 1));
  EXPECT_FALSE(with(16, 16));
  EXPECT_TRUE(with(17, 16));
  EXPECT_TRUE(with(7168, 1));
  EXPECT_FALSE(with(7168, 17));  // many columns: a
  EXPECT_FALSE(with(4, 7168));
}

// With too little shared memory for a ring there is still the kernel that needs none.
TEST(Nvfp4Plan, LittleSharedMemory) {
  const runtime::Device device = device_with(16, 80, std::size_t{32} * 1024);
  for (const std::int64_t columns : {1, 2, 16, 100}) {
    const Plan plan = plan_for({.rows = 1000, .k = 4096, .columns = columns}, false, device);
    EXPECT_EQ(plan.kernel, Kernel::kGeneral);
    EXPECT_EQ(plan.shared_bytes, 0U);
    EXPECT_EQ(plan.lanes_per_row, 32);
    EXPECT_GE(plan.clusters * (GeneralConfig::kThreads / plan.lanes_per_row), 1000);
    EXPECT_GE(plan.column_tiles * plan.columns, columns);
  }
}

}  // namespace
}  // namespace hopwell::ops::nvfp4
