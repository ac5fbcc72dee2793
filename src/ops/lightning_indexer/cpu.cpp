// lightning_indexer on the CPU: the search for the best keys over one tensor of keys.
#include <algorithm>
#include <limits>

#include "ops/common/index_search.hpp"
#include "ops/lightning_indexer/op.hpp"
#include "tile/cpu/index_score.hpp"

namespace hopwell::ops::lightning_indexer {
namespace {

class Search final : public cpu::IndexSearch {
 public:
  explicit Search(const Problem& problem) : p_(problem) {
    queries = p_.s_q, keys = p_.s_kv, h_index = p_.h_index, d_index = p_.d_index, topk = p_.topk;
    relu = p_.relu, has_key_scales = bool(p_.k_scale);
  }

 private:
  [[nodiscard]] KeyRange visible(std::int64_t /*sequence*/, std::int64_t s) const override {
    return p_.visibility.keys(s, p_.s_kv);
  }

  void load_query(std::int64_t /*sequence*/, std::int64_t s, float* q, float* weights) const override {
    cpu::load(p_.weights, s * p_.weights.stride[0], weights, p_.h_index);
    for (std::int64_t j = 0; j < p_.h_index && p_.q_scale; ++j)
      weights[j] *= p_.q_scale.as<const float>()[s * p_.q_scale.stride[0] + j];
    for (std::int64_t j = 0; j < p_.h_index; ++j)
      cpu::load(p_.q, s * p_.q.stride[0] + j * p_.q.stride[1], q + j * p_.d_index, p_.d_index);
  }

  bool load_key(std::int64_t /*sequence*/, std::int64_t key, float* to, float* scale) const override {
    cpu::load(p_.k, key * p_.k.stride[0], to, p_.d_index);
    if (p_.k_scale) *scale = p_.k_scale.as<const float>()[key * p_.k_scale.stride[0]];
    return true;
  }

  void write(std::int64_t /*sequence*/, std::int64_t s, const cpu::BestKeys& best) const override {
    auto* indices = p_.indices.as<std::int32_t>() + s * p_.indices.stride[0];
    std::fill(std::copy_n(best.keys, best.size, indices), indices + p_.topk, -1);
    if (!p_.scores) return;
    float* scores = p_.scores.as<float>() + s * p_.scores.stride[0];
    std::fill(std::copy_n(best.scores, best.size, scores), scores + p_.topk, -std::numeric_limits<float>::infinity());
  }

  const Problem& p_;
};

void launch(const Problem& p, Stream /*stream*/) {
  if (p.topk > 0) Search(p).run();
}

const runtime::Registration cpu_backend{"cpu", launch};

}  // namespace
}  // namespace hopwell::ops::lightning_indexer
