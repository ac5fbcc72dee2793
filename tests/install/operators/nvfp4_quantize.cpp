#include <hopwell/hopwell.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t rows = 1, k = 16;
  const std::vector<float> x = {6, 4, 3, 2, 1.5F, 1, 0.5F, 0, -6, -4, -3, -2, -1.5F, -1, -0.5F, 0};
  std::vector<std::uint8_t> codes(rows * k / 2), scales(rows * k / 16);
  float global = 0;

  hopwell::nvfp4_quantize({.x = hopwell::Tensor(x.data(), {rows, k}),
                           .global_in_value = 1.0F,  // left out, it follows from the largest number of x
                           .codes = hopwell::Tensor(codes.data(), {rows, k / 2}),
                           .scales = hopwell::Tensor(scales.data(), {rows, k / 16}),
                           .global_scale = hopwell::Tensor(&global, {1})});

  std::printf("codes 0x%02x 0x%02x …, scale 0x%02x, global %g\n", codes[0], codes[1], scales[0], global);
  return codes[0] == 0x67 && codes[1] == 0x45 && scales[0] == 0x38 && global == 1 ? 0 : 1;  // 0x38: 1 in e4m3
}
