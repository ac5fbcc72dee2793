// Hopwell, the C++ interface (C++20).
//
//     hopwell::Tensor q(q_data, {s_q, h_q, 576}), ...;
//     hopwell::sparse_mla_forward({.q = q, .kv = kv, .indices = indices, .sm_scale = scale, .out = out, .lse = lse}, stream);
//
// The argument structs, with the meaning, shape and dtype of every field, are in hopwell.h. Each operator has
//
//   operator(args, stream)           checks all arguments, picks a backend and enqueues; throws hopwell::Error, after bad
//                                    arguments with the outputs untouched
//   operator_workspace_bytes(args)   bytes of scratch that the chosen backend wants in `workspace`; 0 on the CPU
//   explain(args)                    one line a backend: `sm90: chosen`, `sm100: no such device`, `cpu: slower than sm90`
//
// All of them may be called from any thread at the same time, and on the CPU in forked processes. Results do not depend
// on the number of threads.
#ifndef HOPWELL_HOPWELL_HPP_
#define HOPWELL_HOPWELL_HPP_

#include <hopwell/hopwell.h>
#include <hopwell/error.hpp>
#include <hopwell/tensor.hpp>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace hopwell {

using Stream = hopwell_stream;

using SparseMlaForwardArgs = hopwell_sparse_mla_forward_args;
using SparseMlaBackwardArgs = hopwell_sparse_mla_backward_args;
using AttentionDistributionArgs = hopwell_attention_distribution_args;
using PagedAttentionArgs = hopwell_paged_attention_args;
using Nvfp4GemvArgs = hopwell_nvfp4_gemv_args;
using Nvfp4LinearArgs = hopwell_nvfp4_linear_args;
using Nvfp4LinearBackwardArgs = hopwell_nvfp4_linear_backward_args;
using Nvfp4MatmulArgs = hopwell_nvfp4_matmul_args;
using Nvfp4QuantizeArgs = hopwell_nvfp4_quantize_args;
using Nvfp4DequantizeArgs = hopwell_nvfp4_dequantize_args;
using LightningIndexerArgs = hopwell_lightning_indexer_args;
using LightningIndexerBackwardArgs = hopwell_lightning_indexer_backward_args;
using IndexerDenseLossArgs = hopwell_indexer_dense_loss_args;
using NormalizeL1Args = hopwell_normalize_l1_args;

HOPWELL_API void sparse_mla_forward(const SparseMlaForwardArgs& args, Stream stream = nullptr);
HOPWELL_API std::size_t sparse_mla_forward_workspace_bytes(const SparseMlaForwardArgs& args);
HOPWELL_API std::string explain(const SparseMlaForwardArgs& args);

HOPWELL_API void sparse_mla_backward(const SparseMlaBackwardArgs& args, Stream stream = nullptr);
HOPWELL_API std::size_t sparse_mla_backward_workspace_bytes(const SparseMlaBackwardArgs& args);
HOPWELL_API std::string explain(const SparseMlaBackwardArgs& args);

HOPWELL_API void attention_distribution(const AttentionDistributionArgs& args, Stream stream = nullptr);
HOPWELL_API std::size_t attention_distribution_workspace_bytes(const AttentionDistributionArgs& args);
HOPWELL_API std::string explain(const AttentionDistributionArgs& args);

HOPWELL_API void paged_attention(const PagedAttentionArgs& args, Stream stream = nullptr);
HOPWELL_API std::size_t paged_attention_workspace_bytes(const PagedAttentionArgs& args);
HOPWELL_API std::string explain(const PagedAttentionArgs& args);

HOPWELL_API void nvfp4_gemv(const Nvfp4GemvArgs& args, Stream stream = nullptr);
HOPWELL_API std::size_t nvfp4_gemv_workspace_bytes(const Nvfp4GemvArgs& args);
HOPWELL_API std::string explain(const Nvfp4GemvArgs& args);

HOPWELL_API void nvfp4_linear(const Nvfp4LinearArgs& args, Stream stream = nullptr);
HOPWELL_API std::size_t nvfp4_linear_workspace_bytes(const Nvfp4LinearArgs& args);
HOPWELL_API std::string explain(const Nvfp4LinearArgs& args);

HOPWELL_API void nvfp4_linear_backward(const Nvfp4LinearBackwardArgs& args, Stream stream = nullptr);
HOPWELL_API std::size_t nvfp4_linear_backward_workspace_bytes(const Nvfp4LinearBackwardArgs& args);
HOPWELL_API std::string explain(const Nvfp4LinearBackwardArgs& args);

HOPWELL_API void nvfp4_matmul(const Nvfp4MatmulArgs& args, Stream stream = nullptr);
HOPWELL_API std::size_t nvfp4_matmul_workspace_bytes(const Nvfp4MatmulArgs& args);
HOPWELL_API std::string explain(const Nvfp4MatmulArgs& args);

HOPWELL_API void nvfp4_quantize(const Nvfp4QuantizeArgs& args, Stream stream = nullptr);
HOPWELL_API std::size_t nvfp4_quantize_workspace_bytes(const Nvfp4QuantizeArgs& args);
HOPWELL_API std::string explain(const Nvfp4QuantizeArgs& args);

HOPWELL_API void nvfp4_dequantize(const Nvfp4DequantizeArgs& args, Stream stream = nullptr);
HOPWELL_API std::size_t nvfp4_dequantize_workspace_bytes(const Nvfp4DequantizeArgs& args);
HOPWELL_API std::string explain(const Nvfp4DequantizeArgs& args);

HOPWELL_API void lightning_indexer(const LightningIndexerArgs& args, Stream stream = nullptr);
HOPWELL_API std::size_t lightning_indexer_workspace_bytes(const LightningIndexerArgs& args);
HOPWELL_API std::string explain(const LightningIndexerArgs& args);

HOPWELL_API void lightning_indexer_backward(const LightningIndexerBackwardArgs& args, Stream stream = nullptr);
HOPWELL_API std::size_t lightning_indexer_backward_workspace_bytes(const LightningIndexerBackwardArgs& args);
HOPWELL_API std::string explain(const LightningIndexerBackwardArgs& args);

HOPWELL_API void indexer_dense_loss(const IndexerDenseLossArgs& args, Stream stream = nullptr);
HOPWELL_API std::size_t indexer_dense_loss_workspace_bytes(const IndexerDenseLossArgs& args);
HOPWELL_API std::string explain(const IndexerDenseLossArgs& args);

HOPWELL_API void normalize_l1(const NormalizeL1Args& args, Stream stream = nullptr);
HOPWELL_API std::size_t normalize_l1_workspace_bytes(const NormalizeL1Args& args);
HOPWELL_API std::string explain(const NormalizeL1Args& args);

/// Names of the backends that this build has and this machine can run, best first; always ends with the emulated ones,
/// if any.
HOPWELL_API std::vector<std::string> backends();
/// The same of those that have a kernel for the operator; an operator that there is not is an Error.
HOPWELL_API std::vector<std::string> backends(std::string_view operator_name);

/// One entry a backend the library knows, present or not: {name, what it needs, "" or why it cannot run here}.
struct BackendInfo {
  std::string name, needs, missing;
};
HOPWELL_API std::vector<BackendInfo> backend_info();

/// CUDA devices that the driver reports, found without linking to it: empty without a driver.
struct DeviceInfo {
  std::string name;
  int compute_capability;  ///< major * 10 + minor: 90 for Hopper, 100 for Blackwell
  std::size_t memory_bytes;
};
HOPWELL_API std::vector<DeviceInfo> cuda_devices();

/// What this machine's processor can do, timed when called and with as many threads as the operators use: seconds that
/// one fp32 matrix product of 2048^3 takes (2 * 2048^3 operations), and that summing `bytes` bytes of memory takes.
/// `hopwell bench` states operators as shares of these.
HOPWELL_API double time_cpu_matmul();
HOPWELL_API double time_cpu_read(std::size_t bytes);

/// How many threads a CPU operator may use, the calling one included: as set, else HOPWELL_NUM_THREADS, else
/// OMP_NUM_THREADS, else as many as the process has processors. Results do not depend on it. 0: no longer set.
HOPWELL_API int num_threads();
HOPWELL_API void set_num_threads(int threads);

/// One line a component: the compiler, vector instruction set and number of threads in use.
HOPWELL_API std::string build_info();

HOPWELL_API std::string version();

}  // namespace hopwell

#endif  // HOPWELL_HOPWELL_HPP_
