#include <hopwell/hopwell.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t b = 2, h_q = 4, h_kv = 2, d = 32, blocks = 3, block = 16, max_blocks = 2;
  const std::vector<float> q(b * h_q * d, 1.0F), k_cache(blocks * block * h_kv * d, 0.0F);
  std::vector<float> v_cache(k_cache.size());  // of page p every number is p
  for (std::size_t i = 0; i < v_cache.size(); ++i) v_cache[i] = static_cast<float>(i / (block * h_kv * d));
  const std::vector<std::int32_t> block_tables = {2, 0, 1, 12345};  // what lies past a context may be anything
  const std::vector<std::int32_t> context_lens = {32, 5};
  std::vector<float> out(q.size()), lse(b * h_q);

  hopwell::paged_attention({.q = hopwell::Tensor(q.data(), {b, h_q, d}),
                            .k_cache = hopwell::Tensor(k_cache.data(), {blocks, block, h_kv, d}),
                            .v_cache = hopwell::Tensor(v_cache.data(), {blocks, block, h_kv, d}),
                            .block_tables = hopwell::Tensor(block_tables.data(), {b, max_blocks}),
                            .context_lens = hopwell::Tensor(context_lens.data(), {b}),
                            .scale = 0.125F,
                            .out = hopwell::Tensor(out.data(), {b, h_q, d}),
                            .lse = hopwell::Tensor(lse.data(), {b, h_q})});

  // All logits are 0: sequence 0 takes the mean of pages 2 and 0, sequence 1 what five keys of page 1 have.
  std::printf("%g, lse %g; %g, lse %g\n", out[0], lse[0], out[h_q * d], lse[h_q]);
  const auto is = [](float x, float expected) { return std::abs(x - expected) < 1e-5F; };
  return is(out[0], 1) && is(lse[0], std::log(32.0F)) && is(out[h_q * d], 1) && is(lse[h_q], std::log(5.0F)) ? 0 : 1;
}
