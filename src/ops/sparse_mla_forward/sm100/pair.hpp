// sparse_mla_forward on Blackwell: the kernel for one query and 128 heads on a cluster of two CTAs. Formula:
// single.hpp.
//
// Tile      one query, 128 heads, 128 keys per step; d_qk 576 or 512. Products are tcgen05.mma.cta_group::2 with M 128,
//           issued by CTA 0 for both CTAs. CTA r holds heads [64 r, 64 r + 64), half of the rows of each B, and P of
//           its heads.
// Keys      S splits K by keys: CTA r holds all columns of keys [64 r, 64 r + 64). O splits V by columns: of each 256
//           columns, CTA r holds [128 r, 128 r + 128) of all keys. So half of the columns that CTA r holds for S stay
//           for O. After S, the missing columns of the other CTA's keys replace the other half, in the stages in which
//           that CTA keeps the same keys. So a pair gathers 1,664 B per key, not 2,176.
// Ring      A stage: 128 columns of 64 keys. Its barrier `full` has two phases per use: keys, values. The last 64 of
//           576 columns have their own buffer and are copied first. A step's keys stay until the next step's S and then
//           O are complete: eight of eleven stages (d_qk 512: of twelve). The other stages hold keys in flight.
// Queries   arrive in thirds (d_qk 512: quarters) in a shared-memory buffer. The last part stays there; the issuing
//           thread copies the others to tensor memory. Clusters are persistent: the Q and keys of the next query arrive
//           while O of a query is finished and stored.
// Roles     warp 0       issue     mma: all products, in CTA 0
//           warp 1       queries   producer of Q
//           warps 2-3    values    producer: replaces keys by values
//           warps 4-7    math      softmax: S → P, one head and half of the keys per thread; epilogue: O
//           warps 8-11   keys      producer: keys for S
// Timeline  keys    │ (O 0 frees) keys 3 ▒▒▒▒▒▒▒▒▒▒│ (O 1 frees) keys 4 ▒▒▒▒▒▒▒▒▒▒│ …
//           values  │ values 1 ▒▒▒▒            │ values 2 ▒▒▒▒            │ …
//           issue   │ O 0 ▓▓▓▓▓▓▓▓│ S 2 ▓▓▓▓▓▓▓▓▓│ O 1 ▓▓▓▓▓▓▓▓│ S 3 ▓▓▓▓▓▓▓▓▓│ …
//           math    │ P 1 ░░░░░░░░│ store        │ P 2 ░░░░░░░░│ store        │ …
// Budget    shared: (Q 3 + keys 11 × 2 + 1 + P 2) panels of 8,192 B = 229,376, values and barriers 1,804 (of 232,448);
//           tensor memory: O 256 + Q 192 + S 64 = 512 columns
// Bound     shared memory: S 98,304 + O 98,304 B of operands, 106,496 B of arriving keys and values, 16,384 B of stored
//           P: 2,496 cycles per step. The gather takes the same, 12 cycles for each of 208 instructions. Products take
//           2,176 cycles at the full rate. So the kernel can reach 0.87 of the matmul rate.
#pragma once

#include "ops/sparse_mla_forward/sm100/tile.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {

struct PairConfig {
  static constexpr int kHeads = 128, kThreads = 384;
  static constexpr int kIssueWarp = 0, kQueryWarp = 1, kValueWarps = 2, kFirstKeyWarp = 8, kKeyWarps = 4;
  static constexpr int kPartPanels = 2, kPartColumns = 64 * kPartPanels,
                       kParts = Config::kDv / kPartColumns;  // parts of a step
  static constexpr uint16_t kBoth = 3;                       // CTA mask of the pair
};

template <int kDqk>
struct PairStorage : MathStorage<kDqk, 2, 6> {
  static constexpr bool kHasTail = kDqk > Config::kDv;
  static constexpr int kStages = kHasTail ? 11 : 12;  // as many as fit
  static constexpr int kQPieces = PairStorage::kPanels / PairStorage::kQPanels;
  static_assert(PairStorage::kPanels % PairStorage::kQPanels == 0);
  alignas(1024) unsigned char keys[kStages][PairConfig::kPartPanels][tile::kPanelBytes];
  alignas(1024) unsigned char tail[1][kHasTail ? tile::kPanelBytes : 16];  // columns that are not values
  float max[2][2][Config::kHeads];                                         // [step % 2][half of the keys]
  tile::RingBarriers<kStages> key_barriers;
  tile::RingBarriers<1> tail_barriers;
  arch::mbarrier q_full, q_empty;
};
static_assert(sizeof(PairStorage<576>) <= arch::sm90::kMaxSharedBytes &&
              sizeof(PairStorage<512>) <= arch::sm90::kMaxSharedBytes);

#if HOPWELL_HAS_SM100A

// The ring's items are parts of a step's keys: 128 columns of 64 keys. For O, part i holds keys of CTA i % 2 and
// columns of half i / 2.
template <int kDqk>
using PartSlot = tile::RingSlot<PairStorage<kDqk>::kStages>;
using TailSlot = tile::RingSlot<1>;
enum FullPhase : uint32_t { kKeysCame, kValuesCame };  // parities of a stage's `full`

// Calls function(work, entries, steps) for all work tiles of this cluster, in order. Each role executes its part of
// them.
template <int kDqk, class Function>
HOPWELL_DEVICE void for_each_tile(const Params& p, const Function& function) {
  const uint32_t tiles = uint32_t(p.head_tiles), first = arch::cluster_rank() * Config::kHeads;
  HOPWELL_NO_UNROLL
  for (uint32_t number = arch::block_index() / 2; number < p.work_tiles; number += arch::grid_size() / 2) {
    const WorkTile work{int(number / tiles), int(number % tiles * PairConfig::kHeads + first)};
    const Entries entries = tile::entries_of(p.selection, work.query);
    function(work, entries, entries.tiles(PairStorage<kDqk>::kKeys));
  }
}

// ---- gather

// Starts the copies of four rows of kPanels panels. `lane`: index among the 16 lanes that copy the panels' rows.
template <int kPanels>
HOPWELL_DEVICE void gather_panels(const void* panels, const arch::TensorMap& map, int column, const int (&keys)[4],
                                  int lane, arch::mbarrier& full) {
  const uint32_t to = arch::shared_address(panels) + uint32_t(lane) * (tile::kPanelBytes / tile::kGatherLanes);
  HOPWELL_UNROLL
  for (int panel = 0; panel < kPanels; ++panel)
    arch::tma_gather4<2>(to + uint32_t(panel) * tile::kPanelBytes, map, column + tile::kPanelColumns * panel, keys,
                         in_first_cta(full));
}

// Copies a part of this CTA's keys. CTA 0 announces the bytes that arrive in both CTAs.
template <int kPanels>
HOPWELL_DEVICE void gather_part(const void* panels, const arch::TensorMap& map, int column, const int (&keys)[4],
                                int lane, arch::mbarrier& full, arch::Site site = arch::Site::current()) {
  if (arch::cluster_rank() == 0 && lane == 0)
    arch::mbarrier_arrive_expect_tx(full, 2 * kPanels * tile::kPanelBytes, site);
  gather_panels<kPanels>(panels, map, column, keys, lane, full);
}

// The keys of this CTA, copied by four lanes of each of four warps. Further lanes would have copies that nothing waits
// for; they could fall behind by two phases of `empty` and wait for ever.
template <int kDqk>
HOPWELL_DEVICE void gather_keys(const GatherParams& p, PairStorage<kDqk>& s, int lane) {
  using Storage = PairStorage<kDqk>;
  const int first = 64 * int(arch::cluster_rank());
  int number = 0;
  for_each_tile<kDqk>(p, [&](const WorkTile&, const Entries& entries, int steps) {
    int keys[4];
    tile::load_gathered_keys(keys, entries, first, lane);
    HOPWELL_NO_UNROLL
    for (int step = 0; step < steps; ++step, ++number) {
      if constexpr (Storage::kHasTail) {
        const TailSlot slot{s.tail_barriers, number};
        slot.wait_empty();
        gather_part<1>(s.tail, p.keys, Config::kDv, keys, lane, slot.full());
      }
      HOPWELL_NO_UNROLL
      for (int i = 0; i < PairConfig::kParts; ++i) {
        const PartSlot<kDqk> slot{s.key_barriers, PairConfig::kParts * number + i};
        slot.wait_empty();
        gather_part<PairConfig::kPartPanels>(s.keys[slot.stage()], p.keys, PairConfig::kPartColumns * i, keys, lane,
                                             slot.full());
      }
      tile::load_gathered_keys(keys, entries, (step + 1) * Storage::kKeys + first, lane);
    }
  });
}

// This CTA's columns of the other CTA's keys, after S is complete. Copied by eight lanes of each of two warps.
template <int kDqk>
HOPWELL_DEVICE void gather_values(const GatherParams& p, PairStorage<kDqk>& s, int lane) {
  using Storage = PairStorage<kDqk>;
  const int rank = int(arch::cluster_rank()), owner = rank ^ 1;
  int number = 0;
  for_each_tile<kDqk>(p, [&](const WorkTile&, const Entries& entries, int steps) {
    int keys[4];
    tile::load_gathered_keys(keys, entries, 64 * owner, lane);
    HOPWELL_NO_UNROLL
    for (int step = 0; step < steps; ++step, ++number) {
      arch::mbarrier_wait(s.s_full[number % 2], uint32_t(number / 2 & 1));
      HOPWELL_NO_UNROLL
      for (int i = 0; i < PairConfig::kParts; i += 2) {
        const PartSlot<kDqk> slot{s.key_barriers, PairConfig::kParts * number + i + owner};
        if (lane == 0)
          arch::mbarrier_arrive_expect_tx_cluster(in_first_cta(slot.full()),
                                                  PairConfig::kPartPanels * tile::kPanelBytes);
        gather_panels<PairConfig::kPartPanels>(s.keys[slot.stage()], p.keys, PairConfig::kPartColumns * (i + rank),
                                               keys, lane, slot.full());
      }
      tile::load_gathered_keys(keys, entries, (step + 1) * Storage::kKeys + 64 * owner, lane);
    }
  });
}

// ---- queries

// Executed by one warp.
template <int kDqk>
HOPWELL_DEVICE void load_queries(const Params& p, PairStorage<kDqk>& s) {
  using Storage = PairStorage<kDqk>;
  int use = 0;
  for_each_tile<kDqk>(p, [&](const WorkTile& work, const Entries&, int steps) {
    HOPWELL_NO_UNROLL
    for (int piece = 0; piece < Storage::kQPieces && steps > 0; ++piece, ++use) {
      arch::mbarrier_wait(s.q_empty, uint32_t(use & 1) ^ 1);
      copy_queries<Storage::kQPanels, 32>(p, s.q, work, 64 * Storage::kQPanels * piece, arch::lane_index());
      arch::cp_async_wait<0>();
      arch::fence_proxy_async();
      tell_issue<Storage>(s.q_full);
    }
  });
}

// ---- issue

// Copies all parts but the last to tensor memory: eight columns of all heads per copy, to both halves of the lanes. The
// old contents are not needed any more; otherwise the buffer in shared memory would not have been free.
template <int kDqk>
HOPWELL_DEVICE void take_queries(PairStorage<kDqk>& s, uint32_t tmem, int first_use) {
  using Storage = PairStorage<kDqk>;
  HOPWELL_NO_UNROLL
  for (int piece = 0; piece < Storage::kQPieces; ++piece) {
    arch::mbarrier_wait_cluster(s.q_full, uint32_t(first_use + piece & 1));
    if (piece + 1 == Storage::kQPieces) break;
    HOPWELL_NO_UNROLL
    for (int chunk = 0; chunk < 8 * Storage::kQPanels; ++chunk)
      arch::tcgen05_copy<2, arch::CopyShape::b64x128_02_13>(
          arch::tmem_address(tmem, 0, Tmem::kQ + 32 * Storage::kQPanels * piece + 4 * chunk),
          arch::at_address(tile::kTcgen05RowsAlongK,
                           arch::shared_address(s.q[chunk / 8]) + uint32_t(16 * (chunk % 8))));
    arch::tcgen05_commit_multicast<2>(s.q_empty, PairConfig::kBoth);
  }
}

// S (+)= Q Kᵀ over the 64 columns of a panel: 128 heads, 64 keys of each CTA.
template <int kDqk>
HOPWELL_DEVICE void multiply_panel(PairStorage<kDqk>& s, uint32_t tmem, int panel, const unsigned char* keys,
                                   bool accumulate) {
  constexpr int kTmemPanels = PairStorage<kDqk>::kTmemPanels;
  constexpr uint32_t kShape = arch::instruction_descriptor({.m = 128, .n = 128});
  const uint32_t d = arch::tmem_address(tmem, 0, PairStorage<kDqk>::kScores);
  HOPWELL_UNROLL
  for (int k = 0; k < 4; ++k) {
    const uint64_t b = columns_along_k(keys, k);
    const bool add = accumulate || k > 0;
    if (panel < kTmemPanels)
      arch::tcgen05_mma_f16_ts<2>(d, arch::tmem_address(tmem, 0, Tmem::kQ + 32 * panel + 8 * k), b, kShape, add);
    else
      arch::tcgen05_mma_f16<2>(d, columns_along_k(s.q[panel - kTmemPanels], k), b, kShape, add);
  }
}

// S [128 heads][128 keys] = Q Kᵀ, in the columns of the previous step's S. The last columns come first, because the
// next step needs their buffer first.
template <int kDqk>
HOPWELL_DEVICE void multiply_scores(PairStorage<kDqk>& s, uint32_t tmem, int number) {
  wait_scores_read(s, number);
  if constexpr (PairStorage<kDqk>::kHasTail) {
    const TailSlot slot{s.tail_barriers, number};
    slot.wait_full();
    multiply_panel(s, tmem, Config::kDv / 64, s.tail[0], false);
    arch::tcgen05_commit_multicast<2>(slot.empty(), PairConfig::kBoth);
  }
  HOPWELL_NO_UNROLL
  for (int i = 0; i < PairConfig::kParts; ++i) {
    const PartSlot<kDqk> slot{s.key_barriers, PairConfig::kParts * number + i};
    arch::mbarrier_wait(slot.full(), kKeysCame);
    HOPWELL_NO_UNROLL
    for (int panel = 0; panel < PairConfig::kPartPanels; ++panel)
      multiply_panel(s, tmem, PairConfig::kPartPanels * i + panel, s.keys[slot.stage()][panel],
                     PairStorage<kDqk>::kHasTail || i + panel > 0);
  }
  arch::tcgen05_commit_multicast<2>(s.s_full[number % 2], PairConfig::kBoth);
}

// O [128 heads][512 columns] (+)= P V: 256 columns for the keys of CTA 0, then of CTA 1; then the other 256 columns.
template <int kDqk>
HOPWELL_DEVICE void multiply_values(PairStorage<kDqk>& s, uint32_t tmem, const Step& step) {
  constexpr uint32_t kShape = arch::instruction_descriptor({.m = 128, .n = 256, .b_major = Major::mn});
  arch::mbarrier_wait_cluster(s.p_full[step.number % 2], uint32_t(step.number / 2 & 1));
  arch::tcgen05_fence_after_thread_sync();
  HOPWELL_NO_UNROLL
  for (int i = 0; i < PairConfig::kParts; ++i) {
    const PartSlot<kDqk> slot{s.key_barriers, PairConfig::kParts * step.number + i};
    const int owner = i % 2, half = i / 2;
    const uint32_t p = arch::shared_address(s.p[0][owner]), values = arch::shared_address(s.keys[slot.stage()]);
    arch::mbarrier_wait(slot.full(), kValuesCame);
    HOPWELL_UNROLL
    for (uint32_t k = 0; k < 4; ++k)
      arch::tcgen05_mma_f16<2>(arch::tmem_address(tmem, 0, Tmem::kOut + 128 * half),
                               arch::at_address(tile::kTcgen05RowsAlongK, p + 32 * k),
                               arch::at_address(tile::kTcgen05RowsAcrossK<64>, values + 2048 * k), kShape,
                               !step.first || owner > 0 || k > 0);
    arch::tcgen05_commit_multicast<2>(slot.empty(), PairConfig::kBoth);
  }
  arch::tcgen05_commit_multicast<2>(s.out_full[step.number % 2], PairConfig::kBoth);
}

// Executed by one thread of CTA 0. Math waits for its last commit, so that neither CTA exits before its products end.
template <int kDqk>
HOPWELL_DEVICE void issue(const Params& p, PairStorage<kDqk>& s) {
  const uint32_t tmem = s.tmem;
  int done = 0, use = 0;
  for_each_tile<kDqk>(p, [&](const WorkTile&, const Entries&, int steps) {
    if (steps == 0) return;
    take_queries(s, tmem, use);
    HOPWELL_NO_UNROLL
    for (int i = 0; i <= steps; ++i) {
      if (i < steps) multiply_scores(s, tmem, done + i);
      if (i + 1 == steps) arch::tcgen05_commit_multicast<2>(s.q_empty, PairConfig::kBoth);
      if (i > 0) multiply_values(s, tmem, {done + i - 1, i == 1});
    }
    done += steps, use += PairStorage<kDqk>::kQPieces;
  });
}

// ---- math: O's rows are heads; a thread has half of its head's columns

// Synchronises math warps i and i + 2, which have the same heads.
HOPWELL_DEVICE void meet(const MathThread& at, arch::Site site = arch::Site::current()) {
  arch::barrier_sync(kMathBarrier + at.warp % 2, 64, site);
}

// Updates row_max if this step's maximum exceeds it by more than rescale_threshold; then rescales O and the sum.
template <int kDqk>
HOPWELL_DEVICE void follow_max(RunningSoftmax& softmax, PairStorage<kDqk>& s, const MathThread& at, const Step& step,
                               float own_max) {
  auto& maxima = s.max[step.number % 2];
  maxima[at.half][at.row] = own_max;
  meet(at);
  const float max = fmaxf(own_max, maxima[at.half ^ 1][at.row]);
  softmax.max = fmaxf(softmax.max, max);
  const float next = tile::next_row_max(softmax.row_max, max);
  const float factor = tile::update_row_max(softmax.row_max, softmax.sum, next);
  if (!step.first && arch::ballot(factor != 1)) scale_out(s, at, step.number, [&](int, int) { return factor; });
}

// Stores 32 columns of O at a time, scaled, to global memory; zeros if there was no step.
template <int kDqk>
HOPWELL_DEVICE void store_out(const GatherParams& p, PairStorage<kDqk>& s, const WorkTile& work, const MathThread& at,
                              int steps, float scale) {
  const int head = work.first_head + at.row;
  bf16* const out = p.out + work.query * p.out_stride_s + head * p.out_stride_h;
  HOPWELL_NO_UNROLL
  for (int column = 0; column < Config::kDv / 2; column += 32) {
    uint32_t x[32] = {};
    if (steps > 0) tile::load_tensor_memory(x, arch::tmem_address(at.tmem, 32 * at.warp, Tmem::kOut + column));
    const auto value = [&](int i) { return scale == 0 ? 0 : arch::bit_cast<float>(x[i]) * scale; };
    HOPWELL_UNROLL
    for (int i = 0; i < 32; i += 16) {
      arch::Words8 words;
      HOPWELL_UNROLL
      for (int j = 0; j < 8; ++j) words.w[j] = arch::pack_bf16(value(i + 2 * j), value(i + 2 * j + 1));
      // Lanes 0 to 63 hold the first 128 of each 256 columns.
      if (head < p.h_q) store_columns(p, out + column % 128 + column / 128 * 256 + 128 * at.half + i, words);
    }
  }
}

// `last`: number of the last step, if there was one.
template <int kDqk>
HOPWELL_DEVICE void finish(const GatherParams& p, PairStorage<kDqk>& s, const WorkTile& work, const MathThread& at,
                           const RunningSoftmax& softmax, int steps, int last) {
  const int head = work.first_head + at.row;
  float sum = 0;
  if (steps > 0) {
    s.sum[at.half][at.row] = softmax.sum;
    meet(at);
    sum = s.sum[0][at.row] + s.sum[1][at.row];
    wait_out(s, last);
    arch::tcgen05_fence_after_thread_sync();
  }
  const float lse = tile::lse_of(tile::finite_row_max(softmax.row_max), sum);
  store_out(p, s, work, at, steps, output_scale(p, head, 1, sum, lse));
  if (head < p.h_q && at.half == 0) store_statistics(p, work.query, head, tile::max_or_nan(softmax.max, sum), lse);
  arch::tcgen05_fence_before_thread_sync();
}

// ---- kernel

// Runs the role of this warp.
template <int kDqk>
HOPWELL_DEVICE void run_role(const GatherParams& p, PairStorage<kDqk>& s) {
  constexpr int kKeyLanes = tile::kGatherLanes / PairConfig::kKeyWarps,
                kValueLanes = tile::kGatherLanes / PairConfig::kValueWarps;
  const int warp = arch::warp_index(), lane = arch::lane_index();
  if (warp == PairConfig::kIssueWarp) {
    if (arch::cluster_rank() == 0 && arch::elect_one()) issue(p, s);
  } else if (warp == PairConfig::kQueryWarp) {
    load_queries(p, s);
  } else if (warp < Config::kFirstMathWarp) {
    if (lane < kValueLanes) gather_values(p, s, kValueLanes * (warp % PairConfig::kValueWarps) + lane);
  } else if (warp < PairConfig::kFirstKeyWarp) {
    int done = 0;
    for_each_tile<kDqk>(p, [&](const WorkTile& work, const Entries& entries, int steps) {
      math(p, s, work, entries, done);
      done += steps;
    });
  } else if (lane < kKeyLanes) {
    gather_keys(p, s, kKeyLanes * (warp % PairConfig::kKeyWarps) + lane);
  }
  arch::syncwarp();  // kept: lanes have diverged
}

#endif

template <int kDqk>
__global__ void __launch_bounds__(PairConfig::kThreads, 1)
    sparse_mla_fwd_sm100_pair(const __grid_constant__ GatherParams p) {
#if HOPWELL_HAS_SM100A
  auto& s = arch::dynamic_smem<PairStorage<kDqk>>();
  const bool issues = arch::warp_index() == PairConfig::kIssueWarp;
  if (arch::thread_index() == 0) {
    s.key_barriers.init(1, 1);
    s.tail_barriers.init(1, 1);
    arch::mbarrier_init(s.q_full, PairStorage<kDqk>::kCtas);
    arch::mbarrier_init(s.q_empty, 1);
    init_math_barriers(s);
    arch::fence_mbarrier_init();
  }
  arch::syncwarp();  // kept: a lane has diverged
  if (issues) s.tmem.allocate();
  arch::cluster_sync();
  run_role(p, s);
  arch::cluster_sync();
  if (issues) s.tmem.free();
#endif
}

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
