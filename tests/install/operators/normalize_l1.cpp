#include <hopwell/hopwell.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t rows = 2, columns = 4;
  std::vector<float> attn = {1, 1, 2, 4, 0, 0, 0, 0};
  const hopwell::Tensor view(attn.data(), {rows, columns});

  hopwell::normalize_l1({.attn = view, .out = view});  // in place

  std::printf("%g %g %g %g; a row of zeros stays: %g\n", attn[0], attn[1], attn[2], attn[3], attn[4]);
  return attn[0] == 0.125F && attn[3] == 0.5F && attn[4] == 0 ? 0 : 1;
}
