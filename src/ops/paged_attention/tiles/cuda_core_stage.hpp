// paged_attention on the CUDA cores: a stage of a warp's ring. Every lane has a column of chunks and reads only chunks
// that it copied, so no lane waits for another lane, and there are no bank conflicts without a swizzle. Packed stages
// (key_major.hpp) are filled in memory order, and the lanes of a warp wait for each other.
#pragma once

#include "ops/paged_attention/tiles/tile_inputs.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

constexpr int kWarpChunkBytes = 512;  // the same chunk of all lanes

// A lane has `kChunks` chunks of K and of V in a tile, and `kChunksOfR` chunks of r: kChunks, or none.
template <int kChunks, int kChunksOfR>
struct CudaCoreStage {
  static constexpr uint32_t kOffsetV = kChunks * kWarpChunkBytes, kOffsetR = 2 * kOffsetV + 256;

  arch::Words4 k[kChunks][32], v[kChunks][32];
  uint32_t visible[32];  // bit 0: the lane's key is visible; bit 1: its bias is in the upper half of the word
  uint32_t bias[32];
  arch::Words4 r[kChunksOfR][32];
};
template <int kChunks>
struct CudaCoreStage<kChunks, 0> {
  static constexpr uint32_t kOffsetV = kChunks * kWarpChunkBytes;

  arch::Words4 k[kChunks][32], v[kChunks][32];
  uint32_t visible[32];
  uint32_t bias[32];
};

// Number of stages that hold 16 KiB of K and V: the same number of bytes is in flight for every tile.
constexpr int stages_of(int chunks) { return (15 + chunks) / chunks; }

// The step of tiles with one part: a stage is refilled after its tile has been computed. `kPacked`: any lane may have
// copied a chunk, so the lanes wait for each other.
template <class Tile, int kTheStages, bool kPacked>
struct WholeTileStep {
  static constexpr int kStages = kTheStages;
  static constexpr int kPartsApart = 0;  // a tile is one part

  static HOPWELL_DEVICE void locate(const Params&, const CopySource&, KeyTile&) {}  // copy does

  template <class Stage, class Refill>
  HOPWELL_DEVICE void step(const Params& p, const QueryVector& vector, int key, Stage& stage, uint32_t address,
                           bool exists, const Refill& refill) {
    arch::cp_async_wait<kStages - 1>();
    if constexpr (kPacked) arch::syncwarp();
    if (exists) static_cast<Tile*>(this)->compute(p, vector, key, stage, address);
    if constexpr (kPacked) arch::syncwarp();
    refill(0);
  }
};

// Makes the logit of the lane's key of q · k, `distance` behind the query: biases, and −inf if the key is not visible.
// Returns whether a bias of −inf hides it.
template <class Stage>
HOPWELL_DEVICE bool finish_logit(const PositionBias& p, const QueryVector& vector, int distance, const Stage& stage,
                                 float& logit) {
  const int lane = arch::lane_index();
  const uint32_t visible = stage.visible[lane];
  const float bias = !p.exists() ? 0 : decode_bias(p, stage.bias[lane], visible);
  if (p.exists()) logit += bias * p.log2_scale;
  if (p.alibi_slopes) logit -= alibi_slope(p, vector.head) * float(distance);
  const bool hidden = bias == -INFINITY;
  if (!(visible & 1) || hidden) logit = -INFINITY;
  return hidden;
}

// Gathers a chunk element by element, for caches without aligned chunks. element_at returns null for zeros.
template <class T, class ElementAt>
HOPWELL_DEVICE void gather_chunk(arch::Words4& chunk, ElementAt element_at) {
  chunk = {};
  HOPWELL_NO_UNROLL
  for (int e = 0; e < kElements<T>; ++e)
    if (const T* element = element_at(e)) reinterpret_cast<T*>(&chunk)[e] = *element;
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
