// paged_attention on the CUDA cores: how a warp's lanes divide a tile between them, for the two kinds of cache.
#pragma once

#include "ops/paged_attention/sm80_ring.hpp"

namespace hopwell::ops::paged_attention {
namespace {

// Lanes whose stages hold whole tiles, each renewed when it has been computed.
template <class Lanes>
struct WholeTiles {
  static constexpr int kStages = 2;

  template <class Stage, class Refill>
  HOPWELL_DEVICE void step(const Params& p, const Source& from, int tile, Stage& stage, uint32_t address, bool live,
                           const Refill& refill) {
    arch::cp_async_wait<kStages - 1>();
    if (live) static_cast<Lanes*>(this)->compute(p, from, tile, stage, address);
    refill(0);
  }
};

// Layouts nhd and hnd, whose keys and values are rows: a lane has eight dimensions of 8 keys (4 in fp32), `lanes` lanes
// a key, so that a load of the warp reads 512 bytes: one key of several heads (nhd) or several keys of one (hnd).
// The dot products are summed over the lanes by halves, 4 + 2 + 1 exchanges for eight keys, after which each lane has
// the logit of one key. P·V needs no sum at all.
template <class T, bool kFused>
struct Rows : WholeTiles<Rows<T, kFused>> {
  using Type = T;
  using Stage = paged_attention::Stage<kFused>;
  using State = paged_attention::State<256, 4>;
  static constexpr int kLaneBytes = 16;  // from one lane's pieces to the next one's
  static constexpr int kKeys = kElements<T>, kPiecesOfKey = 8 / kElements<T>;
  static constexpr int kKeysOfLookup = kKeys;  // a lane's first key is a multiple of that, and they share a page

  static constexpr int row = 0;  // of the strip's queries
  int lanes, column, head_of_strip, first_key;
  int copies, my_key;  // lanes that end up with the same logit; of which of the lane's keys
  float q[8], qv[kFused ? 8 : 1], out[8];
  RawQuery raw;
  Softmax softmax;

  HOPWELL_DEVICE explicit Rows(const Params& p) : lanes(p.lanes), copies(lanes / kKeys) {
    const int lane = arch::lane_index(), vector = lane / p.lanes;
    column = 8 * (lane - vector * lanes);
    my_key = column / 8 / copies;
    head_of_strip = vector % p.heads, first_key = vector / p.heads * kKeys;
  }

  HOPWELL_DEVICE Feed feed(const Params& p, const Source& from) const {
    return feed_of(p, from, sizeof(T), column * int(sizeof(T)), column * int(sizeof(T)), column);
  }
  HOPWELL_DEVICE void copy(const Params& p, const Feed& feed, const Tile& tile, Stage& to, uint32_t address,
                           int) const {
    const int lane = arch::lane_index(), key = tile.key + first_key;
    const Source& from = feed.from;
    uint32_t seen = first_bits(from.seen.end - key, kKeys) & ~first_bits(from.seen.begin - key, kKeys);
    if (p.scattered) {
      copy_scattered(p, from, key, seen, to);
    } else {
      if (tile.page < 0) seen = 0;
      const uint32_t wanted = column < p.d ? seen : 0;
      const int64_t page = seen ? tile.page : 0, slot = seen ? key % p.block : 0;
      copy_pieces(feed.k + page * p.k_page + slot * p.k_slot, p.k_slot, wanted, address);
      copy_pieces(feed.v + page * p.v_page + slot * p.v_slot, p.v_slot, wanted, address + kOffsetV);
    }
    const bool visible = seen >> my_key & 1;
    const uint32_t half = copy_bias(p, feed, key + my_key, visible, &to.bias[lane]);
    to.visible[lane] = (visible ? 1 : 0) | half;
    if constexpr (kFused)
      if (!p.r_direct) copy_r(p, feed, key, column < p.d ? seen : 0, address);
  }

  HOPWELL_DEVICE void fetch_query(const Params& p, const Source& from) { raw = load_query<T, kFused>(p, from, column); }
  HOPWELL_DEVICE void begin(const Params& p, const Source&, State&, const Stage&) {
    query_plus<T>(raw.q, raw.u, p.u_type, q);
    if constexpr (kFused) query_plus<T>(raw.q, raw.v, p.v_type, qv);
    HOPWELL_UNROLL
    for (int e = 0; e < 8; ++e) {
      q[e] *= p.scale_log2, out[e] = 0;
      if constexpr (kFused) qv[e] *= p.bias_log2;
    }
    softmax = {};
  }

  HOPWELL_DEVICE void compute(const Params& p, const Source& from, int tile, Stage& stage, uint32_t address) {
    const int lane = arch::lane_index(), first = tile + first_key;
    float x[kKeys];
    HOPWELL_UNROLL
    for (int j = 0; j < kKeys; ++j) x[j] = 0;
    multiply(address, q, x);
    if constexpr (kFused) {
      if (p.r_direct)
        multiply_r(p, from, first, x);
      else
        multiply(address + kOffsetR, qv, x);
    }
    float logit = sum_over_lanes(x);
    const uint32_t visible = stage.visible[lane];
    const float bias = p.bias_kind == Relative::none ? 0 : bias_of(p, stage.bias[lane], visible);
    if (p.bias_kind != Relative::none) logit += bias * p.bias_log2;
    if (p.alibi_slopes)
      logit -= p.alibi_slopes[from.head * p.slopes_stride] * kLog2E * float(from.position - first - my_key);
    const bool hidden = bias == -INFINITY;
    if (!(visible & 1) || hidden) logit = -INFINITY;
    if (p.bias_kind != Relative::none) forget_values(hidden, stage);
    float maximum = logit;
    HOPWELL_UNROLL
    for (int keys = kKeys, mask = lanes / 2; keys > 1; keys /= 2, mask /= 2)
      maximum = fmaxf(maximum, arch::shuffle_xor(maximum, mask));
    float factor;
    const float mine = softmax.update(logit, maximum, factor);
    HOPWELL_UNROLL
    for (float& sum : out) sum *= factor;
    HOPWELL_UNROLL
    for (int j = 0; j < kKeys; ++j) {
      const float weight = arch::shuffle(mine, (lane & -lanes) + j * copies);
      HOPWELL_UNROLL
      for (int piece = 0; piece < kPiecesOfKey; ++piece) {
        float v[kElements<T>];
        unpack<T>(arch::load_shared_v4(address + kOffsetV + uint32_t((j * kPiecesOfKey + piece) * kPieceBytes)), v);
        HOPWELL_UNROLL
        for (int e = 0; e < kElements<T>; ++e) out[piece * kElements<T> + e] += weight * v[e];
      }
    }
  }

  HOPWELL_DEVICE void leave(const Params& p, State& to) const {
    Stats stats{softmax.maximum, softmax.sum};
    float value[8];
    HOPWELL_UNROLL
    for (int e = 0; e < 8; ++e) value[e] = out[e];
    HOPWELL_UNROLL
    for (int keys = kKeys, mask = lanes / 2; keys > 1; keys /= 2, mask /= 2)
      stats.sum += arch::shuffle_xor(stats.sum, mask);
    for (int mask = lanes * p.heads; mask < 32; mask *= 2) {  // lanes that have other keys of the same head
      const float maximum = fmaxf(stats.maximum, arch::shuffle_xor(stats.maximum, mask));
      const float weight = arch::exp2_approx(stats.maximum - finite_or_zero(maximum));
      stats.maximum = maximum, stats.sum *= weight;
      stats.sum += arch::shuffle_xor(stats.sum, mask);
      HOPWELL_UNROLL
      for (float& sum : value) {
        sum *= weight;
        sum += arch::shuffle_xor(sum, mask);
      }
    }
    if (first_key > 0) return;
    HOPWELL_UNROLL
    for (int e = 0; e < 8; ++e) to.values[head_of_strip * pitch() + column + e] = value[e];
    if (column == 0) to.stats[head_of_strip] = stats;
  }
  HOPWELL_DEVICE int pitch() const { return lanes * 8; }

 private:
  static HOPWELL_DEVICE void copy_pieces(const char* from, int stride, uint32_t seen, uint32_t destination) {
    HOPWELL_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const int key = i / kPiecesOfKey;
      arch::cp_async(destination + uint32_t(i * kPieceBytes), from + int64_t{key} * stride + i % kPiecesOfKey * 16,
                     int(seen >> key & 1) * 16);
    }
  }
  HOPWELL_DEVICE void copy_r(const Params& p, const Feed& feed, int key, uint32_t seen, uint32_t address) const {
    const int farthest = feed.from.position - key;  // of the first key
    if (farthest < p.extent)
      return copy_pieces(feed.r + int64_t{farthest} * p.r_row, -p.r_row, seen, address + kOffsetR);
    HOPWELL_NO_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const int j = i / kPiecesOfKey, row = row_of_r(p, feed.from.position, key + j);
      const bool wanted = (seen >> j & 1) && row >= 0;
      arch::cp_async(address + kOffsetR + uint32_t(i * kPieceBytes),
                     feed.r + int64_t{wanted ? row : 0} * p.r_row + i % kPiecesOfKey * 16, wanted ? 16 : 0);
    }
  }
  HOPWELL_DEVICE void copy_scattered(const Params& p, const Source& from, int key, uint32_t& seen, Stage& to) const {
    const int lane = arch::lane_index();
    HOPWELL_NO_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const int j = i / kPiecesOfKey, first = column + i % kPiecesOfKey * kElements<T>;
      const int page = seen >> j & 1 ? page_of(p, from.sequence, key + j) : -1;
      if (page < 0) seen &= ~(1U << j);
      const auto gather = [&](arch::Words4& piece, const void* cache, const CacheStrides& at) {
        gather_piece<T>(piece, [&](int e) -> const T* {
          if (page < 0 || first + e >= p.d) return nullptr;
          return element_of<T>(cache, at, page, from.kv_head, (key + j) % p.block, first + e);
        });
      };
      gather(to.k[i][lane], p.k, p.k_at);
      gather(to.v[i][lane], p.v, p.v_at);
    }
  }

  static HOPWELL_DEVICE void multiply(uint32_t rows, const float (&by)[8], float (&x)[kKeys]) {
    HOPWELL_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      float row[kElements<T>];
      unpack<T>(arch::load_shared_v4(rows + uint32_t(i * kPieceBytes)), row);
      HOPWELL_UNROLL
      for (int e = 0; e < kElements<T>; ++e) x[i / kPiecesOfKey] += by[i % kPiecesOfKey * kElements<T> + e] * row[e];
    }
  }
  HOPWELL_DEVICE void multiply_r(const Params& p, const Source& from, int first, float (&x)[kKeys]) const {
    HOPWELL_UNROLL
    for (int j = 0; j < kKeys; ++j) {
      const int row = row_of_r(p, from.position, first + j);
      if (row < 0 || first + j > from.position) continue;
      HOPWELL_UNROLL
      for (int e = 0; e < 8; ++e)
        if (column + e < p.d)
          x[j] += qv[e] *
                  meaning(load_bits(p.r, p.r_type, from.head * p.r_stride_h + row * p.r_stride + column + e), p.r_type);
    }
  }
  // Half of the keys go to the lane across, whose other half comes here, until one key is left.
  HOPWELL_DEVICE float sum_over_lanes(float (&x)[kKeys]) const {
    int mask = lanes / 2;
    HOPWELL_UNROLL
    for (int half = kKeys / 2; half >= 1; half /= 2, mask /= 2) {
      const bool upper = column / 8 & mask;
      tile::share_sums(x, half, mask, upper);
    }
    for (; mask >= 1; mask /= 2) x[0] += arch::shuffle_xor(x[0], mask);
    return x[0];
  }
  // Values of keys that a bias of −inf hides may be NaN, which a weight of 0 does not remove.
  HOPWELL_DEVICE void forget_values(bool hidden, Stage& stage) const {
    const int lane = arch::lane_index();
    const uint32_t lanes_hidden = arch::ballot(hidden);
    if (lanes_hidden == 0) return;
    HOPWELL_NO_UNROLL
    for (int i = 0; i < kPieces; ++i)
      if (lanes_hidden >> ((lane & -lanes) + i / kPiecesOfKey * copies) & 1) stage.v[i][lane] = {};
  }
};

// Layout vllm, whose keys are split into columns of 16 bytes and whose values are transposed: a lane has 8 columns of
// one key, and 8 pieces of V, each 8 consecutive tokens (4 in fp32) of one dimension. Most logits are whole in one lane;
// the outputs are summed over the lanes that have other tokens at the end of the segment.
template <class T>
struct Columns : WholeTiles<Columns<T>> {
  using Type = T;
  using Stage = paged_attention::Stage<false>;
  using State = paged_attention::State<256, 1>;
  static constexpr int kLaneBytes = 16;  // from one lane's pieces to the next one's
  static constexpr int kTokens = kElements<T>, kDims = kPieces * kElements<T>;
  static constexpr int kKeysOfLookup = 1;

  static constexpr int head_of_strip = 0, row = 0;
  int first_key, first_piece, groups;  // groups: of tokens in a tile
  int first_dim, next_dim;             // of the pieces of V
  float q[kDims], out[kPieces];
  Softmax softmax;

  HOPWELL_DEVICE explicit Columns(const Params& p) : groups(p.tile / kTokens) {
    const int lane = arch::lane_index();  // p.tile and groups are powers of two, p.lanes · p.tile is 32
    first_key = lane & (p.tile - 1), first_piece = (lane - first_key) * p.lanes / 32 * kPieces;
    next_dim = p.lanes * kTokens, first_dim = (lane - (lane & (groups - 1))) * next_dim / 32;
  }
  HOPWELL_DEVICE int token() const { return (arch::lane_index() & (groups - 1)) * kTokens; }  // the first of the lane's
  HOPWELL_DEVICE int dimension(int i) const { return i * next_dim + first_dim; }

  HOPWELL_DEVICE Feed feed(const Params& p, const Source& from) const {
    return feed_of(p, from, sizeof(T), int64_t{first_piece} * p.k_group, int64_t{first_dim} * p.v_group, 0);
  }
  HOPWELL_DEVICE void copy(const Params& p, const Feed& feed, const Tile& tile, Stage& to, uint32_t address,
                           int) const {
    const int lane = arch::lane_index(), key = tile.key + first_key;
    const Source& from = feed.from;
    const bool visible = key >= from.seen.begin && key < from.seen.end && tile.page >= 0;
    const int page_of_values = arch::shuffle(tile.page, token());
    if (p.scattered) {
      copy_scattered(p, from, tile, visible, to);
    } else {
      const int first = tile.key + token();
      int tokens = larger(0, smaller(from.seen.end - first, kTokens));
      if (page_of_values < 0 || first + kTokens <= from.seen.begin) tokens = 0;
      const int64_t k_page = visible ? tile.page : 0, v_page = tokens ? page_of_values : 0;
      const char* k = feed.k + k_page * p.k_page + int64_t{visible ? key % p.block : 0} * p.k_slot;
      const char* v = feed.v + v_page * p.v_page + int64_t{tokens ? first % p.block : 0} * p.v_slot;
      const int pieces = visible ? p.d / kElements<T> - first_piece : 0;  // of this lane, at most
      const int limit = tokens ? p.d - first_dim : 0, v_step = next_dim * p.v_group;
      HOPWELL_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        arch::cp_async(address + uint32_t(i * kPieceBytes), k + int64_t{i} * p.k_group, i < pieces ? 16 : 0);
        arch::cp_async(address + kOffsetV + uint32_t(i * kPieceBytes), v + int64_t{i} * v_step,
                       i * next_dim < limit ? tokens * int(sizeof(T)) : 0);
      }
    }
    const uint32_t half = copy_bias(p, feed, key, visible, &to.bias[lane]);
    to.visible[lane] = (visible ? 1 : 0) | half;
  }

  HOPWELL_DEVICE void fetch_query(const Params&, const Source&) {}  // too many to be held
  HOPWELL_DEVICE void begin(const Params& p, const Source& from, State&, const Stage&) {
    HOPWELL_UNROLL
    for (int first = 0; first < kDims; first += 8) {
      const RawQuery raw = load_query<T, false>(p, from, first_piece * kElements<T> + first);
      float x[8];
      query_plus<T>(raw.q, raw.u, p.u_type, x);
      HOPWELL_UNROLL
      for (int e = 0; e < 8; ++e) q[first + e] = x[e] * p.scale_log2;
    }
    HOPWELL_UNROLL
    for (float& sum : out) sum = 0;
    softmax = {};
  }

  HOPWELL_DEVICE void compute(const Params& p, const Source& from, int tile, Stage& stage, uint32_t address) {
    const int lane = arch::lane_index(), key = tile + first_key;
    float logit = multiply(address, q);
    if (p.r) logit += multiply_r(p, from, key);
    for (int mask = p.tile; mask < 32; mask *= 2) logit += arch::shuffle_xor(logit, mask);
    const uint32_t visible = stage.visible[lane];
    const float bias = p.bias_kind == Relative::none ? 0 : bias_of(p, stage.bias[lane], visible);
    if (p.bias_kind != Relative::none) logit += bias * p.bias_log2;
    if (p.alibi_slopes) logit -= p.alibi_slopes[from.head * p.slopes_stride] * kLog2E * float(from.position - key);
    const bool hidden = bias == -INFINITY;
    if (!(visible & 1) || hidden) logit = -INFINITY;
    forget_values(hidden || key < from.seen.begin, stage);
    const float maximum = tile::reduce<1, 16>(logit, tile::Larger{});
    float factor, weight[kTokens];
    const float mine = softmax.update(logit, maximum, factor);
    HOPWELL_UNROLL
    for (int t = 0; t < kTokens; ++t) weight[t] = arch::shuffle(mine, token() + t);
    HOPWELL_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      float v[kTokens];
      unpack<T>(arch::load_shared_v4(address + kOffsetV + uint32_t(i * kPieceBytes)), v);
      out[i] *= factor;
      HOPWELL_UNROLL
      for (int t = 0; t < kTokens; ++t) out[i] += weight[t] * v[t];
    }
  }

  HOPWELL_DEVICE void leave(const Params&, State& to) const {
    float sum = softmax.sum;
    for (int mask = groups * kTokens / 2; mask >= 1; mask /= 2) sum += arch::shuffle_xor(sum, mask);
    HOPWELL_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      float value = out[i];
      for (int mask = groups / 2; mask >= 1; mask /= 2) value += arch::shuffle_xor(value, mask);
      if (token() == 0) to.values[dimension(i)] = value;
    }
    if (arch::lane_index() == 0) to.stats[0] = {softmax.maximum, sum};
  }
  static HOPWELL_DEVICE int pitch() { return 256; }

 private:
  HOPWELL_DEVICE void copy_scattered(const Params& p, const Source& from, const Tile& tile, bool visible,
                                     Stage& to) const {
    const int lane = arch::lane_index(), key = tile.key + first_key;
    HOPWELL_NO_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      gather_piece<T>(to.k[i][lane], [&](int e) -> const T* {
        const int element = (first_piece + i) * kElements<T> + e;
        if (!visible || element >= p.d) return nullptr;
        return element_of<T>(p.k, p.k_at, tile.page, from.kv_head, key % p.block, element);
      });
      gather_piece<T>(to.v[i][lane], [&](int t) -> const T* {
        const int of = tile.key + token() + t;
        if (of < from.seen.begin || of >= from.seen.end || dimension(i) >= p.d) return nullptr;
        const int page = page_of(p, from.sequence, of);
        return page < 0 ? nullptr : element_of<T>(p.v, p.v_at, page, from.kv_head, of % p.block, dimension(i));
      });
    }
  }

  static HOPWELL_DEVICE float multiply(uint32_t rows, const float (&by)[kDims]) {
    float x[kPieces];  // independent sums
    HOPWELL_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      float row[kElements<T>];
      unpack<T>(arch::load_shared_v4(rows + uint32_t(i * kPieceBytes)), row);
      x[i] = 0;
      HOPWELL_UNROLL
      for (int e = 0; e < kElements<T>; ++e) x[i] += by[i * kElements<T> + e] * row[e];
    }
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
  }
  // (q + v)·r. There are no registers left for q + v; it comes from L1 for each key.
  HOPWELL_DEVICE float multiply_r(const Params& p, const Source& from, int key) const {
    const int row = row_of_r(p, from.position, key), first = first_piece * kElements<T>;
    if (row < 0 || key > from.position) return 0;
    float x = 0;
    HOPWELL_NO_UNROLL
    for (int e = first; e < first + kDims && e < p.d; e += 8) {
      const RawQuery raw = load_query<T, true>(p, from, e);
      float query[8], of_r[8] = {};
      query_plus<T>(raw.q, raw.v, p.v_type, query);
      add_8(load_8(p.r, p.r_type, from.head * p.r_stride_h + row * p.r_stride + e, p.r_in_pieces), p.r_type, of_r);
      HOPWELL_UNROLL
      for (int i = 0; i < 8; ++i) x += query[i] * of_r[i];
    }
    return x * p.bias_log2;
  }
  // Values of hidden keys that lie in one piece with values of visible ones: they may be NaN, which a weight of 0 does
  // not remove.
  HOPWELL_DEVICE void forget_values(bool hidden, Stage& stage) const {
    const uint32_t keys_hidden = arch::ballot(hidden);
    if (keys_hidden == 0) return;
    const int lane = arch::lane_index();
    HOPWELL_NO_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      HOPWELL_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        if (!(keys_hidden >> (token() + t) & 1)) continue;
        if constexpr (sizeof(T) == 4)
          stage.v[i][lane].w[t] = 0;
        else
          stage.v[i][lane].w[t / 2] &= t % 2 ? 0xffff : 0xffff0000;
      }
    }
  }
};

}  // namespace
}  // namespace hopwell::ops::paged_attention
