// sparse_mla_backward on GPUs: parameters of the main kernels of every backend.
#pragma once

#include <type_traits>

#include "arch/sm80/convert.hpp"
#include "ops/common/merge_rows.hpp"
#include "ops/sparse_mla_backward/plan.hpp"
#include "tile/gpu/numbers.hpp"
#include "tile/gpu/order_rows.hpp"
#include "tile/gpu/window.hpp"
#include "tile/log2_scale.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

using arch::bf16;
using tile::Entries;

inline constexpr const char* kName = "sparse_mla_backward";
inline constexpr int kDv = 512;  // columns of keys that are values too

struct Params {
  using Entries = tile::Entries;

  tile::SelectionParams selection;
  tile::MergedRows merged;      // selects this kernel's queries
  const uint8_t* member_masks;  // member masks of the merged rows' keys
  const bf16 *q, *kv;           // [s_q, h_q, d_qk], [s_kv, d_qk]
  const bf16 *out, *d_out;      // [s_q, h_q, 512]
  const float *lse, *sink;      // [s_q, h_q], [h_q] or null
  bf16* dq;                     // [s_q, h_q, d_qk], or null
  float* dkv;                   // dkv_accum [s_kv, d_qk], columns at sum_position; or null
  int64_t* fixed_dkv;           // the same in fixed point, [s_kv, d_qk / 2] pairs, columns at sum_word; or null
  const float* scale;           // [s_kv], scale of the fixed point of a row
  float* attn;                  // [s_q, topk], added to, in the selection's order; or null
  uint32_t* progress;           // sum of the steps of all CTAs; or null: no throttling
  const float* delta;           // [s_q, h_q]: Σ out · d_out, if the preprocess has computed it; or null
  float* sink_parts;            // [s_q, h_q]: contributions to d_sink, each written after delta is read; or null
  int64_t q_stride_s, q_stride_h, out_stride_s, out_stride_h, d_out_stride_s, d_out_stride_h;  // elements
  int64_t lse_stride_s, lse_stride_h, sink_stride, dq_stride_s, dq_stride_h, attn_stride;
  int kv_stride_s, dkv_stride;
  int heads_of_member;                     // h_q, except for groups
  int h_q, first_head, head_blocks;        // first_head, head_blocks and the following: of a MainPass
  bool prefetch_dkv_accum;                 // to L2
  bool kv_evict_first;                     // rows of kv leave L2 before dkv_accum
  bool attn_with_sink;                     // attn sums exp(score − lse') instead of exp(score − lse)
  int wave, max_lead;                      // CTAs per wave, and steps: tile/gpu/throttle.hpp
  int whole_tiles, splits, split_entries;  // see work_tile_of
  float* dq_splits;                        // [split tiles, splits, heads of a tile, d_qk]
  float sm_scale, scale_log2;              // and sm_scale · log2(e)
};

// Parameters of the kernels for queries with window keys. Row t of window_kv has the key number s_kv + t, also in
// dkv_accum, which has s_kv + s_w rows.
struct WindowParams : Params {
  using Entries = tile::WindowEntries;

  Window window;
  int64_t window_offset;  // of the row that key number 0 would have in window_kv, from kv; in elements
  int window_stride;      // elements
  int most_entries;       // of a query: window keys and topk
  int sms;
  FarQueries far;
};

// The tile of a cluster. Neighbouring clusters run at the same time; see FarQueries.
HOPWELL_DEVICE WorkTile tile_of(const Params& p, int cluster, int heads) { return work_tile_of(p, cluster, heads); }
HOPWELL_DEVICE WorkTile tile_of(const WindowParams& p, int cluster, int heads) {
  WorkTile work = work_tile_of(p, cluster, heads);
  if (work.query < p.far.count * p.far.distance)
    work.query = work.query % p.far.count * p.far.distance + work.query / p.far.count;
  return work;
}

// The entries of a tile.
HOPWELL_DEVICE Entries entries_of(const Params& p, const WorkTile& work) {
  const Entries entries = tile::entries_of(p.selection, work.query);
  return work.split < 0 ? entries : entries.slice(work.first_entry, p.split_entries);
}
HOPWELL_DEVICE tile::WindowEntries entries_of(const WindowParams& p, const WorkTile& work) {
  const tile::WindowEntries entries = tile::entries_of(p.selection, p.window, work.query);
  return work.split < 0 ? entries : entries.slice(work.first_entry, p.split_entries);
}

// Whether entry i, which has this key number, is valid.
HOPWELL_DEVICE bool counts(const Entries& entries, int /*i*/, int key) { return entries.counts(key); }
HOPWELL_DEVICE bool counts(const tile::WindowEntries& entries, int i, int key) { return entries.counts(i, key); }

// Whether entry i has a slot in attn, which has the entries of kv alone.
HOPWELL_DEVICE bool has_slot(const Entries& /*entries*/, int /*i*/) { return true; }
HOPWELL_DEVICE bool has_slot(const tile::WindowEntries& entries, int i) { return i >= int(entries.window.count); }

// Slot of entry 0 of a tile in attn, if all entries had slots.
HOPWELL_DEVICE int first_slot(const Params& /*p*/, const WorkTile& work, const Entries& entries) {
  return entries.place(work.first_entry);
}
HOPWELL_DEVICE int first_slot(const WindowParams& p, const WorkTile& work, const tile::WindowEntries& entries) {
  const Entries& selected = entries.selected;
  const int* const row = p.selection.indices + work.query * p.selection.indices_stride;  // of the query, not of a split
  return (selected.has_indices ? int(selected.row - row) : int(selected.visible.first)) - int(entries.window.count);
}

// Offset of a key's row from kv, in elements. Not a pointer: nvcc then folds the offsets of columns into instructions.
HOPWELL_DEVICE int64_t row_offset(const Params& p, int key) { return int64_t{key} * p.kv_stride_s; }
HOPWELL_DEVICE int64_t row_offset(const WindowParams& p, int key) {
  const bool of_window = key >= p.selection.s_kv;
  const int64_t of_key = int64_t{key} * (of_window ? p.window_stride : p.kv_stride_s);
  return of_window ? p.window_offset + of_key : of_key;
}

inline tile::OrderedRows ordered_rows_of(const Problem& problem, const Plan& plan, void* workspace) {
  const bool attn = problem.attn && !plan.distribution;
  return {runtime::at_offset<int>(workspace, plan.workspace.rows),
          attn ? runtime::at_offset<uint16_t>(workspace, plan.workspace.sources) : nullptr,
          runtime::at_offset<int>(workspace, plan.workspace.lengths)};
}

// Parameters that are the same for all main kernels of a call.
inline Params params_of(const Problem& problem, const Plan& plan, void* workspace) {
  Params p{};
  p.selection = tile::params_of(problem.selection);
  if (plan.orders_rows)
    p.selection = tile::ordered_selection_of(p.selection, ordered_rows_of(problem, plan, workspace));
  p.q = problem.q.as<const bf16>(), p.kv = problem.kv.as<const bf16>();
  p.out = problem.out.as<const bf16>(), p.d_out = problem.d_out.as<const bf16>();
  p.lse = problem.lse.as<const float>(), p.sink = problem.attn_sink.as<const float>();
  p.dq = problem.dq.as<bf16>(), p.attn = plan.distribution ? nullptr : problem.attn.as<float>();
  p.q_stride_s = problem.q.stride[0], p.q_stride_h = problem.q.stride[1];
  p.out_stride_s = problem.out.stride[0], p.out_stride_h = problem.out.stride[1];
  p.d_out_stride_s = problem.d_out.stride[0], p.d_out_stride_h = problem.d_out.stride[1];
  p.lse_stride_s = problem.lse.stride[0], p.lse_stride_h = problem.lse.stride[1];
  p.sink_stride = problem.attn_sink.stride[0], p.attn_stride = problem.attn.stride[0];
  p.dq_stride_s = problem.dq.stride[0], p.dq_stride_h = problem.dq.stride[1];
  p.kv_stride_s = static_cast<int>(problem.kv.stride[0]), p.h_q = static_cast<int>(problem.h_q);
  p.heads_of_member = p.h_q;
  p.sm_scale = problem.sm_scale, p.scale_log2 = tile::log2_scale(problem.sm_scale);
  p.attn_with_sink = problem.attn_with_sink;
  if (plan.throttles)
    p.progress = runtime::at_offset<uint32_t>(workspace, plan.workspace.progress), p.max_lead = plan.max_lead;
  if (problem.d_sink) p.sink_parts = runtime::at_offset<float>(workspace, plan.workspace.sink_parts);
  p.prefetch_dkv_accum = plan.prefetch_dkv_accum, p.kv_evict_first = plan.kv_evict_first;
  if (plan.dkv_accum == DkvAccum::fixed_point) {
    p.fixed_dkv = runtime::at_offset<int64_t>(workspace, plan.workspace.dkv),
    p.scale = runtime::at_offset<float>(workspace, plan.workspace.scale);
    p.delta = runtime::at_offset<float>(workspace, plan.workspace.delta);
  } else if (plan.dkv_accum != DkvAccum::none) {
    const bool output = plan.dkv_accum == DkvAccum::output;
    p.dkv = output ? problem.dkv.as<float>() : runtime::at_offset<float>(workspace, plan.workspace.dkv);
    p.dkv_stride = static_cast<int>(output ? problem.dkv.stride[0] : problem.d_qk);
  }
  p.dq_splits = runtime::at_offset<float>(workspace, plan.workspace.dq_splits);
  return p;
}

// Merge parameters. A group pays if a step of the kernel for groups times the length of the union is less than a step
// of the kernel for ungrouped queries times the number of all entries.
inline tile::MergeParams merge_params_of(const Problem& problem, const Plan& plan, void* workspace) {
  constexpr float kWorthIt = 0.84F;  // time of 16 heads relative to 64
  return merge_params(problem, workspace, plan.groups, plan.workspace.merged_rows, kWorthIt);
}

// A group's rows of q, out and so on have the layout of one query with the heads of all members.
inline void take_groups(Params& p, const Problem& problem, const Plan& plan, void* workspace) {
  const tile::MergeParams rows = merge_params_of(problem, plan, workspace);
  p.selection = tile::merged_rows_of(rows), p.member_masks = rows.member_masks;
  p.merged = {rows.lengths, 1, plan.grouped.whole_tiles, true};
  for (auto [stride_s, stride_h] : {std::pair{&p.q_stride_s, &p.q_stride_h},
                                    {&p.out_stride_s, &p.out_stride_h},
                                    {&p.d_out_stride_s, &p.d_out_stride_h},
                                    {&p.lse_stride_s, &p.lse_stride_h},
                                    {&p.dq_stride_s, &p.dq_stride_h}})
    take_as_one(plan.groups, p.h_q, *stride_s, *stride_h);
  p.h_q *= plan.groups.members;
  if (p.progress) ++p.progress;
}

// The parameters for one main kernel.
inline Params params_of(Params p, const Problem& problem, const Plan& plan, void* workspace, const MainPass& pass) {
  if (plan.groups.count > 0)
    p.merged = {runtime::at_offset<int>(workspace, plan.workspace.merged_rows.lengths), plan.groups.members,
                plan.grouped.whole_tiles, false};
  if (pass.members > 1) take_groups(p, problem, plan, workspace);
  p.first_head = pass.first_head, p.head_blocks = pass.head_blocks;
  p.whole_tiles = pass.whole_tiles, p.splits = pass.splits, p.split_entries = pass.split_entries;
  return p;
}

// The further parameters of kernels for queries with window keys.
inline WindowParams window_params_of(const Problem& problem, const Plan& plan) {
  WindowParams p{};
  p.window = problem.window;
  const auto address = [](const View& view) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(view.data));
  };
  p.window_stride = static_cast<int>(problem.window_kv.stride[0]);
  p.window_offset =
      (address(problem.window_kv) - address(problem.kv)) / std::int64_t{sizeof(bf16)} - problem.s_kv * p.window_stride;
  p.most_entries = static_cast<int>(problem.topk + problem.window.most_keys());
  p.sms = problem.device.sms, p.far = plan.far_queries;
  return p;
}
template <class P>
P further_params_of(const Problem& problem, const Plan& plan) {
  if constexpr (std::is_same_v<P, WindowParams>)
    return window_params_of(problem, plan);
  else
    return {};
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
