// Weights of nvfp4_linear's fast kernels: a warp's ring of copies in shared memory, and the decoder.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "ops/nvfp4/sm80_columns.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

// ---- decoding ------------------------------------------------------------------------------------------------------

// 8 codes to four pairs (k, k + 4) of fp16, each code · 2^-14: s to bit 15, e e m to bits 11 to 9. First four codes at a
// time in the high halves of bytes, then two by two.
HOPWELL_DEVICE void decode_word(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSign = 0x80808080u, kMagnitude = 0x0e0e0e0eu, kHighBytes = 0xff00ff00u;
  const uint32_t even = (word << 4 & kSign) | (word << 1 & kMagnitude);
  const uint32_t odd = (word & kSign) | (word >> 3 & kMagnitude);
  pairs[0] = even << 8 & kHighBytes;
  pairs[1] = odd << 8 & kHighBytes;
  pairs[2] = even & kHighBytes;
  pairs[3] = odd & kHighBytes;
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

// ---- weights: a warp's ring ----------------------------------------------------------------------------------------

// Stage: codes [16 rows][256 k], the halves of odd rows exchanged so that lanes of neighbouring rows read from different
// banks; then scales [16 rows][16].
template <int kStages>
class Ring {
 public:
  template <class Params>
  HOPWELL_DEVICE Ring(const Params& p, const Slice& slice, const unsigned char* slots, int batch, int step)
      : slots_(slots),
        base_(arch::shared_address(slots)),
        to_(base_ +
            uint32_t(arch::lane_index() / 8 * 128 + ((arch::lane_index() ^ arch::lane_index() / 8 * 4) & 7) * 16)),
        scale_step_(p.weight.scales.blocked ? 512 : 4),
        batch_(batch),
        step_(step),
        slice_(slice) {}

  // Next comes the first stage of this tile; every step_-th tile up to `end` follows.
  template <class Params>
  HOPWELL_DEVICE void aim(const Params& p, int tile, int end) {
    tile_ = tile, end_ = end, stage_ = 0;
    if (tile >= end) return;
    const int lane = arch::lane_index(), first = tile * LinearConfig::kRows, last = p.rows - 1;
    const auto row = [&](int i) { return first + i < last ? first + i : last; };  // rows beyond: the last one again
    const int64_t at = row(lane / 8) * p.weight.row_stride;
    HOPWELL_UNROLL
    for (int i = 0; i < 3; ++i) ahead_[i] = uint32_t(row(lane / 8 + 4 * (i + 1)) * p.weight.row_stride - at);
    codes_at_ = p.weight.at(0, batch_) + at + slice_.begin / 2 + lane % 8 * 16;
    const int scale_row = row(lane / 2), group = slice_.begin / 64 + lane % 2 * 2;
    const Scales& scales = p.weight.scales;
    scales_at_ =
        scales.data + batch_ * scales.batch_stride + group * scale_step_ +
        (scales.blocked ? hopwell::nvfp4::blocked_offset(scale_row, 0, scales.columns) : scale_row * scales.row_stride);
  }

  // Asks for the first stages to come to the L2 cache: harmless even while another kernel writes them.
  HOPWELL_DEVICE void prefetch() const {
    if (tile_ >= end_) return;
    for (int i = 0; i < kStages - 1 && i < slice_.whole; ++i) {
      arch::prefetch_l2(codes_at_ + 128 * i);
      HOPWELL_UNROLL
      for (uint32_t ahead : ahead_) arch::prefetch_l2(codes_at_ + ahead + 128 * i);
    }
  }

  // Starts the copies of the next stage, if there is one, and closes a group.
  template <class Params>
  HOPWELL_DEVICE void load(const Params& p) {
    if (tile_ < end_ && slice_.stages > 0) {
      const uint32_t offset = uint32_t(slot_ * LinearConfig::kStageBytes);
      if (stage_ < slice_.whole)
        load_whole(offset, p.whole_scales);
      else
        load_part(offset);
      codes_at_ += LinearConfig::kStageK / 2, scales_at_ += 4 * scale_step_;
      if (++stage_ == slice_.stages) aim(p, tile_ + step_, end_);
      slot_ = slot_ + 1 == kStages ? 0 : slot_ + 1;
    }
    arch::cp_async_commit();
  }

  // The oldest stage, which has arrived.
  HOPWELL_DEVICE const unsigned char* take() {
    const unsigned char* stage = slots_ + taken_ * LinearConfig::kStageBytes;
    taken_ = taken_ + 1 == kStages ? 0 : taken_ + 1;
    return stage;
  }

  // Forgets what is on its way.
  HOPWELL_DEVICE void stop() {
    arch::cp_async_wait_all();
    tile_ = end_, slot_ = taken_ = 0;
  }

 private:
  HOPWELL_DEVICE void load_whole(uint32_t offset, bool whole_scales) const {
    arch::cp_async(to_ + offset, codes_at_);
    HOPWELL_UNROLL
    for (int i = 0; i < 3; ++i) arch::cp_async(to_ + offset + uint32_t(512 * (i + 1)), codes_at_ + ahead_[i]);
    const uint32_t to = base_ + offset + uint32_t(LinearConfig::kCodeBytes + arch::lane_index() * 8);
    if (whole_scales) return arch::cp_async<8>(to, scales_at_);
    arch::cp_async<4>(to, scales_at_);
    arch::cp_async<4>(to + 4, scales_at_ + scale_step_);
  }

  // The last stage of a slice: zeros where K has ended.
  HOPWELL_DEVICE void load_part(uint32_t offset) const {
    const auto within = [](int bytes, int most) { return bytes < 0 ? 0 : bytes > most ? most : bytes; };
    const int left = slice_.end - slice_.begin - stage_ * LinearConfig::kStageK, lane = arch::lane_index();
    const int bytes = within(left / 2 - lane % 8 * 16, 16);
    arch::cp_async(to_ + offset, codes_at_, bytes);
    HOPWELL_UNROLL
    for (int i = 0; i < 3; ++i) arch::cp_async(to_ + offset + uint32_t(512 * (i + 1)), codes_at_ + ahead_[i], bytes);
    const uint32_t to = base_ + offset + uint32_t(LinearConfig::kCodeBytes + lane * 8);
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int scales = within(left / kCodesOfBlock - lane % 2 * 8 - 4 * i, 4);
      arch::cp_async<4>(to + uint32_t(4 * i), scales_at_ + i * scale_step_, scales);
    }
  }

  const uint8_t *codes_at_ = nullptr, *scales_at_ = nullptr;
  const unsigned char* slots_;
  uint32_t base_, to_;      // slot 0; where this lane's first 16 bytes of codes go in it
  uint32_t ahead_[3] = {};  // from this lane's row of codes to those 4, 8 and 12 below
  int scale_step_, batch_, step_;
  int tile_ = 0, end_ = 0, stage_ = 0, slot_ = 0, taken_ = 0;
  const Slice& slice_;
};

}  // namespace
}  // namespace hopwell::ops::nvfp4
