#include "paged_attention_case.hpp"

#include <array>
#include <climits>
#include <cmath>
#include <numeric>
#include <optional>

#include "tile/cpu/parallel.hpp"

namespace hopwell::cases::paged {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

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
  if (array == nullptr) return {};
  std::vector<double> all(static_cast<std::size_t>(array->size()));
  constexpr std::int64_t kPart = 1 << 14;
  cpu::parallel_for((array->size() + kPart - 1) / kPart, [&](std::int64_t part) {
    for (std::int64_t i = part * kPart; i < std::min((part + 1) * kPart, array->size()); ++i)
      all[static_cast<std::size_t>(i)] = array->get(i);
  });
  return all;
}

// Row-major strides with a gap of `gap` elements in the first dimension (for q and out, in the second to last).
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

// Random keys and values for keys that a query sees; NaN and infinities everywhere else.
void fill_caches(const Config& c, Random& random, const Arrays& a, std::int64_t blocks) {
  const double unseen[] = {kNan, kInf, -kInf};
  const CachePosition k(c, true), v(c, false);
  for (std::int64_t page = 0; page < blocks; ++page)
    for (std::int64_t slot = 0; slot < c.block; ++slot)
      for (std::int64_t head = 0; head < c.h_kv; ++head)
        for (std::int64_t e = 0; e < c.d; ++e) {
          a.k->set(k(page, slot, head, e), unseen[e % 3]);
          a.v->set(v(page, slot, head, e), unseen[e % 3]);
        }
  const std::int64_t width = c.table_length();
  for (std::int64_t n = 0; n < c.b(); ++n) {
    for (std::int64_t t = c.first_seen(n); t < c.context(n); ++t) {
      const auto page = static_cast<std::int64_t>(a.tables->get(n * width + t / c.block));
      if (page < 0 || page >= blocks || !std::isnan(a.k->get(k(page, t % c.block, 0, 0)))) continue;
      for (std::int64_t head = 0; head < c.h_kv; ++head) {
        for (std::int64_t e = 0; e < c.d; ++e) {
          a.k->set(k(page, t % c.block, head, e), c.constant ? -8 : random.normal());
          a.v->set(v(page, t % c.block, head, e), c.constant ? 0.1 : random.normal());
        }
      }
    }
  }
}

// Hides all keys of head 0 (of the first sequence only, if each sequence has its own bias), and some keys of all heads.
// Hidden keys hold NaN.
void hide(const Config& c, Random& random, const Arrays& a) {
  const std::int64_t columns = c.extent, rows = a.bias->size() / columns;
  for (std::int64_t row = 0; row < rows; ++row) {
    const bool whole = row % (c.h_q * c.queries()) < c.queries();
    for (std::int64_t j = 0; j < columns; ++j)
      if (whole || (j % 5 == 2 && !(c.partly && row % 2 == 1)) || random.below(7) == 0)
        a.bias->set(row * columns + j, -kInf);
  }
  const CachePosition k(c, true), v(c, false);
  for (std::int64_t n = 0; n < c.b(); ++n) {
    for (std::int64_t t = 2; t < std::min(c.context(n), columns); t += 5) {
      const auto page = static_cast<std::int64_t>(a.tables->get(n * c.table_length() + t / c.block));
      if (!c.partly) a.k->set(k(page, t % c.block, 0, 3), kNan);
      a.v->set(v(page, t % c.block, 0, 3), kNan);
    }
  }
}

// Values of +-inf and NaN in the last visible keys of a sequence, so that the last query sees all of them and the first
// query does not.
void make_infinite(const Config& c, const Arrays& a, std::int64_t blocks) {
  const CachePosition v(c, false);
  for (std::int64_t n = 0; n < c.b(); ++n) {
    const auto set = [&](std::int64_t key, std::int64_t e, double value) {
      const std::int64_t context = c.context(n);
      if (key < c.first_seen(n) || key >= context) return;
      const auto page = static_cast<std::int64_t>(a.tables->get(n * c.table_length() + key / c.block));
      for (std::int64_t head = 0; page >= 0 && page < blocks && head < c.h_kv; ++head)
        a.v->set(v(page, key % c.block, head, e + head), value);
    };
    const std::int64_t first = c.first_seen(n), last = c.context(n) - 1;
    set(last, 0, kInf), set(last - 1, 2, -kInf), set(last, 4, kNan), set(last - 2, 6, kInf);
    set(last, 8, kInf), set(last - 1, 8, -kInf);  // NaN
    set(first, 10, -kInf), set(first + 1, 12, kNan), set((first + last) / 2, 14, kInf);
  }
}

// One row and one key: [visible, logit, the sums of its dot products with absolute values, times |scale|].
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
    struct Key {
      std::int64_t page, slot;
    };
    std::vector<Key> keys;
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
      keys.push_back({*in, key % c.block});
      peak = std::max(peak, logits.back());
      largest = std::max(largest, std::abs(scale) * magnitude);
    }
    for (const double logit : logits) total += std::exp(logit - peak);
    const std::int64_t to = (n * c.queries() + i) * c.h_q + h;
    for (std::size_t j = 0; j < keys.size(); ++j) {
      const double p = std::exp(logits[j] - peak) / total;
      for (std::int64_t e = 0; e < c.d; ++e) {
        const double value = at(v, v_at(keys[j].page, keys[j].slot, head, e));
        const double product = std::isfinite(value) ? p * value : value;  // p is positive, even if it rounds to 0
        out.expected[static_cast<std::size_t>(to * c.d + e)] += product;
        out.magnitude[static_cast<std::size_t>(to * c.d + e)] += std::abs(product);
      }
    }
    if (lse == nullptr) return;
    lse->expected[static_cast<std::size_t>(to)] = keys.empty() ? -kInf : peak + std::log(total);
    lse->magnitude[static_cast<std::size_t>(to)] = largest;
  }

  void operator()(Instance& instance) const {
    Output& out = instance.outputs.front();
    Output* lse = instance.outputs.size() > 1 ? &instance.outputs.back() : nullptr;
    const auto rows = static_cast<std::size_t>(c.b() * c.queries() * c.h_q);
    out.expected.assign(rows * static_cast<std::size_t>(c.d), 0);
    out.magnitude = out.expected;
    if (lse != nullptr) lse->expected.assign(rows, 0), lse->magnitude = lse->expected;
    cpu::parallel_for(c.b() * c.queries() * c.h_q, [&](std::int64_t item) {
      const std::int64_t query = item / c.h_q;
      row(query / c.queries(), query % c.queries(), item % c.h_q, out, lse);
    });
  }
};

}  // namespace

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

Tensor FarCache::of(const Array& cache) {
  constexpr std::int64_t kApart = std::int64_t{1} << 27;
  std::vector<std::int64_t> strides(cache.shape().size(), 1);
  for (std::size_t i = strides.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * cache.shape()[i + 1];
  const auto width = size_of(cache.dtype()), page = static_cast<std::size_t>(strides[0]) * width;
  strides[0] = kApart;
  if (!memory) {
    const std::size_t apart = static_cast<std::size_t>(kApart) * width;
    memory = cuda::allocate(static_cast<std::size_t>(cache.shape()[0]) * apart);
    for (std::int64_t i = 0; i < cache.shape()[0]; ++i)
      cuda::copy_to_device(memory.get() + static_cast<std::size_t>(i) * apart,
                           cache.data() + static_cast<std::size_t>(i) * page, page);
  }
  return {memory.get(), cache.view()->dtype, cache.shape(), strides, {kDLCUDA, cuda::device_in_use()}};
}

void call(const Config& c, const Arrays& a, Workspace& workspace, const char* backend, Stream stream) {
  const auto view = [](const Array* array) { return array == nullptr ? Tensor() : array->view(); };
  const std::optional<std::int64_t> window = c.window > 0 ? std::optional(c.window) : std::nullopt;
  const bool distance = c.bias == BiasForm::kDistance;
  const PagedAttentionArgs args = {.q = view(a.q),
                                   .k_cache = a.far_k ? a.far_k->of(*a.k) : view(a.k),
                                   .v_cache = a.far_v ? a.far_v->of(*a.v) : view(a.v),
                                   .block_tables = view(a.tables),
                                   .context_lens = view(a.lengths),
                                   .scale = c.scale,
                                   .layout = c.layout,
                                   .pos_bias_u = view(a.u),
                                   .bias = view(a.bias),
                                   .bias_kind = distance ? HOPWELL_BIAS_DISTANCE : HOPWELL_BIAS_KEY,
                                   .out_of_range = c.out_of_range,
                                   .pre_scale = !c.post_scale,
                                   .pos_bias_v = view(a.pos_bias_v),
                                   .r = view(a.r),
                                   .alibi_slopes = view(a.slopes),
                                   .window = window,
                                   .out = view(a.out),
                                   .lse = view(a.lse),
                                   .backend = backend};
  run_with_workspace(hopwell::paged_attention, paged_attention_workspace_bytes, workspace, args, stream);
}

void count_work(const Config& c, Instance& instance) {
  double keys = 0, pages = 0;
  for (std::int64_t n = 0; n < c.b(); ++n) {
    keys += static_cast<double>(c.context(n) - c.first_seen(n));
    const std::int64_t pages_of_sequence = (c.context(n) + c.block - 1) / c.block;
    pages += static_cast<double>(pages_of_sequence);
  }
  const auto d = static_cast<double>(c.d);
  instance.bytes = 2 * keys * static_cast<double>(c.h_kv) * d * static_cast<double>(size_of(c.dtype)) + 4 * pages;
  for (const Array& array : instance.arrays) {
    if (array.name() == "k_cache" || array.name() == "v_cache" || array.name() == "block_tables") continue;
    auto elements = static_cast<double>(array.size());
    if (array.name() == "bias" && c.bias == BiasForm::kKey)  // memory past a sequence's keys is not read
      elements = std::min(elements, keys * static_cast<double>(c.h_q * c.queries()));
    instance.bytes += elements * static_cast<double>(size_of(array.dtype()));
  }
  instance.flops = (c.bias == BiasForm::kFused ? 6 : 4) * keys * static_cast<double>(c.h_q * c.queries()) * d;
}

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
  if (c.constant) a.q->fill(8);
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
  Arrays a = add_arrays(c, random, instance, blocks);
  if (c.far) a.far_k = std::make_shared<FarCache>(), a.far_v = std::make_shared<FarCache>();
  fill_tables(c, random, *a.tables, blocks);
  fill_caches(c, random, a, blocks);
  if (c.infinite) make_infinite(c, a, blocks);
  if (c.hidden) hide(c, random, a);
  Tolerance out{.norm = 1e-5};
  if (c.dtype == DType::kFloat16) out = {.norm = 1e-3};
  if (c.dtype == DType::kBFloat16) out = {.norm = 4e-3, .absolute = 8e-3, .relative = 3.0 / 128};
  instance.expect(*a.out, out);
  instance.expect(*a.lse, kLogarithm).on_gpus = kLogarithmOnGpus;
  instance.call = [c, a, workspace = instance.workspace.get()](const char* backend, Stream stream) {
    call(c, a, *workspace, backend, stream);
  };
  instance.reference = [c, a](Instance& to) { Reference{c, a}(to); };
  count_work(c, instance);
  return instance;
}

}  // namespace hopwell::cases::paged
