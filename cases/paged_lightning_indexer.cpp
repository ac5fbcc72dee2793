// paged_lightning_indexer: inputs, float64 reference, tolerance and cost.
#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>
#include <limits>
#include <numeric>

#include "nvfp4.hpp"
#include "suites.hpp"
#include "tile/nvfp4.hpp"
#include "vectors.hpp"

namespace hopwell::cases {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Paged {
  DType dtype = DType::kBFloat16, weights_dtype = DType::kFloat32;  // of q_index, and of keys that are not quantised
  std::int64_t b = 3, q_len = 2, h_index = 16, d_index = 128, topk = 64;
  std::int64_t blocks = 40, block = 16, max_blocks = 12, gap = 0;              // gap: elements between two blocks
  enum class Lens { kSequence, kQuery, kFull, kNone } lens = Lens::kSequence;  // full, none: all positions, no position
  enum class Data {
    kNormal,    // weights scaled so that scores are about 1
    kIntegers,  // -2 ... 2, so that scores are exact in fp32 and many of them equal
    kEqual      // all keys of a sequence are equal
  } data = Data::kNormal;
  enum class Scales { kNone, kPowersOfTwo, kSpecial } scales = Scales::kPowersOfTwo;  // of fp8; none: no q_scale
  enum class Pages { kGood, kBad, kAllBad, kShared } pages = Pages::kGood;            // bad: every fifth page
  bool nan_keys = false, nan_query = false;
  bool flat = false, strided = false, slots = false, scores = true, lengths = true, relu = true;
  DType bytes = DType::kUInt8;  // of a cache of fp8 rows

  [[nodiscard]] bool fp8() const { return dtype == DType::kFloat8E4m3; }
  [[nodiscard]] std::int64_t row() const { return fp8() ? d_index + 4 : d_index; }
  [[nodiscard]] bool exact() const { return data != Data::kNormal; }
};

struct Inputs {
  Paged problem;
  Array *q = nullptr, *cache = nullptr, *weights = nullptr, *block_tables = nullptr, *context_lens = nullptr,
        *q_scale = nullptr;
  std::vector<double> keys = {}, key_scales = {};  // values of each slot: [slots, d_index] and [slots]
};

// ---- which positions a query sees ----

struct Visible {
  std::int64_t position, slot;
};

std::vector<Visible> visible_to(const Inputs& in, std::int64_t b, std::int64_t i) {
  const Paged& p = in.problem;
  const bool of_sequence = in.context_lens->shape().size() == 1;
  const double given = in.context_lens->get(of_sequence ? b : b * p.q_len + i);
  const double count = of_sequence ? given - static_cast<double>(p.q_len - 1 - i) : given;
  std::vector<Visible> visible;
  for (std::int64_t t = 0; t < p.max_blocks * p.block && static_cast<double>(t) < count; ++t) {
    const auto page = static_cast<std::int64_t>(in.block_tables->get(b * p.max_blocks + t / p.block));
    if (page >= 0 && page < p.blocks) visible.push_back({t, page * p.block + t % p.block});
  }
  return visible;
}

// ---- inputs ----

Array& add(Instance& instance, const Paged& p, const char* name, DType dtype, const std::vector<std::int64_t>& shape) {
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t i = shape.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * shape[i + 1] + (p.strided ? 3 : 0);
  return instance.add({name, dtype, shape, strides});
}

std::vector<std::int64_t> query_shape(const Paged& p, std::initializer_list<std::int64_t> rest) {
  std::vector<std::int64_t> shape{p.b};
  if (!p.flat) shape.push_back(p.q_len);
  shape.insert(shape.end(), rest);
  return shape;
}

// An e4m3 code. It has no infinity; an infinity becomes NaN with the other sign.
std::uint8_t code_of(double value) {
  if (!std::isfinite(value)) return std::isnan(value) ? 0x7F : 0xFF;
  const unsigned sign = std::signbit(value) ? 0x80U : 0U;
  return static_cast<std::uint8_t>(sign | nvfp4::encode_e4m3(static_cast<float>(std::abs(value))));
}

double draw(Random& random, Paged::Data data) {
  return data == Paged::Data::kNormal ? random.normal() : static_cast<double>(random.below(5) - 2);
}

double draw_scale(Random& random, Paged::Scales kind) {
  constexpr double kSpecial[] = {0, -1, kNan, kInfinity, -kInfinity, -0.25};
  if (kind == Paged::Scales::kSpecial && random.below(4) == 0) return kSpecial[random.below(6)];
  return std::ldexp(1, static_cast<int>(random.below(7)) - 3);
}

void fill_queries(Instance& instance, Random& random, Inputs& in) {
  const Paged& p = in.problem;
  in.q = &add(instance, p, "q_index", p.dtype, query_shape(p, {p.h_index, p.d_index}));
  for (std::int64_t j = 0; j < in.q->size(); ++j) {
    const double value = p.nan_query && j < p.d_index ? kNan : draw(random, p.data);
    in.q->set(j, p.fp8() ? code_of(value) : value);
  }
  in.weights = &add(instance, p, "weights", p.weights_dtype, query_shape(p, {p.h_index}));
  const double size = 1 / std::sqrt(static_cast<double>(p.h_index * p.d_index));
  for (std::int64_t j = 0; j < in.weights->size(); ++j)
    in.weights->set(j, p.exact() ? draw(random, p.data) : size * random.normal());
  if (!p.fp8() || p.scales == Paged::Scales::kNone) return;
  in.q_scale = &add(instance, p, "q_scale", DType::kFloat32, query_shape(p, {p.h_index}));
  for (std::int64_t j = 0; j < in.q_scale->size(); ++j) in.q_scale->set(j, draw_scale(random, p.scales));
}

void fill_positions(Instance& instance, Random& random, Inputs& in) {
  const Paged& p = in.problem;
  in.block_tables = &add(instance, p, "block_tables", DType::kInt32, {p.b, p.max_blocks});
  std::vector<std::int64_t> order(static_cast<std::size_t>(p.blocks));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t j = order.size(); j > 1; --j) std::swap(order[j - 1], order[random.below(std::int64_t(j))]);
  const std::int64_t bad[] = {-1, p.blocks, INT_MAX, INT_MIN};
  for (std::int64_t j = 0; j < in.block_tables->size(); ++j) {
    const bool is_bad = p.pages == Paged::Pages::kAllBad || (p.pages == Paged::Pages::kBad && j % 5 == 3);
    const std::int64_t page = is_bad || p.blocks == 0            ? bad[random.below(4)]
                              : p.pages == Paged::Pages::kShared ? random.below(p.blocks)
                                                                 : order[static_cast<std::size_t>(j) % order.size()];
    in.block_tables->set(j, static_cast<double>(page));
  }
  const std::int64_t most = p.max_blocks * p.block;
  const bool per_query = p.lens == Paged::Lens::kQuery;
  in.context_lens =
      &instance.add({"context_lens", DType::kInt32, per_query ? std::vector{p.b, p.q_len} : std::vector{p.b},
                     per_query ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{p.strided ? 3 : 1}});
  const std::int64_t some[] = {most + 7, 0, most, p.topk + 1, 1, p.block + 1, INT_MAX, p.topk, INT_MIN, -1};
  for (std::int64_t j = 0; j < in.context_lens->size(); ++j) {
    std::int64_t count = j % 2 == 0 ? some[j / 2 % 10] : random.below(most + 1);
    if (p.lens == Paged::Lens::kFull) count = most;
    if (p.lens == Paged::Lens::kNone) count = 0;
    in.context_lens->set(j, static_cast<double>(count));
  }
}

// Fills the rows of visible positions. All other bytes are NaN in every type.
void fill_cache(Instance& instance, Random& random, Inputs& in) {
  const Paged& p = in.problem;
  const std::int64_t row = p.row(), d = p.d_index, slots = p.blocks * p.block;
  in.cache =
      &instance.add({"cache", p.fp8() ? p.bytes : p.dtype, {p.blocks, p.block, row}, {p.block * row + p.gap, row, 1}});
  in.cache->fill(p.fp8() ? 255.0 : kNan);
  in.keys.assign(static_cast<std::size_t>(slots * d), 0), in.key_scales.assign(static_cast<std::size_t>(slots), 1);
  std::vector<bool> seen(static_cast<std::size_t>(slots));
  for (std::int64_t s = 0; s < p.b * p.q_len; ++s)
    for (const Visible& visible : visible_to(in, s / p.q_len, s % p.q_len))
      seen[static_cast<std::size_t>(visible.slot)] = true;
  std::vector<double> key(static_cast<std::size_t>(d));
  for (double& x : key) x = draw(random, p.data);
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    if (!seen[static_cast<std::size_t>(slot)]) continue;
    const std::int64_t block = slot / p.block * p.block * row, i = slot % p.block;  // first element of the block
    for (std::int64_t c = 0; c < d; ++c) {
      double value = p.data == Paged::Data::kEqual ? key[static_cast<std::size_t>(c)] : draw(random, p.data);
      if (p.nan_keys && slot % 7 == 0 && c == slot % d) value = slot % 2 == 0 ? kNan : kInfinity;
      double& stored = in.keys[static_cast<std::size_t>(slot * d + c)];
      if (p.fp8()) {
        in.cache->set(block + d * i + c, code_of(value));
        stored = e4m3_value(code_of(value));
      } else {
        in.cache->set(block + row * i + c, value);
        stored = in.cache->get(block + row * i + c);
      }
    }
    if (!p.fp8()) continue;
    const double scale = p.data == Paged::Data::kEqual ? 1 : draw_scale(random, p.scales);
    in.key_scales[static_cast<std::size_t>(slot)] = scale;
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(scale));
    for (int byte = 0; byte < 4; ++byte)
      in.cache->set(block + d * p.block + 4 * i + byte, static_cast<double>(bits >> 8 * byte & 0xFF));
  }
}

// ---- the definition ----

struct Score {
  double value = 0, magnitude = 0;  // a NaN score is -inf; the same sum with absolute values
};

struct Reference {
  std::vector<double> q, weights;

  explicit Reference(const Inputs& in) : q(values_of(*in.q)), weights(values_of(*in.weights)) {
    if (in.problem.fp8())
      for (double& x : q) x = e4m3_value(static_cast<unsigned>(x));
    for (std::size_t j = 0; j < weights.size() && in.q_scale != nullptr; ++j)
      weights[j] *= in.q_scale->get(static_cast<std::int64_t>(j));
  }

  [[nodiscard]] std::vector<Score> scores(const Inputs& in, std::int64_t s, const std::vector<Visible>& visible) const {
    const Paged& p = in.problem;
    std::vector<Score> scores;
    for (const Visible& at : visible) {
      Score score;
      for (std::int64_t j = 0; j < p.h_index; ++j) {
        const Sum product =
            dot(q.data() + (s * p.h_index + j) * p.d_index, in.keys.data() + at.slot * p.d_index, p.d_index);
        const double weight = weights[static_cast<std::size_t>(s * p.h_index + j)];
        score.value += weight * (p.relu && product.value < 0 ? 0 : product.value);
        score.magnitude += std::abs(weight) * product.magnitude;
      }
      const double scale = in.key_scales[static_cast<std::size_t>(at.slot)];
      score = {score.value * scale, score.magnitude * std::abs(scale)};
      if (std::isnan(score.value)) score.value = -kInfinity;
      scores.push_back(score);
    }
    return scores;
  }
};

// If scores are exact, the selection is exact.
void exact_results(const Inputs& in, Instance& self) {
  const Paged& p = in.problem;
  const Reference reference(in);
  for (std::int64_t s = 0; s < p.b * p.q_len; ++s) {
    const std::vector<Visible> visible = visible_to(in, s / p.q_len, s % p.q_len);
    const std::vector<Score> row = reference.scores(in, s, visible);
    std::vector<std::size_t> order(row.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t x, std::size_t y) { return row[x].value > row[y].value; });
    order.resize(std::min(static_cast<std::size_t>(p.topk), order.size()));
    std::sort(order.begin(), order.end());
    for (std::int64_t i = 0; i < p.topk; ++i) {
      const bool there = i < std::ssize(order);
      const std::size_t at = there ? order[static_cast<std::size_t>(i)] : 0;
      const std::int64_t index = !there ? -1 : p.slots ? visible[at].slot : visible[at].position;
      self.outputs[0].expected.push_back(static_cast<double>(index));
      if (p.scores) self.outputs[1].expected.push_back(there ? row[at].value : -kInfinity);
    }
    if (p.lengths) self.outputs[p.scores ? 2 : 1].expected.push_back(static_cast<double>(order.size()));
  }
}

// Hopper's tensor cores round e4m3 products coarsely: see lightning_indexer's cases.
struct Rounding {
  double of_norm, of_magnitude;
};
Rounding rounding_on(const std::string& backend, DType dtype) {
  if (dtype == DType::kFloat8E4m3 && backend.ends_with("sm90")) return {1e-3, 0x1p-10};
  return {1e-4, 0x1p-21};
}

// For scores that rounding may reorder: checks that a query selects the right number of positions, ascending, each with
// its score, and that no other position beats a selected one by more than rounding.
std::string verify_row(const Paged& p, const Rounding& bound, const std::vector<Visible>& visible,
                       const std::vector<Score>& row, const std::vector<double>& indices,
                       const std::vector<double>& scores) {
  double size = 0;
  for (const Score& score : row)
    if (std::isfinite(score.value)) size += score.value * score.value / static_cast<double>(row.size());
  const auto rounding = [&](const Score& score) {
    return bound.of_norm * std::sqrt(size) + bound.of_magnitude * score.magnitude;
  };
  std::vector<bool> taken(row.size());
  double worst = kInfinity;
  std::size_t at = 0;
  const std::int64_t expected = std::min<std::int64_t>(p.topk, std::ssize(row));
  for (std::int64_t i = 0; i < p.topk; ++i) {
    const double index = indices[static_cast<std::size_t>(i)];
    const std::string entry = "entry " + std::to_string(i);
    if (i >= expected) {
      if (index != -1 || (p.scores && scores[static_cast<std::size_t>(i)] != -kInfinity))
        return entry + " must be -1 with score -inf";
      continue;
    }
    while (at < row.size() && static_cast<double>(p.slots ? visible[at].slot : visible[at].position) != index) ++at;
    if (at == row.size()) return entry + ": index " + std::to_string(index) + " is not visible, or does not ascend";
    const double value = row[at].value;
    const bool finite = std::isfinite(value);
    if (p.scores) {
      const double score = scores[static_cast<std::size_t>(i)];
      if (finite ? !(std::abs(score - value) <= rounding(row[at])) : score != value)
        return entry + ": score " + std::to_string(score) + ", expected " + std::to_string(value);
    }
    worst = std::min(worst, finite ? value + rounding(row[at]) : value);
    taken[at++] = true;
  }
  for (std::size_t t = 0; t < row.size(); ++t)
    if (!taken[t] && expected > 0 && row[t].value - rounding(row[t]) > worst)
      return "position " + std::to_string(visible[t].position) + " is better than one that was taken";
  return "";
}

std::string verify_rounded(const Inputs& in, const Array& indices, const Array* scores, const Rounding& bound) {
  const Paged& p = in.problem;
  const Reference reference(in);
  for (std::int64_t s = 0; s < p.b * p.q_len; ++s) {
    const std::vector<Visible> visible = visible_to(in, s / p.q_len, s % p.q_len);
    std::vector<double> index, score;
    for (std::int64_t i = s * p.topk; i < (s + 1) * p.topk; ++i) {
      index.push_back(indices.get(i));
      if (scores != nullptr) score.push_back(scores->get(i));
    }
    const std::string failure = verify_row(p, bound, visible, reference.scores(in, s, visible), index, score);
    if (!failure.empty()) return "indices: query " + std::to_string(s) + ", " + failure;
  }
  return "";
}

// lightning_indexer on the same backend over the keys of one query gathered into one tensor: equal bits.
std::string verify_unpaged(const Inputs& in, std::int64_t s, const Array& indices, const Array* scores,
                           const std::string& backend) {
  const Paged& p = in.problem;
  const std::vector<Visible> visible = visible_to(in, s / p.q_len, s % p.q_len);
  const std::int64_t n = std::ssize(visible), d = p.d_index, h = p.h_index;
  Array q("q", p.dtype, {1, h, d}), k("k", p.dtype, {n, d}), weights("weights", p.weights_dtype, {1, h});
  Array q_scale("q_scale", DType::kFloat32, {1, h}), k_scale("k_scale", DType::kFloat32, {n});
  Array keys("indices", DType::kInt32, {1, p.topk}), score("scores", DType::kFloat32, {1, p.topk});
  for (std::int64_t j = 0; j < h * d; ++j) q.set(j, in.q->get(s * h * d + j));
  for (std::int64_t j = 0; j < h; ++j) weights.set(j, in.weights->get(s * h + j));
  for (std::int64_t j = 0; j < h && in.q_scale != nullptr; ++j) q_scale.set(j, in.q_scale->get(s * h + j));
  for (std::int64_t t = 0; t < n; ++t) {
    const std::int64_t slot = visible[static_cast<std::size_t>(t)].slot, i = slot % p.block;
    const std::int64_t row = slot / p.block * p.block * p.row() + (p.fp8() ? d : p.row()) * i;
    for (std::int64_t c = 0; c < d; ++c) k.set(t * d + c, static_cast<double>(in.cache->get(row + c)));
    k_scale.set(t, in.key_scales[static_cast<std::size_t>(slot)]);
  }
  const std::vector<Array*> all = {&q, &k, &weights, &q_scale, &k_scale, &keys, &score};
  for (Array* array : all)
    if (cuda::runs(backend)) array->to_device();
  LightningIndexerArgs args{.q_index = q.view(), .k_index = k.view(), .weights = weights.view()};
  if (in.q_scale != nullptr) args.q_scale = q_scale.view();
  if (p.fp8()) args.k_scale = k_scale.view();
  args.relu = p.relu, args.indices = keys.view(), args.scores = score.view(), args.backend = backend.c_str();
  Workspace workspace;
  run_with_workspace<LightningIndexerArgs>(hopwell::lightning_indexer, hopwell::lightning_indexer_workspace_bytes,
                                           workspace, args, nullptr);
  for (Array* array : all)
    if (cuda::runs(backend)) array->from_device();
  for (std::int64_t i = 0; i < p.topk; ++i) {
    const auto key = static_cast<std::int64_t>(keys.get(i));
    const Visible at = key < 0 ? Visible{-1, -1} : visible[static_cast<std::size_t>(key)];
    const bool same = indices.get(s * p.topk + i) == static_cast<double>(p.slots ? at.slot : at.position) &&
                      (scores == nullptr || scores->get(s * p.topk + i) == score.get(i));
    if (!same) return "query " + std::to_string(s) + ", entry " + std::to_string(i) + " differs from lightning_indexer";
  }
  return "";
}

// ---- the call ----

Tensor view_of_optional(const Array* array) { return array == nullptr ? Tensor{} : array->view(); }

Instance make(Random& random, const Paged& p, bool timed) {
  Instance instance;
  Inputs inputs;
  inputs.problem = p;
  fill_queries(instance, random, inputs);
  fill_positions(instance, random, inputs);
  fill_cache(instance, random, inputs);
  const auto in = std::make_shared<Inputs>(std::move(inputs));
  Array& indices = add(instance, p, "indices", DType::kInt32, query_shape(p, {p.topk}));
  Array* const scores = p.scores ? &add(instance, p, "scores", DType::kFloat32, query_shape(p, {p.topk})) : nullptr;
  Array* const lengths = p.lengths ? &add(instance, p, "lengths", DType::kInt32, query_shape(p, {})) : nullptr;
  for (Array* array : {&indices, scores, lengths})
    if (array != nullptr) instance.expect(*array, {.exact = true});
  const auto used = std::make_shared<std::string>();  // the backend of the last call
  if (p.exact()) {
    instance.reference = [in](Instance& self) { exact_results(*in, self); };
  } else {
    instance.reference = [](Instance&) {};
  }
  instance.verify = [in, &indices, scores, lengths, used](const Instance&) {
    const Paged& problem = in->problem;
    std::string failure;
    if (!problem.exact()) failure = verify_rounded(*in, indices, scores, rounding_on(*used, problem.dtype));
    for (std::int64_t s = 0; s < problem.b * problem.q_len && failure.empty(); ++s) {
      const std::int64_t n = std::ssize(visible_to(*in, s / problem.q_len, s % problem.q_len));
      if (lengths != nullptr && lengths->get(s) != static_cast<double>(std::min(n, problem.topk)))
        failure = "lengths: query " + std::to_string(s);
      if (failure.empty() && n > 0 && s < 12) failure = verify_unpaged(*in, s, indices, scores, *used);
    }
    return failure;
  };
  instance.call = [in, &indices, scores, lengths, used, &workspace = *instance.workspace](const char* backend,
                                                                                          Stream stream) {
    *used = backend;
    PagedLightningIndexerArgs args{
        .q_index = in->q->view(), .cache = in->cache->view(), .weights = in->weights->view()};
    args.block_tables = in->block_tables->view(), args.context_lens = in->context_lens->view();
    args.q_scale = view_of_optional(in->q_scale), args.relu = in->problem.relu, args.as_slots = in->problem.slots;
    args.indices = indices.view(), args.scores = view_of_optional(scores), args.lengths = view_of_optional(lengths);
    args.backend = backend;
    run_with_workspace<PagedLightningIndexerArgs>(
        hopwell::paged_lightning_indexer, hopwell::paged_lightning_indexer_workspace_bytes, workspace, args, stream);
  };
  double visible = 0, rows = 0;
  for (std::int64_t b = 0; b < p.b; ++b) {
    double most = 0;
    for (std::int64_t i = 0; i < p.q_len; ++i) {
      const auto count =
          timed ? static_cast<double>(p.max_blocks * p.block) : static_cast<double>(visible_to(*in, b, i).size());
      visible += count, most = std::max(most, count);
    }
    rows += most;
  }
  const auto element = static_cast<double>(size_of(p.dtype));
  instance.flops = 2 * visible * static_cast<double>(p.h_index * p.d_index);
  instance.bytes = rows * (element * static_cast<double>(p.d_index) + (p.fp8() ? 4 : 0)) +
                   element * static_cast<double>(in->q->size()) +
                   4 * static_cast<double>(in->weights->size() + indices.size() + (scores ? scores->size() : 0));
  return instance;
}

using Problems = std::vector<std::pair<std::string, Paged>>;

Problems problems() {
  using Data = Paged::Data;
  using Lens = Paged::Lens;
  using Pages = Paged::Pages;
  using Scales = Paged::Scales;
  constexpr DType kFp8 = DType::kFloat8E4m3, kFloat = DType::kFloat32;
  Problems all;
  for (const auto& [name, dtype] : {std::pair{"bf16", DType::kBFloat16}, std::pair{"fp8", kFp8}}) {
    const auto add_case = [&, prefix = std::string(name), type = dtype](const std::string& of, Paged p) {
      p.dtype = type;
      all.emplace_back(prefix + of, p);
    };
    add_case("", {});
    add_case("_exact", {.b = 10, .data = Data::kIntegers});
    add_case("_lens_of_queries", {.b = 5, .q_len = 4, .lens = Lens::kQuery, .data = Data::kIntegers});
    add_case("_equal_keys", {.topk = 33, .lens = Lens::kFull, .data = Data::kEqual});
    add_case("_slots", {.b = 4, .data = Data::kIntegers, .slots = true});
    add_case("_slots_without_scores", {.b = 8, .topk = 100, .slots = true, .scores = false});
    add_case("_without_scores_bad_pages", {.b = 8, .topk = 100, .pages = Pages::kBad, .scores = false});
    add_case("_bad_pages", {.b = 8, .topk = 40, .data = Data::kIntegers, .pages = Pages::kBad});
    // Fewer positions exist than topk, more than topk are named.
    add_case("_bad_pages_few_left", {.topk = 170, .lens = Lens::kFull, .pages = Pages::kBad, .slots = true});
    add_case("_all_pages_bad", {.lens = Lens::kFull, .pages = Pages::kAllBad});
    add_case("_shared_pages", {.b = 4, .blocks = 5, .data = Data::kIntegers, .pages = Pages::kShared});
    add_case("_nan_keys", {.b = 4, .topk = 180, .lens = Lens::kFull, .nan_keys = true});
    add_case("_nan_query", {.lens = Lens::kFull, .nan_query = true});
    add_case("_topk_0", {.topk = 0});
    add_case("_no_position", {.lens = Lens::kNone});
    add_case("_no_pages", {.max_blocks = 0});
    add_case("_no_blocks", {.blocks = 0});
    add_case("_no_sequences", {.b = 0});
    add_case("_flat", {.b = 4, .q_len = 1, .data = Data::kIntegers, .flat = true});
    add_case("_without_lengths", {.lengths = false});
    add_case("_no_relu", {.data = Data::kIntegers, .relu = false});
    add_case("_strided", {.b = 4, .q_len = 1, .gap = 48, .strided = true});
    add_case("_block_64", {.blocks = 20, .block = 64, .max_blocks = 6, .gap = 64});
    add_case("_block_256", {.blocks = 6, .block = 256, .max_blocks = 2});
    add_case("_block_576", {.blocks = 3, .block = 576, .max_blocks = 1, .lens = Lens::kFull});
    add_case("_block_53", {.blocks = 10, .block = 53, .max_blocks = 7, .gap = 12});
    add_case("_block_2", {.topk = 65, .blocks = 300, .block = 2, .max_blocks = 140});
    add_case("_block_1", {.topk = 65, .blocks = 300, .block = 1, .max_blocks = 90});
    add_case("_many_keys", {.b = 2,
                            .q_len = 1,
                            .h_index = 4,
                            .d_index = 32,
                            .topk = 512,
                            .blocks = 200,
                            .block = 64,
                            .max_blocks = 90,
                            .lens = Lens::kFull});
    // Long rows, of 80 and of 515 blocks. Every fifth page is bad.
    const Paged long_rows{.b = 2,
                          .q_len = 1,
                          .h_index = 2,
                          .d_index = 32,
                          .blocks = 200,
                          .block = 64,
                          .max_blocks = 80,
                          .lens = Lens::kFull,
                          .pages = Pages::kBad};
    Paged longest = long_rows;
    longest.b = 1, longest.blocks = 520, longest.max_blocks = 515;
    const auto with_topk = [](Paged p, std::int64_t topk) {
      p.topk = topk;
      return p;
    };
    add_case("_many_keys_bad_pages", with_topk(long_rows, 3000));
    // A row that ends short of topk although more positions are named: its bad pages rank below everything.
    add_case("_many_keys_few_left", with_topk(long_rows, 4500));
    add_case("_longest_few_left", with_topk(longest, 27000));
    longest.data = Data::kIntegers;
    add_case("_longest_bad_pages", with_topk(longest, 300));
    longest.data = Data::kNormal, longest.pages = Pages::kGood, longest.q_len = 2;
    add_case("_longest", with_topk(longest, 300));
    // Rows of three parts: with every fifth page bad, and with no page.
    longest.q_len = 1, longest.blocks = 2, longest.max_blocks = 4200, longest.pages = Pages::kBad;
    add_case("_in_parts", with_topk(longest, 300));
    longest.slots = true;
    add_case("_in_parts_slots", with_topk(longest, 300));
    longest.pages = Pages::kAllBad;
    add_case("_in_parts_all_pages_bad", with_topk(longest, 300));
    add_case("_production",
             {.b = 2, .q_len = 2, .h_index = 64, .topk = 512, .blocks = 30, .block = 64, .max_blocks = 12});
    for (const std::int64_t h : {1, 5, 8, 32, 33, 64, 130})
      add_case("_h_index_" + std::to_string(h), {.b = 2, .q_len = 3, .h_index = h, .data = Data::kIntegers});
    for (const std::int64_t topk : {1, 63, 65, 127, 193})
      add_case("_topk_" + std::to_string(topk), {.b = 2, .topk = topk});
    for (const std::int64_t q_len : {1, 3, 4, 8})
      add_case("_q_len_" + std::to_string(q_len), {.b = 4, .q_len = q_len, .h_index = 32, .topk = 40});
    for (const std::int64_t d : {32, 64}) add_case("_d_" + std::to_string(d), {.d_index = d});
  }
  all.emplace_back("fp8_special_scales", Paged{.dtype = kFp8, .b = 4, .topk = 100, .scales = Scales::kSpecial});
  all.emplace_back("fp8_without_q_scale", Paged{.dtype = kFp8, .scales = Scales::kNone});
  all.emplace_back("fp8_int8_cache", Paged{.dtype = kFp8, .bytes = DType::kInt8});
  all.emplace_back("fp8_fp8_cache", Paged{.dtype = kFp8, .bytes = kFp8});
  all.emplace_back("fp8_d_12", Paged{.dtype = kFp8, .d_index = 12});
  all.emplace_back("fp8_unaligned_blocks", Paged{.dtype = kFp8, .block = 5, .gap = 7});
  all.emplace_back("bf16_d_40", Paged{.d_index = 40, .gap = 3});
  all.emplace_back("bf16_weights_bf16", Paged{.weights_dtype = DType::kBFloat16});
  all.emplace_back("fp32", Paged{.dtype = kFloat});
  all.emplace_back("fp32_exact", Paged{.dtype = kFloat, .b = 4, .d_index = 13, .data = Data::kIntegers});
  all.emplace_back("bf16_many_sequences", Paged{.b = 321, .q_len = 1, .h_index = 2, .d_index = 32, .topk = 20});
  // Sequences with few queries, of one to four tiles of 64 rows; more sequences, and items of 128 keys, than the rings
  // hold.
  const Paged few_queries{.dtype = kFp8,
                          .b = 4,
                          .q_len = 2,
                          .h_index = 64,
                          .d_index = 32,
                          .topk = 30,
                          .blocks = 90,
                          .block = 8,
                          .max_blocks = 90,
                          .pages = Pages::kBad};
  all.emplace_back("fp8_few_queries", few_queries);
  // A CTA has several sequences of one item each.
  Paged short_sequences = few_queries;
  short_sequences.b = 14, short_sequences.q_len = 1, short_sequences.max_blocks = 9;
  all.emplace_back("fp8_few_queries_short", short_sequences);
  Paged more_queries = few_queries;
  more_queries.q_len = 7, more_queries.h_index = 32, more_queries.block = 64, more_queries.max_blocks = 11;
  more_queries.data = Data::kIntegers;
  all.emplace_back("fp8_few_queries_h_32", more_queries);
  all.emplace_back("fp8_q_len_70", Paged{.dtype = kFp8, .b = 2, .q_len = 70, .h_index = 4, .d_index = 32, .topk = 20});
  return all;
}

}  // namespace

Suite paged_lightning_indexer() {
  Suite suite{"paged_lightning_indexer", {}, {}, {}};
  for (const auto& [name, problem] : problems())
    suite.cases.emplace_back(suite.op, name, [p = problem](Random& random) { return make(random, p, false); });
  leave_to_nightly(suite, {"bf16_longest", "bf16_longest_bad_pages", "bf16_longest_few_left", "bf16_many_keys",
                           "bf16_many_keys_bad_pages", "bf16_many_keys_few_left", "fp8_longest_few_left",
                           "fp8_in_parts", "bf16_in_parts", "fp8_in_parts_slots", "bf16_in_parts_slots",
                           "fp8_in_parts_all_pages_bad", "bf16_in_parts_all_pages_bad"});
  const auto shape = [](const char* fp8, const char* b, const char* q_len, const char* context) {
    return Settings{{"fp8", fp8},      {"b", b},           {"q_len", q_len}, {"context", context},
                    {"h_index", "64"}, {"d_index", "128"}, {"topk", "2048"}};
  };
  suite.shapes = {{"bf16_8k", shape("0", "1", "1", "8192")},
                  {"fp8_8k", shape("1", "1", "1", "8192")},
                  {"fp8_8_8k_q_len_2", shape("1", "8", "2", "8192")}};
  suite.bench = [](const Settings& settings, Random& random) {
    const std::int64_t b = number(settings, "b"), pages = (number(settings, "context") + 63) / 64;
    Paged p{.dtype = number(settings, "fp8") != 0 ? DType::kFloat8E4m3 : DType::kBFloat16,
            .b = b,
            .q_len = number(settings, "q_len"),
            .h_index = number(settings, "h_index"),
            .d_index = number(settings, "d_index"),
            .topk = number(settings, "topk"),
            .blocks = b * pages,
            .block = 64,
            .max_blocks = pages,
            .lens = Paged::Lens::kFull};
    return make(random, p, true);
  };
  suite.unsupported = {
      {"sm80", "needs base and block stride of cache in multiples of 4 bytes", "fp8_unaligned_blocks"},
      {"sm90", "needs q_index of float8_e4m3fn", "bf16* fp32*"},
      {"sm90", "needs a block that is a multiple of 8", "fp8_block_1 fp8_block_2 fp8_block_53 fp8_unaligned_blocks"},
      {"sm90", "needs a cache with blocks", "fp8_no_blocks"},
      {"sm90", "needs rows of q_index 16-byte aligned, with positive strides", "fp8_d_12 fp8_strided"}};
  suite.allocating = {"fp8", "fp8_many_keys"};
  suite.subjects = {
      // CTAs with several items, of several tiles; rows of several warps, of all positions and with pages that do not
      // exist.
      {"paged_lightning_indexer",
       "emu:sm80",
       {"fp8_many_keys", "fp8_many_keys_few_left", "bf16_bad_pages_few_left", "fp8_q_len_8", "bf16_h_index_130"},
       6,
       8},
      // CTAs with more items than the rings hold. The subjects of lightning_indexer have the kernels that both share.
      {"paged_lightning_indexer_sm90",
       "emu:sm90",
       {"fp8_many_keys", "fp8_bad_pages_few_left", "fp8_q_len_70"},
       2,
       8,
       "ops/paged_lightning_indexer/",
       "1"},
      {"paged_lightning_indexer_few_queries_sm90",
       "emu:sm90",
       {"fp8_few_queries", "fp8_few_queries_short", "fp8_few_queries_h_32"},
       2,
       8,
       "ops/paged_lightning_indexer/",
       "1"},
  };
  return suite;
}

}  // namespace hopwell::cases
