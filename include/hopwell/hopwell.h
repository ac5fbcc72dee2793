/* Hopwell, the C interface. C99, and the argument structs that C++ uses too.
 *
 * Tensors are DLPack views, `const DLTensor*`: never owned, never copied; null means absent. An output's DLTensor is
 * const as a description; the memory behind it is written, and no element of it lies where another argument's does.
 * Unless said otherwise the last dimension is contiguous and every other stride is free and 64-bit. Every function
 * checks all of its arguments before it writes anything: on HOPWELL_INVALID_ARGUMENT and HOPWELL_UNSUPPORTED the outputs are
 * untouched. On any other error they may be partly written, and the next call is not affected. Shapes, formulae and
 * corner cases of each operator are documented at its argument struct; `LSE` is natural-log, fp32.
 *
 * A CUDA call runs on its tensors' device, whichever is current, and leaves that as it was; its stream must be of that
 * device. A workspace is memory that no argument lies in, and belongs to one call at a time: calls that may overlap, on
 * two streams say, need one each.
 *
 * Every call computes in the default floating-point mode (to nearest, with subnormal numbers) on all of its threads, and
 * the calling thread has its own mode back afterwards.
 *
 * In C a zero field means its default, shown as HOPWELL_DEFAULT(...) where that is not zero. C++ has the defaults
 * themselves. A field marked HOPWELL_REQUIRED is a number that the caller must set: its default in C++ is NaN, which is
 * an error; in C, which has no defaults, 0 is 0.
 */
#ifndef HOPWELL_HOPWELL_H_
#define HOPWELL_HOPWELL_H_

#include <dlpack/dlpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HOPWELL_API __attribute__((visibility("default")))

#ifdef __cplusplus
#define HOPWELL_DEFAULT(value) = value
#define HOPWELL_ZERO = {}
#define HOPWELL_REQUIRED = __builtin_nanf("")
extern "C" {
#else
#define HOPWELL_DEFAULT(value)
#define HOPWELL_ZERO
#define HOPWELL_REQUIRED
#endif

typedef enum hopwell_status {
  HOPWELL_OK = 0,
  /** dtype, shape, stride, device, scalar range, or a combination no operator defines */
  HOPWELL_INVALID_ARGUMENT = 1,
  /** legal, but no backend present on this machine runs it; the message lists why */
  HOPWELL_UNSUPPORTED = 2,
  /** the device or its driver reported an error */
  HOPWELL_DEVICE_ERROR = 3,
  HOPWELL_OUT_OF_MEMORY = 4,
  HOPWELL_INTERNAL = 5
} hopwell_status;

/** A CUDA stream (cudaStream_t), or null for the default stream; the CPU ignores it. */
typedef void* hopwell_stream;

/** The message of the last call on this thread that did not return HOPWELL_OK; "" if there was none. Valid until the
 * next call. */
HOPWELL_API const char* hopwell_last_error(void);

/** "0.1.0" */
HOPWELL_API const char* hopwell_version(void);

/**
 * How many threads a CPU operator may use, the calling one included: as set, else HOPWELL_NUM_THREADS (0, and an error of every
 * call, if that is no number), else OMP_NUM_THREADS, else as many as there are processors. Results do not depend on it.
 */
HOPWELL_API int hopwell_num_threads(void);
/** For all calls that start from now on; 0: no longer set. An error if negative. */
HOPWELL_API hopwell_status hopwell_set_num_threads(int threads);

/* ---- sparse_mla_forward ------------------------------------------------------------------------------------------ */

/**
 * Attention of every query over the keys that its index row selects; V is the first d_v columns of kv (DeepSeek-V2's
 * MLA in its multi-query form; sparse selection as in DeepSeek-V3.2).
 *
 *     score[s,h,i] = sm_scale * sum_d q[s,h,d] * kv[t,d],  t = indices[s,0,i];  -inf where the entry is invalid
 *     out = softmax(score) . kv[:, :d_v] / (1 + exp(attn_sink - lse))
 *
 * An entry is valid iff 0 <= t < s_kv, i < topk_length[s]; with key ranges k_start[s] <= t < k_end[s]; and, with positions,
 * (t + 1) * kv_stride <= position(s) + 1, where t counts from k_start[s] if there is one. Entries that occur twice count
 * twice. A row without a valid entry gives out 0, max_logits -inf, lse +inf.
 */
typedef struct hopwell_sparse_mla_forward_args {
  /** bf16 (CPU: fp32 too) [s_q, h_q, d_qk] */
  const DLTensor* q HOPWELL_ZERO;
  /** like q [s_kv, 1, d_qk] or [s_kv, d_qk] */
  const DLTensor* kv HOPWELL_ZERO;
  /** int32 [s_q, 1, topk] or [s_q, topk]; null: every visible key, in order, topk being s_kv */
  const DLTensor* indices HOPWELL_ZERO;
  /** finite */
  float sm_scale HOPWELL_REQUIRED;
  int64_t d_v HOPWELL_DEFAULT(512);
  /** fp32 [h_q], may be +-inf; optional */
  const DLTensor* attn_sink HOPWELL_ZERO;
  /** int32 [s_q]; optional, with indices only */
  const DLTensor* topk_length HOPWELL_ZERO;
  /** int32 [s_q]; optional, turns on causal masking */
  const DLTensor* q_positions HOPWELL_ZERO;
  /** causal masking with position(s) = q_start + s; excludes q_positions */
  bool has_q_start HOPWELL_ZERO;
  /** an error if not 0 without has_q_start */
  int64_t q_start HOPWELL_ZERO;
  /** a key stands for kv_stride >= 1 consecutive tokens */
  int64_t kv_stride HOPWELL_DEFAULT(1);
  /** int32 [s_q]; optional, both or neither: query s sees keys k_start[s] .. k_end[s] - 1 only, as documents that are packed
   * one after another need; whatever the values, none is an error */
  const DLTensor* k_start HOPWELL_ZERO;
  const DLTensor* k_end HOPWELL_ZERO;
  /** a hint: neighbouring queries select mostly the same keys, so that GPUs may take those with up to 32 heads together,
   * over the union of their keys, where that is less work. Results may then differ in their last bits with the
   * neighbours, and a NaN or infinity in a key reaches out of all queries that are taken together with one that selects
   * it. */
  bool share_keys HOPWELL_ZERO;
  /** output, like q [s_q, h_q, d_v] */
  const DLTensor* out HOPWELL_ZERO;
  /** output, fp32 [s_q, h_q]; optional */
  const DLTensor* max_logits HOPWELL_ZERO;
  /** output, fp32 [s_q, h_q]; optional */
  const DLTensor* lse HOPWELL_ZERO;
  /** hopwell_sparse_mla_forward_workspace_bytes() bytes on q's device, aligned to 16 */
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  /** a name such as "cpu"; null: the best one */
  const char* backend HOPWELL_ZERO;
} hopwell_sparse_mla_forward_args;

HOPWELL_API hopwell_status hopwell_sparse_mla_forward(const hopwell_sparse_mla_forward_args* args,
                                                      hopwell_stream stream);
HOPWELL_API hopwell_status hopwell_sparse_mla_forward_workspace_bytes(const hopwell_sparse_mla_forward_args* args,
                                                                      size_t* bytes);

/* ---- sparse_mla_backward ----------------------------------------------------------------------------------------- */

/**
 * Gradients of sparse_mla_forward, from its out and lse. If these are merged over shards of keys, each call's d_sink is whole.
 *
 *     lse'  = log(exp(lse) + exp(attn_sink))          lse without a sink
 *     p     = exp(score - lse')
 *     delta = sum_d out * d_out
 *     ds    = p * (d_out . v - delta) * sm_scale
 *
 *     dq     = ds . kv
 *     dkv   += ds^T . q, and p^T . d_out in the first d_v columns
 *     d_sink = -sum_s exp(attn_sink - lse') * delta
 */
typedef struct hopwell_sparse_mla_backward_args {
  /** like q [s_q, h_q, d_v] */
  const DLTensor* d_out HOPWELL_ZERO;
  /** these as in the forward */
  const DLTensor* q HOPWELL_ZERO;
  const DLTensor* kv HOPWELL_ZERO;
  const DLTensor* indices HOPWELL_ZERO;
  /** the forward's, like q [s_q, h_q, d_v] */
  const DLTensor* out HOPWELL_ZERO;
  /** the forward's, fp32 [s_q, h_q]; no score may exceed it by more than 44, where GPUs take exp(score - lse) as 2^64 */
  const DLTensor* lse HOPWELL_ZERO;
  float sm_scale HOPWELL_REQUIRED;
  int64_t d_v HOPWELL_DEFAULT(512);
  const DLTensor* attn_sink HOPWELL_ZERO;
  const DLTensor* topk_length HOPWELL_ZERO;
  const DLTensor* q_positions HOPWELL_ZERO;
  bool has_q_start HOPWELL_ZERO;
  int64_t q_start HOPWELL_ZERO;
  int64_t kv_stride HOPWELL_DEFAULT(1);
  const DLTensor* k_start HOPWELL_ZERO;
  const DLTensor* k_end HOPWELL_ZERO;
  /** same bits every time, for any number of threads (the CPU gives that always), and of dq in every call that has the query */
  bool deterministic HOPWELL_ZERO;
  /** add into the given fp32 dkv instead of overwriting it */
  bool accumulate HOPWELL_ZERO;
  /** a hint: rows ascend (as the indexer's), so that no pass needs to order them. Rows that do not give the same
   * results, later. */
  bool indices_ascending HOPWELL_ZERO;
  /** a hint: neighbouring queries select mostly the same keys, so that GPUs may take those with up to 32 heads together,
   * over the union of their keys, where that is less work. dq may then differ in its last bits with the neighbours, and a
   * NaN or infinity in a key reaches all queries that are taken together with one that selects it. */
  bool share_keys HOPWELL_ZERO;
  /** output, like q [s_q, h_q, d_qk]; null: not needed */
  const DLTensor* dq HOPWELL_ZERO;
  /** output, fp32 or bf16, shape of kv; null: not needed */
  const DLTensor* dkv HOPWELL_ZERO;
  /** output, fp32 [h_q]; only with attn_sink; null: not needed. Rows whose lse is +inf add nothing; all others do. */
  const DLTensor* d_sink HOPWELL_ZERO;
  /** output, fp32 [s_q, topk]: sum_h exp(score - lse), the attention distribution; optional */
  const DLTensor* attn HOPWELL_ZERO;
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  const char* backend HOPWELL_ZERO;
} hopwell_sparse_mla_backward_args;

HOPWELL_API hopwell_status hopwell_sparse_mla_backward(const hopwell_sparse_mla_backward_args* args,
                                                       hopwell_stream stream);
HOPWELL_API hopwell_status hopwell_sparse_mla_backward_workspace_bytes(const hopwell_sparse_mla_backward_args* args,
                                                                       size_t* bytes);

/* ---- attention_distribution -------------------------------------------------------------------------------------- */

typedef enum hopwell_normalize { HOPWELL_NORMALIZE_NONE = 0, HOPWELL_NORMALIZE_L1 = 1 } hopwell_normalize;

/**
 *     out[s,i] = sum_h exp(score[s,h,i] - lse[s,h])      0 where the entry is invalid; 0 for rows without a valid entry
 * The target of the lightning indexer's loss (with l1 normalisation). V is not read.
 */
typedef struct hopwell_attention_distribution_args {
  /** these as in sparse_mla_forward */
  const DLTensor* q HOPWELL_ZERO;
  const DLTensor* kv HOPWELL_ZERO;
  const DLTensor* indices HOPWELL_ZERO;
  /** the forward's, fp32 [s_q, h_q] */
  const DLTensor* lse HOPWELL_ZERO;
  float sm_scale HOPWELL_REQUIRED;
  const DLTensor* topk_length HOPWELL_ZERO;
  const DLTensor* q_positions HOPWELL_ZERO;
  bool has_q_start HOPWELL_ZERO;
  int64_t q_start HOPWELL_ZERO;
  int64_t kv_stride HOPWELL_DEFAULT(1);
  const DLTensor* k_start HOPWELL_ZERO;
  const DLTensor* k_end HOPWELL_ZERO;
  /** l1: rows sum to 1; all-zero rows stay zero */
  hopwell_normalize normalize HOPWELL_DEFAULT(HOPWELL_NORMALIZE_NONE);
  /** a hint, as in sparse_mla_backward */
  bool indices_ascending HOPWELL_ZERO;
  /** output, fp32 [s_q, topk], in the order of indices */
  const DLTensor* out HOPWELL_ZERO;
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  const char* backend HOPWELL_ZERO;
} hopwell_attention_distribution_args;

HOPWELL_API hopwell_status hopwell_attention_distribution(const hopwell_attention_distribution_args* args,
                                                          hopwell_stream stream);
HOPWELL_API hopwell_status
hopwell_attention_distribution_workspace_bytes(const hopwell_attention_distribution_args* args, size_t* bytes);

/* ---- paged_attention --------------------------------------------------------------------------------------------- */

typedef enum hopwell_cache_layout {
  /** k, v [blocks, block, h_kv, d] */
  HOPWELL_CACHE_NHD = 0,
  /** k, v [blocks, h_kv, block, d] */
  HOPWELL_CACHE_HND = 1,
  /** k [blocks, h_kv, d/x, block, x], v [blocks, h_kv, d, block]; x = 16 bytes */
  HOPWELL_CACHE_VLLM = 2
} hopwell_cache_layout;
typedef enum hopwell_bias_kind { HOPWELL_BIAS_KEY = 0, HOPWELL_BIAS_DISTANCE = 1 } hopwell_bias_kind;
typedef enum hopwell_out_of_range {
  HOPWELL_OUT_OF_RANGE_ZERO = 0,
  HOPWELL_OUT_OF_RANGE_CLAMP = 1,
  HOPWELL_OUT_OF_RANGE_NEG_INF = 2
} hopwell_out_of_range;

/**
 * Decode attention of one or a few query tokens a sequence against a paged KV cache, with the relative positions of
 * Transformer-XL (Dai et al. 2019, arXiv:1901.02860).
 *
 *     logit_j = scale * ((q + u) . k_j + bias_j);   out = sum_j softmax(logit)_j * v_j
 *
 * Query i of q_len stands at position = context_len - q_len + i and sees the keys j <= position; delta = position - j.
 * bias_j: key-indexed bias[b, h, i, j]; or distance-indexed bias[b, h, delta]; or fused (q + v) . r[h, delta]. Whatever
 * lies beyond the last column of bias or r follows out_of_range. ALiBi adds -slope * delta after the scale. A query
 * without a visible key, or whose logits are all -inf: out 0, lse -inf. Where a query sees values of +-inf or NaN, out
 * is what those alone add up to, however small their weights, which are positive also where they round to 0.
 */
typedef struct hopwell_paged_attention_args {
  /** fp32, fp16 or bf16 [b, q_len, h_q, d] or [b, h_q, d]; q_len 1..16; d 32..256, a multiple of 8 */
  const DLTensor* q HOPWELL_ZERO;
  /** like q; shape by layout; h_q a multiple of h_kv; block 1..256 */
  const DLTensor* k_cache HOPWELL_ZERO;
  const DLTensor* v_cache HOPWELL_ZERO;
  /** int32 [b, max_blocks]; entries past the context may be anything, bad ones within are masked */
  const DLTensor* block_tables HOPWELL_ZERO;
  /** int32 [b], the q_len query tokens included; clamped to 0 .. max_blocks * block */
  const DLTensor* context_lens HOPWELL_ZERO;
  float scale HOPWELL_REQUIRED;
  hopwell_cache_layout layout HOPWELL_DEFAULT(HOPWELL_CACHE_NHD);
  /** q's dtype or fp32 [h_q, d]; optional */
  const DLTensor* pos_bias_u HOPWELL_ZERO;
  /** fp32, fp16 or bf16; key: [b or 1, h_q, q_len, keys]; distance: [b or 1, h_q, extent]; optional */
  const DLTensor* bias HOPWELL_ZERO;
  hopwell_bias_kind bias_kind HOPWELL_DEFAULT(HOPWELL_BIAS_KEY);
  hopwell_out_of_range out_of_range HOPWELL_DEFAULT(HOPWELL_OUT_OF_RANGE_ZERO);
  /** add bias_j after the scale: scale * (q + u) . k_j + bias_j */
  bool post_scale HOPWELL_ZERO;
  /** q's dtype or fp32 [h_q, d]; only with r */
  const DLTensor* pos_bias_v HOPWELL_ZERO;
  /** q's dtype or fp32 [h_q or 1, extent, d]; excludes bias */
  const DLTensor* r HOPWELL_ZERO;
  /** fp32 [h_q]; optional */
  const DLTensor* alibi_slopes HOPWELL_ZERO;
  /** >= 1: only keys with delta < window; 0: all */
  int64_t window HOPWELL_ZERO;
  /** output, like q */
  const DLTensor* out HOPWELL_ZERO;
  /** output, fp32 [b, q_len, h_q] ([b, h_q] for a three-dimensional q); optional */
  const DLTensor* lse HOPWELL_ZERO;
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  const char* backend HOPWELL_ZERO;
} hopwell_paged_attention_args;

HOPWELL_API hopwell_status hopwell_paged_attention(const hopwell_paged_attention_args* args, hopwell_stream stream);
HOPWELL_API hopwell_status hopwell_paged_attention_workspace_bytes(const hopwell_paged_attention_args* args,
                                                                   size_t* bytes);

/* ---- NVFP4 ------------------------------------------------------------------------------------------------------- */

/*
 * e2m1 codes, two a byte (low nibble = even k), one e4m3 scale per 16 along K, one fp32 global scale a tensor:
 * w = code * scale * global (NVIDIA's NVFP4; element and scale formats: OCP Microscaling Formats v1.0 and OCP FP8).
 * Codes are uint8 or float4_e2m1fn_x2, scales uint8 or float8_e4m3fn. Scales are plain [rows, K/16], or in the 128x4
 * blocked order of cuBLAS and CUTLASS, where (row m, scale j) has the byte offset
 *
 *     512 * ((m/128) * ceil((K/16)/4) + j/4) + 16 * (m mod 32) + 4 * ((m mod 128)/32) + j mod 4
 *
 * with rows padded to 128 and scales to 4; the tensor may then have any shape with that many bytes, contiguous, L
 * slowest.
 */
typedef enum hopwell_scale_layout { HOPWELL_SCALES_PLAIN = 0, HOPWELL_SCALES_BLOCKED = 1 } hopwell_scale_layout;

/** out[m, n, l] = alpha * sum_k a[m, k, l] * b[n, k, l], both sides NVFP4; fp32 accumulation in a fixed order. */
typedef struct hopwell_nvfp4_gemv_args {
  /** [M, K/2, L]; K fastest, then rows, then L; K a multiple of 16 */
  const DLTensor* a HOPWELL_ZERO;
  /** [N, K/2, L], N 1, or 1 padded to 128 rows, of which only the first counts */
  const DLTensor* b HOPWELL_ZERO;
  /** plain [M, K/16, L], or blocked */
  const DLTensor* sfa HOPWELL_ZERO;
  /** plain [N, K/16, L], or blocked */
  const DLTensor* sfb HOPWELL_ZERO;
  /** in C, 0 means 1 and -0.0f means 0 */
  float alpha HOPWELL_DEFAULT(1.0F);
  /** alpha is 1 / the factor (compressed-tensors) */
  bool global_is_reciprocal HOPWELL_ZERO;
  hopwell_scale_layout scale_layout HOPWELL_DEFAULT(HOPWELL_SCALES_PLAIN);
  /** output, fp16, bf16 or fp32 [M, 1, L], any strides */
  const DLTensor* out HOPWELL_ZERO;
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  const char* backend HOPWELL_ZERO;
} hopwell_nvfp4_gemv_args;

/**
 * out = x . w^T + bias with 4-bit weights and 16-bit activations (W4A16); the global scale is applied in fp32 before the
 * rounding.
 */
typedef struct hopwell_nvfp4_linear_args {
  /** bf16 or fp16 (CPU: fp32 too) [n, K] */
  const DLTensor* x HOPWELL_ZERO;
  /** codes [N, K/2] */
  const DLTensor* weight HOPWELL_ZERO;
  /** plain [N, K/16], or blocked */
  const DLTensor* weight_scale HOPWELL_ZERO;
  /** fp32, one element, on x's device; null: weight_global_value */
  const DLTensor* weight_global HOPWELL_ZERO;
  /** excludes weight_global; in C, 0 means 1 and -0.0f means 0 */
  float weight_global_value HOPWELL_DEFAULT(1.0F);
  /** the global is 1 / the factor (compressed-tensors) */
  bool global_is_reciprocal HOPWELL_ZERO;
  /** like x [N]; optional */
  const DLTensor* bias HOPWELL_ZERO;
  hopwell_scale_layout scale_layout HOPWELL_DEFAULT(HOPWELL_SCALES_PLAIN);
  /** output, like x [n, N] */
  const DLTensor* out HOPWELL_ZERO;
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  const char* backend HOPWELL_ZERO;
} hopwell_nvfp4_linear_args;

/**
 * The gradient of nvfp4_linear for its input: d_x = d_out . w, with fp32 accumulation; the global scale is applied in fp32
 * before the rounding. The weights are frozen: there is no gradient for them.
 */
typedef struct hopwell_nvfp4_linear_backward_args {
  /** bf16 or fp16 (CPU: fp32 too) [n, N] */
  const DLTensor* d_out HOPWELL_ZERO;
  /** these as in nvfp4_linear */
  const DLTensor* weight HOPWELL_ZERO;
  const DLTensor* weight_scale HOPWELL_ZERO;
  const DLTensor* weight_global HOPWELL_ZERO;
  float weight_global_value HOPWELL_DEFAULT(1.0F);
  bool global_is_reciprocal HOPWELL_ZERO;
  hopwell_scale_layout scale_layout HOPWELL_DEFAULT(HOPWELL_SCALES_PLAIN);
  /** output, like d_out [n, K] */
  const DLTensor* d_x HOPWELL_ZERO;
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  const char* backend HOPWELL_ZERO;
} hopwell_nvfp4_linear_backward_args;

/**
 * out[m, n] = alpha * sum_k a[m, k] * b[n, k] + bias[n], both sides NVFP4 (W4A4), rounded once; fp32 accumulation in a
 * fixed order.
 */
typedef struct hopwell_nvfp4_matmul_args {
  /** codes [M, K/2]; K a multiple of 16 */
  const DLTensor* a HOPWELL_ZERO;
  /** codes [N, K/2] */
  const DLTensor* b HOPWELL_ZERO;
  /** plain [M, K/16], or blocked */
  const DLTensor* sfa HOPWELL_ZERO;
  /** plain [N, K/16], or blocked */
  const DLTensor* sfb HOPWELL_ZERO;
  /** in C, 0 means 1 and -0.0f means 0 */
  float alpha HOPWELL_DEFAULT(1.0F);
  /** alpha is 1 / the factor (compressed-tensors) */
  bool global_is_reciprocal HOPWELL_ZERO;
  /** like out [N]; optional */
  const DLTensor* bias HOPWELL_ZERO;
  hopwell_scale_layout scale_layout HOPWELL_DEFAULT(HOPWELL_SCALES_PLAIN);
  /** output, fp16, bf16 or fp32 [M, N] */
  const DLTensor* out HOPWELL_ZERO;
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  const char* backend HOPWELL_ZERO;
} hopwell_nvfp4_matmul_args;

/**
 * Codes and scales of an array.
 *
 *     global = amax / 2688
 *     scale  = e4m3(block amax / (6 * global))
 *     code   = nearest (ties to even) to x / (scale * global), with x's sign
 *
 * A block of zeros, or too small for its global, gets scale 0 and codes 0. A block with a NaN or an infinity gets a NaN
 * scale and codes 0, and such values do not count in amax. A global on the host must be positive and finite; on a CUDA
 * device it is data.
 */
typedef struct hopwell_nvfp4_quantize_args {
  /** fp32, fp16 or bf16 [rows, K]; K a multiple of 16 */
  const DLTensor* x HOPWELL_ZERO;
  /** fp32, one element: use this global scale; null: global_in_value if that is not 0, else from x */
  const DLTensor* global_in HOPWELL_ZERO;
  /** excludes global_in */
  float global_in_value HOPWELL_ZERO;
  hopwell_scale_layout scale_layout HOPWELL_DEFAULT(HOPWELL_SCALES_PLAIN);
  /** output [rows, K/2] */
  const DLTensor* codes HOPWELL_ZERO;
  /** output, plain [rows, K/16], or blocked (the padding is written as 0) */
  const DLTensor* scales HOPWELL_ZERO;
  /** output, fp32, one element */
  const DLTensor* global_scale HOPWELL_ZERO;
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  const char* backend HOPWELL_ZERO;
} hopwell_nvfp4_quantize_args;

/** x = code * scale * global. */
typedef struct hopwell_nvfp4_dequantize_args {
  /** [rows, K/2] */
  const DLTensor* codes HOPWELL_ZERO;
  /** plain [rows, K/16], or blocked */
  const DLTensor* scales HOPWELL_ZERO;
  /** fp32, one element; null: global_value */
  const DLTensor* global_scale HOPWELL_ZERO;
  /** excludes global_scale; in C, 0 means 1 and -0.0f means 0 */
  float global_value HOPWELL_DEFAULT(1.0F);
  /** the global is 1 / the factor (compressed-tensors) */
  bool global_is_reciprocal HOPWELL_ZERO;
  hopwell_scale_layout scale_layout HOPWELL_DEFAULT(HOPWELL_SCALES_PLAIN);
  /** output, fp32, fp16 or bf16 [rows, K] */
  const DLTensor* x HOPWELL_ZERO;
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  const char* backend HOPWELL_ZERO;
} hopwell_nvfp4_dequantize_args;

HOPWELL_API hopwell_status hopwell_nvfp4_gemv(const hopwell_nvfp4_gemv_args* args, hopwell_stream stream);
HOPWELL_API hopwell_status hopwell_nvfp4_gemv_workspace_bytes(const hopwell_nvfp4_gemv_args* args, size_t* bytes);
HOPWELL_API hopwell_status hopwell_nvfp4_linear(const hopwell_nvfp4_linear_args* args, hopwell_stream stream);
HOPWELL_API hopwell_status hopwell_nvfp4_linear_workspace_bytes(const hopwell_nvfp4_linear_args* args, size_t* bytes);
HOPWELL_API hopwell_status hopwell_nvfp4_linear_backward(const hopwell_nvfp4_linear_backward_args* args,
                                                         hopwell_stream stream);
HOPWELL_API hopwell_status
hopwell_nvfp4_linear_backward_workspace_bytes(const hopwell_nvfp4_linear_backward_args* args, size_t* bytes);
HOPWELL_API hopwell_status hopwell_nvfp4_matmul(const hopwell_nvfp4_matmul_args* args, hopwell_stream stream);
HOPWELL_API hopwell_status hopwell_nvfp4_matmul_workspace_bytes(const hopwell_nvfp4_matmul_args* args, size_t* bytes);
HOPWELL_API hopwell_status hopwell_nvfp4_quantize(const hopwell_nvfp4_quantize_args* args, hopwell_stream stream);
HOPWELL_API hopwell_status hopwell_nvfp4_quantize_workspace_bytes(const hopwell_nvfp4_quantize_args* args,
                                                                  size_t* bytes);
HOPWELL_API hopwell_status hopwell_nvfp4_dequantize(const hopwell_nvfp4_dequantize_args* args, hopwell_stream stream);
HOPWELL_API hopwell_status hopwell_nvfp4_dequantize_workspace_bytes(const hopwell_nvfp4_dequantize_args* args,
                                                                    size_t* bytes);

/* ---- lightning_indexer ------------------------------------------------------------------------------------------- */

/**
 *     score[s,t] = k_scale[t] * sum_j weights[s,j] * q_scale[s,j] * relu(q_index[s,j,:] . k_index[t,:])
 *     indices[s,:] = the topk visible keys of largest score (ties: the smaller key) in ascending order; the rest -1
 * The s_q x s_kv matrix of scores is never stored. A NaN score counts as -inf. Visible are keys as in sparse_mla_forward,
 * by positions and key ranges. (DeepSeek-V3.2, "DeepSeek Sparse Attention".)
 *
 * The scales belong to float8_e4m3fn; one that is absent is 1 (q's may be folded into the weights). They are data of any
 * value: the relu is of the products of the codes, so that a negative scale changes a head's or a key's sign; of a NaN
 * scale, or an infinity times 0, the score is NaN.
 */
typedef struct hopwell_lightning_indexer_args {
  /** bf16 or float8_e4m3fn (CPU and sm80: fp32 too) [s_q, h_index, d_index] */
  const DLTensor* q_index HOPWELL_ZERO;
  /** like q_index [s_kv, d_index] */
  const DLTensor* k_index HOPWELL_ZERO;
  /** fp32 or bf16 [s_q, h_index] */
  const DLTensor* weights HOPWELL_ZERO;
  /** fp32 [s_q, h_index] and fp32 [s_kv]; each optional, and only with float8_e4m3fn */
  const DLTensor* q_scale HOPWELL_ZERO;
  const DLTensor* k_scale HOPWELL_ZERO;
  /** int32 [s_q]; optional, turns on causal masking */
  const DLTensor* q_positions HOPWELL_ZERO;
  bool has_q_start HOPWELL_ZERO;
  int64_t q_start HOPWELL_ZERO;
  int64_t kv_stride HOPWELL_DEFAULT(1);
  /** as in sparse_mla_forward */
  const DLTensor* k_start HOPWELL_ZERO;
  const DLTensor* k_end HOPWELL_ZERO;
  /** score[s,t] = k_scale[t] * sum_j weights[s,j] * q_scale[s,j] * (q . k), without the relu */
  bool no_relu HOPWELL_ZERO;
  /** output, int32 [s_q, topk] */
  const DLTensor* indices HOPWELL_ZERO;
  /** output, fp32 [s_q, topk], -inf where the index is -1; optional */
  const DLTensor* scores HOPWELL_ZERO;
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  const char* backend HOPWELL_ZERO;
} hopwell_lightning_indexer_args;

/**
 * The indexer's loss and its gradients.
 *
 *     loss = sum_s KL(target[s,:] || softmax over the selected entries of score[s,:])
 *     g    = softmax - target, times d_loss and the row's weight: a number of fp32, NaN if that is not finite
 *
 *     d_weights[s,j]   = sum_i g * relu(q.k)
 *     d_q_index[s,j,:] = sum_i g * w * 1[q.k > 0] * k
 *     d_k_index[t,:]  += sum   g * w * 1[q.k > 0] * q
 *
 * relu and 1[q.k > 0] are factors like any other: where g is NaN (a target is, or a score is +inf), so are the loss,
 * d_weights and d_q_index of the query in every head, and d_k_index of the key, also where q.k <= 0.
 */
typedef struct hopwell_lightning_indexer_backward_args {
  /** fp32 [s_q, topk]: attention_distribution with l1 normalisation */
  const DLTensor* target HOPWELL_ZERO;
  /** fp32 [s_q, topk], instead of target: g itself, of any loss of these scores; infinities count as NaN */
  const DLTensor* d_scores HOPWELL_ZERO;
  /** as in the forward, but not float8_e4m3fn */
  const DLTensor* q_index HOPWELL_ZERO;
  const DLTensor* k_index HOPWELL_ZERO;
  const DLTensor* weights HOPWELL_ZERO;
  /** int32 [s_q, topk]; entries outside [0, s_kv), or outside their query's key range, are invalid */
  const DLTensor* indices HOPWELL_ZERO;
  /** key ranges as in sparse_mla_forward */
  const DLTensor* k_start HOPWELL_ZERO;
  const DLTensor* k_end HOPWELL_ZERO;
  /** fp32 [s_q], optional: factors of each row's loss and gradient; a row of weight 0 adds nothing, whatever is in it */
  const DLTensor* row_weights HOPWELL_ZERO;
  /** scales the gradients, not the loss; in C, 0 means 1 and -0.0f means 0 */
  float d_loss HOPWELL_DEFAULT(1.0F);
  /** fp32, one element, instead of d_loss: read on the device, so that nobody waits for it */
  const DLTensor* d_loss_array HOPWELL_ZERO;
  /** score[s,t] = sum_j weights[s,j] * (q . k), without the relu */
  bool no_relu HOPWELL_ZERO;
  bool deterministic HOPWELL_ZERO;
  /** output, fp32, one element; with d_scores there is none */
  const DLTensor* loss HOPWELL_ZERO;
  /** output, fp32 [s_q], optional: each row's loss before row_weights; with d_scores there is none */
  const DLTensor* row_loss HOPWELL_ZERO;
  /** output, like q_index */
  const DLTensor* d_q_index HOPWELL_ZERO;
  /** output, fp32 [s_kv, d_index] */
  const DLTensor* d_k_index HOPWELL_ZERO;
  /** output, like weights */
  const DLTensor* d_weights HOPWELL_ZERO;
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  const char* backend HOPWELL_ZERO;
} hopwell_lightning_indexer_backward_args;

/**
 * The indexer's loss over all visible keys, as its dense warm-up wants it, and the gradients of lightning_indexer_backward.
 *
 *     target[s,t] = sum_h exp(score[s,h,t] - lse[s,h]) / h_q       score of the attention, over visible keys t
 *     loss        = sum_s row_weights[s] * KL(target[s,:] || softmax over visible keys of the index score[s,:])
 *     g           = softmax - target
 *
 * Nothing of size s_q x s_kv is stored: queries are taken in passes, whose scores and targets the workspace holds.
 */
typedef struct hopwell_indexer_dense_loss_args {
  /** these as in sparse_mla_forward */
  const DLTensor* q HOPWELL_ZERO;
  const DLTensor* kv HOPWELL_ZERO;
  /** the dense forward's (sparse_mla_forward without indices), fp32 [s_q, h_q] */
  const DLTensor* lse HOPWELL_ZERO;
  /** these as in lightning_indexer */
  const DLTensor* q_index HOPWELL_ZERO;
  const DLTensor* k_index HOPWELL_ZERO;
  const DLTensor* weights HOPWELL_ZERO;
  /** of the attention's scores */
  float sm_scale HOPWELL_REQUIRED;
  const DLTensor* q_positions HOPWELL_ZERO;
  bool has_q_start HOPWELL_ZERO;
  int64_t q_start HOPWELL_ZERO;
  int64_t kv_stride HOPWELL_DEFAULT(1);
  const DLTensor* k_start HOPWELL_ZERO;
  const DLTensor* k_end HOPWELL_ZERO;
  /** these and the outputs as in lightning_indexer_backward */
  const DLTensor* row_weights HOPWELL_ZERO;
  float d_loss HOPWELL_DEFAULT(1.0F);
  const DLTensor* d_loss_array HOPWELL_ZERO;
  bool no_relu HOPWELL_ZERO;
  bool deterministic HOPWELL_ZERO;
  const DLTensor* loss HOPWELL_ZERO;
  const DLTensor* row_loss HOPWELL_ZERO;
  const DLTensor* d_q_index HOPWELL_ZERO;
  const DLTensor* d_k_index HOPWELL_ZERO;
  const DLTensor* d_weights HOPWELL_ZERO;
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  const char* backend HOPWELL_ZERO;
} hopwell_indexer_dense_loss_args;

/** Rows divided by their sums; all-zero rows stay. So that ranks that hold slices of the heads can add their
 * distributions first. */
typedef struct hopwell_normalize_l1_args {
  /** fp32 [rows, columns] */
  const DLTensor* attn HOPWELL_ZERO;
  /** output, like attn, or attn itself */
  const DLTensor* out HOPWELL_ZERO;
  void* workspace HOPWELL_ZERO;
  size_t workspace_bytes HOPWELL_ZERO;
  const char* backend HOPWELL_ZERO;
} hopwell_normalize_l1_args;

HOPWELL_API hopwell_status hopwell_lightning_indexer(const hopwell_lightning_indexer_args* args, hopwell_stream stream);
HOPWELL_API hopwell_status hopwell_lightning_indexer_workspace_bytes(const hopwell_lightning_indexer_args* args,
                                                                     size_t* bytes);
HOPWELL_API hopwell_status hopwell_lightning_indexer_backward(const hopwell_lightning_indexer_backward_args* args,
                                                              hopwell_stream stream);
HOPWELL_API hopwell_status
hopwell_lightning_indexer_backward_workspace_bytes(const hopwell_lightning_indexer_backward_args* args, size_t* bytes);
HOPWELL_API hopwell_status hopwell_indexer_dense_loss(const hopwell_indexer_dense_loss_args* args,
                                                      hopwell_stream stream);
HOPWELL_API hopwell_status hopwell_indexer_dense_loss_workspace_bytes(const hopwell_indexer_dense_loss_args* args,
                                                                      size_t* bytes);
HOPWELL_API hopwell_status hopwell_normalize_l1(const hopwell_normalize_l1_args* args, hopwell_stream stream);
HOPWELL_API hopwell_status hopwell_normalize_l1_workspace_bytes(const hopwell_normalize_l1_args* args, size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif /* HOPWELL_HOPWELL_H_ */
