#include <hopwell/hopwell.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t m = 3, k = 32, l = 1;
  const std::vector<std::uint8_t> a(m * k / 2, 0x22), b(k / 2, 0x44);        // every code is 1, and 2
  const std::vector<std::uint8_t> sfa(m * k / 16, 0x38), sfb(k / 16, 0x38);  // every scale is 1
  std::vector<float> c(m * l);

  hopwell::nvfp4_gemv({.a = hopwell::Tensor(a.data(), {m, k / 2, l}),
                       .b = hopwell::Tensor(b.data(), {1, k / 2, l}),
                       .sfa = hopwell::Tensor(sfa.data(), {m, k / 16, l}),
                       .sfb = hopwell::Tensor(sfb.data(), {1, k / 16, l}),
                       .alpha = 0.5F,  // the product of both global scales
                       .out = hopwell::Tensor(c.data(), {m, 1, l})});

  std::printf("%g %g %g\n", c[0], c[1], c[2]);
  return c[0] == 32 && c[1] == 32 && c[2] == 32 ? 0 : 1;
}
