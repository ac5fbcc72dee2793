// kv_compress and kv_compress_backward: inputs, float64 reference, tolerance and cost.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "suites.hpp"

namespace hopwell::cases {
namespace {

using Document = std::pair<std::int64_t, std::int64_t>;  // first token, number of tokens

enum class Gates {
  kNormal,
  kWide,       // -10,000 to 10,000
  kAbsent,     // -inf here and there, in whole windows too, with NaN as values
  kNonFinite,  // +inf and NaN here and there
};

struct Pooling {
  std::int64_t s = 37, d = 16, ratio = 4;
  DType dtype = DType::kBFloat16, out_dtype = DType::kBFloat16;
  bool overlap = true, bias = true;
  std::vector<std::int32_t> cu_seqlens = {}, cu_compressed = {};  // empty: one document
  std::int64_t more_rows = 0;                                     // of out, that no document makes
  Gates gates = Gates::kNormal;
  bool halves = false;  // kv and gate are halves of one matrix
  bool strided = false;
  bool unused_nan = false;  // elements that are in no window

  [[nodiscard]] std::int64_t width() const { return overlap ? 2 * d : d; }
  [[nodiscard]] std::int64_t rows() const { return s / ratio + more_rows; }
};

// One entry of the window of a compressed key.
struct Entry {
  std::int64_t key, token, place, offset;
};

// All entries of all windows, by plain loops over documents and blocks.
std::vector<std::vector<Entry>> windows_of(const Pooling& p) {
  std::vector<std::vector<Entry>> windows(static_cast<std::size_t>(p.rows()));
  const bool packed = !p.cu_seqlens.empty();
  const std::size_t documents = packed ? p.cu_seqlens.size() - 1 : 1;
  for (std::size_t i = 0; i < documents; ++i) {
    const std::int64_t first = packed ? std::clamp<std::int64_t>(p.cu_seqlens[i], 0, p.s) : 0;
    const std::int64_t end = packed ? std::clamp<std::int64_t>(p.cu_seqlens[i + 1], 0, p.s) : p.s;
    const std::int64_t row = packed ? p.cu_compressed[i] : 0;
    const std::int64_t row_end = packed ? std::min<std::int64_t>(p.cu_compressed[i + 1], p.rows()) : p.rows();
    for (std::int64_t j = 0; first + (j + 1) * p.ratio <= end; ++j) {
      if (row + j < 0 || row + j >= row_end) continue;
      std::vector<Entry>& window = windows[static_cast<std::size_t>(row + j)];
      for (std::int64_t r = 0; r < p.ratio; ++r) {
        window.push_back({row + j, first + j * p.ratio + r, r, p.overlap ? p.d : 0});
        if (p.overlap && j > 0) window.push_back({row + j, first + (j - 1) * p.ratio + r, r, 0});
      }
    }
  }
  return windows;
}

struct Arrays {
  Array *kv, *gate, *bias, *cu_seqlens, *cu_compressed;
};

// The softmax of one column of a window.
struct Column {
  std::vector<double> weights;
  double out = 0, magnitude = 0;
};
Column pool(const Pooling& p, const Arrays& a, const std::vector<Entry>& window, std::int64_t c) {
  std::vector<double> gates;
  double most = -INFINITY;
  for (const Entry& e : window) {
    const std::int64_t at = e.offset + c;
    double gate = a.gate->get(e.token * p.width() + at);
    // Gates are fp32 numbers: of large ones the rounding of the sum is seen.
    if (p.bias) gate = static_cast<float>(gate + a.bias->get(e.place * p.width() + at));
    gates.push_back(gate);
    if (gate > most || std::isnan(gate)) most = gate;
  }
  Column column;
  double sum = 0;
  for (const double gate : gates) sum += column.weights.emplace_back(gate == -INFINITY ? 0 : std::exp(gate - most));
  for (std::size_t i = 0; i < gates.size(); ++i) {
    column.weights[i] = sum == 0 ? 0 : column.weights[i] / sum;
    if (gates[i] == -INFINITY) continue;
    const double value = a.kv->get(window[i].token * p.width() + window[i].offset + c);
    column.out += column.weights[i] * value;
    column.magnitude += column.weights[i] * std::abs(value);
  }
  if (std::isnan(sum)) column.out = NAN, column.magnitude = 0;
  return column;
}

void fill_gates(const Pooling& p, Random& random, const Arrays& a) {
  a.kv->fill_normal(random);
  a.gate->fill_normal(random);
  for (std::int64_t i = 0; i < a.gate->size(); ++i) {
    if (p.gates == Gates::kWide) a.gate->set(i, 20'000 * random.uniform() - 10'000);
    if (p.gates == Gates::kNonFinite && random.below(40) == 0) a.gate->set(i, random.below(2) == 0 ? INFINITY : NAN);
    if (p.gates == Gates::kAbsent && (random.below(3) == 0 || i % p.width() == 1 || i % p.width() == p.d)) {
      a.gate->set(i, -INFINITY);
      a.kv->set(i, NAN);
    }
  }
}

// Sets the elements of kv and gate that are in no window to NaN.
void set_unused(const Pooling& p, const Arrays& a) {
  std::vector<bool> used(static_cast<std::size_t>(p.s * p.width()));
  for (const std::vector<Entry>& window : windows_of(p))
    for (const Entry& e : window)
      for (std::int64_t c = 0; c < p.d; ++c) used[static_cast<std::size_t>(e.token * p.width() + e.offset + c)] = true;
  for (std::size_t i = 0; i < used.size(); ++i)
    if (!used[i]) a.kv->set(static_cast<std::int64_t>(i), NAN), a.gate->set(static_cast<std::int64_t>(i), NAN);
}

Arrays add_inputs(const Pooling& p, Random& random, Instance& instance) {
  const std::int64_t w = p.width(), stride = p.halves ? 2 * w : w + (p.strided ? 5 : 0);
  Arrays a{};
  a.kv = &instance.add({"kv", p.dtype, {p.s, w}, {stride, 1}});
  a.gate = &instance.add({"gate", p.dtype, {p.s, w}, {stride, 1}});
  fill_gates(p, random, a);
  if (p.unused_nan) set_unused(p, a);
  a.bias = &instance.add({"position_bias", DType::kFloat32, {p.ratio, w}, {w + (p.strided ? 3 : 0), 1}});
  a.bias->fill_normal(random);
  for (auto [to, values, name] : {std::tuple{&a.cu_seqlens, &p.cu_seqlens, "cu_seqlens"},
                                  std::tuple{&a.cu_compressed, &p.cu_compressed, "cu_compressed"}}) {
    const std::int64_t gap = p.strided ? 2 : 1;
    *to = &instance.add({name, DType::kInt32, {static_cast<std::int64_t>(values->size())}, {gap}});
    for (std::size_t i = 0; i < values->size(); ++i) (*to)->set(static_cast<std::int64_t>(i), (*values)[i]);
  }
  return a;
}

// Copies the inputs to the arguments of either operator.
template <class Args>
Args inputs(const Pooling& p, const Arrays& a, const char* backend) {
  Args args;
  args.kv = a.kv->view(), args.gate = a.gate->view(), args.ratio = p.ratio, args.overlap = p.overlap;
  if (p.bias) args.position_bias = a.bias->view();
  if (!p.cu_seqlens.empty()) args.cu_seqlens = a.cu_seqlens->view(), args.cu_compressed = a.cu_compressed->view();
  args.backend = backend;
  return args;
}

double bytes_of(const Pooling& p, int passes_over_kv, DType out) {
  return static_cast<double>(passes_over_kv * p.s * p.width() * static_cast<std::int64_t>(size_of(p.dtype)) +
                             p.rows() * p.d * static_cast<std::int64_t>(size_of(out)));
}

Instance make_forward(Random& random, const Pooling& p) {
  Instance instance;
  const Arrays a = add_inputs(p, random, instance);
  Array& out = instance.add({"out", p.out_dtype, {p.rows(), p.d}, {p.d + (p.strided ? 1 : 0), 1}});
  instance.expect(out, p.out_dtype == DType::kBFloat16
                           ? Tolerance{.absolute = 0, .relative = 0x1p-8, .cancelling = 0x1p-20}
                           : Tolerance{.absolute = 0, .relative = 0x1p-18, .cancelling = 0x1p-20});
  instance.reference = [p, a](Instance& self) {
    for (const std::vector<Entry>& window : windows_of(p))
      for (std::int64_t c = 0; c < p.d; ++c) {
        const Column column = pool(p, a, window, c);
        self.outputs[0].expected.push_back(column.out);
        self.outputs[0].magnitude.push_back(column.magnitude);
      }
  };
  instance.call = [p, a, &out, &workspace = *instance.workspace](const char* backend, Stream stream) {
    auto args = inputs<KvCompressArgs>(p, a, backend);
    args.out = out.view();
    run_with_workspace<KvCompressArgs>(hopwell::kv_compress, hopwell::kv_compress_workspace_bytes, workspace, args,
                                       stream);
  };
  instance.flops = 6 * static_cast<double>(p.s * p.width());
  instance.bytes = bytes_of(p, 2, p.out_dtype);
  return instance;
}

void make_gradients(const Pooling& p, const Arrays& a, const Array& d_out, Instance& self) {
  const auto size = static_cast<std::size_t>(p.s * p.width());
  std::vector<double> d_kv(size), d_gate(size), d_bias(static_cast<std::size_t>(p.ratio * p.width()));
  for (const std::vector<Entry>& window : windows_of(p))
    for (std::int64_t c = 0; c < p.d; ++c) {
      const Column column = pool(p, a, window, c);
      for (std::size_t i = 0; i < window.size(); ++i) {
        const Entry& e = window[i];
        const auto at = static_cast<std::size_t>(e.token * p.width() + e.offset + c);
        const double value = column.weights[i] == 0 ? 0 : a.kv->get(static_cast<std::int64_t>(at));
        d_kv[at] = column.weights[i] * d_out.get(e.key * p.d + c);
        d_gate[at] = d_kv[at] * (value - column.out);
        d_bias[static_cast<std::size_t>(e.place * p.width() + e.offset + c)] += d_gate[at];
      }
    }
  self.outputs[0].expected = d_kv, self.outputs[1].expected = d_gate;
  if (p.bias) self.outputs[2].expected = d_bias;
}

Instance make_backward(Random& random, const Pooling& p) {
  Instance instance;
  const Arrays a = add_inputs(p, random, instance);
  const std::int64_t w = p.width(), gap = p.strided ? 9 : 0;
  Array& d_out = instance.add({"d_out", p.out_dtype, {p.rows(), p.d}, {p.d + gap, 1}}).fill_normal(random);
  Array& d_kv = instance.add({"d_kv", p.dtype, {p.s, w}, {w + gap, 1}});
  Array& d_gate = instance.add({"d_gate", p.dtype, {p.s, w}, {w + gap, 1}});
  Array& d_bias = instance.add({"d_position_bias", DType::kFloat32, {p.ratio, w}, {w + gap, 1}});
  const Tolerance fp32{.norm = 1e-4}, of_kv = p.dtype == DType::kBFloat16 ? Tolerance{.norm = 4e-3} : fp32;
  instance.expect(d_kv, of_kv);
  instance.expect(d_gate, of_kv);
  if (p.bias) instance.expect(d_bias, fp32);
  instance.reference = [p, a, &d_out](Instance& self) { make_gradients(p, a, d_out, self); };
  instance.call = [p, a, &d_out, &d_kv, &d_gate, &d_bias, &workspace = *instance.workspace](const char* backend,
                                                                                            Stream stream) {
    auto args = inputs<KvCompressBackwardArgs>(p, a, backend);
    args.d_out = d_out.view(), args.d_kv = d_kv.view(), args.d_gate = d_gate.view();
    if (p.bias) args.d_position_bias = d_bias.view();
    run_with_workspace<KvCompressBackwardArgs>(hopwell::kv_compress_backward,
                                               hopwell::kv_compress_backward_workspace_bytes, workspace, args, stream);
  };
  instance.flops = 12 * static_cast<double>(p.s * p.width());
  instance.bytes = bytes_of(p, 4, p.out_dtype);
  return instance;
}

std::vector<std::pair<std::string, Pooling>> problems() {
  constexpr DType kFp32 = DType::kFloat32;
  return {
      {"basic", {}},
      {"fp32", {.dtype = kFp32, .out_dtype = kFp32}},
      {"fp32_to_bf16", {.dtype = kFp32}},
      {"bf16_to_fp32", {.out_dtype = kFp32, .bias = false}},
      {"v4_csa", {.s = 70, .d = 512}},
      {"v4_indexer", {.s = 133, .d = 128}},
      {"v4_hca", {.s = 390, .d = 136, .ratio = 128, .overlap = false}},
      {"ratio_1", {.s = 9, .ratio = 1, .overlap = false}},
      {"ratio_1_overlap", {.s = 9, .ratio = 1}},
      {"ratio_2", {.s = 41, .d = 64, .ratio = 2, .overlap = false}},
      {"ratio_2_overlap", {.s = 41, .d = 40, .ratio = 2}},
      {"ratio_3_overlap", {.s = 32, .d = 8, .ratio = 3}},
      {"ratio_4", {.s = 41, .d = 24, .overlap = false, .bias = false}},
      {"ratio_100", {.s = 215, .d = 8, .ratio = 100, .overlap = false}},
      {"ratio_200_overlap", {.s = 830, .d = 8, .ratio = 200}},
      {"strips", {.s = 1100, .d = 8}},
      {"odd_width", {.d = 13, .halves = true}},
      {"halves", {.d = 32, .halves = true}},
      {"strided", {.d = 24, .strided = true, .unused_nan = true}},
      {"strided_documents",
       {.d = 24, .cu_seqlens = {0, 13, 37}, .cu_compressed = {0, 3, 9}, .strided = true, .unused_nan = true}},
      {"documents",
       {.s = 60,
        .d = 32,
        .cu_seqlens = {3, 3, 6, 10, 15, 23, 58},
        .cu_compressed = {0, 0, 0, 1, 2, 4, 12},
        .more_rows = 2,
        .unused_nan = true}},
      {"documents_of_128",
       {.s = 700,
        .d = 8,
        .ratio = 128,
        .overlap = false,
        .cu_seqlens = {0, 127, 255, 384, 700},
        .cu_compressed = {0, 0, 1, 2, 4},
        .unused_nan = true}},
      {"documents_any_values",
       {.s = 50,
        .cu_seqlens = {20, -7, 9, 30, 25, 2'000'000'000},
        .cu_compressed = {-2'000'000'000, 2, 0, 2, 2'000'000'000, 2'000'000'005},
        .unused_nan = true}},
      {"documents_cut_rows", {.s = 40, .cu_seqlens = {0, 20, 40}, .cu_compressed = {-2, 2, 4}, .unused_nan = true}},
      {"no_documents", {.s = 8, .cu_seqlens = {0}, .cu_compressed = {0}, .unused_nan = true}},
      {"short_document", {.s = 3, .more_rows = 1, .unused_nan = true}},
      {"no_tokens", {.s = 0, .more_rows = 2}},
      {"no_rows", {.s = 3, .unused_nan = true}},
      {"huge_ratio", {.s = 30, .d = 8, .ratio = 70, .unused_nan = true}},
      {"wide_gates", {.s = 64, .d = 32, .gates = Gates::kWide}},
      {"absent", {.s = 64, .d = 32, .gates = Gates::kAbsent}},
      {"absent_of_128", {.s = 256, .d = 8, .ratio = 128, .overlap = false, .gates = Gates::kAbsent}},
      {"non_finite", {.s = 64, .d = 32, .gates = Gates::kNonFinite}},
  };
}

Suite suite_of(const std::string& op, Instance (*make)(Random&, const Pooling&)) {
  Suite suite{op, {}, {}, {}};
  for (const auto& [name, problem] : problems())
    suite.cases.emplace_back(suite.op, name, [p = problem, make](Random& random) { return make(random, p); });
  suite.shapes = {{"csa", {{"s", "8192"}, {"d", "512"}, {"ratio", "4"}, {"overlap", "1"}}},
                  {"indexer", {{"s", "8192"}, {"d", "128"}, {"ratio", "4"}, {"overlap", "1"}}},
                  {"hca", {{"s", "8192"}, {"d", "512"}, {"ratio", "128"}, {"overlap", "0"}}}};
  suite.device_shapes = {{"csa_64k", {{"s", "65536"}, {"d", "512"}, {"ratio", "4"}, {"overlap", "1"}}},
                         {"hca_64k", {{"s", "65536"}, {"d", "512"}, {"ratio", "128"}, {"overlap", "0"}}}};
  suite.bench = [make](const Settings& settings, Random& random) {
    return make(random, {.s = number(settings, "s"),
                         .d = number(settings, "d"),
                         .ratio = number(settings, "ratio"),
                         .overlap = number(settings, "overlap") != 0});
  };
  return suite;
}

}  // namespace

Suite kv_compress() {
  Suite suite = suite_of("kv_compress", make_forward);
  suite.unsupported = {{"sm80", "needs d that is a multiple of 8", "odd_width"}};
  suite.allocating = {"documents"};
  // One multiprocessor: a CTA has several windows, one after the other.
  suite.subjects = {{"kv_compress_sm80", "emu:sm80", {"v4_csa", "v4_hca", "absent"}, 4, 4, "", "1"}};
  return suite;
}
Suite kv_compress_backward() {
  Suite suite = suite_of("kv_compress_backward", make_backward);
  suite.unsupported = {{"sm80", "needs d that is a multiple of 8", "odd_width"}};
  suite.allocating = {"documents", "v4_hca"};
  // Six CTAs: some have several windows, one after the other, and the sum of v4_indexer's five planes has two splits.
  suite.subjects = {
      {"kv_compress_backward_sm80", "emu:sm80", {"v4_csa", "v4_hca", "v4_indexer", "absent"}, 4, 6, "", "3"}};
  return suite;
}

}  // namespace hopwell::cases
