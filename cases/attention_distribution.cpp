// attention_distribution: inputs, float64 reference, tolerance and cost.
#include <limits>
#include <numeric>

#include "sparse_mla.hpp"
#include "suites.hpp"

namespace hopwell::cases {
namespace {

// Divides every row of attn [s_q, topk], and its magnitude, by the row's sum unless the sum is 0.
void normalize_l1(DistributionReference& reference, const SparseMla& p) {
  for (std::int64_t s = 0; s < p.s_q; ++s) {
    const auto row = reference.attn.begin() + s * p.topk, size = reference.magnitude.begin() + s * p.topk;
    const double total = std::accumulate(row, row + p.topk, 0.0);
    for (std::int64_t i = 0; total != 0 && i < p.topk; ++i) row[i] /= total, size[i] /= total;
  }
}

// Options of the call. ascending: value of the operator's argument that describes the rows.
struct Options {
  hopwell_normalize normalize = HOPWELL_NORMALIZE_NONE;
  bool ascending = false, with_sink = false;
};

Instance make(Random& random, const SparseMla& p, const Options& options, bool timed = false) {
  Instance instance;
  const SparseMlaInputs in = add_inputs(instance, random, p);
  Array& lse = add_array(instance, p, "lse", DType::kFloat32, {p.s_q, p.h_q});
  Array& attn = add_array(instance, p, "out", DType::kFloat32, {p.s_q, p.topk});
  if (timed) {
    fill_typical_lse(lse, random, p);
  } else {
    const std::vector<QueryReference> queries = query_references(in);
    for (std::int64_t row = 0; row < lse.size(); ++row) {
      const QueryReference& query = queries[static_cast<std::size_t>(row / p.h_q)];
      lse.set(row, query.lse[static_cast<std::size_t>(row % p.h_q)]);
    }
  }
  instance.expect(attn, {.norm = 2e-3});
  instance.reference = [in, options, &lse](Instance& self) {
    DistributionReference reference =
        distribution_reference(in, query_references(in), values_of(lse), options.with_sink);
    if (options.normalize == HOPWELL_NORMALIZE_L1) normalize_l1(reference, in.problem);
    self.outputs[0].expected = std::move(reference.attn);
    self.outputs[0].magnitude = std::move(reference.magnitude);
  };
  instance.call = [in, options, &lse, &attn, &workspace = *instance.workspace](const char* backend, Stream stream) {
    run_with_workspace<AttentionDistributionArgs>(hopwell::attention_distribution,
                                                  hopwell::attention_distribution_workspace_bytes, workspace,
                                                  {.q = in.q->view(),
                                                   .kv = in.kv->view(),
                                                   .indices = view_of(in.indices),
                                                   .lse = lse.view(),
                                                   .sm_scale = in.problem.sm_scale,
                                                   .selection = in.selection(),
                                                   .normalize = options.normalize,
                                                   .indices_ascending = options.ascending,
                                                   .attn_sink = options.with_sink ? in.attn_sink->view() : Tensor(),
                                                   .out = attn.view(),
                                                   .backend = backend},
                                                  stream);
  };
  add_cost(instance, in, p.d_qk);
  return instance;
}

// Row widths that differ from production, and a key of infinite elements with weight 0. h_q leaves padding rows in
// every kernel's tile of heads, where 0 times infinity is NaN.
std::vector<std::pair<std::string, SparseMla>> distribution_problems() {
  using Indices = SparseMla::Indices;
  return {
      {"infinity_selected_h_q_40", {.h_q = 40, .constant = true, .planted = -std::numeric_limits<double>::infinity()}},
      {"d_qk_16_h_q_33", {.h_q = 33, .d_qk = 16, .d_v = 16, .topk = 130}},
      {"d_qk_64_h_q_130", {.s_q = 3, .h_q = 130, .d_qk = 64, .d_v = 64, .topk = 650, .lengths = true}},
      {"d_qk_128_h_q_40", {.s_q = 3, .h_q = 40, .d_qk = 128, .d_v = 128, .topk = 330, .indices = Indices::kInvalid}},
      {"d_qk_192_h_q_20", {.s_q = 9, .h_q = 20, .d_qk = 192, .d_v = 128, .topk = 200, .ranges = true}},
      {"d_qk_320", {.s_q = 3, .d_qk = 320, .d_v = 256, .topk = 330, .strided = true, .gap = 8}},
      {"d_qk_528_h_q_70", {.s_q = 3, .h_q = 70, .d_qk = 528, .topk = 200, .indices = Indices::kEmptyRows}}};
}

}  // namespace

Suite attention_distribution() {
  Suite suite{"attention_distribution", {}, sparse_mla_shapes(), {}, sparse_mla_device_shapes()};
  std::vector<std::pair<std::string, SparseMla>> problems = sparse_mla_problems();
  for (auto& problem : distribution_problems()) problems.push_back(std::move(problem));
  const auto add = [&](const std::string& name, const SparseMla& problem, hopwell_normalize normalize,
                       bool ascending = false) -> Case& {
    return suite.cases.emplace_back(
        suite.op, name, [=](Random& random) { return make(random, problem, Options{normalize, ascending}); });
  };
  for (const auto& [name, problem] : problems) {
    add(name, problem, HOPWELL_NORMALIZE_NONE);
    add(name + "_l1", problem, HOPWELL_NORMALIZE_L1);
  }
  // lse over window keys too, and the sink in the denominators.
  for (const auto& [name, problem] : sparse_mla_window_problems()) {
    const bool small = problem.h_q < 64, with_sink = problem.sink != SparseMla::Sink::kNone;
    if (!with_sink || problem.s_kv == 0) continue;
    for (const auto normalize : {HOPWELL_NORMALIZE_NONE, HOPWELL_NORMALIZE_L1}) {
      if (small != (normalize == HOPWELL_NORMALIZE_NONE) && problem.dtype == DType::kBFloat16) continue;
      suite.cases.emplace_back(suite.op, "sink_" + name + (normalize == HOPWELL_NORMALIZE_L1 ? "_l1" : ""),
                               [=](Random& random) { return make(random, problem, {normalize, false, with_sink}); });
    }
  }
  for (const auto& [name, problem] : sparse_mla_query_problems({64, 128}))
    add(name, problem, HOPWELL_NORMALIZE_NONE).for_model = true;
  for (const auto& [name, problem] : sparse_mla_device_problems())
    add(name, problem, HOPWELL_NORMALIZE_L1).device_only = true;
  // More keys than L2 holds: on Hopper, rows are sorted in ascending order.
  for (const std::int64_t h_q : {20, 100}) {
    const SparseMla problem{.s_q = 270,
                            .s_kv = 90000,
                            .h_q = h_q,
                            .topk = 300,
                            .sm_scale = 0.0417F,
                            .q_size = 1,
                            .indices = h_q == 20 ? SparseMla::Indices::kEmptyRows : SparseMla::Indices::kInvalid};
    for (const auto normalize : {HOPWELL_NORMALIZE_NONE, HOPWELL_NORMALIZE_L1})
      add("many_keys_h_q_" + std::to_string(h_q) + (normalize == HOPWELL_NORMALIZE_L1 ? "_l1" : ""), problem, normalize)
          .device_only = true;
    add("many_keys_h_q_" + std::to_string(h_q) + "_not_ascending_as_said", problem, HOPWELL_NORMALIZE_NONE, true)
        .device_only = true;
  }
  for (const std::string& name : long_sparse_mla_cases()) leave_to_nightly(suite, {name, name + "_l1"});
  // Masks and long rows run without L1 normalisation, and normalisation runs with short rows.
  leave_to_nightly(suite, {"hot_row*", "many_tiles_l1", "key_ranges_h_q_128_l1", "key_ranges_l1", "causal_positions_l1",
                           "kv_stride_4_positions_l1", "dense_causal_l1", "dense_key_ranges_l1", "topk_2049_l1"});
  leave_to_nightly(suite, {"many_tiles", "key_ranges_h_q_128", "d_qk_528_h_q_70", "production"}, "sm80");
  suite.bench = [](const Settings& settings, Random& random) {
    const SparseMla problem = sparse_mla_from(settings);
    return make(random, problem, {.ascending = problem.indices == SparseMla::Indices::kAscending}, true);
  };
  suite.unsupported = {
      {"sm80 sm90 sm100", "needs bfloat16 q and kv",
       "*_fp32 *_fp32_l1 few_queries_many_keys* lengths_many_keys* v_is_k* width_1*"},
      {"sm80", "needs d_qk a multiple of 16, at most 576", "many_queries many_queries_l1 odd_widths*"},
      {"sm90 sm100", "needs d_qk 576 or 512",
       "d_qk_128_* d_qk_16_* d_qk_192_* d_qk_320* d_qk_528_* d_qk_64_* empty_rows_many_keys* many_queries "
       "many_queries_l1 odd_widths*"},
      {"sm80", "needs rows of q and kv 16-byte aligned", "key_ranges_h_q_40* masks_h_q_40* strided strided_l1"},
      {"sm100", "needs rows of q and kv 16-byte aligned, with positive strides",
       "key_ranges_h_q_40* masks_h_q_40* strided strided_l1"}};
  suite.allocating = {"odd_widths_fp32_l1"};
  suite.subjects = {
      // One pass of heads and two, tiles of one slab and of five, rows that end early.
      {"attention_distribution_sm80", "emu:sm80", {"d_qk_64_h_q_130", "h_q_256", "lengths", "topk_2048_l1"}, 9, 4},
      // Two passes of heads, tiles that wrap around the ring, many queries per CTA, warpgroups that alternate between
      // tiles of the ring, unaligned rows; unsorted and sorted rows.
      {"attention_distribution_sm90",
       "emu:sm90",
       {"h_q_256", "production_l1", "lengths_l1", "topk_2048", "strided"},
       9,
       12},
      // Two passes of heads, and stages that wrap around the ring; many queries per CTA.
      {"attention_distribution_sm100", "emu:sm100", {"h_q_256", "production_l1", "lengths"}, 9, 15},
  };
  return suite;
}

}  // namespace hopwell::cases
