// sparse_mla_decode by the kernels of sparse_mla_forward: a call's queries as the forward's queries, and parameters
// with which its kernels find rows in the blocks of a paged cache. Nothing is copied.
//
//     query s of the forward   =  query s mod q_len of sequence s div q_len
//     row of slot t            =  cache + t div block · block_stride + t mod block · d_qk        elements of bf16
//
// The kernels call entries_of, row_of, row_of_entry and source_of with their parameters. The overloads here are for
// PagedParams.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "ops/sparse_mla_decode/op.hpp"
#include "ops/sparse_mla_forward/params.hpp"
#include "runtime/launch.hpp"
#include "tile/ceil_div.hpp"
#include "tile/gpu/gather.hpp"
#include "tile/paged_selection.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

namespace forward = sparse_mla_forward;
using arch::bf16;

// ---- on the host ----

// [b, q_len, …] as [b · q_len, …], if its queries have one distance.
inline std::optional<View> as_queries(const View& view) {
  if (!view) return view;
  const std::int64_t b = view.shape[0], q_len = view.shape[1];
  if (b > 1 && q_len > 1 && view.stride[0] != q_len * view.stride[1]) return std::nullopt;
  const std::int64_t stride = q_len > 1 ? view.stride[1] : view.stride[0];
  View queries = view.squeezed(1);
  queries.shape[0] = b * q_len, queries.stride[0] = stride;
  return queries;
}

// The forward's problem, or why its kernels do not support this one. Its kv has the slots' number and the base address.
inline runtime::PlanOr<forward::Problem> forward_problem(const Problem& p) {
  using runtime::Unsupported;
  if (p.q.dtype != DType::kBFloat16) return Unsupported{"needs q of bfloat16"};
  if (p.format || p.row_type != DType::kBFloat16) return Unsupported{"needs a cache of bfloat16 rows"};
  if (p.rope_cache) return Unsupported{"does not support rope_cache"};
  if (p.extra) return Unsupported{"does not support extra_cache"};
  if (p.keys_per_split < p.keys.selection.topk) return Unsupported{"needs keys_per_split of at least topk"};
  if (p.out.dtype != DType::kBFloat16) return Unsupported{"needs out of bfloat16"};
  if (p.d_qk != 576 && p.d_qk != 512) return Unsupported{"needs d_qk 576 or 512"};
  if (p.d_v != 512) return Unsupported{"needs d_v 512"};
  // Kernels store the number of a work tile in an int. A work tile is a query and up to 64 of its heads.
  if (!runtime::fit_in_ints({p.b * p.q_len * tile::ceil_div(p.h_q, 64), p.keys.selection.topk, p.h_q}))
    return Unsupported{"needs b · q_len · h_q / 64, topk and h_q below 2^31 - 1024"};
  const auto q = as_queries(p.q), out = as_queries(p.out), lse = as_queries(p.lse);
  if (!q || !out || !lse) return Unsupported{"needs q, out and lse with equal distances between all queries"};
  forward::Problem f;
  f.q = *q, f.out = *out, f.lse = *lse, f.attn_sink = p.attn_sink;
  f.kv.data = p.keys.cache.data, f.kv.dtype = DType::kBFloat16, f.kv.ndim = 2, f.kv.present = true;
  f.kv.shape = {p.keys.cache.slots(), p.d_qk}, f.kv.stride = {p.d_qk, 1};
  f.s_q = p.b * p.q_len, f.s_kv = p.keys.cache.slots(), f.h_q = p.h_q, f.d_qk = p.d_qk, f.d_v = p.d_v;
  f.topk = p.keys.selection.topk;
  f.selection.indices = non_null_indices(p.keys.selection.indices);
  f.selection.s_q = f.s_q, f.selection.s_kv = f.s_kv, f.selection.topk = f.topk;
  f.sm_scale = p.sm_scale, f.device = p.device;
  return f;
}

// ---- parameters of kernels ----

struct PagedParams : forward::HOPWELL_TARGET::Params {
  PagedSelection paged;
  int64_t block_stride;  // elements
};

inline PagedParams params_of(const Problem& problem, const forward::Problem& f) {
  PagedParams p{forward::HOPWELL_TARGET::params_of(f, tile::params_of(f.selection)), problem.keys.selection,
                problem.keys.cache.stride / 2};
  p.aligned = tile::rows_aligned(f.q, 2) && problem.keys.cache.aligned(16);
  return p;
}

// The row of a query. An entry is a slot, or with a block table a position of the query's sequence.
struct PagedEntries {
  const int* row;
  int length;
  PagedSlots<int> slots;

  /// Entry i; -1 beyond the length.
  HOPWELL_DEVICE int at(int i) const { return i < length ? row[i] : -1; }
  /// The slot of entry i, or -1 if it is not valid. `entry`: at(i).
  HOPWELL_DEVICE int key(int, int entry) const { return slots.of(entry); }
  HOPWELL_DEVICE int key(int i) const { return slots.of(at(i)); }
  /// Number of tiles of `size` entries; the last tile may be partial.
  HOPWELL_DEVICE int tiles(int size) const { return (length + size - 1) / size; }
};

HOPWELL_DEVICE PagedEntries entries_of(const PagedParams& p, int query) {
  const PagedSelection& s = p.paged;
  const int64_t b = query / s.q_len, i = query % s.q_len;
  return {s.row(b, i), int(s.length(b, i)), s.slots(b, s.visible(b, i), int(s.block))};
}

// The row of a slot.
HOPWELL_DEVICE const bf16* row_of(const PagedParams& p, int slot) {
  const int block = int(p.paged.block);
  return p.kv + slot / block * p.block_stride + slot % block * p.kv_stride_s;
}

// As for Hopper's other kernels: the offset of an entry's row, in 16-byte chunks from the first row, or the slot of a
// row of any alignment.
template <bool kAligned>
HOPWELL_DEVICE uint32_t row_of_entry(const PagedParams& p, const PagedEntries& entries, int, int entry) {
  const int slot = entries.slots.of(entry);
  if (slot < 0) return tile::kNoRow;
  if (!kAligned) return uint32_t(slot);
  const uint32_t block = uint32_t(entries.slots.block), row = uint32_t(slot);
  return row / block * uint32_t(p.block_stride / 8) + row % block * uint32_t(p.kv_stride_s / 8);
}
// Source of a lane's chunk of a row. The source of an invalid row must not be read.
template <bool kAligned>
HOPWELL_DEVICE const bf16* source_of(const PagedParams& p, uint32_t row, bool valid, uint32_t chunk) {
  return kAligned ? p.kv + uint64_t{row + chunk} * 8 : row_of(p, valid ? int(row) : 0) + chunk * 8;
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
