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

// ---- weights: a warp's ring ----------------------------------------------------------------------------------------

// Stage: codes [16 rows][256 k], the halves of odd rows exchanged so that lanes of neighbouring rows read from different
// banks; then scales [16 rows][16].
template <int kStages>
class Ring {
 public:
  HOPWELL_DEVICE Ring(const unsigned char* slots, int batch, int step)
      : slots_(slots),
        base_(arch::shared_address(slots)),
        to_(base_ +
            uint32_t(arch::lane_index() / 8 * 128 + ((arch::lane_index() ^ arch::lane_index() / 8 * 4) & 7) * 16)),
        batch_(batch),
        step_(step) {}

  // Next comes the first stage of this slice of this tile; every step-th tile up to `end` follows.
  template <class Params>
  HOPWELL_DEVICE void aim(const Params& p, const Slice& slice, int tile, int end) {
    slice_ = slice, tile_ = slice.stages > 0 ? tile : end, end_ = end, stage_ = 0;
    if (tile_ < end_) find_tile(p);
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

  // Starts the copies of the next stage, if there is one, and closes a group. After the last one at_end() may aim anew.
  template <class Params, class AtEnd>
  HOPWELL_DEVICE void load(const Params& p, AtEnd at_end) {
    if (tile_ < end_) {
      const uint32_t offset = uint32_t(slot_ * LinearConfig::kStageBytes);
      if (stage_ < slice_.whole) [[likely]]
        load_whole(p, offset);
      else
        load_part(p, offset);
      codes_at_ += LinearConfig::kStageK / 2, scales_at_ += 4 * scale_step(p);
      if (++stage_ == slice_.stages) next_tile(p, at_end);
      slot_ = slot_ + 1 == kStages ? 0 : slot_ + 1;
    }
    arch::cp_async_commit();
  }
  template <class Params>
  HOPWELL_DEVICE void load(const Params& p) {
    load(p, [] {});
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
  template <class Params>
  HOPWELL_DEVICE void find_tile(const Params& p) {
    const int lane = arch::lane_index(), first = tile_ * LinearConfig::kRows, last = p.rows - 1;
    const auto row = [&](int i) { return first + i < last ? first + i : last; };  // rows beyond: the last one again
    const int64_t at = row(lane / 8) * p.weight.row_stride;
    HOPWELL_UNROLL
    for (int i = 0; i < 3; ++i) ahead_[i] = uint32_t(row(lane / 8 + 4 * (i + 1)) * p.weight.row_stride - at);
    codes_at_ = p.weight.at(0, batch_) + at + slice_.begin / 2 + lane % 8 * 16;
    const int scale_row = row(lane / 2), group = slice_.begin / 64 + lane % 2 * 2;
    const Scales& scales = p.weight.scales;
    scales_at_ =
        scales.data + batch_ * scales.batch_stride + group * scale_step(p) +
        (scales.blocked ? hopwell::nvfp4::blocked_offset(scale_row, 0, scales.columns) : scale_row * scales.row_stride);
  }

  template <class Params, class AtEnd>
  HOPWELL_DEVICE void next_tile(const Params& p, AtEnd at_end) {
    tile_ += step_, stage_ = 0;
    if (tile_ >= end_) [[unlikely]]
      return at_end();
    if (p.weight.scales.blocked || (tile_ + 1) * LinearConfig::kRows > p.rows) [[unlikely]]
      return find_tile(p);
    const int64_t rows = int64_t{step_} * LinearConfig::kRows;  // a whole tile lies as the one before
    codes_at_ += rows * p.weight.row_stride - slice_.stages * (LinearConfig::kStageK / 2);
    scales_at_ += rows * p.weight.scales.row_stride - slice_.stages * (LinearConfig::kStageK / kCodesOfBlock);
  }

  template <class Params>
  HOPWELL_DEVICE static int scale_step(const Params& p) {  // bytes from four scales to the next
    return p.weight.scales.blocked ? 512 : 4;
  }

  template <class Params>
  HOPWELL_DEVICE void load_whole(const Params& p, uint32_t offset) const {
    arch::cp_async(to_ + offset, codes_at_);
    HOPWELL_UNROLL
    for (int i = 0; i < 3; ++i) arch::cp_async(to_ + offset + uint32_t(512 * (i + 1)), codes_at_ + ahead_[i]);
    const uint32_t to = base_ + offset + uint32_t(LinearConfig::kCodeBytes + arch::lane_index() * 8);
    if (p.whole_scales) return arch::cp_async<8>(to, scales_at_);
    arch::cp_async<4>(to, scales_at_);
    arch::cp_async<4>(to + 4, scales_at_ + scale_step(p));
  }

  // The last stage of a slice: zeros where K has ended.
  template <class Params>
  HOPWELL_DEVICE void load_part(const Params& p, uint32_t offset) const {
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
      arch::cp_async<4>(to + uint32_t(4 * i), scales_at_ + i * scale_step(p), scales);
    }
  }

  const uint8_t *codes_at_ = nullptr, *scales_at_ = nullptr;
  const unsigned char* slots_;
  uint32_t base_, to_;      // slot 0; where this lane's first 16 bytes of codes go in it
  uint32_t ahead_[3] = {};  // from this lane's row of codes to those 4, 8 and 12 below
  int batch_, step_;
  int tile_ = 0, end_ = 0, stage_ = 0, slot_ = 0, taken_ = 0;
  Slice slice_{};
};

}  // namespace
}  // namespace hopwell::ops::nvfp4
