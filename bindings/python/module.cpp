// hopwell._hopwell: the operators on arrays that the caller has allocated. hopwell/_ops/ allocates outputs and has the
// documentation.
#include "call.hpp"

#include <bit>
#include <cstdint>
#include <limits>

namespace hopwell::python {
namespace {

using nb::handle;

void sparse_mla_forward_(handle q, handle kv, handle indices, handle sm_scale, handle d_v, handle attn_sink,
                         handle topk_length, handle q_positions, handle q_start, handle kv_stride, handle k_start,
                         handle k_end, handle share_keys, handle out, handle max_logits, handle lse, handle backend,
                         handle stream) {
  Call call("sparse_mla_forward", backend, stream);
  SparseMlaForwardArgs args{.q = call.input("q", q),
                            .kv = call.input("kv", kv),
                            .indices = call.input("indices", indices),
                            .sm_scale = call.real("sm_scale", sm_scale),
                            .d_v = call.integer("d_v", d_v),
                            .attn_sink = call.input("attn_sink", attn_sink),
                            .topk_length = call.input("topk_length", topk_length),
                            .q_positions = call.input("q_positions", q_positions),
                            .has_q_start = !q_start.is_none(),
                            .q_start = call.integer("q_start", q_start, 0),
                            .kv_stride = call.integer("kv_stride", kv_stride),
                            .k_start = call.input("k_start", k_start),
                            .k_end = call.input("k_end", k_end),
                            .share_keys = call.flag("share_keys", share_keys),
                            .out = call.output("out", out),
                            .max_logits = call.output("max_logits", max_logits),
                            .lse = call.output("lse", lse)};
  call.run(args, hopwell::sparse_mla_forward);
}

void sparse_mla_backward_(handle d_out, handle q, handle kv, handle indices, handle out, handle lse, handle sm_scale,
                          handle d_v, handle attn_sink, handle topk_length, handle q_positions, handle q_start,
                          handle kv_stride, handle k_start, handle k_end, handle deterministic, handle accumulate,
                          handle indices_ascending, handle share_keys, handle dq, handle dkv, handle d_sink,
                          handle attn, handle backend, handle stream) {
  Call call("sparse_mla_backward", backend, stream);
  SparseMlaBackwardArgs args{.d_out = call.input("d_out", d_out),
                             .q = call.input("q", q),
                             .kv = call.input("kv", kv),
                             .indices = call.input("indices", indices),
                             .out = call.input("out", out),
                             .lse = call.input("lse", lse),
                             .sm_scale = call.real("sm_scale", sm_scale),
                             .d_v = call.integer("d_v", d_v),
                             .attn_sink = call.input("attn_sink", attn_sink),
                             .topk_length = call.input("topk_length", topk_length),
                             .q_positions = call.input("q_positions", q_positions),
                             .has_q_start = !q_start.is_none(),
                             .q_start = call.integer("q_start", q_start, 0),
                             .kv_stride = call.integer("kv_stride", kv_stride),
                             .k_start = call.input("k_start", k_start),
                             .k_end = call.input("k_end", k_end),
                             .deterministic = call.flag("deterministic", deterministic),
                             .accumulate = call.flag("accumulate", accumulate),
                             .indices_ascending = call.flag("indices_ascending", indices_ascending),
                             .share_keys = call.flag("share_keys", share_keys),
                             .dq = call.output("dq", dq),
                             .dkv = call.output("dkv", dkv),
                             .d_sink = call.output("d_sink", d_sink),
                             .attn = call.output("attn", attn)};
  call.run(args, hopwell::sparse_mla_backward);
}

void attention_distribution_(handle q, handle kv, handle indices, handle lse, handle sm_scale, handle topk_length,
                             handle q_positions, handle q_start, handle kv_stride, handle k_start, handle k_end,
                             handle normalize, handle indices_ascending, handle attn, handle backend, handle stream) {
  Call call("attention_distribution", backend, stream);
  AttentionDistributionArgs args{
      .q = call.input("q", q),
      .kv = call.input("kv", kv),
      .indices = call.input("indices", indices),
      .lse = call.input("lse", lse),
      .sm_scale = call.real("sm_scale", sm_scale),
      .topk_length = call.input("topk_length", topk_length),
      .q_positions = call.input("q_positions", q_positions),
      .has_q_start = !q_start.is_none(),
      .q_start = call.integer("q_start", q_start, 0),
      .kv_stride = call.integer("kv_stride", kv_stride),
      .k_start = call.input("k_start", k_start),
      .k_end = call.input("k_end", k_end),
      .normalize = call.choice<hopwell_normalize>("normalize", normalize,
                                                  {{"none", HOPWELL_NORMALIZE_NONE}, {"l1", HOPWELL_NORMALIZE_L1}}),
      .indices_ascending = call.flag("indices_ascending", indices_ascending),
      .out = call.output("out", attn)};
  call.run(args, hopwell::attention_distribution);
}

// At least 1 if given; 0 in the C struct means no window.
std::int64_t window_of(const Call& call, handle window) {
  if (window.is_none()) return 0;
  const std::int64_t size = call.integer("window", window);
  if (size < 1) call.fail("window", "at least 1", std::to_string(size));
  return size;
}

void paged_attention_(handle q, handle k_cache, handle v_cache, handle block_tables, handle context_lens, handle scale,
                      handle layout, handle pos_bias_u, handle bias, handle bias_kind, handle out_of_range,
                      handle pre_scale, handle pos_bias_v, handle r, handle alibi_slopes, handle window, handle out,
                      handle lse, handle backend, handle stream) {
  Call call("paged_attention", backend, stream);
  PagedAttentionArgs args{
      .q = call.input("q", q),
      .k_cache = call.input("k_cache", k_cache),
      .v_cache = call.input("v_cache", v_cache),
      .block_tables = call.input("block_tables", block_tables),
      .context_lens = call.input("context_lens", context_lens),
      .scale = call.real("scale", scale),
      .layout = call.choice<hopwell_cache_layout>(
          "layout", layout, {{"nhd", HOPWELL_CACHE_NHD}, {"hnd", HOPWELL_CACHE_HND}, {"vllm", HOPWELL_CACHE_VLLM}}),
      .pos_bias_u = call.input("pos_bias_u", pos_bias_u),
      .bias = call.input("bias", bias),
      .bias_kind = call.choice<hopwell_bias_kind>("bias_kind", bias_kind,
                                                  {{"key", HOPWELL_BIAS_KEY}, {"distance", HOPWELL_BIAS_DISTANCE}}),
      .out_of_range = call.choice<hopwell_out_of_range>("out_of_range", out_of_range,
                                                        {{"zero", HOPWELL_OUT_OF_RANGE_ZERO},
                                                         {"clamp", HOPWELL_OUT_OF_RANGE_CLAMP},
                                                         {"-inf", HOPWELL_OUT_OF_RANGE_NEG_INF}}),
      .post_scale = !call.flag("pre_scale", pre_scale),
      .pos_bias_v = call.input("pos_bias_v", pos_bias_v),
      .r = call.input("r", r),
      .alibi_slopes = call.input("alibi_slopes", alibi_slopes),
      .window = window_of(call, window),
      .out = call.output("out", out),
      .lse = call.output("lse", lse)};
  call.run(args, hopwell::paged_attention);
}

hopwell_scale_layout scale_layout_of(const Call& call, handle layout) {
  return call.choice<hopwell_scale_layout>("scale_layout", layout,
                                           {{"plain", HOPWELL_SCALES_PLAIN}, {"blocked", HOPWELL_SCALES_BLOCKED}});
}

// Numbers of numpy are numbers too. Arrays have __dlpack__, which is the quicker question.
bool is_number(handle value) {
  if (PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr())) return true;
  if (value.is_none() || nb::hasattr(value, "__dlpack__")) return false;
  return PyObject_IsInstance(value.ptr(), nb::module_::import_("numbers").attr("Real").ptr()) == 1;
}

void nvfp4_gemv_(handle a, handle b, handle sfa, handle sfb, handle alpha, handle global_is_reciprocal,
                 handle scale_layout, handle out, handle backend, handle stream) {
  Call call("nvfp4_gemv", backend, stream);
  Nvfp4GemvArgs args{.a = call.input("a", a),
                     .b = call.input("b", b),
                     .sfa = call.input("sfa", sfa),
                     .sfb = call.input("sfb", sfb),
                     .alpha = call.real("alpha", alpha),
                     .global_is_reciprocal = call.flag("global_is_reciprocal", global_is_reciprocal),
                     .scale_layout = scale_layout_of(call, scale_layout),
                     .out = call.output("out", out)};
  call.run(args, hopwell::nvfp4_gemv);
}

void nvfp4_linear_(handle x, handle weight, handle weight_scale, handle weight_global, handle bias, handle scale_layout,
                   handle global_is_reciprocal, handle out, handle backend, handle stream) {
  Call call("nvfp4_linear", backend, stream);
  const bool number = is_number(weight_global);
  Nvfp4LinearArgs args{.x = call.input("x", x),
                       .weight = call.input("weight", weight),
                       .weight_scale = call.input("weight_scale", weight_scale),
                       .weight_global = number ? nullptr : call.input("weight_global", weight_global),
                       .weight_global_value = number ? call.real("weight_global", weight_global) : 1.0F,
                       .global_is_reciprocal = call.flag("global_is_reciprocal", global_is_reciprocal),
                       .bias = call.input("bias", bias),
                       .scale_layout = scale_layout_of(call, scale_layout),
                       .out = call.output("out", out)};
  if (!number && args.weight_global == nullptr) call.fail("weight_global", "a number or a 0-d float32 array", "None");
  call.run(args, hopwell::nvfp4_linear, {{"weight_global_value", "weight_global"}});
}

void nvfp4_linear_backward_(handle d_out, handle weight, handle weight_scale, handle weight_global, handle scale_layout,
                            handle global_is_reciprocal, handle d_x, handle backend, handle stream) {
  Call call("nvfp4_linear_backward", backend, stream);
  const bool number = is_number(weight_global);
  Nvfp4LinearBackwardArgs args{.d_out = call.input("d_out", d_out),
                               .weight = call.input("weight", weight),
                               .weight_scale = call.input("weight_scale", weight_scale),
                               .weight_global = number ? nullptr : call.input("weight_global", weight_global),
                               .weight_global_value = number ? call.real("weight_global", weight_global) : 1.0F,
                               .global_is_reciprocal = call.flag("global_is_reciprocal", global_is_reciprocal),
                               .scale_layout = scale_layout_of(call, scale_layout),
                               .d_x = call.output("out", d_x)};
  if (!number && args.weight_global == nullptr) call.fail("weight_global", "a number or a 0-d float32 array", "None");
  call.run(args, hopwell::nvfp4_linear_backward, {{"weight_global_value", "weight_global"}, {"d_x", "out"}});
}

void nvfp4_matmul_(handle a, handle b, handle sfa, handle sfb, handle alpha, handle bias, handle global_is_reciprocal,
                   handle scale_layout, handle out, handle backend, handle stream) {
  Call call("nvfp4_matmul", backend, stream);
  Nvfp4MatmulArgs args{.a = call.input("a", a),
                       .b = call.input("b", b),
                       .sfa = call.input("sfa", sfa),
                       .sfb = call.input("sfb", sfb),
                       .alpha = call.real("alpha", alpha),
                       .global_is_reciprocal = call.flag("global_is_reciprocal", global_is_reciprocal),
                       .bias = call.input("bias", bias),
                       .scale_layout = scale_layout_of(call, scale_layout),
                       .out = call.output("out", out)};
  call.run(args, hopwell::nvfp4_matmul);
}

void nvfp4_quantize_(handle x, handle global_in, handle scale_layout, handle codes, handle scales, handle global_scale,
                     handle backend, handle stream) {
  Call call("nvfp4_quantize", backend, stream);
  const bool number = is_number(global_in);
  const float value = number ? call.real("global_scale", global_in) : 0.0F;
  // By its bits: in a mode that flushes subnormal numbers they compare equal to 0.
  if (number && std::bit_cast<std::uint32_t>(value) << 1 == 0) call.fail("global_scale", "not 0", "0");
  Nvfp4QuantizeArgs args{.x = call.input("x", x),
                         .global_in = number ? nullptr : call.input("global_scale", global_in),
                         .global_in_value = value,
                         .scale_layout = scale_layout_of(call, scale_layout),
                         .codes = call.output("codes", codes),
                         .scales = call.output("scales", scales),
                         .global_scale = call.output("global_scale", global_scale)};
  call.run(args, hopwell::nvfp4_quantize, {{"global_in", "global_scale"}, {"global_in_value", "global_scale"}});
}

void nvfp4_dequantize_(handle codes, handle scales, handle global_scale, handle global_is_reciprocal,
                       handle scale_layout, handle x, handle backend, handle stream) {
  Call call("nvfp4_dequantize", backend, stream);
  const bool number = is_number(global_scale);
  Nvfp4DequantizeArgs args{.codes = call.input("codes", codes),
                           .scales = call.input("scales", scales),
                           .global_scale = number ? nullptr : call.input("global_scale", global_scale),
                           .global_value = number ? call.real("global_scale", global_scale) : 1.0F,
                           .global_is_reciprocal = call.flag("global_is_reciprocal", global_is_reciprocal),
                           .scale_layout = scale_layout_of(call, scale_layout),
                           .x = call.output("x", x)};
  if (!number && args.global_scale == nullptr) call.fail("global_scale", "a number or a 0-d float32 array", "None");
  call.run(args, hopwell::nvfp4_dequantize, {{"global_value", "global_scale"}});
}

void lightning_indexer_(handle q_index, handle k_index, handle weights, handle q_scale, handle k_scale,
                        handle q_positions, handle q_start, handle kv_stride, handle k_start, handle k_end, handle relu,
                        handle indices, handle scores, handle backend, handle stream) {
  Call call("lightning_indexer", backend, stream);
  LightningIndexerArgs args{.q_index = call.input("q_index", q_index),
                            .k_index = call.input("k_index", k_index),
                            .weights = call.input("weights", weights),
                            .q_scale = call.input("q_scale", q_scale),
                            .k_scale = call.input("k_scale", k_scale),
                            .q_positions = call.input("q_positions", q_positions),
                            .has_q_start = !q_start.is_none(),
                            .q_start = call.integer("q_start", q_start, 0),
                            .kv_stride = call.integer("kv_stride", kv_stride),
                            .k_start = call.input("k_start", k_start),
                            .k_end = call.input("k_end", k_end),
                            .no_relu = !call.flag("relu", relu),
                            .indices = call.output("indices", indices),
                            .scores = call.output("scores", scores)};
  call.run(args, hopwell::lightning_indexer);
}

void lightning_indexer_backward_(handle target, handle d_scores, handle q_index, handle k_index, handle weights,
                                 handle indices, handle k_start, handle k_end, handle row_weights, handle d_loss,
                                 handle d_loss_array, handle relu, handle deterministic, handle loss, handle row_loss,
                                 handle d_q_index, handle d_k_index, handle d_weights, handle backend, handle stream) {
  Call call("lightning_indexer_backward", backend, stream);
  LightningIndexerBackwardArgs args{.target = call.input("target", target),
                                    .d_scores = call.input("d_scores", d_scores),
                                    .q_index = call.input("q_index", q_index),
                                    .k_index = call.input("k_index", k_index),
                                    .weights = call.input("weights", weights),
                                    .indices = call.input("indices", indices),
                                    .k_start = call.input("k_start", k_start),
                                    .k_end = call.input("k_end", k_end),
                                    .row_weights = call.input("row_weights", row_weights),
                                    .d_loss = call.real("d_loss", d_loss),
                                    .d_loss_array = call.input("d_loss", d_loss_array),
                                    .no_relu = !call.flag("relu", relu),
                                    .deterministic = call.flag("deterministic", deterministic),
                                    .loss = call.output("loss", loss),
                                    .row_loss = call.output("row_loss", row_loss),
                                    .d_q_index = call.output("d_q_index", d_q_index),
                                    .d_k_index = call.output("d_k_index", d_k_index),
                                    .d_weights = call.output("d_weights", d_weights)};
  call.run(args, hopwell::lightning_indexer_backward);
}

void indexer_dense_loss_(handle q, handle kv, handle lse, handle q_index, handle k_index, handle weights,
                         handle sm_scale, handle q_positions, handle q_start, handle kv_stride, handle k_start,
                         handle k_end, handle row_weights, handle d_loss, handle d_loss_array, handle relu,
                         handle deterministic, handle loss, handle row_loss, handle d_q_index, handle d_k_index,
                         handle d_weights, handle backend, handle stream) {
  Call call("indexer_dense_loss", backend, stream);
  IndexerDenseLossArgs args{.q = call.input("q", q),
                            .kv = call.input("kv", kv),
                            .lse = call.input("lse", lse),
                            .q_index = call.input("q_index", q_index),
                            .k_index = call.input("k_index", k_index),
                            .weights = call.input("weights", weights),
                            .sm_scale = call.real("sm_scale", sm_scale),
                            .q_positions = call.input("q_positions", q_positions),
                            .has_q_start = !q_start.is_none(),
                            .q_start = call.integer("q_start", q_start, 0),
                            .kv_stride = call.integer("kv_stride", kv_stride),
                            .k_start = call.input("k_start", k_start),
                            .k_end = call.input("k_end", k_end),
                            .row_weights = call.input("row_weights", row_weights),
                            .d_loss = call.real("d_loss", d_loss),
                            .d_loss_array = call.input("d_loss", d_loss_array),
                            .no_relu = !call.flag("relu", relu),
                            .deterministic = call.flag("deterministic", deterministic),
                            .loss = call.output("loss", loss),
                            .row_loss = call.output("row_loss", row_loss),
                            .d_q_index = call.output("d_q_index", d_q_index),
                            .d_k_index = call.output("d_k_index", d_k_index),
                            .d_weights = call.output("d_weights", d_weights)};
  call.run(args, hopwell::indexer_dense_loss);
}

void normalize_l1_(handle attn, handle out, handle backend, handle stream) {
  Call call("normalize_l1", backend, stream);
  NormalizeL1Args args{.attn = call.input("attn", attn), .out = call.output("out", out)};
  call.run(args, hopwell::normalize_l1);
}

void check_given(const char* operator_name, const char* argument, handle array) {
  Call(operator_name, nb::none(), nb::none()).check_given(argument, array);
}

void set_num_threads(handle threads) {
  const Call call("set_num_threads", nb::none(), nb::none());
  const std::int64_t number = call.integer("threads", threads);
  if (number < 0 || number > std::numeric_limits<int>::max())
    call.fail("threads", "a number from 1 to 2147483647, or 0 for the default", std::to_string(number));
  hopwell::set_num_threads(static_cast<int>(number));
}

nb::list names(const std::vector<std::string>& strings) {
  nb::list list;
  for (const std::string& string : strings) list.append(nb::str(string.c_str()));
  return list;
}

// Arguments are handles to arrays or to None, so nanobind must accept None.
template <class... Args>
void define(nb::module_& module, const char* name, void (*function)(Args...)) {
  module.def(name, function, ((void)sizeof(Args), nb::arg().none())...);
}

}  // namespace
}  // namespace hopwell::python

NB_MODULE(_hopwell, m) {
  namespace hp = hopwell::python;
  namespace nb = nanobind;
  static PyObject* const error_type = PyErr_NewExceptionWithDoc(
      "hopwell.Error", "What a device, its driver or a missing backend reports. Bad arguments raise ValueError.",
      PyExc_RuntimeError, nullptr);
  m.attr("Error") = nb::borrow(error_type);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const hopwell::Error& error) {
      const std::string_view message = error.what();  // an environment variable that it quotes may be no UTF-8
      const nb::object text =
          nb::steal(PyUnicode_DecodeUTF8(message.data(), static_cast<Py_ssize_t>(message.size()), "backslashreplace"));
      if (!text.is_valid()) return;  // out of memory: that error is set
      PyErr_SetObject(error.status() == HOPWELL_INVALID_ARGUMENT ? PyExc_ValueError : error_type, text.ptr());
    }
  });
  nb::class_<hp::Explanation>(m, "Explanation")
      .def(nb::init<>())
      .def_prop_ro("text", [](const hp::Explanation& explanation) { return nb::str(explanation.text.c_str()); });

  hp::define(m, "sparse_mla_forward", hp::sparse_mla_forward_);
  hp::define(m, "sparse_mla_backward", hp::sparse_mla_backward_);
  hp::define(m, "attention_distribution", hp::attention_distribution_);
  hp::define(m, "paged_attention", hp::paged_attention_);
  hp::define(m, "nvfp4_gemv", hp::nvfp4_gemv_);
  hp::define(m, "nvfp4_linear", hp::nvfp4_linear_);
  hp::define(m, "nvfp4_linear_backward", hp::nvfp4_linear_backward_);
  hp::define(m, "nvfp4_matmul", hp::nvfp4_matmul_);
  hp::define(m, "nvfp4_quantize", hp::nvfp4_quantize_);
  hp::define(m, "nvfp4_dequantize", hp::nvfp4_dequantize_);
  hp::define(m, "lightning_indexer", hp::lightning_indexer_);
  hp::define(m, "lightning_indexer_backward", hp::lightning_indexer_backward_);
  hp::define(m, "indexer_dense_loss", hp::indexer_dense_loss_);
  hp::define(m, "normalize_l1", hp::normalize_l1_);
  m.def("check_given", hp::check_given);
  m.def("tell_written", hp::tell_written);
  m.def("backends", [] { return hp::names(hopwell::backends()); });
  m.def("backends", [](const char* operator_name) { return hp::names(hopwell::backends(operator_name)); });
  m.def("num_threads", hopwell::num_threads, "How many threads a CPU operator may use, the calling one included.");
  m.def("set_num_threads", hp::set_num_threads, nb::arg("threads").none());
  m.def("version", [] { return nb::str(hopwell::version().c_str()); });
}
