// sparse_mla_backward: inputs, float64 reference, tolerance and cost.
#include <algorithm>
#include <cmath>

#include "sparse_mla.hpp"
#include "suites.hpp"
#include "tile/cpu/parallel.hpp"

namespace hopwell::cases {
namespace {

// Options of the call.
struct Options {
  bool dq = true, dkv = true, d_sink = true, attn = true, d_window_kv = true;
  bool attn_with_sink = false;
  bool accumulate = false, deterministic = true, ascending = false, share_keys = false;
  bool merged = false;  // lse and out are merged over shards of the keys; this call has one shard
  DType dkv_dtype = DType::kFloat32;
};

struct Arrays {
  SparseMlaInputs in;
  Options options;
  Array *d_out = nullptr, *out = nullptr, *lse = nullptr;                                           // inputs
  Array *dq = nullptr, *dkv = nullptr, *d_sink = nullptr, *d_window_kv = nullptr, *attn = nullptr;  // outputs
};

// Sums and the same sums of absolute values.
struct Gradient {
  explicit Gradient(std::int64_t size)
      : value(static_cast<std::size_t>(size)), magnitude(static_cast<std::size_t>(size)) {}
  std::vector<double> value, magnitude;
};

// gradient[to .. to + count) += factor * x[from .. from + count). `size` bounds |factor| and its terms.
void add(Gradient& gradient, std::int64_t to, double factor, double size, const std::vector<double>& x,
         std::int64_t from, std::int64_t count) {
  add_scaled(factor, size, x.data() + from, gradient.value.data() + to, gradient.magnitude.data() + to, count);
}

// The formulae of docs/operators/sparse_mla_backward.md. Rows (query, head) are independent, but dkv and d_sink sum
// over them.
class Reference {
 public:
  explicit Reference(const Arrays& a)
      : a_(a),
        p_(a.in.problem),
        q_(values_of(*a.in.q)),
        kv_(a.in.keys()),
        d_out_(values_of(*a.d_out)),
        out_(values_of(*a.out)),
        queries(query_references(a.in)),
        dq(p_.s_q * p_.h_q * p_.d_qk),
        dkv(std::ssize(kv_)),
        d_sink(p_.h_q) {
    for (const QueryReference& query : queries) {
      first_.push_back(entries_.size());
      entries_.resize(entries_.size() + query.score.size());
    }
    sinks_.resize(static_cast<std::size_t>(p_.s_q * p_.h_q));
    cpu::parallel_for(p_.s_q * p_.h_q, [&](std::int64_t item) { differentiate(item / p_.h_q, item % p_.h_q); });
    // Blocks of columns, so that one thread sums every element of dkv, in the order of rows and entries.
    constexpr std::int64_t kColumns = 32;
    cpu::parallel_for((p_.d_qk + kColumns - 1) / kColumns, [&](std::int64_t slice) {
      add_to_dkv(slice * kColumns, std::min((slice + 1) * kColumns, p_.d_qk));
    });
    for (std::size_t row = 0; row < sinks_.size(); ++row) {
      const std::size_t h = row % static_cast<std::size_t>(p_.h_q);
      d_sink.value[h] += sinks_[row].value;
      d_sink.magnitude[h] += sinks_[row].magnitude;
    }
  }

 private:
  // Contribution of an entry to dkv: ds times its row of q, and p times its row of d_out.
  struct Entry {
    double ds, ds_size, p, p_size;
  };

  void differentiate(std::int64_t s, std::int64_t h) {
    const QueryReference& query = queries[static_cast<std::size_t>(s)];
    const std::int64_t row = s * p_.h_q + h, d_out = row * p_.d_v;
    const double scale = static_cast<double>(p_.sm_scale), lse = a_.lse->get(row);
    const double sink = a_.in.attn_sink == nullptr ? -std::numeric_limits<double>::infinity() : a_.in.attn_sink->get(h);
    const double kept = 1 / (1 + std::exp(sink - lse)),
                 taken = 1 / (1 + std::exp(lse - sink));  // exp(score - lse') = kept * exp(score - lse)
    const Sum delta = dot(out_.data() + d_out, d_out_.data() + d_out, p_.d_v);
    if (std::isfinite(sink) && lse != std::numeric_limits<double>::infinity())
      sinks_[static_cast<std::size_t>(row)] = {-taken * delta.value, taken * delta.magnitude};
    for (std::int64_t i = 0; i < query.count(); ++i) {
      const auto at = static_cast<std::size_t>(h * query.count() + i);
      const std::int64_t kv = query.keys[static_cast<std::size_t>(i)] * p_.d_qk;
      const Sum dp = dot(d_out_.data() + d_out, kv_.data() + kv, p_.d_v);
      const double p = kept * std::exp(query.score[at] - lse), p_size = p * (1 + query.score_magnitude[at]);
      const double ds = p * (dp.value - delta.value) * scale,
                   ds_size = p_size * (dp.magnitude + delta.magnitude) * std::abs(scale);
      add(dq, row * p_.d_qk, ds, ds_size, kv_, kv, p_.d_qk);
      entries_[first_[static_cast<std::size_t>(s)] + at] = {ds, ds_size, p, p_size};
    }
  }

  void add_to_dkv(std::int64_t first_column, std::int64_t end_column) {
    const std::int64_t columns = end_column - first_column,
                       columns_of_v = std::clamp<std::int64_t>(p_.d_v - first_column, 0, columns);
    for (std::int64_t s = 0; s < p_.s_q; ++s) {
      const QueryReference& query = queries[static_cast<std::size_t>(s)];
      const Entry* entry = entries_.data() + first_[static_cast<std::size_t>(s)];
      for (std::int64_t row = s * p_.h_q; row < (s + 1) * p_.h_q; ++row) {
        for (const std::int64_t key : query.keys) {
          const std::int64_t to = key * p_.d_qk + first_column;
          add(dkv, to, entry->ds, entry->ds_size, q_, row * p_.d_qk + first_column, columns);
          add(dkv, to, entry->p, entry->p_size, d_out_, row * p_.d_v + first_column, columns_of_v);
          ++entry;
        }
      }
    }
  }

  const Arrays& a_;
  const SparseMla& p_;
  const std::vector<double> q_, kv_, d_out_, out_;
  std::vector<Entry> entries_;      // of all rows
  std::vector<std::size_t> first_;  // of each query, in entries_
  std::vector<Sum> sinks_;          // of all rows

 public:
  const std::vector<QueryReference> queries;
  Gradient dq, dkv, d_sink;  // dkv: of kv's rows, then of window_kv's
};

void set_expected(Instance& instance, const Arrays& a) {
  Reference reference(a);
  const std::int64_t of_kv = a.in.kv->size();
  for (const auto& [array, first] : {std::pair{a.dkv, std::int64_t{0}}, std::pair{a.d_window_kv, of_kv}})
    if (a.options.accumulate && array != nullptr) add(reference.dkv, first, 1, 1, values_of(*array), 0, array->size());
  Gradient d_window_kv(std::ssize(reference.dkv.value) - of_kv);
  for (auto [all, rest] : {std::pair{&reference.dkv.value, &d_window_kv.value},
                           std::pair{&reference.dkv.magnitude, &d_window_kv.magnitude}}) {
    std::copy(all->begin() + of_kv, all->end(), rest->begin());
    all->resize(static_cast<std::size_t>(of_kv));
  }
  for (Output& output : instance.outputs) {
    if (output.array == a.attn) {
      DistributionReference attn =
          distribution_reference(a.in, reference.queries, values_of(*a.lse), a.options.attn_with_sink);
      output.expected = std::move(attn.attn);
      output.magnitude = std::move(attn.magnitude);
      continue;
    }
    Gradient& gradient = output.array == a.dq            ? reference.dq
                         : output.array == a.dkv         ? reference.dkv
                         : output.array == a.d_window_kv ? d_window_kv
                                                         : reference.d_sink;
    output.expected.swap(gradient.value);
    output.magnitude.swap(gradient.magnitude);
  }
}

void call(const Arrays& a, Workspace& workspace, const char* backend, Stream stream) {
  run_with_workspace<SparseMlaBackwardArgs>(hopwell::sparse_mla_backward, hopwell::sparse_mla_backward_workspace_bytes,
                                            workspace,
                                            {.d_out = a.d_out->view(),
                                             .q = a.in.q->view(),
                                             .kv = a.in.kv->view(),
                                             .indices = view_of(a.in.indices),
                                             .out = a.out->view(),
                                             .lse = a.lse->view(),
                                             .sm_scale = a.in.problem.sm_scale,
                                             .d_v = a.in.problem.d_v,
                                             .attn_sink = view_of(a.in.attn_sink),
                                             .selection = a.in.selection(),
                                             .deterministic = a.options.deterministic,
                                             .accumulate = a.options.accumulate,
                                             .indices_ascending = a.options.ascending,
                                             .share_keys = a.options.share_keys,
                                             .window_kv = view_of(a.in.window_kv),
                                             .window = a.in.window(),
                                             .w_start = view_of(a.in.w_start),
                                             .w_end = view_of(a.in.w_end),
                                             .attn_with_sink = a.options.attn_with_sink,
                                             .dq = view_of(a.dq),
                                             .dkv = view_of(a.dkv),
                                             .d_sink = view_of(a.d_sink),
                                             .d_window_kv = view_of(a.d_window_kv),
                                             .attn = view_of(a.attn),
                                             .backend = backend},
                                            stream);
}

// Fills out and lse with typical values of a forward for these inputs.
void add_typical_results(Instance& instance, Random& random, Arrays& a) {
  const SparseMla& p = a.in.problem;
  const double size = 1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(p.topk, 1)));
  a.out = &add_array(instance, p, "out", p.dtype, {p.s_q, p.h_q, p.d_v}).fill_normal(random, size);
  a.lse = &add_array(instance, p, "lse", DType::kFloat32, {p.s_q, p.h_q});
  fill_typical_lse(*a.lse, random, p);
  a.d_out = &add_array(instance, p, "d_out", p.dtype, {p.s_q, p.h_q, p.d_v}).fill_normal(random);
}

// Fills out and lse with the results of a forward, rounded to their types.
void add_forward_results(Instance& instance, Random& random, Arrays& a) {
  const SparseMla& p = a.in.problem;
  a.out = &add_array(instance, p, "out", p.dtype, {p.s_q, p.h_q, p.d_v});
  a.lse = &add_array(instance, p, "lse", DType::kFloat32, {p.s_q, p.h_q});
  a.d_out = &add_array(instance, p, "d_out", p.dtype, {p.s_q, p.h_q, p.d_v}).fill_normal(random);
  // A head that contributes nothing must not make the fixed-point sums of others inexact, however large its d_out is.
  if (p.sink == SparseMla::Sink::kLarge)
    for (std::int64_t i = 0; i < a.d_out->size(); ++i)
      if (i / p.d_v % p.h_q % 3 != 0) a.d_out->set(i, 1e12 * a.d_out->get(i));
  const ForwardReference forward = forward_reference(a.in);
  for (std::int64_t i = 0; i < a.out->size(); ++i) a.out->set(i, forward.out[static_cast<std::size_t>(i)]);
  for (std::int64_t i = 0; i < a.lse->size(); ++i) a.lse->set(i, forward.lse[static_cast<std::size_t>(i)]);
  // Rows without a valid entry, whose lse is +inf, contribute nothing, for any values of these.
  for (std::int64_t row = 0; row < a.lse->size(); ++row) {
    if (a.lse->get(row) != std::numeric_limits<double>::infinity()) continue;
    for (std::int64_t d = 0; d < p.d_v; ++d) a.d_out->set(row * p.d_v + d, std::numeric_limits<double>::quiet_NaN());
  }
}

// A timed instance has no reference, because its shapes are too large for float64.
Instance make(Random& random, const SparseMla& p, const Options& options, bool timed = false) {
  Instance instance;
  Arrays a;
  a.in = add_inputs(instance, random, p);
  a.options = options;
  if (timed || options.merged)
    add_typical_results(instance, random, a);
  else
    add_forward_results(instance, random, a);
  const Tolerance gradient{.norm = p.dtype == DType::kFloat32 && options.dkv_dtype == DType::kFloat32 ? 1e-4 : 4e-3};
  if (options.dq) instance.expect(*(a.dq = &add_array(instance, p, "dq", p.dtype, {p.s_q, p.h_q, p.d_qk})), gradient);
  if (options.dkv) {
    a.dkv = &add_array(instance, p, "dkv", options.dkv_dtype, {p.s_kv, 1, p.d_qk}).fill_normal(random);
    instance.expect(*a.dkv, gradient).accumulates = options.accumulate;
  }
  if (options.d_window_kv && a.in.window_kv != nullptr) {
    a.d_window_kv = &add_array(instance, p, "d_window_kv", options.dkv_dtype, {p.s_w, 1, p.d_qk}).fill_normal(random);
    instance.expect(*a.d_window_kv, gradient).accumulates = options.accumulate;
  }
  if (options.d_sink && a.in.attn_sink != nullptr) {
    instance.expect(*(a.d_sink = &instance.add({"d_sink", DType::kFloat32, {p.h_q}})), gradient);
  }
  if (options.attn)
    instance.expect(*(a.attn = &add_array(instance, p, "attn", DType::kFloat32, {p.s_q, p.topk})), {.norm = 2e-3});
  instance.repeatable = options.deterministic;
  instance.reference = [a](Instance& self) { set_expected(self, a); };
  instance.call = [a, &workspace = *instance.workspace](const char* backend, Stream stream) {
    call(a, workspace, backend, stream);
  };
  add_cost(instance, a.in,
           (options.dq || a.dkv != nullptr || a.d_window_kv != nullptr ? p.d_qk + p.d_v : p.d_qk) +
               (options.dq ? p.d_qk : 0) + (a.dkv != nullptr || a.d_window_kv != nullptr ? p.d_qk + p.d_v : 0));
  return instance;
}

// Repeats the special rows, keys and strides with more heads than one tile has.
std::vector<std::pair<std::string, SparseMla>> problems_of_many_heads() {
  using Indices = SparseMla::Indices;
  using Sink = SparseMla::Sink;
  using Positions = SparseMla::Positions;
  return {{"invalid_indices", {.s_q = 1, .h_q = 70, .topk = 130, .indices = Indices::kInvalid, .sink = Sink::kAny}},
          {"empty_rows", {.s_q = 4, .h_q = 128, .topk = 65, .indices = Indices::kEmptyRows, .sink = Sink::kExtreme}},
          {"lengths", {.s_q = 6, .h_q = 128, .topk = 130, .lengths = true}},
          {"one_key", {.s_kv = 1, .h_q = 80, .topk = 65, .indices = Indices::kInvalid}},
          {"no_keys", {.s_kv = 0, .h_q = 128, .indices = Indices::kInvalid, .sink = Sink::kAny}},
          {"strided", {.s_q = 3, .h_q = 100, .sink = Sink::kAny, .lengths = true, .strided = true, .gap = 8}},
          {"kv_stride_4", {.s_q = 10, .s_kv = 20, .h_q = 72, .positions = Positions::kArray, .kv_stride = 4}},
          {"hot_row", {.s_q = 4, .h_q = 128, .topk = 65, .indices = Indices::kHot}},
          {"large_scores", {.h_q = 128, .topk = 65, .q_size = 200}},
          {"d_qk_512_topk_130", {.s_q = 1, .h_q = 192, .d_qk = 512, .topk = 130}}};
}

}  // namespace

Suite sparse_mla_backward() {
  Suite suite{"sparse_mla_backward", {}, sparse_mla_shapes(), {}, sparse_mla_device_shapes()};
  const auto add = [&](const std::string& name, const SparseMla& problem, const Options& options) -> Case& {
    return suite.cases.emplace_back(suite.op, name, [=](Random& random) { return make(random, problem, options); });
  };
  // Kernels may depend on the number of heads and on the kind of addition: up to 64 heads deterministic, above 64 not,
  // and a few cases with these choices swapped.
  for (const auto& [name, problem] : sparse_mla_problems()) add(name, problem, {.deterministic = problem.h_q <= 64});
  for (const auto& [name, problem] : problems_of_many_heads())
    add("h_q_" + std::to_string(problem.h_q) + "_" + name, problem, {.deterministic = false});
  for (const auto& of_width : {sparse_mla_query_problems({64, 128}), sparse_mla_query_problems({64}, 512)})
    for (const auto& [name, problem] : of_width)
      add(name, problem, {.attn = false, .deterministic = false}).for_model = true;
  const SparseMla few{
      .s_q = 5, .s_kv = 50, .h_q = 8, .indices = SparseMla::Indices::kInvalid, .sink = SparseMla::Sink::kAny};
  SparseMla many = few;
  many.s_q = 2, many.topk = 1040;  // three tiles of entries on the CPU
  for (const auto& [name, problem] : {std::pair{"", few}, std::pair{"_many_keys", many}}) {
    add(std::string("only_dq") + name, problem, {.dkv = false, .d_sink = false, .attn = false});
    add(std::string("only_dkv") + name, problem, {.dq = false, .d_sink = false, .attn = false});
    add(std::string("only_d_sink") + name, problem, {.dq = false, .dkv = false, .attn = false});
    add(std::string("only_attn") + name, problem, {.dq = false, .dkv = false, .d_sink = false});
    add(std::string("dkv_bf16") + name, problem, {.dkv_dtype = DType::kBFloat16});
    add(std::string("accumulate") + name, problem, {.accumulate = true});
    add(std::string("not_deterministic") + name, problem, {.deterministic = false});
    add(std::string("only_dkv_not_deterministic") + name, problem,
        {.dq = false, .d_sink = false, .attn = false, .deterministic = false});
  }
  SparseMla wide = few;
  wide.s_q = 2, wide.h_q = 128, wide.topk = 130;
  add("h_q_128_only_dq", wide, {.dkv = false, .d_sink = false, .attn = false, .deterministic = false});
  add("h_q_128_no_attn", wide, {.attn = false, .deterministic = false});
  add("h_q_128_dkv_bf16", wide, {.attn = false, .deterministic = false, .dkv_dtype = DType::kBFloat16});
  add("h_q_128_accumulate", wide, {.accumulate = true, .deterministic = false});
  add("h_q_128_deterministic", wide, {});
  // Rows whose keys are in another shard add to d_sink, and to nothing else.
  SparseMla shard = few;
  shard.indices = SparseMla::Indices::kEmptyRows;
  add("shard", shard, {.merged = true});
  shard.h_q = 128, shard.topk = 0;
  add("h_q_128_shard_without_entries", shard, {.deterministic = false, .merged = true});
  SparseMla dense{
      .s_q = 4, .s_kv = 150, .h_q = 128, .topk = 150, .indices = SparseMla::Indices::kAbsent, .ranges = true};
  add("h_q_128_dense_deterministic", dense, {});
  dense.h_q = 20, dense.ranges = false;
  add("dense_not_deterministic", dense, {.deterministic = false});
  add("not_ascending_as_said", few, {.ascending = true});
  add("h_q_128_not_ascending_as_said", wide, {.deterministic = false, .ascending = true});
  SparseMla ascending = wide;
  ascending.indices = SparseMla::Indices::kAscending;
  add("h_q_128_ascending_as_said", ascending, {.deterministic = false, .ascending = true});
  for (const auto& [name, problem] : sparse_mla_window_problems())
    add(name, problem, {.deterministic = problem.h_q != 64});
  SparseMla window = few;
  window.s_q = 3, window.d_qk = 512, window.topk = 20, window.window = 5, window.s_w = 9;
  window.window_rows = SparseMla::WindowRows::kDocuments;
  for (const std::int64_t h_q : {8, 64}) {
    window.h_q = h_q;
    const std::string h = h_q == 8 ? "" : "_h_q_" + std::to_string(h_q);
    const bool deterministic = h_q == 64;
    add("window_only_dq" + h, window,
        {.dkv = false, .d_sink = false, .attn = false, .d_window_kv = false, .deterministic = deterministic});
    add("window_only_dkv" + h, window,
        {.dq = false, .d_sink = false, .attn = false, .d_window_kv = false, .deterministic = deterministic});
    add("window_only_d_window_kv" + h, window,
        {.dq = false, .dkv = false, .d_sink = false, .attn = false, .deterministic = deterministic});
    add("window_only_attn" + h, window,
        {.dq = false, .dkv = false, .d_sink = false, .d_window_kv = false, .deterministic = deterministic});
    add("window_dkv_bf16" + h, window, {.deterministic = deterministic, .dkv_dtype = DType::kBFloat16});
    add("window_accumulate" + h, window, {.accumulate = true, .deterministic = deterministic});
    add("window_attn_with_sink" + h, window, {.attn_with_sink = true, .deterministic = deterministic});
    add("window_only_attn_with_sink" + h, window,
        {.dq = false,
         .dkv = false,
         .d_sink = false,
         .d_window_kv = false,
         .attn_with_sink = true,
         .deterministic = deterministic});
    SparseMla without = window;
    without.window = 0, without.sink = SparseMla::Sink::kExtreme;
    add("attn_with_sink" + h, without, {.attn_with_sink = true, .deterministic = deterministic});
  }
  SparseMla large_sinks = few, window_large_sinks = window;
  window_large_sinks.h_q = 8;
  for (auto [name, problem] : {std::pair{"large_sinks", &large_sinks}, {"window_large_sinks", &window_large_sinks}}) {
    problem->sink = SparseMla::Sink::kLarge;
    add(name, *problem, {});
    add(std::string(name) + "_no_attn", *problem, {.attn = false});
    add(std::string(name) + "_attn_with_sink", *problem, {.attn_with_sink = true});
  }
  window.h_q = 64, window.topk = 66, window.window = 66, window.s_w = 70;
  window.window_rows = SparseMla::WindowRows::kLast;
  add("window_not_deterministic_h_q_64", window, {.deterministic = false});
  window.h_q = 128;
  add("window_not_deterministic_h_q_128", window, {.deterministic = false});
  add("window_attn_with_sink_h_q_128", window, {.attn_with_sink = true, .deterministic = false});
  SparseMla dense_window = window;
  dense_window.indices = SparseMla::Indices::kAbsent, dense_window.topk = dense_window.s_kv = 150;
  add("window_dense_h_q_128", dense_window, {.deterministic = false});
  window.d_qk = 576;
  add("window_d_qk_576_h_q_128", window, {.deterministic = false});
  for (const auto& [name, problem] : sparse_mla_group_problems())
    choose_backends_of_groups(
        add("share_keys_" + name, problem, {.attn = false, .deterministic = false, .share_keys = true}), problem);
  for (const auto& [name, problem] : sparse_mla_device_problems())
    add(name, problem, {.deterministic = false}).device_only = true;
  leave_to_nightly(suite, long_sparse_mla_cases());
  leave_to_nightly(suite, {"production", "causal_positions", "dense_h_q_128", "hot_row", "h_q_128_hot_row",
                           "only_dq_many_keys", "only_dkv_many_keys", "only_d_sink_many_keys", "only_attn_many_keys",
                           "accumulate_many_keys", "not_deterministic_many_keys",
                           "only_dkv_not_deterministic_many_keys", "share_keys_h_q_128", "share_keys_none_shared",
                           "share_keys_none_shared_long_rows", "share_keys_many_keys", "window_hca_h_q_128"});
  // Shorter cases have these heads, masks and rows on their own.
  leave_to_nightly(suite,
                   {"many_tiles", "key_ranges_h_q_128", "h_q_128_lengths", "h_q_72_kv_stride_4", "h_q_128_empty_rows",
                    "h_q_128_large_scores", "h_q_128_only_dq", "h_q_100_strided", "h_q_128_not_ascending_as_said",
                    "constant_rows_h_q_40", "dense_one_query", "dense_large_scores_h_q_64", "window_hot_row",
                    "window_extreme_rows", "window_hca"},
                   "sm80 sm90");
  leave_to_nightly(suite,
                   {"dkv_bf16_many_keys", "window_dense_h_q_128", "window_attn_with_sink_h_q_128",
                    "window_not_deterministic_h_q_128", "h_q_96", "h_q_128_ascending_as_said", "h_q_80_one_key"},
                   "sm80");
  leave_to_nightly(suite,
                   {"topk_2049", "nan_selected_h_q_40", "share_keys_h_q_12", "share_keys_h_q_16", "share_keys_h_q_24",
                    "share_keys_h_q_32"},
                   "sm90");
  leave_to_nightly(suite, {"many_tiles", "topk_2049"}, "sm100");
  for (auto* shapes : {&suite.shapes, &suite.device_shapes})
    for (auto& [name, settings] : *shapes) {
      settings["deterministic"] = settings["attn"] = settings["share_keys"] = "0";
      settings.merge(sparse_mla_window_settings());
    }
  suite.bench = [](const Settings& settings, Random& random) {
    const SparseMla problem = sparse_mla_from(settings);
    return make(random, problem,
                {.d_sink = false,
                 .attn = number(settings, "attn") != 0,
                 .deterministic = number(settings, "deterministic") != 0,
                 .ascending = problem.indices == SparseMla::Indices::kAscending,
                 .share_keys = number(settings, "share_keys") != 0},
                true);
  };
  suite.unsupported = {
      {"sm100", "needs a call without window_kv", "window_*"},
      {"sm80 sm90 sm100", "needs bfloat16 q and kv", "*_fp32 few_queries_many_keys lengths_many_keys v_is_k width_1"},
      {"sm80 sm90 sm100", "needs d_qk 576 or 512", "empty_rows_many_keys many_queries odd_widths"},
      {"sm80 sm90 sm100", "needs rows of q, kv, out, d_out and dq 16-byte aligned",
       "key_ranges_h_q_40 masks_h_q_40 strided"}};
  suite.allocating = {"odd_widths_fp32", "topk_2049", "dkv_bf16"};
  suite.subjects = {
      // Tiles of 32 heads and of 64, deterministic sums and atomic sums, with attn.
      {"sparse_mla_backward_sm80",
       "emu:sm80",
       {"topk_127", "h_q_64", "h_q_70_invalid_indices"},
       9,
       10,
       "ops/sparse_mla_backward/"},
      // Two steps of keys, every output, deterministic sums; and three steps with more heads than one tile has, atomic
      // sums.
      {"sparse_mla_backward_sm90", "emu:sm90", {"topk_127"}, 12, 20, "ops/sparse_mla_backward/"},
      {"sparse_mla_backward_sm90_pair", "emu:sm90", {"h_q_70_invalid_indices"}, 12, 20},
      // Window keys, with rows that end within a step: deterministic sums, and atomic sums of 64 and of 128 heads.
      {"sparse_mla_backward_sm80_window", "emu:sm80", {"window_127", "window_128"}, 6, 10, "ops/sparse_mla_backward/"},
      {"sparse_mla_backward_sm90_window", "emu:sm90", {"window_127", "window_128"}, 6, 20, "ops/sparse_mla_backward/"},
      {"sparse_mla_backward_sm90_window_pair",
       "emu:sm90",
       {"window_not_deterministic_h_q_128"},
       6,
       20,
       "ops/sparse_mla_backward/"},
      // Query groups: rows with a key twice, which take two rounds; rows without a key, whose groups are not merged.
      {"sparse_mla_backward_sm90_groups", "emu:sm90", {"share_keys_duplicates", "share_keys_sink_lengths"}, 6, 20},
      {"sparse_mla_backward_sm100", "emu:sm100", {"topk_127", "h_q_64"}, 6, 25, "ops/sparse_mla_backward/"},
      // Slices of a query, and three consecutive steps.
      {"sparse_mla_backward_sm100_pair",
       "emu:sm100",
       {"h_q_70_invalid_indices", "h_q_128_no_attn", "h_q_128_lengths"},
       6,
       40,
       "ops/sparse_mla_backward/"},
  };
  return suite;
}

}  // namespace hopwell::cases
