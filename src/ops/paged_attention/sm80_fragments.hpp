// paged_attention on the tensor cores, for up to 8 query vectors that share a KV head: GQA groups, several query tokens, and
// layout vllm, whose pieces are just what the fragments of mma are made of, for any number.
//
// Tile      of a warp: 2,048 / kD keys of one KV head, 4 KiB of K and 4 KiB of V, swizzled for ldmatrix
// Product   mma m16n8k16. 16 rows hold 8 query vectors twice: rows 0–7 carry the high part of an fp32 value, rows 8–15
//           what rounding it to 16 bits has lost, of q + u and of P alike; the two results are added. That costs
//           nothing, since the rows would be empty, and leaves 16 bits of a bf16 product, 22 of an fp16 one.
// Budget    shared: 8 warps × (2 stages × (8,192 + 4 · 8 · keys + 16) + 2 states of 32 · kD) + 4.5 KiB; registers: kD / 2 of
//           the output, kD / 4 of q, ~150 others
// Bound     memory; the tensor cores are 2 % busy
//
// A row's own place in memory, position and visible keys are those of lane / 4, as in the fragments.
#pragma once

#include "arch/sm80/matrix.hpp"
#include "ops/paged_attention/sm80_ring.hpp"

namespace hopwell::ops::paged_attention {
namespace {

HOPWELL_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bf16) {
  const uint32_t b[2] = {b0, b1};
  arch::mma_m16n8k16_bf16(d, a, b);
}
HOPWELL_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, fp16) {
  const uint32_t b[2] = {b0, b1};
  arch::mma_m16n8k16_fp16(d, a, b);
}
// Two numbers rounded to 16 bits, and two of what that has lost.
HOPWELL_DEVICE void split(float x, float y, uint32_t& high, uint32_t& low, bf16) {
  high = arch::pack_bf16(x, y);
  low = arch::pack_bf16(x - arch::bit_cast<float>(high << 16), y - arch::bit_cast<float>(high & 0xffff0000));
}
HOPWELL_DEVICE void split(float x, float y, uint32_t& high, uint32_t& low, fp16) {
  high = arch::pack_fp16(x, y);
  low = arch::pack_fp16(x - arch::to_float(fp16{uint16_t(high)}), y - arch::to_float(fp16{uint16_t(high >> 16)}));
}

template <class T, int kD, bool kVllm>
struct Fragments {
  using Type = T;
  static constexpr int kLaneBytes = 0;  // tiles are the warp's
  static constexpr int kRows = 8, kKeys = 2048 / kD, kChunks = kD / 8, kPages = kKeys / 16;
  static constexpr int kKeysOfLookup = 16;  // that share a page
  // fp16 has no exponents for small probabilities: they are held 2^14 times as large, below 2^15 with the slack.
  static constexpr float kShift = std::is_same_v<T, fp16> ? 14 : 0;
  static constexpr float kSlack = std::is_same_v<T, fp16> ? 1 : 8;  // how far a logit may lie above the maximum

  struct Stage {
    arch::Words4 k[kKeys * kChunks], v[kKeys * kChunks];
    arch::Words4 bias[kRows][kKeys / 4];  // of a row: whole pieces as they lie in memory, or a word for each key
    uint32_t pages[4];                    // bit i: the page of keys 16 i and following exists
  };
  using State = paged_attention::State<kRows * kD, kRows>;

  static constexpr int head_of_strip = 0;
  int first_key, row, quad;
  uint32_t q[kD / 16][4];
  float out[kChunks][4], scale;  // scale: of the products with q, in units of log 2
  Softmax softmax;

  HOPWELL_DEVICE explicit Fragments(const Params&) {
    const int lane = arch::lane_index();
    first_key = lane % kPages * 16, row = lane / 4, quad = lane % 4;
  }
  // Where pieces lie in a stage, so that no eight that ldmatrix reads together meet in a bank. Rows: eight dimensions of a
  // key. Layout vllm has such pieces of K, key by key, and pieces of V of eight tokens of a dimension, two for 16 tokens.
  static HOPWELL_DEVICE int place_of(int key, int chunk) { return key * kChunks + (chunk ^ (key & 7)); }
  static HOPWELL_DEVICE int place_of_key(int key, int chunk) {
    return kVllm ? chunk * kKeys + key : place_of(key, chunk);
  }
  static HOPWELL_DEVICE int place_of_tokens(int dimension, int half) {
    return dimension * 2 + (half ^ (dimension >> 2 & 1));
  }

  HOPWELL_DEVICE Feed feed(const Params& p, const Source& from) const {
    const int lane = arch::lane_index(), key = lane / kChunks, chunk = lane % kChunks;
    if constexpr (kVllm)
      return feed_of(p, from, sizeof(T), int64_t{lane / 16} * p.k_group + lane % 16 * p.k_slot,
                     int64_t{lane / 2} * p.v_group + lane % 2 * 16, 0);
    return feed_of(p, from, sizeof(T), int64_t{key} * p.k_slot + 16 * chunk, int64_t{key} * p.v_slot + 16 * chunk, 0);
  }
  HOPWELL_DEVICE void copy(const Params& p, const Feed& feed, const Tile& tile, Stage& to, uint32_t address) const {
    const Source& from = feed.from;
    const int begin = larger(0, from.position - from.query - p.window + 1);  // what the first query sees
    uint32_t pages = 0;
    HOPWELL_UNROLL
    for (int i = 0; i < kPages; ++i) {
      const int page = arch::shuffle(tile.page, i), key = tile.key + 16 * i;
      pages |= page >= 0 ? 1U << i : 0;
      const int64_t slot = page >= 0 ? key % p.block : 0, number = page >= 0 ? page : 0;
      const char* k = feed.k + number * p.k_page + slot * p.k_slot;
      const char* v = feed.v + number * p.v_page + slot * p.v_slot;
      const uint32_t seen = page >= 0 ? first_bits(from.end - key, 16) & ~first_bits(begin - key, 16) : 0;
      if constexpr (kVllm)
        copy_columns(p, k, v, i, seen, address);
      else
        copy_rows(p, k, v, i, seen, address);
    }
    if (p.bias_kind != Relative::none) copy_bias_of_row(p, feed, tile.key, to);
    if (arch::lane_index() == 0) to.pages[0] = pages;
  }

  HOPWELL_DEVICE void fetch_query(const Params&, const Source&) {}
  // q + u in two parts of 16 bits, by way of the state that will be left: high parts as rows 0 to 7, low parts as rows 8 to
  // 15. The largest |q + u| of a row is scaled to between 1 and 2, so that no type is left.
  HOPWELL_DEVICE void begin(const Params& p, const Source& from, State& state) {
    const int lane = arch::lane_index(), chunk = lane % kChunks;
    auto* pieces = reinterpret_cast<arch::Words4*>(state.values);
    HOPWELL_NO_UNROLL
    for (int first = 0; first < p.queries; first += 32 / kChunks) {
      const int of_row = first + lane / kChunks;
      Source other = from;
      other.query = arch::shuffle(from.query, 4 * of_row), other.head = arch::shuffle(from.head, 4 * of_row);
      const RawQuery raw = load_query<T, false>(p, other, 8 * chunk);
      float x[8], largest = 0;
      query_plus<T>(raw.q, raw.u, p.u_type, x);
      HOPWELL_UNROLL
      for (float element : x) largest = fmaxf(largest, fabsf(element));
      HOPWELL_UNROLL
      for (int mask = 1; mask < kChunks; mask *= 2) largest = fmaxf(largest, arch::shuffle_xor(largest, mask));
      const uint32_t exponent = arch::bit_cast<uint32_t>(largest) >> 23;
      const uint32_t kept = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
      const float down = arch::bit_cast<float>((254 - kept) << 23);
      if (chunk == 0) state.stats[of_row].maximum = arch::bit_cast<float>(kept << 23) * p.scale_log2;
      arch::Words4 high, low;
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) split(x[2 * i] * down, x[2 * i + 1] * down, high.w[i], low.w[i], T{});
      pieces[place_of(of_row, chunk)] = high, pieces[place_of(of_row + 8, chunk)] = low;
    }
    arch::syncwarp();
    const uint32_t rows = arch::shared_address(pieces);
    const int last = p.queries - 1;  // of the rows that there are; the others repeat it
    HOPWELL_UNROLL
    for (int i = 0; i < kD / 16; ++i)
      arch::ldmatrix(q[i], rows + uint32_t(16 * place_of(smaller(lane % 8, last) + (lane & 8), 2 * i + lane / 16)));
    scale = state.stats[smaller(row, last)].maximum;
    arch::syncwarp();  // kept: nobody writes the state before many more steps of all lanes
    HOPWELL_UNROLL
    for (int i = 0; i < kChunks; ++i)
      for (float& sum : out[i]) sum = 0;
    softmax = {};
  }

  HOPWELL_DEVICE void step(const Params& p, const Source& from, int tile, Stage& stage, uint32_t address) {
    arch::syncwarp();  // the other lanes' copies are there
    float s[kKeys / 8][4];
    multiply(address, s);
    const bool hidden = add_biases(p, from, tile, stage, s);
    mask(from, tile, stage.pages[0], s);
    const bool may_be_nan = hidden || (kVllm && arch::ballot(tile < from.seen.begin) != 0);  // values not to be seen
    uint32_t seen = 0;  // bit 2 t + e for key 8 t + 2 quad + e
    if (may_be_nan) {
      HOPWELL_UNROLL
      for (int t = 0; t < kKeys / 8; ++t)
        for (int e = 0; e < 2; ++e) seen |= s[t][e] != -INFINITY ? 1U << (2 * t + e) : 0;
    }
    float maximum = -INFINITY;
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) maximum = fmaxf(maximum, fmaxf(s[t][0], s[t][1]));
    maximum = fmaxf(maximum, arch::shuffle_xor(maximum, 1));
    maximum = fmaxf(maximum, arch::shuffle_xor(maximum, 2));
    // The maximum that is subtracted follows the true one only when that is far above: seldom.
    const float raised = maximum > softmax.maximum + kSlack ? maximum : softmax.maximum;
    const bool higher = raised != softmax.maximum;
    const float base = finite_or_zero(raised) - kShift;
    if (arch::ballot(higher) != 0) {
      const float factor = higher ? arch::exp2_approx(softmax.maximum - raised) : 1;
      softmax.maximum = raised, softmax.sum *= factor;
      HOPWELL_UNROLL
      for (int i = 0; i < kChunks; ++i)
        for (float& sum : out[i]) sum *= factor;
    }
    uint32_t weights[kKeys / 16][4];
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      const float x = arch::exp2_approx(s[t][0] - base), y = arch::exp2_approx(s[t][1] - base);
      softmax.sum += x + y;
      s[t][0] = x, s[t][1] = y;
      split(x, y, weights[t / 2][t % 2 * 2], weights[t / 2][t % 2 * 2 + 1], T{});
    }
    if (may_be_nan) forget_values(seen, s, stage);
    accumulate(address + kOffsetV, weights);
    arch::syncwarp();  // all have read the stage that is copied to next
  }

  HOPWELL_DEVICE void leave(const Params&, State& to) const {
    float sum = softmax.sum;
    sum += arch::shuffle_xor(sum, 1);
    sum += arch::shuffle_xor(sum, 2);
    HOPWELL_UNROLL
    for (int i = 0; i < kChunks; ++i)
      for (int e = 0; e < 2; ++e) to.values[row * kD + 8 * i + 2 * quad + e] = out[i][e] + out[i][2 + e];
    if (quad == 0) to.stats[row] = {softmax.maximum - kShift, sum};
  }
  static HOPWELL_DEVICE int pitch() { return kD; }

 private:
  // The 16 keys from 16 i on, those whose bits are set.
  static HOPWELL_DEVICE void copy_rows(const Params& p, const char* k, const char* v, int i, uint32_t seen,
                                       uint32_t address) {
    const int lane = arch::lane_index(), key_of_lane = lane / kChunks, chunk = lane % kChunks;
    const uint32_t wanted = 8 * chunk < p.d ? seen >> key_of_lane : 0;
    HOPWELL_UNROLL
    for (int r = 0; r < 16; r += 32 / kChunks) {
      const int size = int(wanted >> r & 1) * 16, at = place_of(16 * i + r + key_of_lane, chunk);
      arch::cp_async(address + uint32_t(16 * at), k + int64_t{r} * p.k_slot, size);
      arch::cp_async(address + kOffsetV + uint32_t(16 * at), v + int64_t{r} * p.v_slot, size);
    }
  }
  // Layout vllm: two chunks of K by 16 keys at a time, and 16 dimensions of V by two pieces of tokens. Of a piece that
  // begins with hidden tokens all is copied; forget_values sees to them. In blocks of more than 16 tokens the next tiles
  // have the rest of the lines.
  static HOPWELL_DEVICE void copy_columns(const Params& p, const char* k, const char* v, int i, uint32_t seen,
                                          uint32_t address) {
    const int lane = arch::lane_index(), half = lane % 2, size = int(seen >> lane % 16 & 1) * 16;
    const uint32_t tokens = seen >> 8 * half & 0xff;
    int bytes = 0;  // as far as the last visible token
    HOPWELL_UNROLL
    for (int t = 0; t < 8; ++t) bytes = tokens >> t & 1 ? 2 * t + 2 : bytes;
    HOPWELL_UNROLL
    for (int j = 0; j < kD / 16; ++j) {
      const int chunk = 2 * j + lane / 16, dimension = 16 * j + lane / 2;
      arch::cp_async_of_line(address + uint32_t(16 * place_of_key(16 * i + lane % 16, chunk)),
                             k + int64_t{2 * j} * p.k_group, 8 * chunk < p.d ? size : 0);
      arch::cp_async_of_line(address + kOffsetV + uint32_t(16 * (i * 2 * kD + place_of_tokens(dimension, half))),
                             v + int64_t{16 * j} * p.v_group, dimension < p.d ? bytes : 0);
    }
  }
  // Whole pieces where the rows of the bias allow it, else a word for each key.
  HOPWELL_DEVICE void copy_bias_of_row(const Params& p, const Feed& feed, int key, Stage& to) const {
    const Keys& seen = feed.from.seen;
    if (!p.bias_in_pieces) {
      auto* words = reinterpret_cast<uint32_t*>(to.bias[row]);
      HOPWELL_NO_UNROLL
      for (int j = quad; j < kKeys; j += 4)
        copy_bias(p, feed, key + j, key + j >= seen.begin && key + j < seen.end, words + j);
      return;
    }
    const int shift = p.bias_type == Float::fp32 ? 2 : 1;  // of bytes of an element
    HOPWELL_UNROLL
    for (int i = 0; i < kKeys / 16; ++i) {
      const int first = (quad + 4 * i) << (4 - shift), column = key + first;
      if (first >= kKeys) continue;
      const int bytes = larger(0, smaller((p.extent - column) << shift, 16));
      arch::cp_async(arch::shared_address(&to.bias[row][quad + 4 * i]),
                     reinterpret_cast<const void*>(feed.bias + uintptr_t(unsigned(bytes ? column << shift : 0))),
                     bytes);
    }
  }
  // The biases of keys 8 t + 2 quad + e.
  HOPWELL_DEVICE void load_biases(const Params& p, const Source& from, int tile, const Stage& stage,
                                  float (&bias)[kKeys / 8][2]) const {
    const auto* words = reinterpret_cast<const uint32_t*>(stage.bias[row]);
    const bool full_words = p.bias_type == Float::fp32, in_pieces = p.bias_in_pieces;
    const uintptr_t row_begin = full_words || in_pieces ? 0 : row_of_bias(p, from);
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      const int j = 8 * t + 2 * quad;
      if (full_words) {
        bias[t][0] = arch::bit_cast<float>(words[j]), bias[t][1] = arch::bit_cast<float>(words[j + 1]);
      } else if (in_pieces) {
        bias[t][0] = meaning(words[j / 2] & 0xffff, p.bias_type), bias[t][1] = meaning(words[j / 2] >> 16, p.bias_type);
      } else {
        for (int e = 0; e < 2; ++e) {
          const int64_t column = column_of(p, from.position, tile + j + e);
          bias[t][e] = bias_of(p, words[j + e], uint32_t(row_begin + uintptr_t(column) * 2) & 2);
        }
      }
    }
  }
  // Products to logits: s[t][e] of key 8 t + 2 quad + e. True if a bias of −inf hides a key from any lane's row.
  HOPWELL_DEVICE bool add_biases(const Params& p, const Source& from, int tile, const Stage& stage,
                                 float (&s)[kKeys / 8][4]) const {
    bool hidden = false;
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t)
      for (int e = 0; e < 2; ++e) s[t][e] = (s[t][e] + s[t][2 + e]) * scale;
    if (p.bias_kind != Relative::none) {
      float bias[kKeys / 8][2];
      load_biases(p, from, tile, stage, bias);
      float lowest = INFINITY;
      HOPWELL_UNROLL
      for (int t = 0; t < kKeys / 8; ++t) {
        for (int e = 0; e < 2; ++e) {
          lowest = fminf(lowest, bias[t][e]);
          s[t][e] += bias[t][e] * p.bias_log2;
        }
      }
      hidden = arch::ballot(lowest == -INFINITY) != 0;
      if (hidden) {
        HOPWELL_UNROLL
        for (int t = 0; t < kKeys / 8; ++t)
          for (int e = 0; e < 2; ++e) s[t][e] = bias[t][e] == -INFINITY ? -INFINITY : s[t][e];
      }
    }
    if (p.alibi_slopes) {
      const float slope = p.alibi_slopes[from.head * p.slopes_stride] * kLog2E;
      HOPWELL_UNROLL
      for (int t = 0; t < kKeys / 8; ++t)
        for (int e = 0; e < 2; ++e) s[t][e] -= slope * float(from.position - (tile + 8 * t + 2 * quad + e));
    }
    return hidden;
  }
  HOPWELL_DEVICE void mask(const Source& from, int tile, uint32_t pages, float (&s)[kKeys / 8][4]) const {
    if (tile >= from.seen.begin && tile + kKeys <= from.seen.end && pages == (1U << kPages) - 1) return;
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      HOPWELL_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int key = tile + 8 * t + 2 * quad + e;
        if (key < from.seen.begin || key >= from.seen.end || !(pages >> (t / 2) & 1)) s[t][e] = -INFINITY;
      }
    }
  }

  // S = q k^T: s[t] for keys 8 t to 8 t + 7, high parts and low parts.
  HOPWELL_DEVICE void multiply(uint32_t keys, float (&s)[kKeys / 8][4]) const {
    const int lane = arch::lane_index();
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 8; ++t) {
      for (float& x : s[t]) x = 0;
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 32; ++i) {
        uint32_t b[4];
        arch::ldmatrix(b, keys + uint32_t(16 * place_of_key(8 * t + lane % 8, 4 * i + lane / 8)));
        mma(s[t], q[2 * i], b[0], b[1], T{});
        mma(s[t], q[2 * i + 1], b[2], b[3], T{});
      }
    }
  }
  HOPWELL_DEVICE void accumulate(uint32_t values, const uint32_t (&weights)[kKeys / 16][4]) {
    const int lane = arch::lane_index();
    HOPWELL_UNROLL
    for (int t = 0; t < kKeys / 16; ++t) {
      HOPWELL_UNROLL
      for (int i = 0; i < kD / 16; ++i) {
        uint32_t b[4];
        if constexpr (kVllm)
          arch::ldmatrix(b, values + uint32_t(16 * (t * 2 * kD +
                                                    place_of_tokens(16 * i + lane / 16 * 8 + lane % 8, lane / 8 % 2))));
        else
          arch::ldmatrix<arch::Transpose::yes>(b,
                                               values + uint32_t(16 * place_of(16 * t + lane % 16, 2 * i + lane / 16)));
        mma(out[2 * i], weights[t], b[0], b[1], T{});
        mma(out[2 * i + 1], weights[t], b[2], b[3], T{});
      }
    }
  }
  // What is not finite has all bits of the exponent.
  static constexpr uint32_t kExponent = std::is_same_v<T, fp16> ? 0x7c00 : 0x7f80;
  static HOPWELL_DEVICE uint16_t& value_of(Stage& stage, int key, int dimension) {
    if constexpr (kVllm) {
      auto& piece = stage.v[key / 16 * 2 * kD + place_of_tokens(dimension, key / 8 % 2)];
      return reinterpret_cast<uint16_t*>(&piece)[key % 8];
    }
    return reinterpret_cast<uint16_t*>(&stage.v[place_of(key, dimension / 8)])[dimension % 8];
  }
  // Values of keys that are hidden, by a bias of −inf say, may be NaN, which a weight of 0 does not remove: they are wiped
  // out. If other rows see them and they are not finite, those get them here.
  HOPWELL_DEVICE void forget_values(uint32_t seen, const float (&weights)[kKeys / 8][4], Stage& stage) {
    const int lane = arch::lane_index();
    HOPWELL_NO_UNROLL
    for (int key = 0; key < kKeys; ++key) {
      const int bit = key / 8 * 2 + key % 2, owner = (lane & ~3) + key % 8 / 2;
      const bool sees = lane == owner && (seen >> bit & 1), hides = lane == owner && !(seen >> bit & 1);
      const uint32_t rows = arch::ballot(sees);
      if (arch::ballot(hides) == 0) continue;
      if (rows != 0) {
        bool finite = true;
        HOPWELL_NO_UNROLL
        for (int e = lane; e < kD; e += 32) finite &= (value_of(stage, key, e) & kExponent) != kExponent;
        if (arch::ballot(!finite) == 0) continue;
        float weight = 0;
        HOPWELL_UNROLL
        for (int i = 0; i < kKeys / 4; ++i) weight = i == bit ? weights[i / 2][i % 2] : weight;
        weight = arch::shuffle(weight, owner);
        HOPWELL_UNROLL
        for (int i = 0; i < kChunks; ++i)
          for (int e = 0; e < 2; ++e)
            if (rows >> owner & 1) out[i][e] += weight * meaning(value_of(stage, key, 8 * i + 2 * quad + e), kFloat<T>);
        arch::syncwarp();
      }
      HOPWELL_NO_UNROLL
      for (int e = lane; e < kD; e += 32) value_of(stage, key, e) = 0;
    }
    arch::syncwarp();
  }
};

}  // namespace
}  // namespace hopwell::ops::paged_attention
