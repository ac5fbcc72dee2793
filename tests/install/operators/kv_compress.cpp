#include <hopwell/hopwell.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t s = 5, d = 2, ratio = 2;
  std::vector<float> kv(s * d);  // every number of token t is t
  for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = static_cast<float>(i / d);
  const std::vector<float> gate(s * d, 1.0F);  // equal weights
  std::vector<float> out(s / ratio * d);

  hopwell::kv_compress({.kv = hopwell::Tensor(kv.data(), {s, d}),
                        .gate = hopwell::Tensor(gate.data(), {s, d}),
                        .ratio = ratio,
                        .out = hopwell::Tensor(out.data(), {s / ratio, d})});

  std::printf("means of tokens 0 and 1, and of 2 and 3: %g %g\n", out[0], out[d]);
  return out[0] == 0.5F && out[d] == 2.5F ? 0 : 1;
}
