// sparse_mla_forward: inputs, float64 reference, tolerance and cost.
#include "sparse_mla.hpp"
#include "suites.hpp"

namespace hopwell::cases {
namespace {

// Options of the call. `out_unaligned`: the distance of rows of out is 513 elements. `timed`: the shapes are too large
// for float64.
struct Options {
  bool share_keys = false, out_unaligned = false, timed = false;
};

Instance make(Random& random, const SparseMla& p, const Options& options) {
  Instance instance;
  const SparseMlaInputs in = add_inputs(instance, random, p);
  SparseMla of_out = p;
  if (options.out_unaligned) of_out.strided = true, of_out.gap = 1;
  Array& out = add_array(instance, of_out, "out", p.dtype, {p.s_q, p.h_q, p.d_v});
  Array& max_logits = add_array(instance, p, "max_logits", DType::kFloat32, {p.s_q, p.h_q});
  Array& lse = add_array(instance, p, "lse", DType::kFloat32, {p.s_q, p.h_q});
  const double size = options.timed ? 1 : rms(in.keys());  // rms of V
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
  instance.call = [in, options, &out, &max_logits, &lse, &workspace = *instance.workspace](const char* backend,
                                                                                           Stream stream) {
    run_with_workspace<SparseMlaForwardArgs>(hopwell::sparse_mla_forward, hopwell::sparse_mla_forward_workspace_bytes,
                                             workspace,
                                             {.q = in.q->view(),
                                              .kv = in.kv->view(),
                                              .indices = view_of(in.indices),
                                              .sm_scale = in.problem.sm_scale,
                                              .d_v = in.problem.d_v,
                                              .attn_sink = view_of(in.attn_sink),
                                              .selection = in.selection(),
                                              .share_keys = options.share_keys,
                                              .window_kv = view_of(in.window_kv),
                                              .window = in.window(),
                                              .w_start = view_of(in.w_start),
                                              .w_end = view_of(in.w_end),
                                              .out = out.view(),
                                              .max_logits = max_logits.view(),
                                              .lse = lse.view(),
                                              .backend = backend},
                                             stream);
  };
  add_cost(instance, in, p.d_qk + p.d_v);
  return instance;
}

// More query groups: row_max changes, keys that must not be read, tiles with all members' heads.
std::vector<std::pair<std::string, SparseMla>> more_group_problems() {
  using Indices = SparseMla::Indices;
  const SparseMla four{.s_q = 9, .indices = Indices::kDistinct, .overlap = 85};
  std::vector<std::pair<std::string, SparseMla>> all;
  const auto add = [&](const std::string& name, const auto& change) { change(all.emplace_back(name, four).second); };
  for (const std::int64_t h_q : {2, 5, 21, 31, 33})
    add("h_q_" + std::to_string(h_q), [h_q](SparseMla& p) { p.h_q = h_q, p.sink = SparseMla::Sink::kAny; });
  add("d_qk_512_h_q_32", [](SparseMla& p) { p.h_q = 32, p.d_qk = 512, p.topk = 200, p.sink = SparseMla::Sink::kAny; });
  add("overlap_50", [](SparseMla& p) { p.overlap = 50, p.topk = 130; });
  add("large_scores", [](SparseMla& p) { p.q_size = 200, p.topk = 200; });
  add("negative_scale", [](SparseMla& p) { p.sm_scale = -0.5F, p.topk = 130; });
  add("strided_h_q_1", [](SparseMla& p) { p.h_q = 1, p.strided = true, p.sink = SparseMla::Sink::kAny; });
  add("fewer_keys_than_topk", [](SparseMla& p) { p.s_kv = 40, p.topk = 130; });
  add("causal_start", [](SparseMla& p) {
    p.s_q = 24, p.s_kv = 30, p.indices = Indices::kAny, p.positions = SparseMla::Positions::kStart, p.q_start = 2;
  });
  add("many_queries", [](SparseMla& p) { p.s_q = 53, p.topk = 200, p.overlap = 90; });
  add("more_queries", [](SparseMla& p) {  // on the emulator, more than a CTA looks up at once
    p.s_q = 271, p.h_q = 32, p.s_kv = 60, p.topk = 20, p.lengths = true;
  });
  add("many_queries_lengths", [](SparseMla& p) { p.s_q = 101, p.s_kv = 90, p.topk = 70, p.lengths = true; });
  return all;
}

// More windows: whole tiles of window keys, which Hopper's kernel for 64 heads copies as boxes, and rows of any
// alignment.
std::vector<std::pair<std::string, SparseMla>> more_window_problems() {
  using Sink = SparseMla::Sink;
  const SparseMla boxes{.s_q = 12,
                        .s_kv = 100,
                        .h_q = 64,
                        .d_qk = 512,
                        .topk = 70,
                        .indices = SparseMla::Indices::kInvalid,
                        .sink = Sink::kAny,
                        .window = 200,
                        .s_w = 150};
  std::vector<std::pair<std::string, SparseMla>> all;
  const auto add = [&](const std::string& name, const auto& change) {
    change(all.emplace_back("window_" + name, boxes).second);
  };
  add("boxes", [](SparseMla&) {});
  add("boxes_extreme_rows_h_q_100", [](SparseMla& p) {
    p.h_q = 100, p.lengths = true, p.window = 130, p.window_rows = SparseMla::WindowRows::kExtreme;
  });
  add("boxes_nan_seen", [](SparseMla& p) {
    p.s_q = 4, p.topk = 5, p.window = 64, p.s_w = 67, p.planted = std::numeric_limits<double>::quiet_NaN();
  });
  const auto dense = [](SparseMla& p) {  // whole tiles of keys of kv too
    p.s_kv = p.topk = 200, p.indices = SparseMla::Indices::kAbsent, p.window = 64;
    p.positions = SparseMla::Positions::kStart, p.q_start = 390, p.kv_stride = 3;
  };
  add("boxes_dense", dense);
  add("boxes_dense_ranges", [dense](SparseMla& p) { dense(p), p.h_q = 100, p.ranges = true; });
  add("d_qk_576_h_q_40", [](SparseMla& p) { p.h_q = 40, p.d_qk = 576, p.topk = 170, p.window = 130; });
  add("d_qk_576_h_q_80", [](SparseMla& p) { p.h_q = 80, p.d_qk = 576, p.s_q = 5, p.topk = 20, p.window = 30; });
  add("large_scores_h_q_20", [](SparseMla& p) { p.h_q = 20, p.topk = 170, p.q_size = 200; });
  for (const std::int64_t h_q : {20, 40})
    add("unaligned_h_q_" + std::to_string(h_q),
        [h_q](SparseMla& p) { p.h_q = h_q, p.topk = 170, p.window = 70, p.strided = true; });
  return all;
}

}  // namespace

Suite sparse_mla_forward() {
  Suite suite{"sparse_mla_forward", {}, sparse_mla_shapes(), {}, sparse_mla_device_shapes()};
  const auto add = [&](const std::string& name, const SparseMla& problem, const Options& options = {}) -> Case& {
    return suite.cases.emplace_back(suite.op, name, [=](Random& random) { return make(random, problem, options); });
  };
  for (const auto& problems : {sparse_mla_problems(), sparse_mla_window_problems(), more_window_problems()})
    for (const auto& [name, problem] : problems) add(name, problem);
  add("out_unaligned_h_q_20", {.h_q = 20}, {.out_unaligned = true});
  add("d_qk_512_long_rows_h_q_40", {.s_q = 3, .h_q = 40, .d_qk = 512, .topk = 530});  // Hopper: without boxes
  // Hopper: two launches, for the first 64 or 128 heads and for the other 16. With d_qk 512 the first has tensor
  // copies.
  const SparseMla divided{.s_q = 6, .h_q = 80, .topk = 70, .sink = SparseMla::Sink::kAny};
  SparseMla changed = divided;
  changed.lengths = changed.strided = true, changed.gap = 8;
  add("strided_h_q_80", changed);
  changed = divided;
  changed.s_q = 3, changed.h_q = 144, changed.d_qk = 512;
  add("d_qk_512_h_q_144", changed);
  add("share_keys_h_q_80", divided, {.share_keys = true});
  changed = divided;
  changed.s_q = 1000, changed.topk = 200;
  add("more_tiles_h_q_80", changed).device_only = true;
  for (const auto& problems : {sparse_mla_group_problems(), more_group_problems()})
    for (const auto& [name, problem] : problems)
      choose_backends_of_groups(add("share_keys_" + name, problem, {.share_keys = true}), problem);
  for (const auto& [name, problem] : sparse_mla_query_problems({16, 32, 64, 128})) add(name, problem).for_model = true;
  for (const auto& [name, problem] : sparse_mla_device_problems()) add(name, problem).device_only = true;
  leave_to_nightly(suite, long_sparse_mla_cases());
  leave_to_nightly(suite, {"hot_row"});
  // Shorter cases have these heads, masks and rows on their own. Only Hopper's kernels copy window keys as boxes.
  leave_to_nightly(suite, {"many_tiles", "key_ranges_h_q_128", "share_keys_h_q_128"}, "sm80 sm100");
  leave_to_nightly(suite,
                   {"production", "dense_h_q_128", "window_boxes*", "window_large_scores_h_q_20", "window_hca_h_q_128",
                    "window_h_q_96", "window_h_q_128"},
                   "sm80");
  // MergeRows in tests/arch has problems of as many keys. The last four are subjects, which also run on larger devices.
  leave_to_nightly(suite,
                   {"production", "share_keys_many_keys", "share_keys_none_shared_long_rows", "share_keys_third_shared",
                    "many_tiles", "window_boxes", "window_boxes_dense", "share_keys_many_queries"},
                   "sm90");
  for (auto* shapes : {&suite.shapes, &suite.device_shapes})
    for (auto& [name, settings] : *shapes) {
      settings["share_keys"] = "0";
      settings.merge(sparse_mla_window_settings());
    }
  suite.bench = [](const Settings& settings, Random& random) {
    return make(random, sparse_mla_from(settings), {.share_keys = number(settings, "share_keys") != 0, .timed = true});
  };
  suite.unsupported = {
      {"sm100", "needs a call without window_kv", "window_*"},
      {"sm80 sm90 sm100", "needs bfloat16 q and kv", "*_fp32 few_queries_many_keys lengths_many_keys v_is_k width_1"},
      {"sm80 sm90", "needs d_qk 576 or 512", "empty_rows_many_keys many_queries odd_widths"},
      {"sm100", "needs d_qk 576 or 512, d_v 512", "empty_rows_many_keys many_queries odd_widths"},
      {"sm80", "needs rows of q and kv 16-byte aligned", "key_ranges_h_q_40 masks_h_q_40 strided window_unaligned_*"},
      {"sm100", "needs rows of q and kv 16-byte aligned, a positive row stride of kv",
       "key_ranges_h_q_40 masks_h_q_40 strided"}};
  suite.allocating = {"odd_widths_fp32", "topk_2049"};
  suite.subjects = {
      {"sparse_mla_forward_sm80", "emu:sm80", {"topk_127"}, 50, 6},
      {"sparse_mla_forward_sm80_window", "emu:sm80", {"window_127"}, 20, 6},
      {"sparse_mla_forward_sm90", "emu:sm90", {"d_qk_512_long_rows_h_q_40", "masks_h_q_40", "many_tiles"}, 3, 6},
      {"sparse_mla_forward_sm90_few_heads", "emu:sm90", {"d_qk_512_h_q_20", "large_scores_h_q_20", "lengths"}, 3, 6},
      // Window keys: the kernels for few heads, also with unaligned rows, and for many with d_qk 576.
      {"sparse_mla_forward_sm90_window",
       "emu:sm90",
       {"window_large_scores_h_q_20", "window_d_qk_576_h_q_40", "window_unaligned_h_q_20"},
       3,
       6},
      // Tensor copies of Q and of tiles of consecutive keys, several queries per CTA, row_max changes.
      {"sparse_mla_forward_sm90_window_boxes",
       "emu:sm90",
       {"window_boxes", "window_boxes_dense", "window_boxes_extreme_rows_h_q_100", "window_large_scores_h_q_64"},
       3,
       8},
      // Groups that wrap around the ring, several per CTA, row_max changes, and ungrouped queries.
      {"sparse_mla_forward_sm90_groups",
       "emu:sm90",
       {"share_keys_many_queries", "share_keys_large_scores", "share_keys_d_qk_512_h_q_32",
        "share_keys_many_queries_lengths"},
       3,
       12,
       "ops/sparse_mla_forward/"},
      // row_max changes, keys that wrap around the ring, rows of all lengths.
      {"sparse_mla_forward_sm100",
       "emu:sm100",
       {"d_qk_512_h_q_20", "large_scores_h_q_20", "lengths", "many_tiles_h_q_40"},
       6,
       20},
      {"sparse_mla_forward_sm100_pair", "emu:sm100", {"d_qk_512_h_q_100", "production", "large_scores_h_q_192"}, 6, 35},
  };
  return suite;
}

}  // namespace hopwell::cases
