#include <hopwell/hopwell.hpp>

#include <cstdint>
#include <cstdio>
#include <vector>

int main() {
  const std::int64_t s_q = 4, h_index = 1, d_index = 16, s_kv = 4, topk = 2;
  const std::vector<float> q_index(s_q * h_index * d_index, 1.0F), weights(s_q * h_index, 1.0F);
  std::vector<float> k_index(s_kv * d_index);
  const float keys[] = {1, 3, 0, 2};  // of key t every number is keys[t]
  for (std::size_t i = 0; i < k_index.size(); ++i) k_index[i] = keys[i / d_index];
  std::vector<std::int32_t> indices(s_q * topk);
  std::vector<float> scores(s_q * topk);

  hopwell::lightning_indexer({.q_index = hopwell::Tensor(q_index.data(), {s_q, h_index, d_index}),
                              .k_index = hopwell::Tensor(k_index.data(), {s_kv, d_index}),
                              .weights = hopwell::Tensor(weights.data(), {s_q, h_index}),
                              .selection = {.q_start = 0},  // causal: query s sees keys 0 … s
                              .indices = hopwell::Tensor(indices.data(), {s_q, topk}),
                              .scores = hopwell::Tensor(scores.data(), {s_q, topk})});

  std::printf("query 0: %d %d; query 3: %d %d of scores %g %g\n", indices[0], indices[1], indices[6], indices[7],
              scores[6], scores[7]);
  return indices[0] == 0 && indices[1] == -1 && indices[6] == 1 && indices[7] == 3 && scores[6] == 48 ? 0 : 1;
}
