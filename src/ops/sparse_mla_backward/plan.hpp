// sparse_mla_backward on GPUs: what a call does, as numbers. Which main kernel takes which heads, on how many CTAs;
// where dkv is summed; in which order keys are taken; what lies where in the workspace. Plain data, made on the host
// for every backend's kernels from the problem and the device.
#pragma once

#include <optional>

#include "ops/attention_distribution/op.hpp"
#include "ops/common/query_groups.hpp"
#include "ops/sparse_mla_backward/op.hpp"

namespace hopwell::ops::sparse_mla_backward {

// What a backend's main kernels take at a time.
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

// What one cluster of a main kernel computes: some heads of a query, against all entries of its row or a slice of them.
struct WorkTile {
  int query, first_head;
  int slice;  // its number among the slices of all tiles; -1: a whole tile
  int first_entry;
};

// The tiles of one main kernel: `heads` heads of a query each, from first_head on, numbered query by query. Clusters
// take the first `whole_tiles` one each. The others would be a last wave that leaves most of the device idle, so each
// of them is cut into slices of its entries; what slices give of dq is added up afterwards.
struct MainPass {
  int heads = 0, ctas = 1;  // of a tile
  int first_head = 0, head_blocks = 0;
  int members = 1;  // queries that are taken as one with all of their heads: a group
  int whole_tiles = 0, sliced_tiles = 0, slices = 1, slice_entries = 0;

  [[nodiscard]] int clusters() const { return whole_tiles + sliced_tiles * slices; }
};

// The tile of a cluster, from a MainPass or from kernel parameters with its numbers. Blocks of heads of one query are
// neighbours, so that they share its keys in L2.
template <class Pass>
HOPWELL_HOST_DEVICE WorkTile work_tile_of(const Pass& pass, int cluster, int heads) {
  const int slice = cluster - pass.whole_tiles, tile = slice < 0 ? cluster : pass.whole_tiles + slice / pass.slices;
  return {tile / pass.head_blocks, pass.first_head + tile % pass.head_blocks * heads, slice < 0 ? -1 : slice,
          slice < 0 ? 0 : slice % pass.slices * pass.slice_entries};
}

// Offsets in bytes of what lies in the workspace.
struct Workspace {
  std::size_t dkv = 0;                             // sums, if not in the output: 4 bytes an element
  std::size_t scale = 0, largest = 0, count = 0;   // [rows of sums]: the bounds of fixed-point sums
  std::size_t window_rows = 0, window_attn = 0;    // [s_q, window]: rows of window_kv and their attn, where the sums
                                                   // will be
  std::size_t sink_parts = 0;                      // [s_q, h_q]
  std::size_t rows = 0, sources = 0, lengths = 0;  // of rows in order, see passes/order_rows.hpp
  MergedRowsPlace merged_rows;                     // of groups
  std::size_t progress = 0;                        // steps that CTAs have made; and those with groups
  std::size_t dq_slices = 0;                       // of either kernel, one after the other
};

using tile::kLongestOrderedRow;

struct Plan {
  // attn comes from attention_distribution, which adds nothing in an order that depends on time; fixed-point sums of
  // dkv are bounded by it. If it is not asked for it lies where the ordered rows will, which are made when it is used
  // up.
  bool distribution = false;
  std::optional<runtime::Planned<attention_distribution::Problem>> distribution_call;
  bool window_distribution = false;  // the same over window keys, for the bounds alone
  std::optional<runtime::Planned<attention_distribution::Problem>> window_distribution_call;
  DkvAccum dkv_accum = DkvAccum::none;
  bool ascending = false;               // CTAs go through keys in ascending order …
  bool orders_rows = false;             // … which the rows must be brought into
  bool order_clears_dkv_accum = false;  // by the pass that orders rows, which has enough CTAs
  int turning_tiles = 0;                // of a wave, where every other wave's rows descend instead; or 0
  bool throttles = false;               // … and throttled: tile/gpu/throttle.hpp
  int max_lead = 0;                     // steps that a CTA may lead the average of its wave
  bool prefetch_dkv_accum = false;      // to L2, a step ahead
  bool kv_evict_first = false;          // rows of kv leave L2 before dkv_accum
  QueryGroups groups;                   // whose rows are merged
  MainPass grouped, pairs, singles;
  Workspace workspace;
  std::size_t workspace_bytes = 0;
};

Plan make_plan(const Problem& problem, const MainKernels& kernels);
// The reason why no backend's kernels support the problem, if there is one.
std::optional<runtime::Unsupported> unsupported(const Problem& problem, const Plan& plan);

// Rows of dkv_accum: of kv, then of window_kv.
inline std::int64_t rows_of_dkv_accum(const Problem& p) { return p.s_kv + p.window.s_w; }

// The attention_distribution of a deterministic call: to attn of the call, or to the workspace. And the one over window
// keys.
attention_distribution::Problem distribution_problem(const Problem& problem, const Plan& plan, void* workspace);
attention_distribution::Problem window_distribution_problem(const Problem& problem, const Plan& plan, void* workspace);

// The plan of a backend, or the reason why its kernels do not support the problem.
runtime::PlanOr<Plan> plan_on(const char* backend, const Problem& problem, const MainKernels& kernels);

}  // namespace hopwell::ops::sparse_mla_backward
