// Attention of one query over two keys, one of which it selects: the output is that key's value, and errors arrive as
// exceptions.
#include <hopwell/hopwell.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>

int main() {
  const float q_data[] = {1, 2}, kv_data[] = {3, 4, 5, 6};
  const std::int32_t index_data[] = {1};
  float out_data[] = {0, 0}, lse_data[] = {0};
  const hopwell::Tensor q(q_data, {1, 1, 2}), kv(kv_data, {2, 1, 2}), indices(index_data, {1, 1, 1}),
      out(out_data, {1, 1, 2}), lse(lse_data, {1, 1});
  hopwell::sparse_mla_forward(
      {.q = q, .kv = kv, .indices = indices, .sm_scale = 0.5F, .d_v = 2, .out = out, .lse = lse});
  if (out_data[0] != 5 || out_data[1] != 6 || std::abs(lse_data[0] - 8.5F) > 1e-5F) return std::puts("wrong result"), 1;

  try {
    hopwell::sparse_mla_forward({.q = q, .kv = kv, .indices = lse, .sm_scale = 0.5F, .d_v = 2, .out = out});
  } catch (const hopwell::Error& error) {
    const bool named = std::string(error.what()).find("sparse_mla_forward: indices must be int32") == 0;
    return named && error.status() == HOPWELL_INVALID_ARGUMENT ? 0 : 2;
  }
  return std::puts("no error for bad indices"), 3;
}
