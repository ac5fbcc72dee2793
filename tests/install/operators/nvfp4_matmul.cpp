#include <hopwell/hopwell.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t m = 2, n = 3, k = 16;
  const std::vector<std::uint8_t> a(m * k / 2, 0x22), b(n * k / 2, 0x44);  // every code is 1, and 2
  const std::vector<std::uint8_t> sfa(m, 0x38), sfb(n, 0x38);              // every scale is 1
  std::vector<float> c(m * n);

  hopwell::nvfp4_matmul({.a = hopwell::Tensor(a.data(), {m, k / 2}),
                         .b = hopwell::Tensor(b.data(), {n, k / 2}),
                         .sfa = hopwell::Tensor(sfa.data(), {m, k / 16}),
                         .sfb = hopwell::Tensor(sfb.data(), {n, k / 16}),
                         .alpha = 0.5F,  // the product of both global scales
                         .out = hopwell::Tensor(c.data(), {m, n})});

  std::printf("%g … %g\n", c.front(), c.back());
  return c.front() == 16 && c.back() == 16 ? 0 : 1;
}
