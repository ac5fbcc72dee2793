#include "refused.hpp"

#include <algorithm>

namespace hopwell::cases {
namespace {

// Cases of the sparse MLA operators with fp32 q and kv.
constexpr const char* kFp32OfAttention = "*_fp32 few_queries_many_keys lengths_many_keys v_is_k width_1";

// Unsupported cases on the emulator. Operators, targets and cases are separated by spaces; * in the name of a case
// stands for any letters. The first row that matches a case has its reason.
struct Refusal {
  std::string_view ops, targets, reason, cases;
};
constexpr Refusal kRefusals[] = {
    {"attention_distribution", "sm80 sm90 sm100", "needs bfloat16 q and kv",
     "*_fp32 *_fp32_l1 few_queries_many_keys* lengths_many_keys* v_is_k* width_1*"},
    {"attention_distribution", "sm80", "needs d_qk a multiple of 16, at most 576",
     "many_queries many_queries_l1 odd_widths*"},
    {"attention_distribution", "sm90 sm100", "needs d_qk 576 or 512",
     "d_qk_128_* d_qk_16_* d_qk_192_* d_qk_320* d_qk_528_* d_qk_64_* empty_rows_many_keys* many_queries "
     "many_queries_l1 odd_widths*"},
    {"attention_distribution", "sm80", "needs rows of q and kv 16-byte aligned",
     "key_ranges_h_q_40* masks_h_q_40* strided strided_l1"},
    {"attention_distribution", "sm100", "needs rows of q and kv 16-byte aligned, with positive strides",
     "key_ranges_h_q_40* masks_h_q_40* strided strided_l1"},
    {"indexer_dense_loss", "sm80 sm90", "attention_distribution: needs bfloat16 q and kv", "*_fp32"},
    {"indexer_dense_loss", "sm90", "attention_distribution: needs d_qk 576 or 512", "d_qk_64"},
    {"lightning_indexer", "sm90", "needs bfloat16 or float8_e4m3fn q_index and k_index",
     "*_fp32 odd_shape strided_exact"},
    {"lightning_indexer", "sm90", "needs rows of q_index 16-byte aligned, with positive strides",
     "fp8_odd_shape fp8_strided one_dimension queries_70000 strided"},
    {"lightning_indexer_backward", "sm90", "needs bfloat16 q_index and k_index", "*_fp32 odd_shape"},
    {"lightning_indexer_backward", "sm90", "needs rows of q_index and k_index 16-byte aligned",
     "*strided one_dimension"},
    {"kv_compress kv_compress_backward", "sm80", "needs d that is a multiple of 8", "odd_width"},
    {"sparse_mla_forward sparse_mla_backward", "sm100", "needs a call without window_kv", "window_*"},
    {"sparse_mla_forward sparse_mla_backward", "sm80 sm90 sm100", "needs bfloat16 q and kv", kFp32OfAttention},
    {"sparse_mla_forward", "sm80 sm90", "needs d_qk 576 or 512", "empty_rows_many_keys many_queries odd_widths"},
    {"sparse_mla_forward", "sm100", "needs d_qk 576 or 512, d_v 512", "empty_rows_many_keys many_queries odd_widths"},
    {"sparse_mla_backward", "sm80 sm90 sm100", "needs d_qk 576 or 512", "empty_rows_many_keys many_queries odd_widths"},
    {"sparse_mla_forward", "sm80", "needs rows of q and kv 16-byte aligned",
     "key_ranges_h_q_40 masks_h_q_40 strided window_unaligned_*"},
    {"sparse_mla_forward", "sm100", "needs rows of q and kv 16-byte aligned, a positive row stride of kv",
     "key_ranges_h_q_40 masks_h_q_40 strided"},
    {"sparse_mla_backward", "sm80 sm90 sm100", "needs rows of q, kv, out, d_out and dq 16-byte aligned",
     "key_ranges_h_q_40 masks_h_q_40 strided"},
    {"sparse_mla_decode", "sm80 sm90", "needs q of bfloat16", "fp32 fp32_q fp32_v32"},
    {"sparse_mla_decode", "sm80 sm90", "needs a cache of bfloat16 or of bytes", "fp32_cache"},
    {"sparse_mla_decode", "sm80 sm90", "needs d_qk 576 or 512", "d_qk_40"},
    {"sparse_mla_decode", "sm80 sm90", "needs d_v 512", "d_v_100"},
    {"sparse_mla_decode", "sm80", "needs base and block stride of cache in multiples of 16 bytes", "bf16_unaligned_*"},
    {"sparse_mla_decode", "sm80 sm90", "needs base and block stride of cache in multiples of 16 bytes",
     "strided_q_len_3 v4_blocks_of_7"},
    {"nvfp4_gemv", "sm100", "needs rows and batches of a and b 16-byte aligned",
     "all_codes_all_scales_bf16_blocked k_tails nan_scales_blocked rows_129_blocked"},
    {"nvfp4_linear", "sm90",
     "needs x and weight rows 16-byte aligned, a non-negative weight stride, scale rows 4-byte aligned, K at most "
     "65536",
     "all_codes_all_scales_n_16_fp16 empty_k huge_x_n_12 n_16_strided n_2 n_3_blocked n_70 n_8 n_8_many_tiles "
     "nan_scales_blocked_n_5 non_finite_x_n_7 tiny_x_n_12"},
    {"nvfp4_linear", "sm90", "needs n from 2 to 524288, n * N at most 2^38, x of 16 bits",
     "all_codes_all_scales_n_1_bf16 basic cancelling_x empty_n fp32_blocked_bias full_range_fp16 full_range_fp32 "
     "huge_x k_of_21_stages k_of_28_stages k_tail_fp16_bias long_k n_17_fp32 n_1_many_tiles_blocked "
     "n_1_many_tiles_fp16 n_1_slices_end_anywhere nan_scales non_finite_x one_of_everything outliers_bf16 "
     "subnormal_scales tiny_x wide_range_x_bf16 wide_range_x_fp16"},
    {"nvfp4_linear", "sm90", "slower than sm80 for n <= 32 and N at most 2048", "n_20_pair n_24_few_rows"},
    {"nvfp4_linear", "sm90", "slower than sm80 for n <= 8 and N above 4096", "n_8_chunks"},
    {"nvfp4_linear", "sm100",
     "needs x and weight rows 16-byte aligned, a non-negative weight stride, scale rows 4-byte aligned, K at most "
     "65536",
     "all_codes_all_scales_n_1_bf16 k_tail_fp16_bias non_finite_x"},
    {"nvfp4_linear", "sm100", "needs n = 1, x of 16 bits",
     "all_codes_all_scales_n_16_fp16 cancelling_x_n_4 empty_k empty_n fp32_blocked_bias full_range_bf16_n_4 "
     "full_range_fp32 full_range_n_8_fp16 huge_x_n_12 huge_x_n_33 huge_x_n_6 long_k_n_9 longer_k_n_10 n_16_blocked "
     "n_16_pair_chunks n_16_strided n_17 n_17_fp32 n_2 n_20_pair n_24_few_rows n_2_pair n_300 n_3_blocked "
     "n_3_pair_16_warps n_3_pair_long n_40_cluster n_70 n_70_nan_scales n_8 n_8_chunks n_8_many_tiles "
     "nan_scales_blocked_n_5 nan_scales_n_4 non_finite_x_n_1200 non_finite_x_n_3 non_finite_x_n_7 outliers_fp16_n_6 "
     "outliers_n_9 tiny_x_n_12 tiny_x_n_6 wide_range_x_n_5"},
    {"paged_lightning_indexer", "sm80", "needs base and block stride of cache in multiples of 4 bytes",
     "fp8_unaligned_blocks"},
    {"paged_lightning_indexer", "sm90", "needs q_index of float8_e4m3fn", "bf16* fp32*"},
    {"paged_lightning_indexer", "sm90", "needs a block that is a multiple of 8",
     "fp8_block_1 fp8_block_2 fp8_block_53 fp8_unaligned_blocks"},
    {"paged_lightning_indexer", "sm90", "needs a cache with blocks", "fp8_no_blocks"},
    {"paged_lightning_indexer", "sm90", "needs rows of q_index 16-byte aligned, with positive strides",
     "fp8_d_12 fp8_strided"},
    {"mla_cache_append", "sm80", "needs bfloat16 kv", "fp32_cache fp32_to_bf16 fp32_v32 fp32_v4"},
    {"mla_cache_append", "sm80", "needs d that is a multiple of 4", "bf16_d_7"},
    {"mla_cache_append", "sm80", "needs index keys of width 32, 64 or 128", "index_12"},
    {"mla_cache_append", "sm80", "needs base and block stride of the cache in multiples of 4 bytes", "index_unaligned"},
    {"nvfp4_linear_backward", "sm80", "needs d_out of 16 bits", "fp32 fp32_blocked_strided full_range_fp32"},
    {"nvfp4_matmul", "sm90", "slower than sm80 for M = 1 or N = 1, which decodes nothing first",
     "m_1_bias m_1_k_tail n_1_bias_blocked one_of_everything reciprocal_alpha_m_1"},
    {"nvfp4_matmul", "sm90",
     "as nvfp4_linear with decoded x: needs x and weight rows 16-byte aligned, a non-negative weight stride, scale "
     "rows 4-byte aligned, K at most 65536",
     "all_codes_all_scales_blocked empty_k k_tail_blocked k_tail_fp16 many_rows_of_both strided_k_tail"},
    {"nvfp4_matmul", "sm90",
     "as nvfp4_linear with decoded x: needs n from 2 to 524288, n * N at most 2^38, x of 16 bits",
     "empty_m empty_n fp32_blocked longer_k longer_k_rows_140_columns_130 subnormal_scales"},
    {"nvfp4_matmul", "sm90", "as nvfp4_linear with decoded x: slower than sm80 for n <= 32 and N at most 2048",
     "alpha_zero full_range_fp16"},
    {"nvfp4_matmul", "sm100", "needs rows and batches of a and b 16-byte aligned",
     "all_codes_all_scales_blocked k_tail_blocked k_tail_fp16 m_1_k_tail strided_k_tail"},
    {"nvfp4_matmul", "sm100", "needs K from 16 to 2^30, M at most 2^28, N at most 2^23", "empty_k"},
    {"paged_attention", "sm90", "needs few sequences and heads, so that a cluster for each runs at the same time",
     "batch_of_70_h_kv_1 batch_of_70_h_kv_2 group_fused_h_q_4_h_kv_4_fp16_q_len_3_window "
     "group_fused_h_q_4_h_kv_4_fp16_q_len_3_window_d_200 group_fused_h_q_8_h_kv_2_fp16_q_len_3_window "
     "group_fused_h_q_8_h_kv_2_fp16_q_len_3_window_d_200 group_fused_h_q_9_h_kv_1_fp16_q_len_3_window "
     "group_fused_h_q_9_h_kv_1_fp16_q_len_3_window_d_200 hnd_bf16_everything hnd_fp32_everything "
     "infinite_values_q_len_3_hnd_fp32 infinite_values_q_len_3_vllm_fp32 nhd_bf16_everything nhd_fp32_everything "
     "q_len_16 q_len_2 vllm_bf16_everything vllm_fp32_everything window_1000_hnd window_1000_vllm window_17_hnd "
     "window_17_vllm window_1_hnd window_1_vllm window_4_hnd window_4_vllm window_huge"},
    {"paged_attention", "sm90", "slower than sm80 for max_blocks * block above 4096 with few heads or float32",
     "infinite_values_in_many_chunks"},
    {"paged_attention", "sm90", "slower than sm80 for max_blocks * block above 4096 or above 16384 / b, if b > 1",
     "infinite_values_group_of_12_hnd_bf16 infinite_values_group_of_12_nhd_bf16 "
     "infinite_values_group_of_12_vllm_bf16 infinite_values_hidden_group_of_11_hnd_bf16 "
     "infinite_values_hidden_group_of_11_nhd_bf16 infinite_values_hidden_group_of_11_vllm_bf16 "
     "large_group_many_tiles_bf16 one_65536_among_512_bf16"},
};

bool any_word(std::string_view words, const auto& is_wanted) {
  while (!words.empty()) {
    const std::size_t end = std::min(words.find(' '), words.size());
    if (is_wanted(words.substr(0, end))) return true;
    words.remove_prefix(std::min(end + 1, words.size()));
  }
  return false;
}

}  // namespace

bool matches(std::string_view name, std::string_view pattern) {
  std::size_t letter = 0, at = 0, star = std::string_view::npos, star_end = 0;
  while (letter < name.size()) {
    if (at < pattern.size() && pattern[at] == '*') {
      star = at++, star_end = letter;
    } else if (at < pattern.size() && (pattern[at] == '?' || pattern[at] == name[letter])) {
      ++at, ++letter;
    } else if (star != std::string_view::npos) {
      at = star + 1, letter = ++star_end;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', at) == std::string_view::npos;
}

std::string refusal(const std::string& op, const std::string& name, const std::string& target) {
  const auto is = [](const std::string& word) { return [&word](std::string_view w) { return w == word; }; };
  const auto is_name = [&name](std::string_view pattern) { return matches(name, pattern); };
  for (const Refusal& row : kRefusals)
    if (any_word(row.ops, is(op)) && any_word(row.targets, is(target)) && any_word(row.cases, is_name))
      return std::string(row.reason);
  return {};
}

}  // namespace hopwell::cases
