// attention_distribution for Hopper: how much attention each selected key gets from all heads.
//
//     attn[s,i] = Σ_h exp2(score[s,h,i] · scale_log2 − lse[s,h] · log2 e)          0 where entry i does not count
//
// Tile      one query, 64 keys, and 128 heads (two math warpgroups with 64 each) or, up to 64 heads, 64 heads and two
// tiles
//           of keys (the warpgroups take turns). More heads: 128 at a time, one after another.
// Roles     warpgroups 0, 1   math     queries in registers, as A fragments; scores, exp2, sums over their heads
//           warps 8, 9, 10    gather   rows of keys, and the queries, by cp.async into a ring of three stages
//           warp 11           store    adds the warps' sums in a fixed order, writes, normalises
//           CTAs are persistent: query blockIdx.x, then every gridDim.x-th.
// Timeline  gather   Q0 │ Q1 │ K0 │ K1 ▓▓ │ K2 ▓▓ │ K3 ▓▓ │ …                    stages 0 1 2 0 1 2 …
//           math 0   ldmatrix Q0 │ S0 ▓▓▓▓▓▓│ S1 ▓▓▓▓▓▓▓▓▓▓│ S2 ▓▓▓▓▓▓▓▓▓▓│ …      always one product in flight …
//                                           │ exp Σ S0 │   │ exp Σ S1 │   │ …    … under the exponentials of the last
//           store                                       a0              a1
// Budget    shared: 3 × 64 × 1,152 rows + 4 × 8 × 64 × 4 sums + 112 barriers = 229,488 B
//           registers: math 144 of Q + 2 × 32 scores + ~30 (240); gather and store 24
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
  static constexpr int kMathWarps = 8, kGatherWarps = 3;
  static constexpr int kMathRegisters = 240, kOtherRegisters = 24;
};
enum WarpRole { kGather = Config::kMathWarps, kStore = kGather + Config::kGatherWarps };

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
// keys come through the ring. With kTurns one tile of heads serves both math warpgroups. Rows with nothing to do have
// no items.
template <bool kTurns>
struct Schedule {
  static constexpr int kHeadTiles = kTurns ? 1 : 2;
  static HOPWELL_DEVICE int passes(const Params& p) { return (p.h_q + 127) / 128; }
  // Even, for the math warpgroups work on pairs.
  static HOPWELL_DEVICE int key_tiles(const tile::Entries& e) {
    return (e.length + 2 * Config::kKeys - 1) / (2 * Config::kKeys) * 2;
  }
};

// ---- gather ---------------------------------------------------------------------------------------------------------

// A tile that goes through the ring.
struct Item {
  int query, pass, index;  // index in the pass: tiles of heads, then tiles of keys
};

// Goes on to the first item at or after this one that exists, and gives its rows. Past the last query there is none.
template <bool kTurns>
HOPWELL_DEVICE tile::RowNumbers settle(const Params& p, Item& item) {
  for (; item.query < p.s_q; item.query += arch::grid_size(), item.pass = 0) {
    const tile::Entries entries = tile::entries_of(p.selection, item.query);
    const int tiles = Schedule<kTurns>::key_tiles(entries);
    for (; tiles > 0 && item.pass < Schedule<kTurns>::passes(p); ++item.pass) {
      const int key_tile = item.index - Schedule<kTurns>::kHeadTiles;
      if (key_tile < 0) {
        const int head = 128 * item.pass + Config::kHeads * item.index + arch::lane_index();
        return {head < p.h_q ? head : -1, head + 32 < p.h_q ? head + 32 : -1};
      }
      const int i = Config::kKeys * key_tile + arch::lane_index();
      if (key_tile < tiles) return {entries.key(i), entries.key(i + 32)};
      item.index = key_tile - tiles;
    }
  }
  return {};
}

// Starts the copies of this warp's rows of a tile.
template <int kDqk, bool kTurns>
HOPWELL_DEVICE void copy(const Params& p, const Item& item, tile::RowNumbers numbers, uint32_t to, int part) {
  constexpr int kWarps = Config::kGatherWarps;
  const bool heads = item.index < Schedule<kTurns>::kHeadTiles;
  const bf16* q = p.q + item.query * p.q_stride_s;
  if (!p.aligned)
    tile::copy_rows<kDqk, kWarps>(to, heads ? q : p.kv, heads ? p.q_stride_h : p.kv_stride, numbers, part);
  else if (heads)
    tile::gather_rows<kDqk, kWarps>(to, q, p.q_stride_h, numbers, part);
  else
    tile::gather_rows<kDqk, kWarps>(to, p.kv, p.kv_stride, numbers, part);
  arch::cp_async_commit();
}

// Waits for the oldest of `pending` tiles under way. The lanes that copied it fence it, and only then it is announced.
template <int kDqk>
HOPWELL_DEVICE void announce(SharedStorage<kDqk>& s, int stage, int pending) {
  if (pending == 1)
    arch::cp_async_wait<0>();
  else if (pending == 2)
    arch::cp_async_wait<1>();
  else
    arch::cp_async_wait<2>();
  arch::fence_proxy_async();
  arch::syncwarp();
  if (arch::lane_index() == 0) arch::mbarrier_arrive(s.rows_full[stage]);
}

// Whether a stage is free, the same in all lanes. Does not wait if other tiles are `pending`.
template <int kDqk>
HOPWELL_DEVICE bool is_free(SharedStorage<kDqk>& s, int stage, uint32_t parity, int pending) {
  if (pending > 0) {
    const bool free = arch::lane_index() == 0 && arch::mbarrier_test_wait(s.rows_empty[stage], parity);
    if (arch::ballot(free) == 0) return false;
  }
  arch::mbarrier_wait(s.rows_empty[stage], parity);
  return true;
}

// The warps share out the rows of each tile. A stage that is free is filled at once; otherwise the oldest tile is seen
// to.
template <int kDqk, bool kTurns>
HOPWELL_DEVICE void gather(const Params& p, SharedStorage<kDqk>& s, int part) {
  Item item{arch::block_index(), 0, 0};
  tile::RowNumbers numbers = settle<kTurns>(p, item);
  int stage = 0, pending = 0;  // where the next tile goes; tiles under way
  uint32_t parity = 1;
  while (item.query < p.s_q || pending > 0) {
    if (item.query < p.s_q && is_free(s, stage, parity, pending)) {
      copy<kDqk, kTurns>(p, item, numbers, arch::shared_address(s.rows[stage]), part);
      ++item.index, ++pending;
      if (++stage == Config::kStages) stage = 0, parity ^= 1;
      numbers = settle<kTurns>(p, item);  // loads the next indices under these copies
    } else {
      announce(s, (stage + Config::kStages - pending) % Config::kStages, pending);
      --pending;
    }
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

// Starts the scores of 64 heads and 64 keys.
template <int kSteps>
HOPWELL_DEVICE void start_scores(float (&scores)[32], const uint32_t (&q)[kSteps][4], uint32_t keys) {
  constexpr uint64_t kOperand = arch::wgmma_descriptor({arch::Swizzle::bytes128, 16, 1024});
  const uint64_t b = arch::at_address(kOperand, keys);
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int step = 0; step < kSteps; ++step)
    arch::wgmma_rs(scores, q[step], b + ((uint32_t(step / 4) * tile::kPanelBytes + uint32_t(step % 4) * 32) >> 4),
                   step > 0);
  arch::wgmma_commit();
}

// Adds columns c[0 .. kWidth) and c[kWidth .. 2 kWidth) between lanes 2 kWidth apart; each keeps one half.
template <int kWidth>
HOPWELL_DEVICE void share_columns(float (&c)[16]) {
  const bool upper = arch::lane_index() & 2 * kWidth;
  HOPWELL_UNROLL
  for (int e = 0; e < kWidth; ++e) {
    const float keep = upper ? c[e + kWidth] : c[e], send = upper ? c[e] : c[e + kWidth];
    c[e] = keep + arch::shuffle_xor(send, 2 * kWidth);
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

// exp2 of a warp's [16 heads][64 keys], summed over the heads, handed to the store warp.
template <int kDqk>
HOPWELL_DEVICE void add_heads(const Params& p, SharedStorage<kDqk>& s, const float (&scores)[32], Lse lse, int key_tile,
                              int slot_warp) {
  const int lane = arch::lane_index(), slot = key_tile % Config::kSums;
  float c[16];
  HOPWELL_UNROLL
  for (int i = 0; i < 16; ++i) {
    const int at = i / 2 * 4 + i % 2;
    c[i] = arch::exp2_approx(scores[at] * p.scale_log2 - lse.low) +
           arch::exp2_approx(scores[at + 2] * p.scale_log2 - lse.high);
  }
  share_columns<8>(c);
  share_columns<4>(c);
  share_columns<2>(c);
  arch::mbarrier_wait(s.sums_empty[slot], uint32_t(key_tile / Config::kSums & 1) ^ 1);
  const int group = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
  float* sums = &s.sums[slot][slot_warp][8 * group + lane % 4 * 2];
  sums[0] = c[0], sums[1] = c[1];
  arch::syncwarp();
  if (lane == 0) arch::mbarrier_arrive(s.sums_full[slot]);
}

// All key tiles of one query by both warpgroups, two at a time: the second product runs under the exponentials of the
// first, and the other warpgroup's products under those of the second.
template <int kDqk>
HOPWELL_DEVICE void sum_together(const Params& p, SharedStorage<kDqk>& s, const uint32_t (&q)[kDqk / 16][4], Lse lse,
                                 Ring ring, int tiles) {
  const int warp = arch::warp_index();
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < tiles; tile += 2) {
    float even[32], odd[32];
    start_scores(even, q, wait_for_rows(s, ring.item + tile));
    start_scores(odd, q, wait_for_rows(s, ring.item + tile + 1));
    arch::wgmma_wait<1>(even);
    release_rows(s, ring.item + tile);
    add_heads(p, s, even, lse, ring.key_tile + tile, warp);
    arch::wgmma_wait<0>(odd);
    release_rows(s, ring.item + tile + 1);
    add_heads(p, s, odd, lse, ring.key_tile + tile + 1, warp);
  }
}

// The same with every second key tile for either warpgroup, which hold the same heads.
template <int kDqk>
HOPWELL_DEVICE void sum_in_turns(const Params& p, SharedStorage<kDqk>& s, const uint32_t (&q)[kDqk / 16][4], Lse lse,
                                 Ring ring, int tiles, int group) {
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile % 2 != group) {
      pass_rows(s, ring.item + tile);
      continue;
    }
    float scores[32];
    start_scores(scores, q, wait_for_rows(s, ring.item + tile));
    arch::wgmma_wait<0>(scores);
    release_rows(s, ring.item + tile);
    add_heads(p, s, scores, lse, ring.key_tile + tile, arch::warp_index() % 4);
  }
}

template <int kDqk, bool kTurns>
HOPWELL_DEVICE void math(const Params& p, SharedStorage<kDqk>& s, int group) {
  constexpr int kHeadTiles = Schedule<kTurns>::kHeadTiles;
  Ring ring;
  HOPWELL_NO_UNROLL
  for (int64_t query = arch::block_index(); query < p.s_q; query += arch::grid_size()) {
    const int tiles = Schedule<kTurns>::key_tiles(tile::entries_of(p.selection, query));
    HOPWELL_NO_UNROLL
    for (int pass = 0; pass < Schedule<kTurns>::passes(p) && tiles > 0; ++pass) {
      const int head_tile = kTurns ? 0 : group;
      const Lse lse = load_lse(p, query, 128 * pass + Config::kHeads * head_tile);
      uint32_t q[kDqk / 16][4];
      if (head_tile == 1) pass_rows(s, ring.item);
      load_q<kDqk>(wait_for_rows(s, ring.item + head_tile), q);
      release_rows(s, ring.item + head_tile);
      if (!kTurns && head_tile == 0) pass_rows(s, ring.item + 1);
      ring.item += kHeadTiles;
      if constexpr (kTurns)
        sum_in_turns(p, s, q, lse, ring, tiles, group);
      else
        sum_together(p, s, q, lse, ring, tiles);
      ring.item += tiles, ring.key_tile += tiles;
    }
  }
}

// ---- store ----------------------------------------------------------------------------------------------------------

// The sum over all heads of the pass for key `lane` + 32 · half of a tile.
template <int kWarps>
HOPWELL_DEVICE float sum_of(const float (&sums)[Config::kMathWarps][Config::kKeys], int half) {
  float sum = 0;
  HOPWELL_UNROLL
  for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp][32 * half + arch::lane_index()];
  return sum;
}

template <int kDqk, bool kTurns>
HOPWELL_DEVICE void store(const Params& p, SharedStorage<kDqk>& s) {
  constexpr int kWarps = kTurns ? Config::kMathWarps / 2 : Config::kMathWarps;
  const int lane = arch::lane_index(), topk = p.selection.topk;
  int count = 0;  // key tiles so far
  HOPWELL_NO_UNROLL
  for (int query = arch::block_index(); query < p.s_q; query += arch::grid_size()) {
    const tile::Entries entries = tile::entries_of(p.selection, query);
    const int tiles = Schedule<kTurns>::key_tiles(entries);
    float* row = p.attn + query * p.attn_stride;
    for (int i = lane; i < topk; i += 32) row[i] = 0;
    float total = 0;
    HOPWELL_NO_UNROLL
    for (int tile = 0; tile < tiles * Schedule<kTurns>::passes(p); ++tile, ++count) {
      const int slot = count % Config::kSums, i = Config::kKeys * (tile % tiles) + lane;
      const bool low = entries.key(i) >= 0, high = entries.key(i + 32) >= 0;
      arch::mbarrier_wait(s.sums_full[slot], uint32_t(count / Config::kSums & 1));
      const float first = low ? sum_of<kWarps>(s.sums[slot], 0) : 0,
                  second = high ? sum_of<kWarps>(s.sums[slot], 1) : 0;
      arch::syncwarp();
      if (lane == 0) arch::mbarrier_arrive(s.sums_empty[slot]);
      if (low) row[i] += first;
      if (high) row[i + 32] += second;
      total += first + second;
    }
    if (!p.normalize_l1) continue;
    HOPWELL_UNROLL
    for (int distance = 16; distance > 0; distance /= 2) total += arch::shuffle_xor(total, distance);
    for (int i = lane; i < topk && total != 0; i += 32) row[i] /= total;
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <int kDqk, bool kTurns>
__global__ void __launch_bounds__(Config::kThreads, 1) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<SharedStorage<kDqk>>();
  if (arch::thread_index() == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      arch::mbarrier_init(s.rows_full[i], Config::kGatherWarps);
      arch::mbarrier_init(s.rows_empty[i], Config::kMathWarps);
    }
    for (int i = 0; i < Config::kSums; ++i) {
      arch::mbarrier_init(s.sums_full[i], kTurns ? Config::kMathWarps / 2 : Config::kMathWarps);
      arch::mbarrier_init(s.sums_empty[i], 1);
    }
  }
  arch::syncthreads();
  const int group = arch::warpgroup_index(), warp = arch::warp_index();
  if (group < 2) {
    arch::setmaxnreg_inc<Config::kMathRegisters>();
    math<kDqk, kTurns>(p, s, group);
  } else {
    arch::setmaxnreg_dec<Config::kOtherRegisters>();
    if (warp == kStore)
      store<kDqk, kTurns>(p, s);
    else
      gather<kDqk, kTurns>(p, s, warp - kGather);
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
  const auto aligned = [](const View& v, std::size_t dims) {
    bool ok = reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0;
    for (std::size_t i = 0; i < dims; ++i) ok &= v.shape[i] <= 1 || v.stride[i] % 8 == 0;
    return ok;
  };
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
  p.aligned = aligned(problem.q, 2) && aligned(problem.kv, 1);
  p.normalize_l1 = problem.normalize_l1;
  p.scale_log2 = problem.sm_scale * 1.44269504088896F;
  return p;
}

template <int kDqk, bool kTurns>
void start(const Problem& problem, Stream stream) {
  const int ctas = runtime::multiprocessors(problem.device.device_id);
  const arch::LaunchShape shape{.grid = {static_cast<std::uint32_t>(std::min<std::int64_t>(problem.s_q, ctas))},
                                .threads = Config::kThreads,
                                .shared_bytes = sizeof(SharedStorage<kDqk>)};
  runtime::launch("attention_distribution", kernel<kDqk, kTurns>, shape, stream, params_of(problem));
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0 || problem.topk == 0) return;
  const bool turns = problem.h_q <= Config::kHeads;
  if (problem.d_qk == 576)
    turns ? start<576, true>(problem, stream) : start<576, false>(problem, stream);
  else
    turns ? start<512, true>(problem, stream) : start<512, false>(problem, stream);
}

const runtime::Registration<Problem> backend{
    {.name = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90", .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::attention_distribution
