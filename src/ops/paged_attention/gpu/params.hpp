// paged_attention on GPUs: what its kernels are given. plan.cpp fills it in, once a call.
#pragma once

#include "ops/paged_attention/gpu/cache.hpp"
#include "ops/paged_attention/gpu/position_bias.hpp"
#include "ops/paged_attention/gpu/schedule.hpp"

namespace hopwell::ops::paged_attention {

struct Query {
  const void *q, *u;   // u: pos_bias_u, or null
  int64_t strides[3];  // of q: sequence, query, head; elements
  int64_t u_stride;
  Float u_type;
  bool aligned, u_aligned;  // rows lie in whole 16-byte chunks
  int b, h_q, group;        // group: query heads of a KV head
  Divisor q_len, d, half;   // half: d / 2
  float log2_scale;         // what q · k is multiplied by
};

struct Output {
  void* out;
  float* lse;                          // or null
  int64_t strides[3], lse_strides[3];  // sequence, query, head; elements
};

// Lines of 128 bytes of what is read first.
struct PrefetchLines {
  int tables, q, lens;
};

struct Params {
  Query query;
  Cache cache;
  PositionBias bias;
  Schedule schedule;
  Output output;
  PrefetchLines prefetch;
};

// For the kernel of clusters.
struct ClusterParams : Params {
  Divisor cluster, slice;  // CTAs of a cluster; pairs of values that one of them stores
  int lookups_log2;        // how many pages of a tile are looked up
  int row_lines;           // lines of a key's row: 1 or 2; 0: the first tile is not prefetched
};

// A range of all keys that any query sees; it begins with a multiple of 16.
HOPWELL_DEVICE Keys keys_of_sequence(const Params& p, int context) {
  const int begin = p.bias.visible_keys(context - p.query.q_len).begin / 16 * 16;
  const int end = smaller(context, p.bias.key_end);
  return begin < end ? Keys{begin, end} : Keys{0, 0};
}
// Tiles of a row block.
HOPWELL_DEVICE int tiles_of(const Params& p, const Keys& keys) {
  return ceil_div(keys.end - keys.begin, p.schedule.tile);
}

}  // namespace hopwell::ops::paged_attention
