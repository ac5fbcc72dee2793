// Weights of nvfp4_linear's fast kernels: a warp's ring of copies in shared memory, and the decoder.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/bits.hpp"
#include "ops/nvfp4/sm80_columns.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

// ---- decoding ------------------------------------------------------------------------------------------------------

// 8 codes to four pairs (k, k + 4) of fp16, each code · 2^-14: s to bit 15, e e m to bits 11 to 9. First all codes to
// their places in bytes, with bits of their neighbours, then two by two without them: 11 instructions, 7 at half rate.
HOPWELL_DEVICE void decode_word(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSigns = 0x80808080u, kCodes = 0x8e008e00u;
  const uint32_t even = arch::select_bits(word << 4, word << 1, kSigns);
  const uint32_t odd = arch::select_bits(word, word >> 3, kSigns);
  pairs[0] = even << 8 & kCodes;
  pairs[1] = odd << 8 & kCodes;
  pairs[2] = even & kCodes;
  pairs[3] = odd & kCodes;
}

// Two e4m3 as fp16, and as floats.
HOPWELL_DEVICE uint32_t scales_fp16(uint16_t bytes) {
#if HOPWELL_HAS_SM90
  return arch::unpack_e4m3(bytes);
#else
  return arch::pack_fp16(scale_value(bytes & 0xff), scale_value(bytes >> 8));
#endif
}
struct ScalePair {
  float low, high;
};
HOPWELL_DEVICE ScalePair scale_pair(uint16_t bytes) {
  const uint32_t halves = scales_fp16(bytes);
  return {arch::to_float(fp16{uint16_t(halves)}), arch::to_float(fp16{uint16_t(halves >> 16)})};
}

// How much of `most` a copy brings, of what is left where K ends.
HOPWELL_DEVICE int within(int left, int most) { return left < 0 ? 0 : left > most ? most : left; }

// ---- weights: a warp's ring ----------------------------------------------------------------------------------------

// Stage: codes [16 rows][256 k], the halves of odd rows exchanged so that lanes of neighbouring rows read from different
// banks; then scales [16 rows][16].
template <int kStages>
class Ring {
 public:
  HOPWELL_DEVICE Ring(const unsigned char* slots, int batch)
      : slots_(slots),
        to_(arch::shared_address(slots) +
            uint32_t(arch::lane_index() / 8 * 128 + ((arch::lane_index() ^ arch::lane_index() / 8 * 4) & 7) * 16)),
        scales_to_(arch::shared_address(slots) + uint32_t(LinearConfig::kCodeBytes + arch::lane_index() * 8)),
        batch_(batch) {}

  // Next come so many stages, from this one of this slice of this tile on, and through the tiles that follow.
  template <class Params>
  HOPWELL_DEVICE void aim(const Params& p, const Slice& slice, int tile, int stage, int count) {
    slice_ = slice, tile_ = tile, stage_ = stage, left_ = count, quick_ = run_ = 0;
    if (left_ == 0) return;
    find_tile(p);
    begin_run(p);
  }

  // Asks for codes of the first `count` stages to come to the L2 cache: harmless even while another kernel writes them.
  // Two stages at a time, a row a lane.
  template <class Params>
  HOPWELL_DEVICE void prefetch(const Params& p, int count) const {
    constexpr int kRows = LinearConfig::kRows, kStageK = LinearConfig::kStageK;
    if (count > left_) count = left_;
    const int lane = arch::lane_index();
    int stage = stage_ + lane / kRows, tile = tile_;
    for (int i = lane / kRows; i < count; i += 2, stage += 2) {
      while (stage >= slice_.stages) stage -= slice_.stages, ++tile;
      const int64_t row = tile * kRows + lane % kRows;
      if (row >= p.rows || stage >= slice_.whole) continue;
      const int k = slice_.begin + stage * kStageK;
      arch::prefetch_l2(p.weight.at(row, batch_) + k / 2);
    }
  }

  // Starts the copies of the next stage, if there is one, and closes a group. After the last one at_end() may aim anew.
  template <class Params, class AtEnd>
  HOPWELL_DEVICE void load(const Params& p, AtEnd at_end) {
    if (quick_ > 0) [[likely]] {
      arch::cp_async(to_ + fill_, codes_at_);
      HOPWELL_UNROLL
      for (int i = 0; i < 3; ++i) arch::cp_async(to_ + fill_ + uint32_t(512 * (i + 1)), codes_at_ + ahead_[i]);
      arch::cp_async<8>(scales_to_ + fill_, scales_at_);
      codes_at_ += LinearConfig::kStageK / 2, scales_at_ += LinearConfig::kStageK / kCodesOfBlock;
      if (--quick_ == 0) [[unlikely]]
        end_run(p, run_, at_end);
    } else if (left_ > 0) {
      load_slowly(p);
      end_run(p, 1, at_end);
    }
    advance();
    arch::cp_async_commit();
  }
  template <class Params>
  HOPWELL_DEVICE void load(const Params& p) {
    load(p, [] {});
  }

  // The oldest stage, which has arrived, right after a load(): that has filled the slot before it.
  HOPWELL_DEVICE const unsigned char* oldest() const { return slots_ + fill_; }

  // Forgets what is on its way.
  HOPWELL_DEVICE void stop() {
    arch::cp_async_wait_all();
    left_ = quick_ = 0, fill_ = 0;
  }

 private:
  static constexpr uint32_t kEnd = kStages * LinearConfig::kStageBytes;

  HOPWELL_DEVICE void advance() {
    fill_ += LinearConfig::kStageBytes;
    if (fill_ == kEnd) fill_ = 0;
  }

  template <class Params>
  HOPWELL_DEVICE void find_tile(const Params& p) {
    const int lane = arch::lane_index(), first = tile_ * LinearConfig::kRows, last = p.rows - 1;
    const auto row = [&](int i) { return first + i < last ? first + i : last; };  // rows beyond: the last one again
    const int64_t at = row(lane / 8) * p.weight.row_stride;
    HOPWELL_UNROLL
    for (int i = 0; i < 3; ++i) ahead_[i] = uint32_t(row(lane / 8 + 4 * (i + 1)) * p.weight.row_stride - at);
    const int k = slice_.begin + stage_ * LinearConfig::kStageK;
    codes_at_ = p.weight.at(0, batch_) + at + k / 2 + lane % 8 * 16;
    const int scale_row = row(lane / 2), group = k / 64 + lane % 2 * 2;
    const Scales& scales = p.weight.scales;
    scales_at_ =
        scales.data + batch_ * scales.batch_stride + group * scale_step(p) +
        (scales.blocked ? hopwell::nvfp4::blocked_offset(scale_row, 0, scales.columns) : scale_row * scales.row_stride);
  }

  // Stages that need no thought: whole ones of this tile, whose scales lie together.
  template <class Params>
  HOPWELL_DEVICE void begin_run(const Params& p) {
    const int whole = slice_.whole - stage_, most = whole < left_ ? whole : left_;
    run_ = quick_ = p.whole_scales && most > 0 ? most : 0;
  }

  template <class Params, class AtEnd>
  HOPWELL_DEVICE void end_run(const Params& p, int stages, AtEnd at_end) {
    stage_ += stages, left_ -= stages;
    if (left_ == 0) return at_end();
    if (stage_ == slice_.stages) next_tile(p);
    begin_run(p);
  }

  template <class Params>
  HOPWELL_DEVICE void next_tile(const Params& p) {
    ++tile_, stage_ = 0;
    if (p.weight.scales.blocked || (tile_ + 1) * LinearConfig::kRows > p.rows) [[unlikely]]
      return find_tile(p);
    constexpr int64_t kRows = LinearConfig::kRows;  // a whole tile lies as the one before
    codes_at_ += kRows * p.weight.row_stride - slice_.stages * (LinearConfig::kStageK / 2);
    scales_at_ += kRows * p.weight.scales.row_stride - slice_.stages * (LinearConfig::kStageK / kCodesOfBlock);
  }

  template <class Params>
  HOPWELL_DEVICE static int scale_step(const Params& p) {  // bytes from four scales to the next
    return p.weight.scales.blocked ? 512 : 4;
  }

  // Any stage: zeros where K has ended, scales by fours.
  template <class Params>
  HOPWELL_DEVICE void load_slowly(const Params& p) {
    const int left = slice_.end - slice_.begin - stage_ * LinearConfig::kStageK, lane = arch::lane_index();
    const int bytes = within(left / 2 - lane % 8 * 16, 16);
    arch::cp_async(to_ + fill_, codes_at_, bytes);
    HOPWELL_UNROLL
    for (int i = 0; i < 3; ++i) arch::cp_async(to_ + fill_ + uint32_t(512 * (i + 1)), codes_at_ + ahead_[i], bytes);
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int scales = within(left / kCodesOfBlock - lane % 2 * 8 - 4 * i, 4);
      arch::cp_async<4>(scales_to_ + fill_ + uint32_t(4 * i), scales_at_ + i * scale_step(p), scales);
    }
    codes_at_ += LinearConfig::kStageK / 2, scales_at_ += 4 * scale_step(p);
  }

  const uint8_t *codes_at_ = nullptr, *scales_at_ = nullptr;
  const unsigned char* slots_;
  uint32_t to_, scales_to_;  // where this lane's first 16 bytes of codes go in slot 0, and its scales
  uint32_t fill_ = 0;        // the next slot to fill
  uint32_t ahead_[3] = {};   // from this lane's row of codes to those 4, 8 and 12 below
  int batch_;
  int tile_ = 0, stage_ = 0, left_ = 0;  // where the run begins; stages from there on
  int quick_ = 0, run_ = 0;              // of the run, that are to come and in all
  Slice slice_{};
};

}  // namespace
}  // namespace hopwell::ops::nvfp4
