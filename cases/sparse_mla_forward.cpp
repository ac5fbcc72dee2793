// sparse_mla_forward: OPERATORS of the documentation, section by section.
#include <algorithm>
#include <cmath>

#include "suites.hpp"

namespace hopwell::cases {
namespace {

Case basic(DType dtype) {
  const auto make = [dtype](Random& random) {
    const std::int64_t s_q = 3, s_kv = 70, h_q = 5, d_qk = 40, d_v = 32, topk = 17;
    const float sm_scale = 0.5F;
    Instance instance;
    Array& q = instance.add({"q", dtype, {s_q, h_q, d_qk}}).fill_normal(random);
    Array& kv = instance.add({"kv", dtype, {s_kv, 1, d_qk}}).fill_normal(random);
    Array& indices = instance.add({"indices", DType::kInt32, {s_q, 1, topk}});
    for (std::int64_t i = 0; i < indices.size(); ++i) indices.set(i, static_cast<double>(random.below(s_kv)));
    Array& out = instance.add({"out", dtype, {s_q, h_q, d_v}});
    Array& lse = instance.add({"lse", DType::kFloat32, {s_q, h_q}});
    instance.expect(out, {.norm = 4e-3, .absolute = 8e-3, .relative = 3.0 / 128});
    instance.expect(lse, {.absolute = 1e-5, .relative = 1e-6});
    instance.call = [&q, &kv, &indices, &out, &lse](const char* backend, Stream stream) {
      hopwell::sparse_mla_forward({.q = q.view(), .kv = kv.view(), .indices = indices.view(), .sm_scale = 0.5F, .d_v = 32,
                                   .out = out.view(), .lse = lse.view(), .backend = backend}, stream);
    };
    instance.reference = [](Instance&) {};
    static_cast<void>(sm_scale);
    return instance;
  };
  return {"sparse_mla_forward", "basic", make};
}

}  // namespace

Suite sparse_mla_forward() { return {"sparse_mla_forward", {basic(DType::kBFloat16)}, {}, {}}; }

}  // namespace hopwell::cases
