#include <hopwell/hopwell.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t s_q = 1, h_q = 2, s_kv = 3, d_qk = 4, topk = 3;
  const std::vector<float> q(h_q * d_qk, 0.0F), kv(s_kv * d_qk, 1.0F);  // every score is 0
  const std::vector<std::int32_t> indices = {2, -1, 0};
  const std::vector<float> lse(h_q, std::log(2.0F));  // of sparse_mla_forward: two keys of score 0
  std::vector<float> attn(s_q * topk);

  hopwell::attention_distribution({.q = hopwell::Tensor(q.data(), {s_q, h_q, d_qk}),
                                   .kv = hopwell::Tensor(kv.data(), {s_kv, d_qk}),
                                   .indices = hopwell::Tensor(indices.data(), {s_q, topk}),
                                   .lse = hopwell::Tensor(lse.data(), {s_q, h_q}),
                                   .sm_scale = 0.5F,
                                   .normalize = HOPWELL_NORMALIZE_L1,
                                   .out = hopwell::Tensor(attn.data(), {s_q, topk})});

  std::printf("%g %g %g\n", attn[0], attn[1], attn[2]);
  return std::abs(attn[0] - 0.5F) < 1e-6F && attn[1] == 0 && std::abs(attn[2] - 0.5F) < 1e-6F ? 0 : 1;
}
