// sparse_mla_backward with window keys computes what it computes without them from one tensor of all keys, whose index
// rows list the window keys first. On emulated GPUs; the other call is the CPU's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <hopwell/hopwell.hpp>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace hopwell {
namespace {

struct Options {
  std::string name;
  std::int64_t s_q, s_kv, s_w, window, h_q;
  std::int64_t d_qk = 576, topk = 70;  // topk -1: no indices
  bool deterministic = false, sink = true, attn = true, attn_with_sink = false, documents = false;
  bool accumulate = false, dkv = true, d_window_kv = true, bf16 = false;
};

bfloat16 rounded(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return {static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
float value(bfloat16 x) {
  const std::uint32_t bits = std::uint32_t{x.bits} << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
float value(float x) { return x; }

class Problem {
 public:
  explicit Problem(const Options& given) : o(given), engine(7) {
    const std::int64_t n = o.s_kv + o.s_w;
    q = random(o.s_q * o.h_q * o.d_qk, 0.1F), keys = random(n * o.d_qk, 1);
    d_out = random(o.s_q * o.h_q * 512, 1);
    const std::int64_t row = o.topk < 0 ? o.s_kv : o.topk;
    std::uniform_int_distribution<std::int32_t> any(-2, static_cast<std::int32_t>(o.s_kv + 3));
    for (std::int64_t i = 0; o.topk >= 0 && i < o.s_q * row; ++i) indices.push_back(any(engine));
    // Ranges that are empty, too long, out of bounds; and packed documents.
    for (std::int64_t s = 0; s < o.s_q; ++s) {
      const std::int32_t starts[] = {-5, 3, 9, std::numeric_limits<std::int32_t>::min(), 0};
      const std::int32_t ends[] = {20, 2, 1 << 30, std::numeric_limits<std::int32_t>::max(), static_cast<int>(s)};
      w_start.push_back(starts[s % 5]), w_end.push_back(ends[s % 5]);
    }
    most = std::min(o.window, o.s_w), table_row = most + row;
    table.assign(static_cast<std::size_t>(o.s_q * table_row), -1);
    for (std::int64_t s = 0; s < o.s_q; ++s) {
      std::int64_t low = o.documents ? w_start[s] : 0, high = o.documents ? w_end[s] : o.s_w - o.s_q + s + 1;
      low = std::clamp<std::int64_t>(low, 0, o.s_w), high = std::clamp<std::int64_t>(high, 0, o.s_w);
      low = std::max(low, high - o.window);
      std::int32_t* to = table.data() + s * table_row;
      for (std::int64_t t = low; t < high; ++t) *to++ = static_cast<std::int32_t>(o.s_kv + t);
      to = table.data() + s * table_row + most;
      for (std::int64_t i = 0; i < row; ++i) {
        const std::int64_t key = o.topk < 0 ? i : indices[static_cast<std::size_t>(s * row + i)];
        *to++ = static_cast<std::int32_t>(key >= 0 && key < o.s_kv ? key : -1);
      }
    }
    std::normal_distribution<float> normal;
    for (std::int64_t h = 0; h < o.h_q; ++h) sink.push_back(normal(engine));
    out.resize(d_out.size()), lse.resize(static_cast<std::size_t>(o.s_q * o.h_q));
    const Tensor q_view(q.data(), {o.s_q, o.h_q, o.d_qk}), kv(keys.data(), {n, o.d_qk}),
        rows(table.data(), {o.s_q, table_row}), out_view(out.data(), {o.s_q, o.h_q, 512}),
        lse_view(lse.data(), {o.s_q, o.h_q}), sink_view(sink.data(), {o.h_q});
    SparseMlaForwardArgs forward{
        .q = q_view, .kv = kv, .indices = rows, .sm_scale = 0.5F, .d_v = 512, .out = out_view, .lse = lse_view};
    if (o.sink) forward.attn_sink = sink_view;
    forward.backend = "cpu";
    sparse_mla_forward(forward);
  }

  struct Results {
    std::vector<bfloat16> dq, dkv16, d_window_kv16;
    std::vector<float> dkv, d_window_kv, d_sink, attn;
  };

  SparseMlaBackwardArgs args(Results& r, std::int64_t row) {
    r.dq.resize(q.size()), r.d_sink.resize(sink.size()), r.attn.assign(static_cast<std::size_t>(o.s_q * row), -7);
    SparseMlaBackwardArgs a;
    a.d_out = Tensor(d_out.data(), {o.s_q, o.h_q, 512}), a.q = Tensor(q.data(), {o.s_q, o.h_q, o.d_qk});
    a.out = Tensor(out.data(), {o.s_q, o.h_q, 512}), a.lse = Tensor(lse.data(), {o.s_q, o.h_q});
    a.sm_scale = 0.5F, a.d_v = 512, a.deterministic = o.deterministic;
    a.dq = Tensor(r.dq.data(), {o.s_q, o.h_q, o.d_qk});
    if (o.sink) a.attn_sink = Tensor(sink.data(), {o.h_q}), a.d_sink = Tensor(r.d_sink.data(), {o.h_q});
    if (o.attn) a.attn = Tensor(r.attn.data(), {o.s_q, row});
    return a;
  }

  void call(const SparseMlaBackwardArgs& given) {
    SparseMlaBackwardArgs a = given;
    std::vector<std::byte> workspace(sparse_mla_backward_workspace_bytes(a) + 256);
    const auto address = (reinterpret_cast<std::uintptr_t>(workspace.data()) + 255) / 256 * 256;
    a.workspace = reinterpret_cast<void*>(address), a.workspace_bytes = workspace.size() - 256;
    sparse_mla_backward(a, nullptr);
  }

  Results by_table() {
    Results r;
    SparseMlaBackwardArgs a = args(r, table_row);
    r.dkv.assign(keys.size(), 0);
    a.kv = Tensor(keys.data(), {o.s_kv + o.s_w, o.d_qk}), a.indices = Tensor(table.data(), {o.s_q, table_row});
    a.dkv = Tensor(r.dkv.data(), {o.s_kv + o.s_w, o.d_qk});
    a.backend = "cpu";
    call(a);
    if (o.attn_with_sink) add_sink(r);
    return r;
  }

  // The distribution with lse' in the place of lse.
  void add_sink(Results& r) {
    std::vector<float> with_sink = lse;
    for (std::size_t i = 0; i < lse.size(); ++i)
      if (std::isfinite(lse[i]))
        with_sink[i] = static_cast<float>(std::log(std::exp(double{lse[i]}) + std::exp(double{sink[i % sink.size()]})));
    AttentionDistributionArgs a;
    a.q = Tensor(q.data(), {o.s_q, o.h_q, o.d_qk}), a.kv = Tensor(keys.data(), {o.s_kv + o.s_w, o.d_qk});
    a.indices = Tensor(table.data(), {o.s_q, table_row}), a.lse = Tensor(with_sink.data(), {o.s_q, o.h_q});
    a.sm_scale = 0.5F, a.out = Tensor(r.attn.data(), {o.s_q, table_row}), a.backend = "cpu";
    attention_distribution(a);
  }

  Results by_window(const char* backend) {
    Results r;
    const std::int64_t row = o.topk < 0 ? o.s_kv : o.topk;
    SparseMlaBackwardArgs a = args(r, row);
    a.kv = Tensor(keys.data(), {o.s_kv, o.d_qk});
    a.window_kv = Tensor(keys.data() + o.s_kv * o.d_qk, {o.s_w, o.d_qk}), a.window = o.window;
    if (o.topk >= 0) a.indices = Tensor(indices.data(), {o.s_q, row});
    if (o.documents) a.w_start = Tensor(w_start.data(), {o.s_q}), a.w_end = Tensor(w_end.data(), {o.s_q});
    const float before = o.accumulate ? 3 : -77;
    r.dkv.assign(static_cast<std::size_t>(o.s_kv * o.d_qk), before);
    r.d_window_kv.assign(static_cast<std::size_t>(o.s_w * o.d_qk), before);
    r.dkv16.resize(r.dkv.size()), r.d_window_kv16.resize(r.d_window_kv.size());
    if (o.dkv) a.dkv = o.bf16 ? Tensor(r.dkv16.data(), {o.s_kv, o.d_qk}) : Tensor(r.dkv.data(), {o.s_kv, o.d_qk});
    if (o.d_window_kv)
      a.d_window_kv =
          o.bf16 ? Tensor(r.d_window_kv16.data(), {o.s_w, o.d_qk}) : Tensor(r.d_window_kv.data(), {o.s_w, o.d_qk});
    a.accumulate = o.accumulate, a.attn_with_sink = o.attn_with_sink, a.backend = backend;
    call(a);
    for (std::size_t i = 0; o.bf16 && i < r.dkv.size(); ++i) r.dkv[i] = value(r.dkv16[i]);
    for (std::size_t i = 0; o.bf16 && i < r.d_window_kv.size(); ++i) r.d_window_kv[i] = value(r.d_window_kv16[i]);
    for (auto* sums : {&r.dkv, &r.d_window_kv})
      for (float& sum : *sums) sum -= o.accumulate ? 3 : 0;
    return r;
  }

  std::vector<bfloat16> random(std::int64_t count, float size) {
    std::normal_distribution<float> normal;
    std::vector<bfloat16> values(static_cast<std::size_t>(count));
    for (bfloat16& x : values) x = rounded(size * normal(engine));
    return values;
  }

  Options o;
  std::mt19937 engine;
  std::vector<bfloat16> q, keys, d_out, out;
  std::vector<float> lse, sink;
  std::vector<std::int32_t> indices, table, w_start, w_end;
  std::int64_t most = 0, table_row = 0;
};

template <class T>
void expect_close(const T* got, const float* expected, std::size_t count, double tolerance, const char* what) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double difference = double{value(got[i])} - double{expected[i]};
    error += difference * difference, size += double{expected[i]} * double{expected[i]};
  }
  EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(size) + 1e-30) << what;
}

class Windows : public testing::TestWithParam<std::tuple<std::string, Options>> {};

TEST_P(Windows, SameAsOneTable) {
  const auto& [backend, o] = GetParam();
  Problem p(o);
  const Problem::Results expected = p.by_table(), got = p.by_window(backend.c_str());
  std::vector<float> dq(expected.dq.size());
  for (std::size_t i = 0; i < dq.size(); ++i) dq[i] = value(expected.dq[i]);
  expect_close(got.dq.data(), dq.data(), dq.size(), 6e-3, "dq");
  const auto split = static_cast<std::size_t>(o.s_kv * o.d_qk);
  if (o.dkv) expect_close(got.dkv.data(), expected.dkv.data(), split, 6e-3, "dkv");
  if (o.d_window_kv)
    expect_close(got.d_window_kv.data(), expected.dkv.data() + split, got.d_window_kv.size(), 6e-3, "d_window_kv");
  if (o.sink) expect_close(got.d_sink.data(), expected.d_sink.data(), got.d_sink.size(), 6e-3, "d_sink");
  for (std::int64_t s = 0; o.attn && s < o.s_q; ++s) {
    const std::int64_t row = p.table_row - p.most;
    expect_close(got.attn.data() + s * row, expected.attn.data() + s * p.table_row + p.most,
                 static_cast<std::size_t>(row), 4e-3, "attn");
  }
}

const Options kOptions[] = {
    {"plain", 5, 40, 90, 20, 16},
    {"pair", 3, 40, 300, 100, 128},
    {"pair_512_wide_window", 3, 40, 300, 500, 70, 512},
    {"single_512", 3, 40, 200, 100, 64, 512},
    {"no_attn", 3, 40, 200, 100, 64, 512, 140, false, false, false},
    {"pair_no_attn", 3, 40, 200, 128, 128, 512, 140, false, false, false},
    {"documents", 11, 40, 90, 20, 8, 576, 70, false, true, true, false, true},
    {"documents_deterministic", 11, 40, 90, 20, 8, 576, 70, true, true, true, false, true},
    {"deterministic", 5, 40, 90, 20, 40, 512, 70, true},
    {"deterministic_no_attn", 5, 40, 90, 20, 96, 512, 70, true, true, false},
    {"without_indices", 9, 100, 90, 20, 8, 512, -1},
    {"without_indices_pair", 4, 100, 90, 20, 80, 512, -1},
    {"without_indices_deterministic", 4, 100, 90, 20, 40, 512, -1, true},
    {"attn_with_sink", 5, 40, 90, 20, 16, 576, 70, false, true, true, true},
    {"attn_with_sink_deterministic", 5, 40, 90, 20, 16, 576, 70, true, true, true, true},
    {"attn_with_sink_pair", 3, 40, 90, 20, 128, 576, 70, false, true, true, true},
    {"no_keys", 5, 0, 90, 20, 16, 576, 3},
    {"no_keys_deterministic", 5, 0, 90, 20, 16, 576, -1, true},
    {"no_window_rows", 5, 40, 0, 20, 16},
    {"no_entries", 5, 40, 90, 20, 16, 576, 0},
    {"no_entries_deterministic", 5, 40, 90, 20, 16, 576, 0, true},
    {"accumulate", 5, 40, 90, 20, 16, 576, 70, false, true, true, false, false, true},
    {"accumulate_deterministic", 5, 40, 90, 20, 16, 576, 70, true, true, true, false, false, true},
    {"bf16", 5, 40, 90, 20, 16, 576, 70, false, true, true, false, false, false, true, true, true},
    {"bf16_deterministic", 5, 40, 90, 20, 16, 576, 70, true, true, true, false, false, false, true, true, true},
    {"only_dkv", 5, 40, 90, 20, 16, 576, 70, false, true, true, false, false, false, true, false},
    {"only_d_window_kv", 5, 40, 90, 20, 16, 576, 70, false, true, true, false, false, false, false, true},
    {"neither", 5, 40, 90, 20, 16, 576, 70, false, true, true, false, false, false, false, false},
    {"only_d_window_kv_deterministic", 5, 40, 90, 20, 16, 576, 70, true, true, false, false, false, false, false, true},
    {"many_heads", 2, 40, 200, 128, 256, 512, 70, false, true, false},
    {"one_head", 9, 40, 200, 128, 1, 512, 70, false, true, false},
};

INSTANTIATE_TEST_SUITE_P(Emulated, Windows,
                         testing::Combine(testing::Values("emu:sm80", "emu:sm90"), testing::ValuesIn(kOptions)),
                         [](const auto& info) {
                           return std::get<0>(info.param).substr(4) + "_" + std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace hopwell
