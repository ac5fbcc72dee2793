#include <hopwell/hopwell.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t n = 2, k = 16, outputs = 3;
  const std::vector<float> d_out = {1, 1, 1, 0, 2, 0};
  const std::vector<std::uint8_t> weight(outputs * k / 2, 0x44), weight_scale(outputs, 0x38);  // 2, times 1
  std::vector<float> d_x(n * k);

  hopwell::nvfp4_linear_backward({.d_out = hopwell::Tensor(d_out.data(), {n, outputs}),
                                  .weight = hopwell::Tensor(weight.data(), {outputs, k / 2}),
                                  .weight_scale = hopwell::Tensor(weight_scale.data(), {outputs, k / 16}),
                                  .weight_global_value = 0.5F,
                                  .d_x = hopwell::Tensor(d_x.data(), {n, k})});

  std::printf("%g %g\n", d_x[0], d_x[k]);
  return d_x[0] == 3 && d_x[k] == 2 ? 0 : 1;
}
