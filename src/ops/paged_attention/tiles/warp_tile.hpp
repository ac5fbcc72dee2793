// paged_attention on GPUs: what the kernels ask of a warp's tile, and what they tell it. The kernels (split_kernel.hpp,
// cluster_kernel.hpp) know which keys a warp has and when a stage may be filled; a warp tile knows how the lanes of a
// warp divide a tile of keys between them: how it is copied, how it lies in a stage, how it is computed.
//
//     a segment    prefetch_query │ begin_segment │ step, step, … │ store_partial
//     a step       computes the tile in a stage, if there is one, and lets the stage be filled again by calls of
//     refill(part),
//                  in each of which the kernel calls copy() for the tile that comes next
#pragma once

#include <concepts>

#include "ops/paged_attention/gpu/segment.hpp"
#include "ops/paged_attention/gpu/values.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// What does not change along a segment, for one of its query vectors.
struct QueryVector {
  int sequence, kv_head, head, query, position;
  Keys visible;  // to this query, in this segment
  int end;       // of the segment
};
// `head` and `row`: which of the row block's KV heads and queries.
HOPWELL_DEVICE QueryVector query_vector_of(const Params& p, const Segment& segment, int head, int row) {
  const Schedule& schedule = p.schedule;
  const int group = segment.row_block / schedule.passes, kv_head = group * schedule.heads + head;
  const int of_group = (segment.row_block - group * schedule.passes) * schedule.queries + row,
            all = p.query.group * p.query.q_len;
  const int at = smaller(of_group, all - 1), g = at / p.query.q_len,
            query = at - g * p.query.q_len;  // the last pass repeats the last one
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
  int key, page;  // first key of the warp; page of the lane's own first key, −1 if there is none
  bool exists, begins_segment;
  // What a tile finds out once for all parts (locate): the slot of the lane's first key; the bytes of each of its copies,
  // −1 where they differ.
  int slot = 0, bytes = 0;
};

// What a lane copies from, along a segment: where its first chunks of K and V would be in page 0, slot 0.
struct CopySource {
  QueryVector vector;
  const char *k, *v;
  const char* r;   // its chunk of row 0
  uintptr_t bias;  // of its row
};

// The running maximum and the sum of exp2(logit − maximum).
struct RunningSoftmax {
  float maximum = -INFINITY, sum = 0;
  // exp2(logit − maximum) of a lane's key, raising the maximum; earlier sums shrink by `factor`.
  HOPWELL_DEVICE float update(float logit, float tile_maximum, float& factor) {
    const float raised = fmaxf(maximum, tile_maximum), base = tile::finite_reference(raised);
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
  typename Tile::Partial& partial;  // what a warp has of a segment, in shared memory
  uint32_t address;                 // of the lane's first chunk in the stage
  int key;                          // the first of the tile in the stage
  bool exists;                      // that tile
};
template <class Tile>
concept WarpTile = requires(Tile tile, const Tile& done, const WarpTileArguments<Tile>& a) {
  typename Tile::Type;  // of q, k, v and out
  Tile(a.p);
  { Tile::kStages } -> std::convertible_to<int>;          // of the ring
  { Tile::kPartsApart } -> std::convertible_to<int>;      // of a first tile, whose copies have code of their own; or 0
  { Tile::kStoresResults } -> std::convertible_to<bool>;  // of whole row blocks, by itself: mma.hpp
  { Tile::kRegistersAreScarce } -> std::convertible_to<bool>;  // so that kernels keep what is seldom used in lanes
  { Tile::kLaneBytes } -> std::convertible_to<int>;     // from one lane's first chunk in a stage to the next lane's
  { Tile::kKeysOfLookup } -> std::convertible_to<int>;  // consecutive keys that share a page
  { Tile::kAbreast } -> std::convertible_to<bool>;      // whether its head is the warp's, which the kernel sets
  { tile.first_key } -> std::convertible_to<int>;       // of the lane, in a tile
  { tile.head } -> std::convertible_to<int>;            // its KV head and
  { tile.row } -> std::convertible_to<int>;             // its query in a row block
  { done.copy_source(a.p, a.vector) } -> std::same_as<CopySource>;
  // Called once before a tile is copied. Then: starts copying a part of it into a stage.
  done.locate(a.p, a.source, a.found);
  done.copy(a.p, a.source, a.next, a.stage, a.address, /*part=*/0);
  // Loads the query that begin_segment needs; begins a segment whose first tile is in the stage.
  tile.prefetch_query(a.p, a.vector);
  tile.begin_segment(a.p, a.vector, a.partial, a.stage);
  tile.step(a.p, a.vector, a.key, a.stage, a.address, a.exists, AnyRefill{});
  // Stores what the warp has of the segment: rows of pitch() values.
  done.store_partial(a.p, a.partial);
  { done.pitch() } -> std::convertible_to<int>;
};

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
