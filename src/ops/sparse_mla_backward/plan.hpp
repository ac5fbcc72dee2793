// sparse_mla_backward on GPUs: the plan of a call. It assigns heads to main kernels and CTAs, places dkv_accum and the
// other parts of the workspace, and sets the order of keys. Plain data, computed on the host from the problem and the
// device, and used by the kernels of every backend.
#pragma once

#include <optional>

#include "ops/attention_distribution/op.hpp"
#include "ops/common/query_groups.hpp"
#include "ops/sparse_mla_backward/op.hpp"

namespace hopwell::ops::sparse_mla_backward {

// Tile sizes and variants of a backend's main kernels.
struct MainKernels {
  int keys;                               // entries of a row: a step
  int single_heads;                       // heads of a query, on one CTA
  int pair_heads = 0;                     // heads of a query, on a cluster of two CTAs; 0: there are no such kernels
  bool deterministic_pairs = false;       // deterministic calls use pairs; otherwise the single kernel takes all heads
  bool merges_rows = false;               // there are kernels for groups of queries: tile/gpu/merge_rows.hpp
  bool single_evicts_keys_first = false;  // the single kernel can let rows of kv leave L2 first
  bool takes_windows = false;             // there are kernels for queries with window keys
};

// Where the main kernels add to dkv.
enum class DkvAccum {
  none,        // there is no dkv
  output,      // to the output itself, whose columns are put in order afterwards
  scratch,     // to fp32 in the workspace; with window keys always, unless deterministic
  fixed_point  // to integers in the workspace: a deterministic call
};

// Work of one cluster of a main kernel: some heads of a query, and all entries of its row or one split of them.
struct WorkTile {
  int query, first_head;
  int split;  // its number among the splits of all tiles; -1: a whole tile
  int first_entry;
};

// The tiles of one main kernel: `heads` heads of a query each, from first_head on, numbered query by query. Clusters
// process the first `whole_tiles`, one each. The other tiles would form a last wave that leaves most of the device
// idle. So their entries are divided into splits, and the postprocess adds dq of the splits.
struct MainPass {
  int heads = 0, ctas = 1;  // of a tile
  int first_head = 0, head_blocks = 0;
  int members = 1;  // queries per group, processed as one query with all of their heads
  int whole_tiles = 0, split_tiles = 0, splits = 1, split_entries = 0;

  [[nodiscard]] int clusters() const { return whole_tiles + split_tiles * splits; }
};

// The tile of a cluster, from a MainPass or from kernel parameters with its numbers. Blocks of heads of one query are
// neighbours, so that they share its keys in L2.
template <class Pass>
HOPWELL_HOST_DEVICE WorkTile work_tile_of(const Pass& pass, int cluster, int heads) {
  const int split = cluster - pass.whole_tiles, tile = split < 0 ? cluster : pass.whole_tiles + split / pass.splits;
  return {tile / pass.head_blocks, pass.first_head + tile % pass.head_blocks * heads, split < 0 ? -1 : split,
          split < 0 ? 0 : split % pass.splits * pass.split_entries};
}

// `count` neighbouring clusters process queries at this distance. A tile with query i of the call's order, below
// count * distance, has query i mod count * distance + i div count instead. Other tiles keep theirs.
struct FarQueries {
  int count = 1, distance = 0;
};

// Byte offsets in the workspace.
struct Workspace {
  std::size_t dkv = 0;                             // dkv_accum, if it is not the output: 4 bytes an element
  std::size_t scale = 0, largest = 0, count = 0;   // [rows of dkv_accum]: the bounds of fixed-point sums
  std::size_t window_rows = 0, window_attn = 0;    // [s_q, window]: rows of window_kv and their attn, in the space
                                                   // of dkv_accum, before it is cleared
  std::size_t delta = 0, sink_parts = 0;           // [s_q, h_q], in the same place: delta of deterministic calls,
                                                   // then the contributions to d_sink
  std::size_t rows = 0, sources = 0, lengths = 0;  // of sorted rows, see passes/order_rows.hpp
  MergedRowsPlace merged_rows;                     // of groups
  std::size_t progress = 0;                        // steps done by the CTAs, without and with groups
  std::size_t dq_splits = 0;                       // dq of splits, of either kernel, one after the other
};

using tile::kLongestOrderedRow;

struct Plan {
  // attention_distribution computes attn, because its order of additions does not depend on timing.
  bool distribution = false;
  std::optional<runtime::Planned<attention_distribution::Problem>> distribution_call;
  // The distributions over the keys and over the window keys that bound the fixed-point sums of dkv. Both count the
  // sink, also if attn does not: otherwise a head whose attention the sink takes would make the units too coarse. If
  // attn is the same distribution, it is read instead of the first one. The first one is stored in the space of the
  // sorted rows, which are computed after its last use.
  bool bound_distribution = false, window_distribution = false;
  std::optional<runtime::Planned<attention_distribution::Problem>> bound_distribution_call, window_distribution_call;
  DkvAccum dkv_accum = DkvAccum::none;
  bool ascending = false;               // CTAs process keys in ascending order
  bool orders_rows = false;             // a preprocess sorts the rows, because CTAs need ascending ones
  bool order_clears_dkv_accum = false;  // the sorting kernel has enough CTAs to clear dkv_accum
  int serpentine_tiles = 0;             // serpentine wave order: tiles of a wave; 0: off
  bool throttles = false;               // ascending CTAs wait for slower ones: tile/gpu/throttle.hpp
  int max_lead = 0;                     // steps that a CTA may lead the average of its wave
  FarQueries far_queries;
  bool prefetch_dkv_accum = false;  // to L2, a step ahead
  bool kv_evict_first = false;      // rows of kv leave L2 before dkv_accum
  QueryGroups groups;               // groups of queries with merged rows
  MainPass grouped, pairs, singles;
  Workspace workspace;
  std::size_t workspace_bytes = 0;
};

Plan make_plan(const Problem& problem, const MainKernels& kernels);
// The reason why no backend's kernels support the problem, if there is one.
std::optional<runtime::Unsupported> unsupported(const Problem& problem, const Plan& plan);

// Rows of dkv_accum: of kv, then of window_kv.
inline std::int64_t rows_of_dkv_accum(const Problem& p) { return p.s_kv + p.window.s_w; }

// The attention_distributions of a deterministic call: attn, and those that bound the sums of dkv.
attention_distribution::Problem distribution_problem(const Problem& problem);
attention_distribution::Problem bound_distribution_problem(const Problem& problem, const Plan& plan, void* workspace);
attention_distribution::Problem window_distribution_problem(const Problem& problem, const Plan& plan, void* workspace);

// The plan of a backend, or the reason why its kernels do not support the problem.
runtime::PlanOr<Plan> plan_on(const char* backend, const Problem& problem, const MainKernels& kernels);

}  // namespace hopwell::ops::sparse_mla_backward
