// paged_attention on GPUs: kernel parameters. plan.cpp sets them once per call.
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
  bool aligned, u_aligned;  // rows consist of whole 16-byte chunks
  int b, h_q, group;        // group: query heads per KV head
  Divisor q_len, d, half;   // half: d / 2
  float log2_scale;         // factor of q · k
};

struct Output {
  void* out;
  float* lse;                          // or null
  int64_t strides[3], lse_strides[3];  // sequence, query, head; elements
};

// Numbers of 128-byte lines of the inputs that are read first.
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

// Parameters of the cluster kernel.
struct ClusterParams : Params {
  Divisor cluster, slice;  // CTAs of a cluster; pairs of values that one CTA stores
  int lookups_log2;        // log2 of the page look-ups per tile
  int row_lines;           // lines of a key's row: 1 or 2; 0: the first tile is not prefetched
};

// Range of all keys that any query sees; `begin` is a multiple of 16.
HOPWELL_DEVICE Keys keys_of_sequence(const Params& p, int context) {
  const int begin = p.bias.visible_keys(context - p.query.q_len).begin / 16 * 16;
  const int end = smaller(context, p.bias.key_end);
  return begin < end ? Keys{begin, end} : Keys{0, 0};
}
// Number of tiles of a row block.
HOPWELL_DEVICE int tiles_of(const Params& p, const Keys& keys) {
  return ceil_div(keys.end - keys.begin, p.schedule.tile);
}

}  // namespace hopwell::ops::paged_attention
