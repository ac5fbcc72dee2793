// paged_attention: bad input, and what case descriptions cannot express.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <hopwell/hopwell.hpp>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "tile/cpu/parallel.hpp"

namespace hopwell {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kUntouched = -77.0F;

// A small problem in fp32; `args()` points into it.
struct Problem {
  std::int64_t b, q_len = 2, h_q = 4, h_kv = 2, d = 32, block = 4, max_blocks;
  std::vector<float> q, k, v, u, bias, r, slopes, out, lse;
  std::vector<std::int32_t> tables, lengths;

  explicit Problem(const std::vector<std::int32_t>& context_lens, std::int64_t table_length = 5)
      : b(static_cast<std::int64_t>(context_lens.size())), max_blocks(table_length), lengths(context_lens) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& x, std::int64_t size) {
      x.resize(static_cast<std::size_t>(size));
      for (float& value : x) value = normal(random);
    };
    const std::int64_t blocks = b * max_blocks;
    fill(q, b * q_len * h_q * d);
    fill(k, blocks * block * h_kv * d);
    fill(v, blocks * block * h_kv * d);
    fill(u, h_q * d);
    fill(bias, h_q * 7);
    fill(r, h_q * 7 * d);
    fill(slopes, h_q);
    tables.resize(static_cast<std::size_t>(blocks));
    std::iota(tables.begin(), tables.end(), 0);
    std::shuffle(tables.begin(), tables.end(), random);
    out.assign(q.size(), kUntouched);
    lse.assign(static_cast<std::size_t>(b * q_len * h_q), kUntouched);
  }

  template <class T>
  Tensor view(std::vector<T>& x, std::initializer_list<std::int64_t> shape,
              std::initializer_list<std::int64_t> strides = {}) {
    return {x.data(), shape, {.strides = strides}};
  }

  PagedAttentionArgs args() {
    const std::int64_t blocks = b * max_blocks;
    return {.q = view(q, {b, q_len, h_q, d}),
            .k_cache = view(k, {blocks, block, h_kv, d}),
            .v_cache = view(v, {blocks, block, h_kv, d}),
            .block_tables = view(tables, {b, max_blocks}),
            .context_lens = view(lengths, {b}),
            .scale = 0.2F,
            .out = view(out, {b, q_len, h_q, d}),
            .lse = view(lse, {b, q_len, h_q})};
  }
  [[nodiscard]] bool untouched() const {
    const auto is = [](float x) { return x == kUntouched; };
    return std::all_of(out.begin(), out.end(), is) && std::all_of(lse.begin(), lse.end(), is);
  }
};

std::string error_of(const PagedAttentionArgs& args) {
  try {
    paged_attention(args);
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), HOPWELL_INVALID_ARGUMENT);
    return error.what();
  }
  return "no error";
}

class PagedAttentionBadInput : public testing::Test {
 protected:
  Problem p_{{3, 17}};

  void expect(const std::function<void(PagedAttentionArgs&)>& change, const std::string& message) {
    PagedAttentionArgs args = p_.args();
    change(args);
    EXPECT_EQ(error_of(args), "paged_attention: " + message);
    EXPECT_TRUE(p_.untouched());
  }
};

TEST_F(PagedAttentionBadInput, Queries) {
  Problem& p = p_;
  expect([](auto& a) { a.q = nullptr; },
         "q must be float32 or float16 or bfloat16 [b, h_q, d] or [b, q_len, h_q, d]; got nothing");
  expect([&](auto& a) { a.q = p.view(p.tables, {2, 2, 4, 32}); },
         "q must be float32 or float16 or bfloat16 [b, q_len, h_q, d]; got int32 [2, 2, 4, 32]");
  expect([&](auto& a) { a.q = p.view(p.q, {16, 32}); },
         "q must be float32 or float16 or bfloat16 [b, h_q, d] or [b, q_len, h_q, d]; got float32 [16, 32]");
  expect([&](auto& a) { a.q = p.view(p.q, {1, 17, 1, 30}); }, "q must be [b, q_len 1..16, h_q, d]; got q_len = 17");
  expect([&](auto& a) { a.q = p.view(p.q, {2, 0, 4, 32}); }, "q must be [b, q_len 1..16, h_q, d]; got q_len = 0");
  expect([&](auto& a) { a.q = p.view(p.q, {2, 2, 0, 32}); }, "q must be [b, q_len, h_q >= 1, d]; got h_q = 0");
  for (const std::int64_t d : {24, 36, 264}) {
    std::vector<float> q(static_cast<std::size_t>(d));
    expect([&](auto& a) { a.q = p.view(q, {1, 1, 1, d}); },
           "q must be [b, q_len, h_q, d a multiple of 8 from 32 to 256]; got d = " + std::to_string(d));
  }
  expect([&](auto& a) { a.q = p.view(p.q, {2, 2, 4, 32}, {256, 128, 1, 4}); },
         "q must be contiguous in its last dimension; got a stride of 4");
  expect([](auto& a) { a.scale = kInf; }, "scale must be finite; got inf");
  expect([](auto& a) { a.window = -1; }, "window must be at least 1, or 0 for every key; got -1");
}

TEST_F(PagedAttentionBadInput, Caches) {
  Problem& p = p_;
  expect([](auto& a) { a.k_cache = nullptr; }, "k_cache must be float32 [blocks, block, h_kv, d=32]; got nothing");
  expect([&](auto& a) { a.v_cache = p.view(p.v, {10, 2, 4, 32}); },
         "v_cache must be float32 [blocks=10, block=4, h_kv=2, d=32]; got float32 [10, 2, 4, 32]");
  expect([&](auto& a) { a.layout = HOPWELL_CACHE_VLLM; },
         "k_cache must be float32 [blocks, h_kv, 8, block, 4]; got float32 [10, 4, 2, 32]");
  expect([](auto& a) { std::memset(&a.layout, 1, sizeof a.layout); }, "layout must be nhd, hnd or vllm; got 16843009");
  expect(
      [&](auto& a) {
        a.k_cache = a.v_cache = p.view(p.k, {10, 4, 2, 32}), a.layout = HOPWELL_CACHE_HND,
        a.q = p.view(p.q, {2, 2, 3, 32});
      },
      "k_cache must be of an h_kv that divides h_q = 3; got h_kv = 4");
  expect([&](auto& a) { a.k_cache = a.v_cache = p.view(p.k, {10, 4, 0, 32}); },
         "k_cache must be of an h_kv that divides h_q = 4; got h_kv = 0");
  std::vector<float> large(257 * 2 * 32);
  expect([&](auto& a) { a.k_cache = a.v_cache = p.view(large, {1, 257, 2, 32}); },
         "k_cache must be of block 1..256; got block = 257");
  expect([&](auto& a) { a.k_cache = a.v_cache = p.view(large, {1, 0, 2, 32}); },
         "k_cache must be of block 1..256; got block = 0");
  expect([](auto& a) { a.block_tables = nullptr; }, "block_tables must be int32 [b=2, max_blocks]; got nothing");
  expect([&](auto& a) { a.block_tables = p.view(p.q, {2, 5}); },
         "block_tables must be int32 [b=2, max_blocks]; got float32 [2, 5]");
  expect([&](auto& a) { a.context_lens = p.view(p.lengths, {1}); }, "context_lens must be int32 [b=2]; got int32 [1]");
}

TEST_F(PagedAttentionBadInput, Biases) {
  Problem& p = p_;
  std::vector<float16> half(4 * 32);
  const auto bias = [&](std::initializer_list<std::int64_t> shape) { return p.view(p.bias, shape); };
  expect([&](auto& a) { a.pos_bias_u = p.view(half, {4, 32}); },
         "pos_bias_u must be float32 [h_q=4, d=32]; got float16 [4, 32]");
  expect([&](auto& a) { a.pos_bias_u = p.view(p.u, {2, 64}); },
         "pos_bias_u must be float32 [h_q=4, d=32]; got float32 [2, 64]");
  expect([&](auto& a) { a.bias = bias({3, 4, 2, 1}); },
         "bias must be float32 or float16 or bfloat16 [b=2, h_q=4, q_len=2, keys]; got float32 [3, 4, 2, 1]");
  expect([&](auto& a) { a.bias = bias({1, 4, 7}); },
         "bias must be float32 or float16 or bfloat16 [1, h_q=4, q_len=2, keys]; got float32 [1, 4, 7]");
  expect([&](auto& a) { a.bias = bias({1, 2, 7}), a.bias_kind = HOPWELL_BIAS_DISTANCE; },
         "bias must be float32 or float16 or bfloat16 [1, h_q=4, extent]; got float32 [1, 2, 7]");
  expect([&](auto& a) { a.bias = bias({1, 4, 2, 3}), a.r = p.view(p.r, {4, 7, 32}); }, "bias and r exclude each other");
  expect([&](auto& a) { a.pos_bias_v = p.view(p.u, {4, 32}); }, "pos_bias_v needs r");
  expect([&](auto& a) { a.r = p.view(p.r, {2, 7, 64}); },
         "r must be float32 [h_q=4, extent, d=32]; got float32 [2, 7, 64]");
  expect([&](auto& a) { a.r = p.view(p.r, {1, 0, 32}), a.out_of_range = HOPWELL_OUT_OF_RANGE_CLAMP; },
         "r must be of extent 1 or more to clamp to; got extent 0");
  expect(
      [&](auto& a) {
        a.bias = bias({2, 4, 0}), a.bias_kind = HOPWELL_BIAS_DISTANCE, a.out_of_range = HOPWELL_OUT_OF_RANGE_CLAMP;
      },
      "bias must be of extent 1 or more to clamp to; got extent 0");
  expect([](auto& a) { std::memset(&a.bias_kind, 1, sizeof a.bias_kind); },
         "bias_kind must be key or distance; got 16843009");
  expect([](auto& a) { std::memset(&a.out_of_range, 1, sizeof a.out_of_range); },
         "out_of_range must be zero, clamp or -inf; got 16843009");
  expect([&](auto& a) { a.alibi_slopes = p.view(half, {4}); }, "alibi_slopes must be float32 [h_q=4]; got float16 [4]");
}

TEST_F(PagedAttentionBadInput, Outputs) {
  Problem& p = p_;
  expect([](auto& a) { a.out = nullptr; }, "out must be float32 [b=2, q_len=2, h_q=4, d=32]; got nothing");
  expect([&](auto& a) { a.out = p.view(p.out, {2, 2, 4, 32}, {256, 0, 32, 1}); },
         "out must be an output whose elements do not overlap; got strides that make them share memory");
  expect([&](auto& a) { a.lse = p.view(p.lse, {2, 4, 2}); },
         "lse must be float32 [b=2, q_len=2, h_q=4]; got float32 [2, 4, 2]");
  expect([&](auto& a) { a.q = p.view(p.q, {2, 4, 32}), a.out = p.view(p.out, {2, 4, 32}); },
         "lse must be float32 [b=2, h_q=4]; got float32 [2, 2, 4]");
  expect([](auto& a) { a.backend = "gpu"; },
         "backend must be one of sm100, sm90, sm80, cpu, emu:sm80, emu:sm90, emu:sm100; got gpu");
}

std::vector<float> results(Problem& p, const PagedAttentionArgs& args) {
  paged_attention(args);
  std::vector<float> all = p.out;
  all.insert(all.end(), p.lse.begin(), p.lse.end());
  return all;
}

// Lengths of several chunks; how a sequence is cut must depend on neither the threads nor the rest of the batch.
TEST(PagedAttention, SameBitsForAnyNumberOfThreadsAndInAnyBatch) {
  Problem p({0, 1000, 4, 17000, 256, 257, 511, 5}, 17000 / 4);
  const int threads = cpu::max_threads();
  std::vector<float> first;
  for (const int n : {1, 2, 3, 5}) {
    cpu::set_max_threads(n);
    const std::vector<float> now = results(p, p.args());
    if (first.empty()) first = now;
    EXPECT_EQ(std::memcmp(now.data(), first.data(), now.size() * sizeof(float)), 0) << n << " threads";
  }
  cpu::set_max_threads(threads);
  const std::int64_t row = p.q_len * p.h_q * p.d, blocks = p.b * p.max_blocks;
  for (const std::size_t n : {1U, 3U, 5U}) {
    const auto at = static_cast<std::int64_t>(n);
    std::vector<float> alone(static_cast<std::size_t>(row));
    const Tensor q(p.q.data() + at * row, {1, p.q_len, p.h_q, p.d}), out(alone.data(), {1, p.q_len, p.h_q, p.d});
    const Tensor k(p.k.data(), {blocks, p.block, p.h_kv, p.d}), v(p.v.data(), {blocks, p.block, p.h_kv, p.d});
    const Tensor tables(p.tables.data() + at * p.max_blocks, {1, p.max_blocks}), lengths(p.lengths.data() + at, {1});
    paged_attention({.q = q,
                     .k_cache = k,
                     .v_cache = v,
                     .block_tables = tables,
                     .context_lens = lengths,
                     .scale = 0.2F,
                     .out = out});
    EXPECT_EQ(std::memcmp(alone.data(), first.data() + at * row, alone.size() * sizeof(float)), 0) << "sequence " << n;
  }
}

// Keys and values of one sequence that lie in one buffer [blocks, 2, ...], seen through strides; the same page of a
// table for all.
TEST(PagedAttention, StridesAreFree) {
  Problem p({9, 20, 1});
  const std::vector<float> expected = results(p, p.args());
  const std::int64_t blocks = p.b * p.max_blocks, page = p.block * p.h_kv * p.d;
  std::vector<float> both(static_cast<std::size_t>(2 * blocks * page), std::nanf(""));
  for (std::int64_t i = 0; i < blocks; ++i) {
    std::copy_n(p.k.data() + i * page, page, both.data() + 2 * i * page);
    std::copy_n(p.v.data() + i * page, page, both.data() + (2 * i + 1) * page);
  }
  const Tensor k(both.data(), {blocks, p.block, p.h_kv, p.d}, {.strides = {2 * page, p.h_kv * p.d, p.d, 1}});
  const Tensor v(both.data() + page, {blocks, p.block, p.h_kv, p.d}, {.strides = {2 * page, p.h_kv * p.d, p.d, 1}});
  PagedAttentionArgs args = p.args();
  args.k_cache = k, args.v_cache = v;
  EXPECT_EQ(std::memcmp(results(p, args).data(), expected.data(), expected.size() * sizeof(float)), 0);

  std::vector<float> shared(p.q.size());  // heads that share a query, biases that share a row: strides of 0
  std::vector<float> wide(static_cast<std::size_t>(p.h_q * p.q_len * 20)), row(20);
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = std::sin(static_cast<float>(i));
  for (std::size_t i = 0; i < wide.size(); ++i) wide[i] = row[i % 20];
  for (std::size_t i = 0; i < shared.size(); ++i) shared[i] = p.q[i % 32];
  args = p.args();
  args.q = p.view(shared, {p.b, p.q_len, p.h_q, p.d});
  args.bias = p.view(wide, {1, p.h_q, p.q_len, 20});
  const std::vector<float> repeated = results(p, args);
  args.q = p.view(p.q, {p.b, p.q_len, p.h_q, p.d}, {0, 0, 0, 1});
  args.bias = p.view(row, {1, p.h_q, p.q_len, 20}, {0, 0, 0, 1});
  EXPECT_EQ(std::memcmp(results(p, args).data(), repeated.data(), repeated.size() * sizeof(float)), 0);
}

// NaN and infinities in what is visible come out as in the reference: nothing is taken for an empty row.
TEST(PagedAttention, VisibleNaNsAndInfinitiesAreNotHidden) {
  Problem p({4, 4});
  p.q_len = 1;
  PagedAttentionArgs args = p.args();
  std::fill_n(p.k.begin() + p.tables[0] * 4 * 2 * 32, 4 * 2 * 32, std::nanf(""));  // every key of sequence 0
  p.v[static_cast<std::size_t>(p.tables[5] * 4 * 2 * 32 + 3)] = kInf;              // element 3 of KV head 0, sequence 1
  paged_attention(args);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(std::isnan(p.lse[i]));
  for (std::size_t i = 0; i < 4 * 32; ++i) EXPECT_TRUE(std::isnan(p.out[i]));
  for (std::size_t i = 4 * 32; i < 8 * 32; ++i) EXPECT_EQ(p.out[i] == kInf, i == 4 * 32 + 3 || i == 5 * 32 + 3) << i;
}

TEST(PagedAttention, NothingToDo) {
  Problem empty({});
  EXPECT_EQ(error_of(empty.args()), "no error");
  Problem p({0, -5});
  PagedAttentionArgs args = p.args();
  args.k_cache = args.v_cache = p.view(p.k, {0, 4, 2, 32});
  EXPECT_EQ(error_of(args), "no error");
  for (const float x : p.out) EXPECT_EQ(x, 0.0F);
  for (const float x : p.lse) EXPECT_EQ(x, -kInf);
  args.lse = nullptr;
  EXPECT_EQ(error_of(args), "no error");
}

}  // namespace
}  // namespace hopwell
