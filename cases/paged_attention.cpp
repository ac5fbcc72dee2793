// paged_attention: inputs and configurations (docs/operators/paged_attention.md).
#include <algorithm>
#include <climits>
#include <cstring>
#include <set>

#include "paged_attention_case.hpp"
#include "suites.hpp"

namespace hopwell::cases {
namespace {

using paged::Arrays;
using paged::BiasForm;
using paged::Config;
using paged::Pages;

constexpr std::pair<const char*, DType> kDTypes[] = {
    {"fp32", DType::kFloat32}, {"fp16", DType::kFloat16}, {"bf16", DType::kBFloat16}};
constexpr std::pair<const char*, hopwell_cache_layout> kLayouts[] = {
    {"nhd", HOPWELL_CACHE_NHD}, {"hnd", HOPWELL_CACHE_HND}, {"vllm", HOPWELL_CACHE_VLLM}};

// Every layout with every type: plain, and with all options that can be combined.
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
                     .strided = true,
                     .emulated = dtype != DType::kFloat16});
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
  // Row lengths that cover all divisions of a row among lanes, full and partial, with several heads per tile and with
  // one. The emulator runs every d in bf16. The other types divide rows by the same rules, so it runs some d of each
  // division. Clusters run one d of each division, full and partial, and each type in one layout.
  const std::set<std::int64_t> of_each_way = {32, 40, 88, 96, 120, 136, 184, 192, 248};
  for (const std::int64_t d : {32,  40,  48,  56,  72,  80,  88,  96,  104, 112, 120, 136, 144,
                               152, 160, 168, 176, 184, 192, 200, 208, 216, 224, 232, 240, 248})
    for (const auto& [type_name, dtype] : kDTypes)
      for (const hopwell_cache_layout layout : {HOPWELL_CACHE_NHD, HOPWELL_CACHE_HND})
        all.push_back(
            {.name = "row_of_" + std::to_string(d) + (layout == HOPWELL_CACHE_NHD ? "_nhd_" : "_hnd_") + type_name,
             .dtype = dtype,
             .layout = layout,
             .lengths = {2, 37, 65},
             .h_q = 8,
             .h_kv = 8,
             .d = d,
             .bias = layout == HOPWELL_CACHE_NHD ? BiasForm::kKey : BiasForm::kNone,
             .u = layout == HOPWELL_CACHE_NHD,
             .hidden = layout == HOPWELL_CACHE_NHD,
             .emulated = dtype == DType::kBFloat16 || (dtype == DType::kFloat16 ? d % 32 == 8 : d % 32 != 16),
             .emulated_on = of_each_way.contains(d) && (dtype == DType::kFloat16) == (layout == HOPWELL_CACHE_HND)
                                ? ""
                                : "emu:sm80"});
  // Rows of two to five 8-element vectors per lane: gathered element by element, with gaps between pages, heads and
  // keys, and long enough that the ring wraps around.
  for (const std::int64_t d : {40, 88, 104, 136, 200}) {
    const std::string name = "packed_rows_of_" + std::to_string(d);
    const Config c{.name = name + "_scattered",
                   .dtype = DType::kBFloat16,
                   .lengths = {4, 5, 6, 19, 64},
                   .h_q = 4,
                   .h_kv = 4,
                   .d = d,
                   .block = 5,
                   .window = 13,
                   .pages = Pages::kBad,
                   .bias = BiasForm::kKey};
    all.push_back(c);
    Config strided = c;
    strided.name = name + "_strided", strided.lengths = {0, 1, 16, 41, 130}, strided.h_q = strided.h_kv = 3;
    strided.block = 8, strided.strided = true, strided.window = 37;
    all.push_back(strided);
    Config many = c;
    many.name = name + "_many_tiles", many.lengths = {700, 33}, many.h_q = many.h_kv = 16, many.block = 16;
    many.window = 0, many.pages = Pages::kPermuted, many.hidden = true;
    all.push_back(many);
  }
  for (const auto& [layout_name, layout] : kLayouts)
    for (const std::int64_t block : {1, 8, 24, 256})
      all.push_back({.name = std::string(layout_name) + "_block_" + std::to_string(block),
                     .dtype = DType::kFloat16,
                     .layout = layout,
                     .lengths = {0, 1, block - 1, block, block + 1, 70},
                     .block = block});
  for (const std::int64_t d : {64, 128})  // whole lines of V
    all.push_back({.name = "vllm_block_64_window_40_d_" + std::to_string(d),
                   .dtype = DType::kBFloat16,
                   .layout = HOPWELL_CACHE_VLLM,
                   .lengths = {1, 63, 64, 65, 200},
                   .d = d,
                   .block = 64,
                   .window = 40});
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
                   .d = 32,
                   .emulated = q_len != 7});
  all.push_back({.name = "q_len_16_h_q_16_h_kv_1",
                 .lengths = {3, 290},
                 .q_len = 16,
                 .h_q = 16,
                 .h_kv = 1,
                 .d = 32,
                 .u = true,
                 .emulated = false});
  for (const auto& [type_name, dtype] : kDTypes) {
    const std::string prefix = std::string("decoder_") + type_name;
    const bool emulated = dtype == DType::kBFloat16;  // one type, because the emulator is slow on these
    all.push_back(
        {.name = prefix + "_h16_d64", .dtype = dtype, .lengths = {1000}, .h_q = 16, .h_kv = 16, .emulated = emulated});
    all.push_back({.name = prefix + "_h32_d128",
                   .dtype = dtype,
                   .lengths = {130, 257},
                   .h_q = 32,
                   .h_kv = 32,
                   .d = 128,
                   .emulated = emulated});
    all.push_back({.name = prefix + "_h32_h_kv_8_d128_vllm",
                   .dtype = dtype,
                   .layout = HOPWELL_CACHE_VLLM,
                   .lengths = {511, 64},
                   .h_q = 32,
                   .h_kv = 8,
                   .d = 128,
                   .emulated = emulated});
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
      if (form == BiasForm::kFused && dtype == DType::kBFloat16) continue;  // r has q's type, or fp32
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
  for (const auto& [layout_name, layout] : kLayouts)
    for (const auto& [type_name, dtype] : kDTypes)
      all.push_back({.name = std::string("bias_hides_keys_from_some_") + layout_name + "_" + type_name,
                     .dtype = dtype,
                     .layout = layout,
                     .lengths = {0, 1, 40, 33, 100},
                     .h_q = 8,
                     .bias = BiasForm::kKey,
                     .hidden = true,
                     .partly = true});
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
  for (const auto& [layout_name, layout] : kLayouts)
    all.push_back({.name = std::string("window_37_q_len_3_bf16_") + layout_name,
                   .dtype = DType::kBFloat16,
                   .layout = layout,
                   .lengths = {0, 1, 2, 18, 40, 300},
                   .q_len = 3,
                   .d = 72,
                   .window = 37});
  for (const auto& [layout_name, layout] : kLayouts) {
    const std::string name = std::string("constant_rows_") + layout_name;
    const float scale = 0.0721687824F;  // 192^-0.5
    all.push_back({.name = name, .layout = layout, .lengths = {1, 300}, .d = 256, .scale = scale});
    all.back().constant = true;
    all.push_back({.name = name + "_bf16", .dtype = DType::kBFloat16, .layout = layout, .lengths = {1, 300}, .d = 128});
    all.back().scale = scale, all.back().u = true, all.back().constant = true;
    all.push_back({.name = name + "_context_2_to_the_20", .layout = layout, .lengths = {1 << 20}, .h_q = 1, .h_kv = 1});
    Config& c = all.back();
    c.d = 32, c.block = 256, c.pages = Pages::kRepeated, c.constant = true, c.emulated = false;
  }
  all.push_back({.name = "large_logits", .lengths = {1, 20, 300}, .scale = 1, .q_spread = 1000});
  all.push_back(
      {.name = "large_logits_bf16", .dtype = DType::kBFloat16, .lengths = {1, 20, 300}, .scale = 1, .q_spread = 1000});
}

// Values that are not finite. In visible keys they must appear in the output for any weight, in hidden keys they must
// not. The lengths are not multiples of the kernels' tile sizes.
void add_infinite(std::vector<Config>& all) {
  for (const auto& [layout_name, layout] : kLayouts) {
    for (const auto& [type_name, dtype] : kDTypes) {
      const auto add = [&, &layout_name = layout_name, &type_name = type_name](const char* what, Config c) {
        c.name = std::string("infinite_values_") + what + layout_name + "_" + type_name;
        c.dtype = dtype, c.layout = layout, c.infinite = true;
        if (dtype == DType::kFloat16 && *what != '\0') c.emulated_on = "emu:sm80";
        all.push_back(c);
      };
      add("", {.name = {}, .lengths = {1, 2, 3, 4, 5, 15, 16, 17, 33, 67}});
      add("group_", {.name = {}, .lengths = {1, 6, 31, 33}, .h_q = 3, .h_kv = 1, .d = 32, .block = 5});
      add("group_d_256_", {.name = {}, .lengths = {2, 6, 35, 50}, .q_len = 2, .h_q = 6, .h_kv = 2, .d = 256});
      add("q_len_3_", {.name = {}, .lengths = {2, 3, 5, 35, 66, 130}, .q_len = 3, .d = 72});
      add("window_", {.name = {}, .lengths = {3, 50, 131}, .q_len = 2, .h_q = 6, .window = 37});
      add("bad_pages_", {.name = {}, .lengths = {6, 19, 64}, .block = 8, .pages = Pages::kBad});
      // Weights that round to 0, and keys that a bias hides from some queries.
      add("large_logits_", {.name = {}, .lengths = {9, 66}, .scale = 1, .q_spread = 1000});
      add("hidden_", {.name = {},
                      .lengths = {3, 40, 67},
                      .q_len = 2,
                      .h_q = 8,
                      .bias = BiasForm::kKey,
                      .hidden = true,
                      .partly = true});
      if (dtype == DType::kFloat32) continue;
      add("group_of_12_",
          {.name = {}, .lengths = {1, 6, 31, 33, 130}, .max_blocks = 6600, .h_q = 24, .h_kv = 2, .d = 72});
      add("hidden_group_of_11_", {.name = {},
                                  .lengths = {3, 40, 67},
                                  .max_blocks = 22000,
                                  .h_q = 11,
                                  .h_kv = 1,
                                  .bias = BiasForm::kKey,
                                  .hidden = true,
                                  .partly = true});
    }
  }
  all.push_back({.name = "infinite_values_in_many_chunks", .lengths = {5000}, .scale = 1, .q_spread = 1000});
  all.back().infinite = true;
}

// Long contexts, large batches, caches above 2^31 elements.
void add_sizes(std::vector<Config>& all) {
  std::vector<std::int64_t> ragged(9, 512);
  ragged[4] = 65536;
  // On a GPU with few SMs, each warp has several tiles.
  all.push_back({.name = "many_tiles_bf16",
                 .dtype = DType::kBFloat16,
                 .lengths = {500, 190, 300, 65},
                 .h_q = 16,
                 .h_kv = 8,
                 .bias = BiasForm::kKey,
                 .extent = 300});
  Config large_group = all.back();
  large_group.name = "large_group_many_tiles_bf16", large_group.h_q = 72, large_group.max_blocks = 2048;
  all.push_back(large_group);
  // All CTAs share one row block. With many CTAs, the last one reads more partial results than a warp loads at once.
  all.push_back({.name = "one_row_block_bf16", .dtype = DType::kBFloat16, .lengths = {700}, .h_kv = 4});
  all.push_back({.name = "one_row_block_vllm", .layout = HOPWELL_CACHE_VLLM, .lengths = {3000}, .h_q = 1, .h_kv = 1});
  for (const auto& [type_name, dtype] : kDTypes)
    all.push_back({.name = std::string("one_65536_among_512_") + type_name,
                   .dtype = dtype,
                   .lengths = ragged,
                   .h_q = 2,
                   .d = 32,
                   .pages = Pages::kRepeated,
                   .emulated = dtype == DType::kBFloat16});
  all.push_back({.name = "context_2_to_the_20",
                 .dtype = DType::kFloat16,
                 .lengths = {1 << 20},
                 .h_q = 1,
                 .h_kv = 1,
                 .d = 32,
                 .block = 256,
                 .pages = Pages::kRepeated,
                 .emulated = false});
  all.push_back({.name = "context_2_to_the_20_vllm_distance",
                 .layout = HOPWELL_CACHE_VLLM,
                 .lengths = {1 << 20},
                 .h_q = 1,
                 .h_kv = 1,
                 .d = 32,
                 .block = 256,
                 .pages = Pages::kRepeated,
                 .bias = BiasForm::kDistance,
                 .extent = 1 << 16,
                 .emulated = false});
  // All threads of a CTA compute the plan of a large batch together.
  for (const std::int64_t b : {70, 3000}) {
    std::vector<std::int64_t> many(static_cast<std::size_t>(b));
    for (std::size_t n = 0; n < many.size(); ++n) many[n] = static_cast<std::int64_t>(n * 7 % 23);
    for (const std::int64_t h_kv : {1, 2})
      all.push_back({.name = "batch_of_" + std::to_string(b) + "_h_kv_" + std::to_string(h_kv),
                     .dtype = DType::kBFloat16,
                     .lengths = many,
                     .h_q = 2,
                     .h_kv = h_kv,
                     .d = 32,
                     .emulated = b == 70});
  }
  // As many row blocks as the emulator has SMs, and nearly as many as an H200 has: each CTA has one whole row block.
  for (const std::size_t b : {4, 64})
    all.push_back({.name = "equal_lengths_of_" + std::to_string(b),
                   .dtype = DType::kBFloat16,
                   .lengths = std::vector<std::int64_t>(b, 300),
                   .h_q = b == 4 ? 4 : 8,
                   .h_kv = b == 4 ? 4 : 8,
                   .d = 64,
                   .emulated = b == 4});
  for (const auto& [layout_name, layout] : kLayouts)
    for (const std::int64_t h_kv : {2, 8})
      all.push_back({.name = std::string("cache_above_2_to_the_31_") + layout_name + "_h_kv_" + std::to_string(h_kv),
                     .dtype = DType::kBFloat16,
                     .layout = layout,
                     .lengths = {1000, 17, 300},
                     .h_q = 8,
                     .h_kv = h_kv,
                     .pages = Pages::kRepeated,
                     .far = true,
                     .emulated = false});
}

// 16-bit types: GPUs have separate kernels for one query per KV head and for several.
void add_groups(std::vector<Config>& all) {
  const std::pair<const char*, BiasForm> forms[] = {{"none", BiasForm::kNone},
                                                    {"key", BiasForm::kKey},
                                                    {"distance", BiasForm::kDistance},
                                                    {"fused", BiasForm::kFused}};
  const std::pair<std::int64_t, std::int64_t> heads[] = {{4, 4}, {3, 3}, {8, 2}, {9, 1}};
  for (const auto& [form_name, form] : forms) {
    for (const auto& [h_q, h_kv] : heads) {
      const std::string name =
          std::string("group_") + form_name + "_h_q_" + std::to_string(h_q) + "_h_kv_" + std::to_string(h_kv);
      Config c{.name = name + "_bf16",
               .dtype = DType::kBFloat16,
               .lengths = {0, 1, 16, 40, 41, 130},
               .h_q = h_q,
               .h_kv = h_kv,
               .bias = form,
               .extent = 48,
               .u = true};
      all.push_back(c);
      c.name = name + "_fp16_q_len_3_window";
      c.dtype = DType::kFloat16, c.layout = HOPWELL_CACHE_HND, c.q_len = 3, c.d = 72, c.window = 37, c.block = 32;
      c.bias_dtype = DType::kFloat32, c.out_of_range = HOPWELL_OUT_OF_RANGE_CLAMP, c.alibi = true;
      all.push_back(c);
      Config wide = c;
      wide.name = name + "_fp16_q_len_3_window_d_200", wide.d = 200;
      if (form == BiasForm::kNone || form == BiasForm::kDistance) wide.emulated_on = "emu:sm80";
      all.push_back(wide);
      c.name = name + "_fp16_strided";
      c.layout = HOPWELL_CACHE_NHD, c.q_len = 0, c.extent = 33, c.d = 128, c.strided = true, c.window = 0,
      c.post_scale = true;
      c.bias_dtype = {}, c.out_of_range = HOPWELL_OUT_OF_RANGE_NEG_INF;
      all.push_back(c);
      c.name = name + "_bf16_hidden";
      if (form != BiasForm::kKey) continue;
      c.dtype = DType::kBFloat16, c.hidden = true, c.q_len = 2, c.strided = false, c.extent = 40;
      all.push_back(c);
    }
  }
}

// 9 to 16 query heads per KV head in 16 bits: GPUs have separate kernels for them.
void add_large_groups(std::vector<Config>& all) {
  const std::pair<std::int64_t, std::int64_t> heads[] = {{9, 1}, {24, 2}, {32, 2}};
  for (const auto& [layout_name, layout] : kLayouts) {
    for (const auto& [h_q, h_kv] : heads) {
      if (layout == HOPWELL_CACHE_HND && h_q != 24) continue;
      const std::string name = "large_group_" + std::string(layout_name) + "_h_q_" + std::to_string(h_q) + "_h_kv_" +
                               std::to_string(h_kv) + "_";
      Config c{.name = name + "bf16",
               .dtype = DType::kBFloat16,
               .layout = layout,
               .lengths = {0, 1, 16, 40, 41, 130},
               .h_q = h_q,
               .h_kv = h_kv,
               .bias = BiasForm::kKey,
               .extent = 144,
               .u = true};
      // Block tables so long that the plan must assume many tiles per warp.
      c.emulated_on = "emu:sm80";  // no clusters for such block tables
      const auto add = [&all, &c] {
        c.max_blocks = (std::int64_t{1} << 20) / (c.b() * c.h_kv * c.block);
        all.push_back(c);
      };
      add();
      c.name = name + "bf16_hidden", c.hidden = true;
      add();
      c.name = name + "bf16_block_64_d_96_many_tiles", c.hidden = false, c.bias = BiasForm::kNone, c.u = false;
      c.lengths = {700, 33}, c.block = 64, c.d = 96;
      add();
      c.name = name + "fp16_d_128_window", c.dtype = DType::kFloat16, c.d = 128, c.window = 37, c.block = 32;
      c.lengths = {5, 64, 300}, c.bias = BiasForm::kDistance, c.bias_dtype = DType::kFloat32, c.extent = 33;
      c.out_of_range = HOPWELL_OUT_OF_RANGE_CLAMP, c.alibi = true;
      add();
      c.name = name + "fp16_strided", c.d = 40, c.window = 0, c.block = 16, c.bias = BiasForm::kKey, c.bias_dtype = {};
      c.out_of_range = HOPWELL_OUT_OF_RANGE_NEG_INF, c.extent = 280, c.strided = true, c.post_scale = true, c.u = true;
      add();
      c.name = name + "bf16_bad_pages_bias_fp32", c.dtype = DType::kBFloat16, c.strided = c.post_scale = false;
      c.bias_dtype = DType::kFloat32, c.d = 64, c.block = 32, c.pages = Pages::kBad, c.u = false;
      add();
    }
  }
}

// Without pos_bias_u the tiles use q unmodified; with it, q + u has low-order parts. Covers every d, one and two blocks
// of 8 query vectors (block tables so long that the plan assumes many tiles per warp), and row blocks of one warp and
// of several.
void add_tiles_of_queries(std::vector<Config>& all, const std::string& prefix, bool u, std::int64_t d,
                          std::int64_t group) {
  const std::string name = prefix + std::to_string(group) + "_d_" + std::to_string(d);
  Config c{.name = name + "_bf16",
           .dtype = DType::kBFloat16,
           .lengths = {0, 1, 16, 40, 41, 1100},
           .h_q = 2 * group,
           .h_kv = 2,
           .d = d,
           .bias = BiasForm::kKey,
           .extent = 1104,
           .u = u};
  // Cluster tiles: a d that fills its tile runs with 7 queries, other d with 2.
  const bool fills = d == 64 || d == 96 || d == 128 || d == 192 || d == 256;
  if (group > 8 || (group == (fills ? 2 : 7) && !(u && d > 128))) c.emulated_on = "emu:sm80";
  const auto add = [&all, &c, group] {
    if (group > 8) c.max_blocks = (std::int64_t{1} << 20) / (c.b() * c.h_kv * c.block);
    all.push_back(c);
  };
  add();
  c.name = name + "_bf16_hnd_window", c.layout = HOPWELL_CACHE_HND, c.block = 32, c.window = 37;
  c.q_len = group == 12 ? 1 : 3, c.lengths = {5, 130, 64}, c.bias = BiasForm::kDistance;
  c.bias_dtype = DType::kFloat32, c.extent = 33, c.out_of_range = HOPWELL_OUT_OF_RANGE_CLAMP, c.alibi = true;
  add();
  c.name = name + "_fp16_infinite", c.layout = HOPWELL_CACHE_NHD, c.dtype = DType::kFloat16, c.alibi = false;
  c.bias = BiasForm::kNone, c.window = 0, c.infinite = true, c.q_len = 1, c.lengths = {1, 6, 31, 33, 130, 33, 66, 2};
  c.bias_dtype = {};
  add();
  if (!u || group <= 8 || d > 128) return;
  c.name = name + "_vllm_bf16", c.dtype = DType::kBFloat16, c.layout = HOPWELL_CACHE_VLLM, c.infinite = false;
  add();
  c.name = name + "_vllm_fp16_block_64", c.dtype = DType::kFloat16, c.block = 64;
  add();
}
void add_exact_queries(std::vector<Config>& all) {
  for (const std::int64_t d : {40, 64, 72, 96, 120, 128, 136, 192, 200, 256})
    for (const std::int64_t group : {2, 7, 12}) add_tiles_of_queries(all, "exact_q_of_", false, d, group);
  for (const std::int64_t d : {40, 64, 96, 128, 136, 256})
    for (const std::int64_t group : {2, 7, 12}) add_tiles_of_queries(all, "q_and_u_of_", true, d, group);
}

std::string setting(const Settings& settings, const std::string& key, const std::string& allowed) {
  const auto at = settings.find(key);
  const std::string value = at == settings.end() ? "" : at->second;
  if ((" " + allowed + " ").find(" " + value + " ") == std::string::npos || value.empty()) {
    throw std::invalid_argument("setting '" + key + "' must be one of: " + allowed + "; got '" + value + "'");
  }
  return value;
}

// Random numbers at memory speed: repeats the first 2^18 elements.
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
  const std::string bias = setting(settings, "bias", "none key key_each key_each_u distance fused");
  for (const auto& [name, value] : kDTypes)
    if (dtype == name) c.dtype = value;
  for (const auto& [name, value] : kLayouts)
    if (layout == name) c.layout = value;
  c.bias = bias == "key"          ? BiasForm::kKey
           : bias == "key_each"   ? BiasForm::kKey  // one row per sequence
           : bias == "key_each_u" ? BiasForm::kKey
           : bias == "distance"   ? BiasForm::kDistance
           : bias == "fused"      ? BiasForm::kFused
                                  : BiasForm::kNone;
  c.lengths.assign(static_cast<std::size_t>(number(settings, "b")), number(settings, "context"));
  if (c.lengths.empty()) throw std::invalid_argument("setting 'b' must be at least 1; got '0'");
  if (const std::int64_t shortest = number(settings, "shortest"); shortest > 0)
    for (std::int64_t& length : c.lengths)
      length = shortest + random.below(std::max<std::int64_t>(1, length - shortest));
  c.lengths[c.lengths.size() / 2] = std::max(c.lengths.front(), number(settings, "longest"));
  c.q_len = number(settings, "q_len"), c.h_q = number(settings, "h_q"), c.h_kv = number(settings, "h_kv");
  c.d = number(settings, "d"), c.block = number(settings, "block"), c.window = number(settings, "window");
  c.u = bias == "fused" || bias == "key_each_u";
  c.shared_bias = bias == "key" || bias == "distance";
  c.extent = *std::max_element(c.lengths.begin(), c.lengths.end());
  if (c.block < 1) throw std::invalid_argument("setting 'block' must be at least 1; got '0'");
  Instance instance;
  std::int64_t blocks = 4;
  for (std::int64_t n = 0; n < c.b(); ++n) blocks += (c.context(n) + c.block - 1) / c.block;
  const Arrays a = paged::add_arrays(c, random, instance, blocks);
  paged::fill_tables(c, random, *a.tables, blocks);
  fill_fast(*a.k, random);
  fill_fast(*a.v, random);
  instance.call = [c, a, workspace = instance.workspace.get()](const char* backend, Stream stream) {
    paged::call(c, a, *workspace, backend, stream);
  };
  paged::count_work(c, instance);
  return instance;
}

Settings shape(const char* dtype, const char* layout, std::int64_t b, std::int64_t ctx, std::int64_t longest,
               std::int64_t h_q, std::int64_t h_kv, std::int64_t d, const char* bias) {
  const auto text = [](std::int64_t n) { return std::to_string(n); };
  return {{"dtype", dtype},  {"layout", layout}, {"b", text(b)},     {"context", text(ctx)}, {"longest", text(longest)},
          {"shortest", "0"}, {"q_len", "1"},     {"h_q", text(h_q)}, {"h_kv", text(h_kv)},   {"d", text(d)},
          {"block", "16"},   {"window", "0"},    {"bias", bias}};
}

// Shapes of the CPU's performance targets, then shapes of other libraries' tables.
std::vector<std::pair<std::string, Settings>> shapes() {
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

Settings with(Settings settings, const char* key, const char* value) {
  settings[key] = value;
  return settings;
}

// Shapes of the H200's performance targets.
std::vector<std::pair<std::string, Settings>> device_shapes() {
  const Settings speech = shape("bf16", "nhd", 32, 4096, 0, 16, 16, 64, "key_each");
  return {{"h32_d128_b64_ctx4096", shape("bf16", "nhd", 64, 4096, 0, 32, 32, 128, "key_each")},
          {"h16_d64_b32_ctx4096", speech},
          {"ragged", with(shape("bf16", "nhd", 64, 6840, 8192, 16, 16, 64, "key_each"), "shortest", "128")},
          {"one_65536_h16_d64", shape("bf16", "nhd", 64, 512, 65536, 16, 16, 64, "key_each")},
          {"one_65536_h32_d128", shape("bf16", "nhd", 64, 512, 65536, 32, 32, 128, "key_each")},
          {"b1_ctx32768", shape("bf16", "nhd", 1, 32768, 0, 16, 16, 64, "key_each")},
          {"gqa_32_8_b16_ctx8192", shape("bf16", "nhd", 16, 8192, 0, 32, 8, 128, "key_each")},
          {"b1_ctx1000", shape("bf16", "nhd", 1, 1000, 0, 16, 16, 64, "key_each")},
          {"no_bias", with(speech, "bias", "none")},
          {"distance", with(speech, "bias", "distance")},
          {"fused", with(speech, "bias", "fused")},
          {"fp16", with(speech, "dtype", "fp16")},
          {"fp32", with(speech, "dtype", "fp32")},
          {"fp32_h32_d128_b16", shape("fp32", "nhd", 16, 4096, 0, 32, 32, 128, "key_each")},
          {"d_32", with(with(speech, "d", "32"), "b", "64")},
          {"d_40", with(with(speech, "d", "40"), "b", "51")},
          {"d_48", with(with(speech, "d", "48"), "b", "43")},
          {"d_72", with(with(speech, "d", "72"), "b", "28")},
          {"d_80", with(with(speech, "d", "80"), "b", "26")},
          {"d_88", with(with(speech, "d", "88"), "b", "23")},
          {"d_96", with(with(speech, "d", "96"), "b", "21")},
          {"d_112", with(with(speech, "d", "112"), "b", "18")},
          {"d_136", with(with(speech, "d", "136"), "b", "15")},
          {"d_160", with(with(speech, "d", "160"), "b", "13")},
          {"d_192", with(with(speech, "d", "192"), "b", "11")},
          {"d_224", with(with(speech, "d", "224"), "b", "9")},
          {"d_256", with(with(speech, "d", "256"), "b", "8")},
          {"group_3", shape("bf16", "nhd", 16, 8192, 0, 24, 8, 128, "key_each")},
          {"group_5", shape("bf16", "nhd", 16, 8192, 0, 40, 8, 128, "key_each")},
          {"group_7", shape("bf16", "nhd", 16, 8192, 0, 56, 8, 128, "key_each")},
          {"group_12", shape("bf16", "nhd", 16, 8192, 0, 96, 8, 128, "key_each")},
          {"group_4_d_96", shape("bf16", "nhd", 21, 8192, 0, 32, 8, 96, "key_each")},
          {"group_2_d_256", shape("bf16", "nhd", 8, 8192, 0, 16, 8, 256, "key_each")},
          {"group_4_d_192", shape("bf16", "nhd", 10, 8192, 0, 32, 8, 192, "key_each")},
          {"block_64", with(speech, "block", "64")},
          {"hnd", with(speech, "layout", "hnd")},
          {"vllm", with(speech, "layout", "vllm")}};
}

// The emulator runs a selection: cases that are the first with their tile, or the first in which their kind of tile
// meets an option. The others are nightly.
std::vector<std::string> features_of(const Config& c) {
  const bool vllm = c.layout == HOPWELL_CACHE_VLLM, wide = c.d > 128, half = c.dtype != DType::kFloat32;
  const bool fused = c.bias == BiasForm::kFused;
  const std::int64_t queries = c.h_q / c.h_kv * c.queries();
  const bool mma = half && !fused && !(vllm && wide) && c.block % 16 == 0 && (vllm || queries > (wide && c.u ? 2 : 1));
  const std::string kind = std::string(mma ? "mma" : vllm ? "columns" : "rows") + (half ? "16" : "32");
  std::vector<std::string> features;
  const auto add = [&](const std::string& option) { features.push_back(kind + option); };
  const auto add_if = [&](bool has, const char* option) {
    if (has) add(option);
  };
  // The tile: mma divides dimensions by these sizes, and keys of a page by 2, 4 or 8 vectors.
  const std::int64_t size = !mma ? 0 : c.d <= 64 ? 64 : c.d <= 96 ? 96 : c.d <= 128 ? 128 : c.d <= 192 ? 192 : 256;
  const std::int64_t vectors = mma && vllm ? std::min<std::int64_t>(c.block, 64) / 8 : 0;
  add("tile " + std::to_string(static_cast<int>(c.dtype)) + (fused ? " r " : " ") + std::to_string(size) + " " +
      std::to_string(vectors) + (mma && c.u ? " u" : ""));
  const std::string bias = " bias " + std::to_string(static_cast<int>(c.bias));
  add(bias + " beyond " + std::to_string(static_cast<int>(c.out_of_range)));
  add(bias + (c.extent <= 1 ? " extent " + std::to_string(c.extent) : ""));
  add_if(c.bias_dtype.has_value(), (bias + " dtype").c_str());
  add_if(c.shared_bias, (bias + " shared").c_str());
  add(" layout " + std::to_string(static_cast<int>(c.layout)));
  add(" pages " + std::to_string(static_cast<int>(c.pages)) + (c.block % 8 == 0 ? "" : " odd block"));
  add(" queries " + std::to_string(std::min<std::int64_t>(c.q_len, 2)) + (queries > 8 ? " two passes" : ""));
  add(" scale " + std::to_string(c.scale > 0 ? 1 : c.scale < 0 ? -1 : 0) + (c.q_spread > 1 ? " spread" : ""));
  add(" heads " + std::to_string(c.h_kv % 4));
  add_if(c.window > 0, c.window > INT_MAX ? " huge window" : c.window < 16 ? " narrow window" : " window");
  add_if(c.u, " u");
  add_if(c.no_v, " no v");
  add_if(c.alibi, " alibi");
  add_if(c.strided, " strided");
  add_if(c.post_scale, " post scale");
  add_if(c.hidden, c.partly ? " hidden from some" : " hidden");
  add_if(c.constant, " constant");
  add_if(c.infinite, " infinite");
  add_if(c.infinite && c.window > 0, " infinite, window");
  add_if(c.infinite && c.hidden, " infinite, hidden");
  add_if(c.infinite && c.q_len > 1, " infinite, queries");
  const std::int64_t longest = c.lengths.empty() ? 0 : *std::max_element(c.lengths.begin(), c.lengths.end());
  add(longest > 1000 ? " very long" : longest > 200 ? " long" : longest == 0 ? " empty" : " short");
  add_if(c.b() > 32, " large batch");
  add_if(c.max_blocks >= 0, c.max_blocks == 0 ? " no blocks" : " blocks");
  return features;
}
std::vector<Unsupported> unsupported_cases() {
  return {{"sm90", "needs few sequences and heads, so that a cluster for each runs at the same time",
           "batch_of_70_h_kv_1 batch_of_70_h_kv_2 group_fused_h_q_4_h_kv_4_fp16_q_len_3_window "
           "group_fused_h_q_4_h_kv_4_fp16_q_len_3_window_d_200 group_fused_h_q_8_h_kv_2_fp16_q_len_3_window "
           "group_fused_h_q_8_h_kv_2_fp16_q_len_3_window_d_200 group_fused_h_q_9_h_kv_1_fp16_q_len_3_window "
           "group_fused_h_q_9_h_kv_1_fp16_q_len_3_window_d_200 hnd_bf16_everything hnd_fp32_everything "
           "infinite_values_q_len_3_hnd_fp32 infinite_values_q_len_3_vllm_fp32 nhd_bf16_everything "
           "nhd_fp32_everything q_len_16 q_len_2 vllm_bf16_everything vllm_fp32_everything window_1000_hnd "
           "window_1000_vllm window_17_hnd window_17_vllm window_1_hnd window_1_vllm window_4_hnd window_4_vllm "
           "window_huge"},
          {"sm90", "slower than sm80 for max_blocks * block above 4096 with few heads or float32",
           "infinite_values_in_many_chunks"},
          {"sm90", "slower than sm80 for max_blocks * block above 4096 or above 16384 / b, if b > 1",
           "infinite_values_group_of_12_hnd_bf16 infinite_values_group_of_12_nhd_bf16 "
           "infinite_values_group_of_12_vllm_bf16 infinite_values_hidden_group_of_11_hnd_bf16 "
           "infinite_values_hidden_group_of_11_nhd_bf16 infinite_values_hidden_group_of_11_vllm_bf16 "
           "large_group_many_tiles_bf16 one_65536_among_512_bf16"}};
}
void select_for_the_emulator(std::vector<Config>& all) {
  std::set<std::string> seen;
  const std::vector<Unsupported> unsupported = unsupported_cases();
  for (Config& c : all) {
    // A case that clusters do not support, or that one backend runs, covers nothing of the other.
    if (!c.emulated || c.far || !c.emulated_on.empty() || !reason_of(unsupported, c.name, "sm90").empty()) continue;
    const std::vector<std::string> features = features_of(c);
    const bool first_of_row = c.name.starts_with("row_of_");  // chosen by the division of rows
    const std::size_t before = seen.size();
    seen.insert(features.begin(), features.end());
    c.nightly = seen.size() == before && !first_of_row;
  }
}

}  // namespace

Suite paged_attention() {
  std::vector<Config> all;
  add_layouts(all);
  add_shapes(all);
  add_biases(all);
  add_lengths(all);
  add_infinite(all);
  add_sizes(all);
  add_groups(all);
  add_large_groups(all);
  add_exact_queries(all);
  select_for_the_emulator(all);
  Suite suite{"paged_attention", {}, shapes(), bench, device_shapes()};
  for (const Config& c : all)
    suite.cases.push_back({.op = suite.op,
                           .name = c.name,
                           .make = [c](Random& random) { return paged::make(c, random); },
                           .device_only = c.far,
                           .emulated = c.emulated,
                           .nightly_on = std::string(c.nightly ? kAllTargets : ""),
                           .emulated_on = c.emulated_on});
  // Site by site, the other cases reach the code of these in the kernels of the target.
  leave_to_nightly(suite,
                   {"decoder_bf16_h32_h_kv_8_d128_vllm",
                    "group_none_*_fp16_q_len_3_window",
                    "bias_fused_zero",
                    "bias_fused_no_v",
                    "bias_distance_zero",
                    "bias_distance_clamp",
                    "bias_distance_neg_inf",
                    "bias_distance_extent_0",
                    "bias_key_zero",
                    "bias_key_clamp",
                    "bias_key_neg_inf",
                    "bias_hides_keys_scale_0",
                    "h_q_128_h_kv_1",
                    "h_q_12_h_kv_4",
                    "h_q_8_h_kv_1",
                    "row_of_192_nhd_fp32",
                    "row_of_184_nhd_fp32",
                    "row_of_88_nhd_fp32",
                    "row_of_88_nhd_bf16",
                    "row_of_96_nhd_bf16",
                    "row_of_32_nhd_fp32",
                    "nhd_block_256",
                    "nhd_fp16",
                    "vllm_fp32",
                    "hnd_fp32",
                    "large_logits_bf16",
                    "constant_rows_nhd",
                    "constant_rows_vllm",
                    "repeated_pages",
                    "shared_pages",
                    "q_and_u_of_7_d_96_bf16",
                    "exact_q_of_2_d_40_fp16_infinite",
                    "infinite_values_nhd_fp16",
                    "infinite_values_nhd_fp32",
                    "infinite_values_vllm_fp32",
                    "infinite_values_group_d_256_nhd_fp32",
                    "infinite_values_group_d_256_vllm_fp32",
                    "infinite_values_window_vllm_fp32",
                    "infinite_values_large_logits_vllm_fp32",
                    "row_of_120_nhd_*",
                    "row_of_136_hnd_fp16",
                    "row_of_96_nhd_fp32",
                    "row_of_184_nhd_bf16",
                    "group_distance_h_q_4_h_kv_4_fp16_q_len_3_window",
                    "group_none_h_q_8_h_kv_2_fp16_strided",
                    "group_fused_h_q_9_h_kv_1_bf16",
                    "q_and_u_of_2_d_136_bf16_hnd_window",
                    "exact_q_of_2_d_120_bf16",
                    "packed_rows_of_40_many_tiles",
                    "bias_fused_clamp"},
                   "sm90");
  leave_to_nightly(
      suite,
      {"q_len_16", "group_fused_h_q_9_h_kv_1_fp16_q_len_3_window*", "group_fused_h_q_8_h_kv_2_fp16_q_len_3_window*",
       "group_none_*_fp16_q_len_3_window_d_200", "q_and_u_of_12_d_136_fp16_infinite", "q_and_u_of_7_d_96_bf16",
       "exact_q_of_2_d_136_bf16", "exact_q_of_7_d_120_bf16", "exact_q_of_7_d_136_bf16", "exact_q_of_7_d_200_bf16",
       "exact_q_of_12_d_192_*", "exact_q_of_12_d_200_*", "exact_q_of_12_d_136_fp16_infinite",
       "exact_q_of_12_d_256_fp16_infinite", "infinite_values_q_len_3_vllm_fp32", "infinite_values_q_len_3_hnd_fp32"},
      "sm80");
  suite.unsupported = unsupported_cases();
  suite.allocating = {"bias_fused_extent_1", "infinite_values_group_nhd_fp32", "hnd_bf16_block_5_bad_pages"};
  suite.subjects = {
      {"paged_attention_key_major",
       "emu:sm80",
       {"group_key_h_q_4_h_kv_4_bf16", "lengths_out_of_range", "batch_of_70_h_kv_2"},
       8,
       9},
      // Many CTAs share a row block, so that groups of warps combine their partial results.
      {"paged_attention_merge_groups",
       "emu:sm80",
       {"one_row_block_bf16", "one_row_block_vllm"},
       8,
       1,
       "ops/paged_attention/gpu/combine.hpp",
       "16"},
      {"paged_attention_packed_rows",
       "emu:sm80",
       {"packed_rows_of_40_many_tiles", "packed_rows_of_136_strided"},
       3,
       5,
       "ops/paged_attention/tiles/"},
      {"paged_attention_dimension_major", "emu:sm80", {"window_17_vllm", "bias_hides_keys_vllm"}, 3, 5},
      {"paged_attention_mma",
       "emu:sm80",
       {"group_key_h_q_9_h_kv_1_bf16_hidden", "bias_hides_keys_from_some_nhd_bf16", "many_tiles_bf16",
        "q_and_u_of_7_d_256_bf16"},
       8,
       6},
      {"paged_attention_mma_two_blocks",
       "emu:sm80",
       {"large_group_nhd_h_q_9_h_kv_1_bf16_hidden", "infinite_values_hidden_group_of_11_nhd_bf16",
        "large_group_many_tiles_bf16", "q_and_u_of_12_d_128_bf16"},
       8,
       6},
      // Separate parts of a row, one part of K and of V per tile, and interleaved heads.
      {"paged_attention_mma_exact",
       "emu:sm80",
       {"exact_q_of_7_d_96_bf16", "exact_q_of_2_d_192_bf16", "exact_q_of_7_d_256_bf16_hnd_window",
        "exact_q_of_12_d_72_fp16_infinite", "infinite_values_group_d_256_nhd_bf16"},
       8,
       5},
      {"paged_attention_mma_vllm",
       "emu:sm80",
       {"decoder_bf16_h32_h_kv_8_d128_vllm", "bias_hides_keys_from_some_vllm_bf16"},
       4,
       6},
      // One cluster per row block, with wrong estimates of the lengths. Of the mma tiles only the calls in the kernel's
      // own file, because few of these warps have more tiles than stages.
      {"paged_attention_cluster_key_major",
       "emu:sm90",
       {"group_key_h_q_4_h_kv_4_bf16", "lengths_out_of_range", "decoder_bf16_h16_d64"},
       4,
       6},
      {"paged_attention_cluster_dimension_major", "emu:sm90", {"bias_hides_keys_vllm"}, 3, 6},
      {"paged_attention_cluster_mma",
       "emu:sm90",
       {"group_key_h_q_8_h_kv_2_bf16", "bias_hides_keys_from_some_nhd_bf16", "bias_hides_keys_from_some_vllm_bf16"},
       4,
       6,
       "cluster_kernel"},
  };
  return suite;
}

}  // namespace hopwell::cases
