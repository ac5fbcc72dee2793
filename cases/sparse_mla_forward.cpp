// sparse_mla_forward: inputs, float64 reference, tolerance and cost.
#include "sparse_mla.hpp"
#include "suites.hpp"

namespace hopwell::cases {
namespace {

Instance make(Random& random, const SparseMla& p, bool timed = false) {
  Instance instance;
  const SparseMlaInputs in = add_inputs(instance, random, p);
  Array& out = add_array(instance, p, "out", p.dtype, {p.s_q, p.h_q, p.d_v});
  Array& max_logits = add_array(instance, p, "max_logits", DType::kFloat32, {p.s_q, p.h_q});
  Array& lse = add_array(instance, p, "lse", DType::kFloat32, {p.s_q, p.h_q});
  const double size = timed ? 1 : rms(values_of(*in.kv));  // of V
  instance.expect(out, p.dtype == DType::kFloat32
                           ? Tolerance{.norm = 1e-4, .absolute = 1e-3 * size, .relative = 1e-3}
                           : Tolerance{.norm = 4e-3, .absolute = 8e-3 * size, .relative = 3.0 / 128});
  for (Array* array : {&max_logits, &lse}) instance.expect(*array, kLogarithm).on_gpus = kLogarithmOnGpus;
  instance.reference = [in](Instance& self) {
    ForwardReference reference = forward_reference(in);
    self.outputs[0].expected = std::move(reference.out);
    self.outputs[0].magnitude = std::move(reference.out_magnitude);
    self.outputs[1].expected = std::move(reference.max);
    self.outputs[2].expected = std::move(reference.lse);
    self.outputs[1].magnitude = self.outputs[2].magnitude = std::move(reference.lse_magnitude);
  };
  instance.call = [in, &out, &max_logits, &lse, &workspace = *instance.workspace](const char* backend, Stream stream) {
    const auto sink = view_of(in.attn_sink), length = view_of(in.topk_length), positions = view_of(in.q_positions),
               start = view_of(in.k_start), end = view_of(in.k_end), indices = view_of(in.indices);
    run_with_workspace<SparseMlaForwardArgs>(hopwell::sparse_mla_forward, hopwell::sparse_mla_forward_workspace_bytes,
                                             workspace,
                                             {.q = in.q->view(),
                                              .kv = in.kv->view(),
                                              .indices = pointer(indices),
                                              .sm_scale = in.problem.sm_scale,
                                              .d_v = in.problem.d_v,
                                              .attn_sink = pointer(sink),
                                              .topk_length = pointer(length),
                                              .q_positions = pointer(positions),
                                              .has_q_start = in.problem.positions == SparseMla::Positions::kStart,
                                              .q_start = in.problem.q_start,
                                              .kv_stride = in.problem.kv_stride,
                                              .k_start = pointer(start),
                                              .k_end = pointer(end),
                                              .out = out.view(),
                                              .max_logits = max_logits.view(),
                                              .lse = lse.view(),
                                              .backend = backend},
                                             stream);
  };
  add_cost(instance, in, p.d_qk + p.d_v);
  return instance;
}

}  // namespace

Suite sparse_mla_forward() {
  Suite suite{"sparse_mla_forward", {}, sparse_mla_shapes(), {}, sparse_mla_device_shapes()};
  const auto add = [&](const std::string& name, const SparseMla& problem) -> Case& {
    return suite.cases.emplace_back(suite.op, name, [problem](Random& random) { return make(random, problem); });
  };
  for (const auto& [name, problem] : sparse_mla_problems()) add(name, problem);
  for (const auto& [name, problem] : sparse_mla_query_problems({16, 32, 64, 128})) add(name, problem).for_model = true;
  for (const auto& [name, problem] : sparse_mla_device_problems()) add(name, problem).device_only = true;
  suite.bench = [](const Settings& settings, Random& random) { return make(random, sparse_mla_from(settings), true); };
  return suite;
}

}  // namespace hopwell::cases
