// indexer_dense_loss: inputs, float64 reference, tolerance and cost.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "sparse_mla.hpp"
#include "suites.hpp"

namespace hopwell::cases {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// The attention and the indexer. Keys that no query sees hold NaN in both.
struct DenseLoss {
  SparseMla attention;  // indices, topk and d_v are not used
  DType weights_dtype = DType::kFloat32;
  std::int64_t h_index = 16, d_index = 128;
  std::int64_t document = 0;  // if not 0: length of packed documents; the queries are the last tokens
  double index_size = 1;      // scale of the weights: 1 gives scores of about 1
  bool nan_keys = false;      // NaN in some elements of k_index
  bool wrong_lse = false;     // lse of another problem: targets of any size, including rows whose target is all zero
  bool row_weights = false;   // row_weights, 0 in every third row; row_loss is written too
  float d_loss = 1;
  bool d_loss_on_device = false, relu = true, deterministic = true;
  bool l1 = false;  // targets are divided by their sums
};

struct Inputs {
  DenseLoss problem;
  SparseMlaInputs attention;
  Array *lse = nullptr, *q = nullptr, *k = nullptr, *weights = nullptr, *row_weights = nullptr, *d_loss = nullptr;
};
struct Outputs {
  Array *loss = nullptr, *row_loss = nullptr, *d_q = nullptr, *d_k = nullptr, *d_weights = nullptr;
};

// Multiples of 1/4, whose products are exact, so that the sign of each q.k is certain.
void fill_quarters(Array& array, Random& random) {
  for (std::int64_t i = 0; i < array.size(); ++i)
    array.set(i, std::clamp(std::round(4 * random.normal()), -16.0, 16.0) / 4);
}

void use_documents(const Inputs& in) {
  const DenseLoss& p = in.problem;
  const std::int64_t s_q = p.attention.s_q, s_kv = p.attention.s_kv;
  for (std::int64_t s = 0; s < s_q && p.document > 0; ++s) {
    const std::int64_t token = s_kv - s_q + s;
    in.attention.k_start->set(s, static_cast<double>(token / p.document * p.document));
    in.attention.k_end->set(s, static_cast<double>(token + 1));
  }
}

void fill_lse(const Inputs& in, Random& random, const std::vector<QueryReference>& queries) {
  const std::int64_t heads = in.problem.attention.h_q;
  for (std::int64_t row = 0; row < in.lse->size(); ++row) {
    const double right = queries[static_cast<std::size_t>(row / heads)].lse[static_cast<std::size_t>(row % heads)];
    const bool none = in.problem.wrong_lse && row / heads % 3 == 1;
    in.lse->set(row, none ? kInfinity : right + (in.problem.wrong_lse ? random.normal() : 0));
  }
}

Inputs add_inputs(Instance& instance, Random& random, const DenseLoss& p, bool timed) {
  const SparseMla& a = p.attention;
  const DType fp32 = DType::kFloat32;
  Inputs in{.problem = p, .attention = cases::add_inputs(instance, random, a)};
  in.lse = &add_array(instance, a, "lse", fp32, {a.s_q, a.h_q});
  in.q = &add_array(instance, a, "q_index", a.dtype, {a.s_q, p.h_index, p.d_index});
  in.k = &add_array(instance, a, "k_index", a.dtype, {a.s_kv, p.d_index});
  in.weights = &add_array(instance, a, "weights", p.weights_dtype, {a.s_q, p.h_index});
  fill_quarters(*in.q, random), fill_quarters(*in.k, random);
  in.weights->fill_normal(random, p.index_size / std::sqrt(static_cast<double>(p.h_index * p.d_index)));
  use_documents(in);
  if (p.row_weights) in.row_weights = &add_array(instance, a, "row_weights", fp32, {a.s_q});
  for (std::int64_t s = 0; s < a.s_q && p.row_weights; ++s) in.row_weights->set(s, s % 3 == 0 ? 0 : random.normal());
  if (p.d_loss_on_device) (in.d_loss = &instance.add({"d_loss_array", fp32, {}}))->set(0, p.d_loss);
  if (timed) {
    fill_typical_lse(*in.lse, random, a);
    return in;
  }
  const std::vector<QueryReference> queries = query_references(in.attention);
  fill_lse(in, random, queries);
  std::vector<bool> seen(static_cast<std::size_t>(a.s_kv));
  for (const QueryReference& query : queries)
    for (const std::int64_t key : query.keys)
      if (key < a.s_kv) seen[static_cast<std::size_t>(key)] = true;  // not of the window
  for (std::int64_t t = 0; t < a.s_kv; ++t) {
    if (p.nan_keys && t % 7 == 0) in.k->set(t * p.d_index + t % p.d_index, kNan);
    for (std::int64_t d = 0; d < p.d_index && !seen[static_cast<std::size_t>(t)]; ++d)
      in.k->set(t * p.d_index + d, d % 3 == 0 ? kInfinity : kNan);
  }
  return in;
}

// A sum and the same sum of absolute values.
struct Sum {
  explicit Sum(std::int64_t size) : value(static_cast<std::size_t>(size)), magnitude(value) {}
  void add(std::int64_t at, double term, double size) {
    value[static_cast<std::size_t>(at)] += term;
    magnitude[static_cast<std::size_t>(at)] += std::abs(size);
  }
  std::vector<double> value, magnitude;
};

// A query and a key with an index score.
struct Pair {
  std::int64_t key;
  double score, score_size, target, target_size;
  std::vector<double> dots;  // [h_index]
};

class Reference {
 public:
  explicit Reference(const Inputs& in)
      : in_(in),
        p_(in.problem),
        q_(values_of(*in.q)),
        k_(values_of(*in.k)),
        weights_(values_of(*in.weights)),
        loss(1),
        row_loss(p_.attention.s_q),
        d_q(in.q->size()),
        d_k(in.k->size()),
        d_weights(in.weights->size()) {
    const std::vector<QueryReference> queries = query_references(in.attention);
    for (std::int64_t s = 0; s < p_.attention.s_q; ++s) add_query(s, queries[static_cast<std::size_t>(s)]);
  }

 private:
  [[nodiscard]] double weight_of(std::int64_t s, std::int64_t j) const {
    return weights_[static_cast<std::size_t>(s * p_.h_index + j)];
  }

  [[nodiscard]] Pair pair_of(std::int64_t s, const QueryReference& query, std::int64_t i) const {
    Pair pair{query.keys[static_cast<std::size_t>(i)], 0, 0, 0, 0, {}};
    const double* key = k_.data() + pair.key * p_.d_index;
    for (std::int64_t j = 0; j < p_.h_index; ++j) {
      const double* row = q_.data() + (s * p_.h_index + j) * p_.d_index;
      const auto [product, size] = dot(row, key, p_.d_index);
      const double w = weight_of(s, j);
      pair.dots.push_back(product);
      pair.score += w * (p_.relu && product < 0 ? 0 : product);
      pair.score_size += std::abs(w) * size;
    }
    const std::int64_t heads = p_.attention.h_q;
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto at = static_cast<std::size_t>(h * query.count() + i);
      const double lse = in_.lse->get(s * heads + h);
      const double sink = in_.attention.attn_sink == nullptr ? -kInfinity : in_.attention.attn_sink->get(h);
      const double left = sink == -kInfinity || lse == kInfinity ? 1 : 1 / (1 + std::exp(sink - lse));
      const double share = left * std::exp(query.score[at] - lse) / static_cast<double>(p_.l1 ? 1 : heads);
      pair.target += share;
      if (share != 0) pair.target_size += share * (1 + query.score_magnitude[at]);
    }
    return pair;
  }

  void add_query(std::int64_t s, const QueryReference& query) {
    std::vector<Pair> pairs;
    double peak = -kInfinity, total = 0, targets = 0;
    bool any = false;
    for (std::int64_t i = 0; i < query.count(); ++i) {
      if (query.entries[static_cast<std::size_t>(i)] < 0) continue;  // of the window
      Pair pair = pair_of(s, query, i);
      targets += pair.target;
      if (std::isnan(pair.score)) continue;  // counts as -inf
      peak = std::max(peak, pair.score);
      any = any || pair.target != 0;
      pairs.push_back(std::move(pair));
    }
    if (!any) return;
    for (Pair& pair : pairs) pair.target /= p_.l1 ? targets : 1, pair.target_size /= p_.l1 ? targets : 1;
    for (const Pair& pair : pairs) total += std::exp(pair.score - peak);
    const double weight = in_.row_weights ? in_.row_weights->get(s) : 1;
    for (const Pair& pair : pairs) {
      const double log_probability = pair.score - peak - std::log(total), probability = std::exp(log_probability);
      if (pair.target > 0) {
        const double of_row = pair.target * (std::log(pair.target) - log_probability);
        const double size = pair.target_size * (1 + std::abs(std::log(pair.target)) + pair.score_size + std::abs(peak));
        row_loss.add(s, of_row, size);
        if (weight != 0) loss.add(0, weight * of_row, weight * size);
      }
      if (weight == 0) continue;
      const double factor = static_cast<double>(p_.d_loss) * weight;
      add_gradient(s, pair, factor * (probability - pair.target),
                   std::abs(factor) * (probability * (1 + pair.score_size + std::abs(peak)) + pair.target_size));
    }
  }

  void add_gradient(std::int64_t s, const Pair& pair, double g, double size) {
    for (std::int64_t j = 0; j < p_.h_index; ++j) {
      const double product = pair.dots[static_cast<std::size_t>(j)], w = weight_of(s, j);
      if (p_.relu && product <= 0) continue;
      const std::int64_t head = s * p_.h_index + j;
      d_weights.add(head, g * product, size * product);
      for (std::int64_t d = 0; d < p_.d_index; ++d) {
        const double q = q_[static_cast<std::size_t>(head * p_.d_index + d)];
        const double k = k_[static_cast<std::size_t>(pair.key * p_.d_index + d)];
        d_q.add(head * p_.d_index + d, g * w * k, size * w * k);
        d_k.add(pair.key * p_.d_index + d, g * w * q, size * w * q);
      }
    }
  }

  const Inputs& in_;
  const DenseLoss& p_;
  std::vector<double> q_, k_, weights_;

 public:
  Sum loss, row_loss, d_q, d_k, d_weights;
};

void call(const Inputs& in, const Outputs& out, Workspace& workspace, const char* backend, Stream stream) {
  const SparseMla& a = in.problem.attention;
  run_with_workspace<IndexerDenseLossArgs>(
      hopwell::indexer_dense_loss, hopwell::indexer_dense_loss_workspace_bytes, workspace,
      {.q = in.attention.q->view(),
       .kv = in.attention.kv->view(),
       .lse = in.lse->view(),
       .q_index = in.q->view(),
       .k_index = in.k->view(),
       .weights = in.weights->view(),
       .sm_scale = a.sm_scale,
       .selection = in.attention.selection(),
       .row_weights = view_of(in.row_weights),
       .d_loss_array = view_of(in.d_loss),
       .d_loss = in.d_loss ? 1 : in.problem.d_loss,
       .relu = in.problem.relu,
       .deterministic = in.problem.deterministic,
       .attn_sink = view_of(in.attention.attn_sink),
       .normalize = in.problem.l1 ? HOPWELL_NORMALIZE_TARGET_L1 : HOPWELL_NORMALIZE_TARGET_HEADS,
       .loss = out.loss->view(),
       .row_loss = view_of(out.row_loss),
       .d_q_index = out.d_q->view(),
       .d_k_index = out.d_k->view(),
       .d_weights = out.d_weights->view(),
       .backend = backend},
      stream);
}

Instance make(Random& random, DenseLoss p, bool timed = false) {
  Instance instance;
  SparseMla& a = p.attention;
  a.indices = SparseMla::Indices::kAbsent, a.topk = a.s_kv;
  a.ranges = a.ranges || p.document > 0;
  a.nan_elsewhere = a.nan_elsewhere && p.document == 0;  // which keys documents hide is known later
  const Inputs in = add_inputs(instance, random, p, timed);
  Outputs out{.loss = &instance.add({"loss", DType::kFloat32, {}}),
              .d_q = &add_array(instance, a, "d_q_index", a.dtype, {a.s_q, p.h_index, p.d_index}),
              .d_k = &add_array(instance, a, "d_k_index", DType::kFloat32, {a.s_kv, p.d_index}),
              .d_weights = &add_array(instance, a, "d_weights", p.weights_dtype, {a.s_q, p.h_index})};
  if (p.row_weights) out.row_loss = &add_array(instance, a, "row_loss", DType::kFloat32, {a.s_q});
  for (Array* array : {out.d_q, out.d_k, out.d_weights, out.loss, out.row_loss})
    if (array) instance.expect(*array, {.norm = array->dtype() == DType::kFloat32 ? 1e-4 : 4e-3});
  instance.reference = [in](Instance& self) {
    Reference reference(in);
    Sum* const sums[] = {&reference.d_q, &reference.d_k, &reference.d_weights, &reference.loss, &reference.row_loss};
    for (std::size_t i = 0; i < self.outputs.size(); ++i) {
      self.outputs[i].expected = std::move(sums[i]->value);
      self.outputs[i].magnitude = std::move(sums[i]->magnitude);
    }
  };
  instance.repeatable = p.deterministic;
  instance.call = [in, out, &workspace = *instance.workspace](const char* backend, Stream stream) {
    call(in, out, workspace, backend, stream);
  };
  // Counts the target, the index score, and the gradients of q and k. Products that the gradients recompute do not
  // count.
  add_cost(instance, in.attention, a.d_qk);
  instance.flops *= 1 + 3 * static_cast<double>(p.h_index * p.d_index) / static_cast<double>(a.h_q * a.d_qk);
  return instance;
}

std::vector<std::pair<std::string, DenseLoss>> problems() {
  using Positions = SparseMla::Positions;
  constexpr DType fp32 = DType::kFloat32;
  return {
      {"basic", {.attention = {.s_q = 3, .s_kv = 200}}},
      {"basic_fp32",
       {.attention = {.dtype = fp32, .s_q = 3, .s_kv = 300, .h_q = 3, .d_qk = 48, .d_v = 32}, .d_index = 24}},
      {"any_order", {.attention = {.s_q = 5, .s_kv = 200}, .deterministic = false}},
      {"causal",
       {.attention = {.s_q = 10, .s_kv = 150, .h_q = 8, .positions = Positions::kStart, .q_start = 60}, .h_index = 4}},
      {"causal_any_order",
       {.attention = {.s_q = 9, .s_kv = 150, .positions = Positions::kStart, .q_start = 141},
        .h_index = 64,
        .deterministic = false}},
      {"causal_before_the_first", {.attention = {.s_q = 6, .s_kv = 70, .positions = Positions::kStart, .q_start = -3}}},
      {"kv_stride_4",
       {.attention = {.s_q = 12, .s_kv = 90, .h_q = 8, .positions = Positions::kArray, .kv_stride = 4}, .h_index = 4}},
      {"key_ranges",
       {.attention = {.s_q = 15, .s_kv = 150, .h_q = 8, .ranges = true}, .h_index = 4, .row_weights = true}},
      {"key_ranges_fp32",
       {.attention = {.dtype = fp32, .s_q = 24, .s_kv = 900, .h_q = 3, .d_qk = 48, .d_v = 32, .ranges = true},
        .d_index = 24}},
      {"key_ranges_kv_stride_4_positions",
       {.attention = {.s_q = 15, .s_kv = 90, .h_q = 8, .positions = Positions::kArray, .kv_stride = 4, .ranges = true},
        .h_index = 4}},
      // Several passes over the queries.
      {"documents",
       {.attention = {.s_q = 40, .s_kv = 5000, .h_q = 8}, .h_index = 4, .document = 70, .row_weights = true}},
      {"documents_any_order",
       {.attention = {.s_q = 40, .s_kv = 5000, .h_q = 8}, .h_index = 4, .document = 70, .deterministic = false}},
      {"production",
       {.attention = {.s_q = 2, .s_kv = 400, .h_q = 128, .sm_scale = 0.0417F, .q_size = 1}, .h_index = 64}},
      {"one_head", {.attention = {.s_q = 3, .s_kv = 140, .h_q = 1}, .h_index = 1}},
      {"h_q_64", {.attention = {.s_q = 3, .s_kv = 140, .h_q = 64}, .h_index = 32, .deterministic = false}},
      {"h_q_200_many_index_heads", {.attention = {.s_q = 2, .s_kv = 140, .h_q = 200}, .h_index = 130, .d_index = 64}},
      {"d_qk_512", {.attention = {.s_q = 3, .s_kv = 140, .d_qk = 512}}},
      {"d_qk_64", {.attention = {.s_q = 3, .s_kv = 140, .d_qk = 64, .d_v = 64}}},
      {"weights_bf16", {.attention = {.s_q = 3, .s_kv = 140}, .weights_dtype = DType::kBFloat16}},
      {"no_relu", {.attention = {.s_q = 5, .s_kv = 140, .ranges = true}, .relu = false}},
      {"no_relu_any_order",
       {.attention = {.s_q = 5, .s_kv = 140}, .h_index = 70, .relu = false, .deterministic = false}},
      {"row_weights", {.attention = {.s_q = 7, .s_kv = 140}, .row_weights = true, .d_loss = 3}},
      {"row_weights_any_order", {.attention = {.s_q = 7, .s_kv = 140}, .row_weights = true, .deterministic = false}},
      {"d_loss", {.attention = {.s_q = 3, .s_kv = 140}, .d_loss = -0.25F}},
      {"d_loss_0", {.attention = {.s_q = 3, .s_kv = 140}, .d_loss = 0}},
      {"d_loss_on_device",
       {.attention = {.s_q = 3, .s_kv = 140}, .row_weights = true, .d_loss = -0.25F, .d_loss_on_device = true}},
      {"large_scores", {.attention = {.s_q = 3, .s_kv = 140, .q_size = 200}}},
      {"large_index_scores", {.attention = {.s_q = 3, .s_kv = 140}, .index_size = 300}},
      {"nan_keys", {.attention = {.s_q = 4, .s_kv = 140}, .nan_keys = true}},
      {"nan_keys_any_order",
       {.attention = {.s_q = 4, .s_kv = 140, .ranges = true}, .nan_keys = true, .deterministic = false}},
      {"wrong_lse", {.attention = {.s_q = 7, .s_kv = 140}, .wrong_lse = true}},
      {"strided", {.attention = {.s_q = 4, .s_kv = 140, .strided = true, .gap = 8}, .row_weights = true}},
      // Query groups with the same first key; the last group is partial.
      {"groups_h_8",
       {.attention = {.s_q = 17, .s_kv = 100, .positions = Positions::kStart, .q_start = 76}, .h_index = 8}},
      {"groups_h_16_any_order",
       {.attention = {.s_q = 29, .s_kv = 131, .positions = Positions::kStart, .q_start = 102},
        .row_weights = true,
        .deterministic = false}},
      {"groups_h_17_no_relu", {.attention = {.s_q = 15, .s_kv = 460}, .h_index = 17, .relu = false}},
      {"groups_h_32_any_order",
       {.attention = {.s_q = 19, .s_kv = 460, .positions = Positions::kStart, .q_start = 436},
        .h_index = 32,
        .deterministic = false}},
      {"groups_h_32_documents",
       {.attention = {.s_q = 22, .s_kv = 90}, .h_index = 32, .document = 6, .row_weights = true}},
      {"groups_h_32_no_relu_any_order",
       {.attention = {.s_q = 14, .s_kv = 200, .positions = Positions::kStart, .q_start = 120},
        .h_index = 32,
        .d_index = 64,
        .relu = false,
        .deterministic = false}},
      {"groups_h_33", {.attention = {.s_q = 9, .s_kv = 140, .ranges = true}, .h_index = 33}},
      {"groups_h_64_any_order",
       {.attention = {.s_q = 11, .s_kv = 200, .positions = Positions::kStart, .q_start = 189},
        .h_index = 64,
        .deterministic = false}},
      {"groups_key_ranges",
       {.attention = {.s_q = 26, .s_kv = 150, .ranges = true}, .h_index = 24, .row_weights = true}},
      {"groups_nan_keys",
       {.attention = {.s_q = 18, .s_kv = 140, .positions = Positions::kStart, .q_start = 110},
        .h_index = 32,
        .nan_keys = true,
        .deterministic = false}},
      {"groups_wrong_lse", {.attention = {.s_q = 16, .s_kv = 140}, .h_index = 32, .wrong_lse = true}},
      // The joint target: lse is over window keys too, and denominators have the sink.
      {"l1", {.attention = {.s_q = 5, .s_kv = 140, .ranges = true}, .row_weights = true, .l1 = true}},
      {"joint",
       {.attention = {.s_q = 9,
                      .s_kv = 40,
                      .h_q = 8,
                      .d_qk = 512,
                      .sink = SparseMla::Sink::kExtreme,
                      .positions = Positions::kStart,
                      .kv_stride = 4,
                      .window = 3,
                      .s_w = 9},
        .h_index = 4,
        .row_weights = true,
        .l1 = true}},
      {"joint_any_order",
       {.attention = {.s_q = 20,
                      .s_kv = 90,
                      .h_q = 64,
                      .d_qk = 512,
                      .sink = SparseMla::Sink::kAny,
                      .ranges = true,
                      .window = 5,
                      .s_w = 20},
        .h_index = 64,
        .deterministic = false,
        .l1 = true}},
      {"joint_nan_keys",
       {.attention = {.s_q = 4, .s_kv = 140, .sink = SparseMla::Sink::kAny, .window = 5, .s_w = 4},
        .nan_keys = true,
        .l1 = true}},
      {"joint_heads", {.attention = {.s_q = 3, .s_kv = 140, .sink = SparseMla::Sink::kExtreme, .window = 5, .s_w = 4}}},
      {"joint_fp32",
       {.attention = {.dtype = fp32,
                      .s_q = 24,
                      .s_kv = 200,
                      .h_q = 3,
                      .d_qk = 48,
                      .d_v = 32,
                      .sink = SparseMla::Sink::kExtreme,
                      .ranges = true,
                      .window = 7,
                      .s_w = 24},
        .d_index = 24,
        .l1 = true}},
      {"one_query", {.attention = {.s_q = 1, .s_kv = 300, .h_q = 8}}},
      {"one_key", {.attention = {.s_q = 3, .s_kv = 1}}},
      {"no_keys", {.attention = {.s_q = 3, .s_kv = 0}, .row_weights = true}},
      {"no_queries", {.attention = {.s_q = 0, .s_kv = 70}}},
  };
}

DenseLoss problem_from(const Settings& settings) {
  Settings attention = settings;
  attention["s_q"] = attention["s_kv"] = attention["topk"] = settings.at("s");
  attention["d_v"] = "1", attention["ascending"] = attention["overlap"] = "0";
  DenseLoss p{.attention = sparse_mla_from(attention),
              .h_index = number(settings, "h_index"),
              .d_index = number(settings, "d_index"),
              .deterministic = number(settings, "deterministic") != 0};
  if (number(settings, "causal") != 0) p.attention.positions = SparseMla::Positions::kStart;
  return p;
}

}  // namespace

Suite indexer_dense_loss() {
  const auto shape = [](const char* s, const char* h_q, const char* h_index, const char* dtype) {
    return Settings{{"s", s},           {"h_q", h_q},    {"d_qk", "576"},  {"h_index", h_index},
                    {"d_index", "128"}, {"causal", "1"}, {"dtype", dtype}, {"deterministic", "0"}};
  };
  Suite suite{"indexer_dense_loss",
              {},
              {{"small", shape("512", "16", "8", "bf16")}, {"small_fp32", shape("512", "16", "8", "fp32")}},
              {},
              {{"h128-8k", shape("8192", "128", "64", "bf16")},
               {"h128-32k", shape("32768", "128", "64", "bf16")},
               {"h64-8k", shape("8192", "64", "32", "bf16")}}};
  for (const auto& [name, problem] : problems()) {
    suite.cases.emplace_back(suite.op, name, [p = problem](Random& random) { return make(random, p); });
    // Other backends do not group queries. groups_h_33 is the only case with more than 32 heads that do not fill 64.
    if (name.starts_with("groups_") && name != "groups_h_33") suite.cases.back().emulated_on = "emu:sm90";
  }
  leave_to_nightly(suite, {"documents_any_order", "groups_wrong_lse"});
  leave_to_nightly(suite, {"causal_any_order"}, "sm80");
  suite.bench = [](const Settings& settings, Random& random) { return make(random, problem_from(settings), true); };
  suite.unsupported = {{"sm80 sm90", "attention_distribution: needs bfloat16 q and kv", "*_fp32"},
                       {"sm90", "attention_distribution: needs d_qk 576 or 512", "d_qk_64"}};
  suite.allocating = {"one_key"};
  suite.subjects = {
      // Query groups: tiles that wrap around the rings, queries with different first keys, queries that add one by one;
      // also without relu, where the entries wait for no signs.
      {"lightning_indexer_backward_sm90_groups",
       "emu:sm90",
       {"groups_h_32_any_order", "groups_h_32_documents", "groups_h_17_no_relu"},
       3,
       20,
       "ops/lightning_indexer_backward/"},
  };
  return suite;
}

}  // namespace hopwell::cases
