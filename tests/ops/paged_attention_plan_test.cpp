// paged_attention: how its GPU kernels share out the work, on devices of any size. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "ops/paged_attention/gpu/segment.hpp"
#include "ops/paged_attention/plan.hpp"

namespace hopwell::ops::paged_attention {
namespace {

constexpr int kSms[] = {8, 66, 114, 132, 148};
constexpr SharedBytes kShared{.of_cta = 4608, .of_warp = 19072};

// A call in layout nhd, or vllm, of dense tensors. Kernels' addresses are null but for the lengths.
struct Call {
  std::vector<std::int32_t> lengths;
  std::int64_t q_len = 1, h_q = 16, h_kv = 16, d = 64;
  hopwell_cache_layout layout = HOPWELL_CACHE_NHD;
  DType dtype = DType::kBFloat16;
  std::int64_t window = INT64_MAX;
};

View dense(DType dtype, std::initializer_list<std::int64_t> shape) {
  View view{.dtype = dtype, .ndim = static_cast<int>(shape.size()), .present = true};
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) view.stride[i] = stride, stride *= view.shape[i];
  return view;
}

Problem problem_of(Call& call, int sms, std::int64_t max_blocks = 512) {
  constexpr std::int64_t kBlock = 16;
  Problem p;
  p.b = static_cast<std::int64_t>(call.lengths.size()), p.q_len = call.q_len, p.h_q = call.h_q, p.h_kv = call.h_kv;
  p.d = call.d, p.block = kBlock, p.max_blocks = max_blocks, p.blocks = p.b * p.max_blocks, p.window = call.window;
  p.layout = call.layout, p.scale = 1;
  p.q = p.out = dense(call.dtype, {p.b, p.q_len, p.h_q, p.d});
  p.block_tables = dense(DType::kInt32, {p.b, p.max_blocks});
  p.context_lens = dense(DType::kInt32, {p.b});
  p.context_lens.data = call.lengths.data();
  if (call.layout == HOPWELL_CACHE_NHD) {
    p.k_cache = p.v_cache = dense(call.dtype, {p.blocks, kBlock, p.h_kv, p.d});
    p.k = p.v = {kBlock * p.h_kv * p.d, p.d, p.h_kv * p.d, p.d, p.d};
  } else {
    const std::int64_t x = 16 / static_cast<std::int64_t>(size_of(call.dtype));
    p.k_cache = dense(call.dtype, {p.blocks, p.h_kv, p.d / x, kBlock, x});
    p.v_cache = dense(call.dtype, {p.blocks, p.h_kv, p.d, kBlock});
    p.k = {p.h_kv * p.d * kBlock, p.d * kBlock, x, x, kBlock * x};
    p.v = {p.h_kv * p.d * kBlock, p.d * kBlock, 1, 1, kBlock};
  }
  p.device = {.location = {kDLCUDA, 0}, .capability = 90, .sms = sms, .cluster_sms = sms, .shared_bytes = 232448};
  return p;
}

std::vector<Call> calls() {
  std::mt19937 random(1);
  const auto lengths = [&](std::size_t count, int longest) {
    std::vector<std::int32_t> all(count);
    for (std::int32_t& length : all) length = static_cast<std::int32_t>(random() % static_cast<unsigned>(longest + 1));
    return all;
  };
  std::vector<std::int32_t> skewed(64, 512);
  skewed[17] = 8000;
  return {{.lengths = {1000}},
          {.lengths = {0, -3, 1, 15, 16, 17, 70, 0}, .q_len = 2},
          {.lengths = std::vector<std::int32_t>(32, 4096)},  // whole row blocks
          {.lengths = std::vector<std::int32_t>(33, 4096), .h_kv = 4},
          {.lengths = skewed},
          {.lengths = lengths(7, 8192), .h_kv = 2, .d = 128},              // mma
          {.lengths = lengths(20, 8192), .h_q = 24, .h_kv = 2, .d = 128},  // of two blocks
          {.lengths = lengths(9, 8192), .h_q = 24, .h_kv = 4, .d = 80},    // four interleaved heads
          {.lengths = lengths(64, 300), .q_len = 3, .h_q = 32, .h_kv = 4, .window = 100},
          {.lengths = lengths(65, 300), .layout = HOPWELL_CACHE_VLLM},
          {.lengths = lengths(700, 90), .h_q = 8, .h_kv = 8, .d = 192, .layout = HOPWELL_CACHE_VLLM},
          {.lengths = lengths(20, 3000), .h_q = 8, .h_kv = 8, .d = 256, .dtype = DType::kFloat32}};
}

// Tiles of a row block of each sequence.
std::vector<int> tiles_of_sequences(const Params& p) {
  std::vector<int> tiles;
  for (int n = 0; n < p.query.b; ++n) tiles.push_back(tiles_of(p, keys_of_sequence(p, p.cache.context_of(n))));
  return tiles;
}

// As the kernel divides them: partition.hpp.
Partition partition_of_call(const Params& p, const std::vector<int>& tiles) {
  std::int64_t sum = 0;
  for (const int of_sequence : tiles) sum += of_sequence;
  Partition partition = partition_of(p.schedule, sum * p.schedule.row_blocks);
  const bool equal = std::all_of(tiles.begin(), tiles.end(), [&](int x) { return x == tiles[0]; });
  if (p.schedule.partition_by_warp && equal && may_take_whole_blocks(p.schedule, partition))
    partition.share = p.schedule.whole_blocks * tiles[0], partition.extra = 0;
  return partition;
}

// The segment that begins a warp's range.
Segment first_segment(const Params& p, const std::vector<int>& tiles, const TileRange& range) {
  Segment segment{};
  while (range.begin >=
         std::int64_t{segment.tiles_before + tiles[static_cast<std::size_t>(segment.sequence)]} * p.schedule.row_blocks)
    segment.tiles_before += tiles[static_cast<std::size_t>(segment.sequence++)];
  segment.context = p.cache.context_of(segment.sequence);
  segment.tiles = tiles[static_cast<std::size_t>(segment.sequence)];
  segment.begin_at(p, range.begin, range.end);
  return segment;
}

// Counts the tiles of a warp, and checks that their keys are those of the sequence.
void count_tiles(const Params& p, const std::vector<int>& tiles, const TileRange& range, std::vector<int>& count) {
  if (range.begin == range.end) return;
  Segment segment = first_segment(p, tiles, range);
  std::int64_t next = range.begin;
  do {
    const Keys all = keys_of_sequence(p, segment.context);
    EXPECT_EQ(segment.keys.begin, all.begin + segment.first * p.schedule.tile);
    EXPECT_EQ(segment.keys.end, std::min(all.end, all.begin + (segment.first + segment.count) * p.schedule.tile));
    EXPECT_EQ(segment.row_block_begin(p) + segment.first, next);
    EXPECT_LT(segment.row_block, p.schedule.row_blocks);
    for (int i = 0; i < segment.count; ++i) ++count[static_cast<std::size_t>(next++)];
  } while (segment.advance(p, range.end));
  EXPECT_EQ(next, range.end);
}

TEST(PagedAttentionPlan, EveryTileBelongsToOneWarp) {
  for (Call& call : calls()) {
    for (const int sms : kSms) {
      const Problem problem = problem_of(call, sms);
      const Params p = plan_split(problem, kShared);
      const std::vector<int> tiles = tiles_of_sequences(p);
      const Partition partition = partition_of_call(p, tiles);
      std::vector<int> count(static_cast<std::size_t>(partition.tiles));
      for (int cta = 0; cta < p.schedule.ctas; ++cta) {
        const TileRange of_cta{partition.first_tile(cta), partition.first_tile(cta + 1)};
        for (int share = 0; share < p.schedule.shares; ++share)
          count_tiles(p, tiles, of_cta.of_share(share, p.schedule.shares), count);
        for (std::int64_t tile = of_cta.begin; tile < of_cta.end; ++tile) ASSERT_EQ(partition.cta_of(tile), cta);
      }
      EXPECT_TRUE(std::all_of(count.begin(), count.end(), [](int x) { return x == 1; })) << sms << " SMs";
    }
  }
}

TEST(PagedAttentionPlan, LanesHaveRoomForARow) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (std::int64_t d = 32; d <= 256; d += 8) {
      Call call{.lengths = {1000}, .d = d, .dtype = dtype};
      const KeyMajorShape shape = key_major_shape(problem_of(call, 132));
      const std::int64_t room = std::int64_t{shape.lanes} * shape.vectors * 8;
      EXPECT_GE(room, d);
      EXPECT_GT(2 * d, room) << d;                             // a power of two at the worst
      EXPECT_EQ(shape.vectors == 1, (d & (d - 1)) == 0) << d;  // other rows are packed
      EXPECT_GT(d, room - 8 * shape.lanes) << d;  // no vector of all lanes is empty: packed rows end in the last one
      EXPECT_EQ(shape.lanes & (shape.lanes - 1), 0);
      EXPECT_LE(shape.keys, shape.lanes);  // so that each lane ends up with the logit of one key
    }
  }
}

TEST(PagedAttentionPlan, SharesAreEqualOrWholeRowBlocks) {
  for (Call& call : calls()) {
    for (const int sms : kSms) {
      const Params p = plan_split(problem_of(call, sms), kShared);
      const std::vector<int> tiles = tiles_of_sequences(p);
      const Partition partition = partition_of_call(p, tiles);
      std::int64_t largest = 0;
      for (int cta = 0; cta < p.schedule.ctas; ++cta)
        largest = std::max(largest, partition.first_tile(cta + 1) - partition.first_tile(cta));
      const std::int64_t equal = (partition.tiles + sms - 1) / sms;
      const bool whole = partition.extra == 0 && tiles[0] > 0 && partition.share % tiles[0] == 0;
      EXPECT_LE(largest, whole ? equal + equal / 32 + 1 : std::max<std::int64_t>(equal, p.schedule.shares));
    }
  }
}

TEST(PagedAttentionPlan, WorkspaceHasASlotForEachCta) {
  for (Call& call : calls()) {
    for (const int sms : kSms) {
      const Problem problem = problem_of(call, sms);
      const Params p = plan_split(problem, kShared);
      const std::int64_t rows = p.schedule.heads * p.schedule.queries;
      EXPECT_EQ(p.schedule.ctas, sms);
      EXPECT_EQ(split_workspace_bytes(p),
                static_cast<std::size_t>(sms * ((rows * p.query.d + 127) / 128) * kPieceBytes));
      EXPECT_EQ(p.schedule.pairs, rows * p.query.d / 2);
      EXPECT_EQ(std::int64_t{p.schedule.heads} * p.schedule.row_blocks.value / p.schedule.passes.value, call.h_kv);
      EXPECT_GE(p.schedule.queries * p.schedule.passes, call.q_len * call.h_q / call.h_kv);
    }
  }
}

TEST(PagedAttentionPlan, GroupsOfNineToSixteenTakeOnePassWhereWarpsHaveManyTiles) {
  const auto passes = [](std::int64_t group, std::int64_t d = 128, std::int64_t q_len = 1,
                         hopwell_cache_layout layout = HOPWELL_CACHE_NHD, std::int64_t max_blocks = 1 << 15) {
    Call call{.lengths = {100}, .q_len = q_len, .h_q = 2 * group, .h_kv = 2, .d = d, .layout = layout};
    const Problem problem = problem_of(call, 132, max_blocks);
    EXPECT_EQ(tile_kind(problem), TileKind::mma);
    const Params p = plan_split(problem, kShared);
    EXPECT_LE(p.schedule.queries, 8 * mma_blocks(problem));
    EXPECT_EQ(p.schedule.tile, d <= 64 ? 64 : d <= 128 ? 32 : 16);
    return p.schedule.passes.value;
  };
  for (const std::int64_t group : {2, 8, 9, 12, 16}) EXPECT_EQ(passes(group), 1) << group;
  EXPECT_EQ(passes(16, 40, 1, HOPWELL_CACHE_VLLM), 1);
  // What takes more than one: larger groups, several query tokens, large rows, short tables: 132 · 8 · 12 tiles of 32
  // keys.
  EXPECT_EQ(passes(17), 3);
  EXPECT_EQ(passes(12, 128, 2), 3);
  EXPECT_EQ(passes(12, 136), 2);
  EXPECT_EQ(passes(12, 128, 1, HOPWELL_CACHE_NHD, 12672), 1);
  EXPECT_EQ(passes(12, 128, 1, HOPWELL_CACHE_NHD, 12671), 2);
}

// Lines of 128 bytes that neighbouring heads share are asked for by warps that walk side by side.
TEST(PagedAttentionPlan, HeadsThatShareLinesAreInterleaved) {
  const auto interleaved_heads = [](std::int64_t d, std::int64_t group, std::int64_t h_kv = 8,
                                    std::size_t shared_bytes = 232448, bool with_u = false) {
    Call call{.lengths = {100}, .h_q = h_kv * group, .h_kv = h_kv, .d = d};
    Problem problem = problem_of(call, 132, 1 << 15);
    problem.device.shared_bytes = shared_bytes, problem.pos_bias_u.present = with_u;
    const Params p = plan_split(problem, kShared);
    EXPECT_EQ(p.schedule.heads.value, p.schedule.interleaved_heads.value);
    EXPECT_EQ(p.schedule.shares * p.schedule.interleaved_heads, p.schedule.warps);
    EXPECT_EQ(p.schedule.pairs.value, p.schedule.heads * p.schedule.queries * int(d) / 2);
    return p.schedule.interleaved_heads.value;
  };
  for (const std::int64_t d : {64, 128, 192, 256}) EXPECT_EQ(interleaved_heads(d, 4), 1) << d;
  for (const std::int64_t d : {32, 96, 160, 224}) EXPECT_EQ(interleaved_heads(d, 4), 2) << d;
  EXPECT_EQ(interleaved_heads(80, 4), 4);
  EXPECT_EQ(interleaved_heads(80, 12), 2);  // four would have 48 query vectors
  EXPECT_EQ(interleaved_heads(80, 4, 8, 99 * 1024), 2);
  EXPECT_EQ(interleaved_heads(96, 4, 3), 1);
  EXPECT_EQ(interleaved_heads(96, 12), 2);
  EXPECT_EQ(interleaved_heads(96, 12, 8, 232448, true), 1);  // but not q in two parts of two blocks
  EXPECT_EQ(interleaved_heads(96, 4, 8, 232448, true), 2);
  EXPECT_EQ(interleaved_heads(80, 12, 8, 232448, true), 2);
}

// Some tiles of mma are for q without low parts, which they load by words.
TEST(PagedAttentionPlan, QueriesThatAreNotExactGoToOtherTiles) {
  const auto problem_with = [](std::int64_t d, std::int64_t group, auto change) {
    Call call{.lengths = {100}, .h_q = 2 * group, .h_kv = 2, .d = d};
    Problem problem = problem_of(call, 132, 1 << 15);
    change(problem);
    return problem;
  };
  const auto as_it_is = [](Problem&) {};
  const auto with_u = [](Problem& problem) { problem.pos_bias_u.present = true; };
  const auto by_halves = [](Problem& problem) { problem.q.stride[2] += 1; };
  EXPECT_EQ(mma_blocks(problem_with(128, 12, as_it_is)), 2);
  EXPECT_EQ(mma_blocks(problem_with(128, 12, with_u)), 2);
  EXPECT_EQ(mma_blocks(problem_with(128, 12, by_halves)), 2);
  const auto tile = [&](std::int64_t d, std::int64_t group, auto change) {
    return plan_split(problem_with(d, group, change), kShared).schedule.tile.value;
  };
  EXPECT_EQ(tile(128, 12, as_it_is), 32);
  EXPECT_EQ(tile(128, 12, with_u), 16);  // so that eight warps have room
  EXPECT_EQ(tile(64, 12, by_halves), 32);
  EXPECT_EQ(tile(128, 8, with_u), 32);
  EXPECT_EQ(tile_kind(problem_with(128, 2, with_u)), TileKind::mma);
  EXPECT_EQ(tile_kind(problem_with(256, 2, as_it_is)), TileKind::mma);
  EXPECT_EQ(tile_kind(problem_with(256, 2, with_u)), TileKind::key_major);
  EXPECT_EQ(tile_kind(problem_with(256, 2, by_halves)), TileKind::key_major);
  EXPECT_EQ(tile_kind(problem_with(256, 3, with_u)), TileKind::mma);
  EXPECT_EQ(tile_kind(problem_with(256, 3, by_halves)), TileKind::mma);
  for (const std::int64_t d : {128, 192, 256}) {
    for (const std::int64_t group : {3, 8, 12}) {
      const int passes = plan_split(problem_with(d, group, as_it_is), kShared).schedule.passes.value;
      EXPECT_EQ(plan_split(problem_with(d, group, with_u), kShared).schedule.passes.value, passes) << d << " " << group;
    }
  }
}

// Tiles of mma reach other keys of a page by a distance of 31 bits, up or down.
TEST(PagedAttentionPlan, KeysThatLieFarApartAreScattered) {
  Call call{.lengths = {100}, .h_q = 4, .h_kv = 2, .d = 64};
  Problem problem = problem_of(call, 132);
  EXPECT_EQ(tile_kind(problem), TileKind::mma);
  for (const std::int64_t slot : {std::int64_t{1} << 32, -(std::int64_t{1} << 32), -(std::int64_t{1} << 30) - 32}) {
    problem.k.slot = slot;
    EXPECT_EQ(tile_kind(problem), TileKind::key_major) << slot;
  }
}

// And pages by one of 32 bits, upwards.
TEST(PagedAttentionPlan, PagesThatLieFarApartOrBackwardsAreNotForMma) {
  Call call{.lengths = {100}, .h_q = 4, .h_kv = 2, .d = 64};
  Problem problem = problem_of(call, 132);
  for (const std::int64_t page : {std::int64_t{1} << 31, std::int64_t{-2048}}) {
    problem.v.page = page;
    EXPECT_EQ(tile_kind(problem), TileKind::key_major) << page;
  }
  problem.v.page = (std::int64_t{1} << 31) - 8;
  EXPECT_EQ(tile_kind(problem), TileKind::mma);
}

TEST(PagedAttentionPlan, FewerWarpsWhereSharedMemoryIsSmall) {
  Call call{.lengths = {100}};
  Problem problem = problem_of(call, 46);
  problem.device.shared_bytes = std::size_t{99} * 1024;
  const Params p = plan_split(problem, kShared);
  EXPECT_EQ(p.schedule.warps, 5);  // 4,608 + 5 × 19,072 bytes
  EXPECT_EQ(p.schedule.threads, 160);
  EXPECT_EQ(tile_kind(problem), TileKind::key_major);
}

// SMs in groups of 16, in each of which a cluster lies.
int clusters_that_fit(int size, const runtime::Device& device) {
  return device.sms / 16 * (16 / size) + device.sms % 16 / size;
}

TEST(PagedAttentionPlan, FewerWarpsOfAClusterWhereTilesAreLarge) {
  Call call{.lengths = {100}};
  const Problem problem = problem_of(call, 132);
  const ClusterPlan plan = plan_clusters(problem, clusters_that_fit);
  EXPECT_EQ(cluster_params(problem, plan, {.of_cta = 6400, .of_warp = 28160}, 2).schedule.warps, 8);  // 231,680 bytes
  EXPECT_EQ(cluster_params(problem, plan, {.of_cta = 6400, .of_warp = 28288}, 2).schedule.warps, 7);
}

TEST(PagedAttentionPlan, ClustersAreTheLargestThatRunAtATime) {
  for (const int sms : kSms) {
    for (const std::int64_t h_kv : {1, 2, 4, 8, 16, 32}) {
      Call call{.lengths = {100, 30}, .h_q = h_kv, .h_kv = h_kv};
      const Problem problem = problem_of(call, sms, 64);
      const ClusterPlan plan = plan_clusters(problem, clusters_that_fit);
      const auto planned = plan_clusters_if_faster(problem, clusters_that_fit);
      const bool supported = std::holds_alternative<ClusterPlan>(planned);
      EXPECT_EQ(supported, plan.size > 0) << sms << " SMs, " << h_kv << " heads";
      if (!supported) continue;
      EXPECT_EQ(plan.clusters, 2 * h_kv / plan.heads);
      EXPECT_LE(plan.clusters, clusters_that_fit(plan.size, problem.device));
      for (int size = plan.size + 1; size <= kMaxCluster; ++size)
        EXPECT_GT(plan.clusters, clusters_that_fit(size, problem.device));
    }
  }
}

TEST(PagedAttentionPlan, TilesAndPairsOfAClusterAreDealtOutOnce) {
  for (const int sms : kSms) {
    for (const int keys_of_lookup : {1, 8, 16}) {
      Call call{.lengths = {777}, .h_q = 4, .h_kv = 4};
      const Problem problem = problem_of(call, sms, 64);
      const ClusterPlan plan = plan_clusters(problem, clusters_that_fit);
      const ClusterParams p = cluster_params(problem, plan, kShared, keys_of_lookup);
      EXPECT_GE(keys_of_lookup << p.lookups_log2, p.schedule.tile);
      std::vector<int> tiles(static_cast<std::size_t>(tiles_of(p, keys_of_sequence(p, 777))));
      const int warps = p.cluster * p.schedule.warps;
      for (int warp = 0; warp < warps; ++warp)
        for (std::size_t tile = static_cast<std::size_t>(warp); tile < tiles.size();
             tile += static_cast<std::size_t>(warps))
          ++tiles[tile];
      EXPECT_TRUE(std::all_of(tiles.begin(), tiles.end(), [](int x) { return x == 1; }));
      EXPECT_GE(p.cluster * p.slice, p.schedule.pairs);
      EXPECT_LE(p.cluster * p.slice, p.schedule.pairs + p.cluster);
    }
  }
}

TEST(PagedAttentionPlan, ClustersAreForFewRowBlocks) {
  const auto reason = [](Call call, std::int64_t max_blocks, int sms = 132) {
    const auto planned = plan_clusters_if_faster(problem_of(call, sms, max_blocks), clusters_that_fit);
    const auto* unsupported = std::get_if<runtime::Unsupported>(&planned);
    return unsupported ? unsupported->reason : "";
  };
  const std::vector<std::int32_t> one{5}, four(4, 5), many(64, 5);
  EXPECT_EQ(reason({.lengths = one}, 2048), "");
  EXPECT_EQ(reason({.lengths = four}, 256), "");
  EXPECT_EQ(reason({.lengths = many}, 8),
            "needs few sequences and heads, so that a cluster for each runs at the same time");
  EXPECT_EQ(reason({.lengths = four}, 257),
            "slower than sm80 for max_blocks * block above 4096 or above 16384 / b, if b > 1");
  EXPECT_EQ(reason({.lengths = one, .dtype = DType::kFloat32}, 257),
            "slower than sm80 for max_blocks * block above 4096 with few heads or float32");
  EXPECT_EQ(reason({.lengths = one, .h_q = 32, .h_kv = 32}, 4096),
            "slower than sm80 for block tables of more than 256 MiB of keys and values");
}

}  // namespace
}  // namespace hopwell::ops::paged_attention
