// nvfp4_dequantize on GPUs: x = code · scale · global.
//
// Tile      four chunks of 16 bytes of x for a thread; neighbouring threads write neighbouring chunks
// Roles     all threads are alike
// Budget    8.5 bytes in, 32 or 64 out, ~6 instructions a number
// Bound     memory
#pragma once

#include "ops/nvfp4_quantize/op.hpp"
#include "ops/nvfp4_quantize/row_items.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/fp4.hpp"
#include "tile/gpu/numbers.hpp"
#include "tile/gpu/views.hpp"

namespace hopwell::ops::nvfp4_quantize::HOPWELL_TARGET {

struct DequantizeConfig {
  static constexpr int kThreads = 256, kChunks = 4;  // chunks of a thread
};

template <class T>
struct DequantizeParams {
  tile::Fp4Matrix matrix;
  T* x;
  Global global;
  int64_t x_stride;
  RowItems chunks;  // of 16 bytes of x
  bool x_aligned, codes_aligned;
};

// 16 bytes of x and their codes.
template <class T>
struct Chunk {
  static constexpr int kValues = 16 / int(sizeof(T));
  struct alignas(16) Values {
    T x[kValues];
  };
  uint32_t codes;
  uint8_t scale;

  HOPWELL_DEVICE void load(const DequantizeParams<T>& p, int64_t row, int64_t k) {
    const uint8_t* from = p.matrix.row(row, 0) + k / 2;
    scale = p.matrix.scales.data[p.matrix.scales.offset(row, k / tile::kCodesPerBlock)];
    if (p.codes_aligned) {
      codes = kValues == 8 ? *reinterpret_cast<const uint32_t*>(from) : *reinterpret_cast<const uint16_t*>(from);
      return;
    }
    codes = 0;
    HOPWELL_UNROLL
    for (int i = 0; i < kValues / 2; ++i) codes |= uint32_t{from[i]} << 8 * i;
  }
  // The product code · scale · 2^-14 is exact in fp16.
  HOPWELL_DEVICE Values decode(float global) const {
    uint32_t pairs[4];
    tile::e2m1x8_to_fp16(codes, pairs);
    const uint32_t twice = tile::e4m3x2_to_fp16(uint16_t(scale | scale << 8));
    Values values;
    HOPWELL_UNROLL
    for (int i = 0; i < kValues; ++i) {
      const uint32_t products = arch::multiply_fp16(pairs[i % 4], twice);
      const float product = arch::to_float(arch::fp16{uint16_t(products >> i / 4 * 16)});
      tile::from_fp32(product * tile::kDecodedUnit * global, &values.x[i]);
    }
    return values;
  }
};

template <class T>
__global__ void __launch_bounds__(DequantizeConfig::kThreads)
    nvfp4_dequantize_blocks(const __grid_constant__ DequantizeParams<T> p) {
  constexpr int kChunks = DequantizeConfig::kChunks, kValues = Chunk<T>::kValues;
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const auto global = float(p.global.get());
  const int64_t count = p.chunks.count();
  const int64_t first = int64_t{arch::block_index()} * (DequantizeConfig::kThreads * kChunks) + arch::thread_index();
  Chunk<T> chunks[kChunks];
  T* to[kChunks];
  HOPWELL_UNROLL
  for (int j = 0; j < kChunks; ++j) {
    const int64_t i = first + j * DequantizeConfig::kThreads;
    to[j] = nullptr;
    if (i >= count) continue;
    const int64_t row = p.chunks.row(i), k = (i - row * p.chunks.per_row) * kValues;
    chunks[j].load(p, row, k);
    to[j] = p.x + row * p.x_stride + k;
  }
  HOPWELL_UNROLL
  for (int j = 0; j < kChunks; ++j) {
    if (!to[j]) continue;
    const auto values = chunks[j].decode(global);
    if (p.x_aligned) {
      arch::store_vector(to[j], values);
    } else {
      HOPWELL_UNROLL
      for (int i = 0; i < kValues; ++i) to[j][i] = values.x[i];
    }
  }
}

// Internal linkage: each kernel file has a copy of its own. See runtime::launch.
namespace {

// Launches the kernel for operator `op`: nvfp4_dequantize, or an operator that decodes an operand.
[[maybe_unused]] void dequantize(const char* op, const DequantizeProblem& p, Stream stream) {
  if (p.rows == 0 || p.k == 0) return;
  tile::with_type(p.x, [&]<class T>(T* x) {
    constexpr std::int64_t kValues = Chunk<T>::kValues,
                           kChunksPerCta = std::int64_t{DequantizeConfig::kThreads} * DequantizeConfig::kChunks;
    const arch::LaunchShape shape{
        .grid = {static_cast<std::uint32_t>(tile::ceil_div(p.rows * (p.k / kValues), kChunksPerCta))},
        .threads = DequantizeConfig::kThreads,
        .programmatic_dependency = p.device.has_dependent_launches()};
    const DequantizeParams<T> params{.matrix = {p.codes.as<const std::uint8_t>(), p.codes.stride[0], 0, p.scales},
                                     .x = x,
                                     .global = p.global,
                                     .x_stride = p.x.stride[0],
                                     .chunks = row_items(p.rows, p.k / kValues),
                                     .x_aligned = tile::rows_aligned(p.x, 1),
                                     .codes_aligned = tile::rows_aligned(p.codes, 1, 4)};
    runtime::launch(op, nvfp4_dequantize_blocks<T>, shape, stream, params);
  });
}

}  // namespace
}  // namespace hopwell::ops::nvfp4_quantize::HOPWELL_TARGET
