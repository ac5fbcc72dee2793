#include <hopwell/hopwell.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t s_q = 1, h_index = 1, d_index = 16, s_kv = 2, topk = 2;
  const std::vector<float> q_index(d_index, 1.0F), k_index(s_kv * d_index, 1.0F), weights = {1};
  const std::vector<float> target = {1, 0};  // attention looks at key 0; the scores of both keys are equal
  const std::vector<std::int32_t> indices = {0, 1};
  std::vector<float> d_q_index(q_index.size()), d_k_index(k_index.size()), d_weights(1);
  float loss = 0;

  hopwell::lightning_indexer_backward({.target = hopwell::Tensor(target.data(), {s_q, topk}),
                                       .q_index = hopwell::Tensor(q_index.data(), {s_q, h_index, d_index}),
                                       .k_index = hopwell::Tensor(k_index.data(), {s_kv, d_index}),
                                       .weights = hopwell::Tensor(weights.data(), {s_q, h_index}),
                                       .indices = hopwell::Tensor(indices.data(), {s_q, topk}),
                                       .loss = hopwell::Tensor(&loss, {1}),
                                       .d_q_index = hopwell::Tensor(d_q_index.data(), {s_q, h_index, d_index}),
                                       .d_k_index = hopwell::Tensor(d_k_index.data(), {s_kv, d_index}),
                                       .d_weights = hopwell::Tensor(d_weights.data(), {s_q, h_index})});

  std::printf("loss %g, gradients of the keys %g and %g\n", loss, d_k_index[0], d_k_index[d_index]);  // log 2, ∓ 0.5
  const auto is = [](float x, float expected) { return std::abs(x - expected) < 1e-5F; };
  return is(loss, std::log(2.0F)) && is(d_k_index[0], -0.5F) && is(d_k_index[d_index], 0.5F) ? 0 : 1;
}
