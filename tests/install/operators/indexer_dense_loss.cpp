#include <hopwell/hopwell.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t s = 2, h_q = 1, d_qk = 16, h_index = 1, d_index = 16;
  const std::vector<float> zeros(s * d_qk, 0.0F), ones(s * d_qk, 1.0F), weights(s * h_index, 1.0F);
  const std::vector<float> lse(s * h_q, std::log(2.0F));  // of the dense forward: two keys of score 0
  std::vector<float> d_q_index(s * d_index), d_k_index(s * d_index), d_weights(s * h_index);
  float loss = 1;

  hopwell::indexer_dense_loss({.q = hopwell::Tensor(zeros.data(), {s, h_q, d_qk}),
                               .kv = hopwell::Tensor(zeros.data(), {s, d_qk}),
                               .lse = hopwell::Tensor(lse.data(), {s, h_q}),
                               .q_index = hopwell::Tensor(ones.data(), {s, h_index, d_index}),
                               .k_index = hopwell::Tensor(ones.data(), {s, d_index}),
                               .weights = hopwell::Tensor(weights.data(), {s, h_index}),
                               .sm_scale = 0.25F,
                               .loss = hopwell::Tensor(&loss, {1}),
                               .d_q_index = hopwell::Tensor(d_q_index.data(), {s, h_index, d_index}),
                               .d_k_index = hopwell::Tensor(d_k_index.data(), {s, d_index}),
                               .d_weights = hopwell::Tensor(d_weights.data(), {s, h_index})});

  // Attention and indexer take both keys alike: there is nothing to learn.
  std::printf("loss %g, gradient %g\n", loss, d_k_index[0]);
  return std::abs(loss) < 1e-5F && std::abs(d_k_index[0]) < 1e-5F ? 0 : 1;
}
