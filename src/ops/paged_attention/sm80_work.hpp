// paged_attention on GPUs: what its kernels are given, and how the work is shared out.
//
// A strip is what a CTA works on at a time: `heads` neighbouring KV heads of a sequence, whose keys lie side by side in
// memory, and `queries` of the query vectors that share each of them. The strips of a sequence are equally long, and
// all strips lie end to end on a line of units of `unit` keys:
//
//     sequence 0            sequence 1                                          sequence 2
//     strip 0 │ strip 1     strip 0             │ strip 1                       strip 0 │ strip 1
//     ▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓     ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓          ▓▓▓▓    │▓▓▓▓
//     └── CTA 0 ───┘└── CTA 1 ───┘└── CTA 2 ───┘└── CTA 3 ──┘└── …
//
// Each CTA takes an equal share, and each of its warps an equal part of that, so one long sequence among short ones is as
// good as many equal ones. They find their shares from the lengths, inside the kernel: a captured graph follows lengths
// that change. If the strips of a small batch are all equally long and nearly a multiple of the CTAs in number, each CTA takes
// whole ones and need not tell the others anything.
#pragma once

#include <cmath>

#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/bits.hpp"
#include "arch/sm80/convert.hpp"
#include "ops/paged_attention/op.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/numbers.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::paged_attention {
namespace {

using arch::bf16;
using arch::fp16;
using tile::from_fp32, tile::to_fp32;
using tile::kLn2, tile::kLog2E;

constexpr int kMaxWarps = 8, kMaxThreads = 32 * kMaxWarps;
constexpr int kMostUnits = 1100;  // of a CTA that takes whole strips: of longer calls their end is not worth as much

enum class Float : int { fp32, fp16, bf16 };
enum class Relative : int { none, key, distance };  // bias: none, or by key, or by distance

// A number that is divided by, as one to multiply by: a / b = a · ⌈2^shift / b⌉ / 2^shift, exact for 0 ≤ a < 2^31.
struct Divisor {
  int value = 1, shift = 31;
  uint32_t factor = 1U << 31;
  Divisor() = default;
  Divisor(int of) : value(of) {  // NOLINT(google-explicit-constructor)
    while (int64_t{1} << (shift - 31) < of) ++shift;
    factor = uint32_t(((uint64_t{1} << shift) + uint64_t(of) - 1) / uint64_t(of));
  }
  HOPWELL_HOST_DEVICE operator int() const { return value; }  // NOLINT(google-explicit-constructor)
};
HOPWELL_HOST_DEVICE int operator/(int a, const Divisor& b) { return int(uint64_t(uint32_t(a)) * b.factor >> b.shift); }
HOPWELL_HOST_DEVICE int operator%(int a, const Divisor& b) { return a - a / b * b.value; }

struct Params {
  const void *q, *k, *v;
  const int *block_tables, *context_lens;
  const void *pos_bias_u, *pos_bias_v, *r, *bias;  // or null
  const float* alibi_slopes;                       // or null
  void* out;
  float* lse;           // or null
  arch::Words4* parts;  // [CTAs, heads · queries, d / 2 + 1]: what a CTA has of a strip that goes on in the next one
  uint32_t mark[2];     // of this launch's parts: random, so that nothing else looks like one
  int table_lines, q_lines, lens_lines;  // pieces of 128 bytes of block_tables, q, context_lens
  CacheStrides k_at, v_at;
  int64_t k_page, v_page;  // the same in bytes
  int k_slot, v_slot, k_group, v_group, r_row;
  // of dimensions sequence, query, head, in elements
  int64_t q_stride[3], out_stride[3], lse_stride[3], bias_stride[3];
  int64_t tables_stride, lens_stride, u_stride, v_stride, r_stride_h, r_stride, slopes_stride;
  Float u_type, v_type, r_type, bias_type;
  Relative bias_kind;
  bool clamp;      // columns past the last one are the last one; else they are zero
  bool scattered;  // pages, or their elements, do not lie in whole 16-byte pieces
  bool r_direct;   // r is not read through the ring
  bool bias_in_pieces, q_in_pieces, u_in_pieces, v_in_pieces, r_in_pieces;
  int b, h_q, group, blocks;
  Divisor q_len, d, half, block;                 // half: d / 2
  int max_context, window, key_end, extent;      // keys ≥ key_end are hidden
  Divisor heads, queries, passes, strips, unit;  // passes of `queries`; strips of a sequence
  Divisor lanes;                                 // that share a key
  int tile;                                      // keys of a warp's tile
  Divisor pairs;                                 // of values of a strip
  int groups;                                    // of threads of a CTA, each as many as there are pairs
  Divisor warps, ctas;                           // warps of a CTA
  int whole;                                     // strips of a CTA if all are equally long; 0: no whole number
  int threads, part;                             // of a CTA; sequences that a thread adds up for the plan
  bool alone;                                    // each warp makes the plan for itself
  float scale_log2, bias_log2;                   // what q · k and the bias are multiplied by
};

HOPWELL_DEVICE int smaller(int a, int b) { return a < b ? a : b; }
HOPWELL_DEVICE int larger(int a, int b) { return a > b ? a : b; }
HOPWELL_DEVICE int ceil_div(int a, const Divisor& b) { return (a + b.value - 1) / b; }
// a / b of numbers that are not negative; seldom beyond 32 bits, which take four times as long.
HOPWELL_DEVICE int64_t quotient(int64_t a, int64_t b) {
  return uint64_t(a | b) >> 32 ? a / b : int64_t{uint32_t(a) / uint32_t(b)};
}

// ---- numbers of any type --------------------------------------------------------------------------------------------

template <class T>
constexpr int kElements = 16 / int(sizeof(T));  // of a 16-byte piece

// Element `at` as it lies in memory; what it means. Apart, so that loads need not wait for one another.
HOPWELL_DEVICE uint32_t load_bits(const void* data, Float type, int64_t at) {
  return type == Float::fp32 ? static_cast<const uint32_t*>(data)[at] : static_cast<const uint16_t*>(data)[at];
}
HOPWELL_DEVICE float meaning(uint32_t bits, Float type) {
  return type == Float::fp32   ? arch::bit_cast<float>(bits)
         : type == Float::fp16 ? arch::to_float(fp16{uint16_t(bits)})
                               : arch::bit_cast<float>(bits << 16);
}

// Eight elements as they lie in memory, and what they mean. In whole pieces of 16 bytes if they lie so.
struct Raw8 {
  arch::Words4 half[2];  // 16-bit types have only the first one
};
HOPWELL_DEVICE Raw8 load_8(const void* data, Float type, int64_t at, bool in_pieces) {
  Raw8 raw{};
  const char* from = static_cast<const char*>(data) + at * (type == Float::fp32 ? 4 : 2);
  if (in_pieces) {
    raw.half[0] = *reinterpret_cast<const arch::Words4*>(from);
    if (type == Float::fp32) raw.half[1] = *reinterpret_cast<const arch::Words4*>(from + 16);
    return raw;
  }
  HOPWELL_UNROLL
  for (int e = 0; e < 8; ++e) {
    if (type == Float::fp32)
      raw.half[e / 4].w[e % 4] = load_bits(from, type, e);
    else
      raw.half[0].w[e / 2] |= load_bits(from, type, e) << 16 * (e % 2);
  }
  return raw;
}
HOPWELL_DEVICE void add_8(const Raw8& raw, Float type, float (&to)[8]) {
  HOPWELL_UNROLL
  for (int e = 0; e < 8; ++e)
    to[e] +=
        meaning(type == Float::fp32 ? raw.half[e / 4].w[e % 4] : raw.half[0].w[e / 2] >> 16 * (e % 2) & 0xffff, type);
}

template <class T>
constexpr Float kFloat = sizeof(T) == 4            ? Float::fp32
                         : std::is_same_v<T, bf16> ? Float::bf16
                                                   : Float::fp16;

template <class T>
HOPWELL_DEVICE void unpack(const arch::Words4& piece, float (&x)[kElements<T>]) {
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = arch::bit_cast<float>(piece.w[i]);
    } else if constexpr (std::is_same_v<T, bf16>) {
      x[2 * i] = arch::bit_cast<float>(piece.w[i] << 16);
      x[2 * i + 1] = arch::bit_cast<float>(piece.w[i] & 0xffff0000);
    } else {
      x[2 * i] = arch::to_float(fp16{uint16_t(piece.w[i])});
      x[2 * i + 1] = arch::to_float(fp16{uint16_t(piece.w[i] >> 16)});
    }
  }
}

// ---- what is visible ------------------------------------------------------------------------------------------------

struct Keys {
  int begin, end;
};

HOPWELL_DEVICE int context_of(const Params& p, int sequence) {
  return larger(0, smaller(p.context_lens[sequence * p.lens_stride], p.max_context));
}
// The keys that query i sees.
HOPWELL_DEVICE Keys keys_of_query(const Params& p, int context, int i) {
  const int position = context - p.q_len + i;
  return {larger(0, position - p.window + 1), smaller(position + 1, p.key_end)};
}
// A range of all keys that any query sees; it begins with a multiple of 16.
HOPWELL_DEVICE Keys keys_of_sequence(const Params& p, int context) {
  const int begin = keys_of_query(p, context, 0).begin / 16 * 16, end = smaller(context, p.key_end);
  return begin < end ? Keys{begin, end} : Keys{0, 0};
}
HOPWELL_DEVICE int units_of(const Params& p, const Keys& keys) { return ceil_div(keys.end - keys.begin, p.unit); }

// The page of a key; −1 if there is none of that number.
HOPWELL_DEVICE int page_of(const Params& p, int sequence, int key) {
  const int page = p.block_tables[sequence * p.tables_stride + key / p.block];
  return unsigned(page) < unsigned(p.blocks) ? page : -1;
}

// The bias of a key: which element of its row; −1 if there is none.
HOPWELL_DEVICE int column_of(const Params& p, int position, int key) {
  int column = p.bias_kind == Relative::key ? key : position - key;
  if (p.clamp) column = smaller(column, p.extent - 1);
  return column < p.extent ? column : -1;
}

template <class T>
HOPWELL_DEVICE const T* element_of(const void* cache, const CacheStrides& at, int page, int head, int slot, int e) {
  const int groups = e / int(at.group);
  return static_cast<const T*>(cache) + page * at.page + head * at.head + slot * at.slot + groups * at.group_stride +
         (e - groups * int(at.group));
}

// ---- shares ---------------------------------------------------------------------------------------------------------

struct Plan {
  int64_t units,
      share;  // of all CTAs, of one; the first `extra` CTAs have one more, and some of the last may have none
  int extra;
  HOPWELL_DEVICE int64_t first_unit(int cta) const {
    const int64_t unit = cta * share + smaller(cta, extra);
    return unit < units ? unit : units;
  }
  HOPWELL_DEVICE int cta_of(int64_t unit) const {
    const int64_t longer = extra * (share + 1);
    return int(unit < longer ? quotient(unit, share + 1) : extra + quotient(unit - longer, share));
  }
};

// A range of units: of a CTA, of a warp.
struct Share {
  int64_t begin, end;
  HOPWELL_DEVICE Share of_warp(int warp, const Divisor& warps) const {
    const int count = int(end - begin), each = count / warps, more = count - each * warps;
    const int64_t first = begin + warp * each + smaller(warp, more);
    return {first, first + each + (warp < more ? 1 : 0)};
  }
};

struct PlanStorage {
  int sum_of_warp[kMaxWarps];
  struct {
    int sequence, before;
  } first[kMaxWarps];  // of a warp's first segment
};

// What one warp has of a strip.
struct Segment {
  int sequence, before;  // units of a strip in all sequences before it
  int units, strip;      // units of a strip of this sequence; which of its strips
  int first, count;      // units of the strip
  int context;
  Keys keys;  // of the segment
  HOPWELL_DEVICE bool whole() const { return count == units; }
  HOPWELL_DEVICE bool ends() const { return first + count == units; }
  HOPWELL_DEVICE int64_t strip_begin(const Params& p) const {
    return int64_t{before} * p.strips + int64_t{strip} * units;
  }
  // The rest of the strip from `unit` on, as far as `end`.
  HOPWELL_DEVICE void place(const Params& p, int64_t unit, int64_t end) {
    const Keys all = keys_of_sequence(p, context);
    const int offset = int(unit - int64_t{before} * p.strips);
    strip = offset / units, first = offset - strip * units;
    count = end - unit < units - first ? int(end - unit) : units - first;
    keys.begin = all.begin + first * p.unit;
    keys.end = smaller(all.end, keys.begin + count * p.unit);
  }
  // The one that follows, if the share goes on until `end`.
  HOPWELL_DEVICE bool advance(const Params& p, int64_t end) {
    const int64_t unit = strip_begin(p) + first + count;
    if (unit >= end) return false;
    while (unit >= (int64_t{before} + units) * p.strips) {
      before += units, context = context_of(p, ++sequence);
      units = units_of(p, keys_of_sequence(p, context));
    }
    place(p, unit, end);
    return true;
  }
};

// Equal shares, but at least a unit for each warp of a CTA as long as there are any.
HOPWELL_DEVICE Plan plan_of(const Params& p, int64_t units) {
  Plan plan{units, p.warps, 0};
  if (units < int64_t{p.ctas} * p.warps) return plan;
  plan.share = units >> 31 ? units / p.ctas.value : int(units) / p.ctas;
  plan.extra = int(units - plan.share * p.ctas);
  return plan;
}

// The plan, the share of this warp, and the segment that it begins with if there is one. A small batch, of up to two
// sequences a lane: each warp finds out for itself, and nothing is read twice.
HOPWELL_DEVICE void find_share_alone(const Params& p, Plan& plan, Share& share, Segment& segment) {
  const int lane = arch::lane_index(), first = lane * p.part;
  int context[2], units[2];
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) context[i] = i < p.part && first + i < p.b ? context_of(p, first + i) : 0;
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) units[i] = units_of(p, keys_of_sequence(p, context[i]));
  int end = units[0] + units[1];  // of the lane's sequences, in units of a strip
  HOPWELL_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const int other = arch::shuffle(end, (lane - step) & 31);
    end += lane >= step ? other : 0;
  }
  plan = plan_of(p, int64_t{arch::shuffle(end, 31)} * p.strips);
  if (p.whole > 0 && plan.share > p.warps && plan.share <= kMostUnits) {
    const int each = arch::shuffle(units[0], 0);  // units of a strip, if all have as many
    const bool differ = (first < p.b && units[0] != each) || (first + 1 < p.b && p.part > 1 && units[1] != each);
    if (arch::ballot(differ) == 0) plan.share = p.whole * each, plan.extra = 0;
  }
  const int cta = arch::block_index();
  share = Share{plan.first_unit(cta), plan.first_unit(cta + 1)}.of_warp(arch::warp_index(), p.warps);
  if (share.begin >= share.end) return;
  const int owner = int(arch::bfind(arch::ballot(share.begin >= int64_t{end} * p.strips)) + 1);
  const bool second = share.begin >= int64_t{end - units[1]} * p.strips;
  segment.sequence = arch::shuffle(first + (second ? 1 : 0), owner);
  segment.before = arch::shuffle(end - units[1] - (second ? 0 : units[0]), owner);
  segment.context = arch::shuffle(second ? context[1] : context[0], owner);
  segment.units = arch::shuffle(second ? units[1] : units[0], owner);
  segment.place(p, share.begin, share.end);
}

// The same for a large batch: the threads of the CTA add up `part` sequences each.
HOPWELL_DEVICE void find_share_together(const Params& p, PlanStorage& s, Plan& plan, Share& share, Segment& segment) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  const int first = arch::thread_index() * p.part, end = smaller(p.b, first + p.part);
  int units = 0;
  for (int n = first; n < end; ++n) units += units_of(p, keys_of_sequence(p, context_of(p, n)));
  int sum = units;
  HOPWELL_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const int other = arch::shuffle(sum, (lane - step) & 31);
    sum += lane >= step ? other : 0;
  }
  int before = sum - units, total = 0;
  if (lane == 31) s.sum_of_warp[warp] = sum;
  arch::syncthreads();  // kept: sums that are not there yet make shares outside of the tensors
  HOPWELL_NO_UNROLL
  for (int w = 0; w < p.warps; ++w) {
    before += w < warp ? s.sum_of_warp[w] : 0;
    total += s.sum_of_warp[w];
  }
  plan = plan_of(p, int64_t{total} * p.strips);
  const int cta = arch::block_index();
  const Share of_cta{plan.first_unit(cta), plan.first_unit(cta + 1)};
  HOPWELL_NO_UNROLL
  for (int w = 0; w < p.warps; ++w) {
    const int64_t unit = of_cta.of_warp(w, p.warps).begin;
    if (unit < int64_t{before} * p.strips || unit >= int64_t{before + units} * p.strips) continue;
    int n = first, to = before;
    HOPWELL_NO_UNROLL
    for (;; ++n) {
      const int have = p.part == 1 ? units : units_of(p, keys_of_sequence(p, context_of(p, n)));
      if (unit < int64_t{to + have} * p.strips) break;
      to += have;
    }
    s.first[w] = {n, to};
  }
  arch::syncthreads();  // kept: a sequence that is not there yet is outside of the tensors
  share = of_cta.of_warp(warp, p.warps);
  if (share.begin == share.end) return;
  segment.sequence = s.first[warp].sequence, segment.before = s.first[warp].before;
  segment.context = context_of(p, segment.sequence);
  segment.units = units_of(p, keys_of_sequence(p, segment.context));
  segment.place(p, share.begin, share.end);
}

HOPWELL_DEVICE void find_share(const Params& p, PlanStorage& s, Plan& plan, Share& share, Segment& segment) {
  if (p.alone) return find_share_alone(p, plan, share, segment);
  find_share_together(p, s, plan, share, segment);
}

// ---- results --------------------------------------------------------------------------------------------------------

struct Vector {
  int head, query;
  bool exists;  // the last pass may have fewer
};
HOPWELL_DEVICE Vector vector_of(const Params& p, int strip, int v) {
  const int kv_head = strip / p.passes * p.heads + v / p.queries;
  const int of_group = strip % p.passes * p.queries + v % p.queries, g = of_group / p.q_len;
  return {kv_head * p.group + g, of_group - g * p.q_len, g < p.group};
}

HOPWELL_DEVICE float finite_or_zero(float maximum) { return maximum == -INFINITY ? 0 : maximum; }

// Element e of a vector's result, from its sum of exp2 and its sum of exp2 · v.
template <class T>
HOPWELL_DEVICE void store_result(const Params& p, int sequence, const Vector& to, int e, float maximum, float sum,
                                 float value) {
  if (!to.exists) return;
  T* out = static_cast<T*>(p.out) + sequence * p.out_stride[0] + to.query * p.out_stride[1];
  from_fp32(sum == 0 ? 0 : value * (1 / sum), out + to.head * p.out_stride[2] + e);
  if (e == 0 && p.lse)
    p.lse[sequence * p.lse_stride[0] + to.query * p.lse_stride[1] + to.head * p.lse_stride[2]] =
        sum == 0 ? -INFINITY : (maximum + arch::log2_approx(sum)) * kLn2;
}

}  // namespace
}  // namespace hopwell::ops::paged_attention
