// lightning_indexer of many queries of long rows: the topk best keys of a query, of equal ones the smaller, in ascending order.
//
// Tile      a CTA has a query's row of scores, visible ones only: places in it count from the first visible key; a warp a
//           range of them, whose bits it keeps in 64-bit words, one of 32 keys
// Timeline  count digits of a sample, at even distances about its mean │ barrier │ two bounds, so that the threshold lies
//           between them in all but a few of a million rows │ read the row, once: a bit for each key, whether its score
//           reaches the upper bound, and one for the lower │ list the keys between the bounds │ barrier │ count their digits,
//           11 bits at a time, until it is known which are selected │ their bits join those above │ barrier │ list the keys of
//           all the bits │ barrier │ write them and their scores
// Exactness the bounds are a guess, the counts are not: where the threshold does not lie between them, where more keys do than
//           the list holds, or where only some of the scores that equal the threshold are selected, the row is selected from
//           as in select.hpp
// Budget    registers: 64; shared 41 KiB and 8 B for 32 keys; reads a row once, and what is selected from L1 or L2
// Order     counts are integers, and a sum of floats is the same in all warps: same inputs, same bits
#pragma once

#include <climits>
#include <cmath>
#include <cstddef>

#include "arch/sm80/bits.hpp"
#include "ops/lightning_indexer/select.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {

struct SampledSelectConfig {
  static constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;
  static constexpr int kSamples = 8;          // of a thread
  static constexpr int kSampledTogether = 8;  // neighbouring keys: a sector
  static constexpr int kListed = 4096;
  static constexpr int kLeastKeys = 1024;  // of a shorter row a sample tells too little
  static constexpr float kReach = 6;       // digits of the sample: so many deviations to either side of the mean
  static constexpr float kMargin = 5;      // bounds: so many deviations of a rank from where the threshold is expected
};

struct SampledSelectStorage {
  int of_warp[2][kMaxSelectWarps];
  struct Found {
    uint32_t digit;
    int above, count;  // scores with higher digits, and with this one
  } found[2];
  uint32_t counts[SampledSelectConfig::kDigits];
  int keys[SampledSelectConfig::kListed];         // between the bounds; then those that are selected
  uint32_t orders[SampledSelectConfig::kListed];  // of those between the bounds
  struct alignas(8) Bits {
    uint32_t above, reach;  // of 32 keys: which reach the upper bound, or are selected; which reach the lower bound
  } bits[kMostSampledKeys / 32];  // as many as the row needs

  static uint32_t bytes(int64_t keys) {
    return uint32_t(offsetof(SampledSelectStorage, bits) + (keys + 31) / 32 * sizeof(Bits));
  }
};
// The other way to select has this memory, too.
static_assert(offsetof(SampledSelectStorage, bits) >= offsetof(SelectStorage, words) + (4 << kSampledDigitBits));

// Digits of samples begin at `first` and are so wide: what is beyond has the lowest or the highest.
struct SampleScale {
  float first, width;

  [[nodiscard]] HOPWELL_DEVICE bool usable() const { return width > 0 && width < INFINITY; }
  [[nodiscard]] HOPWELL_DEVICE float edge(uint32_t digit) const { return first + float(digit) * width; }
};

// About the mean of 32 scores; the same for all warps.
HOPWELL_DEVICE SampleScale scale_of_row(const QueryRow& row) {
  const float score = row.scores[arch::lane_index() * (row.visible / 32)];
  const float mean = tile::sum_of_warp(score) / 32;
  const float deviation = sqrtf(tile::sum_of_warp((score - mean) * (score - mean)) / 32);
  constexpr float kReach = SampledSelectConfig::kReach;
  return {mean - kReach * deviation, deviation * (2 * kReach / SampledSelectConfig::kDigits)};
}

HOPWELL_DEVICE void count_samples(const SelectParams& p, const SampledSelectStorage& s, const QueryRow& row,
                                  const SampleScale& scale) {
  using Config = SampledSelectConfig;
  constexpr int kGroups = 32 / Config::kSampledTogether;  // of a warp at a time
  const int lane = arch::lane_index(), group = arch::warp_index() * kGroups + lane / Config::kSampledTogether;
  const float distance =
      float(row.visible - Config::kSampledTogether) / float(Config::kSamples * kGroups * p.warps - 1);
  float score[Config::kSamples];
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kSamples; ++i) {
    const int first = int(float(group + i * kGroups * p.warps) * distance) & -Config::kSampledTogether;
    score[i] = row.scores[first + lane % Config::kSampledTogether];
  }
  const uint32_t counts = arch::shared_address(s.counts);
  const float digits_per_unit = 1 / scale.width;
  HOPWELL_UNROLL
  for (const float x : score) {  // a NaN has the lowest digit
    const float digit = fminf(fmaxf((x - scale.first) * digits_per_unit, 0), Config::kDigits - 1);
    arch::red_add_shared(true, counts + 4 * uint32_t(digit), 1);
  }
}

// Sums over the warps of what they have in `of_warp`: of those before this one, and of all.
struct WarpSums {
  int before, all;
};
HOPWELL_DEVICE WarpSums sums_of_warps(const int (&of_warp)[kMaxSelectWarps], int warps) {
  const int lane = arch::lane_index(), warp = arch::warp_index(), sum = lane < warps ? of_warp[lane] : 0;
  return {tile::sum_of_warp(lane < warp ? sum : 0), tile::sum_of_warp(sum)};
}

// The digits where the scores, counted from the highest digit down, become `wanted`, if there are so many. Clears the counts.
template <int kWanted>
HOPWELL_DEVICE void find_digits(const SelectParams& p, SampledSelectStorage& s, const int (&wanted)[kWanted]) {
  constexpr int kDigits = SampledSelectConfig::kDigits;
  const int lane = arch::lane_index(), warp = arch::warp_index(), each = kDigits / (32 * p.warps);
  const int end = kDigits - arch::thread_index() * each, first = end - each;
  int sum = 0;  // lanes begin at different digits, which are in different banks
  for (int i = 0; i < each; ++i) sum += int(s.counts[first + ((i + lane) & (each - 1))]);
  int up_to = tile::sum_up_to_lane(sum);
  if (lane == 31) s.of_warp[0][warp] = up_to;
  arch::syncthreads();
  up_to += sums_of_warps(s.of_warp[0], p.warps).before;
  HOPWELL_UNROLL
  for (int i = 0; i < kWanted; ++i) {
    if (up_to < wanted[i] || up_to - sum >= wanted[i]) continue;
    int digit = end, above = up_to - sum, count = 0;
    while (above + count < wanted[i] && digit > first) above += count, count = int(s.counts[--digit]);
    s.found[i] = {uint32_t(digit), above, count};
  }
  for (int i = 0; i < each; ++i) s.counts[first + ((i + lane) & (each - 1))] = 0;
  arch::syncthreads();
}

// Orders: the threshold should be at least `low`, and lower than `high`.
struct Bounds {
  uint32_t low, high;
};

// None (low = high) where the sample says nothing, or that too many scores are between them.
HOPWELL_DEVICE Bounds guess_bounds(const SelectParams& p, SampledSelectStorage& s, const QueryRow& row) {
  using Config = SampledSelectConfig;
  for (int i = arch::thread_index(); i < Config::kDigits; i += 32 * p.warps) s.counts[i] = 0;
  const SampleScale scale = scale_of_row(row);
  arch::syncthreads();
  if (!scale.usable()) return {0, 0};
  count_samples(p, s, row, scale);
  arch::syncthreads();
  const int samples = Config::kSamples * 32 * p.warps;
  const float share = float(p.topk) / float(row.visible), rank = share * float(samples);
  const float margin = Config::kMargin * sqrtf(rank * (1 - share)) + Config::kMargin;
  const int fewer = int(rank - margin), more = int(rank + margin);
  find_digits(p, s, {fewer, more});
  const bool has_high = fewer > 0 && s.found[0].digit + 1 < Config::kDigits,
             has_low = more <= samples && s.found[1].digit > 0;
  const int reach_high = has_high ? s.found[0].above : 0,
            reach_low = has_low ? s.found[1].above + s.found[1].count : samples;
  if (float(reach_low - reach_high) * float(row.visible) > float(Config::kListed) * float(samples)) return {0, 0};
  return {has_low ? order_of(scale.edge(s.found[1].digit)) : 0,
          has_high ? order_of(scale.edge(s.found[0].digit + 1)) : UINT32_MAX};
}

// The words of a lane, those of its warp's keys.
struct OwnWords {
  int first, end;
};
HOPWELL_DEVICE OwnWords words_of_lane(const WarpKeys& keys) {
  const int first = keys.begin / 32, end = (keys.end + 31) / 32, each = (end - first + 31) / 32;
  const int own = first + arch::lane_index() * each;
  return {own < end ? own : end, own + each < end ? own + each : end};
}

HOPWELL_DEVICE void mark_keys(SampledSelectStorage& s, const QueryRow& row, const WarpKeys& keys,
                              const Bounds& bounds) {
  const int lane = arch::lane_index();
  int word = keys.begin / 32;
  for_each_score(row.scores, keys, [&](int, float score, bool exists) {
    const uint32_t order = order_of(score);
    const uint32_t above = arch::ballot(exists && order >= bounds.high),
                   reach = arch::ballot(exists && order >= bounds.low);
    if (lane == 0) s.bits[word] = {above, reach};
    ++word;
  });
}

// Lists the keys of bits_of(word), the last of the lane's before place `end`: what is within the list.
template <class BitsOf>
HOPWELL_DEVICE void list_keys(SampledSelectStorage& s, const OwnWords& words, int end, BitsOf bits_of) {
  for (int word = words.end - 1; word >= words.first; --word) {
    for (uint32_t bits = bits_of(s.bits[word]); bits != 0;) {
      const uint32_t last = arch::bfind(bits);
      bits ^= 1U << last, --end;
      if (unsigned(end) < unsigned(SampledSelectConfig::kListed)) s.keys[end] = 32 * word + int(last);
    }
  }
}

// Lists the keys whose scores are between the bounds. How many there are, though the list may be too short, and how many are
// above.
struct Between {
  int above, count;
};
HOPWELL_DEVICE Between list_between(const SelectParams& p, SampledSelectStorage& s, const OwnWords& words) {
  const int warp = arch::warp_index();
  int above = 0, reach = 0;
  for (int word = words.first; word < words.end; ++word)
    above += std::popcount(s.bits[word].above), reach += std::popcount(s.bits[word].reach);
  const int up_to_lane = tile::sum_up_to_lane(reach - above);
  above = tile::sum_of_warp(above);
  if (arch::lane_index() == 31) s.of_warp[0][warp] = up_to_lane, s.of_warp[1][warp] = above;
  arch::syncthreads();
  const WarpSums between = sums_of_warps(s.of_warp[0], p.warps);
  list_keys(s, words, between.before + up_to_lane,
            [](const SampledSelectStorage::Bits& bits) { return bits.reach ^ bits.above; });
  return {sums_of_warps(s.of_warp[1], p.warps).all, between.all};
}

// Of `count` listed keys with orders from bounds.low to below bounds.high, the order from which on there are `wanted`; 0 if
// there is none, for equal scores.
HOPWELL_DEVICE uint32_t least_selected(const SelectParams& p, SampledSelectStorage& s, const Bounds& bounds, int count,
                                       int wanted) {
  constexpr uint32_t kBits = SampledSelectConfig::kDigitBits;
  const uint32_t counts = arch::shared_address(s.counts);
  uint32_t low = bounds.low, last = bounds.high - bounds.low - 1;  // of the orders, counted from low
  while (true) {
    const uint32_t highest_bit = arch::bfind(last | 1), shift = highest_bit < kBits ? 0 : highest_bit - kBits + 1;
    for (int i = arch::thread_index(); i < count; i += 32 * p.warps) {
      const uint32_t order = s.orders[i] - low;
      arch::red_add_shared(order <= last, counts + 4 * (order >> shift), 1);
    }
    arch::syncthreads();
    find_digits(p, s, {wanted});
    low += s.found[0].digit << shift, last = (1U << shift) - 1, wanted -= s.found[0].above;
    if (wanted == s.found[0].count) return low;
    if (shift == 0) return 0;
  }
}

// Adds those of the listed keys that are selected to the bits above. Whether that is known.
HOPWELL_DEVICE bool select_between(const SelectParams& p, SampledSelectStorage& s, const QueryRow& row,
                                   const Bounds& bounds, const Between& between) {
  const int thread = arch::thread_index(), threads = 32 * p.warps, wanted = p.topk - between.above;
  if (wanted <= 0 || wanted > between.count || between.count > SampledSelectConfig::kListed) return false;
  arch::syncthreads();
  for (int i = thread; i < between.count; i += threads) s.orders[i] = order_of(row.scores[s.keys[i]]);
  const uint32_t least = least_selected(p, s, bounds, between.count, wanted);
  if (least == 0) return false;
  for (int i = thread; i < between.count; i += threads) {
    const int key = s.keys[i];
    arch::red_add_shared(s.orders[i] >= least, arch::shared_address(&s.bits[key / 32].above), 1U << (key & 31));
  }
  return true;
}

// Writes the listed keys, those of places `first` … end − 1, and their scores. Four at a time: loads of scores need not wait
// for each other.
HOPWELL_DEVICE void write_listed(const SelectParams& p, const SampledSelectStorage& s, const QueryRow& row, int first,
                                 int end) {
  constexpr int kTogether = 4;
  const int threads = 32 * p.warps;
  for (int place = first + arch::thread_index(); place < end; place += kTogether * threads) {
    int key[kTogether];
    float score[kTogether];
    HOPWELL_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      key[i] = place + i * threads < end ? s.keys[place + i * threads - first] : -1;
      score[i] = key[i] >= 0 && row.top_scores ? row.scores[key[i]] : 0;
    }
    HOPWELL_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      if (key[i] < 0) break;
      row.indices[place + i * threads] = row.first_key + key[i];
      if (row.top_scores) row.top_scores[place + i * threads] = score[i];
    }
  }
}

// Writes the keys of the bits above, topk in all.
HOPWELL_DEVICE void write_selected(const SelectParams& p, SampledSelectStorage& s, const QueryRow& row,
                                   const OwnWords& words) {
  constexpr int kListed = SampledSelectConfig::kListed;
  const int warp = arch::warp_index();
  int count = 0;
  for (int word = words.first; word < words.end; ++word) count += std::popcount(s.bits[word].above);
  int up_to_lane = tile::sum_up_to_lane(count);
  if (arch::lane_index() == 31) s.of_warp[0][warp] = up_to_lane;
  arch::syncthreads();
  up_to_lane += sums_of_warps(s.of_warp[0], p.warps).before;
  for (int first = 0; first < p.topk; first += kListed) {
    if (first > 0) arch::syncthreads();  // the keys before have been written
    list_keys(s, words, up_to_lane - first, [](const SampledSelectStorage::Bits& bits) { return bits.above; });
    arch::syncthreads();
    write_listed(p, s, row, first, p.topk - first < kListed ? p.topk : first + kListed);
  }
}

// Whether the guess was right; else nothing is written.
HOPWELL_DEVICE bool select_by_guess(const SelectParams& p, SampledSelectStorage& s, const QueryRow& row) {
  const Bounds bounds = guess_bounds(p, s, row);
  if (bounds.low >= bounds.high) return false;
  const WarpKeys keys = keys_of_warp(p, 0, row.visible);
  const OwnWords words = words_of_lane(keys);
  mark_keys(s, row, keys, bounds);
  arch::syncwarp();
  if (!select_between(p, s, row, bounds, list_between(p, s, words))) return false;
  arch::syncthreads();
  write_selected(p, s, row, words);
  return true;
}

__global__ void __launch_bounds__(32 * kMaxSelectWarps) select_keys_by_guess(const __grid_constant__ SelectParams p) {
  const QueryRow row = row_of(p, arch::block_index());
  if (row.visible > p.topk) {
    if (row.visible >= SampledSelectConfig::kLeastKeys &&
        select_by_guess(p, arch::dynamic_smem<SampledSelectStorage>(), row))
      return;
    arch::syncthreads();  // what the guess needed has been read
    auto& s = arch::dynamic_smem<SelectStorage>();
    return write_topk(p, s, row, find_threshold(p, s, row));
  }
  for (int i = arch::thread_index(); i < p.topk; i += 32 * p.warps) write_visible(row, i);
}

// For `count` queries from `first` on; by a guess where that is planned.
void launch_sampled_select(const Problem& problem, std::int64_t first, std::int64_t count, Stream stream) {
  const SelectPlan plan = plan_sampled_select(problem, count);
  if (plan.warps == 0) return launch_select(problem, first, count, stream);
  runtime::launch(kName, select_keys_by_guess,
                  runtime::shape_of_ctas(count, 32 * plan.warps, SampledSelectStorage::bytes(problem.s_kv)), stream,
                  select_params(problem, first, plan));
}

}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
