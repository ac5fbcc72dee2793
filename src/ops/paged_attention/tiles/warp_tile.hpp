// paged_attention on GPUs: the interface between the kernels and a warp tile. The kernels (split_kernel.hpp,
// cluster_kernel.hpp) decide which keys a warp has and when a stage is filled. A warp tile divides a tile of keys
// between the lanes of a warp: its copies, its layout in a stage, its products.
//
//     a segment    prefetch_query │ begin_segment │ step, step, … │ store_partial
//     a step       computes the tile in a stage, if it exists, and calls refill(part) for each part it has used; in
//                  refill(part) the kernel calls copy() for the same part of the next tile
#pragma once

#include <concepts>

#include "ops/paged_attention/gpu/segment.hpp"
#include "ops/paged_attention/gpu/values.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// A query vector of a segment. Constant along the segment.
struct QueryVector {
  int sequence, kv_head, head, query, position;
  Keys visible;  // keys of this segment that the query sees
  int end;       // end of the segment's keys
};
// `head` and `row`: KV head and query within the row block.
HOPWELL_DEVICE QueryVector query_vector_of(const Params& p, const Segment& segment, int head, int row) {
  const Schedule& schedule = p.schedule;
  const int group = segment.row_block / schedule.passes, kv_head = group * schedule.heads + head;
  const int of_group = (segment.row_block - group * schedule.passes) * schedule.queries + row,
            all = p.query.group * p.query.q_len;
  const int at = smaller(of_group, all - 1), g = at / p.query.q_len,
            query = at - g * p.query.q_len;  // padding rows of the last pass repeat the last query
  const int position = segment.context - p.query.q_len + query;
  const Keys keys = p.bias.visible_keys(position);
  return {segment.sequence,
          kv_head,
          kv_head * p.query.group + g,
          query,
          position,
          {larger(keys.begin, segment.keys.begin), smaller(keys.end, segment.keys.end)},
          segment.keys.end};
}

// A tile to be copied.
struct KeyTile {
  int key, page;  // first key of the warp; page of the lane's own first key, −1 if absent
  bool exists, begins_segment;
  // Set by locate(), once for all parts: slot of the lane's first key; bytes of each of the lane's copies, −1 if they
  // differ.
  int slot = 0, bytes = 0;
};

// Sources of a lane's copies along a segment: addresses of its first chunks of K and V in page 0, slot 0.
struct CopySource {
  QueryVector vector;
  const char *k, *v;
  const char* r;   // the lane's chunk of row 0
  uintptr_t bias;  // the lane's row
};

// The running maximum and the sum of exp2(logit − maximum).
struct RunningSoftmax {
  float maximum = -INFINITY, sum = 0;
  // Raises the maximum and returns exp2(logit − maximum). The caller multiplies earlier sums by `factor`.
  HOPWELL_DEVICE float update(float logit, float tile_maximum, float& factor) {
    const float raised = fmaxf(maximum, tile_maximum), base = tile::finite_row_max(raised);
    factor = arch::exp2_approx(maximum - base);
    const float p = arch::exp2_approx(logit - base);
    maximum = raised, sum = sum * factor + p;
    return p;
  }
};

struct AnyRefill {
  HOPWELL_DEVICE void operator()(int part) const;
};
template <class Tile>
struct WarpTileArguments {
  const Params& p;
  const QueryVector& vector;
  const CopySource& source;
  const KeyTile& next;
  KeyTile& found;
  typename Tile::Stage& stage;
  typename Tile::Partial& partial;  // a warp's partial result of a segment, in shared memory
  uint32_t address;                 // the lane's first chunk in the stage
  int key;                          // first key of the tile in the stage
  bool exists;                      // the stage holds a tile
};
template <class Tile>
concept WarpTile = requires(Tile tile, const Tile& done, const WarpTileArguments<Tile>& a) {
  typename Tile::Type;  // of q, k, v and out
  Tile(a.p);
  { Tile::kStages } -> std::convertible_to<int>;      // of the ring
  { Tile::kPartsApart } -> std::convertible_to<int>;  // parts of a first tile, if its copies are separate code; or 0
  { Tile::kStoresResults } -> std::convertible_to<bool>;       // the tile stores results of whole row blocks: mma.hpp
  { Tile::kRegistersAreScarce } -> std::convertible_to<bool>;  // kernels keep rarely used values distributed over lanes
  { Tile::kLaneBytes } -> std::convertible_to<int>;     // from one lane's first chunk in a stage to the next lane's
  { Tile::kKeysOfLookup } -> std::convertible_to<int>;  // consecutive keys that share a page
  { Tile::kInterleavesHeads } -> std::convertible_to<bool>;  // the kernel sets `head`, the same for all lanes
  { tile.first_key } -> std::convertible_to<int>;            // the lane's first key in a tile
  { tile.head } -> std::convertible_to<int>;                 // the lane's KV head in a row block
  { tile.row } -> std::convertible_to<int>;                  // the lane's query in a row block
  { done.copy_source(a.p, a.vector) } -> std::same_as<CopySource>;
  // locate() is called once before a tile is copied. copy() starts the copies of a part of the tile into a stage.
  done.locate(a.p, a.source, a.found);
  done.copy(a.p, a.source, a.next, a.stage, a.address, /*part=*/0);
  // prefetch_query() loads the query for begin_segment(), which begins a segment whose first tile is in the stage.
  tile.prefetch_query(a.p, a.vector);
  tile.begin_segment(a.p, a.vector, a.partial, a.stage);
  tile.step(a.p, a.vector, a.key, a.stage, a.address, a.exists, AnyRefill{});
  // Stores the warp's partial result of the segment: rows of pitch() values.
  done.store_partial(a.p, a.partial);
  { done.pitch() } -> std::convertible_to<int>;
};

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
