#include "ops/nvfp4/plan.hpp"

#include <algorithm>

#include "tile/ceil_div.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

using tile::ceil_div;

constexpr int kMaxCluster = 8;

template <class Number>
int to_int(Number value) {
  return static_cast<int>(value);
}

std::int64_t round_up(std::int64_t x, std::int64_t multiple) { return ceil_div(x, multiple) * multiple; }

bool is_aligned(const void* data, std::uintptr_t to) { return reinterpret_cast<std::uintptr_t>(data) % to == 0; }

// True if cp.async can copy the weights: 16 bytes of codes at a time, and 4 bytes of scales.
bool can_copy(const View& codes, std::int64_t batch_stride, const Scales& scales, std::int64_t rows, std::int64_t k) {
  constexpr std::int64_t kMaxK = std::int64_t{1} << 16, kMaxRows = std::int64_t{1} << 30,
                         kMaxStride = std::int64_t{1} << 27;
  const std::int64_t row_stride = codes.stride[0];
  return k > 0 && k <= kMaxK && rows <= kMaxRows && is_aligned(codes.data, 16) && row_stride % 16 == 0 &&
         batch_stride % 16 == 0 && row_stride >= 0 && row_stride < kMaxStride && is_aligned(scales.data, 4) &&
         scales.batch_stride % 4 == 0 && (scales.blocked || scales.row_stride % 4 == 0);
}

// ---- one column ----------------------------------------------------------------------------------------------------

Plan plan_one_column(const ProblemShape& shape, const runtime::Device& device) {
  constexpr std::int64_t kSumBytes = 4 * StageConfig::kRows;  // sums of one warp for one tile
  Plan plan{.kernel = Kernel::kOneColumn, .columns = 1, .column_tiles = 1};
  plan.row_tiles = to_int(ceil_div(shape.rows, StageConfig::kRows));
  plan.clusters = to_int(std::min<std::int64_t>(plan.row_tiles, std::max<std::int64_t>(device.sms / shape.batches, 1)));
  plan.round_tiles = std::min(plan.most_tiles(), OneColumnConfig::kMaxRoundTiles);
  const int rounds_in_flight = plan.round_tiles < plan.most_tiles() ? 2 : 1;
  for (plan.warps = OneColumnConfig::kMaxWarps; plan.warps >= 4; plan.warps /= 2) {
    const std::int64_t stages = ceil_div(shape.k, StageConfig::kStageK),
                       slice = ceil_div(stages, plan.warps) * StageConfig::kStageK;
    plan.slice = to_int(slice);
    plan.larger_warps = stages % plan.warps == 0 ? plan.warps : to_int(stages % plan.warps);
    plan.shared_bytes = static_cast<std::size_t>(
        plan.warps * (OneColumnConfig::kRingBytes + 2 * slice + rounds_in_flight * plan.round_tiles * kSumBytes));
    if (plan.shared_bytes <= device.shared_bytes) return plan;
  }
  return {};
}

// ---- 2 to 16 columns -----------------------------------------------------------------------------------------------

// Sets the shared memory for rounds of `round_tiles` tiles. A last round exchanges sums in the memory of x, which is no
// longer needed.
void set_round(Plan& plan, int round_tiles, bool is_last) {
  const std::int64_t tile_sums = std::int64_t{4} * StageConfig::kRows * plan.columns, threads = 32 * plan.warps;
  const std::int64_t x_bytes = std::int64_t{plan.slice} * 2 * plan.columns;
  const std::int64_t ring_bytes =
      plan.warps * (plan.columns == 8 ? FewColumnsConfig<8>::kRingBytes : FewColumnsConfig<16>::kRingBytes);
  const std::int64_t vectors = ceil_div(round_tiles * tile_sums / 16, threads);  // vectors of 4 sums a thread
  const std::int64_t exchange = plan.cluster > 1 ? round_up(vectors, plan.cluster) * 16 * threads : 0;
  const bool in_x = is_last && exchange <= x_bytes;
  const std::int64_t others =
      round_up(ring_bytes + x_bytes + (plan.warps + round_tiles) * tile_sums + std::int64_t{8} * round_tiles, 16);
  plan.round_tiles = round_tiles;
  plan.exchange_offset = static_cast<std::size_t>(in_x ? ring_bytes : others);
  plan.shared_bytes = static_cast<std::size_t>(in_x ? others : others + exchange);
}

// Cost of a CTA, in stages of weights of a warp, measured on an H200:
//
//     a stage of weights, rounded up to one for each warp       1
//     x of a stage, for every 8 columns                         3
//     each phase after the first                                35
//     a round                                                   20; with a cluster, 33 more for every 2 CTAs
//     more than 195 KiB of shared memory: scales miss L1        1/5 of the stages
//     8 warps instead of 16, 8 columns                          1/6 of the stages
//     8 warps instead of 16, 16 columns                         3/10 of the stages, less 16
//     8 warps and at most 113 KiB: two CTAs fit                 −16
std::int64_t cost_of_few_columns(const Plan& plan) {
  constexpr std::size_t kMuchShared = 195 * 1024, kHalfShared = 113 * 1024;
  const std::int64_t slice_stages = plan.slice / StageConfig::kStageK, tiles = plan.most_tiles();
  const std::int64_t stages = ceil_div(tiles * slice_stages, plan.warps) * plan.warps * plan.phases;
  std::int64_t cost = stages + 3 * plan.phases * slice_stages * plan.columns / 8 + 35 * (plan.phases - 1);
  cost += ceil_div(tiles, plan.round_tiles) * (20 + (plan.cluster > 1 ? 33 * plan.cluster / 2 : 0));
  if (plan.shared_bytes > kMuchShared) cost += stages / 5;
  if (plan.warps < FewColumnsConfig<8>::kMaxWarps) {
    cost += plan.columns > 8 ? stages * 3 / 10 - 16 : stages / 6;
    if (plan.shared_bytes <= kHalfShared) cost -= 16;
  }
  return cost;
}

// The plan with the cheapest number of phases.
Plan plan_few_columns(const ProblemShape& shape, int columns, int warps, int cluster, int clusters_at_a_time,
                      std::size_t shared_bytes) {
  constexpr int kFewTiles = 8;     // a round has at least this many tiles, or all tiles
  constexpr int kMostOfFour = 16;  // with more tiles, clusters of four exchange too many sums
  const std::int64_t stages = ceil_div(shape.k, StageConfig::kStageK);
  Plan best;
  Plan plan{.kernel = Kernel::kFewColumns, .columns = columns, .warps = warps, .cluster = cluster};
  plan.row_tiles = to_int(ceil_div(shape.rows, StageConfig::kRows));
  plan.column_tiles = to_int(ceil_div(shape.columns, columns));
  plan.clusters = std::clamp(clusters_at_a_time / plan.column_tiles, 1, plan.row_tiles);
  const int most_tiles = plan.most_tiles();
  if (cluster > 2 && (columns > 8 || most_tiles > kMostOfFour)) return {};
  for (plan.phases = 1; plan.phases == 1 || plan.phases * cluster <= stages; ++plan.phases) {
    plan.slice = to_int(ceil_div(stages, cluster * plan.phases) * StageConfig::kStageK);
    int tiles = most_tiles;
    for (set_round(plan, tiles, true); plan.shared_bytes > shared_bytes && tiles > 1;) set_round(plan, --tiles, false);
    if (plan.shared_bytes > shared_bytes || tiles < std::min(most_tiles, kFewTiles)) continue;
    plan.cost = cost_of_few_columns(plan);
    if (best.kernel != Kernel::kGeneral && best.cost <= plan.cost) break;
    best = plan;
  }
  return best;
}

Plan plan_few_columns(const ProblemShape& shape, const runtime::Device& device, const ClustersThatFit& fit) {
  constexpr int kMaxWarps = FewColumnsConfig<8>::kMaxWarps;
  const int columns = shape.columns <= 8 ? 8 : 16;
  Plan best;
  for (const int cluster : {1, 2, 4}) {
    if (cluster > 1 && !device.has_clusters()) continue;
    // Clusters of four cannot use all multiprocessors; the driver says how many run at the same time.
    int at_a_time = device.sms / cluster;
    if (cluster > 2) at_a_time = std::min(at_a_time, fit(cluster));
    for (const int warps : {kMaxWarps, kMaxWarps / 2}) {
      const Plan plan = plan_few_columns(shape, columns, warps, cluster, at_a_time, device.shared_bytes);
      if (plan.kernel == Kernel::kGeneral) continue;
      if (best.kernel == Kernel::kGeneral || plan.cost < best.cost) best = plan;
    }
  }
  return best;
}

// ---- 2 to 16 columns by wgmma --------------------------------------------------------------------------------------

// Cost of all rounds, in units of 10 ns, measured on an H200. The cost of a round is the sum of:
//
//     the longest of   decoding        10 for each tile and stage of the CTA
//                      a warp's ring   100 for each of its stages
//                      x               30 for each stage
//     loading x                        6 for each stage, above 8 columns 12
//     exchange in a cluster            80 + 6 for each CTA
std::int64_t cost_of_few_columns_wgmma(const Plan& plan, std::int64_t columns, std::int64_t rounds) {
  const std::int64_t stages = plan.slice / StageConfig::kStageK, stages_of_warp = ceil_div(stages, plan.splits);
  const std::int64_t longest = std::max({10 * plan.round_tiles * stages, 100 * stages_of_warp, 30 * stages});
  return rounds * (longest + (columns > 8 ? 12 : 6) * stages + (plan.cluster > 1 ? 80 + 6 * plan.cluster : 0));
}

Plan plan_few_columns_wgmma(const ProblemShape& shape, const runtime::Device& device, const ClustersThatFit& fit) {
  using Config = FewColumnsWgmmaConfig<16>;
  const std::int64_t stages = ceil_div(shape.k, StageConfig::kStageK);
  Plan best;
  for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
    const int at_a_time = cluster == 1 ? device.sms : fit(cluster);
    if (at_a_time == 0 || cluster > stages) continue;
    Plan plan{.kernel = Kernel::kFewColumnsWgmma, .column_tiles = 1, .warps = Config::kWarps, .cluster = cluster};
    plan.columns = shape.columns <= 8 ? 8 : 16;
    plan.row_tiles = to_int(ceil_div(shape.rows, StageConfig::kRows));
    const std::int64_t rounds = ceil_div(plan.row_tiles, std::int64_t{at_a_time} * Config::kWarps);
    plan.round_tiles = to_int(ceil_div(plan.row_tiles, at_a_time * rounds));
    plan.clusters = to_int(ceil_div(plan.row_tiles, plan.round_tiles));
    plan.slice = to_int(ceil_div(stages, cluster) * StageConfig::kStageK);
    plan.row_groups = to_int(ceil_div(plan.round_tiles, 4));
    plan.splits = Config::kWarps / 4 / plan.row_groups;
    plan.shared_bytes = static_cast<std::size_t>(
        plan.columns == 8 ? FewColumnsWgmmaConfig<8>::shared_bytes(plan.round_tiles, cluster, plan.splits)
                          : Config::shared_bytes(plan.round_tiles, cluster, plan.splits));
    plan.cost = cost_of_few_columns_wgmma(plan, shape.columns, rounds);
    if (best.kernel == Kernel::kGeneral || plan.cost < best.cost) best = plan;
  }
  return best;
}

// ---- many columns --------------------------------------------------------------------------------------------------

// Cost of all rounds, in ns, measured on an H200:
//
//     a stage                  400 + 6.6 a column; two splits: 280 + 3 a column
//                              up to 45 % more, in proportion to the multiprocessors with work
//     beginning and end        6000 + 10 a column; every round if K is split, otherwise once
//     results of a tile        1000, if K is not split
//     exchange in a cluster    8 for each column and CTA, if K is split
std::int64_t cost_of_many_columns(const Plan& plan, std::int64_t at_a_time, std::int64_t sms) {
  const std::int64_t tiles = std::int64_t{plan.row_tiles} * plan.column_tiles;
  const std::int64_t stage_cost = plan.splits == 1 ? 400 + 33 * plan.columns / 5 : 280 + 3 * plan.columns;
  const std::int64_t rounds = ceil_div(tiles, at_a_time), ctas = std::min(tiles, at_a_time) * plan.cluster;
  const std::int64_t stages =
      plan.slice / ManyColumnsConfig::kStageK * stage_cost * (100 * sms + 45 * ctas) / (100 * sms);
  const std::int64_t begin_and_end = 6000 + 10 * plan.columns, store = 1000,
                     exchange = std::int64_t{8} * plan.columns * plan.cluster;
  return plan.splits_k() ? rounds * (begin_and_end + stages + exchange) : begin_and_end + rounds * (stages + store);
}

Plan plan_many_columns(const ProblemShape& shape, const runtime::Device& device, const ClustersThatFit& fit) {
  using Config = ManyColumnsConfig;
  constexpr int kColumnsOfShare = 8;  // columns that a warpgroup adds and stores are a multiple of this
  const std::int64_t stages = ceil_div(shape.k, Config::kStageK);
  Plan best;
  for (const int columns : {32, 64, 96, 128}) {
    for (const int row_groups : {Config::kGroups, Config::kFewestGroups}) {
      for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
        const int at_a_time = cluster == 1 ? device.sms : fit(cluster);
        Plan plan{.kernel = Kernel::kManyColumns, .columns = columns, .warps = Config::kWarps, .cluster = cluster};
        plan.row_groups = row_groups, plan.splits = Config::kGroups / row_groups;
        if (at_a_time == 0 || cluster > stages || columns % (cluster * plan.splits * kColumnsOfShare) != 0) continue;
        plan.column_tiles = to_int(ceil_div(shape.columns, columns));
        plan.row_tiles = to_int(ceil_div(shape.rows, row_groups * Config::kRows));
        plan.slice = to_int(ceil_div(stages, cluster) * Config::kStageK);
        // CTAs are persistent, except where K is split: there a CTA has one tile.
        const std::int64_t tiles = std::int64_t{plan.row_tiles} * plan.column_tiles;
        plan.clusters = to_int(plan.splits_k() ? tiles : std::min<std::int64_t>(tiles, at_a_time));
        plan.shared_bytes = static_cast<std::size_t>(Config::shared_bytes(columns));
        plan.workspace_bytes =
            static_cast<std::size_t>(std::int64_t{plan.column_tiles} * columns * stages) * Config::kStageK * 2;
        plan.cost = cost_of_many_columns(plan, at_a_time, device.sms);
        if (best.kernel == Kernel::kGeneral || plan.cost < best.cost) best = plan;
      }
    }
  }
  return best;
}

// ---- anything ------------------------------------------------------------------------------------------------------

Plan plan_general(const ProblemShape& shape) {
  Plan plan{.columns = GeneralConfig::kColumns, .lanes_per_row = 1};
  while (plan.lanes_per_row < 32 && plan.lanes_per_row < shape.k / hopwell::nvfp4::kBlock) plan.lanes_per_row *= 2;
  plan.row_tiles = to_int(ceil_div(shape.rows, GeneralConfig::kThreads / plan.lanes_per_row));
  plan.column_tiles = to_int(ceil_div(shape.columns, GeneralConfig::kColumns));
  plan.clusters = plan.row_tiles;
  return plan;
}

}  // namespace

ProblemShape shape_of(const LinearProblem& p) {
  const auto element_bytes = p.x.dtype == DType::kFloat32 ? 4 : 2;
  const bool x_aligned = is_aligned(p.x.data, 16) && (p.n <= 1 || p.x.stride[0] * element_bytes % 16 == 0);
  return {.rows = p.rows,
          .k = p.k,
          .columns = p.n,
          .x_is_16_bit = p.x.dtype != DType::kFloat32,
          .can_copy = x_aligned && can_copy(p.weight, 0, p.weight_scale, p.rows, p.k)};
}

ProblemShape shape_of(const GemvProblem& p) {
  return {.rows = p.m, .k = p.k, .batches = p.l, .can_copy = can_copy(p.a, p.a.stride[2], p.sfa, p.m, p.k)};
}

Kernel choose_kernel(const ProblemShape& shape, bool has_wgmma) {
  if (!shape.x_is_16_bit || !shape.can_copy) return Kernel::kGeneral;
  if (shape.columns == 1) return Kernel::kOneColumn;
  if (!has_wgmma) return Kernel::kFewColumns;
  if (shape.columns <= 8) return shape.rows <= 4096 ? Kernel::kFewColumnsWgmma : Kernel::kFewColumns;
  if (shape.columns <= 16)
    return shape.rows <= 16384 || shape.k > 4096 ? Kernel::kFewColumnsWgmma : Kernel::kFewColumns;
  return shape.columns <= 32 && shape.rows <= 2048 ? Kernel::kFewColumns : Kernel::kManyColumns;
}

const char* slower_than_sm80(const ProblemShape& shape) {
  if (choose_kernel(shape, true) != Kernel::kFewColumns) return nullptr;
  return shape.columns <= 8    ? "slower than sm80 for n <= 8 and N above 4096"
         : shape.columns <= 16 ? "slower than sm80 for n <= 16, N above 16384 and K at most 4096"
                               : "slower than sm80 for n <= 32 and N at most 2048";
}

bool decodes_b(const MatmulProblem& p) {
  constexpr std::int64_t kMostColumns = 16;
  return p.n < p.m && p.n <= kMostColumns;
}

Plan make_plan(const ProblemShape& shape, bool has_wgmma, const runtime::Device& device, const ClustersThatFit& fit) {
  Plan plan;
  switch (choose_kernel(shape, has_wgmma)) {
    case Kernel::kOneColumn:
      plan = plan_one_column(shape, device);
      break;
    case Kernel::kFewColumns:
      plan = plan_few_columns(shape, device, fit);
      break;
    case Kernel::kFewColumnsWgmma:
      plan = plan_few_columns_wgmma(shape, device, fit);
      break;
    case Kernel::kManyColumns:
      plan = plan_many_columns(shape, device, fit);
      break;
    case Kernel::kGeneral:
      break;
  }
  return plan.kernel == Kernel::kGeneral ? plan_general(shape) : plan;
}

}  // namespace hopwell::ops::nvfp4
