// attention_distribution for Hopper: how much attention each selected key gets from all heads.
//
//     attn[s,i] = Σ_h exp2(score[s,h,i] · scale_log2 − lse[s,h] · log2 e)          0 where entry i does not count
//
// Tile      one query, 64 keys, and 128 heads, 64 for each of two warpgroups that both read every tile; or up to 64
//           heads, the same in both warpgroups, which take turns at tiles. More heads: 128 at a time, one after another.
// Roles     warpgroups 0, 1   math     queries in registers, as A fragments; scores, exp2, sums over their heads
//           warps 8, 9, 10    gather   a third of the columns of every tile each, by cp.async, for keys and for queries
//           warp 11           store    adds the warps' sums in a fixed order, writes, normalises
//           CTAs are persistent: query blockIdx.x, then every gridDim.x-th; the last round is cut into parts of rows.
// Timeline  gather   K3 ▒▒▒▒│ K4 ▒▒▒▒│ K5 …            three tiles in the ring; each third of a stage is filled again as
//           math 0   S0 ▓▓▓ exp Σ    S1 ▓▓▓ exp Σ      soon as the products have read it
//           math 1          S0 ▓▓▓ exp Σ    S1 ▓▓▓     products of one warpgroup under exponentials of the other
//           store           a0              a1
// Budget    shared: 3 × 64 × 1,152 rows + 4 × 8 × 64 × 4 sums + 352 barriers = 229,728 B
//           registers: math 144 of Q + 32 scores + ~30 (208), gather and store 88
// Bound     128 heads: tensor pipe and exponentials; 64: the gather, 73,728 B for every 64 keys
// Order     Nothing is added in an order that depends on time: same inputs, same bits.
//
// Memory order. The copies of a third themselves arrive at its mbarrier, so that no gather warp ever waits for them;
// who has waited for that arrival fences it (fence.proxy.async) before the products read it.
#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/attention_distribution/op.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/entries.hpp"
#include "tile/gpu/gather.hpp"
#include "tile/gpu/numbers.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::attention_distribution {
namespace {

using arch::bf16;

struct Config {
  static constexpr int kKeys = 64, kHeads = 64, kStages = 3, kParts = 3, kSums = 4, kThreads = 384;
  static constexpr int kMathWarps = 8, kMathRegisters = 208, kOtherRegisters = 88;
  static constexpr int kPartColumns = 192;       // 3 panels; the last part has what remains of a row
  static constexpr int kBarriers = 2 * kStages;  // item i uses stage i % 3 and barriers i % 6
};
enum WarpRole { kGather = Config::kMathWarps, kStore = kGather + Config::kParts };
enum NamedBarrier { kTurn = 1 };  // kTurn + g: warpgroup g may start its products

template <int kDqk>
struct SharedStorage {
  alignas(1024) unsigned char rows[Config::kStages][Config::kKeys * kDqk * 2];
  float sums[Config::kSums][Config::kMathWarps][Config::kKeys];  // over a warp's 16 heads
  arch::mbarrier rows_full[Config::kBarriers][Config::kParts], rows_empty[Config::kBarriers][Config::kParts];
  arch::mbarrier sums_full[Config::kSums], sums_empty[Config::kSums];
};
static_assert(sizeof(SharedStorage<576>) <= arch::sm90::kMaxSharedBytes);

// Which queries each CTA works on: whole rounds of whole queries, then the rest, whose rows are cut into pieces so that
// no CTA idles.
struct Work {
  int whole, split, piece_entries;  // whole queries; pieces of each other one, of so many entries
  int pieces;                       // in all
};

struct Params {
  tile::SelectionParams selection;
  const bf16 *q, *kv;                         // [s_q, h_q, d_qk], [s_kv, d_qk]
  const float* lse;                           // [s_q, h_q]
  float* attn;                                // [s_q, topk]
  int64_t q_stride_s, q_stride_h, kv_stride;  // elements
  int64_t lse_stride_s, lse_stride_h, attn_stride;
  int h_q;
  bool aligned;  // rows of q and kv, to 16 bytes
  bool normalize_l1;
  float scale_log2;  // sm_scale · log2(e)
  Work work;
};

// A query, or a part of its row.
struct Piece {
  int query, first, size;  // entries first … first + size - 1 of the row
  tile::Entries entries;   // those
};

HOPWELL_DEVICE Piece piece_of(const Params& p, int number) {
  Piece piece{number, 0, p.selection.topk, {}};
  if (number >= p.work.whole) {
    const int part = number - p.work.whole;
    piece.query = p.work.whole + part / p.work.split;
    piece.first = part % p.work.split * p.work.piece_entries;
    const int left = p.selection.topk - piece.first;
    piece.size = left < p.work.piece_entries ? left : p.work.piece_entries;
  }
  piece.entries = tile::entries_of(p.selection, piece.query);
  piece.entries.row += piece.first;
  const int length = piece.entries.length - piece.first;
  piece.entries.length = length < 0 ? 0 : length < piece.size ? length : piece.size;
  return piece;
}

HOPWELL_DEVICE int key_tiles(const tile::Entries& e) { return (e.length + Config::kKeys - 1) / Config::kKeys; }
HOPWELL_DEVICE int passes(const Params& p) { return (p.h_q + 127) / 128; }

// An item: tiles of heads and of keys go through the ring one after another, in parts. Item i lies in stage i % 3 and
// has barriers i % 6: when the warpgroups take turns, a barrier belongs to one of them, and nobody waits for tiles that
// he does not read. Whoever waits for item i has seen an item that was copied after item i - 6 had been read, so that
// the barrier is past that phase of the same parity.
template <int kDqk>
struct Slot {
  SharedStorage<kDqk>& s;
  int item;

  HOPWELL_DEVICE uint32_t rows() const { return arch::shared_address(s.rows[item % Config::kStages]); }
  HOPWELL_DEVICE arch::mbarrier& full(int part) const { return s.rows_full[item % Config::kBarriers][part]; }
  HOPWELL_DEVICE arch::mbarrier& empty(int part) const { return s.rows_empty[item % Config::kBarriers][part]; }
  HOPWELL_DEVICE uint32_t parity() const { return uint32_t(item / Config::kBarriers & 1); }
  /// Of the item that was in this stage before; it counts as read if there was none.
  HOPWELL_DEVICE void wait_empty(int part) const {
    const Slot before{s, item + Config::kStages};  // - 2 kStages: the same barrier, one phase later
    arch::mbarrier_wait(before.empty(part), before.parity() ^ 1);
  }
  HOPWELL_DEVICE void wait_full(int part) const {
    arch::mbarrier_wait(full(part), parity());
    arch::fence_proxy_async();
  }
  /// A part is free after eight arrivals, one for each math warp; one that reads it alone arrives for two.
  HOPWELL_DEVICE void release(int part, uint32_t readers) const {
    arch::syncwarp();
    if (arch::lane_index() == 0) arch::mbarrier_arrive(empty(part), readers);
  }
};

// ---- gather ---------------------------------------------------------------------------------------------------------

// A warp copies its part of the columns of all rows. It never waits for its copies: they themselves arrive.
template <int kDqk, int kTogether>
HOPWELL_DEVICE void copy_part(Slot<kDqk> slot, int part, bool aligned, const bf16* data, int64_t stride,
                              tile::RowNumbers numbers) {
  constexpr int kColumns = Config::kPartColumns, kLast = kDqk - (Config::kParts - 1) * kColumns;
  const uint32_t to = slot.rows() + uint32_t(part) * (kColumns / tile::kPanelColumns) * tile::kPanelBytes;
  data += part * kColumns;
  slot.wait_empty(part);
  if (!aligned) {
    if (part < Config::kParts - 1)
      tile::copy_rows<kColumns>(to, data, stride, numbers);
    else
      tile::copy_rows<kLast>(to, data, stride, numbers);
    arch::fence_proxy_async();
    arch::mbarrier_arrive(slot.full(part));
    return;
  }
  if (kLast == kColumns || part < Config::kParts - 1)
    tile::gather_rows<kColumns, kTogether>(to, data, stride, numbers);
  else
    tile::gather_rows<kLast, kTogether>(to, data, stride, numbers);
  arch::cp_async_mbarrier_arrive_noinc(slot.full(part));
}

HOPWELL_DEVICE tile::RowNumbers keys_of(const tile::Entries& entries, int tile) {
  const int i = Config::kKeys * tile + arch::lane_index();
  return {entries.at(i), entries.at(i + 32), entries.visible};
}

template <int kDqk, bool kTurns>
HOPWELL_DEVICE void gather(const Params& p, SharedStorage<kDqk>& s, int part) {
  // The gather is what takes longest at up to 64 heads; otherwise bursts of copies delay products and sums.
  constexpr int kTogether = kTurns ? 16 : 2;
  int item = 0;
  HOPWELL_NO_UNROLL
  for (int number = arch::block_index(); number < p.work.pieces; number += arch::grid_size()) {
    const Piece piece = piece_of(p, number);
    const int tiles = key_tiles(piece.entries);
    const bf16* q = p.q + piece.query * p.q_stride_s;
    HOPWELL_NO_UNROLL
    for (int pass = 0; pass < passes(p) && tiles > 0; ++pass) {
      // Indices are loaded two tiles ahead and looked at when they are used: a load takes as long as a tile.
      tile::RowNumbers next = keys_of(piece.entries, 0), second = keys_of(piece.entries, 1);
      for (int i = 0; i < (kTurns ? 1 : 2); ++i, ++item) {
        const int head = 128 * pass + Config::kHeads * i + arch::lane_index();
        copy_part<kDqk, 1>({s, item}, part, p.aligned, q, p.q_stride_h, {head, head + 32, unsigned(p.h_q)});
      }
      HOPWELL_NO_UNROLL
      for (int tile = 0; tile < tiles; ++tile, ++item) {
        const tile::RowNumbers numbers = next;
        next = second;
        second = keys_of(piece.entries, tile + 2);
        copy_part<kDqk, kTogether>({s, item}, part, p.aligned, p.kv, p.kv_stride, numbers);
      }
    }
  }
  arch::cp_async_wait_all();  // no thread leaves before its copies
}

// ---- math -----------------------------------------------------------------------------------------------------------

// This warp's 16 heads as A fragments, one for every 16 columns.
template <int kDqk>
HOPWELL_DEVICE void load_q(Slot<kDqk> slot, uint32_t readers, uint32_t (&q)[kDqk / 16][4]) {
  const tile::FragmentLane at;
  for (int part = 0; part < Config::kParts; ++part) slot.wait_full(part);
  tile::load_fragments(at, slot.rows(), q);
  for (int part = 0; part < Config::kParts; ++part) slot.release(part, readers);
}

// Starts the part of the scores of 64 heads and 64 keys that comes from one part of the columns.
template <int kSteps>
HOPWELL_DEVICE void start_part(float (&scores)[32], const uint32_t (&q)[kSteps][4], uint32_t rows, int part) {
  constexpr int kPartSteps = Config::kPartColumns / 16;
  const uint64_t b = arch::at_address(tile::kRowsAlongK, rows);
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int step = part * kPartSteps; step < (part + 1) * kPartSteps && step < kSteps; ++step)
    arch::wgmma_rs(scores, q[step], b + tile::columns_on(step), step > 0);
  arch::wgmma_commit();
}

// All scores of 64 heads and 64 keys. The two warpgroups' products follow one another, so that either's exponentials
// run under the other's products.
template <int kDqk>
HOPWELL_DEVICE void multiply(float (&scores)[32], const uint32_t (&q)[kDqk / 16][4], Slot<kDqk> slot, uint32_t readers,
                             int group) {
  arch::barrier_sync(kTurn + group, 256);  // kept: turns are for speed; nothing else depends on them
  HOPWELL_UNROLL
  for (int part = 0; part < Config::kParts; ++part) {
    slot.wait_full(part);
    start_part(scores, q, slot.rows(), part);
  }
  arch::wgmma_wait<2>();
  slot.release(0, readers);
  arch::wgmma_wait<1>();
  slot.release(1, readers);
  arch::barrier_arrive(kTurn + (group ^ 1), 256);
  arch::wgmma_wait<0>(scores);
  slot.release(2, readers);
}

// A thread's two heads, rows lane / 4 and lane / 4 + 8 of its warp's 16: their lse in units of log 2.
struct Lse {
  float low, high;
};

HOPWELL_DEVICE Lse load_lse(const Params& p, int64_t query, int first_head) {
  const int head = first_head + arch::warp_index() % 4 * 16 + arch::lane_index() / 4;
  const float* row = p.lse + query * p.lse_stride_s;
  return {head < p.h_q ? row[head * p.lse_stride_h] * tile::kLog2E : INFINITY,
          head + 8 < p.h_q ? row[(head + 8) * p.lse_stride_h] * tile::kLog2E : INFINITY};
}

// exp2 of a warp's [16 heads][64 keys], summed over the heads, handed to the store warp.
template <int kDqk>
HOPWELL_DEVICE void add_heads(const Params& p, SharedStorage<kDqk>& s, const float (&scores)[32], Lse lse, int key_tile,
                              int warp) {
  const int lane = arch::lane_index(), slot = key_tile % Config::kSums;
  float c[16];
  HOPWELL_UNROLL
  for (int i = 0; i < 16; ++i) {
    const int at = i / 2 * 4 + i % 2;
    c[i] = arch::exp2_approx(scores[at] * p.scale_log2 - lse.low) +
           arch::exp2_approx(scores[at + 2] * p.scale_log2 - lse.high);
  }
  tile::share_sums(c, 8, 16, arch::lane_index() & 16);
  tile::share_sums(c, 4, 8, arch::lane_index() & 8);
  tile::share_sums(c, 2, 4, arch::lane_index() & 4);
  arch::mbarrier_wait(s.sums_empty[slot], uint32_t(key_tile / Config::kSums & 1) ^ 1);
  const int group = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
  float* sums = s.sums[slot][warp] + 8 * group + lane % 4 * 2;
  sums[0] = c[0], sums[1] = c[1];
  arch::syncwarp();
  if (lane == 0) arch::mbarrier_arrive(s.sums_full[slot]);
}

// More than 64 heads: each warpgroup has 64 of them, and both read every tile of keys. Otherwise both have the same, and
// they take turns at tiles.
template <int kDqk, bool kTurns>
HOPWELL_DEVICE void math(const Params& p, SharedStorage<kDqk>& s, int group) {
  constexpr int kHeadTiles = kTurns ? 1 : 2;
  const int warp = arch::warp_index() % (kTurns ? 4 : 8);
  int item = 0, key_tile = 0;
  if (group == 1) arch::barrier_arrive(kTurn, 256);  // warpgroup 0 starts
  HOPWELL_NO_UNROLL
  for (int number = arch::block_index(); number < p.work.pieces; number += arch::grid_size()) {
    const Piece piece = piece_of(p, number);
    const int tiles = key_tiles(piece.entries);
    HOPWELL_NO_UNROLL
    for (int pass = 0; pass < passes(p) && tiles > 0; ++pass) {
      const int head_tile = kTurns ? 0 : group;
      const Lse lse = load_lse(p, piece.query, 128 * pass + Config::kHeads * head_tile);
      uint32_t q[kDqk / 16][4];
      load_q<kDqk>({s, item + head_tile}, kTurns ? 1 : 2, q);
      if (kTurns && (item & 1) == group) {  // the turn goes with the items
        arch::barrier_sync(kTurn + group, 256);
        arch::barrier_arrive(kTurn + (group ^ 1), 256);
      }
      item += kHeadTiles;
      HOPWELL_NO_UNROLL
      for (int tile = kTurns ? (item ^ group) & 1 : 0; tile < tiles; tile += kTurns ? 2 : 1) {
        float scores[32];
        multiply<kDqk>(scores, q, {s, item + tile}, kTurns ? 2 : 1, group);
        add_heads(p, s, scores, lse, key_tile + tile, warp);
      }
      item += tiles, key_tile += tiles;
    }
  }
}

// ---- store ----------------------------------------------------------------------------------------------------------

// Divides a row by its sum. Each lane reads what it wrote, many values at a time.
HOPWELL_DEVICE void normalize(float* row, int size, float total) {
  constexpr int kTogether = 16;
  total = tile::sum_of_warp(total);
  HOPWELL_NO_UNROLL
  for (int first = arch::lane_index(); first < size && total != 0; first += 32 * kTogether) {
    float values[kTogether];
    HOPWELL_UNROLL
    for (int i = 0; i < kTogether; ++i) values[i] = first + 32 * i < size ? row[first + 32 * i] : 0;
    HOPWELL_UNROLL
    for (int i = 0; i < kTogether; ++i)
      if (first + 32 * i < size) row[first + 32 * i] = values[i] / total;
  }
}

template <int kDqk, bool kTurns>
HOPWELL_DEVICE void store(const Params& p, SharedStorage<kDqk>& s) {
  constexpr int kWarps = kTurns ? Config::kMathWarps / 2 : Config::kMathWarps;
  const int lane = arch::lane_index();
  int count = 0;  // key tiles so far
  HOPWELL_NO_UNROLL
  for (int number = arch::block_index(); number < p.work.pieces; number += arch::grid_size()) {
    const Piece piece = piece_of(p, number);
    const tile::Entries entries = piece.entries;
    const int tiles = key_tiles(entries);
    float* row = p.attn + piece.query * p.attn_stride + piece.first;
    float total = 0;
    int low = entries.at(lane), high = entries.at(lane + 32);
    HOPWELL_NO_UNROLL
    for (int step = 0; step < tiles * passes(p); ++step, ++count) {
      const int slot = count % Config::kSums, i = step % tiles * Config::kKeys + lane;
      const bool first = entries.counts(low), second = entries.counts(high);
      const int next = (step + 1) % tiles * Config::kKeys + lane;
      low = entries.at(next), high = entries.at(next + 32);  // a tile ahead: the load takes as long as a tile
      arch::mbarrier_wait(s.sums_full[slot], uint32_t(count / Config::kSums & 1));
      float sums[2] = {step < tiles || !first ? 0 : row[i], step < tiles || !second ? 0 : row[i + 32]};
      HOPWELL_UNROLL
      for (int warp = 0; warp < kWarps; ++warp) {
        sums[0] += first ? s.sums[slot][warp][lane] : 0;
        sums[1] += second ? s.sums[slot][warp][lane + 32] : 0;
      }
      arch::syncwarp();
      if (lane == 0) arch::mbarrier_arrive(s.sums_empty[slot]);
      if (i < piece.size) row[i] = sums[0];
      if (i + 32 < piece.size) row[i + 32] = sums[1];
      if (step >= tiles * (passes(p) - 1)) total += sums[0] + sums[1];
    }
    for (int i = tiles * Config::kKeys + lane; i < piece.size; i += 32) row[i] = 0;
    if (p.normalize_l1) normalize(row, piece.size, total);
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <int kDqk, bool kTurns>
__global__ void __launch_bounds__(Config::kThreads, 1) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<SharedStorage<kDqk>>();
  if (arch::thread_index() == 0) {
    for (int i = 0; i < Config::kBarriers * Config::kParts; ++i) {
      arch::mbarrier_init(s.rows_full[i / Config::kParts][i % Config::kParts], 32);
      arch::mbarrier_init(s.rows_empty[i / Config::kParts][i % Config::kParts], Config::kMathWarps);
    }
    for (int i = 0; i < Config::kSums; ++i) {
      arch::mbarrier_init(s.sums_full[i], kTurns ? Config::kMathWarps / 2 : Config::kMathWarps);
      arch::mbarrier_init(s.sums_empty[i], 1);
    }
    arch::fence_mbarrier_init();
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

// Rows that are normalised stay whole: one warp adds them up.
Work work_of(const Problem& problem, int ctas) {
  const int s_q = static_cast<int>(problem.s_q), topk = static_cast<int>(problem.topk), rest = s_q % ctas;
  Work work{s_q - rest, 1, topk, s_q};
  if (rest > 0 && !problem.normalize_l1) {
    const int tiles = (topk + Config::kKeys - 1) / Config::kKeys, most = std::min(ctas / rest, tiles);
    const int piece_tiles = (tiles + most - 1) / most;
    work.split = (tiles + piece_tiles - 1) / piece_tiles;
    work.piece_entries = piece_tiles * Config::kKeys;
    work.pieces = work.whole + rest * work.split;
  }
  return work;
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
  p.h_q = static_cast<int>(problem.h_q);
  p.aligned = tile::can_gather(p.q, problem.h_q, p.q_stride_h) && tile::can_gather(p.kv, problem.s_kv, p.kv_stride) &&
              (problem.s_q <= 1 || p.q_stride_s % 8 == 0);
  p.normalize_l1 = problem.normalize_l1;
  p.scale_log2 = problem.sm_scale * 1.44269504088896F;
  return p;
}

template <int kDqk, bool kTurns>
void start(const Problem& problem, Stream stream) {
  const int ctas = problem.device.sms;
  Params p = params_of(problem);
  p.work = work_of(problem, ctas);
  const arch::LaunchShape shape{.grid = {static_cast<std::uint32_t>(std::min(p.work.pieces, ctas))},
                                .threads = Config::kThreads,
                                .shared_bytes = sizeof(SharedStorage<kDqk>)};
  runtime::launch("attention_distribution", kernel<kDqk, kTurns>, shape, stream, p);
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
