#include <hopwell/hopwell.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t s = 5, d = 2, ratio = 2;
  const std::vector<float> kv(s * d, 3.0F), gate(s * d, 1.0F), d_out(s / ratio * d, 1.0F);
  std::vector<float> d_kv(s * d), d_gate(s * d);

  hopwell::kv_compress_backward({.d_out = hopwell::Tensor(d_out.data(), {s / ratio, d}),
                                 .kv = hopwell::Tensor(kv.data(), {s, d}),
                                 .gate = hopwell::Tensor(gate.data(), {s, d}),
                                 .ratio = ratio,
                                 .d_kv = hopwell::Tensor(d_kv.data(), {s, d}),
                                 .d_gate = hopwell::Tensor(d_gate.data(), {s, d})});

  std::printf("each of two tokens has half of the gradient: %g; a token of no block: %g\n", d_kv[0], d_kv[4 * d]);
  return d_kv[0] == 0.5F && d_gate[0] == 0 && d_kv[4 * d] == 0 ? 0 : 1;
}
