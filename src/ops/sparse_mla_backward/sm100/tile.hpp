// sparse_mla_backward on Blackwell: shared by the kernels for 64 and for 128 heads. Operands in shared and tensor
// memory, the gather of keys, P and dS, the way of a chunk of dKV out of tensor memory, and dQ. Roles, timeline and
// budget: single.hpp and pair.hpp.
//
// All products are cta_group::1. Operands are panels of 64 columns: rows of 128 bytes, 128-byte swizzle, read K-major
// or MN-major from the same buffer. Keys of invalid entries are −1: the copy engine fills their rows with zeros,
// nothing is added for them, and the exponent is clamped, so that 0 · P is 0. Padding heads have Q = dO = 0 and lse =
// +inf.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/cluster.hpp"
#include "ops/sparse_mla_backward/add_dkv.hpp"
#include "ops/sparse_mla_backward/passes/main_pass.hpp"
#include "ops/sparse_mla_backward/prologue.hpp"
#include "ops/sparse_mla_backward/throttle.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/tcgen05_panel.hpp"
#include "tile/gpu/tensor_memory.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

using arch::Major;

struct Config {
  static constexpr int kKeys = 64, kThreads = 384, kWarps = kThreads / 32, kPanelsV = kDv / 64;
  static constexpr float kLargestExponent = 64;
};

// Role of a warp. The warps of a warpgroup that reads tensor memory access a quarter of its lanes each.
enum class Role { gather, issue, idle, softmax, scatter };
HOPWELL_DEVICE Role role_of(int warp) {
  return warp == 0   ? Role::gather
         : warp == 1 ? Role::issue
         : warp < 4  ? Role::idle
         : warp < 8  ? Role::softmax
                     : Role::scatter;
}

// Parameters, with tensor maps of the keys: 64 and 32 columns of a row at a time.
struct GatherParams : Params {
  arch::TensorMap rows, narrow_rows;
};

// kRows rows of 64 columns.
template <int kRows>
struct Panel {
  alignas(1024) uint8_t bytes[kRows * 128];
};

HOPWELL_DEVICE bool has_sums(const Params& p) { return p.dkv || p.fixed_dkv; }

// The keys of a step, for load_sum_rows.
struct EntryKeys {
  const Entries& entries;
  int first;
  HOPWELL_DEVICE int operator[](int i) const { return entries.key(first + i); }
};

#if HOPWELL_HAS_SM100A

// ---- Q, dO and keys

// Starts the copies of 64 kPanels columns of kRows heads, from `column` on, to panels; with kNarrow also of the 32
// columns from `narrow_column` on to a narrow panel. Executed by all threads; padding heads are filled with zeros.
template <int kRows, int kPanels, bool kNarrow = false>
HOPWELL_DEVICE void load_heads(uint32_t panels, const bf16* source, int64_t stride, int heads, int column = 0,
                               uint32_t narrow_panel = 0, int narrow_column = 0) {
  constexpr int kChunks = 8 * kPanels + (kNarrow ? 4 : 0);
  for (int e = arch::thread_index(); e < kRows * kChunks; e += Config::kThreads) {
    const int row = e / kChunks, chunk = e % kChunks, panel = chunk / 8;
    const bool narrow = kNarrow && panel == kPanels;
    const uint32_t target = narrow ? narrow_panel + tile::swizzled_narrow(row, chunk % 8)
                                   : panels + uint32_t(panel * kRows * 128) + tile::swizzled(row, chunk % 8);
    const int from = narrow ? narrow_column + 8 * (chunk % 8) : column + 8 * chunk;
    arch::cp_async(target, source + (row < heads ? row * stride + from : 0), row < heads ? 16 : 0);
  }
}

// ---- P and dS

// One head and kCount keys: exp(score − lse), at most 2^64. NaN stays NaN.
template <int kCount>
HOPWELL_DEVICE void exponentiate(float (&p)[kCount], const uint32_t (&scores)[kCount], float scale_log2,
                                 float lse_log2) {
  HOPWELL_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const float e = arch::bit_cast<float>(scores[i]) * scale_log2 - lse_log2;
    p[i] = arch::exp2_approx(e > Config::kLargestExponent ? Config::kLargestExponent : e);
  }
}

// Adds exp(score − lse) of a warp's 32 heads to attn, in the order of the selection: one lane for each of its 32
// entries, from `entry` on.
HOPWELL_DEVICE void add_attn(const Params& p, const float (&probability)[32], const WorkTile& work,
                             const Entries& entries, int entry) {
  const int lane = arch::lane_index();
  float sums[32];
  HOPWELL_UNROLL
  for (int i = 0; i < 32; ++i) sums[i] = probability[i];
  const float sum = tile::share_sums_of_warp(sums);
  if (entries.key(entry + lane) >= 0)
    arch::red_add(p.attn + work.query * p.attn_stride + entries.place(work.first_entry) + entry + lane, sum);
  arch::syncwarp();  // kept: lanes have diverged
}

// Eight keys of a head: converts P (before multiplication by `sink_scale`) and dP to P and dS in shared
// memory. Returns dS.
HOPWELL_DEVICE arch::Words4 store_p_and_ds(const float* probability, const uint32_t* d_probability, float sink_scale,
                                           float sm_scale, float delta, uint32_t p, uint32_t ds) {
  float x[8], y[8];
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) {
    x[i] = probability[i] * sink_scale;
    y[i] = x[i] * (arch::bit_cast<float>(d_probability[i]) * sm_scale - delta);
  }
  arch::store_shared_v4(p, tile::pack_chunk(x));
  const arch::Words4 packed = tile::pack_chunk(y);
  arch::store_shared_v4(ds, packed);
  return packed;
}

// ---- dKV

// Adds 2 kSize columns of a warp's 16 keys.
template <bool kFixed, int kSize>
HOPWELL_DEVICE void add_loaded(const Params& p, const uint32_t (&loaded)[kSize], int column,
                               const SumRows<kFixed>& rows) {
  float acc[kSize];
  HOPWELL_UNROLL
  for (int i = 0; i < kSize; ++i) acc[i] = arch::bit_cast<float>(loaded[i]);
  add_panel(p, acc, column, rows);
}

// A warp adds its 32 lanes' rows of an accumulator: kColumns columns of tensor memory from `address` on, which names
// its quarter. Arrives on `empty` as soon as the columns are in registers.
template <bool kFixed, int kColumns>
HOPWELL_DEVICE void add_accumulator(const Params& p, const SumRows<kFixed> (&rows)[2], uint32_t address,
                                    arch::mbarrier& empty, int column) {
  uint32_t low[kColumns / 2], high[kColumns / 2];
  arch::tmem_load<arch::TmemShape::b16x256>(low, address);
  arch::tmem_load<arch::TmemShape::b16x256>(high, arch::tmem_address(address, 16, 0));
  arch::tmem_wait_load(low);
  arch::pin_registers(high);
  arch::tcgen05_fence_before_thread_sync();
  arch::mbarrier_arrive(empty);
  add_loaded<kFixed>(p, low, column, rows[0]);
  add_loaded<kFixed>(p, high, column, rows[1]);
}

// Offsets at which a lane adds for two groups of 16 keys of a step; `group` is the first.
template <int kDqk, bool kFixed>
HOPWELL_DEVICE void load_group_rows(SumRows<kFixed> (&rows)[2], const Params& p, const Entries& entries, int step,
                                    int group) {
  const EntryKeys keys{entries, step * Config::kKeys};
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) rows[i] = load_sum_rows<kDqk, kFixed>(p, keys, 32 * (group + i) + arch::lane_index());
}

// ---- dQ

// Destination of a thread's head of dQ: bf16 in the output, or fp32 of a split.
struct DqRow {
  bf16* output;
  float* split;  // or null
  bool exists;
};
template <int kHeads>
HOPWELL_DEVICE DqRow dq_row(const Params& p, const WorkTile& work, int row, int d_qk) {
  const int head = work.first_head + row;
  return {p.dq + work.query * p.dq_stride_s + head * p.dq_stride_h,
          work.split < 0 ? nullptr : p.dq_splits + (int64_t{work.split} * kHeads + row) * d_qk, head < p.h_q};
}

HOPWELL_DEVICE void store_dq8(const DqRow& row, int column, const float* x) {
  if (row.split) {
    for (int i = 0; i < 8; ++i) row.split[column + i] = x[i];
  } else if (row.exists) {
    arch::store_streaming(row.output + column, tile::pack_chunk(x));
  }
}

// Stores kColumns columns of a thread's head, from `column` on: from tensor memory, or zeros if there was no step.
template <int kColumns>
HOPWELL_DEVICE void store_dq(const DqRow& row, int column, uint32_t address) {
  HOPWELL_NO_UNROLL
  for (int c = 0; c < kColumns; c += 32) {
    uint32_t loaded[32];
    tile::load_tensor_memory(loaded, arch::tmem_address(address, 0, c));
    float x[32];
    HOPWELL_UNROLL
    for (int i = 0; i < 32; ++i) x[i] = arch::bit_cast<float>(loaded[i]);
    HOPWELL_UNROLL
    for (int i = 0; i < 32; i += 8) store_dq8(row, column + c + i, x + i);
  }
}
HOPWELL_DEVICE void store_no_dq(const DqRow& row, int first_column, int last_column) {
  const float zeros[8] = {};
  for (int c = first_column; c < last_column; c += 8) store_dq8(row, c, zeros);
}

// ---- roles

// Runs the role of this warp, in either kernel. Called by all threads; a barrier must follow.
template <bool kFixed, bool kAttn, class Storage>
HOPWELL_DEVICE void run_role(const GatherParams& p, Storage& s, const WorkTile& work, const Entries& entries) {
  const int steps = entries.tiles(Config::kKeys);
  switch (role_of(arch::warp_index())) {
    case Role::gather:
      if (arch::lane_index() < tile::kGatherLanes) gather(p, s, entries);
      break;
    case Role::issue:
      if (steps > 0 && arch::elect_one()) issue(p, s, steps);
      break;
    case Role::softmax:
      softmax<kAttn>(p, s, work, entries);
      store_dq_tile(p, s, work, steps);
      break;
    case Role::scatter:
      if (has_sums(p)) scatter<kFixed>(p, s, entries);
      break;
    case Role::idle:
      break;
  }
  arch::syncwarp();  // kept: a lane has diverged
}

#endif

// ---- launch

// Launches the variant for the sums of a call: integers, sums over heads, or neither.
template <auto kFixedKernel, auto kAttnKernel, auto kPlainKernel>
void launch_variant(const Problem& problem, const Plan& plan, void* workspace, const MainPass& pass,
                    std::size_t shared_bytes, Stream stream) {
  if (pass.clusters() == 0) return;
  const GatherParams p{{},
                       tile::map_of_rows(problem.kv, problem.q, 64, arch::Swizzle::bytes128),
                       tile::map_of_rows(problem.kv, problem.q, 32, arch::Swizzle::bytes64)};
  if (plan.dkv_accum == DkvAccum::fixed_point)
    launch_main<kFixedKernel>(problem, plan, workspace, pass, p, Config::kThreads, shared_bytes, stream);
  else if (problem.attn && !plan.distribution)
    launch_main<kAttnKernel>(problem, plan, workspace, pass, p, Config::kThreads, shared_bytes, stream);
  else
    launch_main<kPlainKernel>(problem, plan, workspace, pass, p, Config::kThreads, shared_bytes, stream);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
