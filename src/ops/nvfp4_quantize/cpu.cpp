// nvfp4_quantize and nvfp4_dequantize on the CPU, row by row.
#include <algorithm>
#include <limits>
#include <vector>

#include "ops/nvfp4_quantize/op.hpp"
#include "tile/cpu/nvfp4.hpp"
#include "tile/cpu/parallel.hpp"
#include "tile/cpu/vector.hpp"
#include "tile/cpu/views.hpp"

namespace hopwell::ops::nvfp4_quantize {
namespace {

namespace simd = cpu::nvfp4;
using cpu::Scratch, cpu::unsigned_size, cpu::with_type;
using hopwell::nvfp4::kBlock;

template <class Body>
void for_each_row_as_float(const QuantizeProblem& p, Body body) {
  with_type(p.x, [&]<class T>(const T* x) {
    cpu::parallel_for(
        p.rows, [&] { return Scratch<float>(p.k); },
        [&](std::int64_t row, const Scratch<float>& scratch) {
          cpu::to_float(x + row * p.x.stride[0], scratch.get(), unsigned_size(p.k));
          body(row, scratch.get());
        });
  });
}

float global_of(const QuantizeProblem& p) {
  if (p.has_global) return p.global.pointer != nullptr ? *p.global.pointer : p.global.value;
  std::vector<float> amax(unsigned_size(p.rows), 0.0F);
  for_each_row_as_float(p, [&](std::int64_t row, const float* x) {
    amax[unsigned_size(row)] = simd::finite_amax(x, unsigned_size(p.k));
  });
  const float most = amax.empty() ? 0.0F : *std::max_element(amax.begin(), amax.end());
  if (most == 0) return 1;
  return std::max(most / (hopwell::nvfp4::kCodeMax * hopwell::nvfp4::kScaleMax),
                  std::numeric_limits<float>::denorm_min());
}

void launch_quantize(const QuantizeProblem& p, Stream) {
  const float global = global_of(p);
  *p.global_scale.as<float>() = global;
  const std::int64_t columns = p.k / kBlock;
  if (p.scales.blocked) std::fill_n(p.scales.data, hopwell::nvfp4::blocked_bytes(p.rows, columns), std::uint8_t{0});
  for_each_row_as_float(p, [&](std::int64_t row, const float* x) {
    std::uint8_t* codes = p.codes.as<std::uint8_t>() + row * p.codes.stride[0];
    if (!p.scales.blocked)
      return simd::encode(x, global, unsigned_size(p.k), codes, p.scales.data + p.scales.offset(row, 0));
    constexpr std::int64_t kBlocks = 64;
    for (std::int64_t first = 0; first < columns; first += kBlocks) {
      const std::int64_t count = std::min(kBlocks, columns - first);
      std::uint8_t scales[kBlocks];
      simd::encode(x + first * kBlock, global, unsigned_size(count * kBlock), codes + first * kBlock / 2, scales);
      for (std::int64_t j = 0; j < count; ++j) p.scales.data[p.scales.offset(row, first + j)] = scales[j];
    }
  });
}

void launch_dequantize(const DequantizeProblem& p, Stream) {
  const auto global = static_cast<float>(p.global.get());
  const simd::Matrix matrix{p.codes.as<std::uint8_t>(), p.codes.stride[0], 0, p.k, p.scales};
  struct State {
    explicit State(std::int64_t k)
        : bytes(k / kBlock + 4), scales(static_cast<std::int64_t>(simd::scale_room(unsigned_size(k)))), row(k) {}
    Scratch<std::uint8_t> bytes;
    Scratch<float> scales, row;
  };
  with_type(p.x, [&]<class T>(T* x) {
    cpu::parallel_for(
        p.rows, [&] { return State(p.k); },
        [&](std::int64_t row, const State& state) {
          matrix.decode_scales(row, 0, p.k, state.bytes.get(), state.scales.get());
          simd::decode(matrix.row(row), state.scales.get(), global, unsigned_size(p.k), state.row.get());
          cpu::from_float(state.row.get(), x + row * p.x.stride[0], unsigned_size(p.k));
        });
  });
}

const runtime::Registration quantize{"cpu", launch_quantize};
const runtime::Registration dequantize{"cpu", launch_dequantize};

}  // namespace
}  // namespace hopwell::ops::nvfp4_quantize
