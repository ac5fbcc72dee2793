#include "refused.hpp"

#include <string_view>
#include <vector>

namespace hopwell::cases {
namespace {

struct Reason {
  std::string_view words;  // words of the error
  std::string_view cases;  // names of the cases
};
struct Refusals {
  std::string_view op, target;
  std::vector<Reason> reasons;
};

// Cases with window keys: of the forward and the backward, and of the backward alone. Those with fp32 are also named with
// their own reason, which a backend that has windows gives.
#define WINDOW_CASES                                                                                                \
  "window_1 window_127 window_128 window_129 window_63 window_alone window_alone_dense window_alone_h_q_64 "        \
  "window_beyond window_constant_rows window_documents window_duplicates window_extreme_rows "                      \
  "window_extreme_rows_h_q_64 window_fewer_rows_than_queries window_h_q_128 window_h_q_96 window_hca "              \
  "window_hca_documents window_hca_h_q_128 window_hot_row window_large_scores_h_q_64 window_many_queries_fp32 "     \
  "window_nan_seen window_nan_seen_h_q_64 window_no_queries window_no_rows window_strided window_tiles_dense_fp32 " \
  "window_tiles_fp32"
#define MORE_WINDOW_CASES                                                                           \
  "window_accumulate window_accumulate_h_q_64 window_attn_with_sink window_attn_with_sink_h_q_128 " \
  "window_attn_with_sink_h_q_64 window_d_qk_576_h_q_128 window_dense_h_q_128 window_dkv_bf16 "      \
  "window_dkv_bf16_h_q_64 window_not_deterministic_h_q_128 window_not_deterministic_h_q_64 "        \
  "window_only_attn window_only_attn_h_q_64 window_only_attn_with_sink "                            \
  "window_only_attn_with_sink_h_q_64 window_only_d_window_kv window_only_d_window_kv_h_q_64 "       \
  "window_only_dkv window_only_dkv_h_q_64 window_only_dq window_only_dq_h_q_64"

// Unsupported cases on the emulator, by operator and target, in alphabetical order.
const std::vector<Refusals>& all_refusals() {
  static const std::vector<Refusals> all{
      {"attention_distribution",
       "sm80",
       {
           {"needs bfloat16 q and kv",
            "basic_fp32 basic_fp32_l1 constant_rows_fp32 constant_rows_fp32_l1 dense_fp32 dense_fp32_l1 "
            "dense_key_ranges_fp32 dense_key_ranges_fp32_l1 few_queries_many_keys few_queries_many_keys_l1 "
            "invalid_indices_fp32 invalid_indices_fp32_l1 key_ranges_fp32 "
            "key_ranges_fp32_l1 large_scores_fp32 large_scores_fp32_l1 lengths_many_keys "
            "lengths_many_keys_l1 odd_widths_fp32 odd_widths_fp32_l1 strided_fp32 strided_fp32_l1 "
            "v_is_k v_is_k_l1 width_1 width_1_l1 "
            "sink_window_many_queries_fp32 sink_window_many_queries_fp32_l1 sink_window_tiles_dense_fp32 "
            "sink_window_tiles_dense_fp32_l1 sink_window_tiles_fp32 sink_window_tiles_fp32_l1"},
           {"needs d_qk a multiple of 16, at most 576", "many_queries many_queries_l1 odd_widths odd_widths_l1"},
           {"needs rows of q and kv 16-byte aligned",
            "key_ranges_h_q_40 key_ranges_h_q_40_l1 masks_h_q_40 masks_h_q_40_l1 strided "
            "strided_l1"},
       }},
      {"attention_distribution",
       "sm90",
       {
           {"needs bfloat16 q and kv",
            "basic_fp32 basic_fp32_l1 constant_rows_fp32 constant_rows_fp32_l1 dense_fp32 dense_fp32_l1 "
            "dense_key_ranges_fp32 dense_key_ranges_fp32_l1 few_queries_many_keys few_queries_many_keys_l1 "
            "invalid_indices_fp32 invalid_indices_fp32_l1 key_ranges_fp32 "
            "key_ranges_fp32_l1 large_scores_fp32 large_scores_fp32_l1 lengths_many_keys "
            "lengths_many_keys_l1 odd_widths_fp32 odd_widths_fp32_l1 strided_fp32 strided_fp32_l1 "
            "v_is_k v_is_k_l1 width_1 width_1_l1 "
            "sink_window_many_queries_fp32 sink_window_many_queries_fp32_l1 sink_window_tiles_dense_fp32 "
            "sink_window_tiles_dense_fp32_l1 sink_window_tiles_fp32 sink_window_tiles_fp32_l1"},
           {"needs d_qk 576 or 512",
            "d_qk_128_h_q_40 d_qk_128_h_q_40_l1 d_qk_16_h_q_33 d_qk_16_h_q_33_l1 d_qk_192_h_q_20 "
            "d_qk_192_h_q_20_l1 d_qk_320 d_qk_320_l1 d_qk_528_h_q_70 d_qk_528_h_q_70_l1 "
            "d_qk_64_h_q_130 d_qk_64_h_q_130_l1 empty_rows_many_keys empty_rows_many_keys_l1 "
            "many_queries many_queries_l1 odd_widths odd_widths_l1"},
       }},
      {"attention_distribution",
       "sm100",
       {
           {"needs bfloat16 q and kv",
            "basic_fp32 basic_fp32_l1 constant_rows_fp32 constant_rows_fp32_l1 dense_fp32 dense_fp32_l1 "
            "dense_key_ranges_fp32 dense_key_ranges_fp32_l1 few_queries_many_keys few_queries_many_keys_l1 "
            "invalid_indices_fp32 invalid_indices_fp32_l1 key_ranges_fp32 "
            "key_ranges_fp32_l1 large_scores_fp32 large_scores_fp32_l1 lengths_many_keys "
            "lengths_many_keys_l1 odd_widths_fp32 odd_widths_fp32_l1 strided_fp32 strided_fp32_l1 "
            "v_is_k v_is_k_l1 width_1 width_1_l1 "
            "sink_window_many_queries_fp32 sink_window_many_queries_fp32_l1 sink_window_tiles_dense_fp32 "
            "sink_window_tiles_dense_fp32_l1 sink_window_tiles_fp32 sink_window_tiles_fp32_l1"},
           {"needs d_qk 576 or 512",
            "d_qk_128_h_q_40 d_qk_128_h_q_40_l1 d_qk_16_h_q_33 d_qk_16_h_q_33_l1 d_qk_192_h_q_20 "
            "d_qk_192_h_q_20_l1 d_qk_320 d_qk_320_l1 d_qk_528_h_q_70 d_qk_528_h_q_70_l1 "
            "d_qk_64_h_q_130 d_qk_64_h_q_130_l1 empty_rows_many_keys empty_rows_many_keys_l1 "
            "many_queries many_queries_l1 odd_widths odd_widths_l1"},
           {"needs rows of q and kv 16-byte aligned, with positive strides",
            "key_ranges_h_q_40 key_ranges_h_q_40_l1 masks_h_q_40 masks_h_q_40_l1 strided strided_l1"},
       }},
      {"indexer_dense_loss",
       "sm80",
       {
           {"attention_distribution: needs bfloat16 q and kv", "basic_fp32 joint_fp32 key_ranges_fp32"},
       }},
      {"indexer_dense_loss",
       "sm90",
       {
           {"attention_distribution: needs bfloat16 q and kv", "basic_fp32 joint_fp32 key_ranges_fp32"},
           {"attention_distribution: needs d_qk 576 or 512", "d_qk_64"},
       }},
      {"lightning_indexer",
       "sm90",
       {
           {"needs bfloat16 or float8_e4m3fn q_index and k_index",
            "documents_fp32 key_ranges_fp32 no_relu_fp32 normal_fp32 odd_shape strided_exact"},
           {"needs rows of q_index 16-byte aligned, with positive strides",
            "fp8_odd_shape fp8_strided one_dimension queries_70000 strided"},
       }},
      {"lightning_indexer_backward",
       "sm90",
       {
           {"needs bfloat16 q_index and k_index",
            "any_order_fp32 basic_fp32 d_scores_fp32 key_ranges_fp32 nan_targets_fp32 no_relu_fp32 odd_shape "
            "strided_fp32"},
           {"needs rows of q_index and k_index 16-byte aligned", "any_order_strided one_dimension strided"},
       }},
      {"nvfp4_gemv",
       "sm100",
       {
           {"needs rows and batches of a and b 16-byte aligned",
            "all_codes_all_scales_bf16_blocked k_tails nan_scales_blocked rows_129_blocked"},
       }},
      {"nvfp4_linear",
       "sm90",
       {
           {"needs x and weight rows 16-byte aligned, a non-negative weight stride, scale rows 4-byte aligned, K at "
            "most 65536",
            "all_codes_all_scales_n_16_fp16 empty_k huge_x_n_12 n_16_strided n_2 n_3_blocked n_70 n_8 "
            "n_8_many_tiles nan_scales_blocked_n_5 non_finite_x_n_7 tiny_x_n_12"},
           {"needs n from 2 to 524288, n * N at most 2^38, x of 16 bits",
            "all_codes_all_scales_n_1_bf16 basic cancelling_x empty_n fp32_blocked_bias full_range_fp16 "
            "full_range_fp32 huge_x k_of_21_stages k_of_28_stages k_tail_fp16_bias long_k n_17_fp32 "
            "n_1_many_tiles_blocked n_1_many_tiles_fp16 n_1_slices_end_anywhere nan_scales non_finite_x "
            "one_of_everything outliers_bf16 subnormal_scales tiny_x wide_range_x_bf16 wide_range_x_fp16"},
           {"slower than sm80 for n <= 32 and N at most 2048", "n_20_pair n_24_few_rows"},
           {"slower than sm80 for n <= 8 and N above 4096", "n_8_chunks"},
       }},
      {"nvfp4_linear",
       "sm100",
       {
           {"needs x and weight rows 16-byte aligned, a non-negative weight stride, scale rows 4-byte aligned, K at "
            "most 65536",
            "all_codes_all_scales_n_1_bf16 k_tail_fp16_bias non_finite_x"},
           {"needs n = 1, x of 16 bits",
            "all_codes_all_scales_n_16_fp16 cancelling_x_n_4 empty_k empty_n fp32_blocked_bias full_range_bf16_n_4 "
            "full_range_fp32 full_range_n_8_fp16 huge_x_n_12 huge_x_n_33 huge_x_n_6 long_k_n_9 longer_k_n_10 "
            "n_16_blocked n_16_pair_chunks n_16_strided n_17 n_17_fp32 n_2 n_20_pair n_24_few_rows n_2_pair n_300 "
            "n_3_blocked n_3_pair_16_warps n_3_pair_long n_40_cluster n_70 n_70_nan_scales n_8 n_8_chunks "
            "n_8_many_tiles nan_scales_blocked_n_5 nan_scales_n_4 non_finite_x_n_1200 non_finite_x_n_3 "
            "non_finite_x_n_7 outliers_fp16_n_6 outliers_n_9 tiny_x_n_12 tiny_x_n_6 wide_range_x_n_5"},
       }},
      {"kv_compress", "sm80", {{"needs d that is a multiple of 8", "odd_width"}}},
      {"kv_compress_backward", "sm80", {{"needs d that is a multiple of 8", "odd_width"}}},
      {"mla_cache_append",
       "sm80",
       {
           {"needs bfloat16 kv", "fp32_cache fp32_to_bf16 fp32_v32 fp32_v4"},
           {"needs d that is a multiple of 4", "bf16_d_7"},
           {"needs index keys of width 32, 64 or 128", "index_12"},
           {"needs base and block stride of the cache in multiples of 4 bytes", "index_unaligned"},
       }},
      {"nvfp4_linear_backward",
       "sm80",
       {
           {"needs d_out of 16 bits", "fp32 fp32_blocked_strided full_range_fp32"},
       }},
      {"nvfp4_matmul",
       "sm90",
       {
           {"slower than sm80 for M = 1 or N = 1, which decodes nothing first",
            "m_1_bias m_1_k_tail n_1_bias_blocked one_of_everything reciprocal_alpha_m_1"},
           {"as nvfp4_linear with decoded x: needs x and weight rows 16-byte aligned, a non-negative weight stride, "
            "scale "
            "rows 4-byte aligned, K at most 65536",
            "all_codes_all_scales_blocked empty_k k_tail_blocked k_tail_fp16 many_rows_of_both strided_k_tail"},
           {"as nvfp4_linear with decoded x: needs n from 2 to 524288, n * N at most 2^38, x of 16 bits",
            "empty_m empty_n fp32_blocked longer_k longer_k_rows_140_columns_130 subnormal_scales"},
           {"as nvfp4_linear with decoded x: slower than sm80 for n <= 32 and N at most 2048",
            "alpha_zero full_range_fp16"},
       }},
      {"nvfp4_matmul",
       "sm100",
       {
           {"needs rows and batches of a and b 16-byte aligned",
            "all_codes_all_scales_blocked k_tail_blocked k_tail_fp16 m_1_k_tail strided_k_tail"},
           {"needs K from 16 to 2^30, M at most 2^28, N at most 2^23", "empty_k"},
       }},
      {"paged_attention",
       "sm90",
       {
           {"needs few sequences and heads, so that a cluster for each runs at the same time",
            "batch_of_70_h_kv_1 batch_of_70_h_kv_2 group_fused_h_q_4_h_kv_4_fp16_q_len_3_window "
            "group_fused_h_q_4_h_kv_4_fp16_q_len_3_window_d_200 group_fused_h_q_8_h_kv_2_fp16_q_len_3_window "
            "group_fused_h_q_8_h_kv_2_fp16_q_len_3_window_d_200 group_fused_h_q_9_h_kv_1_fp16_q_len_3_window "
            "group_fused_h_q_9_h_kv_1_fp16_q_len_3_window_d_200 hnd_bf16_everything hnd_fp32_everything "
            "infinite_values_q_len_3_hnd_fp32 infinite_values_q_len_3_vllm_fp32 nhd_bf16_everything "
            "nhd_fp32_everything q_len_16 q_len_2 vllm_bf16_everything vllm_fp32_everything window_1000_hnd "
            "window_1000_vllm window_17_hnd window_17_vllm window_1_hnd window_1_vllm window_4_hnd window_4_vllm "
            "window_huge"},
           {"slower than sm80 for max_blocks * block above 4096 with few heads or float32",
            "infinite_values_in_many_chunks"},
           {"slower than sm80 for max_blocks * block above 4096 or above 16384 / b, if b > 1",
            "infinite_values_group_of_12_hnd_bf16 infinite_values_group_of_12_nhd_bf16 "
            "infinite_values_group_of_12_vllm_bf16 infinite_values_hidden_group_of_11_hnd_bf16 "
            "infinite_values_hidden_group_of_11_nhd_bf16 infinite_values_hidden_group_of_11_vllm_bf16 "
            "large_group_many_tiles_bf16 one_65536_among_512_bf16"},
       }},
      {"sparse_mla_backward",
       "sm80",
       {
           {"needs bfloat16 q and kv",
            "basic_fp32 constant_rows_fp32 dense_fp32 dense_key_ranges_fp32 few_queries_many_keys "
            "invalid_indices_fp32 key_ranges_fp32 "
            "large_scores_fp32 lengths_many_keys odd_widths_fp32 strided_fp32 v_is_k width_1 "
            "window_many_queries_fp32 window_tiles_dense_fp32 window_tiles_fp32"},
           {"needs d_qk 576 or 512", "empty_rows_many_keys many_queries odd_widths"},
           {"needs rows of q, kv, out, d_out and dq 16-byte aligned", "key_ranges_h_q_40 masks_h_q_40 strided"},
       }},
      {"sparse_mla_backward",
       "sm90",
       {
           {"needs bfloat16 q and kv",
            "basic_fp32 constant_rows_fp32 dense_fp32 dense_key_ranges_fp32 few_queries_many_keys "
            "invalid_indices_fp32 key_ranges_fp32 "
            "large_scores_fp32 lengths_many_keys odd_widths_fp32 strided_fp32 v_is_k width_1 "
            "window_many_queries_fp32 window_tiles_dense_fp32 window_tiles_fp32"},
           {"needs d_qk 576 or 512", "empty_rows_many_keys many_queries odd_widths"},
           {"needs rows of q, kv, out, d_out and dq 16-byte aligned", "key_ranges_h_q_40 masks_h_q_40 strided"},
       }},
      {"sparse_mla_backward",
       "sm100",
       {
           {"needs a call without window_kv", WINDOW_CASES " " MORE_WINDOW_CASES},
           {"needs bfloat16 q and kv",
            "basic_fp32 constant_rows_fp32 dense_fp32 dense_key_ranges_fp32 few_queries_many_keys "
            "invalid_indices_fp32 key_ranges_fp32 "
            "large_scores_fp32 lengths_many_keys odd_widths_fp32 strided_fp32 v_is_k width_1 "
            "window_many_queries_fp32 window_tiles_dense_fp32 window_tiles_fp32"},
           {"needs d_qk 576 or 512", "empty_rows_many_keys many_queries odd_widths"},
           {"needs rows of q, kv, out, d_out and dq 16-byte aligned", "key_ranges_h_q_40 masks_h_q_40 strided"},
       }},
      {"sparse_mla_decode",
       "sm80",
       {
           {"needs q of bfloat16", "fp32 fp32_q fp32_v32"},
           {"needs a cache of bfloat16 rows",
            "fp32_cache per_tensor per_tensor_any_scales per_tensor_array per_tensor_tables_splits "
            "per_tensor_two_caches v32 v32_any_scales v32_tables_splits v32_two_caches v32_without_rope "
            "v32_without_rope_any_scales v32_without_rope_tables_splits v32_without_rope_two_caches v4 v41 "
            "v41_any_scales v41_tables_splits v41_two_caches v4_any_scales v4_tables_splits v4_two_caches"},
           {"does not support rope_cache", "rope_cache"},
           {"does not support extra_cache",
            "two_caches two_caches_first_empty two_caches_lengths two_caches_second_empty two_caches_tables"},
           {"needs keys_per_split of at least topk",
            "splits splits_256 splits_320 splits_empty_rows splits_many_queries splits_of_two_tiles"},
           {"needs out of bfloat16", "fp32_out"},
           {"needs d_qk 576 or 512", "d_qk_40"},
           {"needs d_v 512", "d_v_100"},
           {"needs q, out and lse with equal distances between all queries", "strided_q_len_3"},
       }},
      {"sparse_mla_decode",
       "sm90",
       {
           {"needs q of bfloat16", "fp32 fp32_q fp32_v32"},
           {"needs a cache of bfloat16 rows",
            "fp32_cache per_tensor per_tensor_any_scales per_tensor_array per_tensor_tables_splits "
            "per_tensor_two_caches v32 v32_any_scales v32_tables_splits v32_two_caches v32_without_rope "
            "v32_without_rope_any_scales v32_without_rope_tables_splits v32_without_rope_two_caches v4 v41 "
            "v41_any_scales v41_tables_splits v41_two_caches v4_any_scales v4_tables_splits v4_two_caches"},
           {"does not support rope_cache", "rope_cache"},
           {"does not support extra_cache",
            "two_caches two_caches_first_empty two_caches_lengths two_caches_second_empty two_caches_tables"},
           {"needs keys_per_split of at least topk",
            "splits splits_256 splits_320 splits_empty_rows splits_many_queries splits_of_two_tiles"},
           {"needs out of bfloat16", "fp32_out"},
           {"needs d_qk 576 or 512", "d_qk_40"},
           {"needs d_v 512", "d_v_100"},
           {"needs q, out and lse with equal distances between all queries", "strided_q_len_3"},
       }},
      {"sparse_mla_forward",
       "sm80",
       {
           {"needs bfloat16 q and kv",
            "basic_fp32 constant_rows_fp32 dense_fp32 dense_key_ranges_fp32 few_queries_many_keys "
            "invalid_indices_fp32 key_ranges_fp32 "
            "large_scores_fp32 lengths_many_keys odd_widths_fp32 strided_fp32 v_is_k width_1 "
            "window_many_queries_fp32 window_tiles_dense_fp32 window_tiles_fp32"},
           {"needs d_qk 576 or 512", "empty_rows_many_keys many_queries odd_widths"},
           {"needs rows of q and kv 16-byte aligned",
            "key_ranges_h_q_40 masks_h_q_40 strided window_unaligned_h_q_20 window_unaligned_h_q_40"},
       }},
      {"sparse_mla_forward",
       "sm100",
       {
           {"needs a call without window_kv",
            WINDOW_CASES " window_boxes window_boxes_dense window_boxes_dense_ranges window_boxes_extreme_rows_h_q_100 "
                         "window_boxes_nan_seen window_d_qk_576_h_q_40 "
                         "window_large_scores_h_q_20 "
                         "window_unaligned_h_q_20 window_unaligned_h_q_40"},
           {"needs bfloat16 q and kv",
            "basic_fp32 constant_rows_fp32 dense_fp32 dense_key_ranges_fp32 few_queries_many_keys "
            "invalid_indices_fp32 key_ranges_fp32 "
            "large_scores_fp32 lengths_many_keys odd_widths_fp32 strided_fp32 v_is_k width_1 "
            "window_many_queries_fp32 window_tiles_dense_fp32 window_tiles_fp32"},
           {"needs d_qk 576 or 512, d_v 512", "empty_rows_many_keys many_queries odd_widths"},
           {"needs rows of q and kv 16-byte aligned, a positive row stride of kv",
            "key_ranges_h_q_40 masks_h_q_40 strided"},
       }},
      {"sparse_mla_forward",
       "sm90",
       {
           {"needs bfloat16 q and kv",
            "basic_fp32 constant_rows_fp32 dense_fp32 dense_key_ranges_fp32 few_queries_many_keys "
            "invalid_indices_fp32 key_ranges_fp32 "
            "large_scores_fp32 lengths_many_keys odd_widths_fp32 strided_fp32 v_is_k width_1 "
            "window_many_queries_fp32 window_tiles_dense_fp32 window_tiles_fp32"},
           {"needs d_qk 576 or 512", "empty_rows_many_keys many_queries odd_widths"},
       }},
  };
  return all;
}

bool has_word(std::string_view words, std::string_view word) {
  for (std::size_t at = 0; (at = words.find(word, at)) != std::string_view::npos; ++at) {
    const std::size_t end = at + word.size();
    if ((at == 0 || words[at - 1] == ' ') && (end == words.size() || words[end] == ' ')) return true;
  }
  return false;
}

}  // namespace

std::string refusal(const std::string& op, const std::string& name, const std::string& target) {
  for (const Refusals& refusals : all_refusals()) {
    if (refusals.op != op || refusals.target != target) continue;
    for (const Reason& reason : refusals.reasons)
      if (has_word(reason.cases, name)) return std::string(reason.words);
  }
  return {};
}

}  // namespace hopwell::cases
