// lightning_indexer and its backward: inputs, float64 reference, tolerance and cost.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <tuple>

#include "nvfp4.hpp"
#include "sparse_mla.hpp"
#include "suites.hpp"
#include "tile/nvfp4.hpp"

namespace hopwell::cases {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// One problem of either operator. The defaults are a small version of the production shape.
struct Indexer {
  DType dtype = DType::kBFloat16, weights_dtype = DType::kFloat32;
  std::int64_t s_q = 3, s_kv = 300, h_index = 16, d_index = 128, topk = 64;
  enum class Data {
    kNormal,    // weights scaled so that scores are about 1
    kIntegers,  // -2 ... 2, so that scores are exact in fp32 and many of them equal
    kQuarters,  // multiples of 1/4: q.k is exact, so the sign of q.k, which is the gradient of relu, is certain;
                // weights as in kNormal
    kLarge,     // 64 times kQuarters, all exact: scores of 1e4 and more
    kCodes,     // e4m3: any number
    kExtremes   // e4m3: the largest, the smallest and subnormal numbers, and zeros of both signs
  } data = Data::kNormal;
  bool nan_keys = false;     // NaN in some rows of k_index, infinities in others
  bool nan_queries = false;  // a row of q_index is NaN
  bool nan_weights = false;  // one weight of every second query is NaN
  bool no_weights = false;   // weights are 0, so that all scores are equal
  bool strided = false;      // gaps between the rows of every tensor, and permuted dimensions
  // forward
  bool stable_sort = false;  // also compared with a stable sort of all scores that the backend itself returns
  // Scales of e4m3: absent; largest element of the row / 448; powers of two; powers of two with 0, infinities, NaN and
  // negative scales among them, at most one per row or key.
  enum class Scales { kNone, kRandom, kPowersOfTwo, kSpecial } scales = Scales::kNone;
  enum class Positions { kNone, kStart, kArray } positions = Positions::kNone;
  std::int64_t q_start = 0, kv_stride = 1;
  // forward and backward
  bool ranges = false;  // k_start and k_end, as in SparseMla
  // Packed documents of `document` keys each. The queries are the tokens from `first_token` on.
  std::int64_t document = 0, first_token = 0;
  // backward
  enum class Indices { kAny, kInvalid, kHot, kTwice, kAscending } indices = Indices::kAny;
  bool zero_targets = false;  // every second row of target is zero, and every third entry of the others
  bool nan_targets = false;   // one target of every second row is NaN
  // -inf in the first column of some keys, or of all queries of every second row, and positive numbers in the other
  // operand: the products are -inf, so their gates are closed.
  bool infinite_keys = false, infinite_queries = false;
  float d_loss = 1;
  bool d_loss_on_device = false;  // d_loss as an array
  bool given = false;             // d_scores is given, not target; with nan_targets it contains NaN and infinities
  bool row_weights = false;       // 0 in every third row, where a target may then be NaN; tests row_loss too
  bool relu = true;               // forward too
  bool deterministic = true;
  bool emulated = true;  // false: too large for the emulator
};

struct Inputs {
  Indexer problem;
  Array *q = nullptr, *k = nullptr, *weights = nullptr, *q_scale = nullptr, *k_scale = nullptr, *q_positions = nullptr,
        *k_start = nullptr, *k_end = nullptr, *indices = nullptr, *given = nullptr, *row_weights = nullptr,
        *d_loss = nullptr;
};

Array& add(Instance& instance, const Indexer& p, const char* name, DType dtype,
           const std::vector<std::int64_t>& shape) {
  return add_array(instance, SparseMla{.strided = p.strided}, name, dtype, shape);
}

// Array stores e4m3 elements as codes. e4m3 has no infinity; an infinity becomes NaN with the other sign.
void set(Array& array, std::int64_t i, double value) {
  if (array.dtype() != DType::kFloat8E4m3) return array.set(i, value);
  if (!std::isfinite(value)) return array.set(i, std::isnan(value) ? 0x7F : 0xFF);
  array.set(i, (std::signbit(value) ? 0x80U : 0U) | nvfp4::encode_e4m3(static_cast<float>(std::abs(value))));
}
std::vector<double> numbers_of(const Array& array) {
  std::vector<double> values = values_of(array);
  if (array.dtype() == DType::kFloat8E4m3)
    for (double& value : values) value = e4m3_value(static_cast<unsigned>(value));
  return values;
}

double draw(Random& random, Indexer::Data data) {
  constexpr double kExtremes[] = {448, 0x1p-9, 7 * 0x1p-9, 0x1p-6, 0};
  switch (data) {
    case Indexer::Data::kIntegers:
      return static_cast<double>(random.below(5) - 2);
    case Indexer::Data::kQuarters:
      return std::clamp(std::round(4 * random.normal()), -16.0, 16.0) / 4;
    case Indexer::Data::kLarge:
      return 64 * std::clamp(std::round(4 * random.normal()), -16.0, 16.0) / 4;
    case Indexer::Data::kCodes:
      return e4m3_value(static_cast<unsigned>(random.below(0x7F) + 0x80 * random.below(2)));
    case Indexer::Data::kExtremes:
      return std::copysign(kExtremes[random.below(5)], random.normal());
    default:
      return random.normal();
  }
}
void fill(Array& array, Random& random, Indexer::Data data, double size = 1) {
  for (std::int64_t i = 0; i < array.size(); ++i) {
    const double value = draw(random, data);
    set(array, i, data == Indexer::Data::kNormal ? size * value : value);
  }
}

// `period`: distance between special scales.
void fill_scales(Array& scales, Random& random, Indexer::Scales kind, std::int64_t period) {
  constexpr double kSpecial[] = {0, -1, kNan, kInfinity, -kInfinity, -0.25};
  for (std::int64_t i = 0; i < scales.size(); ++i) {
    const double power = std::ldexp(1, static_cast<int>(random.below(7)) - 3);
    const bool special = kind == Indexer::Scales::kSpecial && i % period == 0;
    const double plain = kind == Indexer::Scales::kRandom ? (2 + random.uniform()) / 448 : power;
    scales.set(i, special ? kSpecial[static_cast<std::size_t>(i / period) % std::size(kSpecial)] : plain);
  }
}

std::pair<Array*, Array*> add_documents(Instance& instance, const Indexer& p) {
  Array& start = instance.add({"k_start", DType::kInt32, {p.s_q}});
  Array& end = instance.add({"k_end", DType::kInt32, {p.s_q}});
  for (std::int64_t s = 0; s < p.s_q; ++s) {
    const std::int64_t token = p.first_token + s, first = token / p.document * p.document;
    start.set(s, static_cast<double>(first));
    end.set(s, static_cast<double>(token + 1));
  }
  return {&start, &end};
}

Inputs add_inputs(Instance& instance, Random& random, const Indexer& p) {
  using Data = Indexer::Data;
  Inputs in{.problem = p};
  in.q = &add(instance, p, "q_index", p.dtype, {p.s_q, p.h_index, p.d_index});
  in.k = &add(instance, p, "k_index", p.dtype, {p.s_kv, p.d_index});
  in.weights = &add(instance, p, "weights", p.weights_dtype, {p.s_q, p.h_index});
  fill(*in.q, random, p.data);
  fill(*in.k, random, p.data == Data::kLarge ? Data::kQuarters : p.data);
  if (p.scales != Indexer::Scales::kNone) {
    in.q_scale = &add(instance, p, "q_scale", DType::kFloat32, {p.s_q, p.h_index});
    in.k_scale = &instance.add({"k_scale", DType::kFloat32, {p.s_kv}, {p.strided ? 3 : 1}});
    fill_scales(*in.q_scale, random, p.scales, 2 * p.h_index + 1);
    fill_scales(*in.k_scale, random, p.scales, 5);
  }
  const bool exact_weights = p.data == Data::kIntegers || p.data == Data::kLarge;
  fill(*in.weights, random, exact_weights ? Data::kIntegers : Data::kNormal,
       1 / std::sqrt(static_cast<double>(p.h_index * p.d_index)));
  for (std::int64_t t = 0; t < p.s_kv && p.nan_keys; t += 7)
    set(*in.k, t * p.d_index + t % p.d_index, t % 2 == 0 ? kNan : kInfinity);
  for (std::int64_t i = 0; i < p.s_q * p.h_index && p.no_weights; ++i) in.weights->set(i, 0);
  for (std::int64_t s = 0; s < p.s_q && p.nan_weights; s += 2) in.weights->set(s * p.h_index + s % p.h_index, kNan);
  for (std::int64_t i = 0; i < p.d_index && p.nan_queries && p.s_q > 0; ++i) set(*in.q, i, kNan);
  for (std::int64_t row = 0; row < p.s_q * p.h_index && (p.infinite_keys || p.infinite_queries); ++row)
    in.q->set(row * p.d_index, p.infinite_queries && row / p.h_index % 2 == 1 ? -kInfinity : 1);
  for (std::int64_t t = 0; t < p.s_kv && (p.infinite_keys || p.infinite_queries); ++t)
    in.k->set(t * p.d_index, p.infinite_keys && t % 5 == 0 ? -kInfinity : 1);
  if (p.ranges) std::tie(in.k_start, in.k_end) = add_key_ranges(instance, random, p.s_q, p.s_kv, p.strided ? 2 : 1);
  if (p.document > 0) std::tie(in.k_start, in.k_end) = add_documents(instance, p);
  return in;
}

// One query and one key in float64: the score (NaN counts as -inf), and the same sum with absolute values.
struct Score {
  double value = 0, magnitude = 0;
};

// Scores of query s, and the dot product of every (head, key).
struct Row {
  std::vector<double> dots;  // [h_index, keys.size()]
  std::vector<Score> scores;
};
Row row_of(const Indexer& p, const std::vector<double>& q, const std::vector<double>& k,
           const std::vector<double>& weights, std::int64_t s, const std::vector<std::int64_t>& keys,
           const Array* k_scale = nullptr) {
  Row row{std::vector<double>(static_cast<std::size_t>(p.h_index) * keys.size()), std::vector<Score>(keys.size())};
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const double* key = k.data() + keys[i] * p.d_index;
    Score& score = row.scores[i];
    for (std::int64_t j = 0; j < p.h_index; ++j) {
      const double* query = q.data() + (s * p.h_index + j) * p.d_index;
      const auto [product, size] = dot(query, key, p.d_index);
      const double w = weights[static_cast<std::size_t>(s * p.h_index + j)];
      row.dots[static_cast<std::size_t>(j) * keys.size() + i] = product;
      const double gated = p.relu && product < 0 ? 0 : product;  // NaN stays NaN
      score.value += w * gated;
      score.magnitude += std::abs(w) * size;
    }
    const double scale = k_scale == nullptr ? 1 : k_scale->get(keys[i]);
    score = {score.value * scale, score.magnitude * std::abs(scale)};
    if (std::isnan(score.value)) score.value = -kInfinity;
  }
  return row;
}

// The key range of query s, clamped to the existing keys.
std::pair<std::int64_t, std::int64_t> key_range(const Inputs& in, std::int64_t s) {
  if (in.k_start == nullptr) return {0, in.problem.s_kv};
  return {std::max<std::int64_t>(0, static_cast<std::int64_t>(in.k_start->get(s))),
          std::min(in.problem.s_kv, static_cast<std::int64_t>(in.k_end->get(s)))};
}

// ---- forward --------------------------------------------------------------------------------------------------------

std::vector<std::int64_t> visible_keys(const Inputs& in, std::int64_t s) {
  const Indexer& p = in.problem;
  const bool array = p.positions == Indexer::Positions::kArray;
  const std::int64_t start = in.k_start != nullptr ? static_cast<std::int64_t>(in.k_start->get(s)) : 0;
  const std::int64_t end = in.k_end != nullptr ? static_cast<std::int64_t>(in.k_end->get(s)) : p.s_kv;
  const std::int64_t position = array ? static_cast<std::int64_t>(in.q_positions->get(s)) : p.q_start + s;
  std::vector<std::int64_t> keys;
  for (std::int64_t t = 0; t < p.s_kv; ++t) {
    const bool past = p.positions == Indexer::Positions::kNone || (t - start + 1) * p.kv_stride <= position + 1;
    if (t >= start && t < end && past) keys.push_back(t);
  }
  return keys;
}

// Calls visit(s, visible keys, their scores) for every query.
template <class Visit>
void for_each_row(const Inputs& in, Visit visit) {
  const std::vector<double> q = numbers_of(*in.q), k = numbers_of(*in.k);
  std::vector<double> weights = values_of(*in.weights);
  for (std::size_t i = 0; i < weights.size() && in.q_scale; ++i)
    weights[i] *= in.q_scale->get(static_cast<std::int64_t>(i));
  for (std::int64_t s = 0; s < in.problem.s_q; ++s) {
    const std::vector<std::int64_t> keys = visible_keys(in, s);
    visit(s, keys, row_of(in.problem, q, k, weights, s, keys, in.k_scale).scores);
  }
}

// If scores are exact, the selection is exact.
void exact_selection(const Inputs& in, Instance& self) {
  const auto topk = static_cast<std::size_t>(in.problem.topk);
  std::vector<double>&indices = self.outputs[0].expected, &scores = self.outputs[1].expected;
  for_each_row(in, [&](std::int64_t, const std::vector<std::int64_t>& keys, const std::vector<Score>& row) {
    std::vector<std::size_t> order(row.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return row[a].value > row[b].value; });
    order.resize(std::min(topk, order.size()));
    std::sort(order.begin(), order.end());
    for (std::size_t i = 0; i < topk; ++i) {
      indices.push_back(i < order.size() ? static_cast<double>(keys[order[i]]) : -1);
      scores.push_back(i < order.size() ? row[order[i]].value : -kInfinity);
    }
  });
}

// Maximum rounding error of a score, relative to the scores' root mean square and to the sum with absolute values.
struct Rounding {
  double of_norm, of_magnitude;
};
// Hopper's tensor cores truncate e4m3 products to 13 bits below the leading bit of the largest of 32 products and the
// running sum, and truncate the sum alike (docs/emulator.md). On the worst data here the error is 2.5e-4 of the norm
// for random numbers, and more for sums of many small products and a few large ones.
Rounding rounding_on(const std::string& backend, DType dtype) {
  if (dtype == DType::kFloat8E4m3 && backend.ends_with("sm90")) return {1e-3, 0x1p-10};
  return {1e-4, 0x1p-21};
}

// For scores that rounding may reorder: checks that the selection has the right number of visible keys in ascending
// order, each with its score, and that no omitted key beats a selected one by more than rounding.
std::string verify_selection(const Inputs& in, const Array& indices, const Array& scores, const Rounding& bound) {
  const std::int64_t topk = in.problem.topk;
  std::string failure;
  for_each_row(in, [&](std::int64_t s, const std::vector<std::int64_t>& keys, const std::vector<Score>& row) {
    const auto fail = [&](std::int64_t i, const std::string& what) {
      if (failure.empty()) failure = "query " + std::to_string(s) + ", entry " + std::to_string(i) + ": " + what;
    };
    double size = 0;
    for (const Score& score : row)
      if (std::isfinite(score.value)) size += score.value * score.value / static_cast<double>(row.size());
    const auto rounding = [&](const Score& score) {
      return bound.of_norm * std::sqrt(size) + bound.of_magnitude * score.magnitude;
    };
    const std::int64_t expected = std::min<std::int64_t>(topk, static_cast<std::int64_t>(row.size()));
    std::vector<bool> taken(row.size());
    double worst_taken = kInfinity, previous = -1;
    for (std::int64_t i = 0; i < topk; ++i) {
      const double key = indices.get(s * topk + i), score = scores.get(s * topk + i);
      if (i >= expected) {
        if (key != -1 || score != -kInfinity) fail(i, "must be -1 with score -inf");
        continue;
      }
      const auto place = std::find(keys.begin(), keys.end(), static_cast<std::int64_t>(key)) - keys.begin();
      if (key <= previous || place == std::ssize(keys)) return fail(i, "key " + std::to_string(key));
      previous = key;
      const Score& reference = row[static_cast<std::size_t>(place)];
      const bool finite = std::isfinite(reference.value);
      if (finite ? !(std::abs(score - reference.value) <= rounding(reference)) : score != reference.value)
        fail(i, "score " + std::to_string(score) + ", expected " + std::to_string(reference.value));
      taken[static_cast<std::size_t>(place)] = true;
      worst_taken = std::min(worst_taken, finite ? reference.value + rounding(reference) : reference.value);
    }
    for (std::size_t t = 0; t < row.size(); ++t)
      if (!taken[t] && expected > 0 && row[t].value - rounding(row[t]) > worst_taken)
        fail(-1, "key " + std::to_string(keys[t]) + " is better than one that was taken");
  });
  return failure.empty() ? "" : "indices: " + failure;
}

void select(const Inputs& in, const Array& indices, const Array& scores, Workspace& workspace, const char* backend,
            Stream stream) {
  const bool has_start = in.problem.positions == Indexer::Positions::kStart;
  run_with_workspace<LightningIndexerArgs>(
      hopwell::lightning_indexer, hopwell::lightning_indexer_workspace_bytes, workspace,
      {.q_index = in.q->view(),
       .k_index = in.k->view(),
       .weights = in.weights->view(),
       .q_scale = view_of(in.q_scale),
       .k_scale = view_of(in.k_scale),
       .selection = {.q_positions = view_of(in.q_positions),
                     .q_start = has_start ? std::optional(in.problem.q_start) : std::nullopt,
                     .kv_stride = in.problem.kv_stride,
                     .k_start = view_of(in.k_start),
                     .k_end = view_of(in.k_end)},
       .relu = in.problem.relu,
       .indices = indices.view(),
       .scores = scores.view(),
       .backend = backend},
      stream);
}

// Holds for any rounding of a backend: with topk = s_kv it returns all scores of a query, and with a smaller topk the
// keys that a stable sort of these scores puts first.
std::string verify_stable_sort(const Inputs& in, const Array& indices, const Array& scores, Workspace& workspace,
                               const std::string& backend) {
  const std::int64_t s_kv = in.problem.s_kv, topk = in.problem.topk;
  Array keys("keys", DType::kInt32, {in.problem.s_q, s_kv}), score("score", DType::kFloat32, {in.problem.s_q, s_kv});
  for (Array* array : {&keys, &score})
    if (cuda::runs(backend)) array->to_device();
  select(in, keys, score, workspace, backend.c_str(), nullptr);
  for (Array* array : {&keys, &score})
    if (cuda::runs(backend)) array->from_device();
  for (std::int64_t s = 0; s < in.problem.s_q; ++s) {
    std::vector<std::int64_t> best;  // positions in the row of all scores
    for (std::int64_t i = s * s_kv; i < (s + 1) * s_kv && keys.get(i) >= 0; ++i) best.push_back(i);
    std::stable_sort(best.begin(), best.end(),
                     [&](std::int64_t a, std::int64_t b) { return score.get(a) > score.get(b); });
    best.resize(std::min(best.size(), static_cast<std::size_t>(topk)));
    std::sort(best.begin(), best.end());
    for (std::int64_t i = 0; i < std::ssize(best); ++i) {
      const std::int64_t at = best[static_cast<std::size_t>(i)];
      if (indices.get(s * topk + i) != keys.get(at) || scores.get(s * topk + i) != score.get(at))
        return "indices: query " + std::to_string(s) + ", entry " + std::to_string(i) + " differs from a stable sort";
    }
  }
  return "";
}

Instance make_forward(Random& random, const Indexer& p) {
  Instance instance;
  Inputs in = add_inputs(instance, random, p);
  if (p.positions == Indexer::Positions::kArray) {
    in.q_positions = &instance.add({"q_positions", DType::kInt32, {p.s_q}});
    const std::int64_t some[] = {0, -1, INT32_MAX, INT32_MIN, p.kv_stride - 1, p.kv_stride};
    for (std::int64_t s = 0; s < p.s_q; ++s)
      in.q_positions->set(s, static_cast<double>(s < 6 ? some[s] : random.below(p.s_kv * p.kv_stride + 2)));
  }
  Array& indices = add(instance, p, "indices", DType::kInt32, {p.s_q, p.topk});
  Array& scores = add(instance, p, "scores", DType::kFloat32, {p.s_q, p.topk});
  instance.expect(indices, {.exact = true});
  instance.expect(scores, {.exact = true});
  const auto used = std::make_shared<std::string>();  // the backend of the last call
  if (p.data == Indexer::Data::kIntegers) {
    instance.reference = [in](Instance& self) { exact_selection(in, self); };
  } else {
    instance.reference = [](Instance&) {};
    instance.verify = [in, &indices, &scores, backend = used, &workspace = *instance.workspace](const Instance&) {
      std::string failure = verify_selection(in, indices, scores, rounding_on(*backend, in.problem.dtype));
      if (!failure.empty() || !in.problem.stable_sort) return failure;
      return verify_stable_sort(in, indices, scores, workspace, *backend);
    };
  }
  instance.call = [in, &indices, &scores, used, &workspace = *instance.workspace](const char* backend, Stream stream) {
    *used = backend;
    select(in, indices, scores, workspace, backend, stream);
  };
  double visible = 0;
  for (std::int64_t s = 0; s < p.s_q; ++s) visible += static_cast<double>(visible_keys(in, s).size());
  instance.flops = 2 * visible * static_cast<double>(p.h_index * p.d_index);
  instance.bytes = static_cast<double>((in.q->size() + in.k->size()) * static_cast<std::int64_t>(size_of(p.dtype)) +
                                       4 * (in.weights->size() + indices.size() + scores.size()));
  for (const Array* scales : {in.q_scale, in.k_scale})
    if (scales) instance.bytes += static_cast<double>(4 * scales->size());
  return instance;
}

std::vector<std::pair<std::string, Indexer>> forward_problems() {
  using Data = Indexer::Data;
  using Positions = Indexer::Positions;
  using Scales = Indexer::Scales;
  constexpr DType kFloat = DType::kFloat32, kBFloat = DType::kBFloat16, kFp8 = DType::kFloat8E4m3;
  std::vector<std::pair<std::string, Indexer>> all = {
      {"normal", {.s_q = 5, .s_kv = 1000, .topk = 128, .stable_sort = true}},
      {"normal_fp32", {.dtype = kFloat, .s_q = 5, .s_kv = 1000, .topk = 128}},
      {"production", {.s_q = 2, .s_kv = 3000, .h_index = 64, .topk = 2048}},
      {"production_exact", {.s_q = 2, .s_kv = 3000, .h_index = 64, .topk = 2048, .data = Data::kIntegers}},
      {"many_keys", {.s_q = 1, .s_kv = 20000, .h_index = 4, .d_index = 32, .topk = 512}},
      {"many_keys_exact", {.s_q = 2, .s_kv = 20000, .h_index = 2, .d_index = 8, .topk = 2048, .data = Data::kIntegers}},
      {"fewer_keys_than_topk", {.s_kv = 50, .topk = 64, .data = Data::kIntegers}},
      {"one_head", {.s_q = 70, .h_index = 1, .d_index = 8, .topk = 33, .data = Data::kIntegers}},
      {"many_heads", {.h_index = 600, .d_index = 16}},
      {"long_row", {.s_q = 2, .s_kv = 9000, .h_index = 2, .d_index = 8, .topk = 300, .data = Data::kIntegers}},
      // 14-bit buckets, and two iterations of the writing loop. With few queries clusters select; one guess is right,
      // one is wrong.
      {"longest_row", {.s_q = 17, .s_kv = 33000, .h_index = 2, .d_index = 8, .topk = 300}},
      {"longest_row_exact",
       {.s_q = 2, .s_kv = 33000, .h_index = 2, .d_index = 8, .topk = 300, .data = Data::kIntegers}},
      // Rows of three parts, the last of them shorter than topk.
      {"row_in_parts", {.s_q = 2, .s_kv = 262'400, .h_index = 1, .d_index = 8, .topk = 300, .stable_sort = true}},
      {"row_in_parts_exact",
       {.s_q = 2, .s_kv = 262'400, .h_index = 2, .d_index = 8, .topk = 300, .data = Data::kIntegers}},
      {"row_in_parts_ranges", {.s_q = 12, .s_kv = 262'400, .h_index = 1, .d_index = 8, .topk = 300, .ranges = true}},
      {"longest_row_one_query", {.s_q = 1, .s_kv = 33000, .h_index = 2, .d_index = 8, .topk = 300}},
      {"long_row_one_score",
       {.s_q = 2, .s_kv = 9000, .h_index = 2, .d_index = 8, .topk = 300, .data = Data::kIntegers, .no_weights = true}},
      // Queries that see none to seven of many keys: fewer than a sample has.
      {"long_rows_few_visible",
       {.s_q = 12,
        .s_kv = 4500,
        .h_index = 2,
        .d_index = 8,
        .topk = 2,
        .data = Data::kIntegers,
        .positions = Positions::kStart,
        .q_start = -5}},
      // Clusters select. A call with more queries has clusters of fewer CTAs: here of four, and of two.
      {"long_rows_of_four_ctas",
       {.s_q = 6, .s_kv = 4500, .h_index = 2, .d_index = 8, .topk = 300, .data = Data::kIntegers}},
      {"long_rows_of_two_ctas",
       {.s_q = 18, .s_kv = 4500, .h_index = 2, .d_index = 8, .topk = 300, .data = Data::kIntegers}},
      // More rows than clusters or SMs, and more entries than fit in one list.
      {"many_long_rows", {.s_q = 70, .s_kv = 4500, .h_index = 1, .d_index = 8, .topk = 2500}},
      {"one_dimension", {.d_index = 1, .data = Data::kIntegers}},
      {"odd_shape", {.dtype = kFloat, .s_q = 7, .s_kv = 259, .h_index = 3, .d_index = 13, .topk = 100}},
      {"weights_bf16", {.weights_dtype = kBFloat, .topk = 65}},
      {"causal_from_start",
       {.s_q = 70, .s_kv = 60, .h_index = 4, .topk = 16, .data = Data::kIntegers, .positions = Positions::kStart}},
      {"causal_kv_stride_4",
       {.s_q = 70,
        .s_kv = 20,
        .h_index = 4,
        .topk = 9,
        .data = Data::kIntegers,
        .positions = Positions::kStart,
        .kv_stride = 4}},
      {"causal_positions",
       {.s_q = 40, .s_kv = 500, .h_index = 4, .topk = 64, .positions = Positions::kArray, .kv_stride = 4}},
      {"causal_before_start", {.topk = 8, .data = Data::kIntegers, .positions = Positions::kStart, .q_start = -5}},
      // Only late queries see the last keys: the warps that score them skip more queries than the ring has stages.
      {"causal_many_heads",
       {.s_q = 40,
        .s_kv = 420,
        .h_index = 64,
        .d_index = 16,
        .topk = 64,
        .data = Data::kIntegers,
        .positions = Positions::kStart,
        .q_start = 370}},
      {"key_ranges", {.s_q = 24, .s_kv = 900, .h_index = 4, .d_index = 32, .topk = 64, .ranges = true}},
      {"key_ranges_exact",
       {.s_q = 24, .s_kv = 900, .h_index = 4, .d_index = 32, .topk = 64, .data = Data::kIntegers, .ranges = true}},
      // On sm90 a tile holds two queries; the last tile holds one.
      {"h_index_32", {.s_q = 9, .s_kv = 900, .h_index = 32}},
      {"h_index_32_key_ranges_exact",
       {.s_q = 23, .s_kv = 900, .h_index = 32, .d_index = 16, .data = Data::kIntegers, .ranges = true}},
      // Queries of several full tiles.
      {"h_index_192", {.s_q = 9, .s_kv = 900, .h_index = 192}},
      {"h_index_128_documents_exact",
       {.s_q = 23,
        .s_kv = 1500,
        .h_index = 128,
        .d_index = 16,
        .data = Data::kIntegers,
        .document = 400,
        .first_token = 788}},
      {"key_ranges_fp32",
       {.dtype = kFloat, .s_q = 24, .s_kv = 9000, .h_index = 2, .d_index = 8, .topk = 1000, .ranges = true}},
      {"key_ranges_many_heads_kv_stride_4",
       {.s_q = 12,
        .s_kv = 700,
        .h_index = 70,
        .d_index = 16,
        .data = Data::kIntegers,
        .positions = Positions::kArray,
        .kv_stride = 4,
        .ranges = true}},
      {"documents",
       {.s_q = 150, .s_kv = 2500, .h_index = 4, .d_index = 32, .topk = 33, .document = 70, .first_token = 1100}},
      {"documents_exact",
       {.s_q = 40,
        .s_kv = 2500,
        .h_index = 20,
        .d_index = 16,
        .topk = 70,
        .data = Data::kIntegers,
        .document = 900,
        .first_token = 1780}},
      {"documents_many_heads", {.s_q = 9, .s_kv = 1500, .h_index = 130, .document = 400, .first_token = 795}},
      {"documents_long_row",
       {.s_q = 3, .s_kv = 20000, .h_index = 2, .d_index = 8, .document = 9000, .first_token = 17998}},
      {"documents_fp32",
       {.dtype = kFloat, .s_q = 90, .s_kv = 900, .h_index = 3, .topk = 20, .document = 32, .first_token = 500}},
      {"nothing_visible", {.s_q = 4, .positions = Positions::kStart, .q_start = -70}},
      {"nan_keys", {.topk = 280, .data = Data::kIntegers, .nan_keys = true}},
      {"nan_query", {.topk = 65, .data = Data::kIntegers, .nan_queries = true}},
      {"large", {.data = Data::kLarge}},
      {"strided", {.s_q = 6, .strided = true, .positions = Positions::kStart, .q_start = 200}},
      {"strided_exact", {.dtype = kFloat, .s_q = 6, .data = Data::kIntegers, .strided = true}},
      {"no_queries", {.s_q = 0}},
      {"no_keys", {.s_kv = 0, .data = Data::kIntegers}},
      {"topk_0", {.topk = 0}},
      {"queries_70000", {.s_q = 70000, .s_kv = 9, .h_index = 1, .d_index = 2, .topk = 9, .data = Data::kIntegers}},
      {"fp8", {.dtype = kFp8, .s_q = 5, .s_kv = 1000, .topk = 128}},
      {"fp8_scales",
       {.dtype = kFp8, .s_q = 5, .s_kv = 1000, .topk = 128, .stable_sort = true, .scales = Scales::kRandom}},
      {"fp8_production",
       {.dtype = kFp8,
        .s_q = 2,
        .s_kv = 3000,
        .h_index = 64,
        .topk = 2048,
        .stable_sort = true,
        .scales = Scales::kRandom}},
      {"fp8_production_exact",
       {.dtype = kFp8,
        .s_q = 3,
        .s_kv = 900,
        .h_index = 64,
        .topk = 300,
        .data = Data::kIntegers,
        .scales = Scales::kPowersOfTwo}},
      {"fp8_many_queries",
       {.dtype = kFp8,
        .s_q = 71,
        .s_kv = 700,
        .h_index = 64,
        .topk = 200,
        .nan_keys = true,
        .stable_sort = true,
        .scales = Scales::kRandom}},
      {"many_queries", {.s_q = 71, .s_kv = 700, .h_index = 64, .topk = 200}},
      {"fp8_codes", {.dtype = kFp8, .topk = 127, .data = Data::kCodes, .scales = Scales::kRandom}},
      {"fp8_codes_one_head", {.dtype = kFp8, .s_q = 20, .h_index = 1, .d_index = 64, .data = Data::kCodes}},
      {"fp8_extremes", {.dtype = kFp8, .data = Data::kExtremes, .scales = Scales::kPowersOfTwo}},
      {"fp8_nan_keys",
       {.dtype = kFp8, .topk = 280, .data = Data::kIntegers, .nan_keys = true, .scales = Scales::kPowersOfTwo}},
      {"fp8_nan_query", {.dtype = kFp8, .topk = 65, .data = Data::kIntegers, .nan_queries = true}},
      {"fp8_special_scales",
       {.dtype = kFp8, .s_q = 7, .topk = 200, .data = Data::kIntegers, .scales = Scales::kSpecial}},
      {"fp8_special_scales_any_h",
       {.dtype = kFp8,
        .s_q = 9,
        .h_index = 5,
        .d_index = 32,
        .topk = 301,
        .data = Data::kIntegers,
        .scales = Scales::kSpecial}},
      {"fp8_fewer_keys_than_topk",
       {.dtype = kFp8, .s_kv = 50, .topk = 64, .data = Data::kIntegers, .scales = Scales::kPowersOfTwo}},
      {"fp8_weights_bf16", {.dtype = kFp8, .weights_dtype = kBFloat, .topk = 65, .scales = Scales::kRandom}},
      {"fp8_causal_kv_stride_4",
       {.dtype = kFp8,
        .s_q = 40,
        .s_kv = 500,
        .h_index = 4,
        .scales = Scales::kRandom,
        .positions = Positions::kArray,
        .kv_stride = 4}},
      {"fp8_h_index_32_key_ranges_exact",
       {.dtype = kFp8,
        .s_q = 23,
        .s_kv = 900,
        .h_index = 32,
        .d_index = 32,
        .data = Data::kIntegers,
        .scales = Scales::kPowersOfTwo,
        .ranges = true}},
      {"fp8_h_index_128", {.dtype = kFp8, .s_q = 9, .s_kv = 900, .h_index = 128, .scales = Scales::kRandom}},
      {"fp8_documents",
       {.dtype = kFp8,
        .s_q = 150,
        .s_kv = 2500,
        .h_index = 4,
        .d_index = 32,
        .topk = 33,
        .stable_sort = true,
        .scales = Scales::kRandom,
        .document = 70,
        .first_token = 1100}},
      {"fp8_documents_many_heads",
       {.dtype = kFp8,
        .s_q = 9,
        .s_kv = 1500,
        .h_index = 130,
        .scales = Scales::kRandom,
        .document = 400,
        .first_token = 795}},
      {"fp8_odd_shape",
       {.dtype = kFp8, .s_q = 7, .s_kv = 259, .h_index = 3, .d_index = 13, .topk = 100, .scales = Scales::kRandom}},
      {"fp8_strided",
       {.dtype = kFp8,
        .s_q = 6,
        .data = Data::kIntegers,
        .strided = true,
        .scales = Scales::kPowersOfTwo,
        .positions = Positions::kStart,
        .q_start = 200}},
      {"fp8_no_keys", {.dtype = kFp8, .s_kv = 0, .data = Data::kIntegers, .scales = Scales::kPowersOfTwo}},
      // Scores of both signs, for every kernel of sm90: 16, 32, 64, 192 or 128 heads, and any other number, in bf16 and
      // e4m3.
      {"no_relu", {.s_q = 5, .s_kv = 1000, .topk = 128, .stable_sort = true, .relu = false}},
      {"no_relu_fp32", {.dtype = kFloat, .s_q = 5, .topk = 128, .relu = false}},
      {"no_relu_production_exact",
       {.s_q = 3, .s_kv = 900, .h_index = 64, .topk = 600, .data = Data::kIntegers, .relu = false}},
      {"no_relu_nan_keys", {.topk = 280, .data = Data::kIntegers, .nan_keys = true, .relu = false}},
      {"no_relu_large", {.data = Data::kLarge, .relu = false}},
      {"no_relu_h_index_32_key_ranges_exact",
       {.s_q = 23, .s_kv = 900, .h_index = 32, .d_index = 16, .data = Data::kIntegers, .ranges = true, .relu = false}},
      {"no_relu_h_index_192", {.s_q = 9, .s_kv = 900, .h_index = 192, .relu = false}},
      {"no_relu_many_heads", {.h_index = 600, .d_index = 16, .relu = false}},
      // Most keys are selected, so the threshold, which is estimated from a sample, is negative.
      {"no_relu_long_row", {.s_q = 2, .s_kv = 9000, .h_index = 2, .d_index = 8, .topk = 7000, .relu = false}},
      {"no_relu_documents",
       {.s_q = 40,
        .s_kv = 2500,
        .h_index = 4,
        .d_index = 32,
        .topk = 33,
        .stable_sort = true,
        .document = 70,
        .first_token = 1100,
        .relu = false}},
      {"no_relu_fp8",
       {.dtype = kFp8, .s_q = 5, .s_kv = 1000, .stable_sort = true, .scales = Scales::kRandom, .relu = false}},
      {"no_relu_fp8_production_exact",
       {.dtype = kFp8,
        .s_q = 3,
        .s_kv = 900,
        .h_index = 64,
        .topk = 600,
        .data = Data::kIntegers,
        .nan_keys = true,
        .scales = Scales::kPowersOfTwo,
        .relu = false}},
      {"no_relu_fp8_special_scales_any_h",
       {.dtype = kFp8,
        .s_q = 9,
        .h_index = 5,
        .d_index = 32,
        .topk = 301,
        .data = Data::kIntegers,
        .scales = Scales::kSpecial,
        .relu = false}},
      {"no_relu_fp8_h_index_128",
       {.dtype = kFp8, .s_q = 9, .s_kv = 900, .h_index = 128, .scales = Scales::kRandom, .relu = false}},
      {"no_relu_fp8_h_index_32_key_ranges_exact",
       {.dtype = kFp8,
        .s_q = 23,
        .s_kv = 900,
        .h_index = 32,
        .d_index = 32,
        .data = Data::kIntegers,
        .scales = Scales::kPowersOfTwo,
        .ranges = true,
        .relu = false}},
  };
  for (const std::int64_t topk : {1, 63, 64, 65, 127, 2048, 2049}) {
    const std::string name = "topk_" + std::to_string(topk);
    const Indexer p{.s_q = 4, .s_kv = topk > 1000 ? 3000 : 700, .h_index = 4, .d_index = 32, .topk = topk};
    all.emplace_back(name, p);
    all.emplace_back(name + "_exact", p).second.data = Data::kIntegers;
  }
  return all;
}

// ---- backward -------------------------------------------------------------------------------------------------------

void fill_indices(Array& indices, Random& random, const Indexer& p) {
  const std::int64_t invalid[] = {INT32_MIN, -123456, -1, p.s_kv, p.s_kv + 1, INT32_MAX};
  for (std::int64_t s = 0; s < p.s_q; ++s) {
    std::vector<std::int64_t> row(static_cast<std::size_t>(p.topk));
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::int64_t any = p.s_kv > 0 ? random.below(p.s_kv) : -1;
      switch (p.indices) {
        case Indexer::Indices::kInvalid:
          row[i] = random.below(3) == 0 ? invalid[random.below(6)] : any;
          break;
        case Indexer::Indices::kHot:
          row[i] = i == 0 ? p.s_kv / 2 : any;
          break;
        case Indexer::Indices::kTwice:
          row[i] = i % 2 == 1 ? row[i - 1] : any;
          break;
        default:
          row[i] = any;
      }
    }
    if (p.indices == Indexer::Indices::kAscending) {
      std::sort(row.begin(), row.end());
      row.erase(std::unique(row.begin(), row.end()), row.end());
      row.resize(static_cast<std::size_t>(p.topk), -1);
    }
    for (std::int64_t i = 0; i < p.topk; ++i)
      indices.set(s * p.topk + i, static_cast<double>(row[static_cast<std::size_t>(i)]));
  }
}

// Fills d_scores, which is given instead of target: gradients of any size, and zeros. A value that is not finite counts
// as NaN.
void fill_d_scores(const Inputs& in, Random& random) {
  for (std::int64_t i = 0; i < in.given->size(); ++i) in.given->set(i, random.below(5) == 0 ? 0 : random.normal());
  const Indexer& p = in.problem;
  for (std::int64_t s = 1; p.nan_targets && s < p.s_q; s += 2)
    in.given->set(s * p.topk + p.topk / 2, s % 4 == 1 ? kInfinity : kNan);
}

// Positive numbers that sum to 1 over the valid entries of a row. Invalid entries get values too, which must not affect
// results.
void fill_target(const Inputs& in, Random& random) {
  const Indexer& p = in.problem;
  Array& target = *in.given;
  for (std::int64_t s = 0; s < p.s_q; ++s) {
    const auto [first, last] = key_range(in, s);
    std::vector<double> row(static_cast<std::size_t>(p.topk));
    double sum = 0;
    for (std::int64_t i = 0; i < p.topk; ++i) {
      const auto key = static_cast<std::int64_t>(in.indices->get(s * p.topk + i));
      const bool valid = key >= first && key < last;
      double& value = row[static_cast<std::size_t>(i)];
      value = p.zero_targets && (s % 2 == 0 || i % 3 == 0) ? 0 : std::exp(random.normal());
      if (valid) sum += value;
    }
    for (std::int64_t i = 0; i < p.topk; ++i)
      target.set(s * p.topk + i, sum > 0 ? row[static_cast<std::size_t>(i)] / sum : 0);
    if ((p.nan_targets && s % 2 == 1) || (p.row_weights && s % 3 == 0)) target.set(s * p.topk + p.topk / 2, kNan);
  }
}

// A gradient and the same sums of absolute values.
struct Gradient {
  explicit Gradient(std::int64_t size) : value(static_cast<std::size_t>(size)), magnitude(value) {}
  void add(std::int64_t at, double term) { add(at, term, std::abs(term)); }
  void add(std::int64_t at, double term, double size) {
    value[static_cast<std::size_t>(at)] += term;
    magnitude[static_cast<std::size_t>(at)] += size;
  }
  std::vector<double> value, magnitude;
};

struct Gradients {
  Gradient loss, row_loss, d_q, d_k, d_weights;
};

// Adds the gradients of one query, given its entries with a score.
void add_query(const Inputs& in, const std::vector<double>& q, const std::vector<double>& k,
               const std::vector<double>& weights, std::int64_t s, const std::vector<std::int64_t>& keys,
               const Row& row, const std::vector<double>& given, Gradients& sum) {
  const Indexer& p = in.problem;
  const double weight = in.row_weights ? in.row_weights->get(s) : 1, factor = static_cast<double>(p.d_loss) * weight;
  double peak = -kInfinity, total = 0;
  for (const Score& score : row.scores) peak = std::max(peak, score.value);
  for (const Score& score : row.scores) total += std::exp(score.value - peak);
  const double lse = peak + std::log(total);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const double log_probability = row.scores[i].value - lse;
    if (given[i] != 0 && !p.given) {
      const double loss = given[i] * (std::log(given[i]) - log_probability);
      const double size = given[i] * (std::abs(std::log(given[i])) + row.scores[i].magnitude + std::abs(lse));
      sum.row_loss.add(s, loss, size);
      if (weight != 0) sum.loss.add(0, weight * loss, std::abs(weight) * size);
    }
    if (weight == 0) continue;
    const double of_score =
        p.given ? (std::isfinite(given[i]) ? given[i] : kNan) : std::exp(log_probability) - given[i];
    const double g = factor * of_score;
    for (std::int64_t j = 0; j < p.h_index; ++j) {
      const double product = row.dots[static_cast<std::size_t>(j) * keys.size() + i];
      const std::int64_t head = s * p.h_index + j;
      const double d_dot = g * weights[static_cast<std::size_t>(head)] * (product > 0 || !p.relu ? 1 : 0);
      sum.d_weights.add(head, g * (p.relu ? std::max(product, 0.0) : product));
      for (std::int64_t d = 0; d < p.d_index; ++d) {
        sum.d_q.add(head * p.d_index + d, d_dot * k[static_cast<std::size_t>(keys[i] * p.d_index + d)]);
        sum.d_k.add(keys[i] * p.d_index + d, d_dot * q[static_cast<std::size_t>(head * p.d_index + d)]);
      }
    }
  }
}

void backward_reference(const Inputs& in, Instance& self) {
  const Indexer& p = in.problem;
  const std::vector<double> q = values_of(*in.q), k = values_of(*in.k), weights = values_of(*in.weights);
  Gradients sum{Gradient(1), Gradient(p.s_q), Gradient(in.q->size()), Gradient(in.k->size()),
                Gradient(in.weights->size())};
  for (std::int64_t s = 0; s < p.s_q; ++s) {
    const auto [first, last] = key_range(in, s);
    std::vector<std::int64_t> keys;
    std::vector<double> target;
    bool any = false;
    for (std::int64_t i = 0; i < p.topk; ++i) {
      const std::vector<std::int64_t> one = {static_cast<std::int64_t>(in.indices->get(s * p.topk + i))};
      if (one[0] < first || one[0] >= last) continue;
      if ((p.nan_keys || p.nan_queries || p.nan_weights) &&
          row_of(p, q, k, weights, s, one).scores[0].value == -kInfinity)
        continue;
      keys.push_back(one[0]);
      target.push_back(in.given->get(s * p.topk + i));
      any = any || target.back() != 0;
    }
    if (any) add_query(in, q, k, weights, s, keys, row_of(p, q, k, weights, s, keys), target, sum);
  }
  std::vector<Gradient*> results = {&sum.d_q, &sum.d_k, &sum.d_weights};
  if (!p.given) results.push_back(&sum.loss);
  if (in.row_weights && !p.given) results.push_back(&sum.row_loss);
  for (std::size_t i = 0; i < results.size(); ++i) {
    self.outputs[i].expected = std::move(results[i]->value);
    self.outputs[i].magnitude = std::move(results[i]->magnitude);
  }
}

Instance make_backward(Random& random, const Indexer& p) {
  Instance instance;
  Inputs in = add_inputs(instance, random, p);
  in.indices = &add(instance, p, "indices", DType::kInt32, {p.s_q, p.topk});
  in.given = &add(instance, p, p.given ? "d_scores" : "target", DType::kFloat32, {p.s_q, p.topk});
  fill_indices(*in.indices, random, p);
  if (p.row_weights) in.row_weights = &add(instance, p, "row_weights", DType::kFloat32, {p.s_q});
  for (std::int64_t s = 0; s < p.s_q && p.row_weights; ++s) in.row_weights->set(s, s % 3 == 0 ? 0 : random.normal());
  if (p.d_loss_on_device) (in.d_loss = &instance.add({"d_loss_array", DType::kFloat32, {}}))->set(0, p.d_loss);
  p.given ? fill_d_scores(in, random) : fill_target(in, random);
  Array* const loss = p.given ? nullptr : &instance.add({"loss", DType::kFloat32, {}});
  Array* const row_loss = p.row_weights && !p.given ? &add(instance, p, "row_loss", DType::kFloat32, {p.s_q}) : nullptr;
  Array& d_q = add(instance, p, "d_q_index", p.dtype, {p.s_q, p.h_index, p.d_index});
  Array& d_k = add(instance, p, "d_k_index", DType::kFloat32, {p.s_kv, p.d_index});
  Array& d_weights = add(instance, p, "d_weights", p.weights_dtype, {p.s_q, p.h_index});
  const auto tolerance = [](DType dtype) { return Tolerance{.norm = dtype == DType::kFloat32 ? 1e-4 : 4e-3}; };
  for (Array* array : {&d_q, &d_k, &d_weights}) instance.expect(*array, tolerance(array->dtype()));
  for (Array* array : {loss, row_loss})
    if (array) instance.expect(*array, {.norm = 1e-4});
  instance.reference = [in](Instance& self) { backward_reference(in, self); };
  instance.repeatable = p.deterministic;
  instance.call = [in, loss, row_loss, &d_q, &d_k, &d_weights, &workspace = *instance.workspace](const char* backend,
                                                                                                 Stream stream) {
    const bool has_target = !in.problem.given;
    run_with_workspace<LightningIndexerBackwardArgs>(
        hopwell::lightning_indexer_backward, hopwell::lightning_indexer_backward_workspace_bytes, workspace,
        {.target = view_of(has_target ? in.given : nullptr),
         .q_index = in.q->view(),
         .k_index = in.k->view(),
         .weights = in.weights->view(),
         .indices = in.indices->view(),
         .d_scores = view_of(has_target ? nullptr : in.given),
         .selection = {.k_start = view_of(in.k_start), .k_end = view_of(in.k_end)},
         .row_weights = view_of(in.row_weights),
         .d_loss_array = view_of(in.d_loss),
         .d_loss = in.d_loss ? 1 : in.problem.d_loss,
         .relu = in.problem.relu,
         .deterministic = in.problem.deterministic,
         .loss = view_of(loss),
         .row_loss = view_of(row_loss),
         .d_q_index = d_q.view(),
         .d_k_index = d_k.view(),
         .d_weights = d_weights.view(),
         .backend = backend},
        stream);
  };
  instance.flops = 6 * static_cast<double>(p.s_q * p.topk) * static_cast<double>(p.h_index * p.d_index);
  const auto element = static_cast<std::int64_t>(size_of(p.dtype));
  instance.bytes = static_cast<double>((2 * in.q->size() + in.k->size()) * element +
                                       4 * (d_k.size() + 2 * in.weights->size()) + 8 * in.indices->size());
  return instance;
}

std::vector<std::pair<std::string, Indexer>> backward_problems() {
  using Data = Indexer::Data;
  using Indices = Indexer::Indices;
  constexpr DType kFloat = DType::kFloat32, kBFloat = DType::kBFloat16;
  std::vector<std::pair<std::string, Indexer>> all = {
      {"basic", {}},
      {"basic_fp32", {.dtype = kFloat}},
      {"any_order", {.deterministic = false}},
      {"any_order_fp32", {.dtype = kFloat, .deterministic = false}},
      {"any_order_strided", {.s_q = 6, .d_index = 33, .strided = true, .deterministic = false}},
      {"any_order_hot_key",
       {.s_q = 16, .h_index = 70, .d_index = 32, .indices = Indices::kHot, .deterministic = false}},
      {"production", {.s_q = 2, .s_kv = 3000, .h_index = 64, .topk = 2048, .indices = Indices::kAscending}},
      {"many_heads", {.s_q = 2, .s_kv = 900, .h_index = 600, .d_index = 8, .topk = 500}},
      // More CTAs than fit on the emulator's four SMs.
      {"two_waves", {.s_q = 40, .s_kv = 300, .h_index = 1, .topk = 130, .indices = Indices::kAscending}},
      {"odd_shape", {.dtype = kFloat, .s_q = 7, .s_kv = 259, .h_index = 3, .d_index = 13, .topk = 100}},
      {"one_dimension", {.h_index = 1, .d_index = 1}},
      {"weights_bf16", {.weights_dtype = kBFloat}},
      {"invalid", {.s_q = 6, .indices = Indices::kInvalid}},
      {"hot_key", {.s_q = 50, .h_index = 4, .d_index = 32, .indices = Indices::kHot}},
      {"twice", {.indices = Indices::kTwice}},
      {"ascending", {.s_kv = 40, .indices = Indices::kAscending}},
      {"zero_targets", {.s_q = 6, .zero_targets = true}},
      {"one_key", {.s_kv = 1, .topk = 5}},
      {"nan_keys", {.s_q = 4, .s_kv = 70, .nan_keys = true}},
      {"nan_query", {.nan_queries = true}},
      {"nan_targets", {.s_q = 4, .s_kv = 70, .topk = 70, .nan_targets = true}},
      {"nan_targets_fp32", {.dtype = kFloat, .s_q = 4, .nan_targets = true}},
      {"nan_targets_many_heads", {.s_q = 2, .h_index = 130, .topk = 70, .nan_targets = true, .deterministic = false}},
      {"infinite_keys", {.infinite_keys = true}},
      {"infinite_keys_any_order", {.topk = 70, .infinite_keys = true, .deterministic = false}},
      {"infinite_queries_any_order", {.topk = 70, .infinite_queries = true, .deterministic = false}},
      {"large", {.data = Data::kLarge}},
      {"key_ranges", {.s_q = 30, .ranges = true, .indices = Indices::kInvalid}},
      {"key_ranges_fp32", {.dtype = kFloat, .s_q = 30, .strided = true, .ranges = true}},
      {"key_ranges_any_order",
       {.s_q = 12, .s_kv = 900, .h_index = 70, .topk = 300, .ranges = true, .deterministic = false}},
      {"key_ranges_nan_keys", {.s_q = 12, .s_kv = 70, .nan_keys = true, .ranges = true, .zero_targets = true}},
      {"d_loss", {.d_loss = -0.25F}},
      {"d_loss_0", {.d_loss = 0}},
      {"d_loss_on_device", {.d_loss = -0.25F, .d_loss_on_device = true}},
      {"row_weights", {.s_q = 7, .indices = Indices::kInvalid, .row_weights = true}},
      {"row_weights_any_order", {.s_q = 7, .h_index = 70, .d_loss = 3, .row_weights = true, .deterministic = false}},
      {"d_scores", {.s_q = 6, .indices = Indices::kInvalid, .given = true}},
      {"d_scores_fp32", {.dtype = kFloat, .s_q = 6, .strided = true, .given = true, .row_weights = true}},
      {"d_scores_any_order",
       {.s_q = 7,
        .h_index = 70,
        .topk = 300,
        .ranges = true,
        .d_loss = 0.5F,
        .d_loss_on_device = true,
        .given = true,
        .row_weights = true,
        .deterministic = false}},
      {"d_scores_nan", {.s_q = 4, .s_kv = 70, .topk = 70, .nan_keys = true, .nan_targets = true, .given = true}},
      {"d_scores_nan_weights", {.s_q = 4, .nan_weights = true, .given = true}},
      {"nan_weights_any_order", {.s_q = 4, .nan_weights = true, .deterministic = false}},
      {"d_scores_nan_any_order",
       {.s_q = 4, .s_kv = 70, .topk = 70, .nan_targets = true, .given = true, .deterministic = false}},
      {"no_relu", {.s_q = 5, .s_kv = 70, .topk = 90, .nan_keys = true, .indices = Indices::kInvalid, .relu = false}},
      {"no_relu_fp32", {.dtype = kFloat, .s_q = 5, .strided = true, .relu = false}},
      {"no_relu_d_scores_any_order",
       {.s_q = 5, .h_index = 70, .topk = 130, .given = true, .relu = false, .deterministic = false}},
      {"strided", {.s_q = 6, .strided = true, .indices = Indices::kInvalid}},
      {"strided_fp32", {.dtype = kFloat, .strided = true}},
      {"no_queries", {.s_q = 0}},
      {"no_keys", {.s_kv = 0}},
      {"topk_0", {.topk = 0}},
      {"queries_70000", {.s_q = 70000, .s_kv = 9, .h_index = 1, .d_index = 2, .topk = 3, .emulated = false}},
  };
  for (const std::int64_t topk : {1, 63, 64, 65, 127, 2048, 2049}) {
    all.emplace_back("topk_" + std::to_string(topk),
                     Indexer{.s_q = 4, .s_kv = 700, .h_index = 4, .d_index = 32, .topk = topk});
  }
  for (auto& [name, problem] : all)
    if (problem.data == Data::kNormal) problem.data = Data::kQuarters;
  return all;
}

// ---- suites ---------------------------------------------------------------------------------------------------------

Indexer indexer_from(const Settings& settings) {
  const std::string& dtype = settings.at("dtype");
  const bool fp8 = dtype == "float8_e4m3fn";
  if (dtype != "bf16" && dtype != "fp32" && !fp8)
    throw std::invalid_argument("setting 'dtype' must be bf16, fp32 or float8_e4m3fn; got '" + dtype + "'");
  Indexer p{.dtype = fp8 ? DType::kFloat8E4m3 : dtype == "bf16" ? DType::kBFloat16 : DType::kFloat32};
  if (fp8) p.scales = Indexer::Scales::kRandom;
  p.s_q = number(settings, "s_q"), p.s_kv = number(settings, "s_kv"), p.topk = number(settings, "topk");
  p.h_index = number(settings, "h_index"), p.d_index = number(settings, "d_index");
  p.deterministic = number(settings, "deterministic") != 0;
  return p;
}

Settings shape(const char* s_q, const char* s_kv, const char* dtype) {
  return {{"s_q", s_q},     {"s_kv", s_kv},   {"h_index", "64"},     {"d_index", "128"},
          {"topk", "2048"}, {"dtype", dtype}, {"deterministic", "0"}};
}
std::vector<std::pair<std::string, Settings>> shapes() {
  return {{"prefill", shape("512", "8192", "bf16")},
          {"prefill_fp32", shape("512", "8192", "fp32")},
          {"decode", shape("1", "65536", "bf16")}};
}

Suite suite_of(const char* op, const std::vector<std::pair<std::string, Indexer>>& problems,
               Instance (*make)(Random&, const Indexer&)) {
  Suite suite{op, {}, shapes(), {}};
  for (const auto& [name, problem] : problems)
    suite.cases.push_back({.op = suite.op,
                           .name = name,
                           .make = [problem = problem, make](Random& random) { return make(random, problem); },
                           .emulated = problem.emulated});
  suite.bench = [make](const Settings& settings, Random& random) { return make(random, indexer_from(settings)); };
  return suite;
}

}  // namespace

Suite lightning_indexer() {
  Suite suite = suite_of("lightning_indexer", forward_problems(), make_forward);
  suite.shapes.emplace_back("prefill_fp8", shape("512", "8192", "float8_e4m3fn"));
  leave_to_nightly(suite, {"row_in_parts", "row_in_parts_exact", "row_in_parts_ranges", "queries_70000",
                           "fp8_many_queries", "no_relu_h_index_192", "no_relu_fp8_h_index_128"});
  leave_to_nightly(suite, {"many_queries", "many_long_rows", "fp8_production", "production_exact", "many_keys_exact"},
                   "sm80");
  suite.unsupported = {
      {"sm90", "needs bfloat16 or float8_e4m3fn q_index and k_index", "*_fp32 odd_shape strided_exact"},
      {"sm90", "needs rows of q_index 16-byte aligned, with positive strides",
       "fp8_odd_shape fp8_strided one_dimension queries_70000 strided"}};
  suite.allocating = {"odd_shape", "longest_row_one_query"};
  suite.subjects = {
      // Tiles of many heads, which wrap around the ring; two warps that select among ties; a row in two parts; CTAs
      // that split the visible keys.
      {"lightning_indexer",
       "emu:sm80",
       {"many_heads", "topk_64_exact", "longest_row_exact", "documents", "no_relu"},
       6,
       6},
      // Tiles of many heads, which wrap around the ring; clusters that select, and CTAs of several warps, with a sample
      // and with ties; CTAs that split the visible keys, and CTAs of queries that see all keys, without relu.
      {"lightning_indexer_sm90",
       "emu:sm90",
       {"many_heads", "long_row", "many_long_rows", "longest_row_one_query", "longest_row_exact", "topk_2048_exact",
        "causal_many_heads", "documents", "h_index_32", "fp8_documents_many_heads", "no_relu_h_index_192"},
       2,
       13},
  };
  return suite;
}
Suite lightning_indexer_backward() {
  Suite suite = suite_of("lightning_indexer_backward", backward_problems(), make_backward);
  suite.unsupported = {{"sm90", "needs bfloat16 q_index and k_index", "*_fp32 odd_shape"},
                       {"sm90", "needs rows of q_index and k_index 16-byte aligned", "*strided one_dimension"}};
  leave_to_nightly(suite, {"production", "d_scores_any_order"}, "sm80");
  leave_to_nightly(suite, {"topk_2048"}, "sm90");
  suite.allocating = {"odd_shape", "topk_65"};
  suite.subjects = {
      {"lightning_indexer_backward", "emu:sm80", {"basic", "many_heads", "any_order"}, 3, 7},
      {"lightning_indexer_backward_sm90", "emu:sm90", {"basic", "many_heads"}, 3, 12},
  };
  return suite;
}

}  // namespace hopwell::cases
