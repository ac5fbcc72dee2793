#include <hopwell/hopwell.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t s_q = 2, h_q = 3, s_kv = 4, d_qk = 8, d_v = 6, topk = 2;
  const std::vector<float> q(s_q * h_q * d_qk, 1.0F);
  std::vector<float> kv(s_kv * d_qk);  // of key t every number is t
  for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = static_cast<float>(i / d_qk);
  const std::vector<std::int32_t> indices = {3, -1, -1, -1};  // query 0 selects key 3, query 1 none
  std::vector<float> out(s_q * h_q * d_v), max_logits(s_q * h_q), lse(s_q * h_q);

  hopwell::sparse_mla_forward({.q = hopwell::Tensor(q.data(), {s_q, h_q, d_qk}),
                               .kv = hopwell::Tensor(kv.data(), {s_kv, d_qk}),
                               .indices = hopwell::Tensor(indices.data(), {s_q, topk}),
                               .sm_scale = 0.5F,
                               .d_v = d_v,
                               .out = hopwell::Tensor(out.data(), {s_q, h_q, d_v}),
                               .max_logits = hopwell::Tensor(max_logits.data(), {s_q, h_q}),
                               .lse = hopwell::Tensor(lse.data(), {s_q, h_q})});

  std::printf("query 0: out %g, lse %g; query 1: out %g, lse %g\n", out[0], lse[0], out[h_q * d_v], lse[h_q]);
  return out[0] == 3 && lse[0] == 12 && out[h_q * d_v] == 0 && std::isinf(lse[h_q]) ? 0 : 1;
}
