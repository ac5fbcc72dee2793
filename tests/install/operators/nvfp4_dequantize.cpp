#include <hopwell/hopwell.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t rows = 1, k = 16;
  const std::vector<std::uint8_t> codes = {0x67, 0x45, 0x23, 0x01, 0xEF, 0xCD, 0xAB, 0x89};  // the low nibble first
  const std::vector<std::uint8_t> scales = {0x40};                                           // 2 in e4m3
  std::vector<float> x(rows * k);

  hopwell::nvfp4_dequantize({.codes = hopwell::Tensor(codes.data(), {rows, k / 2}),
                             .scales = hopwell::Tensor(scales.data(), {rows, k / 16}),
                             .global_value = 0.5F,
                             .x = hopwell::Tensor(x.data(), {rows, k})});

  for (const float number : x) std::printf("%g ", number);  // 6 4 3 2 1.5 1 0.5 0 and the same negative
  std::puts("");
  return x[0] == 6 && x[4] == 1.5F && x[8] == -6 && x[14] == -0.5F ? 0 : 1;
}
