// nvfp4_quantize of 16-bit x whose global scale is computed from x. x is read once and stays on the chip until its amax
// is known.
//
//     global = amax / 2688;  scale = e4m3(block's amax / (6 · global));  code = e2m1 nearest to x / (scale · global)
//
// Tile      an item: 2 KiB of x for a warp, a pair of blocks of 16 numbers for a lane. Rows have no gaps, so an item
//           may lie in two rows. The items are dealt to all warps of all CTAs, at most five to each
// Roles     all warps are alike: each copies its items, prepares them and quantizes them. A thread of the last warp,
//           which has the fewest items, also exchanges the amax with other CTAs
// Timeline  items 0 to 3 ▓▓ copied to the warp's slots, item 4 to registers │ each is prepared as it arrives │ all CTAs
//           exchange amax │ table of all scales │ quantize 0, 1, 2, 3, 4 (4 through slot 0)
// Prepared  what needs no global scale: the amax of both blocks and the signs, in registers, and the magnitudes in the
//           order of PreparedPair, in the slot
// Budget    shared: 28 warps × 4 slots × 2 KiB + 2 KiB of table + amax of warps; registers: 65,536 / 896 = 72. 132
//           multiprocessors hold 37.8 MB of x
// Bound     memory until amax is known, then instructions: ~115 a block
// Launch    cooperative, one CTA an SM: CTAs wait for each other's amax (AmaxExchange)
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/reduce.hpp"
#include "ops/nvfp4_quantize/quantize.hpp"
#include "runtime/launch_tag.hpp"

namespace hopwell::ops::nvfp4_quantize::HOPWELL_TARGET {

struct OnePassStorage {
  alignas(128) unsigned char slots[OnePassConfig::kSlots][OnePassConfig::kWarps][OnePassConfig::kItemBytes];
  QuantizeTable table;
  uint32_t max_of_warp[OnePassConfig::kWarps];
  uint32_t amax;  // of all CTAs
};
static_assert(sizeof(OnePassStorage) == OnePassConfig::kSharedBytes && sizeof(OnePassStorage) <= 227 * 1024);

// The largest amax of all CTAs, by a maximum and a counter in the workspace.
//
// Why maximum and counter begin at zero: the workspace has arbitrary contents. CTA 0 writes both zeros and the tag of
// the launch, 64 random bits, with one 128-bit store, which the memory model does not tear. The other CTAs add nothing
// before they have read the tag with one 128-bit load.
//
// Why CTA 0 writes them before its copies, and all read them after: a multiprocessor's requests are served in order,
// and x keeps them waiting for microseconds.
//
// Why a graph may launch the kernel again with the same tag: a CTA adds only after it has read the tag. When all CTAs
// have added, CTA 0 erases the tag.
//
// Why no CTA waits forever: CTA 0 waits for no other CTA before it writes the tag, and the launch is cooperative, so
// CUDA runs all CTAs at the same time or rejects the launch.
struct AmaxExchange {
  static constexpr int kWords = 4;  // amax, counter, tag
  uint32_t* words;                  // 16-byte aligned
  runtime::LaunchTag tag;

  HOPWELL_DEVICE uint32_t* amax() const { return words; }
  HOPWELL_DEVICE uint32_t* arrived() const { return words + 1; }
  HOPWELL_DEVICE uint32_t* tag_word(int i) const { return words + 2 + i; }

  HOPWELL_DEVICE void open() const {
    arch::store_relaxed_v4(reinterpret_cast<arch::Words4*>(words), {{0, 0, tag.words[0], tag.words[1]}});
  }
  HOPWELL_DEVICE void wait_until_open() const {
    arch::Words4 read{};
    do read = arch::load_relaxed_v4(reinterpret_cast<const arch::Words4*>(words));
    while (read.w[2] != tag.words[0] || read.w[3] != tag.words[1]);
  }
  HOPWELL_DEVICE void close() const { *tag_word(0) = 0, *tag_word(1) = 0; }
  // Returns the largest `bits` of all CTAs. One thread of each CTA calls it.
  HOPWELL_DEVICE uint32_t largest(uint32_t bits) const {
    arch::red_max(amax(), bits);
    arch::atomic_add(arrived(), 1);
    while (arch::load_acquire(arrived()) != uint32_t(arch::grid_size())) {
    }
    return arch::load_relaxed(amax());
  }
};

template <class T>
struct OnePassParams {
  const T* x;
  uint8_t *codes, *scales;
  float* global_scale;
  uint32_t items;
  AmaxExchange exchange;
};

// The largest finite magnitudes of even and of odd elements, as bits of T.
template <class T>
struct FiniteAmax {
  static constexpr uint32_t kInfinity = std::is_same_v<T, bf16> ? 0x7f80 : 0x7c00;
  // Added to a magnitude, it sets the sign bit if the magnitude is not finite.
  static constexpr uint32_t kToSign = (0x8000 - kInfinity) * 0x10001u;
  uint32_t halves = 0;

  template <int kWords>
  HOPWELL_DEVICE void add(const uint32_t (&words)[kWords]) {
    HOPWELL_UNROLL
    for (int i = 0; i < kWords; ++i) {
      const uint32_t magnitudes = words[i] & 0x7fff7fffu, signs = magnitudes + kToSign;
      halves = larger_halves(halves, magnitudes & ~arch::permute_signs(signs, signs, 0xbb99));
    }
  }
  // `largest`: amax_of(pair), which may be infinite or NaN.
  HOPWELL_DEVICE void add_pair(const PreparedPair& pair, uint32_t largest) {
    if (((largest + kToSign) & 0x80008000u) == 0) return halves = larger_halves(halves, largest), void();
    add(pair.magnitudes[0]), add(pair.magnitudes[1]);
  }
  HOPWELL_DEVICE uint32_t float_bits() const {
    return arch::bit_cast<uint32_t>(to_fp32(T{uint16_t(larger_halves(halves, halves >> 16))}));
  }
};

// The largest magnitudes of two blocks, in the halves of a word.
HOPWELL_DEVICE uint32_t amax_of(const PreparedPair& pair) {
  uint32_t amax[2] = {};
  HOPWELL_UNROLL
  for (int j = 0; j < 2; ++j) {
    HOPWELL_UNROLL
    for (const uint32_t magnitudes : pair.magnitudes[j]) amax[j] = larger_halves(amax[j], magnitudes);
  }
  return larger_halves(arch::permute_bytes<0x5410>(amax[0], amax[1]), arch::permute_bytes<0x7632>(amax[0], amax[1]));
}

// Amax and signs of a lane's pairs, in registers. The next item to quantize is at the front.
struct PairQueue {
  static constexpr int kItems = OnePassConfig::kItems;
  uint32_t amax[kItems] = {}, signs[kItems] = {};
  HOPWELL_DEVICE void pop() {
    HOPWELL_UNROLL
    for (int i = 1; i < kItems; ++i) amax[i - 1] = amax[i], signs[i - 1] = signs[i];
  }
  HOPWELL_DEVICE void push(uint32_t of_amax, uint32_t of_signs) {
    pop();
    amax[kItems - 1] = of_amax, signs[kItems - 1] = of_signs;
  }
};

// Scales of two blocks, a byte each, from the fp32 bits of their largest magnitudes: NaN if one is infinite or NaN.
template <bool kUsual>
HOPWELL_DEVICE uint32_t scales_of(const uint32_t (&bits)[2], const GlobalScale& global) {
#if HOPWELL_HAS_SM90
  if constexpr (kUsual)
    return arch::pack_e4m3(usual_quotient(arch::bit_cast<float>(bits[0]), global.divisor, global.reciprocal),
                           usual_quotient(arch::bit_cast<float>(bits[1]), global.divisor, global.reciprocal));
#endif
  const auto scale = [&](uint32_t amax) -> uint32_t {
    return amax < kInfinityBits ? scale_for(arch::bit_cast<float>(amax), global.divisor, global.reciprocal)
                                : hopwell::nvfp4::kScaleNan;
  };
  return scale(bits[0]) | scale(bits[1]) << 8;
}

// Codes of a scale byte. kUsual: the global scale is usual.
template <class T, bool kUsual>
HOPWELL_DEVICE auto codes_of(const QuantizeTable& table, uint8_t scale) {
  if constexpr (kUsual && std::is_same_v<T, bf16>)
    return StepCodes(table.steps[scale]);
  else
    return ThresholdCodes(table.thresholds[scale]);
}

// A warp's items, and its slots in shared memory.
template <class T>
struct WarpItems {
  using Config = OnePassConfig;
  const OnePassParams<T>& p;
  uint32_t first, step, slot0;  // item i of the warp is item first + i · step
  int count;                    // at least 1, by the plan

  HOPWELL_DEVICE WarpItems(const OnePassParams<T>& params, OnePassStorage& s) : p(params) {
    const int warp = arch::warp_index();
    step = uint32_t(Config::kWarps * arch::grid_size());
    first = uint32_t(warp * arch::grid_size() + arch::block_index());
    count = int((p.items - 1 - first) / step) + 1;
    slot0 = arch::shared_address(s.slots[0][warp]);
  }
  HOPWELL_DEVICE uint32_t item(int i) const { return first + uint32_t(i) * step; }
  HOPWELL_DEVICE uint32_t slot(int i) const { return slot0 + uint32_t(i * Config::kWarps * Config::kItemBytes); }
  // Piece 32 n + lane of item i, which the lane copies.
  HOPWELL_DEVICE const T* piece(int i, int n) const {
    return p.x + uint64_t{item(i)} * Config::kItemNumbers + (n * 32 + arch::lane_index()) * 8;
  }
  // Offset of this piece in a slot. The pieces of a pair are swizzled, so that neither copies nor reads have bank
  // conflicts.
  HOPWELL_DEVICE uint32_t place(int n) const {
    const int lane = arch::lane_index();
    return uint32_t(n * 512 + lane / 4 * 64 + ((lane % 4) ^ (lane / 8)) * 16);
  }
  HOPWELL_DEVICE void copy(int i) const {
    HOPWELL_UNROLL
    for (int n = 0; n < Config::kPieces; ++n) arch::cp_async(slot(i) + place(n), piece(i, n));
  }
  HOPWELL_DEVICE void load_pieces(int i, uint32_t (&pieces)[Config::kPieces][4]) const {
    HOPWELL_UNROLL
    for (int n = 0; n < Config::kPieces; ++n) {
      const arch::Words4 v = arch::load_streaming(piece(i, n));
      HOPWELL_UNROLL
      for (int j = 0; j < 4; ++j) pieces[n][j] = v.w[j];
    }
  }
  HOPWELL_DEVICE void store_pieces(const uint32_t (&pieces)[Config::kPieces][4], int to) const {
    HOPWELL_UNROLL
    for (int n = 0; n < Config::kPieces; ++n)
      arch::store_shared_v4(slot(to) + place(n), {{pieces[n][0], pieces[n][1], pieces[n][2], pieces[n][3]}});
  }
  // Address of piece n of the lane's pair of blocks in slot i. Reads the lane again because registers are scarce.
  HOPWELL_DEVICE uint32_t piece_of_pair(int i, int n) const {
    const int lane = arch::thread_index_anew() % 32;
    return slot(i) + uint32_t(lane * 64 + (n ^ (lane / 2 % 4)) * 16);
  }
  HOPWELL_DEVICE void read_words(int i, int block, uint32_t (&words)[8]) const {
    HOPWELL_UNROLL
    for (int n = 0; n < 2; ++n) {
      const auto v = arch::load_shared_v4(piece_of_pair(i, 2 * block + n));
      HOPWELL_UNROLL
      for (int j = 0; j < 4; ++j) words[4 * n + j] = v.w[j];
    }
  }
  HOPWELL_DEVICE void read_magnitudes(int i, PreparedPair& pair) const {
    read_words(i, 0, pair.magnitudes[0]), read_words(i, 1, pair.magnitudes[1]);
  }
  // Prepares the lane's pair of blocks in slot i.
  HOPWELL_DEVICE void prepare(int i, FiniteAmax<T>& amax, PairQueue& queue) const {
    Block<T> x[2];
    read_words(i, 0, x[0].words), read_words(i, 1, x[1].words);
    const auto pair = PreparedPair::of(x);
    HOPWELL_UNROLL
    for (int n = 0; n < Config::kPieces; ++n) {
      const uint32_t* words = &pair.magnitudes[n / 2][n % 2 * 4];
      arch::store_shared_v4(piece_of_pair(i, n), {{words[0], words[1], words[2], words[3]}});
    }
    const uint32_t largest = amax_of(pair);
    amax.add_pair(pair, largest);
    queue.push(largest, pair.signs);
  }
  // Quantizes all items. `pair`: magnitudes of item 0. Item kSlots is in slot 0. If a scale is 0 or NaN the codes are 0.
  template <bool kUsual>
  HOPWELL_DEVICE void quantize(PreparedPair& pair, PairQueue& queue, const QuantizeTable& table,
                               const GlobalScale& global) const {
    static_assert(hopwell::nvfp4::kScaleNan == 0x7f);
    HOPWELL_NO_UNROLL
    for (int i = 0;;) {
      const uint64_t at = 32 * item(i) + uint32_t(arch::thread_index_anew() % 32);
      const uint32_t amax = queue.amax[0];
      const uint32_t scales = scales_of<kUsual>({arch::bit_cast<uint32_t>(to_fp32(T{uint16_t(amax)})),
                                                 arch::bit_cast<uint32_t>(to_fp32(T{uint16_t(amax >> 16)}))},
                                                global);
      store_scales<2>(p.scales + at * 2, scales);
      pair.signs = queue.signs[0];
      uint32_t words[2][2];
      HOPWELL_UNROLL
      for (int j = 0; j < 2; ++j) {
        const auto scale = uint8_t(scales >> 8 * j);
        pair.encode(j, codes_of<T, kUsual>(table, scale), words[j]);
        if (((scale + 1) & 0x7e) == 0) words[j][0] = words[j][1] = 0;  // 0 or NaN; faster than a branch around encode()
      }
      arch::store_vector(p.codes + at * 16, arch::Words4{{words[0][0], words[0][1], words[1][0], words[1][1]}});
      if (++i == count) return;
      read_magnitudes(i % Config::kSlots, pair);
      queue.pop();
    }
  }
};

// Waits for the copies to a slot. The copies to later slots may still be in flight.
HOPWELL_DEVICE void wait_for_slot(int i) {
  static_assert(OnePassConfig::kSlots == 4);
  if (i == 0)
    arch::cp_async_wait<3>();
  else if (i == 1)
    arch::cp_async_wait<2>();
  else if (i == 2)
    arch::cp_async_wait<1>();
  else
    arch::cp_async_wait<0>();
}

template <class T>
__global__ void __launch_bounds__(OnePassConfig::kThreads, 1)
    nvfp4_quantize_one_pass(const __grid_constant__ OnePassParams<T> p) {
  using Config = OnePassConfig;
  constexpr int kSlots = Config::kSlots, kParked = kSlots;
  auto& s = arch::dynamic_smem<OnePassStorage>();
  tile::launch_dependents();
  const WarpItems<T> items(p, s);
  const int count = items.count;
  const bool exchanges = arch::thread_index() == Config::kThreads - 32, first_cta = arch::block_index() == 0;
  tile::wait_for_prior_kernels();
  if (exchanges && first_cta) p.exchange.open();
  HOPWELL_NO_UNROLL
  for (int i = 0; i < kSlots; ++i) {
    if (i < count) items.copy(i);
    arch::cp_async_commit();
  }
  uint32_t parked[Config::kPieces][4] = {};
  if (kParked < count) items.load_pieces(kParked, parked);
  FiniteAmax<T> amax;
  PairQueue queue;
  HOPWELL_NO_UNROLL
  for (int i = 0; i < kSlots; ++i) {
    if (i >= count) {
      queue.pop();  // item 0 gets to the front
      continue;
    }
    wait_for_slot(i);
    arch::syncwarp();
    items.prepare(i, amax, queue);
  }
  PreparedPair pair;
  items.read_magnitudes(0, pair);
  if (kParked < count) {
    arch::syncwarp();
    items.store_pieces(parked, 0);
    arch::syncwarp();
    items.prepare(0, amax, queue);
  } else {
    queue.pop();
  }
  if (exchanges) p.exchange.wait_until_open();

  const uint32_t of_cta = max_of_cta(s.max_of_warp, amax.float_bits());
  if (exchanges) {
    s.amax = p.exchange.largest(of_cta);
    if (first_cta) p.exchange.close();
  }
  arch::syncthreads();
  const GlobalScale global = global_scale_of<true>(global_from(s.amax));
  if (exchanges && first_cta) *p.global_scale = global.value;
  fill_table<T>(s.table, global.value);
  if (global.reciprocal != 0)
    items.template quantize<true>(pair, queue, s.table, global);
  else
    items.template quantize<false>(pair, queue, s.table, global);
}

}  // namespace hopwell::ops::nvfp4_quantize::HOPWELL_TARGET
