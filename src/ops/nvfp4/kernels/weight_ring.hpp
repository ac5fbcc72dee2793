// Copies of weights for mma and wgmma: each warp has a ring of stages in shared memory. It fills the ring by cp.async,
// a few stages ahead of its products.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "ops/nvfp4/kernels/operands.hpp"
#include "tile/gpu/fragment.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

// ---- a stage -------------------------------------------------------------------------------------------------------

// A stage is codes [16 rows][256 k], then scales [16 rows][16]. The halves of odd rows of codes are exchanged, so that
// lanes of neighbouring rows read different banks. A lane copies 16 bytes of codes of rows r, r + 4, r + 8 and r + 12,
// and 8 scales of a row.

// Operands of lane (g, t) in half a stage: 32 codes of row g and 32 codes of row g + 8, from k = 32 t on, and the
// scales of their two blocks.
struct StageFragment {
  arch::Words4 upper, lower;
  uint16_t upper_scales, lower_scales;
};

HOPWELL_DEVICE StageFragment load_fragment(const unsigned char* stage, int half) {
  const int g = tile::fragment_row(), t = tile::quad_lane();
  const unsigned char* codes = stage + g * 128 + (4 * (half ^ g % 2) + t) * 16;
  const auto* scales = reinterpret_cast<const uint16_t*>(stage + StageConfig::kCodeBytes + g * 16 + half * 8 + t * 2);
  return {load_words(codes), load_words(codes + 1024), scales[0], scales[64]};
}

// ---- rings ---------------------------------------------------------------------------------------------------------

// A warp's ring over all stages of a slice of K, tile after tile. Consecutive whole stages of a tile with contiguous
// scales form a run, which is copied without bounds checks.
template <int kStages>
class WeightRing {
 public:
  HOPWELL_DEVICE WeightRing(const unsigned char* stages, int batch)
      : stages_(stages),
        codes_to_(
            arch::shared_address(stages) +
            uint32_t(arch::lane_index() / 8 * 128 + ((arch::lane_index() ^ arch::lane_index() / 8 * 4) & 7) * 16)),
        scales_to_(arch::shared_address(stages) + uint32_t(StageConfig::kCodeBytes + arch::lane_index() * 8)),
        batch_(batch) {}

  // Continues with `count` stages of `slice`: from stage `stage` of tile `tile` on, then through the following tiles.
  template <class Params>
  HOPWELL_DEVICE void start(const Params& p, const Slice& slice, int tile, int stage, int count) {
    slice_ = slice, tile_ = tile, stage_ = stage, stages_left_ = count, run_left_ = run_length_ = 0;
    if (stages_left_ == 0) return;
    seek(p);
    begin_run(p);
  }

  // Prefetches the codes of the first `count` stages into L2, two stages at a time, a row a lane. Harmless while
  // another kernel still writes them.
  template <class Params>
  HOPWELL_DEVICE void prefetch_l2(const Params& p, int count) const {
    constexpr int kRows = StageConfig::kRows, kStageK = StageConfig::kStageK;
    if (count > stages_left_) count = stages_left_;
    const int lane = arch::lane_index();
    int stage = stage_ + lane / kRows, tile = tile_;
    for (int i = lane / kRows; i < count; i += 2, stage += 2) {
      while (stage >= slice_.stages) stage -= slice_.stages, ++tile;
      const int64_t row = tile * kRows + lane % kRows;
      if (row >= p.rows || stage >= slice_.whole) continue;
      const int k = slice_.begin + stage * kStageK;
      arch::prefetch_l2(p.weight.row(row, batch_) + k / 2);
    }
  }

  // Starts the copies of the next stage, if there is a next stage, and commits a group. After the last stage it calls
  // at_end(), which may call start().
  template <class Params, class AtEnd>
  HOPWELL_DEVICE void copy_next(const Params& p, AtEnd at_end) {
    if (run_left_ > 0) [[likely]] {
      arch::cp_async(codes_to_ + fill_, codes_);
      HOPWELL_UNROLL
      for (int i = 0; i < 3; ++i) arch::cp_async(codes_to_ + fill_ + uint32_t(512 * (i + 1)), codes_ + row_offsets_[i]);
      arch::cp_async<8>(scales_to_ + fill_, scales_);
      codes_ += StageConfig::kStageK / 2, scales_ += StageConfig::kStageK / kCodesPerBlock;
      if (--run_left_ == 0) [[unlikely]]
        end_run(p, run_length_, at_end);
    } else if (stages_left_ > 0) {
      copy_partial(p);
      end_run(p, 1, at_end);
    }
    advance();
    arch::cp_async_commit();
  }
  template <class Params>
  HOPWELL_DEVICE void copy_next(const Params& p) {
    copy_next(p, [] {});
  }

  // The oldest stage, to be called after a wait and a copy_next(), which refills the slot before the oldest stage.
  HOPWELL_DEVICE const unsigned char* oldest() const { return stages_ + fill_; }

  // Waits for the copies in flight and drops them.
  HOPWELL_DEVICE void cancel() {
    arch::cp_async_wait_all();
    stages_left_ = run_left_ = 0, fill_ = 0;
  }

 private:
  static constexpr uint32_t kEnd = kStages * StageConfig::kStageBytes;

  HOPWELL_DEVICE void advance() {
    fill_ += StageConfig::kStageBytes;
    if (fill_ == kEnd) fill_ = 0;
  }

  template <class Params>
  HOPWELL_DEVICE void seek(const Params& p) {
    const int lane = arch::lane_index(), first = tile_ * StageConfig::kRows, last = p.rows - 1;
    const auto row = [&](int i) {
      return first + i < last ? first + i : last;
    };  // rows beyond the matrix repeat the last row
    const int64_t offset = row(lane / 8) * p.weight.row_stride;
    HOPWELL_UNROLL
    for (int i = 0; i < 3; ++i) row_offsets_[i] = uint32_t(row(lane / 8 + 4 * (i + 1)) * p.weight.row_stride - offset);
    const int k = slice_.begin + stage_ * StageConfig::kStageK;
    codes_ = p.weight.row(0, batch_) + offset + k / 2 + lane % 8 * 16;
    const int scale_row = row(lane / 2), group = k / 64 + lane % 2 * 2;
    const Scales& scales = p.weight.scales;
    scales_ =
        scales.data + batch_ * scales.batch_stride + group * scale_step(p) +
        (scales.blocked ? hopwell::nvfp4::blocked_offset(scale_row, 0, scales.columns) : scale_row * scales.row_stride);
  }

  template <class Params>
  HOPWELL_DEVICE void begin_run(const Params& p) {
    const int whole = slice_.whole - stage_, most = whole < stages_left_ ? whole : stages_left_;
    run_length_ = run_left_ = p.whole_scales && most > 0 ? most : 0;
  }

  template <class Params, class AtEnd>
  HOPWELL_DEVICE void end_run(const Params& p, int stages, AtEnd at_end) {
    stage_ += stages, stages_left_ -= stages;
    if (stages_left_ == 0) return at_end();
    if (stage_ == slice_.stages) next_tile(p);
    begin_run(p);
  }

  template <class Params>
  HOPWELL_DEVICE void next_tile(const Params& p) {
    ++tile_, stage_ = 0;
    if (p.weight.scales.blocked || (tile_ + 1) * StageConfig::kRows > p.rows) [[unlikely]]
      return seek(p);
    constexpr int64_t kRows = StageConfig::kRows;  // a whole tile has the row offsets of the previous tile
    codes_ += kRows * p.weight.row_stride - slice_.stages * (StageConfig::kStageK / 2);
    scales_ += kRows * p.weight.scales.row_stride - slice_.stages * (StageConfig::kStageK / kCodesPerBlock);
  }

  template <class Params>
  HOPWELL_DEVICE static int scale_step(const Params& p) {  // bytes from four scales to the next four
    return p.weight.scales.blocked ? 512 : 4;
  }

  // Copies any stage: zeros beyond the end of K, four scales at a time.
  template <class Params>
  HOPWELL_DEVICE void copy_partial(const Params& p) {
    const int left = slice_.end - slice_.begin - stage_ * StageConfig::kStageK, lane = arch::lane_index();
    const int bytes = clamp_bytes(left / 2 - lane % 8 * 16, 16);
    arch::cp_async(codes_to_ + fill_, codes_, bytes);
    HOPWELL_UNROLL
    for (int i = 0; i < 3; ++i)
      arch::cp_async(codes_to_ + fill_ + uint32_t(512 * (i + 1)), codes_ + row_offsets_[i], bytes);
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int scales = clamp_bytes(left / kCodesPerBlock - lane % 2 * 8 - 4 * i, 4);
      arch::cp_async<4>(scales_to_ + fill_ + uint32_t(4 * i), scales_ + i * scale_step(p), scales);
    }
    codes_ += StageConfig::kStageK / 2, scales_ += 4 * scale_step(p);
  }

  const uint8_t *codes_ = nullptr, *scales_ = nullptr;  // this lane's next codes and scales in global memory
  const unsigned char* stages_;
  uint32_t codes_to_, scales_to_;  // destinations of this lane's codes and scales in stage 0 of the ring
  uint32_t fill_ = 0;              // offset of the next stage to fill, bytes
  uint32_t row_offsets_[3] = {};   // from this lane's first row of codes to its other three rows
  int batch_;
  int tile_ = 0, stage_ = 0, stages_left_ = 0;  // start of the run; stages from there to the end
  int run_left_ = 0, run_length_ = 0;           // stages of the run: remaining, total
  Slice slice_{};
};

// A warp's ring of one tile: every `step`-th stage of a slice of K, from `stage` on.
template <int kStages>
class TileRing {
 public:
  // If the tile does not exist, the ring delivers zeros and reads nothing.
  template <class Params>
  HOPWELL_DEVICE TileRing(const Params& p, const Slice& slice, const unsigned char* stages, int tile, bool exists,
                          int stage, int step)
      : stages_(stages), step_(step) {
    const int lane = arch::lane_index(), last = p.rows - 1;
    const uint32_t to = arch::shared_address(stages);
    codes_to_ = to + uint32_t(lane / 8 * 128 + ((lane ^ lane / 8 * 4) & 7) * 16);
    scales_to_ = to + uint32_t(StageConfig::kCodeBytes + lane * 8);
    const int k = slice.begin + stage * StageConfig::kStageK;
    left_ = exists ? slice.end - k : 0;
    stages_left_ = stage < slice.stages ? (slice.stages - stage + step - 1) / step : 0;
    const auto row = [&](int i) {  // rows beyond the matrix repeat the last row
      const int of_all = tile * StageConfig::kRows + i;
      return of_all < last ? of_all : last;
    };
    const int64_t first = row(lane / 8) * p.weight.row_stride;
    HOPWELL_UNROLL
    for (int i = 0; i < 3; ++i) row_offsets_[i] = uint32_t(row(lane / 8 + 4 * (i + 1)) * p.weight.row_stride - first);
    codes_ = p.weight.codes + first + k / 2 + lane % 8 * 16;
    const int scale_row = row(lane / 2), group = k / 64 + lane % 2 * 2;
    const Scales& scales = p.weight.scales;
    scales_ =
        scales.data + group * (scales.blocked ? 512 : 4) +
        (scales.blocked ? hopwell::nvfp4::blocked_offset(scale_row, 0, scales.columns) : scale_row * scales.row_stride);
  }

  // Prefetches the codes of the first stage into L2. Harmless while another kernel still writes them.
  HOPWELL_DEVICE void prefetch_l2() const {
    if (arch::lane_index() % 8 != 0 || stages_left_ == 0 || left_ < StageConfig::kStageK) return;
    arch::prefetch_l2(codes_);
    HOPWELL_UNROLL
    for (uint32_t offset : row_offsets_) arch::prefetch_l2(codes_ + offset);
  }

  // Starts the copies of the next stage, if there is a next stage, and commits a group.
  template <class Params>
  HOPWELL_DEVICE void copy_next(const Params& p) {
    if (stages_left_ > 0) {
      --stages_left_;
      const int step = step_ * StageConfig::kStageK,
                scale_step = p.weight.scales.blocked ? 512 : 4;  // bytes of four scales
      if (p.whole_scales && left_ >= StageConfig::kStageK) [[likely]] {
        arch::cp_async(codes_to_ + fill_, codes_);
        HOPWELL_UNROLL
        for (int i = 0; i < 3; ++i)
          arch::cp_async(codes_to_ + fill_ + uint32_t(512 * (i + 1)), codes_ + row_offsets_[i]);
        arch::cp_async<8>(scales_to_ + fill_, scales_);
      } else {
        copy_partial(scale_step);
      }
      codes_ += step / 2, scales_ += step_ * 4 * scale_step, left_ -= step;
    }
    fill_ += StageConfig::kStageBytes;
    if (fill_ == uint32_t(kStages * StageConfig::kStageBytes)) fill_ = 0;
    arch::cp_async_commit();
  }

  // The oldest stage, to be called after a wait and a copy_next(), which refills the slot before the oldest stage.
  HOPWELL_DEVICE const unsigned char* oldest() const { return stages_ + fill_; }

 private:
  // Copies any stage: zeros beyond the end of K, four scales at a time.
  HOPWELL_DEVICE void copy_partial(int scale_step) {
    const int lane = arch::lane_index(), bytes = clamp_bytes(left_ / 2 - lane % 8 * 16, 16);
    arch::cp_async(codes_to_ + fill_, codes_, bytes);
    HOPWELL_UNROLL
    for (int i = 0; i < 3; ++i)
      arch::cp_async(codes_to_ + fill_ + uint32_t(512 * (i + 1)), codes_ + row_offsets_[i], bytes);
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int scales = clamp_bytes(left_ / kCodesPerBlock - lane % 2 * 8 - 4 * i, 4);
      arch::cp_async<4>(scales_to_ + fill_ + uint32_t(4 * i), scales_ + i * scale_step, scales);
    }
  }

  const uint8_t *codes_, *scales_;
  const unsigned char* stages_;
  uint32_t codes_to_, scales_to_;  // destinations of this lane's codes and scales in stage 0 of the ring
  uint32_t fill_ = 0;              // offset of the next stage to fill, bytes
  uint32_t row_offsets_[3];        // from this lane's first row of codes to its other three rows
  int step_, stages_left_;
  int left_;  // remaining k, from the next stage on
};

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
