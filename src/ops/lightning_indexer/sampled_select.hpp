// lightning_indexer for long rows: selects the topk best keys of a query, ties to the smaller key, in ascending order
// of key.
//
// Tile      a CTA has a query's row of visible scores; positions count from the first visible key. A warp has a range
//           of them and keeps their bits, two words per 32 keys
// Timeline  count a sample in buckets of equal width around the mean │ barrier │ compute two bounds; the threshold is
//           between them in all but a few of a hundred thousand random rows │ read the row once and record per key one
//           bit: score >= upper bound, and one bit: score >= lower bound │ list the keys between the bounds │ barrier │
//           count these in buckets, 11 bits at a time, until the selected keys are known │ merge their bits with the
//           bits of the upper bound │ barrier │ list the keys of all these bits │ barrier │ write them and their scores
// Exactness the bounds are an estimate, the counts are exact: if the threshold is not between the bounds, or more keys
//           are between them than the list holds, select.hpp's radix selection runs
// Budget    registers: 64, 32 warps per SM; shared 25 KiB and 8 B per 32 keys. A row is read once; its sample and the
//           listed keys are read again from L1 or L2
// Order     counts are integers, and float sums affect only the estimate: same inputs, same bits
#pragma once

#include <climits>
#include <cmath>
#include <cstddef>

#include "arch/sm80/bits.hpp"
#include "arch/sm80/memory.hpp"
#include "ops/lightning_indexer/select.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {

struct SampledSelectConfig {
  static constexpr int kBucketBits = 11, kBuckets = 1 << kBucketBits;
  static constexpr int kSamples = 8;       // per thread
  static constexpr int kNeighbours = 8;    // adjacent keys per group of samples: one sector
  static constexpr int kListed = 2048;     // capacity of the list in keys
  static constexpr int kUnroll = 16;       // loads of a lane in flight
  static constexpr int kLeastKeys = 1024;  // a shorter row has too small a sample
  static constexpr float kReach = 8;       // the buckets cover this many mean deviations on either side of the mean
  static constexpr float kMargin = 4;      // bounds: an expected rank and at most this × (1 + its deviation)
};

// Buckets of the samples: bucket 0 begins at `first`, each has width `width`. Scores outside go to the lowest or
// highest bucket.
struct SampleScale {
  float first, width;
  float buckets_per_unit, of_zero;  // bucket = score * buckets_per_unit + of_zero

  [[nodiscard]] HOPWELL_DEVICE bool usable() const { return width > 0 && width < INFINITY; }
  [[nodiscard]] HOPWELL_DEVICE float edge(int bucket) const { return first + float(bucket) * width; }
};
// Ranks in the sample, counted from the best, between which the threshold should be.
struct Ranks {
  int fewer, more;
};

struct SampledSelectStorage {
  int of_warp[2][kMaxSelectWarps];
  struct Found {
    int bucket, above, count;  // scores in higher buckets, and in this one
  } found[2];
  SampleScale scale;
  Ranks ranks;
  alignas(16) uint32_t counts[SampledSelectConfig::kBuckets];
  int keys[SampledSelectConfig::kListed];         // between the bounds; later the selected keys
  uint32_t orders[SampledSelectConfig::kListed];  // sortable keys of the keys between the bounds
  struct alignas(8) Bits {
    uint32_t above, reach;        // per 32 keys: score >= upper bound, or selected; score >= lower bound
  } bits[kMostSampledKeys / 32];  // the launch allocates as many as the row needs

  static uint32_t bytes(int64_t keys) {
    return uint32_t(offsetof(SampledSelectStorage, bits) + size_t(keys + 31) / 32 * sizeof(Bits));
  }
};
// The fallback in select.hpp uses the same memory.
static_assert(offsetof(SampledSelectStorage, bits) >= offsetof(SelectStorage, words) + (4 << kSampledBucketBits));

// Rounds of sampling: 1, 2 or 4, the fewest that sample at least 1/16 of the row, or else 4. In a round each thread
// reads kSamples scores, from as many parts of the row.
struct SampleRounds {
  int count, part;  // a multiple of kNeighbours
};
template <int kWarps>
HOPWELL_DEVICE SampleRounds rounds_of(const QueryRow& row) {
  constexpr int kSamples = SampledSelectConfig::kSamples, kOfRound = 32 * kWarps * kSamples;
  const int doublings = row.visible <= 16 * kOfRound ? 0 : row.visible <= 32 * kOfRound ? 1 : 2;
  return {1 << doublings, row.visible / kSamples >> doublings & -SampledSelectConfig::kNeighbours};
}

// A lane's samples of a round. Adjacent lanes read adjacent keys; these groups are spread evenly over each part.
struct Samples {
  float score[SampledSelectConfig::kSamples];
};
template <int kWarps>
HOPWELL_DEVICE Samples load_samples(const QueryRow& row, const SampleRounds& rounds, int round) {
  constexpr int kSamples = SampledSelectConfig::kSamples, kNeighbours = SampledSelectConfig::kNeighbours;
  constexpr int kGroups = 32 * kWarps / kNeighbours;  // of a part
  const int group = rounds.part / kGroups * (arch::thread_index() / kNeighbours) & -kNeighbours;
  const float* scores = row.scores + round * kSamples * rounds.part + group + arch::lane_index() % kNeighbours;
  Samples samples;
  HOPWELL_UNROLL
  for (int i = 0; i < kSamples; ++i) samples.score[i] = scores[i * rounds.part];
  return samples;
}

// Buckets around the mean of a warp's samples. A sample that is not finite has no distance from it.
HOPWELL_DEVICE SampleScale scale_of(const Samples& samples) {
  constexpr float kReach = SampledSelectConfig::kReach, kCount = 32 * SampledSelectConfig::kSamples;
  const auto is_finite = [](float score) { return fabsf(score) < INFINITY; };
  const float first_of_warp = arch::shuffle(samples.score[0], 0);
  const float one = is_finite(first_of_warp) ? first_of_warp : 0;  // equal samples have no distance from their mean
  float sum = 0, distances = 0;
  for (const float score : samples.score) sum += is_finite(score) ? score - one : 0;
  const float mean = one + tile::sum_of_warp(sum) / kCount;
  for (const float score : samples.score) distances += is_finite(score) ? fabsf(score - mean) : 0;
  const float deviation = tile::sum_of_warp(distances) / kCount;
  const float first = mean - kReach * deviation, width = deviation * (2 * kReach / SampledSelectConfig::kBuckets);
  return {first, width, 1 / width, -first / width};
}

HOPWELL_DEVICE void count_samples(const SampledSelectStorage& s, const Samples& samples) {
  constexpr float kLast = SampledSelectConfig::kBuckets - 1;
  const uint32_t counts = arch::shared_address(s.counts);
  const float buckets_per_unit = s.scale.buckets_per_unit, of_zero = s.scale.of_zero;
  HOPWELL_UNROLL
  for (const float score : samples.score) {  // a NaN goes to the lowest bucket
    const float bucket = fminf(fmaxf(score * buckets_per_unit + of_zero, 0), kLast);
    arch::red_add_shared(true, counts + 4 * uint32_t(bucket), 1);
  }
}

// Sum of of_warp over the first `count` warps.
template <int kWarps>
HOPWELL_DEVICE int sum_of_first(const int (&of_warp)[kMaxSelectWarps], int count) {
  const int warp = arch::lane_index() % kWarps;
  return tile::reduce<kWarps / 2, 1>(warp < count ? of_warp[warp] : 0, tile::Plus{});
}

// Finds the buckets in which the number of scores, counted from the highest bucket, reaches `wanted`, if there are
// enough. Clears the counts.
template <int kWarps, int kWanted>
HOPWELL_DEVICE void find_buckets(SampledSelectStorage& s, const int (&wanted)[kWanted]) {
  constexpr int kBuckets = SampledSelectConfig::kBuckets, kEach = kWarps > 16 ? 4 : kBuckets / (32 * kWarps);
  const int warp = arch::warp_index(), first = kBuckets - (arch::thread_index() + 1) * kEach;
  const uint32_t address = arch::shared_address(s.counts) + 4 * uint32_t(first);
  int count[kEach] = {}, sum = 0;
  HOPWELL_UNROLL
  for (int i = 0; i < kEach; i += 4) {
    if (first < 0) break;  // more threads than needed
    const arch::Words4 counts = arch::load_shared_v4(address + 4 * uint32_t(i));
    HOPWELL_UNROLL
    for (int j = 0; j < 4; ++j) sum += count[i + j] = int(counts.w[j]);
    arch::store_shared_v4(address + 4 * uint32_t(i), {});
  }
  int up_to = tile::sum_up_to_lane(sum);
  if (arch::lane_index() == 31) s.of_warp[0][warp] = up_to;
  arch::syncthreads();
  up_to += sum_of_first<kWarps>(s.of_warp[0], warp);
  HOPWELL_UNROLL
  for (int i = 0; i < kWanted; ++i) {
    int above = up_to - sum;
    if (above >= wanted[i] || up_to < wanted[i]) continue;
    HOPWELL_UNROLL
    for (int j = kEach - 1; j >= 0; --j) {
      if (above < wanted[i] && above + count[j] >= wanted[i]) s.found[i] = {first + j, above, count[j]};
      above += count[j];
    }
  }
  arch::syncthreads();
}

// Sortable keys: the threshold should be >= low and < high.
struct Bounds {
  uint32_t low, high;
};

// The margin follows from the standard deviation of the threshold's rank, but is smaller if too many keys would be
// listed.
HOPWELL_DEVICE Ranks ranks_of_threshold(int topk, int visible, int samples) {
  using Config = SampledSelectConfig;
  const float samples_per_key = float(samples) / float(visible), rank = float(topk) * samples_per_key;
  const float wanted = Config::kMargin * (1 + sqrtf(rank * (1 - float(topk) / float(visible)))),
              most = 0.4F * Config::kListed * samples_per_key;
  const float margin = wanted < most ? wanted : most;
  return {int(rank - margin), int(rank + margin) + 1};
}

template <int kWarps>
HOPWELL_DEVICE void clear_counts(SampledSelectStorage& s) {
  HOPWELL_UNROLL
  for (int i = 0; i < SampledSelectConfig::kBuckets; i += 32 * kWarps) s.counts[i + arch::thread_index()] = 0;
}

// From the samples of round 0, and of the other rounds. Empty (low = high) if the sample is not usable, or if it shows
// too many scores between the bounds.
template <int kWarps>
HOPWELL_DEVICE Bounds guess_bounds(const SelectParams& p, SampledSelectStorage& s, const QueryRow& row,
                                   const SampleRounds& rounds, const Samples& samples) {
  using Config = SampledSelectConfig;
  const int sampled = rounds.count * 32 * kWarps * Config::kSamples;
  clear_counts<kWarps>(s);
  if (arch::warp_index() == 0) {
    const SampleScale scale = scale_of(samples);
    if (arch::lane_index() == 0) s.scale = scale;
  }
  if (arch::thread_index() == 32 * kWarps - 1) s.ranks = ranks_of_threshold(p.topk, row.visible, sampled);
  arch::syncthreads();
  const SampleScale scale = s.scale;
  if (!scale.usable()) return {0, 0};
  count_samples(s, samples);
  HOPWELL_NO_UNROLL
  for (int round = 1; round < rounds.count; ++round) count_samples(s, load_samples<kWarps>(row, rounds, round));
  arch::syncthreads();
  const auto [fewer, more] = s.ranks;
  find_buckets<kWarps>(s, {fewer, more});
  const auto& [high, low] = s.found;
  const bool has_high = fewer > 0 && high.bucket + 1 < Config::kBuckets, has_low = more <= sampled && low.bucket > 0;
  const int between = (has_low ? low.above + low.count : sampled) - (has_high ? high.above : 0);
  if (float(between) * float(row.visible) > float(Config::kListed) * float(sampled)) return {0, 0};
  return {has_low ? sortable_key(scale.edge(low.bucket)) : 0,
          has_high ? sortable_key(scale.edge(high.bucket + 1)) : UINT32_MAX};
}

// Keys first … end − 1 of a warp; or words of 32 keys of a lane.
struct Range {
  int first, end;
};
HOPWELL_DEVICE Range range_of(int number, int each, int end) {
  const int first = number * each;
  return {first < end ? first : end, first + each < end ? first + each : end};
}
template <int kWarps>
HOPWELL_DEVICE Range keys_of_warp(const QueryRow& row) {
  return range_of(arch::warp_index(), (row.visible + 32 * kWarps - 1) / (32 * kWarps) * 32, row.visible);
}
template <int kWarps>
HOPWELL_DEVICE Range words_of_lane(const QueryRow& row) {
  const Range keys = keys_of_warp<kWarps>(row);
  const int first = keys.first / 32, count = (keys.end - keys.first + 31) / 32;
  const Range words = range_of(arch::lane_index(), (count + 31) / 32, count);
  return {first + words.first, first + words.end};
}

// Whether a score reaches a positive bound. For positive floats the integer order of the bits is the order of the
// numbers.
HOPWELL_DEVICE bool reaches(float score, uint32_t positive_bound) {
  return arch::bit_cast<int>(score) >= int(positive_bound ^ 0x80000000U);
}

template <bool kPositive, bool kWhole>
HOPWELL_DEVICE void mark_batch(SampledSelectStorage& s, const QueryRow& row, int first, int end, const Bounds& bounds) {
  constexpr int kUnroll = SampledSelectConfig::kUnroll;
  const int key = first + arch::lane_index();
  float score[kUnroll];
  HOPWELL_UNROLL
  for (int i = 0; i < kUnroll; ++i) score[i] = kWhole || key + 32 * i < end ? row.scores[key + 32 * i] : 0;
  SampledSelectStorage::Bits bits[kUnroll];
  HOPWELL_UNROLL
  for (int i = 0; i < kUnroll; ++i) {
    const bool exists = kWhole || key + 32 * i < end;
    const bool above = kPositive ? reaches(score[i], bounds.high) : sortable_key(score[i]) >= bounds.high,
               reach = kPositive ? reaches(score[i], bounds.low) : sortable_key(score[i]) >= bounds.low;
    bits[i] = {arch::ballot(exists && above), arch::ballot(exists && reach)};
  }
  if (arch::lane_index() > 0) return;
  HOPWELL_UNROLL
  for (int i = 0; i < kUnroll; ++i)
    if (kWhole || first + 32 * i < end) s.bits[first / 32 + i] = bits[i];
}
template <bool kPositive>
HOPWELL_DEVICE void mark_keys(SampledSelectStorage& s, const QueryRow& row, const Range& keys, const Bounds& bounds) {
  constexpr int kBatch = 32 * SampledSelectConfig::kUnroll;
  int first = keys.first;
  for (; first + kBatch <= keys.end; first += kBatch) mark_batch<kPositive, true>(s, row, first, keys.end, bounds);
  HOPWELL_NO_UNROLL
  for (; first < keys.end; first += kBatch) mark_batch<kPositive, false>(s, row, first, keys.end, bounds);
}

// Lists the keys of bits_of(word), from the end: the lane's last key gets position end − 1. Skips positions outside of
// the list.
template <class BitsOf>
HOPWELL_DEVICE void list_keys(SampledSelectStorage& s, const Range& words, int end, BitsOf bits_of) {
  HOPWELL_NO_UNROLL
  for (int word = words.end - 1; word >= words.first; --word) {
    HOPWELL_NO_UNROLL
    for (uint32_t bits = bits_of(s.bits[word]); bits != 0;) {
      const uint32_t last = arch::bfind(bits);
      bits ^= 1U << last, --end;
      if (unsigned(end) < unsigned(SampledSelectConfig::kListed)) s.keys[end] = 32 * word + int(last);
    }
  }
}

// Lists the keys whose scores are between the bounds. Returns their number, even if the list is too short, and the
// number above.
struct Between {
  int above, count;
};
template <int kWarps>
HOPWELL_DEVICE Between list_between(SampledSelectStorage& s, const QueryRow& row) {
  const int warp = arch::warp_index();
  const Range words = words_of_lane<kWarps>(row);
  int above = 0, reach = 0;
  HOPWELL_NO_UNROLL
  for (int word = words.first; word < words.end; ++word)
    above += std::popcount(s.bits[word].above), reach += std::popcount(s.bits[word].reach);
  const int up_to_lane = tile::sum_up_to_lane(reach - above);
  above = tile::sum_of_warp(above);
  if (arch::lane_index() == 31) s.of_warp[0][warp] = up_to_lane, s.of_warp[1][warp] = above;
  arch::syncthreads();
  list_keys(s, words, sum_of_first<kWarps>(s.of_warp[0], warp) + up_to_lane,
            [](const SampledSelectStorage::Bits& bits) { return bits.reach ^ bits.above; });
  return {sum_of_first<kWarps>(s.of_warp[1], kWarps), sum_of_first<kWarps>(s.of_warp[0], kWarps)};
}

// Right shift that maps (sortable key − low), from 0 to `last`, to at most 2^kBucketBits buckets.
HOPWELL_DEVICE uint32_t bucket_shift(uint32_t last) {
  constexpr uint32_t kBits = SampledSelectConfig::kBucketBits;
  const uint32_t highest_bit = arch::bfind(last | 1);
  return highest_bit < kBits ? 0 : highest_bit - kBits + 1;
}

// Selected are scores with a higher sortable key, and the first `equal` scores with this sortable key.
struct SplitTies {
  uint32_t order;
  int equal;
};

// Finds the threshold that selects the `wanted` best of the scores with sortable keys low … low + last. `of_bucket`, at
// most 32, is their number among the `count` scores of s.orders. All counts are 0, and have other contents afterwards.
template <int kWarps>
HOPWELL_DEVICE SplitTies rank_in_bucket(SampledSelectStorage& s, uint32_t low, uint32_t last, int count, int wanted,
                                        int of_bucket) {
  const uint32_t places = arch::shared_address(s.counts);  // a bit each
  uint32_t* const orders = s.counts + 32;
  HOPWELL_NO_UNROLL
  for (int i = arch::thread_index(); i < count; i += 32 * kWarps) {
    const uint32_t order = s.orders[i];
    if (order - low > last) continue;
    uint32_t place = 0;
    HOPWELL_NO_UNROLL
    while (place < 31 && arch::atomic_or_shared(places, 1U << place) >> place & 1) ++place;
    orders[place] = order;
  }
  arch::syncthreads();
  const int lane = arch::lane_index();
  const uint32_t own = lane < of_bucket ? orders[lane] : 0;
  int above = 0, reach = 0;
  HOPWELL_NO_UNROLL
  for (int i = 0; i < of_bucket; ++i) above += orders[i] > own, reach += orders[i] >= own;
  const int at = tile::lowest_bit(arch::ballot(lane < of_bucket && above < wanted && wanted <= reach));
  const uint32_t order = arch::shuffle(own, at);
  if (arch::shuffle(reach, at) == wanted) return {order - 1, 0};
  return {order, wanted - arch::shuffle(above, at)};
}

// Finds the threshold that selects the `wanted` best of `count` scores. Their sortable keys are in s.orders. The caller
// has counted the buckets (sortable key − low) >> shift. kRank: a bucket of few scores is ranked, not divided. That is
// shorter, but has more instructions: 512 rows of 8,192 keys, several CTAs an SM, take 4 % longer with it (H200).
template <int kWarps, bool kRank = false>
HOPWELL_DEVICE SplitTies find_last(SampledSelectStorage& s, uint32_t low, uint32_t shift, int count, int wanted) {
  const uint32_t counts = arch::shared_address(s.counts);
  while (true) {
    arch::syncthreads();
    find_buckets<kWarps>(s, {wanted});
    low += uint32_t(s.found[0].bucket) << shift, wanted -= s.found[0].above;
    if (wanted == s.found[0].count) return {low - 1, 0};
    if (shift == 0) return {low, wanted};
    const uint32_t last = (1U << shift) - 1;
    const int of_bucket = s.found[0].count;
    if (kRank && of_bucket <= 32) return rank_in_bucket<kWarps>(s, low, last, count, wanted, of_bucket);
    shift = bucket_shift(last);
    HOPWELL_NO_UNROLL
    for (int i = arch::thread_index(); i < count; i += 32 * kWarps) {
      const uint32_t order = s.orders[i] - low;
      arch::red_add_shared(order <= last, counts + 4 * (order >> shift), 1);
    }
  }
}

// Whether the threshold is between the bounds, and the list can hold all scores there.
HOPWELL_DEVICE bool guessed_right(const Between& between, int topk) {
  const int wanted = topk - between.above;
  return wanted > 0 && wanted <= between.count && between.count <= SampledSelectConfig::kListed;
}

// Sets the `above` bit of listed key i if it is `selected`.
HOPWELL_DEVICE void mark_selected(const SampledSelectStorage& s, int i, bool selected) {
  const int key = s.keys[i];
  arch::red_add_shared(selected, arch::shared_address(&s.bits[key / 32].above), 1U << (key & 31));
}

// Marks the first ties.equal of the `count` listed keys with that sortable key. Executed by one warp, because ties are
// rare.
HOPWELL_DEVICE void mark_ties(const SampledSelectStorage& s, const SplitTies& ties, int count) {
  const int lane = arch::lane_index();
  int before = 0;
  for (int first = 0; first < count && before < ties.equal; first += 32) {
    const int i = first + lane < count ? first + lane : count - 1;
    const uint32_t equal = arch::ballot(first + lane < count && s.orders[i] == ties.order);
    mark_selected(s, i, (equal >> lane & 1) && before + std::popcount(equal & ((1U << lane) - 1)) < ties.equal);
    before += std::popcount(equal);
  }
}

// Sets the `above` bits of the selected keys of the list.
template <int kWarps>
HOPWELL_DEVICE void select_between(const SelectParams& p, SampledSelectStorage& s, const QueryRow& row,
                                   const Bounds& bounds, const Between& between) {
  const uint32_t counts = arch::shared_address(s.counts), shift = bucket_shift(bounds.high - bounds.low - 1);
  for (int i = arch::thread_index(); i < between.count; i += 32 * kWarps) {
    const uint32_t order = sortable_key(row.scores[s.keys[i]]);
    s.orders[i] = order;
    arch::red_add_shared(true, counts + 4 * ((order - bounds.low) >> shift), 1);
  }
  const SplitTies last = find_last<kWarps>(s, bounds.low, shift, between.count, p.topk - between.above);
  for (int i = arch::thread_index(); i < between.count; i += 32 * kWarps) mark_selected(s, i, s.orders[i] > last.order);
  if (last.equal > 0 && arch::warp_index() == 0) mark_ties(s, last, between.count);
}

// Writes positions `first` … end − 1 from the list, up to 256, so that a lane's loads of scores overlap.
template <bool kWhole, class Row>
HOPWELL_DEVICE void write_batch(const Row& row, const int* keys, int first, int end) {
  constexpr int kUnroll = 8;
  const int place = first + arch::lane_index();
  int* const indices = row.indices + place;
  float* const top_scores = row.top_scores + place;
  int key[kUnroll];
  HOPWELL_UNROLL
  for (int i = 0; i < kUnroll; ++i) key[i] = kWhole || place + 32 * i < end ? keys[arch::lane_index() + 32 * i] : 0;
  HOPWELL_UNROLL
  for (int i = 0; i < kUnroll; ++i)
    if (kWhole || place + 32 * i < end) indices[32 * i] = row.index(key[i]);
  if (row.top_scores == nullptr) return;
  float score[kUnroll];
  HOPWELL_UNROLL
  for (int i = 0; i < kUnroll; ++i) score[i] = row.scores[key[i]];
  HOPWELL_UNROLL
  for (int i = 0; i < kUnroll; ++i)
    if (kWhole || place + 32 * i < end) top_scores[32 * i] = score[i];
}
template <int kWarps, class Row>
HOPWELL_DEVICE void write_listed(const SampledSelectStorage& s, const Row& row, int first, int end) {
  constexpr int kBatch = 256;
  HOPWELL_NO_UNROLL
  for (int at = first + kBatch * arch::warp_index(); at < end; at += kBatch * kWarps) {
    if (at + kBatch <= end)
      write_batch<true>(row, s.keys + (at - first), at, end);
    else
      write_batch<false>(row, s.keys + (at - first), at, end);
  }
}

// Writes the keys whose `above` bit is set, topk in total.
template <int kWarps, class Row>
HOPWELL_DEVICE void write_selected(const SelectParams& p, SampledSelectStorage& s, const Row& row) {
  constexpr int kListed = SampledSelectConfig::kListed;
  const int warp = arch::warp_index();
  const Range words = words_of_lane<kWarps>(row);
  int count = 0;
  HOPWELL_NO_UNROLL
  for (int word = words.first; word < words.end; ++word) count += std::popcount(s.bits[word].above);
  int up_to_lane = tile::sum_up_to_lane(count);
  if (arch::lane_index() == 31) s.of_warp[0][warp] = up_to_lane;
  arch::syncthreads();
  up_to_lane += sum_of_first<kWarps>(s.of_warp[0], warp);
  HOPWELL_NO_UNROLL
  for (int first = 0; first < p.topk; first += kListed) {
    if (first > 0) arch::syncthreads();  // the previous keys have been written
    list_keys(s, words, up_to_lane - first, [](const SampledSelectStorage::Bits& bits) { return bits.above; });
    arch::syncthreads();
    write_listed<kWarps>(s, row, first, p.topk - first < kListed ? p.topk : first + kListed);
  }
}

// Returns whether the estimate was right; otherwise writes nothing.
template <int kWarps, class Params, class Row>
HOPWELL_DEVICE bool select_by_guess(const Params& p, SampledSelectStorage& s, const Row& row) {
  const SampleRounds rounds = rounds_of<kWarps>(row);
  const Bounds bounds = guess_bounds<kWarps>(p, s, row, rounds, load_samples<kWarps>(row, rounds, 0));
  if (bounds.low >= bounds.high || selects_absent(p, bounds.low)) return false;
  const Range keys = keys_of_warp<kWarps>(row);
  if (bounds.low >> 31)
    mark_keys<true>(s, row, keys, bounds);
  else
    mark_keys<false>(s, row, keys, bounds);
  arch::syncwarp();
  const Between between = list_between<kWarps>(s, row);
  if (!guessed_right(between, p.topk)) return false;
  arch::syncthreads();
  select_between<kWarps>(p, s, row, bounds, between);
  arch::syncthreads();
  write_selected<kWarps>(p, s, row);
  return true;
}

template <int kWarps, class Params>
__global__ void __launch_bounds__(32 * kWarps, 32 / kWarps)
    lightning_indexer_select_sampled(const __grid_constant__ Params p) {
  tile::wait_for_prior_kernels();
  tile::launch_dependents();
  const auto row = row_of(p, arch::block_index());
  if (row.visible <= p.topk) return write_visible(p, arch::dynamic_smem<SelectStorage>().of_warp, row);
  const bool long_enough = row.visible >= SampledSelectConfig::kLeastKeys;
  if (long_enough && select_by_guess<kWarps>(p, arch::dynamic_smem<SampledSelectStorage>(), row))
    return note_count(p, row, p.topk);
  if (long_enough) arch::syncthreads();  // the shared memory of the estimate has been read
  select_row(p, arch::dynamic_smem<SelectStorage>(), row);
}

// Selects for `count` queries; with an estimate if planned. See launch_select.
template <class ParamsOf>
void launch_sampled_select(const char* name, const Problem& problem, std::int64_t count, Stream stream,
                           ParamsOf params) {
  const SelectPlan plan = plan_sampled_select(problem, count);
  if (plan.warps == 0) return launch_select(name, problem, count, stream, params);
  using Params = decltype(params(plan));
  const auto kernel = plan.warps == 4    ? lightning_indexer_select_sampled<4, Params>
                      : plan.warps == 8  ? lightning_indexer_select_sampled<8, Params>
                      : plan.warps == 16 ? lightning_indexer_select_sampled<16, Params>
                                         : lightning_indexer_select_sampled<32, Params>;
  arch::LaunchShape shape = runtime::shape_of_ctas(count, 32 * plan.warps, SampledSelectStorage::bytes(problem.s_kv));
  shape.programmatic_dependency = problem.device.has_dependent_launches();
  runtime::launch(name, kernel, shape, stream, params(plan));
}

}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
