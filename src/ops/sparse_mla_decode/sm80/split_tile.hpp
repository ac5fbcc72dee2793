// The split kernel of sparse_mla_decode: its tile, its shared memory, and the copies of rows. See split.hpp.
#pragma once

#include <bit>
#include <cmath>

#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/convert.hpp"
#include "arch/sm80/matrix.hpp"
#include "ops/sparse_mla_decode/gpu/kernels.hpp"
#include "ops/sparse_mla_decode/gpu/work.hpp"
#include "tile/gpu/e4m3.hpp"
#include "tile/gpu/fragment.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

template <class TheRows, int kTheHeads>
struct SplitConfig {
  using Codes = tile::ShiftedCodes;
  using Row = TheRows;
  static constexpr int kHeads = kTheHeads, kHeadBlocks = kHeads / 8;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kKeys = 32, kListed = kThreads;  // keys of a step; entries that are listed at a time
  static constexpr int kStages = TheRows::kHasCodes && kHeads <= 16 ? 3 : 2;
  static constexpr int kStageBytes = kKeys * TheRows::kPitch;
  static constexpr int kPitchS = kKeys + 4, kPitchP = kKeys + 8;   // elements; no bank conflicts
  static constexpr int kLanesOfHead = 32 / kHeadBlocks;            // in the softmax; each has kHeadBlocks keys
  static constexpr int kChunks = 4 + (TheRows::kHasRope ? 1 : 0);  // of 16 columns, that a warp multiplies with Q
  // CTAs per SM by registers: two, unless a kernel needs more than 128. 32 heads do, and 16 heads of V4, whose last
  // block is bf16. An SM that has less shared memory than Hopper's may run one: see Budget in split.hpp.
  static constexpr int kCtasOfSm = kHeads == 32 || (kHeads == 16 && TheRows::kHasCodes && TheRows::is_plain(7)) ? 1 : 2;
  static constexpr bool kFp16 = TheRows::kHasCodes;                      // type of P and of Q, but for plain blocks
  static constexpr float kScaleUnit = TheRows::kHasScales ? 0x1p8F : 1;  // factor of scales as fp16
};

// The factor that the softmax removes from scores. Decoded codes are too large by kUnit. Where there are scales, the
// products with them remove it.
template <class Config>
inline constexpr float kScoreUnit = Config::Row::kHasCodes && !Config::Row::kHasScales ? Config::Codes::kUnit : 1;

// The work of a CTA. The compiler computes it again at each call, so that it needs no registers between calls.
template <class Config>
HOPWELL_DEVICE Work work_of(const SplitParams& p) {
  return Work(p, Config::kHeads, arch::block_index_anew());
}

// Rows of the cache, the list of those that are copied next, their scales, and scores.
template <class Config>
struct SplitStorage {
  using Row = typename Config::Row;
  alignas(128) unsigned char stages[Config::kStages][Config::kStageBytes];
  alignas(16) float scores[Config::kWarps][Config::kHeads][Config::kPitchS];  // partial ones
  alignas(16) uint16_t p[Config::kHeads][Config::kPitchP];
  alignas(16) uint16_t scales[Config::kWarps][Row::kScales][Config::kKeys];  // of each warp's block, fp16
  const unsigned char* rows[Config::kListed];
  const unsigned char* second[RowAddress<Row>::kHasSecond ? Config::kListed : 1];
  float factors[Config::kHeads];                 // row_scale of a step; at the end the factor of the output
  float maxima[Config::kWarps][Config::kHeads];  // of |q| over a warp's columns
  int counts[Config::kWarps];                    // valid entries that each warp has listed
  int keys[Config::kStages];                     // of a stage that are valid
};

// ---- copies of rows -------------------------------------------------------------------------------------------------

// Lists a split's rows and copies them to the stages, in order.
template <class Config>
struct Copies {
  using Row = typename Config::Row;
  static constexpr int kThreadsOfRow = 16, kRowsAtOnce = Config::kThreads / kThreadsOfRow;

  const SplitParams& p;
  SplitStorage<Config>& s;
  int next = 0;    // entry that is listed next
  int count;       // entries
  int listed = 0;  // rows in the list
  int taken = 0;   // of them, by copies
  int steps = 0;   // whose copies have been issued

  // Lists the rows of the next kListed entries that are valid, in their order.
  HOPWELL_DEVICE void list() {
    const Entries entries(p, work_of<Config>(p));
    const int warp = arch::warp_index(), lane = arch::lane_index();
    const int entry = entries.entry(uint32_t(next + arch::thread_index()));
    const int slot = entries.slots.of(entry);
    const uint32_t valid = arch::ballot(slot >= 0);
    if (lane == 0) s.counts[warp] = std::popcount(valid);
    arch::syncthreads();
    int before = std::popcount(valid & ((1U << lane) - 1));
    listed = taken = 0;
    HOPWELL_UNROLL
    for (int w = 0; w < Config::kWarps; ++w) {
      before += w < warp ? s.counts[w] : 0;
      listed += s.counts[w];
    }
    if (slot >= 0) {
      const RowAddress<Row> address(p, entries, slot);
      s.rows[before] = address.data;
      if constexpr (RowAddress<Row>::kHasSecond) s.second[before] = address.second;
    }
    next = count - next > Config::kListed ? next + Config::kListed : count;
    arch::syncthreads();
  }

  // The copies of a step's keys, which start in two parts.
  struct Step {
    uint32_t to;  // of the stage
    int first;    // row of the list
    bool exists;
  };

  // Prepares the copies of the next step's keys, if there is one. All threads call it.
  HOPWELL_DEVICE Step next_step(int stage) {
    while (taken >= listed && next < count) list();
    const Step step{arch::shared_address(s.stages[stage]), taken, taken < listed};
    if (step.exists) {
      const int left = listed - taken;
      if (arch::thread_index() == 0) s.keys[stage] = left < Config::kKeys ? left : Config::kKeys;
      taken += Config::kKeys, ++steps;
    }
    return step;
  }
  HOPWELL_DEVICE void start(const Step& step, int part) const {
    static_assert(Config::kKeys == 2 * kRowsAtOnce);
    const int thread = arch::thread_index() % kThreadsOfRow,
              row = part * kRowsAtOnce + arch::thread_index() / kThreadsOfRow;
    if (step.exists) copy_row(step.to + uint32_t(row * Row::kPitch), step.first + row, thread);
  }

  HOPWELL_DEVICE void copy_row(uint32_t to, int number, int thread) const {
    constexpr int kDataChunks = Row::kDataBytes / 16;
    const bool valid = number < listed;
    const unsigned char* row = valid ? s.rows[number] : p.keys.cache.data;
    int chunks = kDataChunks;
    if constexpr (Row::kMayHaveRopeCache) {
      if (p.rope_cache.data) {
        chunks = 2 * kDv / 16;
        const unsigned char* rope = valid ? s.second[number] : p.rope_cache.data;
        if (thread < 2 * (Row::kWidth - kDv) / 16)
          arch::cp_async(to + uint32_t(Row::kRopeAt + 16 * thread), rope + 16 * thread, valid ? 16 : 0);
      }
    }
    HOPWELL_UNROLL
    for (int chunk = thread; chunk < kDataChunks; chunk += kThreadsOfRow)
      if (chunk < chunks) arch::cp_async(to + uint32_t(16 * chunk), row + 16 * chunk, valid ? 16 : 0);
    if constexpr (Row::kSecondBytes > 0) {
      const unsigned char* second = valid ? s.second[number] : p.keys.cache.data;
      if (thread == kThreadsOfRow - 1)
        arch::cp_async<Row::kSecondBytes>(to + Row::kDataBytes, second, valid ? Row::kSecondBytes : 0);
    }
  }
};

// ---- keys of a step as operands -------------------------------------------------------------------------------------

// Address of this lane's row for ldmatrix: 16 keys from `key` on, and the two 16-byte chunks from byte `offset` on.
template <class Config>
HOPWELL_DEVICE uint32_t matrices_of_keys(const SplitStorage<Config>& s, int stage, int key, int offset) {
  const int lane = arch::lane_index();
  return arch::shared_address(s.stages[stage]) +
         uint32_t((key + lane % 16) * Config::Row::kPitch + offset + lane / 16 * 16);
}

// bf16(fp32(code · scale)) of two codes in bytes `low` and `high` of a word, with a scale each.
HOPWELL_DEVICE uint32_t scaled_codes(uint32_t codes, int low, int high, float scale_low, float scale_high) {
  return arch::pack_bf16(tile::e4m3_to_float(codes >> 8 * low & 0xff) * scale_low,
                         tile::e4m3_to_float(codes >> 8 * high & 0xff) * scale_high);
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
