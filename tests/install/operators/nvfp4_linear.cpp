#include <hopwell/hopwell.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t n = 2, k = 16, outputs = 3;
  const std::vector<float> x = std::vector<float>(n * k, 1.0F), bias = {0, 10, 20};
  const std::vector<std::uint8_t> weight(outputs * k / 2, 0x44), weight_scale(outputs, 0x38);  // 2, times 1
  std::vector<float> y(n * outputs);

  hopwell::nvfp4_linear({.x = hopwell::Tensor(x.data(), {n, k}),
                         .weight = hopwell::Tensor(weight.data(), {outputs, k / 2}),
                         .weight_scale = hopwell::Tensor(weight_scale.data(), {outputs, k / 16}),
                         .weight_global_value = 0.5F,
                         .bias = hopwell::Tensor(bias.data(), {outputs}),
                         .out = hopwell::Tensor(y.data(), {n, outputs})});

  std::printf("%g %g %g\n", y[0], y[1], y[2]);
  return y[0] == 16 && y[1] == 26 && y[2] == 36 ? 0 : 1;
}
