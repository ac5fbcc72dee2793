// Mistakes of C callers, for every operator: null pointers, tensor descriptions that are incomplete or inconsistent.
// Each gives a status and a message that names the operator and the argument.
#include <gtest/gtest.h>
#include <hopwell/hopwell.hpp>

#include <array>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

// C's structs have no initial values.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace hopwell {
namespace {

// A tensor description as in C: no constructor checks it. The sizes are stored where an overrun would be detected.
struct Described {
  Described(void* data, DLDataType type, std::vector<std::int64_t> sizes)
      : shape(std::move(sizes)),
        tensor{data, {kDLCPU, 0}, static_cast<std::int32_t>(shape.size()), type, shape.data(), nullptr, 0} {}
  Described(const Described& other) : shape(other.shape), tensor(other.tensor) { tensor.shape = shape.data(); }
  Described& operator=(const Described&) = delete;
  ~Described() = default;
  std::vector<std::int64_t> shape;
  DLTensor tensor;
};

// Outputs need separate memory: each tensor has a page.
struct alignas(64) Page {
  std::array<float, 512> numbers{};
};
std::deque<Page> pages;
std::deque<Described> described;

const DLTensor* tensor(DLDataType type, std::vector<std::int64_t> shape) {
  return &described.emplace_back(pages.emplace_back().numbers.data(), type, std::move(shape)).tensor;
}
const DLTensor* floats(std::vector<std::int64_t> shape) { return tensor({kDLFloat, 32, 1}, std::move(shape)); }
const DLTensor* ints(std::vector<std::int64_t> shape) { return tensor({kDLInt, 32, 1}, std::move(shape)); }
const DLTensor* bytes(std::vector<std::int64_t> shape) { return tensor({kDLUInt, 8, 1}, std::move(shape)); }

// A tensor of the argument struct, or of its selection.
template <class Args>
struct Member {
  Member(const char* argument, const DLTensor* Args::* member)
      : name(argument), of([member](Args& args) -> const DLTensor*& { return args.*member; }) {}
  Member(const char* argument, const DLTensor* hopwell_selection::* member)
      : name(argument), of([member](Args& args) -> const DLTensor*& { return args.selection.*member; }) {}
  const char* name;
  std::function<const DLTensor*&(Args&)> of;
};

template <class Args>
struct Operator {
  const char* name;
  hopwell_status (*call)(const Args*, hopwell_stream);
  hopwell_status (*workspace_bytes)(const Args*, std::size_t*);
  Args args;  // valid arguments
  std::vector<Member<Args>> members;

  void refuses(const Args& wrong, const std::string& argument) const {
    const std::string start = std::string(name) + ": " + argument + " ";
    std::size_t scratch = 77;
    EXPECT_EQ(call(&wrong, nullptr), HOPWELL_INVALID_ARGUMENT) << start;
    EXPECT_EQ(std::string(hopwell_last_error()).rfind(start, 0), 0U) << hopwell_last_error() << "\n" << start;
    EXPECT_EQ(workspace_bytes(&wrong, &scratch), HOPWELL_INVALID_ARGUMENT) << start;
    EXPECT_EQ(scratch, 77U);
  }

  void check() const {
    EXPECT_EQ(call(&args, nullptr), HOPWELL_OK) << hopwell_last_error();
    EXPECT_EQ(call(nullptr, nullptr), HOPWELL_INVALID_ARGUMENT);
    EXPECT_EQ(hopwell_last_error(), std::string(name) + ": args must be given; got null");
    std::size_t scratch = 77;
    EXPECT_EQ(workspace_bytes(nullptr, &scratch), HOPWELL_INVALID_ARGUMENT);
    EXPECT_EQ(hopwell_last_error(), std::string(name) + ": args must be given; got null");
    EXPECT_EQ(workspace_bytes(&args, nullptr), HOPWELL_INVALID_ARGUMENT);
    EXPECT_EQ(hopwell_last_error(), std::string(name) + ": bytes must be given; got null");
    EXPECT_EQ(workspace_bytes(&args, &scratch), HOPWELL_OK);
    EXPECT_EQ(scratch, 0U);

    for (const auto& [argument, member] : members) {
      Args wrong = args;
      const DLTensor& right = *member(wrong);
      DLTensor bad = right;
      member(wrong) = &bad;
      bad.shape = nullptr;
      refuses(wrong, argument);
      bad = right, bad.ndim = INT_MAX;
      refuses(wrong, argument);
      bad = right, bad.ndim = -1;
      refuses(wrong, argument);
      std::vector<std::int64_t> sizes(static_cast<std::size_t>(right.ndim), std::int64_t{1} << 32);
      bad = right, bad.shape = sizes.data();  // their product overflows to 0
      if (right.ndim > 0) refuses(wrong, argument);
      sizes.assign(sizes.size(), INT64_MIN);
      if (right.ndim > 0) refuses(wrong, argument);
      sizes.assign(right.shape, right.shape + right.ndim);
      std::vector<std::int64_t> strides(sizes.size(), INT64_MIN);
      bad = right, bad.strides = strides.data();
      bool steps = false;
      for (const std::int64_t size : sizes) steps = steps || size > 1;
      if (steps) refuses(wrong, argument);
    }
  }
};

TEST(CInterface, SparseMlaForward) {
  using Args = hopwell_sparse_mla_forward_args;
  Operator<Args>{"sparse_mla_forward",
                 hopwell_sparse_mla_forward,
                 hopwell_sparse_mla_forward_workspace_bytes,
                 {.q = floats({2, 3, 8}),
                  .kv = floats({5, 1, 8}),
                  .indices = ints({2, 1, 4}),
                  .sm_scale = 0.1F,
                  .d_v = 4,
                  .attn_sink = floats({3}),
                  .selection = {.topk_length = ints({2}), .q_positions = ints({2})},
                  .out = floats({2, 3, 4}),
                  .max_logits = floats({2, 3}),
                  .lse = floats({2, 3})},
                 {{"q", &Args::q},
                  {"kv", &Args::kv},
                  {"indices", &Args::indices},
                  {"attn_sink", &Args::attn_sink},
                  {"topk_length", &hopwell_selection::topk_length},
                  {"q_positions", &hopwell_selection::q_positions},
                  {"out", &Args::out},
                  {"max_logits", &Args::max_logits},
                  {"lse", &Args::lse}}}
      .check();
}

TEST(CInterface, SparseMlaBackward) {
  using Args = hopwell_sparse_mla_backward_args;
  Operator<Args>{"sparse_mla_backward",
                 hopwell_sparse_mla_backward,
                 hopwell_sparse_mla_backward_workspace_bytes,
                 {.d_out = floats({2, 3, 4}),
                  .q = floats({2, 3, 8}),
                  .kv = floats({5, 8}),
                  .indices = ints({2, 4}),
                  .out = floats({2, 3, 4}),
                  .lse = floats({2, 3}),
                  .sm_scale = 0.1F,
                  .d_v = 4,
                  .attn_sink = floats({3}),
                  .dq = floats({2, 3, 8}),
                  .dkv = floats({5, 8}),
                  .d_sink = floats({3}),
                  .attn = floats({2, 4})},
                 {{"d_out", &Args::d_out},
                  {"q", &Args::q},
                  {"kv", &Args::kv},
                  {"indices", &Args::indices},
                  {"out", &Args::out},
                  {"lse", &Args::lse},
                  {"attn_sink", &Args::attn_sink},
                  {"dq", &Args::dq},
                  {"dkv", &Args::dkv},
                  {"d_sink", &Args::d_sink},
                  {"attn", &Args::attn}}}
      .check();
}

TEST(CInterface, AttentionDistribution) {
  using Args = hopwell_attention_distribution_args;
  Operator<Args>{
      "attention_distribution",
      hopwell_attention_distribution,
      hopwell_attention_distribution_workspace_bytes,
      {.q = floats({2, 3, 8}),
       .kv = floats({5, 8}),
       .indices = ints({2, 4}),
       .lse = floats({2, 3}),
       .sm_scale = 0.1F,
       .out = floats({2, 4})},
      {{"q", &Args::q}, {"kv", &Args::kv}, {"indices", &Args::indices}, {"lse", &Args::lse}, {"out", &Args::out}}}
      .check();
}

TEST(CInterface, PagedAttention) {
  using Args = hopwell_paged_attention_args;
  Operator<Args> fused{"paged_attention",
                       hopwell_paged_attention,
                       hopwell_paged_attention_workspace_bytes,
                       {.q = floats({2, 1, 2, 32}),
                        .k_cache = floats({3, 4, 1, 32}),
                        .v_cache = floats({3, 4, 1, 32}),
                        .block_tables = ints({2, 2}),
                        .context_lens = ints({2}),
                        .scale = 0.1F,
                        .pos_bias_u = floats({2, 32}),
                        .pre_scale = HOPWELL_OFF,
                        .pos_bias_v = floats({2, 32}),
                        .r = floats({1, 6, 32}),
                        .alibi_slopes = floats({2}),
                        .out = floats({2, 1, 2, 32}),
                        .lse = floats({2, 1, 2})},
                       {{"q", &Args::q},
                        {"k_cache", &Args::k_cache},
                        {"v_cache", &Args::v_cache},
                        {"block_tables", &Args::block_tables},
                        {"context_lens", &Args::context_lens},
                        {"pos_bias_u", &Args::pos_bias_u},
                        {"pos_bias_v", &Args::pos_bias_v},
                        {"r", &Args::r},
                        {"alibi_slopes", &Args::alibi_slopes},
                        {"out", &Args::out},
                        {"lse", &Args::lse}}};
  fused.check();
  Operator<Args> biased = fused;
  biased.args.pos_bias_v = biased.args.r = nullptr;
  biased.args.bias = floats({1, 2, 1, 8});
  biased.members = {{"bias", &Args::bias}};
  biased.check();
}

TEST(CInterface, Nvfp4Gemv) {
  using Args = hopwell_nvfp4_gemv_args;
  Operator<Args> plain{
      "nvfp4_gemv",
      hopwell_nvfp4_gemv,
      hopwell_nvfp4_gemv_workspace_bytes,
      {.a = bytes({3, 8, 1}),
       .b = bytes({1, 8, 1}),
       .sfa = bytes({3, 1, 1}),
       .sfb = bytes({1, 1, 1}),
       .out = floats({3, 1, 1})},
      {{"a", &Args::a}, {"b", &Args::b}, {"sfa", &Args::sfa}, {"sfb", &Args::sfb}, {"out", &Args::out}}};
  const std::int64_t k_fastest[] = {8, 1, 24};
  for (const DLTensor* codes : {plain.args.a, plain.args.b})
    const_cast<DLTensor*>(codes)->strides = const_cast<std::int64_t*>(k_fastest);
  plain.check();
  Operator<Args> blocked = plain;
  blocked.args.scale_layout = HOPWELL_SCALES_BLOCKED;
  blocked.args.sfa = bytes({32, 4, 1, 4, 1, 1});
  blocked.args.sfb = bytes({512});
  blocked.members = {{"sfa", &Args::sfa}, {"sfb", &Args::sfb}};
  blocked.check();
}

TEST(CInterface, Nvfp4Linear) {
  using Args = hopwell_nvfp4_linear_args;
  Operator<Args>{"nvfp4_linear",
                 hopwell_nvfp4_linear,
                 hopwell_nvfp4_linear_workspace_bytes,
                 {.x = floats({2, 16}),
                  .weight = bytes({3, 8}),
                  .weight_scale = bytes({3, 1}),
                  .weight_global = floats({1}),
                  .bias = floats({3}),
                  .out = floats({2, 3})},
                 {{"x", &Args::x},
                  {"weight", &Args::weight},
                  {"weight_scale", &Args::weight_scale},
                  {"weight_global", &Args::weight_global},
                  {"bias", &Args::bias},
                  {"out", &Args::out}}}
      .check();
}

TEST(CInterface, Nvfp4LinearBackward) {
  using Args = hopwell_nvfp4_linear_backward_args;
  Operator<Args>{"nvfp4_linear_backward",
                 hopwell_nvfp4_linear_backward,
                 hopwell_nvfp4_linear_backward_workspace_bytes,
                 {.d_out = floats({2, 3}),
                  .weight = bytes({3, 8}),
                  .weight_scale = bytes({3, 1}),
                  .weight_global = floats({1}),
                  .d_x = floats({2, 16})},
                 {{"d_out", &Args::d_out},
                  {"weight", &Args::weight},
                  {"weight_scale", &Args::weight_scale},
                  {"weight_global", &Args::weight_global},
                  {"d_x", &Args::d_x}}}
      .check();
}

TEST(CInterface, Nvfp4Matmul) {
  using Args = hopwell_nvfp4_matmul_args;
  Operator<Args>{"nvfp4_matmul",
                 hopwell_nvfp4_matmul,
                 hopwell_nvfp4_matmul_workspace_bytes,
                 {.a = bytes({2, 8}),
                  .b = bytes({3, 8}),
                  .sfa = bytes({2, 1}),
                  .sfb = bytes({3, 1}),
                  .bias = floats({3}),
                  .out = floats({2, 3})},
                 {{"a", &Args::a},
                  {"b", &Args::b},
                  {"sfa", &Args::sfa},
                  {"sfb", &Args::sfb},
                  {"bias", &Args::bias},
                  {"out", &Args::out}}}
      .check();
}

TEST(CInterface, Nvfp4Quantize) {
  using Args = hopwell_nvfp4_quantize_args;
  Operator<Args>{
      "nvfp4_quantize",
      hopwell_nvfp4_quantize,
      hopwell_nvfp4_quantize_workspace_bytes,
      {.x = floats({2, 16}), .codes = bytes({2, 8}), .scales = bytes({2, 1}), .global_scale = floats({1})},
      {{"x", &Args::x}, {"codes", &Args::codes}, {"scales", &Args::scales}, {"global_scale", &Args::global_scale}}}
      .check();
}

TEST(CInterface, Nvfp4Dequantize) {
  using Args = hopwell_nvfp4_dequantize_args;
  Operator<Args>{
      "nvfp4_dequantize",
      hopwell_nvfp4_dequantize,
      hopwell_nvfp4_dequantize_workspace_bytes,
      {.codes = bytes({2, 8}), .scales = bytes({2, 1}), .global_scale = floats({1}), .x = floats({2, 16})},
      {{"codes", &Args::codes}, {"scales", &Args::scales}, {"global_scale", &Args::global_scale}, {"x", &Args::x}}}
      .check();
}

TEST(CInterface, LightningIndexer) {
  using Args = hopwell_lightning_indexer_args;
  Operator<Args>{"lightning_indexer",
                 hopwell_lightning_indexer,
                 hopwell_lightning_indexer_workspace_bytes,
                 {.q_index = floats({2, 3, 8}),
                  .k_index = floats({5, 8}),
                  .weights = floats({2, 3}),
                  .selection = {.q_positions = ints({2}), .k_start = ints({2}), .k_end = ints({2})},
                  .relu = HOPWELL_ON,
                  .indices = ints({2, 4}),
                  .scores = floats({2, 4})},
                 {{"q_index", &Args::q_index},
                  {"k_index", &Args::k_index},
                  {"weights", &Args::weights},
                  {"q_positions", &hopwell_selection::q_positions},
                  {"k_start", &hopwell_selection::k_start},
                  {"k_end", &hopwell_selection::k_end},
                  {"indices", &Args::indices},
                  {"scores", &Args::scores}}}
      .check();
}

TEST(CInterface, LightningIndexerBackward) {
  using Args = hopwell_lightning_indexer_backward_args;
  Operator<Args>{"lightning_indexer_backward",
                 hopwell_lightning_indexer_backward,
                 hopwell_lightning_indexer_backward_workspace_bytes,
                 {.target = floats({2, 4}),
                  .q_index = floats({2, 3, 8}),
                  .k_index = floats({5, 8}),
                  .weights = floats({2, 3}),
                  .indices = ints({2, 1, 4}),
                  .selection = {.k_start = ints({2}), .k_end = ints({2})},
                  .relu = HOPWELL_OFF,
                  .loss = floats({1}),
                  .d_q_index = floats({2, 3, 8}),
                  .d_k_index = floats({5, 8}),
                  .d_weights = floats({2, 3})},
                 {{"target", &Args::target},
                  {"q_index", &Args::q_index},
                  {"k_index", &Args::k_index},
                  {"weights", &Args::weights},
                  {"indices", &Args::indices},
                  {"k_start", &hopwell_selection::k_start},
                  {"k_end", &hopwell_selection::k_end},
                  {"loss", &Args::loss},
                  {"d_q_index", &Args::d_q_index},
                  {"d_k_index", &Args::d_k_index},
                  {"d_weights", &Args::d_weights}}}
      .check();
}

TEST(CInterface, IndexerDenseLoss) {
  using Args = hopwell_indexer_dense_loss_args;
  Operator<Args>{"indexer_dense_loss",
                 hopwell_indexer_dense_loss,
                 hopwell_indexer_dense_loss_workspace_bytes,
                 {.q = floats({2, 3, 8}),
                  .kv = floats({5, 1, 8}),
                  .lse = floats({2, 3}),
                  .q_index = floats({2, 2, 4}),
                  .k_index = floats({5, 4}),
                  .weights = floats({2, 2}),
                  .sm_scale = 0.1F,
                  .selection = {.k_start = ints({2}), .k_end = ints({2})},
                  .row_weights = floats({2}),
                  .relu = HOPWELL_ON,
                  .loss = floats({1}),
                  .row_loss = floats({2}),
                  .d_q_index = floats({2, 2, 4}),
                  .d_k_index = floats({5, 4}),
                  .d_weights = floats({2, 2})},
                 {{"q", &Args::q},
                  {"kv", &Args::kv},
                  {"lse", &Args::lse},
                  {"q_index", &Args::q_index},
                  {"k_index", &Args::k_index},
                  {"weights", &Args::weights},
                  {"k_start", &hopwell_selection::k_start},
                  {"k_end", &hopwell_selection::k_end},
                  {"row_weights", &Args::row_weights},
                  {"loss", &Args::loss},
                  {"row_loss", &Args::row_loss},
                  {"d_q_index", &Args::d_q_index},
                  {"d_k_index", &Args::d_k_index},
                  {"d_weights", &Args::d_weights}}}
      .check();
}

// ---- arguments that must not be ignored silently --------------------------------------------------------------------

template <class Args>
std::string refusal(hopwell_status (*call)(const Args*, hopwell_stream), const Args& args) {
  return call(&args, nullptr) == HOPWELL_INVALID_ARGUMENT ? hopwell_last_error() : "no error";
}

template <class Args>
std::string refusal(void (*call)(const Args&, Stream), const Args& args) {
  try {
    call(args, nullptr);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(CInterface, AStartWithoutItsFlag) {
  hopwell_sparse_mla_forward_args args = {.q = floats({2, 3, 8}),
                                          .kv = floats({5, 8}),
                                          .sm_scale = 0.1F,
                                          .d_v = 4,
                                          .selection = {.q_start = 7},
                                          .out = floats({2, 3, 4})};
  EXPECT_EQ(refusal(hopwell_sparse_mla_forward, args),
            "sparse_mla_forward: q_start must be 0 without has_q_start; got 7");
  args.selection.has_q_start = true;
  EXPECT_EQ(refusal(hopwell_sparse_mla_forward, args), "no error");
}

TEST(CInterface, ASwitchIsOnByDefault) {
  hopwell_lightning_indexer_args indexer = {
      .q_index = floats({2, 3, 8}), .k_index = floats({5, 8}), .weights = floats({2, 3}), .indices = ints({2, 4})};
  EXPECT_EQ(refusal(hopwell_lightning_indexer, indexer), "no error");
  const int three = 3;
  std::memcpy(&indexer.relu, &three, sizeof three);
  EXPECT_EQ(refusal(hopwell_lightning_indexer, indexer),
            "lightning_indexer: relu must be HOPWELL_ON or HOPWELL_OFF; got 3");
  indexer.relu = HOPWELL_OFF;
  EXPECT_EQ(refusal(hopwell_lightning_indexer, indexer), "no error");
}

// A window of 0 is no window, in C and in C++.
TEST(CInterface, AWindowOfZero) {
  PagedAttentionArgs args = {.q = floats({1, 1, 1, 32}),
                             .k_cache = floats({3, 4, 1, 32}),
                             .v_cache = floats({3, 4, 1, 32}),
                             .block_tables = ints({1, 2}),
                             .context_lens = ints({1}),
                             .scale = 0.1F,
                             .out = floats({1, 1, 1, 32}),
                             .lse = floats({1, 1, 1})};
  *static_cast<std::int32_t*>(args.context_lens->data) = 6;
  const auto lse = [&](std::optional<std::int64_t> window) {
    args.window = window;
    paged_attention(args);
    return *static_cast<const float*>(args.lse->data);
  };
  EXPECT_NEAR(lse(std::nullopt), std::log(6.0F), 1e-6F);
  EXPECT_NEAR(lse(0), std::log(6.0F), 1e-6F);
  EXPECT_NEAR(lse(2), std::log(2.0F), 1e-6F);
  args.window = -1;
  EXPECT_EQ(refusal(paged_attention, args), "paged_attention: window must be at least 1, or 0 for every key; got -1");
}

TEST(CInterface, AGlobalScaleThatIsGivenTwice) {
  hopwell_nvfp4_linear_args linear = {.x = floats({2, 16}),
                                      .weight = bytes({3, 8}),
                                      .weight_scale = bytes({3, 1}),
                                      .weight_global = floats({1}),
                                      .weight_global_value = 2,
                                      .out = floats({2, 3})};
  EXPECT_EQ(refusal(hopwell_nvfp4_linear, linear),
            "nvfp4_linear: weight_global and weight_global_value exclude each other");
  linear.weight_global_value = 0;  // the default
  EXPECT_EQ(refusal(hopwell_nvfp4_linear, linear), "no error");
  hopwell_nvfp4_quantize_args quantize = {.x = floats({2, 16}),
                                          .global_in = floats({1}),
                                          .global_in_value = 2,
                                          .codes = bytes({2, 8}),
                                          .scales = bytes({2, 1}),
                                          .global_scale = floats({1})};
  EXPECT_EQ(refusal(hopwell_nvfp4_quantize, quantize),
            "nvfp4_quantize: global_in and global_in_value exclude each other");
  const hopwell_nvfp4_dequantize_args dequantize = {.codes = bytes({2, 8}),
                                                    .scales = bytes({2, 1}),
                                                    .global_scale = floats({1}),
                                                    .global_value = 2,
                                                    .x = floats({2, 16})};
  EXPECT_EQ(refusal(hopwell_nvfp4_dequantize, dequantize),
            "nvfp4_dequantize: global_scale and global_value exclude each other");
}

// A scale of 0 means uniform attention and is not an error. In C++ a scale that the caller did not set is NaN.
TEST(CInterface, AScaleThatIsNotSet) {
  EXPECT_TRUE(std::isnan(SparseMlaForwardArgs{}.sm_scale));
  EXPECT_TRUE(std::isnan(SparseMlaBackwardArgs{}.sm_scale));
  EXPECT_TRUE(std::isnan(AttentionDistributionArgs{}.sm_scale));
  EXPECT_TRUE(std::isnan(IndexerDenseLossArgs{}.sm_scale));
  EXPECT_TRUE(std::isnan(PagedAttentionArgs{}.scale));
  const SparseMlaForwardArgs forward = {
      .q = floats({1, 2, 8}), .kv = floats({4, 8}), .indices = ints({1, 2}), .d_v = 8, .out = floats({1, 2, 8})};
  EXPECT_EQ(refusal(sparse_mla_forward, forward), "sparse_mla_forward: sm_scale must be finite; got nan");
  const PagedAttentionArgs decode = {.q = floats({1, 1, 32}),
                                     .k_cache = floats({1, 2, 1, 32}),
                                     .v_cache = floats({1, 2, 1, 32}),
                                     .block_tables = ints({1, 1}),
                                     .context_lens = ints({1}),
                                     .out = floats({1, 1, 32})};
  EXPECT_EQ(refusal(paged_attention, decode), "paged_attention: scale must be finite; got nan");
}

TEST(CInterface, AWorkspaceThatIsAnArgument) {
  hopwell_normalize_l1_args args = {.attn = floats({2, 4}), .out = floats({2, 4})};
  args.workspace = args.attn->data, args.workspace_bytes = 16;
  EXPECT_EQ(refusal(hopwell_normalize_l1, args),
            "normalize_l1: workspace must be in memory of its own; got memory that attn lies in too");
  args.workspace = pages.emplace_back().numbers.data();
  EXPECT_EQ(refusal(hopwell_normalize_l1, args), "no error");
}

TEST(CInterface, NormalizeL1) {
  using Args = hopwell_normalize_l1_args;
  Operator<Args>{"normalize_l1",
                 hopwell_normalize_l1,
                 hopwell_normalize_l1_workspace_bytes,
                 {.attn = floats({2, 4}), .out = floats({2, 4})},
                 {{"attn", &Args::attn}, {"out", &Args::out}}}
      .check();
}

}  // namespace
}  // namespace hopwell
