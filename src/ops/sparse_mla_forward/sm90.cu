// sparse_mla_forward for Hopper, by wgmma.
//
//     out[s,h,:] = Σ_i exp2(score[s,h,i] − m) · kv[indices[s,i], :512] / Σ_i exp2(…)    scores in units of log 2, m: reference
//
// Tile      one query, 64 heads; a step is two tiles of 64 keys, A and B; d_qk 576 or 512. CTAs are persistent, one for each
//           multiprocessor. 128 heads are two pieces of work side by side, which meet in L2.
// Roles     warpgroup 0  low     S of tile A and its softmax; O += P V for columns 0 to 255 of both tiles
//           warpgroup 1  high    the same for tile B and columns 256 to 511
//           warpgroup 2  gather  the rows of Q and of both tiles, by cp.async: 16 rows a warp
// Timeline  low      S_A ▓▓▓▓▓▓│exp│ O += P_A V_A ▓▓▓      ·      O += P_B V_B ▓▓▓│ S_A ▓▓▓▓▓▓│
//           high     ··········S_B ▓▓▓▓▓▓▓▓▓│exp│ O += P_A V_A ▓▓▓ O += P_B V_B ▓▓▓ ·····│ S_B ▓▓▓
//           gather   …B ▓▓▓▓▓          A low ▓▓▓▓▓      A rope, high ▓▓▓▓  B low ▓▓▓▓ B high ▓▓▓▓
// Panels    A tile is copied, multiplied and freed in groups of panels of 64 columns, so that S of the next step follows the copies
//           as they land, and these follow the products with V.
// P         A warpgroup keeps its own P in registers as A fragments; the other's comes by shared memory, in the place of the RoPE
//           panel, which nobody needs after S.
// Softmax   The reference m moves only when a row's maximum passes it by more than 8: then O and the sums are scaled by
//           exp2(m_old − m). P ≤ 2^8, whose bf16 is as exact as that of P ≤ 1. References pass from tile to tile: A, B, A, …
// Budget    shared: Q 73,728 + K 2 × 73,728 + 1,776 = 222,960 B
//           registers: 128 of O + 32 of S + 2 × 16 of P + ~30 (224); gather 56
// Bound     64 keys: 2,176 clocks of the tensor cores; 301 KB through shared memory, 2,350 clocks; the gather 1,990 in L2
#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/sparse_mla_forward/op.hpp"
#include "runtime/launch.hpp"
#include "tile/entries.hpp"
#include "tile/gather.hpp"

namespace hopwell::ops::sparse_mla_forward {
namespace {

using arch::bf16;

struct Config {
  static constexpr int kHeads = 64, kKeys = 64, kThreads = 384, kStages = 2;
  static constexpr int kMathRegisters = 224, kGatherRegisters = 56;
  static constexpr int kPanels = 9, kWarpRows = 16;
  static constexpr int kTurn = 3;     // the group of S_A after which S_B may start: together they would both end late
  static constexpr float kSlack = 8;  // log2 of how far a score may pass the reference
};
// The parts of a tile of keys that are copied, multiplied and freed together, in this order: panels of the low warpgroup's
// output columns, those beyond the output's (which P takes later), those of the high warpgroup.
struct Group {
  int first, last;
};
constexpr int kGroups = 5, kRope = 2;
HOPWELL_HOST_DEVICE constexpr Group group_of(int i) {
  return i < kRope ? Group{2 * i, 2 * i + 2} : i == kRope ? Group{8, 9} : Group{2 * i - 2, 2 * i};
}
enum class Warpgroup { low, high, gather };

template <int kDqk>
struct SharedStorage {
  alignas(1024) unsigned char q[Config::kHeads * kDqk * 2];
  alignas(1024) unsigned char keys[Config::kStages][Config::kPanels * tile::kPanelBytes];
  float reference[Config::kStages][Config::kHeads];                                  // of this tile's P
  float sum[Config::kStages][Config::kHeads], max[Config::kStages][Config::kHeads];  // in the end
  alignas(16) uint32_t valid[Config::kStages][4];  // a bit for every row of a gather warp
  arch::mbarrier q_empty, keys_full[Config::kStages][kGroups], keys_empty[Config::kStages][kGroups];
  arch::mbarrier p_full[Config::kStages], reference_full, sums_full, turn;
};
static_assert(sizeof(SharedStorage<576>) <= arch::sm90::kMaxSharedBytes);

struct Params {
  tile::SelectionParams selection;
  const bf16 *q, *kv;                                                                  // [s_q, h_q, d_qk], [s_kv, d_qk]
  const float* attn_sink;                                                              // [h_q], or null
  bf16* out;                                                                           // [s_q, h_q, 512]
  float *max_logits, *lse;                                                             // [s_q, h_q], or null
  int64_t q_stride_s, q_stride_h, kv_stride, sink_stride, out_stride_s, out_stride_h;  // elements
  int64_t max_stride_s, max_stride_h, lse_stride_s, lse_stride_h;
  int64_t pieces;  // of work: queries × blocks of 64 heads
  int h_q, head_blocks;
  bool aligned;      // rows of q and kv, to 16 bytes
  bool out_aligned;  // rows of out, to 16 bytes
  float scale_log2;  // sm_scale · log2(e)
};

// A piece of work: a query's block of heads. At least one tile of keys, so that there always is a result.
struct Piece {
  int query, first_head, steps;
  tile::Entries entries;
};

HOPWELL_DEVICE Piece piece_of(const Params& p, int64_t number) {
  const int query = int(number / p.head_blocks);
  const tile::Entries entries = tile::entries_of(p.selection, query);
  const int steps = (entries.length + 2 * Config::kKeys - 1) / (2 * Config::kKeys);
  return {query, int(number % p.head_blocks) * Config::kHeads, steps > 0 ? steps : 1, entries};
}

#if HOPWELL_HAS_SM90A

// ---- gather ---------------------------------------------------------------------------------------------------------

HOPWELL_DEVICE void arrive_warp(arch::mbarrier& barrier) {
  arch::syncwarp();
  if (arch::lane_index() == 0) arch::mbarrier_arrive(barrier);
}

// Where a matrix' row begins: in chunks of 16 bytes if all rows are aligned to them, else the row's number; kNone: zeros.
constexpr uint32_t kNone = 0xffffffff;
struct Matrix {
  const bf16* data;
  int64_t stride;  // elements
  bool aligned;

  HOPWELL_DEVICE uint32_t offset(int row, unsigned rows) const {
    return unsigned(row) < rows ? uint32_t(row) * (aligned ? uint32_t(stride / 8) : 1) : kNone;
  }
};

// Copies panels `first` to `last` - 1 of a warp's 16 rows, four at a time.
HOPWELL_DEVICE void copy_panels(uint32_t to, const Matrix& matrix, const uint32_t (&offsets)[4], int first, int last) {
  const uint32_t lane = uint32_t(arch::lane_index()), chunk = lane % 8;
  HOPWELL_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    const bool valid = offsets[i] != kNone;
    const uint32_t target = to + tile::swizzled(4 * i + lane / 8, chunk);
    if (matrix.aligned) {
      const bf16* source = matrix.data + (valid ? uint64_t{offsets[i]} + chunk : 0) * 8;
      HOPWELL_UNROLL
      for (int panel = first; panel < last; ++panel)
        arch::cp_async(target + uint32_t(panel) * tile::kPanelBytes, source + panel * 64, valid ? 16 : 0);
    } else {
      HOPWELL_NO_UNROLL
      for (int panel = first; panel < last; ++panel) {
        const bf16* source = matrix.data + (valid ? offsets[i] : 0) * matrix.stride + panel * 64 + int(chunk) * 8;
        arch::Words4 words{};
        HOPWELL_UNROLL
        for (int n = 0; n < 8 && valid; ++n) words.w[n / 2] |= uint32_t{source[n].bits} << 16 * (n % 2);
        arch::store_shared_v4(target + uint32_t(panel) * tile::kPanelBytes, words);
      }
    }
  }
}

// Lets a barrier know when all that this thread has copied so far has come.
HOPWELL_DEVICE void announce(arch::mbarrier& full, bool aligned) {
  if (aligned) {
    arch::cp_async_mbarrier_arrive_noinc(full);
  } else {
    arch::fence_proxy_async();
    arch::mbarrier_arrive(full);
  }
}

// From lanes that hold a row each, `first` and up, to the rows that each lane copies a part of.
HOPWELL_DEVICE void spread(uint32_t offset, int first, uint32_t (&offsets)[4]) {
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) offsets[i] = arch::shuffle(offset, first + 4 * i + arch::lane_index() / 8);
}

// One warp serves 16 rows of every tile. Its lanes hold the keys of both tiles of a step.
template <int kDqk>
HOPWELL_DEVICE void gather(const Params& p, SharedStorage<kDqk>& s, int warp) {
  const int lane = arch::lane_index(), row = warp * Config::kWarpRows + lane % 16,
            entry = lane / 16 * Config::kKeys + row;
  const uint32_t at = uint32_t(warp) * Config::kWarpRows * 128;
  const Matrix keys{p.kv, p.kv_stride, p.aligned};
  uint32_t parity = 1, q_parity = 1, offsets[4];
  Piece piece = piece_of(p, arch::block_index());
  int key = piece.entries.at(entry);
  HOPWELL_NO_UNROLL
  for (int64_t number = arch::block_index(); number < p.pieces; number += arch::grid_size(), q_parity ^= 1) {
    const Matrix q{p.q + piece.query * p.q_stride_s, p.q_stride_h, p.aligned};
    spread(q.offset(piece.first_head + row, unsigned(p.h_q)), 0, offsets);
    arch::mbarrier_wait(s.q_empty, q_parity);
    copy_panels(arch::shared_address(s.q) + at, q, offsets, 0, kDqk / 64);
    int next = entry;
    HOPWELL_NO_UNROLL
    for (int left = piece.steps; left > 0; --left, parity ^= 1) {
      const uint32_t offset = keys.offset(key, piece.entries.visible), valid = arch::ballot(offset != kNone);
      next += 2 * Config::kKeys;
      if (left == 1 && number + arch::grid_size() < p.pieces) {
        piece = piece_of(p, number + arch::grid_size());
        next = entry;
      }
      key = piece.entries.at(next);  // under the waits
      HOPWELL_NO_UNROLL
      for (int stage = 0; stage < Config::kStages; ++stage) {
        spread(offset, 16 * stage, offsets);
        const uint32_t to = arch::shared_address(s.keys[stage]) + at;
        HOPWELL_UNROLL
        for (int i = 0; i < kGroups; ++i) {
          if (i == kRope && kDqk == 512) continue;
          arch::mbarrier_wait(s.keys_empty[stage][i], parity);
          copy_panels(to, keys, offsets, group_of(i).first, group_of(i).last);
          announce(s.keys_full[stage][i], p.aligned);
          if (i == 0 && lane == 0) {
            s.valid[stage][warp] = valid >> 16 * stage & 0xffff;
            arch::mbarrier_arrive(s.keys_full[stage][0]);
          }
        }
      }
    }
  }
  arch::cp_async_wait_all();
}

// ---- math -----------------------------------------------------------------------------------------------------------

// A thread's two rows (heads), lane / 4 and lane / 4 + 8 of its warp's 16: reference and maximum in units of log 2, and the part of the
// sum that its own columns make.
struct Rows {
  float reference[2], max[2], sum[2];
};

// S = Q Kᵀ: 64 heads, 64 keys, as the keys' panels come.
template <int kDqk>
HOPWELL_DEVICE void multiply_scores(SharedStorage<kDqk>& s, int stage, uint32_t parity, float (&scores)[32]) {
  constexpr uint64_t kOperand = arch::wgmma_descriptor({arch::Swizzle::bytes128, 16, 1024});
  const uint64_t a = arch::at_address(kOperand, arch::shared_address(s.q));
  const uint64_t b = arch::at_address(kOperand, arch::shared_address(s.keys[stage]));
  HOPWELL_UNROLL
  for (int i = 0; i < kGroups; ++i) {
    if (i == kRope && kDqk == 512) continue;
    arch::mbarrier_wait(s.keys_full[stage][i], parity);
    arch::fence_proxy_async();
    arch::wgmma_fence();
    HOPWELL_UNROLL
    for (int step = 4 * group_of(i).first; step < 4 * group_of(i).last; ++step) {
      const uint64_t offset = (uint32_t(step / 4) * tile::kPanelBytes + uint32_t(step % 4) * 32) >> 4;
      arch::wgmma_ss(scores, a + offset, b + offset, step > 0);
    }
    if (i == Config::kTurn && stage == 0) arrive_warp(s.turn);
  }
  arch::wgmma_commit();
  arch::wgmma_wait<0>(scores);
}

// Masks the scores and finds the greatest of each row, in log 2. Returns a unit of the scores in log 2.
HOPWELL_DEVICE float row_max(float scale_log2, const uint32_t (&valid)[4], float (&scores)[32], float (&max)[2]) {
  const int column = arch::lane_index() % 4 * 2;
  const uint32_t low = valid[0] | valid[1] << 16, high = valid[2] | valid[3] << 16;
  float unit = scale_log2;
  if ((low & high) != 0xffffffff || !(scale_log2 > 0)) {
    unit = 1;
    HOPWELL_UNROLL
    for (int i = 0; i < 32; ++i) {
      const bool counts = ((i < 16 ? low : high) >> (column + i / 4 % 4 * 8 + i % 2)) & 1;
      scores[i] = counts ? scores[i] * scale_log2 : -INFINITY;
    }
  }
  float part[4] = {scores[0], scores[1], scores[2], scores[3]};
  HOPWELL_UNROLL
  for (int i = 4; i < 32; ++i) part[i % 4] = fmaxf(part[i % 4], scores[i]);
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) {
    max[r] = fmaxf(part[2 * r], part[2 * r + 1]);
    max[r] = fmaxf(max[r], arch::shuffle_xor(max[r], 1));
    max[r] = fmaxf(max[r], arch::shuffle_xor(max[r], 2)) * unit;
  }
  return unit;
}

// Takes over a reference. Returns what O and sums shrink by.
HOPWELL_DEVICE float adopt(Rows& rows, int r, float reference) {
  const float factor = reference == rows.reference[r] ? 1 : arch::exp2_approx(rows.reference[r] - reference);
  rows.reference[r] = reference;
  rows.sum[r] *= factor;
  return factor;
}

// Replaces scores by probabilities.
HOPWELL_DEVICE void exponentiate(float unit, float (&scores)[32], Rows& rows) {
  const float shift[2] = {rows.reference[0] == -INFINITY ? 0 : rows.reference[0],
                          rows.reference[1] == -INFINITY ? 0 : rows.reference[1]};
  float part[4] = {rows.sum[0], 0, rows.sum[1], 0};
  HOPWELL_UNROLL
  for (int i = 0; i < 32; ++i) {
    scores[i] = arch::exp2_approx(fmaf(scores[i], unit, -shift[i / 2 % 2]));
    part[i % 4] += scores[i];
  }
  rows.sum[0] = part[0] + part[1];
  rows.sum[1] = part[2] + part[3];
}

// P as A fragments of the products with V.
struct Probabilities {
  uint32_t fragment[4][4];
};
template <int kDqk>
HOPWELL_DEVICE uint32_t p_address(const SharedStorage<kDqk>& s, int stage, int step) {
  const uint32_t lane = uint32_t(arch::lane_index()), row = uint32_t(arch::warp_index() % 4 * 16) + lane % 16;
  return arch::shared_address(s.keys[stage]) + 8 * tile::kPanelBytes +
         tile::swizzled(row, uint32_t(2 * step) + lane / 16);
}

// Rounds the probabilities, and gives them to the other warpgroup. With a RoPE panel the scores have waited for its place to
// be free; without one nobody has.
template <int kDqk>
HOPWELL_DEVICE void publish(SharedStorage<kDqk>& s, int stage, uint32_t parity, const float (&scores)[32],
                            Probabilities& own) {
  if constexpr (kDqk == 512) arch::mbarrier_wait(s.keys_empty[stage][kRope], parity ^ 1);
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step) {
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i)
      own.fragment[step][i] = arch::pack_bf16(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
    arch::stmatrix(p_address(s, stage, step), own.fragment[step]);
  }
  arrive_warp(s.p_full[stage]);
}

template <int kDqk>
HOPWELL_DEVICE void receive(SharedStorage<kDqk>& s, int stage, uint32_t parity, Probabilities& remote) {
  arch::mbarrier_wait(s.p_full[stage], parity);
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step) arch::ldmatrix(remote.fragment[step], p_address(s, stage, step));
  arrive_warp(s.keys_empty[stage][kRope]);
}

// From scores to probabilities. The reference moves where a row's maximum passes it; the high warpgroup starts from the low
// one's. `factor`: what O shrinks by before this
// tile; `remote_factor`: before tile A, if that is the other's.
template <int kDqk>
HOPWELL_DEVICE void softmax(const Params& p, SharedStorage<kDqk>& s, int self, uint32_t parity, float (&scores)[32],
                            Rows& rows, float (&remote_factor)[2], float (&factor)[2]) {
  const int lane = arch::lane_index(), row = arch::warp_index() % 4 * 16 + lane / 4;
  float max[2];
  const float unit = row_max(p.scale_log2, s.valid[self], scores, max);
  if (self == 1) {
    arch::mbarrier_wait(s.reference_full, parity);
    HOPWELL_UNROLL
    for (int r = 0; r < 2; ++r) remote_factor[r] = adopt(rows, r, s.reference[0][row + 8 * r]);
  }
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) {
    rows.max[r] = fmaxf(rows.max[r], max[r]);
    factor[r] = adopt(rows, r, max[r] > rows.reference[r] + Config::kSlack ? max[r] : rows.reference[r]);
    if (lane % 4 == 0) s.reference[self][row + 8 * r] = rows.reference[r];
  }
  if (self == 0) arrive_warp(s.reference_full);
  exponentiate(unit, scores, rows);
}

// What both warpgroups need in the end: sums of both. The low one writes max_logits and lse. Returns the scale of O.
template <int kDqk>
HOPWELL_DEVICE void finish_rows(const Params& p, SharedStorage<kDqk>& s, int self, const Piece& piece, uint32_t parity,
                                const Rows& rows, float (&scale)[2]) {
  constexpr float kLn2 = 0.693147180559945f, kLog2E = 1.44269504088896f;
  const int lane = arch::lane_index(), first = arch::warp_index() % 4 * 16 + lane / 4;
  float sum[2];
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) {
    sum[r] = rows.sum[r];
    sum[r] += arch::shuffle_xor(sum[r], 1);
    sum[r] += arch::shuffle_xor(sum[r], 2);
    if (lane % 4 == 0) s.sum[self][first + 8 * r] = sum[r], s.max[self][first + 8 * r] = rows.max[r];
  }
  arrive_warp(s.sums_full);
  arch::mbarrier_wait(s.sums_full, parity);
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = first + 8 * r, head = piece.first_head + row;
    const float total = s.sum[0][row] + s.sum[1][row], both = fmaxf(s.max[0][row], s.max[1][row]);
    const float lse = total == 0 ? INFINITY : (rows.reference[r] + arch::log2_approx(total)) * kLn2;
    const float max = total != total && both != INFINITY ? total : both;  // fmaxf lost the NaN
    scale[r] = total == 0 ? 0 : 1 / total;
    if (p.attn_sink && total != 0 && head < p.h_q)
      scale[r] /= 1 + arch::exp2_approx((p.attn_sink[head * p.sink_stride] - lse) * kLog2E);
    const bool writes = self == 0 && lane % 4 == 0 && head < p.h_q;
    if (writes && p.max_logits) p.max_logits[piece.query * p.max_stride_s + head * p.max_stride_h] = max * kLn2;
    if (writes && p.lse) p.lse[piece.query * p.lse_stride_s + head * p.lse_stride_h] = lse;
  }
}

// ---- value ----------------------------------------------------------------------------------------------------------

// O = O · factor + P V: 64 heads, 64 keys, this warpgroup's 256 columns. Each group of panels is freed as it is done with.
template <int kDqk>
HOPWELL_DEVICE void multiply_values(SharedStorage<kDqk>& s, int self, int stage, const Probabilities& probabilities,
                                    const float (&factor)[2], float (&out)[2][64], bool first) {
  constexpr arch::WgmmaOptions kOptions{.b_major = arch::Major::mn};
  constexpr uint64_t kOperand = arch::wgmma_descriptor({arch::Swizzle::bytes128, tile::kPanelBytes, 1024});
  const uint64_t v =
      arch::at_address(kOperand, arch::shared_address(s.keys[stage]) + uint32_t(self) * 4 * tile::kPanelBytes);
  if (!first && arch::ballot(factor[0] != 1 || factor[1] != 1) != 0) {
    HOPWELL_UNROLL
    for (int i = 0; i < 128; ++i) out[i / 64][i % 64] *= factor[i / 2 % 2];
  }
  const int first_group = self == 0 ? 0 : kRope + 1;
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int part = 0; part < 2; ++part) {
    HOPWELL_UNROLL
    for (int step = 0; step < 4; ++step) {
      const uint64_t offset = (uint32_t(step) * 16 * 128 + uint32_t(part) * 2 * tile::kPanelBytes) >> 4;
      arch::wgmma_rs<kOptions>(out[part], probabilities.fragment[step], v + offset, !first || step > 0);
    }
    arch::wgmma_commit();
  }
  arch::wgmma_wait<1>(out[0]);
  arrive_warp(s.keys_empty[stage][first_group]);
  arch::wgmma_wait<0>(out[1]);
  arrive_warp(s.keys_empty[stage][first_group + 1]);
}

// Transposes a quad's 4 × 4 words: lane l gets what was word l of each lane.
HOPWELL_DEVICE void transpose_quad(uint32_t (&w)[4]) {
  const int lane = arch::lane_index();
  HOPWELL_UNROLL
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = lane & bit;
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t other = arch::shuffle_xor(upper ? w[i] : w[i + bit], bit);
      w[i] = upper ? other : w[i];
      w[i + bit] = upper ? w[i + bit] : other;
    }
  }
}

// Four blocks of 8 columns of a row, n and up: as bf16 pairs, of which the quad's lane l has the l-th of each block.
HOPWELL_DEVICE void pack_blocks(const float (&out)[2][64], int n, int r, float scale, uint32_t (&words)[4]) {
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float* sums = &out[n / 16][(n + i) % 16 * 4 + 2 * r];
    words[i] = scale == 0 ? 0 : arch::pack_bf16(sums[0] * scale, sums[1] * scale);
  }
}

// Rows of any alignment apart, so that the other code is short: it runs once a piece, straight from memory.
HOPWELL_DEVICE void store_out(const Params& p, const Piece& piece, int column, const float (&out)[2][64],
                              const float (&scale)[2]) {
  const int lane = arch::lane_index(), first = piece.first_head + arch::warp_index() % 4 * 16 + lane / 4;
  bf16* const target = p.out + piece.query * p.out_stride_s + first * p.out_stride_h + column;
  uint32_t words[4];
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) {
    bf16* row = target + 8 * r * p.out_stride_h;
    const bool inside = first + 8 * r < p.h_q;
    if (p.out_aligned) {
      HOPWELL_UNROLL
      for (int n = 0; n < 32; n += 4) {
        pack_blocks(out, n, r, scale[r], words);
        transpose_quad(words);
        if (inside) arch::store_streaming(row + 8 * n + lane % 4 * 8, {words[0], words[1], words[2], words[3]});
      }
    } else {
      HOPWELL_UNROLL
      for (int n = 0; n < 32; n += 4) {
        pack_blocks(out, n, r, scale[r], words);
        if (!inside) continue;
        HOPWELL_UNROLL
        for (int i = 0; i < 8; ++i)
          row[8 * n + i / 2 * 8 + lane % 4 * 2 + i % 2].bits = uint16_t(words[i / 2] >> 16 * (i % 2));
      }
    }
  }
}

// Warpgroup `self` has tile `self` of every step and columns 256 · self and up. O takes the tiles in order. Both run the same
// instructions, so that they share the instruction cache.
template <int kDqk>
HOPWELL_DEVICE void math(const Params& p, SharedStorage<kDqk>& s, int self) {
  const int row = arch::warp_index() % 4 * 16 + arch::lane_index() / 4;
  uint32_t parity = 0, piece_parity = 0;
  HOPWELL_NO_UNROLL
  for (int64_t number = arch::block_index(); number < p.pieces; number += arch::grid_size(), piece_parity ^= 1) {
    const Piece piece = piece_of(p, number);
    Rows rows{{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}, {0, 0}};
    float out[2][64];
    HOPWELL_NO_UNROLL
    for (int i = 0; i < piece.steps; ++i, parity ^= 1) {
      float scores[32], factor[2], remote_factor[2];
      Probabilities own;
      if (self == 1) arch::mbarrier_wait(s.turn, parity);  // kept: order alone, for speed
      multiply_scores(s, self, parity, scores);
      if (i == piece.steps - 1) arrive_warp(s.q_empty);
      softmax(p, s, self, parity, scores, rows, remote_factor, factor);
      publish(s, self, parity, scores, own);
      HOPWELL_NO_UNROLL
      for (int stage = 0; stage < Config::kStages; ++stage) {
        Probabilities probabilities = own;
        float shrink[2] = {factor[0], factor[1]};
        if (stage != self) {
          receive(s, stage, parity, probabilities);
          HOPWELL_UNROLL
          for (int r = 0; r < 2; ++r)
            shrink[r] = self == 1 ? remote_factor[r] : adopt(rows, r, s.reference[1][row + 8 * r]);
        }
        multiply_values(s, self, stage, probabilities, shrink, out, i == 0 && stage == 0);
      }
    }
    float scale[2];
    finish_rows(p, s, self, piece, piece_parity, rows, scale);
    store_out(p, piece, 256 * self, out, scale);
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <int kDqk>
HOPWELL_DEVICE void initialise(SharedStorage<kDqk>& s) {
  constexpr uint32_t kWarps = 4, kGatherThreads = 128;
  arch::mbarrier_init(s.q_empty, 2 * kWarps);
  for (int stage = 0; stage < Config::kStages; ++stage) {
    for (int i = 0; i < kGroups; ++i) {
      arch::mbarrier_init(s.keys_full[stage][i], kGatherThreads + (i == 0 ? kWarps : 0));
      arch::mbarrier_init(s.keys_empty[stage][i], kWarps);
    }
    arch::mbarrier_init(s.p_full[stage], kWarps);
  }
  arch::mbarrier_init(s.reference_full, kWarps);
  arch::mbarrier_init(s.sums_full, 2 * kWarps);
  arch::mbarrier_init(s.turn, kWarps);
  arch::fence_mbarrier_init();
}

#endif

template <int kDqk>
__global__ void __launch_bounds__(Config::kThreads, 1) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<SharedStorage<kDqk>>();
  if (arch::thread_index() == 0) initialise(s);
  arch::syncthreads();
  const auto role = Warpgroup(arch::warpgroup_index());
  if (role == Warpgroup::gather) {
    arch::setmaxnreg_dec<Config::kGatherRegisters>();
    gather(p, s, arch::warp_index() % 4);
  } else {
    arch::setmaxnreg_inc<Config::kMathRegisters>();
    math(p, s, role == Warpgroup::low ? 0 : 1);
  }
#endif
}

runtime::Support supports(const Problem& p) {
  if (p.q.dtype != DType::kBFloat16) return runtime::Support::no("q and kv must be bfloat16");
  if (p.d_qk != 576 && p.d_qk != 512) return runtime::Support::no("d_qk must be 576 or 512");
  if (p.d_v != 512) return runtime::Support::no("d_v must be 512");
  constexpr std::int64_t kLimit = (std::int64_t{1} << 31) - 1024;
  if (p.s_q >= kLimit || p.s_kv >= kLimit || p.topk >= kLimit || p.h_q >= kLimit)
    return runtime::Support::no("s_q, s_kv, topk and h_q must be below 2^31 - 1024");
  return {};
}

Params params_of(const Problem& problem) {
  Params p{};
  p.selection = tile::params_of(problem.selection);
  p.q = problem.q.as<const bf16>();
  p.kv = problem.kv.as<const bf16>();
  p.attn_sink = problem.attn_sink.as<const float>();
  p.out = problem.out.as<bf16>();
  p.max_logits = problem.max_logits.as<float>();
  p.lse = problem.lse.as<float>();
  p.q_stride_s = problem.q.stride[0], p.q_stride_h = problem.q.stride[1], p.kv_stride = problem.kv.stride[0];
  p.sink_stride = problem.attn_sink.stride[0];
  p.out_stride_s = problem.out.stride[0], p.out_stride_h = problem.out.stride[1];
  p.max_stride_s = problem.max_logits.stride[0], p.max_stride_h = problem.max_logits.stride[1];
  p.lse_stride_s = problem.lse.stride[0], p.lse_stride_h = problem.lse.stride[1];
  p.h_q = static_cast<int>(problem.h_q);
  p.head_blocks = (p.h_q + Config::kHeads - 1) / Config::kHeads;
  p.pieces = problem.s_q * p.head_blocks;
  p.aligned = tile::can_gather(p.q, problem.h_q, p.q_stride_h) && tile::can_gather(p.kv, problem.s_kv, p.kv_stride) &&
              (problem.s_q <= 1 || p.q_stride_s % 8 == 0);
  p.out_aligned = reinterpret_cast<std::uintptr_t>(p.out) % 16 == 0 && (problem.s_q <= 1 || p.out_stride_s % 8 == 0) &&
                  (problem.h_q <= 1 || p.out_stride_h % 8 == 0);
  p.scale_log2 = problem.sm_scale * 1.44269504088896F;
  return p;
}

template <int kDqk>
void start(const Problem& problem, Stream stream) {
  const Params params = params_of(problem);
  const std::int64_t ctas = runtime::multiprocessors(problem.device.device_id);
  const arch::LaunchShape shape{.grid = {static_cast<std::uint32_t>(params.pieces < ctas ? params.pieces : ctas)},
                                .threads = Config::kThreads,
                                .shared_bytes = sizeof(SharedStorage<kDqk>)};
  runtime::launch("sparse_mla_forward", kernel<kDqk>, shape, stream, params);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0) return;
  problem.d_qk == 576 ? start<576>(problem, stream) : start<512>(problem, stream);
}

const runtime::Registration<Problem> backend{
    {.name = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90", .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward
