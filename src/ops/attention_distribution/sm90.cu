// attention_distribution for Hopper: how much attention each selected key gets from all heads.
//
//     attn[s,i] = Σ_h exp2(score[s,h,i] · scale_log2 − lse[s,h] · log2 e)          0 where entry i does not count
//
// Tile      one query, 64 keys, and 128 heads, 64 for each math warpgroup; or up to 64 heads, and 32 keys for each of them.
//           More heads: 128 at a time, one after another.
// Roles     warpgroups 0, 1   math     queries in registers, as A fragments; scores, exp2, sums over their heads
//           warps 8, 9, 10    gather   one stage of the ring each: rows of keys, and the queries, by cp.async
//           warp 11           store    adds the warps' sums in a fixed order, writes, normalises
//           CTAs are persistent: query blockIdx.x, then every gridDim.x-th.
// Timeline  gather   Q0 │ Q1 │ K0 │ K1 ▓▓ │ K2 ▓▓ │ K3 ▓▓ │ …                    stages 0 1 2 0 1 2 …
//           math 0   ldmatrix Q0 │ S0 ▓▓▓▓│ S1 ▓▓▓▓▓▓▓▓▓▓│          │ S2 ▓▓▓▓│ …   a pair of tiles ends together; the other
//                                         │ exp Σ S0 │   │ exp Σ S1 │              warpgroup's products fill the gap
//           store                                    a0              a1
// Budget    shared: 3 × 64 × 1,152 rows + 4 × 8 × 64 × 4 sums + 112 barriers = 229,488 B
//           registers: math 144 of Q + 2 × 32 scores + ~30 (240), gather and store 24; up to 64 heads 208 and 88
// Bound     128 heads: tensor pipe; 64: the gather, 73,728 B for every 64 keys
// Order     Nothing is added in an order that depends on time: same inputs, same bits.
#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/attention_distribution/op.hpp"
#include "runtime/launch.hpp"
#include "tile/entries.hpp"
#include "tile/gather.hpp"

namespace hopwell::ops::attention_distribution {
namespace {

using arch::bf16;

struct Config {
  static constexpr int kKeys = 64, kHeads = 64, kStages = 3, kSums = 4, kThreads = 384;
  static constexpr int kMathWarps = 8;
  static constexpr int kMathRegisters[2] = {240, 208}, kOtherRegisters[2] = {24, 88};  // pairs of tiles, halves
};
enum WarpRole { kGather = Config::kMathWarps, kStore = kGather + Config::kStages };

template <int kDqk>
struct SharedStorage {
  alignas(1024) unsigned char rows[Config::kStages][Config::kKeys * kDqk * 2];
  float sums[Config::kSums][Config::kMathWarps][Config::kKeys];  // over a warp's 16 heads
  arch::mbarrier rows_full[Config::kStages], rows_empty[Config::kStages];
  arch::mbarrier sums_full[Config::kSums], sums_empty[Config::kSums];
};
static_assert(sizeof(SharedStorage<576>) <= arch::sm90::kMaxSharedBytes);

struct Params {
  tile::SelectionParams selection;
  const bf16 *q, *kv;                         // [s_q, h_q, d_qk], [s_kv, d_qk]
  const float* lse;                           // [s_q, h_q]
  float* attn;                                // [s_q, topk]
  int64_t q_stride_s, q_stride_h, kv_stride;  // elements
  int64_t lse_stride_s, lse_stride_h, attn_stride;
  int s_q, h_q;
  bool aligned;  // rows of q and kv, to 16 bytes
  bool normalize_l1;
  float scale_log2;  // sm_scale · log2(e)
};

// What a CTA does: for each of its queries, passes over the heads; in each, tiles of 64 heads' queries and tiles of
// keys come through the ring. With kHalves one tile of heads serves both math warpgroups. Rows with nothing to do have
// no items.
template <bool kHalves>
struct Schedule {
  static constexpr int kHeadTiles = kHalves ? 1 : 2;
  static HOPWELL_DEVICE int passes(const Params& p) { return (p.h_q + 127) / 128; }
  static HOPWELL_DEVICE int key_tiles(const tile::Entries& e) {
    constexpr int kTogether = kHalves ? 1 : 2;  // without halves, the math warpgroups work on pairs of tiles
    return (e.length + kTogether * Config::kKeys - 1) / (kTogether * Config::kKeys) * kTogether;
  }
};

// ---- gather ---------------------------------------------------------------------------------------------------------

// A tile that goes through the ring.
struct Item {
  int query, pass, index;  // index in the pass: tiles of heads, then tiles of keys
  bool parity;             // of how often its stage was free before
};

// Goes on to the first item at or after this one that exists, and gives its rows. Past the last query there is none.
template <bool kHalves>
HOPWELL_DEVICE tile::RowNumbers settle(const Params& p, Item& item) {
  for (; item.query < p.s_q; item.query += arch::grid_size(), item.pass = 0) {
    const tile::Entries entries = tile::entries_of(p.selection, item.query);
    const int tiles = Schedule<kHalves>::key_tiles(entries);
    for (; tiles > 0 && item.pass < Schedule<kHalves>::passes(p); ++item.pass) {
      const int key_tile = item.index - Schedule<kHalves>::kHeadTiles;
      if (key_tile < 0) {
        const int head = 128 * item.pass + Config::kHeads * item.index + arch::lane_index();
        return {head, head + 32, unsigned(p.h_q)};
      }
      const int i = Config::kKeys * key_tile + arch::lane_index();
      if (key_tile < tiles) return {entries.at(i), entries.at(i + 32), entries.visible};
      item.index = key_tile - tiles;
    }
  }
  return {};
}

// One warp serves one stage: its rows land, are fenced by the lanes that copied them, and only then announced.
template <int kDqk, bool kHalves>
HOPWELL_DEVICE void gather(const Params& p, SharedStorage<kDqk>& s, int stage) {
  Item item{arch::block_index(), 0, stage, 1};
  tile::RowNumbers numbers = settle<kHalves>(p, item);
  for (; item.query < p.s_q; item.parity = !item.parity) {
    arch::mbarrier_wait(s.rows_empty[stage], item.parity);
    const uint32_t to = arch::shared_address(s.rows[stage]);
    const bool heads = item.index < Schedule<kHalves>::kHeadTiles;
    const bf16* q = p.q + item.query * p.q_stride_s;
    if (!p.aligned)
      tile::copy_rows<kDqk>(to, heads ? q : p.kv, heads ? p.q_stride_h : p.kv_stride, numbers);
    else if (heads)
      tile::gather_rows<kDqk>(to, q, p.q_stride_h, numbers);
    else
      tile::gather_rows<kDqk>(to, p.kv, p.kv_stride, numbers);
    item.index += Config::kStages;
    numbers = settle<kHalves>(p, item);  // loads the next indices under these copies
    arch::cp_async_wait_all();
    arch::fence_proxy_async();
    arch::syncwarp();
    if (arch::lane_index() == 0) arch::mbarrier_arrive(s.rows_full[stage]);
  }
}

// ---- math -----------------------------------------------------------------------------------------------------------

// Position in the ring: what all roles count alike.
struct Ring {
  int item = 0, key_tile = 0;
};

template <int kDqk>
HOPWELL_DEVICE uint32_t wait_for_rows(SharedStorage<kDqk>& s, int item) {
  arch::mbarrier_wait(s.rows_full[item % Config::kStages], uint32_t(item / Config::kStages & 1));
  return arch::shared_address(s.rows[item % Config::kStages]);
}

// A stage is free after one arrival of each math warp.
template <int kDqk>
HOPWELL_DEVICE void release_rows(SharedStorage<kDqk>& s, int item) {
  arch::syncwarp();
  if (arch::lane_index() == 0) arch::mbarrier_arrive(s.rows_empty[item % Config::kStages]);
}

// A tile for the other warpgroup alone. It is waited for all the same: a warp that missed a phase of a stage could take
// the one before for the one after it, of the same parity.
template <int kDqk>
HOPWELL_DEVICE void pass_rows(SharedStorage<kDqk>& s, int item) {
  wait_for_rows(s, item);
  release_rows(s, item);
}

// This warp's 16 heads as A fragments, one for every 16 columns.
template <int kDqk>
HOPWELL_DEVICE void load_q(uint32_t tile, uint32_t (&q)[kDqk / 16][4]) {
  const uint32_t lane = uint32_t(arch::lane_index()), row = uint32_t(arch::warp_index() % 4 * 16) + lane % 16;
  HOPWELL_UNROLL
  for (int step = 0; step < kDqk / 16; ++step)
    arch::ldmatrix(q[step], tile + uint32_t(step / 4) * tile::kPanelBytes +
                                tile::swizzled(row, uint32_t(step % 4 * 2) + lane / 16));
}

// Starts the scores of 64 heads and 64 or 32 keys.
template <int kSize, int kSteps>
HOPWELL_DEVICE void start_scores(float (&scores)[kSize], const uint32_t (&q)[kSteps][4], uint32_t keys) {
  constexpr uint64_t kOperand = arch::wgmma_descriptor({arch::Swizzle::bytes128, 16, 1024});
  const uint64_t b = arch::at_address(kOperand, keys);
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int step = 0; step < kSteps; ++step)
    arch::wgmma_rs(scores, q[step], b + ((uint32_t(step / 4) * tile::kPanelBytes + uint32_t(step % 4) * 32) >> 4),
                   step > 0);
  arch::wgmma_commit();
}

// Lanes `distance` apart add their 2 kWidth columns; each keeps the sums of one half.
template <int kWidth, int kSize>
HOPWELL_DEVICE void share_columns(float (&c)[kSize], int distance) {
  const bool upper = arch::lane_index() & distance;
  HOPWELL_UNROLL
  for (int e = 0; e < kWidth; ++e) {
    const float keep = upper ? c[e + kWidth] : c[e], send = upper ? c[e] : c[e + kWidth];
    c[e] = keep + arch::shuffle_xor(send, distance);
  }
}

// A thread's two heads, rows lane / 4 and lane / 4 + 8 of its warp's 16: their lse in units of log 2.
struct Lse {
  float low, high;
};

HOPWELL_DEVICE Lse load_lse(const Params& p, int64_t query, int first_head) {
  const int head = first_head + arch::warp_index() % 4 * 16 + arch::lane_index() / 4;
  const float* row = p.lse + query * p.lse_stride_s;
  constexpr float kLog2E = 1.44269504088896f;
  return {head < p.h_q ? row[head * p.lse_stride_h] * kLog2E : INFINITY,
          head + 8 < p.h_q ? row[(head + 8) * p.lse_stride_h] * kLog2E : INFINITY};
}

// exp2 of a warp's [16 heads][64 or 32 keys], summed over the heads, handed to the store warp.
template <int kDqk, int kSize>
HOPWELL_DEVICE void add_heads(const Params& p, SharedStorage<kDqk>& s, const float (&scores)[kSize], Lse lse,
                              int key_tile) {
  const int lane = arch::lane_index(), slot = key_tile % Config::kSums;
  float c[kSize / 2];
  HOPWELL_UNROLL
  for (int i = 0; i < kSize / 2; ++i) {
    const int at = i / 2 * 4 + i % 2;
    c[i] = arch::exp2_approx(scores[at] * p.scale_log2 - lse.low) +
           arch::exp2_approx(scores[at + 2] * p.scale_log2 - lse.high);
  }
  share_columns<kSize / 4>(c, 16);
  share_columns<kSize / 8>(c, 8);
  share_columns<kSize / 16>(c, 4);
  arch::mbarrier_wait(s.sums_empty[slot], uint32_t(key_tile / Config::kSums & 1) ^ 1);
  constexpr int kOwn = kSize / 16;  // neighbouring keys of a lane
  const int group = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
  float* sums = s.sums[slot][arch::warp_index()] +
                (kOwn == 2 ? 8 * group + lane % 4 * 2 : group / 2 * 8 + lane % 4 * 2 + group % 2);
  HOPWELL_UNROLL
  for (int i = 0; i < kOwn; ++i) sums[i] = c[i];
  arch::syncwarp();
  if (lane == 0) arch::mbarrier_arrive(s.sums_full[slot]);
}

// All key tiles of one query by both warpgroups, two at a time: the second product runs under the exponentials of the
// first, and the other warpgroup's products under those of the second.
template <int kDqk>
HOPWELL_DEVICE void sum_pairs(const Params& p, SharedStorage<kDqk>& s, const uint32_t (&q)[kDqk / 16][4], Lse lse,
                              Ring ring, int tiles) {
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < tiles; tile += 2) {
    float even[32], odd[32];
    start_scores(even, q, wait_for_rows(s, ring.item + tile));
    start_scores(odd, q, wait_for_rows(s, ring.item + tile + 1));
    arch::wgmma_wait<1>(even);
    release_rows(s, ring.item + tile);
    add_heads(p, s, even, lse, ring.key_tile + tile);
    arch::wgmma_wait<0>(odd);
    release_rows(s, ring.item + tile + 1);
    add_heads(p, s, odd, lse, ring.key_tile + tile + 1);
  }
}

// All key tiles of one query, half of the keys by either warpgroup; both hold the same heads. A tile is done in half
// the time, so that its stage is soon free: the gather is what takes longest.
template <int kDqk>
HOPWELL_DEVICE void sum_halves(const Params& p, SharedStorage<kDqk>& s, const uint32_t (&q)[kDqk / 16][4], Lse lse,
                               Ring ring, int tiles, int group) {
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < tiles; ++tile) {
    float scores[16];
    start_scores(scores, q, wait_for_rows(s, ring.item + tile) + uint32_t(group) * (Config::kKeys / 2) * 128);
    arch::wgmma_wait<0>(scores);
    release_rows(s, ring.item + tile);
    add_heads(p, s, scores, lse, ring.key_tile + tile);
  }
}

template <int kDqk, bool kHalves>
HOPWELL_DEVICE void math(const Params& p, SharedStorage<kDqk>& s, int group) {
  constexpr int kHeadTiles = Schedule<kHalves>::kHeadTiles;
  Ring ring;
  HOPWELL_NO_UNROLL
  for (int64_t query = arch::block_index(); query < p.s_q; query += arch::grid_size()) {
    const int tiles = Schedule<kHalves>::key_tiles(tile::entries_of(p.selection, query));
    HOPWELL_NO_UNROLL
    for (int pass = 0; pass < Schedule<kHalves>::passes(p) && tiles > 0; ++pass) {
      const int head_tile = kHalves ? 0 : group;
      const Lse lse = load_lse(p, query, 128 * pass + Config::kHeads * head_tile);
      uint32_t q[kDqk / 16][4];
      if (head_tile == 1) pass_rows(s, ring.item);
      load_q<kDqk>(wait_for_rows(s, ring.item + head_tile), q);
      release_rows(s, ring.item + head_tile);
      if (!kHalves && head_tile == 0) pass_rows(s, ring.item + 1);
      ring.item += kHeadTiles;
      if constexpr (kHalves)
        sum_halves(p, s, q, lse, ring, tiles, group);
      else
        sum_pairs(p, s, q, lse, ring, tiles);
      ring.item += tiles, ring.key_tile += tiles;
    }
  }
}

// ---- store ----------------------------------------------------------------------------------------------------------

// The sum over all heads of the pass for key `lane` + 32 · half of a tile.
template <bool kHalves>
HOPWELL_DEVICE float sum_of(const float (&sums)[Config::kMathWarps][Config::kKeys], int half) {
  constexpr int kWarps = kHalves ? Config::kMathWarps / 2 : Config::kMathWarps;
  float sum = 0;
  HOPWELL_UNROLL
  for (int warp = 0; warp < kWarps; ++warp)
    sum += kHalves ? sums[kWarps * half + warp][arch::lane_index()] : sums[warp][32 * half + arch::lane_index()];
  return sum;
}

template <int kDqk, bool kHalves>
HOPWELL_DEVICE void store(const Params& p, SharedStorage<kDqk>& s) {
  const int lane = arch::lane_index(), topk = p.selection.topk;
  int count = 0;  // key tiles so far
  HOPWELL_NO_UNROLL
  for (int query = arch::block_index(); query < p.s_q; query += arch::grid_size()) {
    const tile::Entries entries = tile::entries_of(p.selection, query);
    const int tiles = Schedule<kHalves>::key_tiles(entries);
    float* row = p.attn + query * p.attn_stride;
    float total = 0;
    int low = entries.at(lane), high = entries.at(lane + 32);
    HOPWELL_NO_UNROLL
    for (int step = 0; step < tiles * Schedule<kHalves>::passes(p); ++step, ++count) {
      const int slot = count % Config::kSums, i = step % tiles * Config::kKeys + lane;
      const bool first = entries.counts(low), second = entries.counts(high);
      const int next = (step + 1) % tiles * Config::kKeys + lane;
      low = entries.at(next), high = entries.at(next + 32);  // a tile ahead: the load takes as long as a tile
      arch::mbarrier_wait(s.sums_full[slot], uint32_t(count / Config::kSums & 1));
      const float earlier[2] = {step < tiles || !first ? 0 : row[i], step < tiles || !second ? 0 : row[i + 32]};
      const float sums[2] = {first ? sum_of<kHalves>(s.sums[slot], 0) : 0,
                             second ? sum_of<kHalves>(s.sums[slot], 1) : 0};
      arch::syncwarp();
      if (lane == 0) arch::mbarrier_arrive(s.sums_empty[slot]);
      if (i < topk) row[i] = earlier[0] + sums[0];
      if (i + 32 < topk) row[i + 32] = earlier[1] + sums[1];
      total += sums[0] + sums[1];
    }
    for (int i = tiles * Config::kKeys + lane; i < topk; i += 32) row[i] = 0;
    if (!p.normalize_l1) continue;
    HOPWELL_UNROLL
    for (int distance = 16; distance > 0; distance /= 2) total += arch::shuffle_xor(total, distance);
    for (int i = lane; i < topk && total != 0; i += 32) row[i] /= total;
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <int kDqk, bool kHalves>
__global__ void __launch_bounds__(Config::kThreads, 1) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<SharedStorage<kDqk>>();
  if (arch::thread_index() == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      arch::mbarrier_init(s.rows_full[i], 1);
      arch::mbarrier_init(s.rows_empty[i], Config::kMathWarps);
    }
    for (int i = 0; i < Config::kSums; ++i) {
      arch::mbarrier_init(s.sums_full[i], Config::kMathWarps);
      arch::mbarrier_init(s.sums_empty[i], 1);
    }
  }
  arch::syncthreads();
  const int group = arch::warpgroup_index(), warp = arch::warp_index();
  if (group < 2) {
    arch::setmaxnreg_inc<Config::kMathRegisters[kHalves]>();
    math<kDqk, kHalves>(p, s, group);
  } else {
    arch::setmaxnreg_dec<Config::kOtherRegisters[kHalves]>();
    if (warp == kStore)
      store<kDqk, kHalves>(p, s);
    else
      gather<kDqk, kHalves>(p, s, warp - kGather);
  }
#endif
}

runtime::Support supports(const Problem& p) {
  if (p.q.dtype != DType::kBFloat16) return runtime::Support::no("q and kv must be bfloat16");
  if (p.d_qk != 576 && p.d_qk != 512) return runtime::Support::no("d_qk must be 576 or 512");
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
  p.lse = problem.lse.as<const float>();
  p.attn = problem.attn.as<float>();
  p.q_stride_s = problem.q.stride[0], p.q_stride_h = problem.q.stride[1], p.kv_stride = problem.kv.stride[0];
  p.lse_stride_s = problem.lse.stride[0], p.lse_stride_h = problem.lse.stride[1],
  p.attn_stride = problem.attn.stride[0];
  p.s_q = static_cast<int>(problem.s_q), p.h_q = static_cast<int>(problem.h_q);
  p.aligned = tile::can_gather(p.q, problem.h_q, p.q_stride_h) && tile::can_gather(p.kv, problem.s_kv, p.kv_stride) &&
              (p.s_q <= 1 || p.q_stride_s % 8 == 0);
  p.normalize_l1 = problem.normalize_l1;
  p.scale_log2 = problem.sm_scale * 1.44269504088896F;
  return p;
}

template <int kDqk, bool kHalves>
void start(const Problem& problem, Stream stream) {
  const int ctas = runtime::multiprocessors(problem.device.device_id);
  const arch::LaunchShape shape{.grid = {static_cast<std::uint32_t>(std::min<std::int64_t>(problem.s_q, ctas))},
                                .threads = Config::kThreads,
                                .shared_bytes = sizeof(SharedStorage<kDqk>)};
  runtime::launch("attention_distribution", kernel<kDqk, kHalves>, shape, stream, params_of(problem));
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0 || problem.topk == 0) return;
  const bool halves = problem.h_q <= Config::kHeads;
  if (problem.d_qk == 576)
    halves ? start<576, true>(problem, stream) : start<576, false>(problem, stream);
  else
    halves ? start<512, true>(problem, stream) : start<512, false>(problem, stream);
}

const runtime::Registration<Problem> backend{
    {.name = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90", .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::attention_distribution
