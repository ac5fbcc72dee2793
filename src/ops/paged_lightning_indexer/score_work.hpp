// paged_lightning_indexer on GPUs: parameters of the score kernels, and the work of a CTA.
//
// A work item is a block of keys of a sequence, and all queries of the sequence in this pass. The items of all
// sequences are numbered, and a CTA takes a run of them. A CTA computes the number of items from the lengths on the
// device. So the run time follows the visible positions, whatever max_blocks is, and lengths may change between replays
// of a graph.
//
//     query s of lightning_indexer   =  query s mod q_len of sequence s div q_len
//     key p of a sequence            =  row p mod block of block block_tables[sequence, p div block]
//
// lightning_indexer's kernels call visible_to, row_of_key, has_key and scale_of_key with their parameters. The
// overloads here are for PagedScoreParams.
#pragma once

#include "ops/lightning_indexer/score_task.hpp"
#include "ops/paged_lightning_indexer/plan.hpp"

namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET {

namespace indexer = lightning_indexer::HOPWELL_TARGET;
using indexer::KeyRow, indexer::Span;

// The keys of one sequence at hand. The number of queries of a sequence that are in the pass: ScoreTask's `queries`.
struct PagedKeys {
  PagedSelection positions;
  const unsigned char* cache;
  int64_t block_stride;  // bytes
  int row_bytes;         // of a key
  int scales;            // offset of a block's scales
  int sequences;         // of the pass
  int64_t first_sequence;
  int64_t q_stride_b, weights_stride_b, q_scale_stride_b;  // from sequence to sequence
  int topk;
  bool needs_scores;  // of queries that see at most topk keys
  // Of the sequence at hand.
  int64_t sequence;
};

// Base: lightning_indexer's parameters of one kernel.
template <class Base>
struct PagedScoreParams : Base, PagedKeys {};

// The number of keys of a query that need scores.
HOPWELL_DEVICE int scored_keys(const PagedKeys& p, int64_t sequence, int64_t i) {
  const int visible = int(p.positions.visible(sequence, i));
  return visible <= p.topk && !p.needs_scores ? 0 : visible;
}

// A row of the cache. A page that does not exist has no address.
struct CachePage {
  const unsigned char* data;
  int number, row;  // of the page, and of the row in it
  bool exists;
};
HOPWELL_DEVICE CachePage page_of(const PagedKeys& p, int key, bool visible) {
  const int block = int(p.positions.block), number = key / block;
  const int page = visible ? p.positions.block_tables[p.sequence * p.positions.tables_stride + number] : -1;
  const bool exists = uint32_t(page) < uint32_t(p.positions.blocks);
  return {p.cache + (exists ? page : 0) * p.block_stride, page, key - number * block, exists};
}

// ---- overloads for the kernels of lightning_indexer ----

template <class Base>
HOPWELL_DEVICE Span visible_to(const PagedScoreParams<Base>& p, int query) {
  const int keys = scored_keys(p, p.sequence, p.first_query + query);
  return keys > 0 ? Span{0, keys} : Span{};
}
template <class Base>
HOPWELL_DEVICE bool has_key(const PagedScoreParams<Base>& p, int key) {
  return page_of(p, key, key < p.s_kv).exists;
}
template <class T, class Base>
HOPWELL_DEVICE float scale_of_key(const PagedScoreParams<Base>& p, int key) {
  if (sizeof(T) > 1) return 1;
  const CachePage page = page_of(p, key, key < p.s_kv);
  return page.exists ? reinterpret_cast<const float*>(page.data + p.scales)[page.row] : 1;
}

// ---- work ----

struct WorkItem {
  int sequence = 0;         // of the pass
  int block = 0, keys = 0;  // block of keys, and number of keys of the sequence
  int left = 0;             // items of this CTA, this one included
};

template <int kWarps>
struct WorkStorage {
  int of_warp[kWarps];
  WorkItem item;
};

// The queries of a sequence of the pass: i0 … i0 + count − 1.
struct PassQueries {
  int64_t first;
  int count;
};
template <class Params>
HOPWELL_DEVICE PassQueries queries_of(const Params& p, int sequence) {
  const int64_t q_len = p.positions.q_len, begin = (p.first_sequence + sequence) * q_len;
  const int64_t first = begin < p.first_query ? p.first_query - begin : 0;
  const int64_t end = p.first_query + p.queries - begin;
  return {first, int((end < q_len ? end : q_len) - first)};
}

// The most keys of a query of a sequence.
template <class Params>
HOPWELL_DEVICE int keys_of(const Params& p, int sequence) {
  const PassQueries queries = queries_of(p, sequence);
  int most = 0;
  HOPWELL_NO_UNROLL
  for (int64_t i = p.positions.lens_per_query ? 0 : queries.count - 1; i < queries.count; ++i) {
    const int keys = scored_keys(p, p.first_sequence + sequence, queries.first + i);
    most = keys > most ? keys : most;
  }
  return most;
}

// The first item of this CTA; none if left is 0. Executed by all threads.
template <int kKeys, class Params, int kWarps>
HOPWELL_DEVICE WorkItem first_item(const Params& p, WorkStorage<kWarps>& s) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  const bool is_few = p.sequences <= 32;  // every warp counts all items, a lane the items of one sequence
  const int each = is_few ? 1 : tile::ceil_div(p.sequences, 32 * kWarps);
  const int first = (is_few ? lane : arch::thread_index()) * each,
            end = first + each < p.sequences ? first + each : p.sequences;
  int own = 0, keys = 0;  // keys: of the last one
  HOPWELL_NO_UNROLL
  for (int sequence = first; sequence < end; ++sequence)
    keys = keys_of(p, sequence), own += tile::ceil_div(keys, kKeys);
  const int up_to_lane = tile::sum_up_to_lane(own);
  int before = up_to_lane - own, total = arch::shuffle(up_to_lane, 31);
  if (!is_few) {
    if (lane == 31) s.of_warp[warp] = up_to_lane;
    arch::syncthreads();
    total = 0;
    HOPWELL_NO_UNROLL
    for (int i = 0; i < kWarps; ++i) before += i < warp ? s.of_warp[i] : 0, total += s.of_warp[i];
  }
  const int cta = arch::block_index(), ctas = arch::grid_size();
  const int of_each = total / ctas, longer = total - of_each * ctas;  // the first CTAs have one item more
  const int begin = of_each * cta + (cta < longer ? cta : longer), stop = begin + of_each + (cta < longer);
  if (begin >= stop) {
    if (arch::thread_index() == 0) s.item = {};
  } else if ((!is_few || warp == 0) && before <= begin && begin < before + own) {
    WorkItem item{first, begin - before, each > 1 ? keys_of(p, first) : keys, stop - begin};
    HOPWELL_NO_UNROLL
    for (int blocks = tile::ceil_div(item.keys, kKeys); item.block >= blocks; blocks = tile::ceil_div(item.keys, kKeys))
      item.block -= blocks, item.keys = keys_of(p, ++item.sequence);
    s.item = item;
  }
  arch::syncthreads();
  return s.item;
}

// Goes on to the next item.
template <int kKeys, class Params>
HOPWELL_DEVICE void advance(const Params& p, WorkItem& item) {
  if (--item.left == 0 || ++item.block < tile::ceil_div(item.keys, kKeys)) return;
  item.block = 0;
  HOPWELL_NO_UNROLL
  do item.keys = keys_of(p, ++item.sequence);
  while (item.keys == 0);
}

// Sets the parameters of lightning_indexer for the queries of an item's sequence.
template <class T, class Params>
HOPWELL_DEVICE void set_item(Params& of, const Params& p, const WorkItem& item) {
  of = p;
  const PassQueries queries = queries_of(p, item.sequence);
  of.sequence = p.first_sequence + item.sequence;
  const int64_t weights = of.sequence * p.weights_stride_b * (p.weights_bf16 ? 2 : 4);
  of.weights = static_cast<const unsigned char*>(p.weights) + weights;
  if (sizeof(T) == 1 && p.q_scale) of.q_scale = p.q_scale + of.sequence * p.q_scale_stride_b;
  of.scores = p.scores + (of.sequence * p.positions.q_len + queries.first - p.first_query) * p.pitch;
  of.first_query = queries.first, of.queries = queries.count, of.s_kv = item.keys;
  const int groups = tile::ceil_div(queries.count, p.queries_per_tile);
  of.tiles = groups * p.tiles_per_query;
}
template <class T, class Params>
HOPWELL_DEVICE Params params_of_item(const Params& p, const WorkItem& item) {
  Params of;
  set_item<T>(of, p, item);
  return of;
}

// Sets the parameters of a launch for `count` queries from `first` on, whose scores go to the workspace.
template <class Params>
void set_params(Params& p, const Problem& problem, const unpaged::Problem& f, const unpaged::ScorePlan& plan,
                void* workspace, std::int64_t first, std::int64_t count) {
  static_cast<indexer::ScoreTask&>(p) = indexer::score_task(f, plan, workspace, first, count);
  p.weights = problem.weights.data, p.weights_stride = problem.weights.stride[1];
  p.weights_bf16 = problem.weights.dtype == DType::kBFloat16;
  p.q_scale = problem.q_scale.as<const float>(), p.q_scale_stride = problem.q_scale ? problem.q_scale.stride[1] : 0;
  p.masked = true;
  const std::int64_t q_len = problem.q_len;
  p.positions = problem.positions;
  p.cache = problem.cache.data, p.block_stride = problem.cache.stride;
  p.row_bytes = static_cast<int>(problem.d_index * static_cast<std::int64_t>(size_of(problem.q.dtype)));
  p.scales = static_cast<int>(problem.cache.block * problem.d_index);
  p.first_sequence = first / q_len;
  p.sequences = static_cast<int>((first + count - 1) / q_len - p.first_sequence + 1);
  p.q_stride_b = problem.q.stride[0], p.weights_stride_b = problem.weights.stride[0];
  p.q_scale_stride_b = problem.q_scale ? problem.q_scale.stride[0] : 0;
  p.topk = static_cast<int>(problem.topk), p.needs_scores = bool(problem.scores);
}

// CTAs of a pass: not more than the blocks of keys that there can be, nor than run at the same time.
inline std::int64_t ctas_of(const Problem& problem, const unpaged::Problem& f, std::int64_t count, std::int64_t keys,
                            std::int64_t at_once) {
  const std::int64_t sequences = std::min(problem.b, count / problem.q_len + 2);
  return std::min(sequences * tile::ceil_div(f.s_kv, keys), at_once);
}

}  // namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET
