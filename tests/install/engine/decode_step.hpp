// The attention part of one decode step: an NVFP4 projection to q, k and v, paged attention, an NVFP4 projection back.
#pragma once

#include <hopwell/hopwell.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace engine {

using hopwell::bfloat16;
using hopwell::Tensor;

// A small layer. A cache page has 16 tokens, and a sequence has at most 4 pages.
constexpr std::int64_t kHeads = 8, kKvHeads = 2, kHeadSize = 64, kWidth = kHeads * kHeadSize;
constexpr std::int64_t kQkv = (kHeads + 2 * kKvHeads) * kHeadSize;  // columns of q, then k, then v
constexpr std::int64_t kPages = 12, kPage = 16, kMaxPages = 4, kMaxBatch = 4;
constexpr std::int64_t kCache = kPages * kPage * kKvHeads * kHeadSize;

// begin: memory
// Memory of one layer, on the CPU or on a GPU. The engine allocates it once, for the largest batch.
struct Memory {
  DLDevice device;                            // {kDLCPU, 0}, or {kDLCUDA, number of the GPU}
  bfloat16 *x, *qkv, *attended, *y;           // [b, kWidth], [b, kQkv], [b, kWidth], [b, kWidth]
  bfloat16 *k_cache, *v_cache;                // [kPages, kPage, kKvHeads, kHeadSize]
  std::uint8_t *qkv_weight, *qkv_scale;       // NVFP4: [kQkv, kWidth / 2] codes, [kQkv, kWidth / 16] scales
  std::uint8_t *y_weight, *y_scale;           // [kWidth, kWidth / 2], [kWidth, kWidth / 16]
  std::int32_t *block_tables, *context_lens;  // [b, kMaxPages], [b]
};
// end: memory

// begin: step
// The three calls for a batch of b sequences. The tensors are views, and nothing is allocated.
struct DecodeStep {
  hopwell::Nvfp4LinearArgs to_qkv;
  hopwell::PagedAttentionArgs attention;
  hopwell::Nvfp4LinearArgs to_y;

  DecodeStep(const Memory& m, std::int64_t b) {
    const auto at = m.device;
    to_qkv = {.x = Tensor(m.x, {b, kWidth}, {.device = at}),
              .weight = Tensor(m.qkv_weight, {kQkv, kWidth / 2}, {.device = at}),
              .weight_scale = Tensor(m.qkv_scale, {kQkv, kWidth / 16}, {.device = at}),
              .weight_global_value = 1.0F / kWidth,
              .out = Tensor(m.qkv, {b, kQkv}, {.device = at})};
    // q is the first columns of qkv's rows, so its rows are kQkv elements apart.
    attention = {.q = Tensor(m.qkv, {b, kHeads, kHeadSize}, {.strides = {kQkv, kHeadSize, 1}, .device = at}),
                 .k_cache = Tensor(m.k_cache, {kPages, kPage, kKvHeads, kHeadSize}, {.device = at}),
                 .v_cache = Tensor(m.v_cache, {kPages, kPage, kKvHeads, kHeadSize}, {.device = at}),
                 .block_tables = Tensor(m.block_tables, {b, kMaxPages}, {.device = at}),
                 .context_lens = Tensor(m.context_lens, {b}, {.device = at}),
                 .scale = 0.125F,
                 .out = Tensor(m.attended, {b, kHeads, kHeadSize}, {.device = at})};
    to_y = {.x = Tensor(m.attended, {b, kWidth}, {.device = at}),
            .weight = Tensor(m.y_weight, {kWidth, kWidth / 2}, {.device = at}),
            .weight_scale = Tensor(m.y_scale, {kWidth, kWidth / 16}, {.device = at}),
            .weight_global_value = 1.0F / kWidth,
            .out = Tensor(m.y, {b, kWidth}, {.device = at})};
  }

  // The calls of a step follow each other on one stream, so they share one workspace.
  [[nodiscard]] std::size_t workspace_bytes() const {
    return std::max({hopwell::nvfp4_linear_workspace_bytes(to_qkv), hopwell::paged_attention_workspace_bytes(attention),
                     hopwell::nvfp4_linear_workspace_bytes(to_y)});
  }
  void use_workspace(void* workspace, std::size_t bytes) {
    to_qkv.workspace = attention.workspace = to_y.workspace = workspace;
    to_qkv.workspace_bytes = attention.workspace_bytes = to_y.workspace_bytes = bytes;
  }

  // Enqueues the step and does not wait for it.
  void run(hopwell_stream stream) const {
    hopwell::nvfp4_linear(to_qkv, stream);
    // Here a kernel of the engine rotates q and k, and writes the new keys and values into their pages.
    hopwell::paged_attention(attention, stream);
    hopwell::nvfp4_linear(to_y, stream);
  }
};
// end: step

// begin: workspace
// A plan depends on the batch size, and a larger batch may need less. So the engine asks for every size, once.
inline std::size_t largest_workspace(const Memory& m) {
  std::size_t bytes = 0;
  for (std::int64_t b = 1; b <= kMaxBatch; ++b) bytes = std::max(bytes, DecodeStep(m, b).workspace_bytes());
  return bytes;
}
// end: workspace

// ---- what an engine has already: memory and weights ----

// Divides one allocation into the arrays of Memory. With base null the result is only good for `end`, the size.
struct Arena {
  std::byte* end;

  template <class T>
  T* take(std::int64_t count) {
    std::byte* const begin = end;
    end += (static_cast<std::size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(begin);
  }
};
inline Memory divide(Arena& arena, DLDevice device) {
  Memory m{};
  m.device = device;
  m.x = arena.take<bfloat16>(kMaxBatch * kWidth), m.qkv = arena.take<bfloat16>(kMaxBatch * kQkv);
  m.attended = arena.take<bfloat16>(kMaxBatch * kWidth), m.y = arena.take<bfloat16>(kMaxBatch * kWidth);
  m.k_cache = arena.take<bfloat16>(kCache), m.v_cache = arena.take<bfloat16>(kCache);
  m.qkv_weight = arena.take<std::uint8_t>(kQkv * kWidth / 2),
  m.qkv_scale = arena.take<std::uint8_t>(kQkv * kWidth / 16);
  m.y_weight = arena.take<std::uint8_t>(kWidth * kWidth / 2),
  m.y_scale = arena.take<std::uint8_t>(kWidth * kWidth / 16);
  m.block_tables = arena.take<std::int32_t>(kMaxBatch * kMaxPages),
  m.context_lens = arena.take<std::int32_t>(kMaxBatch);
  return m;
}

// The bits of a number that bf16 has exactly, and the number of such bits.
inline bfloat16 to_bfloat16(float x) { return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16)}; }
inline float to_float(bfloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

// Fills host memory. All weights are 1, keys are 0, and the values in page p are p. So y of a sequence is the mean page
// of its keys.
inline void fill(const Memory& m) {
  std::fill_n(m.x, kMaxBatch * kWidth, to_bfloat16(1));
  std::fill_n(m.k_cache, kCache, to_bfloat16(0));
  for (std::int64_t i = 0; i < kCache; ++i) m.v_cache[i] = to_bfloat16(static_cast<float>(i / (kCache / kPages)));
  std::fill_n(m.qkv_weight, kQkv * kWidth / 2, std::uint8_t{0x22}),
      std::fill_n(m.qkv_scale, kQkv * kWidth / 16, std::uint8_t{0x38});
  std::fill_n(m.y_weight, kWidth * kWidth / 2, std::uint8_t{0x22}),
      std::fill_n(m.y_scale, kWidth * kWidth / 16, std::uint8_t{0x38});
  const std::int32_t tables[kMaxBatch][kMaxPages] = {{2, 4}, {5, 7}, {9, 9, 9, 1}, {0, 3}},
                     lens[kMaxBatch] = {32, 5, 64, 17};
  std::copy_n(&tables[0][0], kMaxBatch * kMaxPages, m.block_tables);
  std::copy_n(lens, kMaxBatch, m.context_lens);
}

}  // namespace engine
