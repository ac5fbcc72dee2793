// sparse_mla_backward on Hopper: the tile of the main kernel. Where things lie in shared memory, the gather of keys,
// the products, and how a panel of dKV is added to global memory. Roles, timeline and budget: sm90_single.hpp and sm90_pair.hpp.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/sparse_mla_backward/sm90_fixed.hpp"
#include "tile/gpu/panel.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

using arch::Major;

struct Config {
  static constexpr int kHeads = 64, kKeys = 64, kDv = 512, kThreads = 384, kWarps = kThreads / 32;
  static constexpr int kPanelsV = kDv / 64;
  static constexpr int kScoreRegisters = 208, kScatterRegisters = 88;
  static constexpr int kPanelsBeside = 2;  // of dKV, that each score warpgroup takes while its keys come
  static constexpr float kLargestExponent = 64;
};
static_assert(2 * Config::kScoreRegisters + Config::kScatterRegisters <= 65536 / 128);

struct Panel {
  alignas(1024) bf16 x[64][64];
};

template <int kDqk>
struct SharedStorage {
  static constexpr int kPanels = kDqk / 64;
  Panel q[kPanels], d_out[Config::kPanelsV], keys[kPanels], p, ds;
  float shift[Config::kHeads];  // log2(e) lse', or log2(e) lse with attn
  float kept[Config::kHeads];   // exp(lse − lse')
  float delta[Config::kHeads];  // times sm_scale
  float head_sums[4][Config::kKeys];
  int key[2][Config::kKeys];  // of this step and the next; -1 where there is none
  int last_valid[Config::kWarps];
};
static_assert(sizeof(SharedStorage<576>) <= arch::sm90::kMaxSharedBytes);

enum NamedBarrier : int { kKeysFull = 1, kPFull, kDsFull, kPdsFull, kPEmpty, kDsEmpty, kHalf0, kHalf1 };

struct Params {
  tile::SelectionParams selection;
  const bf16 *q, *kv;       // [s_q, h_q, d_qk], [s_kv, d_qk]
  const bf16 *out, *d_out;  // [s_q, h_q, 512]
  const float *lse, *sink;  // [s_q, h_q], [h_q] or null
  bf16* dq;                 // [s_q, h_q, d_qk], or null
  float* dkv;               // [s_kv, d_qk], added to, columns at sum_position; or null
  int64_t* fixed_dkv;       // [s_kv, d_qk / 2], the same in pairs of fixed point, columns at word_of; or null
  const float* scale;       // [s_kv], what is 1 in the fixed point of a row
  float* attn;              // [s_q, topk], added to, in the selection's order; or null
  uint32_t* progress;       // steps that all CTAs have made; or null: they are not kept in step
  float* sink_parts;        // [s_q, h_q]: what each query adds to d_sink; or null
  int64_t q_stride_s, q_stride_h, out_stride_s, out_stride_h, d_out_stride_s, d_out_stride_h;  // elements
  int64_t lse_stride_s, lse_stride_h, sink_stride, dq_stride_s, dq_stride_h, attn_stride;
  int kv_stride, dkv_stride;
  int h_q, first_head, head_blocks;  // first_head: of this launch
  bool prefetch;                     // rows of sums, to L2
  int wave, slack;                   // CTAs that run at the same time, and how far they may be apart: see keep_step
  int whole, slices, slice_entries;  // see place_of_block
  float* dq_slices;                  // [pieces in slices, slices, heads of a piece, d_qk]
  float sm_scale, scale_log2;        // and sm_scale · log2(e)
};

// A piece of work is a query and a block of its heads. What is left for the last wave would leave most of the device idle,
// so each of these pieces is cut into slices of its keys; sum_dq adds up what they give of dQ.
struct Place {
  int query, first_head;
  int slice;        // of all that are not whole; -1: a whole piece
  int first_entry;  // of the selection
};
// Head blocks of one query are neighbours, so that they share its keys in L2.
HOPWELL_DEVICE Place place_of_block(const Params& p, int block, int heads) {
  const int slice = block - p.whole, piece = slice < 0 ? block : p.whole + slice / p.slices;
  return {piece / p.head_blocks, p.first_head + piece % p.head_blocks * heads, slice < 0 ? -1 : slice,
          slice < 0 ? 0 : slice % p.slices * p.slice_entries};
}
HOPWELL_DEVICE Place place_of(const Params& p) { return place_of_block(p, arch::block_index(), Config::kHeads); }

HOPWELL_DEVICE Entries entries_of(const Params& p, const Place& place) {
  Entries entries = tile::entries_of(p.selection, place.query);
  if (place.slice < 0) return entries;
  const int left = entries.length - place.first_entry, some = left < 0 ? 0 : left;
  return {entries.row + place.first_entry, some < p.slice_entries ? some : p.slice_entries, entries.visible};
}

#if HOPWELL_HAS_SM90A

// Byte offset of 16-byte chunk 0 to 7 of a row in a panel, and in the middle panel of the keys: d_qk 576 has nine
// panels, the halves of dQ four and a half, and an operand must begin where its swizzle does. The middle panel is two
// narrow ones; with tile::swizzled_narrow other machine code comes out, which has not been timed.
HOPWELL_DEVICE uint32_t swizzled_middle(int row, int chunk) {
  return uint32_t(chunk / 4 * 4096 + row * 64 + ((chunk % 4 ^ (row >> 1 & 3)) << 4));
}
template <int kDqk>
constexpr bool kHasMiddle = kDqk / 64 % 2 == 1;

// ---- keys

// The keys of four rows: thread t of a warpgroup copies 16-byte chunk t % 8 of rows t / 8 + 16 m.
HOPWELL_DEVICE void load_keys(int (&keys)[4], const Entries& entries, int step, int t) {
  HOPWELL_UNROLL
  for (int m = 0; m < 4; ++m) keys[m] = entries.key(step * Config::kKeys + t / 8 + 16 * m);
}

// Starts the copies of one half of the columns of 64 keys: four panels, and half of the one in the middle if there is.
// Half 0 leaves the keys for those who add.
template <int kDqk, int kHalf>
HOPWELL_DEVICE void gather(const Params& p, SharedStorage<kDqk>& s, const int (&keys)[4], int step, int t) {
  constexpr int kPanels = kDqk / 64, kFirst = kHalf == 0 ? 0 : kPanels - 4;
  const int chunk = t & 7;
  HOPWELL_UNROLL
  for (int m = 0; m < 4 && kHalf == 0; ++m)
    if (chunk == m) s.key[step % 2][t / 8 + 16 * m] = keys[m];
  HOPWELL_UNROLL
  for (int m = 0; m < 4; ++m) {
    const int bytes = keys[m] < 0 ? 0 : 16;
    const bf16* source = p.kv + (keys[m] < 0 ? 0 : int64_t{keys[m]} * p.kv_stride) + 8 * chunk;
    const int row = t / 8 + 16 * m;
    const uint32_t destination = arch::shared_address(s.keys);
    HOPWELL_UNROLL
    for (int panel = kFirst; panel < kFirst + 4; ++panel)
      arch::cp_async(destination + uint32_t(panel) * tile::kPanelBytes + tile::swizzled(row, chunk),
                     source + 64 * panel, bytes);
    if (kHasMiddle<kDqk> && chunk / 4 == kHalf)
      arch::cp_async(destination + 4 * tile::kPanelBytes + swizzled_middle(row, chunk), source + 64 * 4, bytes);
  }
}

// Brings the same half of the rows of sums to L2 before they are added to. Not within `gather`: the test alone costs the
// copies a few per cent.
template <int kDqk, int kHalf>
HOPWELL_DEVICE void prefetch_sums(const Params& p, const int (&keys)[4], int t) {
  constexpr int kLines = kDqk / 64;  // of 128 bytes
  HOPWELL_UNROLL
  for (int m = 0; m < 4; ++m) {
    if (keys[m] < 0) continue;
    const void* row = p.dkv ? static_cast<const void*>(p.dkv + int64_t{keys[m]} * p.dkv_stride)
                            : static_cast<const void*>(p.fixed_dkv + int64_t{keys[m]} * (kDqk / 2));
    for (int line = t & 7; line < kLines; line += 8)
      arch::prefetch_l2(static_cast<const char*>(row) + 128 * (kHalf * kLines + line));
  }
}

// ---- products

// acc [64 heads][64 keys] = A · keysᵀ over kPanels panels.
template <int kPanels, bool kMiddle>
HOPWELL_DEVICE void multiply_scores(float (&acc)[32], const Panel* a, const Panel* keys) {
  const uint64_t left = arch::at_address(tile::kRowsAlongK, arch::shared_address(a)),
                 right = arch::at_address(tile::kRowsAlongK, arch::shared_address(keys)),
                 middle = arch::at_address(tile::kNarrowRowsAlongK, arch::shared_address(&keys[4]));
  HOPWELL_UNROLL
  for (int step = 0; step < 4 * kPanels; ++step) {
    const uint64_t offset = tile::columns_on(step);
    if (kMiddle && step / 4 == 4)
      arch::wgmma_ss(acc, left + offset, middle + uint64_t(step % 4 / 2 * 256 + step % 2 * 2), true);
    else
      arch::wgmma_ss(acc, left + offset, right + offset, step > 0);
  }
}

// dq [64 heads][half of d_qk] += dS · keys: the columns that `gather` copies for this half.
template <int kDqk, int kHalf>
HOPWELL_DEVICE void multiply_dq(float (&dq)[128], float (&middle)[16], const SharedStorage<kDqk>& s) {
  constexpr int kPanels = kDqk / 64;
  constexpr arch::WgmmaOptions kOptions{.b_major = Major::mn};
  const uint64_t ds = arch::at_address(tile::kRowsAlongK, arch::shared_address(&s.ds)),
                 keys =
                     arch::at_address(tile::kRowsAcrossK, arch::shared_address(&s.keys[kHalf == 0 ? 0 : kPanels - 4])),
                 between = arch::at_address(tile::kNarrowRowsAcrossK, arch::shared_address(&s.keys[4]) + 4096 * kHalf);
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step) {
    arch::wgmma_ss<kOptions>(dq, ds + uint64_t(2 * step), keys + uint64_t(128 * step), true);
    if constexpr (kHasMiddle<kDqk>)
      arch::wgmma_ss<kOptions>(middle, ds + uint64_t(2 * step), between + uint64_t(64 * step), true);
  }
}

// acc [64 keys][64 columns] (+)= aᵀ · b, a [64 heads][64 keys], b [64 heads][a panel]: by address, so that the panel
// may be a run-time number. kHeadSteps: of 16 heads; the others are zeros.
template <int kHeadSteps, int kSize>
HOPWELL_DEVICE void multiply_transposed(float (&acc)[kSize], uint32_t a, uint32_t b, bool accumulate) {
  const uint64_t left = arch::at_address(tile::kRowsAcrossK, a), right = arch::at_address(tile::kRowsAcrossK, b);
  HOPWELL_UNROLL
  for (int step = 0; step < kHeadSteps; ++step)
    arch::wgmma_ss<arch::WgmmaOptions{.a_major = Major::mn, .b_major = Major::mn}>(
        acc, left + uint64_t(128 * step), right + uint64_t(128 * step), accumulate || step > 0);
}

// ---- P and dS

// Chunk offset of the lane's row in P or dS for stmatrix and ldmatrix of 16 × 16 keys from key 8 j on.
HOPWELL_DEVICE uint32_t matrix_offset(int t, int j) { return tile::swizzled(t / 32 * 16 + (t & 15), j + (t >> 4 & 1)); }

// Scores to P in shared memory; with attn, `acc` keeps exp(score − lse).
template <bool kAttn>
HOPWELL_DEVICE void store_p(const Params& p, float (&acc)[32], const float* shift, const float* kept, uint32_t target,
                            int t) {
  const int row = t / 32 * 16 + t % 32 / 4;
  const float shift0 = shift[row], shift1 = shift[row + 8];
  const float kept0 = kAttn ? kept[row] : 1, kept1 = kAttn ? kept[row + 8] : 1;
  HOPWELL_UNROLL
  for (int e = 0; e < 32; ++e) {
    const float x = acc[e] * p.scale_log2 - (e & 2 ? shift1 : shift0);
    acc[e] = arch::exp2_approx(x > Config::kLargestExponent ? Config::kLargestExponent : x);  // a NaN stays
  }
  HOPWELL_UNROLL
  for (int j = 0; j < 8; j += 2) {
    uint32_t packed[4];
    HOPWELL_UNROLL
    for (int m = 0; m < 4; ++m) {
      const float factor = m & 1 ? kept1 : kept0;
      packed[m] = arch::pack_bf16(kAttn ? acc[4 * j + 2 * m] * factor : acc[4 * j + 2 * m],
                                  kAttn ? acc[4 * j + 2 * m + 1] * factor : acc[4 * j + 2 * m + 1]);
    }
    arch::stmatrix(target + matrix_offset(t, j), packed);
  }
}

// dP and P to dS in shared memory.
HOPWELL_DEVICE void store_ds(const Params& p, const float (&acc)[32], const float* delta, uint32_t source,
                             uint32_t target, int t) {
  const int row = t / 32 * 16 + t % 32 / 4;
  const float delta0 = delta[row], delta1 = delta[row + 8];
  HOPWELL_UNROLL
  for (int j = 0; j < 8; j += 2) {
    uint32_t probability[4], ds[4];
    arch::ldmatrix(probability, source + matrix_offset(t, j));
    HOPWELL_UNROLL
    for (int m = 0; m < 4; ++m) {
      const float subtract = m & 1 ? delta1 : delta0;
      const float low = arch::bit_cast<float>(probability[m] << 16),
                  high = arch::bit_cast<float>(probability[m] & 0xffff0000);
      ds[m] = arch::pack_bf16(low * (acc[4 * j + 2 * m] * p.sm_scale - subtract),
                              high * (acc[4 * j + 2 * m + 1] * p.sm_scale - subtract));
    }
    arch::stmatrix(target + matrix_offset(t, j), ds);
  }
}

// ---- adding to dKV

// The accumulators of a lane are pairs of neighbouring columns, eight apart. Sums therefore lie with their columns
// permuted (see sum_position), so that what a lane holds of 16 columns goes out by one instruction as it is.
// Neighbouring quads of lanes only trade 16 columns for 16 first, so that eight lanes share a row: an instruction adds
// full lines of 128 bytes.

// Where a lane adds: four columns of each of four keys. In units of four fp32 or of one 64-bit word from the first row's
// panel on; negative where nothing is added. 32 bits are enough for 2^33 elements: see supports().
template <bool kFixed>
struct Rows {
  int at[4];
  float scale[kFixed ? 4 : 1];
};

template <int kDqk, bool kFixed>
HOPWELL_DEVICE Rows<kFixed> load_rows(const Params& p, const int (&keys)[Config::kKeys], int t) {
  const bool wanted = kFixed || p.dkv;
  const int first = t / 32 * 16 + (t % 32 / 4 & ~1), own = t & 7, stride = kFixed ? kDqk / 2 : p.dkv_stride / 4;
  Rows<kFixed> rows;
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int key = wanted ? keys[first + (i & 1) + 8 * (i >> 1)] : -1;
    rows.at[i] = key < 0 ? -1 : key * stride + own;
    if constexpr (kFixed) rows.scale[i] = key < 0 ? 0 : p.scale[key];
  }
  return rows;
}

// Adds four columns of row i, those of the 32 from `column` on that are this lane's.
template <bool kFixed>
HOPWELL_DEVICE void add_columns(const Params& p, const Rows<kFixed>& rows, int i, int column, const float (&v)[4]) {
  const int at = rows.at[i];
  if constexpr (kFixed) {
    HOPWELL_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      const int64_t word = word_of_pair(arch::round_to_int(v[2 * pair] * rows.scale[i]),
                                        arch::round_to_int(v[2 * pair + 1] * rows.scale[i]));
      if (at >= 0) arch::red_add(p.fixed_dkv + int64_t{at} + column / 2 + 8 * pair, word);
    }
  } else {
    if (at >= 0) arch::red_add_v4(p.dkv + int64_t{at} * 4 + column, v[0], v[1], v[2], v[3]);
  }
}

// Adds a warp's [16 keys][2 kSize columns] from `column` on.
template <bool kFixed, int kSize>
HOPWELL_DEVICE void add_panel(const Params& p, const float (&acc)[kSize], int column, const Rows<kFixed>& rows) {
  const bool odd_quad = arch::thread_index_anew() & 4;
  HOPWELL_UNROLL
  for (int e = 0; e < kSize; e += 16) {  // 32 columns
    HOPWELL_UNROLL
    for (int r = 0; r < 2; ++r) {
      float v[2][4];
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float low = acc[e + i / 2 * 4 + 2 * r + i % 2], high = acc[e + 8 + i / 2 * 4 + 2 * r + i % 2];
        const float theirs = arch::shuffle_xor(odd_quad ? low : high, 4);
        v[0][i] = odd_quad ? theirs : low;
        v[1][i] = odd_quad ? high : theirs;
      }
      add_columns(p, rows, 2 * r, column + 2 * e, v[0]);
      add_columns(p, rows, 2 * r + 1, column + 2 * e, v[1]);
    }
  }
}

#endif

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward
