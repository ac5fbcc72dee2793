#include <hopwell/hopwell.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t s_q = 2, h_q = 1, s_kv = 3, d = 2, topk = 1;
  const std::vector<float> q = {1, 2, 3, 4}, kv = {5, 6, 7, 8, 9, 10}, d_out = {1, 1, 1, 1};
  const std::vector<std::int32_t> selected = {2, 2};  // both queries select key 2
  std::vector<float> out(s_q * h_q * d), lse(s_q * h_q), dq(q.size()), dkv(kv.size());
  const hopwell::Tensor q_view(q.data(), {s_q, h_q, d}), kv_view(kv.data(), {s_kv, d}),
      indices(selected.data(), {s_q, topk}), out_view(out.data(), {s_q, h_q, d}), lse_view(lse.data(), {s_q, h_q});

  hopwell::sparse_mla_forward(
      {.q = q_view, .kv = kv_view, .indices = indices, .sm_scale = 0.1F, .d_v = d, .out = out_view, .lse = lse_view});
  hopwell::sparse_mla_backward({.d_out = hopwell::Tensor(d_out.data(), {s_q, h_q, d}),
                                .q = q_view,
                                .kv = kv_view,
                                .indices = indices,
                                .out = out_view,
                                .lse = lse_view,
                                .sm_scale = 0.1F,
                                .d_v = d,
                                .dq = hopwell::Tensor(dq.data(), {s_q, h_q, d}),
                                .dkv = hopwell::Tensor(dkv.data(), {s_kv, d})});

  // With one key its weight is 1 whatever the score: key 2 gets both d_out as a value, and nobody anything as a score.
  std::printf("dkv of key 2: %g %g; of key 0: %g; dq: %g\n", dkv[4], dkv[5], dkv[0], dq[0]);
  const auto is = [](float x, float expected) { return std::abs(x - expected) < 1e-5F; };
  return is(dkv[4], 2) && is(dkv[5], 2) && dkv[0] == 0 && is(dq[0], 0) ? 0 : 1;
}
