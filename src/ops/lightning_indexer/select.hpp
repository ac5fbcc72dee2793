// lightning_indexer on GPUs: selects the topk best keys of a query, ties to the smaller key, in ascending order of key.
//
// Tile      a CTA has a query's row of visible scores; positions count from the first visible key. A warp has a range
//           of them
// Timeline  radix selection: count the next bucket (8 to 14 bits) of the scores that share the threshold's prefix │
//           barrier │ each thread sums its buckets, each warp its threads │ barrier │ the thread with the threshold's
//           bucket publishes it │ barrier; repeat until the threshold is known. If only some of the scores equal to the
//           threshold are selected, find the last such key. Then, for up to 32,768 keys at a time: one bit per selected
//           key │ barrier │ write the keys of the bits
// Budget    shared 65,680 B for the longest rows; reads a row three times, rarely four, with ties six, from L1 or L2
// Order     counts are integers: same inputs, same bits
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>

#include "arch/sm80/reduce.hpp"
#include "ops/lightning_indexer/plan.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {

struct SelectParams {
  Visibility visibility;
  const float* scores;  // [queries, pitch]
  int64_t first_query, pitch;
  int* indices;       // [s_q, topk]
  float* top_scores;  // [s_q, topk], or null
  int64_t indices_stride, top_stride;
  int s_kv, topk;
  int warps;        // per CTA; a power of two
  int bucket_bits;  // at most kMaxBucketBits
};

struct SelectStorage {
  int of_warp[kMaxSelectWarps];
  struct {
    uint32_t bucket;
    int above, count;  // scores with higher buckets, and with this one
  } found;
  int end_of_ties;
  // First the number of scores with each bucket; later one bit per key: whether it is selected.
  uint32_t words[1 << kMaxBucketBits];  // the launch allocates one per bucket

  static uint32_t bytes(int bucket_bits) {
    return uint32_t(offsetof(SelectStorage, words) + (sizeof(uint32_t) << bucket_bits));
  }
};

// A query's scores and outputs.
struct QueryRow {
  const float* scores;  // of the visible keys
  int* indices;
  float* top_scores;
  int first_key, visible;       // first visible key; number of visible keys
  float past_last = -INFINITY;  // the score of entries after the last key

  // The index that is written for a visible key.
  [[nodiscard]] HOPWELL_DEVICE int index(int key) const { return first_key + key; }
};
HOPWELL_DEVICE QueryRow row_of(const SelectParams& p, int query) {
  const KeyRange visible = p.visibility.keys(p.first_query + query, p.s_kv);
  return {p.scores + query * p.pitch + visible.first, p.indices + (p.first_query + query) * p.indices_stride,
          p.top_scores ? p.top_scores + (p.first_query + query) * p.top_stride : nullptr, int(visible.first),
          int(visible.count)};
}

// The number of CTAs that write a row together, and this CTA's rank.
struct RowCtas {
  int rank = 0, count = 1;
};
// Writes a row that sees at most topk keys. Executed by all threads. The three functions have overloads for the
// parameters of the indexer over a paged cache and of long rows.
HOPWELL_DEVICE void write_visible(const SelectParams& p, int* /*of_warp*/, const QueryRow& row,
                                  const RowCtas& ctas = {}) {
  const int threads = 32 * p.warps;
  for (int i = ctas.rank * threads + arch::thread_index(); i < p.topk; i += threads * ctas.count) {
    row.indices[i] = i < row.visible ? row.first_key + i : -1;
    if (row.top_scores) row.top_scores[i] = i < row.visible ? row.scores[i] : row.past_last;
  }
}
// Whether a threshold selects keys that do not exist.
HOPWELL_DEVICE bool selects_absent(const SelectParams& /*p*/, uint32_t /*order*/) { return false; }
// Notes how many keys a row selects. Executed by all threads.
HOPWELL_DEVICE void note_count(const SelectParams& /*p*/, const QueryRow& /*row*/, int /*count*/) {}

// Writes the keys of a row that exist, at most topk. Returns their number. Executed by all threads.
template <class Row>
HOPWELL_DEVICE int write_existing(const SelectParams& p, int* of_warp, const Row& row) {
  const int threads = 32 * p.warps, lane = arch::lane_index(), warp = arch::warp_index();
  int written = 0;
  for (int first = 0; first < row.visible; first += threads) {
    const int key = first + arch::thread_index();
    const bool exists = key < row.visible && row.exists(key);
    const uint32_t exist = arch::ballot(exists);
    if (lane == 0) of_warp[warp] = std::popcount(exist);
    arch::syncthreads();
    int at = written + std::popcount(exist & ((1U << lane) - 1));
    for (int i = 0; i < p.warps; ++i) at += i < warp ? of_warp[i] : 0, written += of_warp[i];
    if (exists && at < p.topk) {
      row.indices[at] = row.index(key);
      if (row.top_scores) row.top_scores[at] = row.scores[key];
    }
    arch::syncthreads();  // the sums have been read
  }
  for (int i = written + arch::thread_index(); i < p.topk; i += threads) {
    row.indices[i] = -1;
    if (row.top_scores) row.top_scores[i] = row.past_last;
  }
  return written;
}

// Sortable key of a float: integers in the order of the floats.
HOPWELL_DEVICE uint32_t sortable_key(float x) {
  const auto bits = arch::bit_cast<uint32_t>(x);
  return bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000U);
}

// Selected are scores with a higher sortable key, and scores with this one whose keys are before `end_of_ties`.
struct Threshold {
  uint32_t order;
  int end_of_ties;
};

// The keys of a row that a warp reads.
struct WarpKeys {
  int begin, end;
};
// This warp's keys among `first` … end − 1.
HOPWELL_DEVICE WarpKeys keys_of_warp(const SelectParams& p, int first, int end) {
  const int each = (end - first + 32 * p.warps - 1) / (32 * p.warps) * 32, begin = first + arch::warp_index() * each;
  return {begin < end ? begin : end, begin + each < end ? begin + each : end};
}

// Calls visit(key, score, whether the key exists) for 32 keys at a time, one per lane, with eight loads in flight.
template <class Visit>
HOPWELL_DEVICE void for_each_score(const float* scores, const WarpKeys& keys, Visit visit) {
  constexpr int kUnroll = 8;
  const int lane = arch::lane_index();
  int first = keys.begin;
  for (; first + 32 * kUnroll <= keys.end; first += 32 * kUnroll) {
    float score[kUnroll];
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) score[i] = scores[first + lane + 32 * i];
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) visit(first + lane + 32 * i, score[i], true);
  }
  HOPWELL_NO_UNROLL
  for (; first < keys.end; first += 32) {
    const bool exists = first + lane < keys.end;
    visit(first + lane, exists ? scores[first + lane] : 0, exists);
  }
}

// The buckets that a thread sums: `count` consecutive buckets. Thread 0 has the highest buckets.
struct ThreadBuckets {
  int first, count;
};
HOPWELL_DEVICE ThreadBuckets buckets_of_thread(const SelectParams& p, int buckets) {
  const int each = buckets > 32 * p.warps ? buckets / (32 * p.warps) : 1, end = buckets - arch::thread_index() * each;
  return {end - each, end > 0 ? each : 0};
}

// Sum of of_warp over the first `warps` warps.
HOPWELL_DEVICE int sum_of_warps(const SelectStorage& s, int warps) {
  return tile::sum_of_warp(arch::lane_index() < warps ? s.of_warp[arch::lane_index()] : 0);
}
// Finds the bucket in which the number of scores, counted from the highest bucket, reaches `wanted`. Clears the counts.
HOPWELL_DEVICE void find_bucket(const SelectParams& p, SelectStorage& s, int buckets, int wanted) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  const ThreadBuckets own = buckets_of_thread(p, buckets);
  int sum = 0;  // lanes start at different buckets, which are in different banks
  for (int i = 0; i < own.count; ++i) sum += int(s.words[own.first + ((i + lane) & (own.count - 1))]);
  int up_to = tile::sum_up_to_lane(sum);
  if (lane == 31) s.of_warp[warp] = up_to;
  arch::syncthreads();
  up_to += sum_of_warps(s, warp);
  if (up_to >= wanted && up_to - sum < wanted) {
    int bucket = own.first + own.count, above = up_to - sum, count = 0;
    while (above + count < wanted && bucket > own.first) above += count, count = int(s.words[--bucket]);
    s.found = {uint32_t(bucket), above, count};
  }
  for (int i = 0; i < own.count; ++i) s.words[own.first + ((i + lane) & (own.count - 1))] = 0;
  arch::syncthreads();
}

// One past the last of the first `count` keys with scores of this sortable key.
HOPWELL_DEVICE int find_end_of_ties(const SelectParams& p, SelectStorage& s, const QueryRow& row, uint32_t order,
                                    int count) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  const WarpKeys keys = keys_of_warp(p, 0, row.visible);
  int equal = 0;
  for_each_score(row.scores, keys,
                 [&](int, float score, bool exists) { equal += exists && sortable_key(score) == order; });
  equal = tile::sum_of_warp(equal);
  if (lane == 0) s.of_warp[warp] = equal;
  arch::syncthreads();
  int before = sum_of_warps(s, warp);
  if (before < count && before + equal >= count) {
    for_each_score(row.scores, keys, [&](int key, float score, bool exists) {
      const uint32_t are_equal = arch::ballot(exists && sortable_key(score) == order);
      const int up_to_lane = before + std::popcount(are_equal << (31 - lane));
      if ((are_equal >> lane & 1) && up_to_lane == count) s.end_of_ties = key + 1;
      before += std::popcount(are_equal);
    });
  }
  arch::syncthreads();
  return s.end_of_ties;
}

HOPWELL_DEVICE Threshold find_threshold(const SelectParams& p, SelectStorage& s, const QueryRow& row) {
  const WarpKeys keys = keys_of_warp(p, 0, row.visible);
  const uint32_t counts = arch::shared_address(s.words);
  for (int i = arch::thread_index(); i < 1 << p.bucket_bits; i += 32 * p.warps) s.words[i] = 0;
  arch::syncthreads();
  uint32_t prefix = 0;  // of the threshold
  int wanted = p.topk;  // rank of the threshold among the scores that share its prefix
  for (int shift = 32; shift > 0;) {
    const bool first = shift == 32;
    const int bits = shift < p.bucket_bits ? shift : p.bucket_bits;
    shift -= bits, prefix <<= bits;
    if (first) {
      for_each_score(row.scores, keys, [&](int, float score, bool exists) {
        arch::red_add_shared(exists, counts + 4 * (sortable_key(score) >> shift), 1);
      });
    } else {
      for_each_score(row.scores, keys, [&](int, float score, bool exists) {
        const uint32_t bucket = (sortable_key(score) >> shift) - prefix;
        arch::red_add_shared(exists && bucket >> bits == 0, counts + 4 * bucket, 1);
      });
    }
    arch::syncthreads();
    find_bucket(p, s, 1 << bits, wanted);
    prefix += s.found.bucket, wanted -= s.found.above;
    if (wanted == s.found.count && prefix > 0) return {(prefix << shift) - 1, 0};  // all are selected
  }
  return {prefix, find_end_of_ties(p, s, row, prefix, wanted)};
}

// Makes one bit per key of the warp: whether it is selected. Returns the number of selected keys.
template <bool kTies>
HOPWELL_DEVICE int make_bits(SelectStorage& s, const QueryRow& row, const WarpKeys& keys, int word,
                             const Threshold& threshold) {
  const int lane = arch::lane_index();
  int count = 0;
  for_each_score(row.scores, keys, [&](int key, float score, bool exists) {
    const uint32_t order = sortable_key(score);
    const bool taken = order > threshold.order || (kTies && order == threshold.order && key < threshold.end_of_ties);
    const uint32_t bits = arch::ballot(exists && taken);
    if (lane == 0) s.words[word] = bits;
    ++word, count += std::popcount(bits);
  });
  return count;
}

// Writes the keys of the warp's bits, and their scores, from position `at` on. Four at a time, so that a lane's loads
// of scores overlap.
template <class Row>
HOPWELL_DEVICE void write_keys(const SelectParams& p, const SelectStorage& s, const Row& row, const WarpKeys& keys,
                               int first_word, int at) {
  constexpr int kUnroll = 4;
  const int lane = arch::lane_index(), words = (keys.end - keys.begin + 31) / 32;
  for (int word = 0; word < words; word += 32) {
    uint32_t bits = word + lane < words ? s.words[first_word + word + lane] : 0;
    const int count = std::popcount(bits), up_to_lane = tile::sum_up_to_lane(count);
    for (int place = at + up_to_lane - count; bits != 0; place += kUnroll) {
      int key[kUnroll];
      float score[kUnroll];
      HOPWELL_UNROLL
      for (int i = 0; i < kUnroll; ++i) {
        // When a test leaves out a barrier, positions are still inside the row.
        key[i] = bits != 0 && place + i < p.topk ? keys.begin + 32 * (word + lane) + tile::lowest_bit(bits) : -1;
        score[i] = key[i] >= 0 && row.top_scores ? row.scores[key[i]] : 0;
        bits &= bits - 1;
      }
      HOPWELL_UNROLL
      for (int i = 0; i < kUnroll; ++i) {
        if (key[i] < 0) break;
        row.indices[place + i] = row.index(key[i]);
        if (row.top_scores) row.top_scores[place + i] = score[i];
      }
    }
    at += arch::shuffle(up_to_lane, 31);
  }
}

// Keys per iteration: each has one bit in the words of any row this long.
constexpr int kKeysWrittenTogether = 32 * 1024;

template <class Row>
HOPWELL_DEVICE void write_topk(const SelectParams& p, SelectStorage& s, const Row& row, const Threshold& threshold) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  int written = 0;
  for (int first = 0; first < row.visible; first += kKeysWrittenTogether) {
    const int end = first + kKeysWrittenTogether;
    const WarpKeys keys = keys_of_warp(p, first, end < row.visible ? end : row.visible);
    const int first_word = (keys.begin - first) / 32;
    if (first > 0) arch::syncthreads();  // the words and sums of the previous keys have been read
    const int count = threshold.end_of_ties > 0 ? make_bits<true>(s, row, keys, first_word, threshold)
                                                : make_bits<false>(s, row, keys, first_word, threshold);
    if (lane == 0) s.of_warp[warp] = count;
    arch::syncthreads();
    write_keys(p, s, row, keys, first_word, written + sum_of_warps(s, warp));
    written += sum_of_warps(s, p.warps);
  }
}

// Selects for a row that sees more than topk keys.
template <class Params, class Row>
HOPWELL_DEVICE void select_row(const Params& p, SelectStorage& s, const Row& row) {
  const Threshold threshold = find_threshold(p, s, row);
  if (selects_absent(p, threshold.order)) return write_visible(p, s.of_warp, row);
  write_topk(p, s, row, threshold);
  note_count(p, row, p.topk);
}

template <class Params>
__global__ void __launch_bounds__(32 * kMaxSelectWarps) lightning_indexer_select(const __grid_constant__ Params p) {
  tile::wait_for_prior_kernels();
  tile::launch_dependents();
  auto& s = arch::dynamic_smem<SelectStorage>();
  const auto row = row_of(p, arch::block_index());
  if (row.visible <= p.topk) return write_visible(p, s.of_warp, row);
  select_row(p, s, row);
}

inline SelectParams select_params(const Problem& problem, const void* workspace, std::int64_t first_query,
                                  const SelectPlan& plan) {
  SelectParams p{};
  p.visibility = problem.visibility;
  p.scores = static_cast<const float*>(workspace), p.first_query = first_query, p.pitch = problem.s_kv;
  p.indices = problem.indices.as<int>(), p.indices_stride = problem.indices.stride[0];
  p.top_scores = problem.scores.as<float>(), p.top_stride = problem.scores.stride[0];
  p.s_kv = static_cast<int>(problem.s_kv), p.topk = static_cast<int>(problem.topk);
  p.warps = plan.warps, p.bucket_bits = plan.bucket_bits;
  return p;
}

// Selects for `count` queries. `params` is for the plan: see select_params.
template <class ParamsOf>
void launch_select(const char* name, const Problem& problem, std::int64_t count, Stream stream, ParamsOf params) {
  const SelectPlan plan = plan_select(problem, count);
  arch::LaunchShape shape = runtime::shape_of_ctas(count, 32 * plan.warps, SelectStorage::bytes(plan.bucket_bits));
  shape.programmatic_dependency = problem.device.has_dependent_launches();
  runtime::launch(name, lightning_indexer_select<decltype(params(plan))>, shape, stream, params(plan));
}

}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
