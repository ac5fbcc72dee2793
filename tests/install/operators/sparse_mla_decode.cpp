#include <hopwell/hopwell.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  // Two query tokens with one head of width 4. The cache has two blocks of two rows; row s is s + 1 in all columns.
  const std::int64_t b = 1, q_len = 2, h_q = 1, d = 4, blocks = 2, block = 2, topk = 3;
  const std::vector<float> q(b * q_len * h_q * d);  // zeros: all keys have the same weight
  std::vector<float> cache(blocks * block * d), out(b * q_len * h_q * d), lse(b * q_len * h_q);
  for (std::size_t i = 0; i < cache.size(); ++i) cache[i] = static_cast<float>(i / 4 + 1);
  const std::vector<std::int32_t> indices{0, -1, 3, 7, 2, 2};  // slots; -1 and 7 are not valid

  hopwell::sparse_mla_decode({.q = hopwell::Tensor(q.data(), {b, q_len, h_q, d}),
                              .cache = hopwell::Tensor(cache.data(), {blocks, block, d}),
                              .indices = hopwell::Tensor(indices.data(), {b, q_len, topk}),
                              .sm_scale = 0.5F,
                              .d_v = d,
                              .out = hopwell::Tensor(out.data(), {b, q_len, h_q, d}),
                              .lse = hopwell::Tensor(lse.data(), {b, q_len, h_q})});

  std::printf("out %g and %g, lse %g\n", static_cast<double>(out[0]), static_cast<double>(out[4]),
              static_cast<double>(lse[0]));  // (1 + 4) / 2 and 3, log 2
  return out[0] == 2.5F && out[4] == 3.0F && std::abs(lse[0] - std::log(2.0F)) < 1e-6F ? 0 : 1;
}
