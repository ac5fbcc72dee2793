// paged_attention: OPERATORS of the documentation, section 4.
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>

#include "suites.hpp"

namespace hopwell::cases {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

enum class BiasForm { kNone, kKey, kDistance, kFused };
enum class Pages {
  kPermuted,  // every sequence has pages of its own
  kShared,    // sequences begin with the same pages
  kRepeated,  // any page anywhere, several times over
  kBad        // kPermuted, with page numbers out of range within the context
};

// One call. The defaults are a small case in which nothing is special.
struct Config {
  std::string name;
  DType dtype = DType::kFloat32;
  hopwell_cache_layout layout = HOPWELL_CACHE_NHD;
  std::vector<std::int64_t> lengths = {0, 1, 15, 16, 17, 70};  // context_lens as given
  std::int64_t max_blocks = -1;                                // -1: what the longest context needs, and two more
  std::int64_t q_len = 0;                                      // 0: a three-dimensional q
  std::int64_t h_q = 4, h_kv = 2, d = 64, block = 16;
  float scale = 0.125F;
  double q_spread = 1;  // standard deviation of q
  std::int64_t window = 0;
  Pages pages = Pages::kPermuted;
  BiasForm bias = BiasForm::kNone;
  std::optional<DType> bias_dtype = {};  // of bias, u, v and r; else q's
  hopwell_out_of_range out_of_range = HOPWELL_OUT_OF_RANGE_ZERO;
  std::int64_t extent = 40;
  bool shared_bias = false;  // first dimension 1
  bool post_scale = false, u = false, no_v = false, alibi = false, strided = false;
  bool hidden = false;  // biases of -inf: a row's all, and keys that hold NaN

  [[nodiscard]] std::int64_t b() const { return static_cast<std::int64_t>(lengths.size()); }
  [[nodiscard]] std::int64_t queries() const { return std::max<std::int64_t>(q_len, 1); }
  [[nodiscard]] std::int64_t table_length() const {
    if (max_blocks >= 0) return max_blocks;
    const std::int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
    return (longest + block - 1) / block + 2;
  }
  [[nodiscard]] std::int64_t context(std::int64_t n) const {
    return std::clamp<std::int64_t>(lengths[static_cast<std::size_t>(n)], 0, table_length() * block);
  }
  [[nodiscard]] std::int64_t first_seen(std::int64_t n) const {  // by any query
    return window == 0 ? 0 : std::max<std::int64_t>(0, context(n) - queries() - window + 1);
  }
};

struct Arrays {
  Array *q = nullptr, *k = nullptr, *v = nullptr, *tables = nullptr, *lengths = nullptr, *u = nullptr, *bias = nullptr,
        *pos_bias_v = nullptr, *r = nullptr, *slopes = nullptr, *out = nullptr, *lse = nullptr;
};

// Row-major position of element e of a key or value in its cache.
struct CachePosition {
  hopwell_cache_layout layout;
  std::int64_t h_kv, block, d, x;

  CachePosition(const Config& c, bool key)
      : layout(c.layout),
        h_kv(c.h_kv),
        block(c.block),
        d(c.d),
        x(key ? 16 / static_cast<std::int64_t>(size_of(c.dtype)) : 1) {}
  std::int64_t operator()(std::int64_t page, std::int64_t slot, std::int64_t head, std::int64_t e) const {
    switch (layout) {
      case HOPWELL_CACHE_NHD:
        return ((page * block + slot) * h_kv + head) * d + e;
      case HOPWELL_CACHE_HND:
        return ((page * h_kv + head) * block + slot) * d + e;
      case HOPWELL_CACHE_VLLM:
        break;
    }
    return (((page * h_kv + head) * (d / x) + e / x) * block + slot) * x + e % x;
  }
};

std::vector<double> values(const Array* array) {
  std::vector<double> all(array == nullptr ? 0 : static_cast<std::size_t>(array->size()));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = array->get(static_cast<std::int64_t>(i));
  return all;
}

// Row-major strides with the first dimension (or, for q and out, the last but one) drawn apart by `gap` elements.
std::vector<std::int64_t> strides_with_gap(const std::vector<std::int64_t>& shape, std::size_t dim, std::int64_t gap) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0; stride *= std::max<std::int64_t>(shape[i], 1)) {
    if (i == dim) stride += gap;
    strides[i] = stride;
  }
  return strides;
}

std::vector<std::int64_t> cache_shape(const Config& c, std::int64_t blocks, bool key) {
  switch (c.layout) {
    case HOPWELL_CACHE_NHD:
      return {blocks, c.block, c.h_kv, c.d};
    case HOPWELL_CACHE_HND:
      return {blocks, c.h_kv, c.block, c.d};
    case HOPWELL_CACHE_VLLM:
      break;
  }
  const std::int64_t x = 16 / static_cast<std::int64_t>(size_of(c.dtype));
  if (key) return {blocks, c.h_kv, c.d / x, c.block, x};
  return {blocks, c.h_kv, c.d, c.block};
}

// Block tables whose entries name pages only where a query sees keys; anything else is a number no page has, or a page
// of NaN.
void fill_tables(const Config& c, Random& random, Array& tables, std::int64_t blocks) {
  std::vector<std::int64_t> free(static_cast<std::size_t>(blocks));
  std::iota(free.begin(), free.end(), 0);
  for (std::size_t i = free.size(); i > 1; --i)
    std::swap(free[i - 1], free[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
  const std::int64_t bad[] = {INT_MIN, -123456, -1, blocks, blocks + 1, INT_MAX};
  const auto bad_page = [&] { return static_cast<double>(bad[random.below(6)]); };
  const std::int64_t width = c.table_length();
  for (std::int64_t n = 0, next = 0; n < c.b(); ++n) {
    for (std::int64_t i = 0; i < width; ++i) {
      const bool seen = (i + 1) * c.block > c.first_seen(n) && i * c.block < c.context(n);
      double page = bad_page();
      if (seen && c.pages == Pages::kRepeated)
        page = static_cast<double>(random.below(blocks));
      else if (seen && c.pages == Pages::kShared && i < 2)
        page = static_cast<double>(free[static_cast<std::size_t>(blocks - 1 - i)]);
      else if (seen && !(c.pages == Pages::kBad && random.below(3) == 0))
        page = static_cast<double>(free[static_cast<std::size_t>(next++)]);
      tables.set(n * width + i, page);
    }
  }
}

// Random keys and values where a query sees them, NaN everywhere else.
void fill_caches(const Config& c, Random& random, const Arrays& a, std::int64_t blocks) {
  a.k->fill(kNan);
  a.v->fill(kNan);
  const CachePosition k(c, true), v(c, false);
  const std::int64_t width = c.table_length();
  for (std::int64_t n = 0; n < c.b(); ++n) {
    for (std::int64_t t = c.first_seen(n); t < c.context(n); ++t) {
      const auto page = static_cast<std::int64_t>(a.tables->get(n * width + t / c.block));
      if (page < 0 || page >= blocks || !std::isnan(a.k->get(k(page, t % c.block, 0, 0)))) continue;
      for (std::int64_t head = 0; head < c.h_kv; ++head) {
        for (std::int64_t e = 0; e < c.d; ++e) {
          a.k->set(k(page, t % c.block, head, e), random.normal());
          a.v->set(v(page, t % c.block, head, e), random.normal());
        }
      }
    }
  }
}

// Hides all keys of head 0 (of the first sequence, if the bias is one for each), and some keys of all heads, which then
// hold NaN.
void hide(const Config& c, Random& random, const Arrays& a) {
  const std::int64_t columns = c.extent, rows = a.bias->size() / columns;
  for (std::int64_t row = 0; row < rows; ++row) {
    const bool whole = row % (c.h_q * c.queries()) < c.queries();
    for (std::int64_t j = 0; j < columns; ++j)
      if (whole || j % 5 == 2 || random.below(7) == 0) a.bias->set(row * columns + j, -kInf);
  }
  const CachePosition k(c, true), v(c, false);
  for (std::int64_t n = 0; n < c.b(); ++n) {
    for (std::int64_t t = 2; t < std::min(c.context(n), columns); t += 5) {
      const auto page = static_cast<std::int64_t>(a.tables->get(n * c.table_length() + t / c.block));
      a.k->set(k(page, t % c.block, 0, 3), kNan);
      a.v->set(v(page, t % c.block, 0, 3), kNan);
    }
  }
}

// What one row sees of one key: [visible, logit, the sums of its dot products with absolute values, times |scale|].
struct Reference {
  Config c;
  Arrays a;
  std::vector<double> q = values(a.q), k = values(a.k), v = values(a.v), tables = values(a.tables), u = values(a.u),
                      bias = values(a.bias), pos_bias_v = values(a.pos_bias_v), r = values(a.r),
                      slopes = values(a.slopes);
  CachePosition k_at = CachePosition(c, true), v_at = CachePosition(c, false);

  static double at(const std::vector<double>& x, std::int64_t i) { return x[static_cast<std::size_t>(i)]; }

  [[nodiscard]] std::optional<std::int64_t> page(std::int64_t n, std::int64_t key) const {
    const auto number = static_cast<std::int64_t>(at(tables, n * c.table_length() + key / c.block));
    if (number < 0 || number >= a.k->shape()[0]) return std::nullopt;
    return number;
  }

  // {bias of a key, magnitude}; the bias is -inf where it hides the key.
  [[nodiscard]] std::pair<double, double> bias_of(std::int64_t n, std::int64_t i, std::int64_t h, std::int64_t key,
                                                  std::int64_t delta) const {
    if (c.bias == BiasForm::kNone) return {0, 0};
    std::int64_t column = c.bias == BiasForm::kKey ? key : delta;
    if (column >= c.extent) {
      if (c.out_of_range == HOPWELL_OUT_OF_RANGE_ZERO) return {0, 0};
      if (c.out_of_range == HOPWELL_OUT_OF_RANGE_NEG_INF) return {-kInf, 0};
      column = c.extent - 1;
    }
    const std::int64_t sequence = c.shared_bias ? 0 : n;
    double sum = 0, magnitude = 0;
    switch (c.bias) {
      case BiasForm::kKey:
        sum = at(bias, ((sequence * c.h_q + h) * c.queries() + i) * c.extent + column);
        break;
      case BiasForm::kDistance:
        sum = at(bias, (sequence * c.h_q + h) * c.extent + column);
        break;
      default:
        for (std::int64_t e = 0; e < c.d; ++e) {
          const double query =
              at(q, ((n * c.queries() + i) * c.h_q + h) * c.d + e) + (c.no_v ? 0 : at(pos_bias_v, h * c.d + e));
          const double product = query * at(r, ((c.shared_bias ? 0 : h) * c.extent + column) * c.d + e);
          sum += product, magnitude += std::abs(product);
        }
        return {sum, magnitude};
    }
    return {sum, std::abs(sum)};
  }

  void row(std::int64_t n, std::int64_t i, std::int64_t h, Output& out, Output* lse) const {
    const std::int64_t position = c.context(n) - c.queries() + i, head = h / (c.h_q / c.h_kv);
    std::vector<std::int64_t> keys;
    std::vector<double> logits;
    double peak = -kInf, largest = 0, total = 0;
    for (std::int64_t key = 0; key <= position; ++key) {
      const std::int64_t delta = position - key;
      if (c.window > 0 && delta >= c.window) continue;
      const auto in = page(n, key);
      const auto [term, term_magnitude] = bias_of(n, i, h, key, delta);
      if (!in || term == -kInf) continue;
      double dot = 0, magnitude = term_magnitude;
      for (std::int64_t e = 0; e < c.d; ++e) {
        const double query = at(q, ((n * c.queries() + i) * c.h_q + h) * c.d + e) + (c.u ? at(u, h * c.d + e) : 0);
        const double product = query * at(k, k_at(*in, key % c.block, head, e));
        dot += product, magnitude += std::abs(product);
      }
      const double scale = static_cast<double>(c.scale),
                   content = c.post_scale ? scale * dot + term : scale * (dot + term);
      logits.push_back(content - (c.alibi ? at(slopes, h) * static_cast<double>(delta) : 0));
      keys.push_back(key);
      peak = std::max(peak, logits.back());
      largest = std::max(largest, std::abs(scale) * magnitude);
    }
    for (const double logit : logits) total += std::exp(logit - peak);
    const std::int64_t to = (n * c.queries() + i) * c.h_q + h;
    for (std::size_t j = 0; j < keys.size(); ++j) {
      const double p = std::exp(logits[j] - peak) / total;
      for (std::int64_t e = 0; e < c.d; ++e) {
        const double product = p * at(v, v_at(*page(n, keys[j]), keys[j] % c.block, head, e));
        out.expected[static_cast<std::size_t>(to * c.d + e)] += product;
        out.magnitude[static_cast<std::size_t>(to * c.d + e)] += std::abs(product);
      }
    }
    if (lse == nullptr) return;
    lse->expected[static_cast<std::size_t>(to)] = keys.empty() ? -kInf : peak + std::log(total);
    lse->magnitude[static_cast<std::size_t>(to)] = largest / 2;  // 2^-22 of it
  }

  void operator()(Instance& instance) const {
    Output& out = instance.outputs.front();
    Output* lse = instance.outputs.size() > 1 ? &instance.outputs.back() : nullptr;
    const auto rows = static_cast<std::size_t>(c.b() * c.queries() * c.h_q);
    out.expected.assign(rows * static_cast<std::size_t>(c.d), 0);
    out.magnitude = out.expected;
    if (lse != nullptr) lse->expected.assign(rows, 0), lse->magnitude = lse->expected;
    for (std::int64_t n = 0; n < c.b(); ++n)
      for (std::int64_t i = 0; i < c.queries(); ++i)
        for (std::int64_t h = 0; h < c.h_q; ++h) row(n, i, h, out, lse);
  }
};

void call(const Config& c, const Arrays& a, const char* backend, Stream stream) {
  std::deque<Tensor> views;
  const auto view = [&](const Array* array) -> const DLTensor* {
    if (array == nullptr) return nullptr;
    return views.emplace_back(array->view());
  };
  const bool distance = c.bias == BiasForm::kDistance;
  hopwell::paged_attention({.q = view(a.q),
                            .k_cache = view(a.k),
                            .v_cache = view(a.v),
                            .block_tables = view(a.tables),
                            .context_lens = view(a.lengths),
                            .scale = c.scale,
                            .layout = c.layout,
                            .pos_bias_u = view(a.u),
                            .bias = view(a.bias),
                            .bias_kind = distance ? HOPWELL_BIAS_DISTANCE : HOPWELL_BIAS_KEY,
                            .out_of_range = c.out_of_range,
                            .post_scale = c.post_scale,
                            .pos_bias_v = view(a.pos_bias_v),
                            .r = view(a.r),
                            .alibi_slopes = view(a.slopes),
                            .window = c.window,
                            .out = view(a.out),
                            .lse = view(a.lse),
                            .backend = backend},
                           stream);
}

// The least traffic: visible keys and values once, the rest once.
void count_work(const Config& c, Instance& instance) {
  double keys = 0;
  for (std::int64_t n = 0; n < c.b(); ++n) keys += static_cast<double>(c.context(n) - c.first_seen(n));
  const auto d = static_cast<double>(c.d);
  instance.bytes = 2 * keys * static_cast<double>(c.h_kv) * d * static_cast<double>(size_of(c.dtype));
  for (const Array& array : instance.arrays)
    if (array.name() != "k_cache" && array.name() != "v_cache")
      instance.bytes += static_cast<double>(array.size()) * static_cast<double>(size_of(array.dtype()));
  instance.flops = (c.bias == BiasForm::kFused ? 6 : 4) * keys * static_cast<double>(c.h_q * c.queries()) * d;
}

// All the arrays, allocated; q and what is added to it filled.
Arrays add_arrays(const Config& c, Random& random, Instance& instance, std::int64_t blocks) {
  Arrays a;
  const DType like_q = c.bias_dtype.value_or(c.dtype);
  const auto array = [&](const char* name, DType dtype, const std::vector<std::int64_t>& shape, std::size_t dim,
                         std::int64_t gap) {
    return &instance.add(
        {name, dtype, shape, c.strided ? strides_with_gap(shape, dim, gap) : std::vector<std::int64_t>{}});
  };
  std::vector<std::int64_t> rows = {c.b(), c.h_q};
  if (c.q_len > 0) rows.insert(rows.begin() + 1, c.q_len);
  std::vector<std::int64_t> vectors = rows;
  vectors.push_back(c.d);
  a.q = &array("q", c.dtype, vectors, vectors.size() - 2, 24)->fill_normal(random, c.q_spread);
  a.k = array("k_cache", c.dtype, cache_shape(c, blocks, true), 0, 104);
  a.v = array("v_cache", c.dtype, cache_shape(c, blocks, false), 0, 72);
  a.tables = array("block_tables", DType::kInt32, {c.b(), c.table_length()}, 0, 3);
  a.lengths = array("context_lens", DType::kInt32, {c.b()}, 0, 1);
  for (std::int64_t n = 0; n < c.b(); ++n)
    a.lengths->set(n, static_cast<double>(c.lengths[static_cast<std::size_t>(n)]));
  if (c.u) a.u = &array("pos_bias_u", like_q, {c.h_q, c.d}, 0, 8)->fill_normal(random);
  const std::int64_t sequences = c.shared_bias ? 1 : c.b();
  if (c.bias == BiasForm::kKey) a.bias = array("bias", like_q, {sequences, c.h_q, c.queries(), c.extent}, 1, 5);
  if (c.bias == BiasForm::kDistance) a.bias = array("bias", like_q, {sequences, c.h_q, c.extent}, 1, 5);
  if (a.bias != nullptr) a.bias->fill_normal(random);
  if (c.bias == BiasForm::kFused) {
    a.r = &array("r", like_q, {c.shared_bias ? 1 : c.h_q, c.extent, c.d}, 1, 16)->fill_normal(random);
    if (!c.no_v) a.pos_bias_v = &array("pos_bias_v", like_q, {c.h_q, c.d}, 0, 8)->fill_normal(random);
  }
  if (c.alibi) {
    a.slopes = array("alibi_slopes", DType::kFloat32, {c.h_q}, 0, 1);
    for (std::int64_t h = 0; h < c.h_q; ++h) a.slopes->set(h, std::exp2(-static_cast<double>(h + 1)));
  }
  a.out = array("out", c.dtype, vectors, vectors.size() - 2, 40);
  a.lse = array("lse", DType::kFloat32, rows, 0, 2);
  return a;
}

Instance make(const Config& c, Random& random) {
  Instance instance;
  std::int64_t blocks = 4;  // two for kShared, two that stay NaN
  for (std::int64_t n = 0; n < c.b(); ++n) blocks += (c.context(n) + c.block - 1) / c.block;
  if (c.pages == Pages::kRepeated) blocks = 24;
  const Arrays a = add_arrays(c, random, instance, blocks);
  fill_tables(c, random, *a.tables, blocks);
  fill_caches(c, random, a, blocks);
  if (c.hidden) hide(c, random, a);
  Tolerance out{.norm = 1e-5};
  if (c.dtype == DType::kFloat16) out = {.norm = 1e-3};
  if (c.dtype == DType::kBFloat16) out = {.norm = 4e-3, .absolute = 8e-3, .relative = 3.0 / 128};
  instance.expect(*a.out, out);
  instance.expect(*a.lse, {.absolute = 1e-6, .relative = 1e-6});
  instance.call = [c, a](const char* backend, Stream stream) { call(c, a, backend, stream); };
  instance.reference = [c, a](Instance& to) { Reference{c, a}(to); };
  count_work(c, instance);
  return instance;
}

constexpr std::pair<const char*, DType> kDTypes[] = {
    {"fp32", DType::kFloat32}, {"fp16", DType::kFloat16}, {"bf16", DType::kBFloat16}};
constexpr std::pair<const char*, hopwell_cache_layout> kLayouts[] = {
    {"nhd", HOPWELL_CACHE_NHD}, {"hnd", HOPWELL_CACHE_HND}, {"vllm", HOPWELL_CACHE_VLLM}};

// Every layout with every type: plain, and with all that can be switched on at once.
void add_layouts(std::vector<Config>& all) {
  for (const auto& [layout_name, layout] : kLayouts) {
    for (const auto& [type_name, dtype] : kDTypes) {
      const std::string name = std::string(layout_name) + "_" + type_name;
      all.push_back({.name = name, .dtype = dtype, .layout = layout});
      all.push_back({.name = name + "_everything",
                     .dtype = dtype,
                     .layout = layout,
                     .lengths = {0, 1, 2, 3, 31, 32, 33, 300},
                     .q_len = 3,
                     .h_q = 6,
                     .h_kv = 2,
                     .d = 40,
                     .window = 270,
                     .bias = BiasForm::kFused,
                     .extent = 250,
                     .u = true,
                     .alibi = true,
                     .strided = true});
      all.push_back({.name = name + "_block_5_bad_pages",
                     .dtype = dtype,
                     .layout = layout,
                     .lengths = {4, 5, 6, 19, 64},
                     .d = 32,
                     .block = 5,
                     .window = 13,
                     .pages = Pages::kBad});
    }
  }
}

void add_shapes(std::vector<Config>& all) {
  const std::vector<std::int64_t> lengths = {7, 50};
  for (const std::int64_t d : {32, 40, 56, 128, 256})
    all.push_back({.name = "d_" + std::to_string(d), .lengths = lengths, .d = d});
  for (const auto& [layout_name, layout] : kLayouts)
    for (const std::int64_t block : {1, 8, 24, 256})
      all.push_back({.name = std::string(layout_name) + "_block_" + std::to_string(block),
                     .dtype = DType::kFloat16,
                     .layout = layout,
                     .lengths = {0, 1, block - 1, block, block + 1, 70},
                     .block = block});
  const std::pair<std::int64_t, std::int64_t> heads[] = {{1, 1}, {5, 5}, {8, 1}, {12, 4}, {96, 96}, {128, 1}};
  for (const auto& [h_q, h_kv] : heads)
    all.push_back({.name = "h_q_" + std::to_string(h_q) + "_h_kv_" + std::to_string(h_kv),
                   .dtype = DType::kBFloat16,
                   .lengths = lengths,
                   .h_q = h_q,
                   .h_kv = h_kv});
  for (const std::int64_t q_len : {1, 2, 7, 16})
    all.push_back({.name = "q_len_" + std::to_string(q_len),
                   .lengths = {0, 1, 2, 15, 16, 17, 300},
                   .q_len = q_len,
                   .h_q = 10,
                   .h_kv = 2,
                   .d = 32});
  all.push_back(
      {.name = "q_len_16_h_q_16_h_kv_1", .lengths = {3, 290}, .q_len = 16, .h_q = 16, .h_kv = 1, .d = 32, .u = true});
  for (const auto& [type_name, dtype] : kDTypes) {
    const std::string prefix = std::string("decoder_") + type_name;
    all.push_back({.name = prefix + "_h16_d64", .dtype = dtype, .lengths = {1000}, .h_q = 16, .h_kv = 16});
    all.push_back(
        {.name = prefix + "_h32_d128", .dtype = dtype, .lengths = {130, 257}, .h_q = 32, .h_kv = 32, .d = 128});
    all.push_back({.name = prefix + "_h32_h_kv_8_d128_vllm",
                   .dtype = dtype,
                   .layout = HOPWELL_CACHE_VLLM,
                   .lengths = {511, 64},
                   .h_q = 32,
                   .h_kv = 8,
                   .d = 128});
  }
  all.push_back({.name = "no_sequences", .lengths = {}});
  all.push_back({.name = "no_blocks", .lengths = {3, 0, 1}, .max_blocks = 0});
}

void add_biases(std::vector<Config>& all) {
  const std::pair<const char*, BiasForm> forms[] = {
      {"key", BiasForm::kKey}, {"distance", BiasForm::kDistance}, {"fused", BiasForm::kFused}};
  const std::pair<const char*, hopwell_out_of_range> rules[] = {{"zero", HOPWELL_OUT_OF_RANGE_ZERO},
                                                                {"clamp", HOPWELL_OUT_OF_RANGE_CLAMP},
                                                                {"neg_inf", HOPWELL_OUT_OF_RANGE_NEG_INF}};
  for (const auto& [form_name, form] : forms) {
    for (const auto& [rule_name, rule] : rules) {
      const std::string name = std::string("bias_") + form_name + "_" + rule_name;
      all.push_back({.name = name, .lengths = {1, 39, 40, 41, 330}, .q_len = 2, .bias = form, .out_of_range = rule});
      all.push_back({.name = name + "_window_post_scale",
                     .lengths = {2, 90, 290},
                     .scale = -0.2F,
                     .window = 60,
                     .bias = form,
                     .out_of_range = rule,
                     .shared_bias = true,
                     .post_scale = true,
                     .u = true});
    }
    const std::string name = std::string("bias_") + form_name;
    for (const auto& [type_name, dtype] : kDTypes) {
      if (form == BiasForm::kFused && dtype == DType::kBFloat16) continue;  // r is like q, or fp32
      all.push_back({.name = name + "_" + type_name + "_q_fp16",
                     .dtype = DType::kFloat16,
                     .lengths = {30, 5},
                     .bias = form,
                     .bias_dtype = dtype});
    }
    all.push_back({.name = name + "_extent_0", .lengths = {1, 20}, .bias = form, .extent = 0, .u = true});
    all.push_back({.name = name + "_extent_1",
                   .lengths = {1, 20},
                   .bias = form,
                   .out_of_range = HOPWELL_OUT_OF_RANGE_CLAMP,
                   .extent = 1});
    all.push_back({.name = name + "_extent_0_neg_inf",
                   .lengths = {1, 20},
                   .bias = form,
                   .out_of_range = HOPWELL_OUT_OF_RANGE_NEG_INF,
                   .extent = 0});
  }
  all.push_back({.name = "bias_fused_no_v", .lengths = {30, 5}, .bias = BiasForm::kFused, .no_v = true});
  all.push_back({.name = "pos_bias_u_fp32_q_bf16",
                 .dtype = DType::kBFloat16,
                 .lengths = {30, 5},
                 .bias_dtype = DType::kFloat32,
                 .u = true});
  for (const auto& [layout_name, layout] : kLayouts)
    all.push_back({.name = std::string("bias_hides_keys_") + layout_name,
                   .layout = layout,
                   .lengths = {0, 1, 40, 33},
                   .q_len = 2,
                   .bias = BiasForm::kKey,
                   .hidden = true});
  all.push_back({.name = "bias_hides_keys_scale_negative",
                 .lengths = {40},
                 .scale = -0.5F,
                 .bias = BiasForm::kKey,
                 .hidden = true});
  all.push_back({.name = "bias_hides_keys_scale_0",
                 .lengths = {40},
                 .scale = 0,
                 .bias = BiasForm::kKey,
                 .shared_bias = true,
                 .hidden = true});
  all.push_back({.name = "alibi", .lengths = {1, 20, 300}, .q_len = 2, .alibi = true});
  all.push_back({.name = "alibi_distance", .lengths = {1, 20, 300}, .bias = BiasForm::kDistance, .alibi = true});
}

void add_lengths(std::vector<Config>& all) {
  for (const auto& [layout_name, layout] : kLayouts)
    for (const std::int64_t window : {1, 4, 17, 1000})
      all.push_back({.name = std::string("window_") + std::to_string(window) + "_" + layout_name,
                     .layout = layout,
                     .lengths = {0, 1, 2, 18, 40, 300},
                     .q_len = 3,
                     .d = 32,
                     .window = window});
  all.push_back({.name = "window_huge", .lengths = {0, 1, 40}, .q_len = 16, .window = INT64_MAX});
  all.push_back({.name = "lengths_out_of_range", .lengths = {INT_MAX, INT_MIN, -1, 49, 48}, .max_blocks = 3});
  all.push_back(
      {.name = "shared_pages", .lengths = {33, 40, 50, 16}, .pages = Pages::kShared, .bias = BiasForm::kDistance});
  all.push_back({.name = "repeated_pages", .lengths = {33, 200}, .pages = Pages::kRepeated, .bias = BiasForm::kKey});
  std::vector<std::int64_t> ragged(9, 512);
  ragged[4] = 65536;
  for (const auto& [type_name, dtype] : kDTypes)
    all.push_back({.name = std::string("one_65536_among_512_") + type_name,
                   .dtype = dtype,
                   .lengths = ragged,
                   .h_q = 2,
                   .d = 32,
                   .pages = Pages::kRepeated});
  all.push_back({.name = "context_2_to_the_20",
                 .dtype = DType::kFloat16,
                 .lengths = {1 << 20},
                 .h_q = 1,
                 .h_kv = 1,
                 .d = 32,
                 .block = 256,
                 .pages = Pages::kRepeated});
  all.push_back({.name = "context_2_to_the_20_vllm_distance",
                 .layout = HOPWELL_CACHE_VLLM,
                 .lengths = {1 << 20},
                 .h_q = 1,
                 .h_kv = 1,
                 .d = 32,
                 .block = 256,
                 .pages = Pages::kRepeated,
                 .bias = BiasForm::kDistance,
                 .extent = 1 << 16});
  all.push_back({.name = "large_logits", .lengths = {1, 20, 300}, .scale = 1, .q_spread = 1000});
  all.push_back(
      {.name = "large_logits_bf16", .dtype = DType::kBFloat16, .lengths = {1, 20, 300}, .scale = 1, .q_spread = 1000});
}

std::string setting(const Settings& settings, const std::string& key, const std::string& allowed) {
  const auto at = settings.find(key);
  const std::string value = at == settings.end() ? "" : at->second;
  if ((" " + allowed + " ").find(" " + value + " ") == std::string::npos || value.empty()) {
    throw std::invalid_argument("setting '" + key + "' must be one of: " + allowed + "; got '" + value + "'");
  }
  return value;
}

// Random numbers at memory speed: the first 2^18 elements again and again.
void fill_fast(Array& array, Random& random) {
  const std::int64_t period = std::min<std::int64_t>(array.size(), 1 << 18);
  const auto width = static_cast<std::int64_t>(size_of(array.dtype()));
  for (std::int64_t i = 0; i < period; ++i) array.set(i, random.normal());
  for (std::int64_t done = period; done < array.size(); done += period)
    std::memcpy(array.data() + done * width, array.data(),
                static_cast<std::size_t>(std::min(period, array.size() - done) * width));
}

Instance bench(const Settings& settings, Random& random) {
  Config c;
  const std::string dtype = setting(settings, "dtype", "fp32 fp16 bf16"),
                    layout = setting(settings, "layout", "nhd hnd vllm");
  const std::string bias = setting(settings, "bias", "none key distance fused");
  for (const auto& [name, value] : kDTypes)
    if (dtype == name) c.dtype = value;
  for (const auto& [name, value] : kLayouts)
    if (layout == name) c.layout = value;
  c.bias = bias == "key"        ? BiasForm::kKey
           : bias == "distance" ? BiasForm::kDistance
           : bias == "fused"    ? BiasForm::kFused
                                : BiasForm::kNone;
  c.lengths.assign(static_cast<std::size_t>(number(settings, "b")), number(settings, "ctx"));
  if (c.lengths.empty()) throw std::invalid_argument("setting 'b' must be at least 1; got '0'");
  c.lengths[c.lengths.size() / 2] = std::max(c.lengths.front(), number(settings, "longest"));
  c.q_len = number(settings, "q_len"), c.h_q = number(settings, "h_q"), c.h_kv = number(settings, "h_kv");
  c.d = number(settings, "d"), c.block = number(settings, "block"), c.window = number(settings, "window");
  c.u = bias == "fused";
  c.shared_bias = c.bias == BiasForm::kKey || c.bias == BiasForm::kDistance;
  c.extent = *std::max_element(c.lengths.begin(), c.lengths.end());
  if (c.block < 1) throw std::invalid_argument("setting 'block' must be at least 1; got '0'");
  Instance instance;
  std::int64_t blocks = 4;
  for (std::int64_t n = 0; n < c.b(); ++n) blocks += (c.context(n) + c.block - 1) / c.block;
  const Arrays a = add_arrays(c, random, instance, blocks);
  fill_tables(c, random, *a.tables, blocks);
  fill_fast(*a.k, random);
  fill_fast(*a.v, random);
  instance.call = [c, a](const char* backend, Stream stream) { call(c, a, backend, stream); };
  count_work(c, instance);
  return instance;
}

// The bars of the CPU, then the shapes that were measured on an H200.
std::vector<std::pair<std::string, Settings>> shapes() {
  const auto shape = [](const char* dtype, const char* layout, std::int64_t b, std::int64_t ctx, std::int64_t longest,
                        std::int64_t h_q, std::int64_t h_kv, std::int64_t d, const char* bias) -> Settings {
    const auto text = [](std::int64_t n) { return std::to_string(n); };
    return {{"dtype", dtype}, {"layout", layout}, {"b", text(b)},       {"ctx", text(ctx)}, {"longest", text(longest)},
            {"q_len", "1"},   {"h_q", text(h_q)}, {"h_kv", text(h_kv)}, {"d", text(d)},     {"block", "16"},
            {"window", "0"},  {"bias", bias}};
  };
  return {{"b8_ctx4096_h16_d64_fp32", shape("fp32", "nhd", 8, 4096, 0, 16, 16, 64, "none")},
          {"b8_ctx4096_h16_d64_bf16", shape("bf16", "nhd", 8, 4096, 0, 16, 16, 64, "none")},
          {"b8_ctx4096_h16_d64_fp32_hnd", shape("fp32", "hnd", 8, 4096, 0, 16, 16, 64, "none")},
          {"b8_ctx4096_h16_d64_bf16_hnd", shape("bf16", "hnd", 8, 4096, 0, 16, 16, 64, "none")},
          {"b8_ctx4096_h16_d64_fp32_vllm", shape("fp32", "vllm", 8, 4096, 0, 16, 16, 64, "none")},
          {"b8_ctx4096_h16_d64_bf16_vllm", shape("bf16", "vllm", 8, 4096, 0, 16, 16, 64, "none")},
          {"b8_ctx4096_h16_d64_bf16_distance", shape("bf16", "nhd", 8, 4096, 0, 16, 16, 64, "distance")},
          {"b8_ctx4096_h16_d64_bf16_fused", shape("bf16", "nhd", 8, 4096, 0, 16, 16, 64, "fused")},
          {"b1_ctx1000_h16_d64", shape("bf16", "nhd", 1, 1000, 0, 16, 16, 64, "distance")},
          {"b1_ctx32768_h16_d64", shape("bf16", "nhd", 1, 32768, 0, 16, 16, 64, "distance")},
          {"b32_ctx4096_h16_d64", shape("bf16", "nhd", 32, 4096, 0, 16, 16, 64, "distance")},
          {"b1_ctx65536_h32_d128", shape("bf16", "nhd", 1, 65536, 0, 32, 32, 128, "distance")},
          {"b64_ctx512_one_65536_h16_d64", shape("bf16", "nhd", 64, 512, 65536, 16, 16, 64, "distance")},
          {"b64_ctx512_one_65536_h32_d128", shape("bf16", "nhd", 64, 512, 65536, 32, 32, 128, "distance")},
          {"b16_ctx8192_h32_h_kv8_d128", shape("bf16", "nhd", 16, 8192, 0, 32, 8, 128, "none")}};
}

}  // namespace

Suite paged_attention() {
  std::vector<Config> all;
  add_layouts(all);
  add_shapes(all);
  add_biases(all);
  add_lengths(all);
  Suite suite{"paged_attention", {}, shapes(), bench};
  for (const Config& c : all)
    suite.cases.push_back({suite.op, c.name, [c](Random& random) { return make(c, random); }});
  return suite;
}

}  // namespace hopwell::cases
