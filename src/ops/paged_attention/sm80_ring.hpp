// paged_attention on GPUs: the kernel that walks along the keys. How the lanes of a warp divide a tile between them is
// its template argument.
//
//     logit_j = (q + u)·k_j · scale + bias_j ;  out = Σ_j exp2(logit_j − m) v_j / Σ_j exp2(logit_j − m)
//
// Tile      of a warp: 8 pieces of 16 bytes of K and 8 of V for each lane, 8 KiB in all; fragments take twice as much
// Roles     none: every warp walks along a share of its own, copies its tiles and computes them; the warps of a CTA meet
//           only at the end, to join what they have of the same strips (sm80_merge.hpp)
// Ring      2 stages a warp, private to each lane, which reads back only what it copied itself: nobody waits for anybody,
//           and there is no swizzle and no bank conflict. Fragments have one stage, renewed in four parts
// Timeline  warp   pages 0, 1 │ copy 0, 1 │ wait 0 │ q·k ▓▓▓ softmax ▓ p·v ▓▓▓ │ copy 2 → 0, page 4 │ wait 1 │ q·k …
// Budget    shared: 8 warps × (2 stages × (8,192 + 256 [+ 4,096 of r]) + 2 states of 1 KiB) + 4.5 KiB; registers: < 256,
//           one CTA an SM
// Bound     memory: 2 tiles × 8 warps × 8 KiB in flight an SM; 450 to 870 instructions for 8 KiB are half of the issue slots.
//           At the beginning and at the end instructions come from memory for the first time: short code is fast there
//
// What is invisible, or on a page that does not exist, is never read: its copies have a length of 0 and leave zeros.
#pragma once

#include "ops/paged_attention/sm80_merge.hpp"

namespace hopwell::ops::paged_attention {
namespace {

constexpr int kPieces = 8, kPieceBytes = 512;                                        // of a warp's 32 lanes
constexpr uint32_t kOffsetV = kPieces * kPieceBytes, kOffsetR = 2 * kOffsetV + 256;  // in a stage

// One stage of a warp's ring; every lane has its own column.
template <bool kFused>
struct Stage {
  arch::Words4 k[kPieces][32], v[kPieces][32];
  uint32_t visible[32];  // bit 0: the lane's key is visible; bit 1: its bias is in the upper half of the word
  uint32_t bias[32];
  arch::Words4 r[kPieces][32];
};
template <>
struct Stage<false> {
  arch::Words4 k[kPieces][32], v[kPieces][32];
  uint32_t visible[32];
  uint32_t bias[32];
};

struct RingStorage {
  PlanStorage plan;
  MergeStorage merge;
};

// What a warp has of shared memory.
template <class Lanes>
struct alignas(128) WarpStorage {
  typename Lanes::State state[2];
  alignas(128) typename Lanes::Stage ring[Lanes::kStages];
};
template <class Lanes>
struct Storage {
  RingStorage of_cta;
  WarpStorage<Lanes> of_warp[kMaxWarps];  // as many as there are
};
template <class Lanes>
HOPWELL_HOST_DEVICE constexpr size_t ring_bytes(int warps) {
  return sizeof(Storage<Lanes>) - size_t(kMaxWarps - warps) * sizeof(WarpStorage<Lanes>);
}

// What does not change along a segment, for one of its query vectors.
struct Source {
  int sequence, kv_head, head, query, position;
  Keys seen;  // by this query, in this segment
  int end;    // of the segment
};
HOPWELL_DEVICE Source source_of(const Params& p, const Segment& segment, int head_of_strip, int row) {
  const int group = segment.strip / p.passes, kv_head = group * p.heads + head_of_strip;
  const int of_group = (segment.strip - group * p.passes) * p.queries + row, all = p.group * p.q_len;
  const int at = smaller(of_group, all - 1), g = at / p.q_len,
            query = at - g * p.q_len;  // the last pass repeats the last one
  const int position = segment.context - p.q_len + query;
  const Keys keys = keys_of_query(p, segment.context, query);
  return {segment.sequence,
          kv_head,
          kv_head * p.group + g,
          query,
          position,
          {larger(keys.begin, segment.keys.begin), smaller(keys.end, segment.keys.end)},
          segment.keys.end};
}

struct Tile {
  int key, page;        // first key of the warp; page of the lane's own first key, −1 if there is none
  bool exists, begins;  // begins: a segment
};

HOPWELL_DEVICE uintptr_t row_of_bias(const Params& p, const Source& from) {
  const int64_t at = from.sequence * p.bias_stride[0] + from.query * p.bias_stride[1] + from.head * p.bias_stride[2];
  return reinterpret_cast<uintptr_t>(p.bias) + uintptr_t(at) * (p.bias_type == Float::fp32 ? 4 : 2);
}

// What a lane copies from, along a segment: where its first pieces of K and V would be in page 0, slot 0.
struct Feed {
  Source from;
  const char *k, *v;
  const char* r;   // its piece of row 0
  uintptr_t bias;  // of its row
};
// The offsets are those of the lane's first pieces within a head, bytes.
HOPWELL_DEVICE Feed feed_of(const Params& p, const Source& from, int width, int64_t k_offset, int64_t v_offset,
                            int element) {
  return {from, static_cast<const char*>(p.k) + from.kv_head * p.k_at.head * width + k_offset,
          static_cast<const char*>(p.v) + from.kv_head * p.v_at.head * width + v_offset,
          static_cast<const char*>(p.r) + (from.head * p.r_stride_h + element) * width,
          p.bias_kind == Relative::none ? 0 : row_of_bias(p, from)};
}

// Copies the aligned word that holds the bias of a key, if that is visible; returns 2 if it is the word's upper half.
HOPWELL_DEVICE uint32_t copy_bias(const Params& p, const Feed& feed, int key, bool visible, void* word) {
  if (p.bias_kind == Relative::none) return 0;
  const int column = column_of(p, feed.from.position, key);
  const bool wanted = visible && column >= 0;
  const uintptr_t address = feed.bias + unsigned(wanted ? column : 0) * uintptr_t{p.bias_type == Float::fp32 ? 4U : 2U};
  arch::cp_async<4>(arch::shared_address(word), reinterpret_cast<const void*>(address & ~uintptr_t{3}), wanted ? 4 : 0);
  return p.bias_type == Float::fp32 ? 0 : uint32_t(address) & 2;
}
HOPWELL_DEVICE float bias_of(const Params& p, uint32_t word, uint32_t visible) {
  if (p.bias_type == Float::fp32) return arch::bit_cast<float>(word);
  return meaning(visible & 2 ? word >> 16 : word & 0xffff, p.bias_type);
}

// Which row of r a key has; −1: none, it adds nothing.
HOPWELL_DEVICE int row_of_r(const Params& p, int position, int key) {
  int row = position - key;
  if (p.clamp) row = smaller(row, p.extent - 1);
  return row < p.extent ? row : -1;
}

// A piece whose elements lie anywhere, or nowhere, for layouts that have no whole pieces.
template <class T, class ElementAt>
HOPWELL_DEVICE void gather_piece(arch::Words4& piece, ElementAt element_at) {
  piece = {};
  HOPWELL_NO_UNROLL
  for (int e = 0; e < kElements<T>; ++e)
    if (const T* element = element_at(e)) reinterpret_cast<T*>(&piece)[e] = *element;
}

// 2^logit of a lane's key, raising the running maximum; earlier sums shrink by `factor`.
struct Softmax {
  float maximum = -INFINITY, sum = 0;
  HOPWELL_DEVICE float update(float logit, float tile_maximum, float& factor) {
    const float raised = fmaxf(maximum, tile_maximum), base = finite_or_zero(raised);
    factor = arch::exp2_approx(maximum - base);
    const float p = arch::exp2_approx(logit - base);
    maximum = raised, sum = sum * factor + p;
    return p;
  }
};

// A bit for each of the first `n` of `size`.
HOPWELL_DEVICE uint32_t first_bits(int n, int size) { return (1U << larger(0, smaller(n, size))) - 1; }

// Eight elements of a query vector as they lie in memory, and those of pos_bias_u or pos_bias_v that are added to them.
struct RawQuery {
  Raw8 q, u, v;
};
template <class T, bool kFused>
HOPWELL_DEVICE RawQuery load_query(const Params& p, const Source& from, int e, bool with_q = true) {
  RawQuery raw{};
  if (e >= p.d) return raw;
  const int64_t at = from.sequence * p.q_stride[0] + from.query * p.q_stride[1] + from.head * p.q_stride[2] + e;
  if (with_q) raw.q = load_8(p.q, kFloat<T>, at, p.q_in_pieces);
  if (p.pos_bias_u) raw.u = load_8(p.pos_bias_u, p.u_type, from.head * p.u_stride + e, p.u_in_pieces);
  if (kFused && p.pos_bias_v) raw.v = load_8(p.pos_bias_v, p.v_type, from.head * p.v_stride + e, p.v_in_pieces);
  return raw;
}
// Absent u and v are zero bits, which mean 0 in any type.
template <class T>
HOPWELL_DEVICE void query_plus(const Raw8& q, const Raw8& other, Float type, float (&x)[8]) {
  HOPWELL_UNROLL
  for (float& element : x) element = 0;
  add_8(q, kFloat<T>, x);
  add_8(other, type, x);
}

// What will be asked for first, on its way to L2 while the kernel before is still running: nothing of it is used.
HOPWELL_DEVICE void prefetch(const Params& p) {
  const auto line_of = [](const void* of, int i) { return static_cast<const char*>(of) + int64_t{i} * 128; };
  const int i = arch::block_index() * p.threads + arch::thread_index();
  if (i < p.lens_lines) arch::prefetch_l2(line_of(p.context_lens, i));
  if (i < p.table_lines) arch::prefetch_l2(line_of(p.block_tables, i));
  if (i < p.q_lines) arch::prefetch_l2(line_of(p.q, i));
}

// The end of a warp's segment: the result if it is a whole strip, else a part of it.
template <class Lanes>
HOPWELL_DEVICE void finish_segment(const Params& p, MergeStorage& s, WarpStorage<Lanes>& own, const Lanes& lanes,
                                   const Segment& segment) {
  const int warp = arch::warp_index(), which = segment.first > 0 ? kBegunBefore : kBegunHere;
  lanes.leave(p, own.state[which]);
  if (!segment.whole()) {
    if (arch::lane_index() > 0) return;
    Part& part = s.part[warp][which];
    part = {segment.ends() ? Reach::end : Reach::on, segment.sequence, segment.strip, segment.strip_begin(p)};
    return;
  }
  arch::syncwarp();
  for (int o = 2 * arch::lane_index(); o < p.pairs; o += 64) {
    const Place at(p, o);
    store_sums<typename Lanes::Type>(p, segment.sequence, segment.strip, at,
                                     sums_of_state<4>(own.state[kBegunHere], lanes.pitch(), at));
  }
  arch::syncwarp();  // kept: before the next segment's state; in fragments lanes exchange other things before
}

// A warp's way along its share.
template <class Lanes>
HOPWELL_DEVICE void walk(const Params& p, MergeStorage& s, WarpStorage<Lanes>& own, Lanes& lanes, const Share& share,
                         Segment segment) {
  constexpr int kStages = Lanes::kStages;
  // The address of this lane's first piece. By a shuffle, lest it be found out anew at every use.
  const uint32_t lane_begin = uint32_t(arch::lane_index() * Lanes::kLaneBytes);
  const uint32_t ring_address = arch::shuffle(arch::shared_address(own.ring), 0) + lane_begin;
  Segment ahead = segment;  // of the next tile to be asked for
  const int* table = p.block_tables + ahead.sequence * p.tables_stride;
  int ahead_key = segment.keys.begin;
  bool more_tiles = true, new_segment = false;
  const auto page_of_lane = [&] {
    const int key = ahead_key + lanes.first_key;
    return more_tiles && key < ahead.keys.end ? table[key / p.block] : -1;
  };
  const auto next_tile = [&] {
    ahead_key += p.tile;
    if (more_tiles && ahead_key >= ahead.keys.end) {
      new_segment = more_tiles = ahead.advance(p, share.end);
      ahead_key = ahead.keys.begin;
      table = p.block_tables + ahead.sequence * p.tables_stride;
    }
    return Tile{ahead_key, page_of_lane(), more_tiles, new_segment};
  };

  Tile copied{}, asked{ahead_key, page_of_lane(), true, true};
  Source source = source_of(p, segment, lanes.head_of_strip, lanes.row);
  Feed feed = lanes.feed(p, source);  // of the tile to copy
  int key = segment.keys.begin;
  lanes.fetch_query(p, source);
  // Step n computes tile n, copies tile n + kStages and asks for the page of tile n + kStages + 2.
  HOPWELL_NO_UNROLL
  for (int n = -kStages - 1, at = 0;; ++n) {
    auto& stage = own.ring[at];
    const uint32_t address = ring_address + uint32_t(at) * uint32_t(sizeof(stage));
    if (n == 0) {
      tile::launch_dependents();  // now that everything is under way: it takes time from this one
      lanes.begin(p, source, own.state[kBegunHere], stage);
    }
    if (n >= 0 && key >= segment.keys.end) {
      Segment following = segment;
      const bool more = following.advance(p, share.end);
      if (more) source = source_of(p, following, lanes.head_of_strip, lanes.row), lanes.fetch_query(p, source);
      finish_segment(p, s, own, lanes, segment);
      if (!more) return;
      segment = following;
      lanes.begin(p, source, own.state[kBegunHere], stage);
      key = segment.keys.begin;
    }
    lanes.step(p, source, key, stage, address, n >= 0, [&](int part) {
      if (n >= -kStages && copied.exists) lanes.copy(p, feed, copied, stage, address, part);
      arch::cp_async_commit();
    });
    if (n >= 0) key += p.tile;
    if (n >= -kStages) at = at + 1 == kStages ? 0 : at + 1;
    // The number asked for a step ago. By a shuffle, lest the compiler wait at the top of the loop for the one asked for now.
    copied = {asked.key, arch::shuffle(asked.page, arch::lane_index()), asked.exists, asked.begins};
    if (unsigned(copied.page) >= unsigned(p.blocks)) copied.page = -1;
    if (new_segment) feed = lanes.feed(p, source_of(p, ahead, lanes.head_of_strip, lanes.row)), new_segment = false;
    asked = next_tile();
  }
}

template <class Lanes>
__global__ void __launch_bounds__(kMaxThreads, 1) ring_kernel(const __grid_constant__ Params p) {
  auto& s = arch::dynamic_smem<Storage<Lanes>>();
  const int warp = arch::warp_index();
  prefetch(p);
  if (arch::lane_index() == 0)
    for (Part& part : s.of_cta.merge.part[warp]) part.reach = Reach::none;
  Lanes lanes(p);
  tile::wait_for_prior_kernels();
  Plan plan;
  Share share;
  Segment segment;
  find_share(p, s.of_cta.plan, plan, share, segment);
  if (share.begin < share.end) walk(p, s.of_cta.merge, s.of_warp[warp], lanes, share, segment);
  arch::syncthreads();
  const auto state_of = [&](int of_warp, int which) -> auto& { return s.of_warp[of_warp].state[which]; };
  join<typename Lanes::Type>(p, s.of_cta.merge, plan, state_of, lanes.pitch());
  store_empty<typename Lanes::Type>(p);
}

}  // namespace
}  // namespace hopwell::ops::paged_attention
