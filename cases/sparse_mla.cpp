#include "sparse_mla.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <tuple>

#include "tile/cpu/parallel.hpp"

namespace hopwell::cases {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <class T>
T pick(Random& random, std::initializer_list<T> from) {
  return from.begin()[random.below(static_cast<std::int64_t>(from.size()))];
}

void fill_indices(Array& indices, Random& random, const SparseMla& p) {
  const auto any = [&]() -> std::int64_t { return p.s_kv > 0 ? random.below(p.s_kv) : -1; };
  const auto invalid = [&] {
    return pick<std::int64_t>(random, {INT32_MIN, -123456, -1, p.s_kv, p.s_kv + 1, INT32_MAX});
  };
  std::vector<std::int64_t> keys(static_cast<std::size_t>(p.s_kv));  // a permutation of all keys
  std::iota(keys.begin(), keys.end(), 0);
  const auto another = [&](std::int64_t i) -> std::int64_t {  // a key that earlier entries do not have
    if (i >= p.s_kv) return -1;
    std::swap(keys[static_cast<std::size_t>(i)], keys[static_cast<std::size_t>(i + random.below(p.s_kv - i))]);
    return keys[static_cast<std::size_t>(i)];
  };
  const auto kept_or_another = [&](std::int64_t i) -> std::int64_t {  // the first `topk` of `keys` are the previous row
    if (i >= p.s_kv) return -1;
    auto& key = keys[static_cast<std::size_t>(i)];
    if (random.below(100) >= p.overlap && p.topk < p.s_kv)
      std::swap(key, keys[static_cast<std::size_t>(p.topk + random.below(p.s_kv - p.topk))]);
    return key;
  };
  for (std::int64_t s = 0; s < p.s_q; ++s) {
    std::vector<std::int64_t> row(static_cast<std::size_t>(p.topk));
    for (std::size_t i = 0; i < row.size(); ++i) {
      switch (p.indices) {
        case SparseMla::Indices::kAny:
          row[i] = any();
          break;
        case SparseMla::Indices::kInvalid:
          row[i] = random.below(3) == 0 ? invalid() : any();
          break;
        case SparseMla::Indices::kEmptyRows:
          row[i] = s % 2 == 0 ? invalid() : any();
          break;
        case SparseMla::Indices::kHot:
          row[i] = p.s_kv / 2;
          break;
        case SparseMla::Indices::kTwice:
          row[i] = i % 2 == 1 ? row[i - 1] : any();
          break;
        case SparseMla::Indices::kAscending:
        case SparseMla::Indices::kDistinct:
        case SparseMla::Indices::kAbsent:
          row[i] = s > 0 && p.overlap > 0 ? kept_or_another(static_cast<std::int64_t>(i))
                                          : another(static_cast<std::int64_t>(i));
          break;
      }
    }
    if (p.indices == SparseMla::Indices::kAscending) {
      const auto present = std::find(row.begin(), row.end(), -1);
      std::sort(row.begin(), present);
    }
    for (std::size_t i = 0; i < row.size(); ++i)
      indices.set(s * p.topk + static_cast<std::int64_t>(i), static_cast<double>(row[i]));
  }
}

void fill_listed_indices(Array& indices, Random& random, const SparseMla& p) {
  const std::int64_t selectable = p.s_kv - p.s_w, selected = p.topk - p.listed;
  std::vector<std::int64_t> keys(static_cast<std::size_t>(selectable));
  std::iota(keys.begin(), keys.end(), 0);
  for (std::int64_t s = 0; s < p.s_q; ++s) {
    const auto set = [&](std::int64_t i, std::int64_t key) { indices.set(s * p.topk + i, static_cast<double>(key)); };
    for (std::int64_t i = 0; i < p.listed; ++i) set(i, p.s_kv - p.s_q + s + 1 - p.listed + i);
    const std::int64_t seen =
        p.positions == SparseMla::Positions::kNone ? selectable : (p.q_start + s + 1) / p.kv_stride;
    for (std::int64_t i = 0; i < selected; ++i) {
      if (p.positions == SparseMla::Positions::kNone)
        std::swap(keys[static_cast<std::size_t>(i)], keys[static_cast<std::size_t>(i + random.below(selectable - i))]);
      set(p.listed + i, i < seen ? keys[static_cast<std::size_t>(i)] : -1);
    }
  }
}

std::int64_t length(const SparseMlaInputs& in, std::int64_t s) {
  const std::int64_t topk = in.problem.topk;
  return in.topk_length == nullptr
             ? topk
             : std::clamp(static_cast<std::int64_t>(in.topk_length->get(s)), std::int64_t{0}, topk);
}

std::int64_t key_of(const SparseMlaInputs& in, std::int64_t s, std::int64_t entry) {
  return in.indices == nullptr ? entry : static_cast<std::int64_t>(in.indices->get(s * in.problem.topk + entry));
}

bool visible(const SparseMlaInputs& in, std::int64_t s, std::int64_t key) {
  std::int64_t start = 0;
  if (in.k_start != nullptr) {
    start = static_cast<std::int64_t>(in.k_start->get(s));
    if (key < start || key >= static_cast<std::int64_t>(in.k_end->get(s))) return false;
  }
  if (in.problem.positions == SparseMla::Positions::kNone || in.problem.listed > 0) return true;
  const std::int64_t position =
      in.q_positions != nullptr ? static_cast<std::int64_t>(in.q_positions->get(s)) : in.problem.q_start + s;
  return (key - start + 1) * in.problem.kv_stride <= position + 1;
}

// The valid entries of query s, in ascending order.
std::vector<std::int64_t> valid_entries(const SparseMlaInputs& in, std::int64_t s) {
  std::vector<std::int64_t> entries;
  for (std::int64_t i = 0; i < length(in, s); ++i) {
    const std::int64_t key = key_of(in, s, i);
    if (key >= 0 && key < in.problem.s_kv && visible(in, s, key)) entries.push_back(i);
  }
  return entries;
}

// The rows of window_kv that query s sees.
std::vector<std::int64_t> window_rows(const SparseMlaInputs& in, std::int64_t s) {
  const SparseMla& p = in.problem;
  std::vector<std::int64_t> rows;
  if (in.window_kv == nullptr) return rows;
  const auto clamped = [&](double row) { return std::clamp(static_cast<std::int64_t>(row), std::int64_t{0}, p.s_w); };
  const std::int64_t start = in.w_start == nullptr ? 0 : clamped(in.w_start->get(s)),
                     end = clamped(in.w_end == nullptr ? static_cast<double>(p.s_w - p.s_q + s + 1) : in.w_end->get(s));
  for (std::int64_t t = start; t < end; ++t)
    if (t >= end - p.window) rows.push_back(t);
  return rows;
}

// Fills rows that no query uses with NaN and infinities, except for their first element.
void plant_elsewhere(Array& rows, const std::vector<bool>& used, std::int64_t width) {
  for (std::int64_t t = 0; t < std::ssize(used); ++t) {
    if (used[static_cast<std::size_t>(t)]) continue;
    for (std::int64_t d = 0; d < width; ++d) rows.set(t * width + d, d % 3 == 0 ? kInfinity : kNan);
  }
}

// The same for window_kv. Plants the NaN of a seen row.
void plant_nan_in_window(const SparseMlaInputs& in) {
  const SparseMla& p = in.problem;
  std::vector<bool> seen(static_cast<std::size_t>(p.s_w));
  for (std::int64_t s = 0; s < p.s_q; ++s)
    for (const std::int64_t row : window_rows(in, s)) seen[static_cast<std::size_t>(row)] = true;
  if (p.nan_elsewhere) plant_elsewhere(*in.window_kv, seen, p.d_qk);
  const auto first = std::find(seen.begin(), seen.end(), true) - seen.begin();
  if (p.planted != 0 && first < p.s_w) in.window_kv->set(first * p.d_qk + p.d_qk / 2, p.planted);
}

// Puts NaN into rows that no valid entry selects, or into one selected row.
void plant_nan(const SparseMlaInputs& in) {
  const SparseMla& p = in.problem;
  std::vector<bool> selected(static_cast<std::size_t>(p.s_kv));
  for (std::int64_t s = 0; s < p.s_q; ++s) {
    for (const std::int64_t entry : valid_entries(in, s))
      selected[static_cast<std::size_t>(key_of(in, s, entry))] = true;
  }
  if (p.nan_elsewhere) plant_elsewhere(*in.kv, selected, p.d_qk);
  if (in.window_kv != nullptr) {
    plant_nan_in_window(in);
    return;
  }
  const auto first = std::find(selected.begin(), selected.end(), true) - selected.begin();
  if (p.planted != 0 && first < p.s_kv) in.kv->set(first * p.d_qk + p.d_qk / 2, p.planted);
}

}  // namespace

Tensor view_of(const Array* array) { return array == nullptr ? Tensor() : array->view(); }

SelectionArgs SparseMlaInputs::selection() const {
  SelectionArgs selection{.topk_length = view_of(topk_length),
                          .q_positions = view_of(q_positions),
                          .kv_stride = problem.kv_stride,
                          .k_start = view_of(k_start),
                          .k_end = view_of(k_end)};
  if (problem.listed > 0)
    selection.kv_stride = 1;  // the index rows have only visible keys
  else if (problem.positions == SparseMla::Positions::kStart)
    selection.q_start = problem.q_start;
  return selection;
}

std::optional<std::int64_t> SparseMlaInputs::window() const {
  return window_kv == nullptr ? std::nullopt : std::optional(problem.window);
}

std::vector<double> SparseMlaInputs::keys() const {
  std::vector<double> rows = values_of(*kv);
  if (window_kv == nullptr) return rows;
  const std::vector<double> of_window = values_of(*window_kv);
  rows.insert(rows.end(), of_window.begin(), of_window.end());
  return rows;
}

Array& add_array(Instance& instance, const SparseMla& problem, const char* name, DType dtype,
                 const std::vector<std::int64_t>& shape) {
  if (!problem.strided || shape.size() < 2) return instance.add({name, dtype, shape});
  // Last dimension contiguous, followed by a gap. The first dimension has the smallest stride of the others.
  std::vector<std::int64_t> strides(shape.size(), 1);
  std::int64_t stride = shape.back() + problem.gap;
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) {
    strides[i] = stride;
    stride = stride * std::max<std::int64_t>(shape[i], 1) + problem.gap;
  }
  return instance.add({name, dtype, shape, strides});
}

std::pair<Array*, Array*> add_key_ranges(Instance& instance, Random& random, std::int64_t s_q, std::int64_t s_kv,
                                         std::int64_t stride) {
  Array& start = instance.add({"k_start", DType::kInt32, {s_q}, {stride}});
  Array& end = instance.add({"k_end", DType::kInt32, {s_q}, {stride}});
  const std::int64_t special[][2] = {{s_kv / 3, s_kv - 1},  {-5, s_kv / 2},       {INT32_MIN, INT32_MAX},
                                     {s_kv, INT32_MAX},     {s_kv / 2, s_kv / 2}, {INT32_MAX, INT32_MIN},
                                     {s_kv / 2, INT32_MAX}, {s_kv - 1, s_kv}};
  for (std::int64_t s = 0; s < s_q; ++s) {
    const std::int64_t document = s * 3 / s_q, first = document * s_kv / 3, last = (document + 1) * s_kv / 3;
    const std::int64_t past = first + 1 + random.below(std::max<std::int64_t>(1, last - first));
    start.set(s, static_cast<double>(s < 8 ? special[s][0] : first));
    end.set(s, static_cast<double>(s < 8 ? special[s][1] : past));
  }
  return {&start, &end};
}

namespace {

// w_start and w_end [s_q]: special values, then the rows of three documents up to the query's own.
void add_window_rows(Instance& instance, SparseMlaInputs& in) {
  const SparseMla& p = in.problem;
  in.w_start = &instance.add({"w_start", DType::kInt32, {p.s_q}, {p.strided ? 2 : 1}});
  in.w_end = &instance.add({"w_end", DType::kInt32, {p.s_q}, {p.strided ? 3 : 1}});
  const std::int64_t special[][2] = {{0, p.s_w},
                                     {INT32_MIN, INT32_MAX},
                                     {INT32_MAX, INT32_MIN},
                                     {p.s_w / 2, p.s_w},
                                     {p.s_w / 2, p.s_w / 2},
                                     {p.s_w / 2, p.s_w / 2 - 1},
                                     {-5, p.s_w / 3},
                                     {INT32_MIN, INT32_MIN},
                                     {p.s_w, INT32_MAX},
                                     {p.s_w - 1, p.s_w + 1}};
  for (std::int64_t s = 0; s < p.s_q; ++s) {
    const bool extreme = p.window_rows == SparseMla::WindowRows::kExtreme && s < std::ssize(special);
    const std::int64_t document = s * 3 / p.s_q, first_query = (document * p.s_q + 2) / 3;
    const std::int64_t first = first_query * p.s_w / p.s_q, end = first + s - first_query + 1;
    in.w_start->set(s, static_cast<double>(extreme ? special[s][0] : first));
    in.w_end->set(s, static_cast<double>(extreme ? special[s][1] : end));
  }
}

}  // namespace

SparseMlaInputs add_inputs(Instance& instance, Random& random, const SparseMla& p) {
  SparseMlaInputs in;
  in.problem = p;
  in.q = &add_array(instance, p, "q", p.dtype, {p.s_q, p.h_q, p.d_qk}).fill_normal(random, p.q_size);
  in.kv = &add_array(instance, p, "kv", p.dtype, {p.s_kv, 1, p.d_qk}).fill_normal(random);
  if (p.constant) in.q->fill(8), in.kv->fill(-8);
  if (p.indices != SparseMla::Indices::kAbsent) {
    in.indices = &add_array(instance, p, "indices", DType::kInt32, {p.s_q, 1, p.topk});
    p.listed > 0 ? fill_listed_indices(*in.indices, random, p) : fill_indices(*in.indices, random, p);
  }
  if (p.sink != SparseMla::Sink::kNone) {
    in.attn_sink = &instance.add({"attn_sink", DType::kFloat32, {p.h_q}});
    const double extreme[] = {0, kInfinity, -kInfinity, 1e38, -1e38}, large[] = {30, kInfinity, 1e38};
    for (std::int64_t h = 0; h < p.h_q; ++h)
      in.attn_sink->set(h, p.sink == SparseMla::Sink::kAny     ? 3 * random.normal()
                           : p.sink == SparseMla::Sink::kLarge ? large[h % 3]
                                                               : extreme[h % 5]);
  }
  if (p.lengths) {
    in.topk_length = &instance.add({"topk_length", DType::kInt32, {p.s_q}});
    const std::int64_t some[] = {0, p.topk + 1, -1, INT32_MAX, INT32_MIN, 1, p.topk, p.topk - 1};
    for (std::int64_t s = 0; s < p.s_q; ++s)
      in.topk_length->set(s, static_cast<double>(s < 8 ? some[s] : random.below(p.topk + 1)));
  }
  if (p.positions == SparseMla::Positions::kArray) {
    in.q_positions = &instance.add({"q_positions", DType::kInt32, {p.s_q}});
    const std::int64_t some[] = {0, -1, INT32_MAX, INT32_MIN, p.kv_stride - 1, p.kv_stride};
    for (std::int64_t s = 0; s < p.s_q; ++s) {
      in.q_positions->set(s, static_cast<double>(s < 6 ? some[s] : random.below(p.s_kv * p.kv_stride + 2)));
    }
  }
  if (p.ranges) std::tie(in.k_start, in.k_end) = add_key_ranges(instance, random, p.s_q, p.s_kv, p.strided ? 2 : 1);
  if (p.window > 0) {
    SparseMla of_window = p;
    of_window.gap += 8;  // another row stride than kv's
    in.window_kv = &add_array(instance, of_window, "window_kv", p.dtype, {p.s_w, 1, p.d_qk}).fill_normal(random);
    if (p.window_rows != SparseMla::WindowRows::kLast) add_window_rows(instance, in);
  }
  plant_nan(in);
  return in;
}

std::vector<QueryReference> query_references(const SparseMlaInputs& in) {
  const SparseMla& p = in.problem;
  const std::vector<double> q = values_of(*in.q), kv = in.keys();
  const auto scale = static_cast<double>(p.sm_scale);
  std::vector<QueryReference> queries(static_cast<std::size_t>(p.s_q));
  for (std::int64_t s = 0; s < p.s_q; ++s) {
    QueryReference& query = queries[static_cast<std::size_t>(s)];
    for (const std::int64_t row : window_rows(in, s)) query.entries.push_back(-1), query.keys.push_back(p.s_kv + row);
    for (const std::int64_t entry : valid_entries(in, s))
      query.entries.push_back(entry), query.keys.push_back(key_of(in, s, entry));
    const auto count = query.entries.size(), heads = static_cast<std::size_t>(p.h_q);
    query.score.resize(heads * count), query.score_magnitude.resize(heads * count);
    query.max.resize(heads), query.lse.resize(heads);
  }
  cpu::parallel_for(p.s_q * p.h_q, [&](std::int64_t item) {
    const std::int64_t s = item / p.h_q, h = item % p.h_q;
    QueryReference& query = queries[static_cast<std::size_t>(s)];
    const std::size_t head = static_cast<std::size_t>(h), count = query.keys.size();
    const std::int64_t row = (s * p.h_q + h) * p.d_qk;
    double max = -kInfinity, sum = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t key = query.keys[i] * p.d_qk;
      const Sum product = dot(q.data() + row, kv.data() + key, p.d_qk);
      const double score = scale * product.value;
      query.score[head * count + i] = score;
      query.score_magnitude[head * count + i] = std::abs(scale) * product.magnitude;
      max = score > max || std::isnan(score) ? score : max;
    }
    for (std::size_t i = 0; i < count; ++i) sum += std::exp(query.score[head * count + i] - max);
    query.max[head] = max;
    query.lse[head] = count == 0 ? kInfinity : max + std::log(sum);
  });
  return queries;
}

void add_cost(Instance& instance, const SparseMlaInputs& in, std::int64_t depth) {
  const SparseMla& p = in.problem;
  double valid = 0;
  for (std::int64_t s = 0; s < p.s_q; ++s)
    valid += static_cast<double>(valid_entries(in, s).size() + window_rows(in, s).size());
  instance.flops = 2 * valid * static_cast<double>(p.h_q * depth);
  for (const Array& array : instance.arrays)
    instance.bytes += static_cast<double>(array.size()) * static_cast<double>(size_of(array.dtype()));
}

ForwardReference forward_reference(const SparseMlaInputs& in) {
  const SparseMla& p = in.problem;
  const std::vector<double> kv = in.keys();
  const std::vector<QueryReference> queries = query_references(in);
  const auto rows = static_cast<std::size_t>(p.s_q * p.h_q), elements = rows * static_cast<std::size_t>(p.d_v);
  ForwardReference reference{.out = std::vector<double>(elements),
                             .out_magnitude = std::vector<double>(elements),
                             .max = std::vector<double>(rows),
                             .lse = std::vector<double>(rows),
                             .lse_magnitude = std::vector<double>(rows)};
  cpu::parallel_for(p.s_q * p.h_q, [&](std::int64_t item) {
    const std::int64_t s = item / p.h_q, h = item % p.h_q;
    const QueryReference& query = queries[static_cast<std::size_t>(s)];
    const auto head = static_cast<std::size_t>(h), row = static_cast<std::size_t>(s * p.h_q + h);
    const double* score = query.score.data() + h * query.count();
    const double* score_magnitude = query.score_magnitude.data() + h * query.count();
    const double sink = in.attn_sink == nullptr ? -kInfinity : in.attn_sink->get(h);
    const double factor = query.count() == 0 ? 0 : 1 / (1 + std::exp(sink - query.lse[head]));
    double* out = reference.out.data() + row * static_cast<std::size_t>(p.d_v);
    double* magnitude = reference.out_magnitude.data() + row * static_cast<std::size_t>(p.d_v);
    double largest = 0;
    for (std::int64_t i = 0; i < query.count(); ++i) {
      const double weight = factor * std::exp(score[i] - query.lse[head]);
      const std::int64_t key = query.keys[static_cast<std::size_t>(i)] * p.d_qk;
      largest = std::max(largest, score_magnitude[i]);
      // The rounding error of a score is an error of its weight.
      add_scaled(weight, weight * (1 + score_magnitude[i]), kv.data() + key, out, magnitude, p.d_v);
    }
    reference.max[row] = query.max[head];
    reference.lse[row] = query.lse[head];
    reference.lse_magnitude[row] = largest;
  });
  return reference;
}

DistributionReference distribution_reference(const SparseMlaInputs& in, const std::vector<QueryReference>& queries,
                                             const std::vector<double>& lse, bool with_sink) {
  const SparseMla& p = in.problem;
  const auto size = static_cast<std::size_t>(p.s_q * p.topk);
  DistributionReference reference{std::vector<double>(size), std::vector<double>(size)};
  cpu::parallel_for(p.s_q, [&](std::int64_t s) {
    const QueryReference& query = queries[static_cast<std::size_t>(s)];
    for (std::int64_t h = 0; h < p.h_q; ++h) {
      const double of_keys = lse[static_cast<std::size_t>(s * p.h_q + h)], sink = with_sink ? in.attn_sink->get(h) : 0;
      const double factor = with_sink ? 1 / (1 + std::exp(sink - of_keys)) : 1;
      for (std::int64_t i = 0; i < query.count(); ++i) {
        const std::int64_t entry = query.entries[static_cast<std::size_t>(i)];
        if (entry < 0) continue;  // of the window
        const auto from = static_cast<std::size_t>(h * query.count() + i);
        const auto to = static_cast<std::size_t>(s * p.topk + entry);
        const double weight = factor * std::exp(query.score[from] - of_keys);
        reference.attn[to] += weight;
        if (weight != 0) reference.magnitude[to] += weight * (1 + query.score_magnitude[from]);
      }
    }
  });
  return reference;
}

namespace {

// Without indices: visible keys begin and end at arbitrary positions, within one tile of keys and across several.
std::vector<std::pair<std::string, SparseMla>> dense_problems() {
  using Sink = SparseMla::Sink;
  using Positions = SparseMla::Positions;
  constexpr DType fp32 = DType::kFloat32;
  std::vector<std::pair<std::string, SparseMla>> all = {
      {"dense", {.s_kv = 200}},
      {"dense_fp32", {.dtype = fp32, .s_q = 3, .s_kv = 1100, .h_q = 3, .d_qk = 48, .d_v = 32}},
      {"dense_causal", {.s_q = 9, .s_kv = 150, .h_q = 8, .positions = Positions::kStart, .q_start = 60}},
      {"dense_causal_before_the_first",
       {.s_q = 5, .s_kv = 70, .h_q = 8, .positions = Positions::kStart, .q_start = -3}},
      {"dense_key_ranges", {.s_q = 15, .s_kv = 200, .h_q = 8, .sink = Sink::kAny, .ranges = true}},
      {"dense_key_ranges_fp32",
       {.dtype = fp32, .s_q = 24, .s_kv = 2900, .h_q = 3, .d_qk = 48, .d_v = 32, .ranges = true}},
      {"dense_key_ranges_kv_stride_4_positions",
       {.s_q = 24, .s_kv = 150, .h_q = 8, .positions = Positions::kArray, .kv_stride = 4, .ranges = true}},
      {"dense_key_ranges_h_q_40",
       {.s_q = 9, .s_kv = 200, .h_q = 40, .sink = Sink::kExtreme, .ranges = true, .strided = true, .gap = 8}},
      {"dense_h_q_128", {.s_q = 9, .s_kv = 160, .h_q = 128, .ranges = true}},
      {"dense_h_q_200", {.s_q = 3, .s_kv = 260, .h_q = 200, .positions = Positions::kStart, .q_start = 257}},
      {"dense_large_scores_h_q_64", {.s_q = 3, .s_kv = 140, .h_q = 64, .q_size = 200}},
      {"dense_one_query", {.s_q = 1, .s_kv = 700, .h_q = 16}},
      {"dense_one_key", {.s_q = 3, .s_kv = 1}},
      {"dense_no_keys", {.s_q = 3, .s_kv = 0, .sink = Sink::kAny}},
      {"dense_no_queries", {.s_q = 0, .s_kv = 70}}};
  for (auto& [name, problem] : all) problem.topk = problem.s_kv, problem.indices = SparseMla::Indices::kAbsent;
  return all;
}

}  // namespace

std::vector<std::pair<std::string, SparseMla>> sparse_mla_problems() {
  using Indices = SparseMla::Indices;
  using Sink = SparseMla::Sink;
  using Positions = SparseMla::Positions;
  constexpr DType fp32 = DType::kFloat32;
  constexpr float kRoot192 = 0.0721687824F;  // 192^-0.5
  std::vector<std::pair<std::string, SparseMla>> all = {
      {"basic", {}},
      {"basic_fp32", {.dtype = fp32}},
      {"d_qk_512", {.h_q = 64, .d_qk = 512}},
      {"d_qk_512_h_q_100", {.h_q = 100, .d_qk = 512, .topk = 130}},
      {"d_qk_512_h_q_20", {.s_q = 3, .h_q = 20, .d_qk = 512, .topk = 330}},
      {"v_is_k", {.dtype = fp32, .d_qk = 40, .d_v = 40}},
      {"width_1", {.dtype = fp32, .s_q = 3, .h_q = 3, .d_qk = 1, .d_v = 1, .topk = 5}},
      {"odd_widths", {.s_q = 3, .h_q = 5, .d_qk = 37, .d_v = 13, .topk = 19}},
      {"odd_widths_fp32", {.dtype = fp32, .s_q = 3, .h_q = 5, .d_qk = 131, .d_v = 67, .topk = 19}},
      {"production", {.s_q = 1, .s_kv = 1500, .h_q = 128, .topk = 640, .sm_scale = 0.0417F, .q_size = 1}},
      {"few_queries_many_keys", {.dtype = fp32, .s_q = 3, .s_kv = 5000, .h_q = 3, .d_qk = 48, .d_v = 32, .topk = 4000}},
      {"invalid_indices", {.s_q = 5, .indices = Indices::kInvalid}},
      {"invalid_indices_fp32",
       {.dtype = fp32, .s_q = 17, .h_q = 4, .d_qk = 48, .d_v = 32, .topk = 1100, .indices = Indices::kInvalid}},
      {"empty_rows", {.s_q = 5, .indices = Indices::kEmptyRows}},
      {"empty_rows_sink", {.s_q = 5, .indices = Indices::kEmptyRows, .sink = Sink::kExtreme}},
      {"empty_rows_many_keys",
       {.s_q = 4, .h_q = 3, .d_qk = 48, .d_v = 32, .topk = 1500, .indices = Indices::kEmptyRows, .sink = Sink::kAny}},
      {"fewer_keys_than_topk", {.s_q = 3, .s_kv = 40, .topk = 128, .indices = Indices::kAscending}},
      {"one_key", {.s_q = 3, .s_kv = 1, .topk = 65, .indices = Indices::kInvalid}},
      {"rows_end_early",
       {.s_q = 6,
        .s_kv = 150,
        .h_q = 72,
        .topk = 700,
        .indices = Indices::kAscending,
        .lengths = true,
        .positions = Positions::kArray}},
      {"no_keys", {.s_q = 3, .s_kv = 0, .indices = Indices::kInvalid, .sink = Sink::kAny}},
      {"no_entries", {.s_q = 3, .topk = 0, .sink = Sink::kAny}},
      {"no_queries", {.s_q = 0, .sink = Sink::kAny}},
      {"many_queries",
       {.s_q = 70000, .s_kv = 50, .h_q = 1, .d_qk = 8, .d_v = 5, .topk = 2, .indices = Indices::kInvalid}},
      {"lengths", {.s_q = 12, .lengths = true}},
      {"lengths_many_keys", {.dtype = fp32, .s_q = 24, .h_q = 3, .d_qk = 48, .d_v = 32, .topk = 1300, .lengths = true}},
      {"sink", {.sink = Sink::kAny}},
      {"sink_extreme", {.s_q = 3, .sink = Sink::kExtreme}},
      {"many_tiles", {.s_q = 7, .s_kv = 100, .h_q = 97, .topk = 200}},
      {"many_tiles_h_q_40", {.s_q = 7, .s_kv = 100, .h_q = 40, .topk = 330}},
      {"hot_row", {.s_q = 40, .h_q = 8, .indices = Indices::kHot}},
      {"duplicates", {.s_q = 3, .indices = Indices::kTwice}},
      {"ascending", {.s_q = 3, .indices = Indices::kAscending}},
      {"strided", {.s_q = 3, .sink = Sink::kAny, .lengths = true, .strided = true}},
      {"strided_aligned", {.s_q = 3, .sink = Sink::kAny, .lengths = true, .strided = true, .gap = 8}},
      {"strided_fp32", {.dtype = fp32, .s_q = 3, .h_q = 5, .d_qk = 40, .d_v = 24, .topk = 600, .strided = true}},
      {"large_scores", {.q_size = 200}},
      {"large_scores_fp32", {.dtype = fp32, .q_size = 200, .sink = Sink::kAny}},
      {"negative_scale", {.sm_scale = -0.5F}},
      {"zero_scale", {.sm_scale = 0}},
      {"causal_start", {.s_q = 24, .s_kv = 30, .h_q = 8, .positions = Positions::kStart, .q_start = 2}},
      {"causal_before_the_first", {.s_q = 5, .h_q = 8, .positions = Positions::kStart, .q_start = -3}},
      {"causal_positions", {.s_q = 12, .s_kv = 30, .h_q = 8, .sink = Sink::kAny, .positions = Positions::kArray}},
      {"kv_stride_4", {.s_q = 24, .s_kv = 20, .h_q = 8, .positions = Positions::kStart, .kv_stride = 4}},
      {"kv_stride_4_positions",
       {.s_q = 12, .s_kv = 20, .h_q = 8, .lengths = true, .positions = Positions::kArray, .kv_stride = 4}},
      {"key_ranges", {.s_q = 15, .s_kv = 30, .h_q = 8, .sink = Sink::kAny, .ranges = true}},
      {"key_ranges_fp32", {.dtype = fp32, .s_q = 24, .h_q = 3, .d_qk = 48, .d_v = 32, .topk = 1300, .ranges = true}},
      {"key_ranges_start",
       {.s_q = 24, .s_kv = 30, .h_q = 8, .positions = Positions::kStart, .q_start = 2, .ranges = true}},
      {"key_ranges_kv_stride_4_positions",
       {.s_q = 24, .s_kv = 30, .h_q = 8, .positions = Positions::kArray, .kv_stride = 4, .ranges = true}},
      {"key_ranges_h_q_128", {.s_q = 9, .h_q = 128, .topk = 130, .ranges = true, .strided = true, .gap = 8}},
      {"nan_selected", {.s_q = 4, .s_kv = 40, .h_q = 3, .topk = 16, .planted = kNan}},
      {"constant_rows", {.s_q = 3, .h_q = 8, .topk = 130, .sm_scale = kRoot192, .constant = true}},
      {"constant_rows_fp32", {.dtype = fp32, .s_q = 3, .h_q = 8, .topk = 130, .sm_scale = kRoot192, .constant = true}},
      {"constant_rows_h_q_40", {.h_q = 40, .topk = 130, .sm_scale = kRoot192, .constant = true, .sink = Sink::kAny}},
      {"constant_rows_h_q_128", {.s_q = 1, .h_q = 128, .topk = 65, .sm_scale = kRoot192, .constant = true}},
      {"large_scores_h_q_20", {.s_q = 3, .h_q = 20, .topk = 330, .q_size = 200}},
      // Blackwell's CTA pair and 64 more heads: row_max changes, the ring of keys wraps around, rows are empty.
      {"large_scores_h_q_192",
       {.s_q = 7,
        .h_q = 192,
        .topk = 330,
        .q_size = 200,
        .indices = Indices::kInvalid,
        .sink = Sink::kAny,
        .lengths = true}},
      // Features that kernels for more than 32 heads implement separately.
      {"empty_rows_sink_h_q_40", {.s_q = 5, .h_q = 40, .indices = Indices::kEmptyRows, .sink = Sink::kExtreme}},
      {"large_scores_h_q_40", {.h_q = 40, .topk = 130, .q_size = 200}},
      {"nan_selected_h_q_40", {.s_q = 3, .s_kv = 40, .h_q = 40, .topk = 130, .planted = kNan}},
      {"masks_h_q_40",
       {.s_q = 5,
        .h_q = 40,
        .topk = 130,
        .sm_scale = -0.5F,
        .indices = Indices::kInvalid,
        .sink = Sink::kAny,
        .lengths = true,
        .positions = Positions::kArray,
        .strided = true}},
      {"key_ranges_h_q_40",
       {.s_q = 9,
        .h_q = 40,
        .topk = 130,
        .indices = Indices::kInvalid,
        .lengths = true,
        .ranges = true,
        .strided = true}},
  };
  for (const auto& problem : dense_problems()) all.push_back(problem);
  for (const std::int64_t h_q : {1, 8, 32, 64, 96, 128, 256})
    all.push_back({"h_q_" + std::to_string(h_q), {.h_q = h_q, .topk = 48}});
  for (const std::int64_t topk : {1, 63, 65, 127})
    all.push_back({"topk_" + std::to_string(topk), {.h_q = 8, .topk = topk}});
  for (const std::int64_t topk : {2048, 2049}) {
    all.push_back({"topk_" + std::to_string(topk), {.s_q = 1, .s_kv = 2100, .h_q = 4, .topk = topk}});
  }
  return all;
}

std::vector<std::pair<std::string, SparseMla>> sparse_mla_window_problems() {
  using Indices = SparseMla::Indices;
  using Sink = SparseMla::Sink;
  using Positions = SparseMla::Positions;
  using WindowRows = SparseMla::WindowRows;
  constexpr DType fp32 = DType::kFloat32;
  std::vector<std::pair<std::string, SparseMla>> all;
  const auto add = [&](const std::string& name, const SparseMla& problem) {
    all.emplace_back("window_" + name, problem);
  };
  // Lengths of windows, around a tile of 64 and 128 keys; s_w below, at and above s_q.
  add("1", {.s_q = 3, .h_q = 8, .d_qk = 512, .window = 1, .s_w = 3});
  add("63", {.h_q = 1, .d_qk = 512, .topk = 3, .window = 63, .s_w = 70});
  add("127", {.h_q = 16, .d_qk = 512, .topk = 65, .window = 127, .s_w = 129});
  add("128", {.h_q = 64, .d_qk = 512, .topk = 63, .sink = Sink::kAny, .window = 128, .s_w = 129});
  add("129", {.h_q = 32, .topk = 66, .sink = Sink::kExtreme, .window = 129, .s_w = 131});
  add("beyond", {.s_q = 5, .h_q = 8, .d_qk = 512, .window = INT64_MAX, .s_w = 5});
  add("fewer_rows_than_queries",
      {.s_q = 6, .h_q = 8, .d_qk = 512, .topk = 5, .sink = Sink::kExtreme, .window = 2, .s_w = 4});
  add("h_q_96", {.s_q = 3, .h_q = 96, .d_qk = 512, .topk = 20, .sink = Sink::kExtreme, .window = 20, .s_w = 21});
  add("h_q_128", {.s_q = 3, .h_q = 128, .d_qk = 512, .topk = 40, .sink = Sink::kAny, .window = 50, .s_w = 51});
  // The window alone, a selection alone, nothing.
  add("alone", {.s_q = 3, .h_q = 8, .d_qk = 512, .topk = 0, .sink = Sink::kExtreme, .window = 66, .s_w = 68});
  add("alone_h_q_64", {.s_q = 5, .h_q = 64, .d_qk = 512, .topk = 0, .window = 2, .s_w = 3});
  add("alone_dense",
      {.s_q = 3, .s_kv = 0, .h_q = 16, .d_qk = 512, .topk = 0, .indices = Indices::kAbsent, .window = 3, .s_w = 3});
  add("no_rows", {.h_q = 8, .d_qk = 512, .topk = 20, .window = 128, .s_w = 0});
  add("no_queries", {.s_q = 0, .d_qk = 512, .window = 128, .s_w = 3});
  add("extreme_rows", {.s_q = 16,
                       .h_q = 8,
                       .d_qk = 512,
                       .topk = 5,
                       .indices = Indices::kEmptyRows,
                       .sink = Sink::kExtreme,
                       .window = 6,
                       .s_w = 20,
                       .window_rows = WindowRows::kExtreme});
  add("beyond_extreme_rows", {.s_q = 16,
                              .h_q = 8,
                              .d_qk = 512,
                              .topk = 5,
                              .window = INT64_MAX,
                              .s_w = 20,
                              .window_rows = WindowRows::kExtreme});
  add("extreme_rows_h_q_64", {.s_q = 10,
                              .s_kv = 30,
                              .h_q = 64,
                              .d_qk = 512,
                              .topk = 5,
                              .indices = Indices::kInvalid,
                              .sink = Sink::kExtreme,
                              .lengths = true,
                              .window = 6,
                              .s_w = 20,
                              .window_rows = WindowRows::kExtreme});
  // Packed documents of window keys and of compressed keys.
  add("documents", {.s_q = 14,
                    .s_kv = 30,
                    .h_q = 8,
                    .topk = 8,
                    .sink = Sink::kAny,
                    .positions = Positions::kArray,
                    .kv_stride = 4,
                    .ranges = true,
                    .window = 3,
                    .s_w = 14,
                    .window_rows = WindowRows::kDocuments});
  add("duplicates", {.s_kv = 9, .h_q = 8, .d_qk = 512, .topk = 20, .indices = Indices::kTwice, .window = 7, .s_w = 8});
  add("hot_row", {.s_q = 20, .h_q = 8, .d_qk = 512, .topk = 3, .indices = Indices::kHot, .window = 2, .s_w = 21});
  add("strided", {.s_q = 3,
                  .d_qk = 512,
                  .topk = 20,
                  .sink = Sink::kAny,
                  .lengths = true,
                  .window = 5,
                  .s_w = 9,
                  .window_rows = WindowRows::kDocuments,
                  .strided = true,
                  .gap = 8});
  add("large_scores_h_q_64", {.h_q = 64, .d_qk = 512, .topk = 130, .q_size = 200, .window = 66, .s_w = 70});
  add("nan_seen", {.s_q = 4, .s_kv = 40, .h_q = 3, .d_qk = 512, .topk = 5, .window = 2, .s_w = 5, .planted = kNan});
  add("nan_seen_h_q_64",
      {.s_q = 4, .s_kv = 40, .h_q = 64, .d_qk = 512, .topk = 5, .window = 2, .s_w = 5, .planted = kNan});
  add("constant_rows", {.s_q = 2,
                        .h_q = 64,
                        .d_qk = 512,
                        .topk = 66,
                        .sm_scale = 0.0721687824F,
                        .constant = true,
                        .window = 5,
                        .s_w = 6});
  // HCA: every visible key, each of 128 tokens. The first query has no compressed key, the next ones have one.
  const SparseMla hca{.s_q = 3,
                      .s_kv = 3,
                      .h_q = 64,
                      .d_qk = 512,
                      .topk = 3,
                      .indices = Indices::kAbsent,
                      .sink = Sink::kAny,
                      .positions = Positions::kStart,
                      .q_start = 126,
                      .kv_stride = 128,
                      .window = 128,
                      .s_w = 129};
  add("hca", hca);
  SparseMla changed = hca;
  changed.h_q = 128, changed.s_q = 2, changed.q_start = 128 * 70 - 2, changed.s_kv = changed.topk = 70;
  changed.window = 66, changed.s_w = 70;
  add("hca_h_q_128", changed);
  changed = hca;
  changed.h_q = 8, changed.s_q = 14, changed.s_kv = changed.topk = 20, changed.positions = Positions::kArray;
  changed.ranges = true, changed.window = 4, changed.s_w = 14, changed.window_rows = WindowRows::kDocuments;
  add("hca_documents", changed);
  // Several tiles of the CPU, whose border is in the window, or in the index row.
  const SparseMla tiles{.dtype = fp32,
                        .s_q = 20,
                        .h_q = 3,
                        .d_qk = 48,
                        .d_v = 32,
                        .topk = 700,
                        .indices = Indices::kInvalid,
                        .sink = Sink::kAny,
                        .window = 600,
                        .s_w = 700,
                        .window_rows = WindowRows::kExtreme};
  add("tiles_fp32", tiles);
  changed = tiles;
  changed.s_kv = changed.topk = 1300, changed.indices = Indices::kAbsent, changed.ranges = true, changed.window = 100;
  add("tiles_dense_fp32", changed);
  changed = tiles;
  changed.s_q = 70, changed.topk = 9, changed.window = 6, changed.window_rows = WindowRows::kLast;
  add("many_queries_fp32", changed);
  return all;
}

std::vector<std::pair<std::string, SparseMla>> sparse_mla_group_problems() {
  using Indices = SparseMla::Indices;
  using Sink = SparseMla::Sink;
  using Positions = SparseMla::Positions;
  const SparseMla four{.s_q = 9, .indices = Indices::kDistinct, .overlap = 85};
  std::vector<std::pair<std::string, SparseMla>> all;
  const auto add = [&](const std::string& name, const auto&... changes) {
    SparseMla problem = four;
    (changes(problem), ...);
    all.emplace_back(name, problem);
  };
  const auto heads = [](std::int64_t h_q) { return [h_q](SparseMla& p) { p.h_q = h_q; }; };
  for (const std::int64_t h_q : {1, 8, 12, 16, 24, 32, 64, 128}) add("h_q_" + std::to_string(h_q), heads(h_q));
  add("d_qk_512", [](SparseMla& p) { p.d_qk = 512, p.topk = 130; });
  add("none_shared", [](SparseMla& p) { p.overlap = 0, p.s_kv = 2000; });
  add("none_shared_long_rows", [](SparseMla& p) { p.overlap = 0, p.s_kv = 9000, p.topk = 300; });
  add("third_shared", [](SparseMla& p) { p.overlap = 35, p.s_kv = 3000, p.topk = 200, p.s_q = 17; });
  add("all_shared", [](SparseMla& p) { p.overlap = 100; });
  add("ascending", [](SparseMla& p) { p.indices = Indices::kAscending; });
  add("any", [](SparseMla& p) { p.indices = Indices::kAny, p.s_kv = 70; });
  add("invalid_indices", [](SparseMla& p) { p.indices = Indices::kInvalid, p.s_kv = 70; });
  add("empty_rows", [](SparseMla& p) { p.indices = Indices::kEmptyRows, p.s_kv = 70, p.sink = Sink::kExtreme; });
  add("hot_row", heads(8), [](SparseMla& p) { p.indices = Indices::kHot; });
  add("duplicates", [](SparseMla& p) { p.indices = Indices::kTwice, p.s_kv = 150, p.topk = 200; });
  add("sink_lengths", [](SparseMla& p) { p.sink = Sink::kAny, p.lengths = true, p.s_q = 19; });
  add("positions", heads(32), [](SparseMla& p) { p.positions = Positions::kArray, p.kv_stride = 4; });
  add("key_ranges", [](SparseMla& p) { p.ranges = true, p.s_q = 20; });
  // More keys than the 2^16 of one marking round of the group merge for eight queries (tile/gpu/merge_rows.hpp).
  add("many_keys", heads(8), [](SparseMla& p) { p.s_kv = 66000, p.s_q = 8, p.topk = 100; });
  add("long_row", [](SparseMla& p) { p.s_kv = 3000, p.s_q = 4, p.topk = 1100; });
  add("strided", [](SparseMla& p) { p.strided = true, p.gap = 8; });
  return all;
}

void choose_backends_of_groups(Case& c, const SparseMla& problem) {
  if (problem.h_q < 64) c.emulated_on = "emu:sm90";
  c.on_cpu = problem.s_kv < 65536;
}

std::vector<std::string> long_sparse_mla_cases() {
  return {"topk_2048",
          "many_tiles_h_q_40",
          "large_scores_h_q_192",
          "h_q_256",
          "causal_start",
          "kv_stride_4",
          "key_ranges_start",
          "key_ranges_kv_stride_4_positions",
          "dense_h_q_200",
          "dense_key_ranges_h_q_40",
          "dense_key_ranges_kv_stride_4_positions"};
}

std::vector<std::pair<std::string, SparseMla>> sparse_mla_device_problems() {
  return {{"many_queries_576", {.s_q = 70000, .h_q = 1, .topk = 2}},
          {"more_tiles", {.s_q = 300, .h_q = 65, .topk = 200, .indices = SparseMla::Indices::kInvalid}},
          {"more_tiles_h_q_20", {.s_q = 300, .h_q = 20, .topk = 330}},
          {"training_step", {.s_q = 140, .s_kv = 20000, .h_q = 128, .topk = 129, .sm_scale = 0.0417F, .q_size = 1}}};
}

std::vector<std::pair<std::string, SparseMla>> sparse_mla_query_problems(std::initializer_list<std::int64_t> heads,
                                                                         std::int64_t d_qk) {
  const std::string d = d_qk == 576 ? "" : "d_qk_" + std::to_string(d_qk) + "_";
  std::vector<std::pair<std::string, SparseMla>> all;
  for (const std::int64_t h_q : heads)
    for (const std::int64_t topk : {1024, 2048})
      all.push_back(
          {"query_h_q_" + std::to_string(h_q) + "_" + d + "topk_" + std::to_string(topk),
           {.s_q = 1, .s_kv = 2100, .h_q = h_q, .d_qk = d_qk, .topk = topk, .sm_scale = 0.0417F, .q_size = 1}});
  return all;
}

std::vector<std::pair<std::string, Settings>> sparse_mla_shapes() {
  const Settings production = {{"dtype", "bf16"}, {"s_q", "16"},  {"s_kv", "8192"},   {"h_q", "128"},  {"topk", "2048"},
                               {"d_qk", "576"},   {"d_v", "512"}, {"ascending", "0"}, {"overlap", "0"}};
  const auto with = [](Settings settings, const Settings& changes) {
    for (const auto& [key, value] : changes) settings[key] = value;
    return settings;
  };
  return {{"production", production},
          {"production-fp32", with(production, {{"dtype", "fp32"}})},
          {"h_q-16", with(production, {{"h_q", "16"}})},
          {"one-query", with(production, {{"s_q", "1"}})},
          {"small", with(production, {{"dtype", "fp32"},
                                      {"s_q", "512"},
                                      {"s_kv", "512"},
                                      {"h_q", "8"},
                                      {"topk", "64"},
                                      {"d_qk", "64"},
                                      {"d_v", "48"}})}};
}

std::vector<std::pair<std::string, Settings>> sparse_mla_device_shapes() {
  std::vector<std::pair<std::string, Settings>> shapes;
  for (const char* heads : {"128", "64"}) {
    for (const int thousands : {8, 32, 64, 128}) {
      Settings settings = sparse_mla_shapes().front().second;
      settings["s_q"] = "4096", settings["h_q"] = heads, settings["s_kv"] = std::to_string(1024 * thousands);
      shapes.emplace_back("h" + std::string(heads) + "-" + std::to_string(thousands) + "k", settings);
    }
  }
  return shapes;
}

void fill_typical_lse(Array& lse, Random& random, const SparseMla& problem) {
  const double mean = std::log(static_cast<double>(std::max<std::int64_t>(problem.topk, 1))) + 0.5;
  for (std::int64_t i = 0; i < lse.size(); ++i) lse.set(i, mean + 0.1 * random.normal());
}

Settings sparse_mla_window_settings() {
  return {{"window", "0"}, {"listed", "0"}, {"dense", "0"}, {"kv_stride", "0"}, {"q_start", "0"}};
}

namespace {

SparseMla with_window(SparseMla p, const Settings& settings) {
  const std::int64_t window = number(settings, "window");
  if (number(settings, "dense") != 0) p.indices = SparseMla::Indices::kAbsent, p.topk = p.s_kv;
  if (number(settings, "kv_stride") != 0) {
    p.positions = SparseMla::Positions::kStart;
    p.kv_stride = number(settings, "kv_stride"), p.q_start = number(settings, "q_start");
  }
  if (window == 0) return p;
  p.s_w = p.s_q + window - 1;
  if (number(settings, "listed") == 0) {
    p.window = window;
  } else {
    p.indices = SparseMla::Indices::kDistinct;
    p.listed = window, p.s_kv += p.s_w, p.topk += window;
  }
  return p;
}

}  // namespace

SparseMla sparse_mla_from(const Settings& settings) {
  const std::string& dtype = settings.at("dtype");
  if (dtype != "bf16" && dtype != "fp32")
    throw std::invalid_argument("setting 'dtype' must be bf16 or fp32; got '" + dtype + "'");
  SparseMla p{
      .dtype = dtype == "bf16" ? DType::kBFloat16 : DType::kFloat32,
      .s_q = number(settings, "s_q"),
      .s_kv = number(settings, "s_kv"),
      .h_q = number(settings, "h_q"),
      .d_qk = number(settings, "d_qk"),
      .d_v = number(settings, "d_v"),
      .topk = number(settings, "topk"),
      .indices = number(settings, "ascending") != 0 ? SparseMla::Indices::kAscending : SparseMla::Indices::kDistinct,
      .overlap = static_cast<int>(number(settings, "overlap")),
      .nan_elsewhere = false};
  p.sm_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(p.d_qk, 1))));
  p.q_size = 1;
  return settings.contains("window") ? with_window(p, settings) : p;
}

}  // namespace hopwell::cases
