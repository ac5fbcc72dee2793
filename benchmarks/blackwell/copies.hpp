// Copies into shared memory: gathers of rows, a stream out of HBM, and to the other CTA of a pair.
#pragma once

#include "arch/sm100/cluster_launch.hpp"
#include "arch/sm100/tma.hpp"
#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/make_tensor_map.hpp"
#include "measure.hpp"

namespace hopwell::blackwell {

#if HOPWELL_HAS_SM100A
/// What every kernel with mbarriers begins with: all of them visible to everybody.
template <int kCount>
HOPWELL_DEVICE void initialise(mbarrier (&barriers)[kCount], uint32_t arrivals = 1) {
  if (thread_index() == 0) {
    for (mbarrier& barrier : barriers) mbarrier_init(barrier, arrivals);
    fence_mbarrier_init();
  }
}

template <int kWords>
HOPWELL_DEVICE void add_words(uint32_t* sum, const uint32_t (&words)[kWords]) {
  if (thread_index() >= 256) return;
  uint32_t own = 0;
  for (int i = thread_index(); i < kWords; i += 256) own += words[i];
  red_add(sum, own);
}
#endif

// ---- gather4: tiles of 64 rows by 128 bytes, each by 16 lanes of one warp; no tile waits for anything but its place -----------

inline constexpr int kTileRows = 64, kTileWords = 2048, kMostTiles = 18, kPanels = 9;

struct GatherParams {
  TensorMap map;  // [rows][576] bf16, boxes of one row by 64
  uint32_t rows;
  int tiles, in_flight, warps;  // tiles of a CTA, and how many of them at a time; warps that issue
  int copied;                   // of nine panels the last ones, which come by cp.async
  const uint32_t* from;         // the same rows
  uint64_t* cycles;             // [CTAs]
  uint32_t* sums;               // [CTAs]: of the words of the last tiles
};
struct GatherStorage {
  alignas(1024) uint32_t tiles[kMostTiles][kTileWords];
  mbarrier full[kMostTiles];
};

HOPWELL_HOST_DEVICE int gathered_row(int cta, int tile, int i, uint32_t rows) {
  return int(mixed(uint32_t((cta * 4096 + tile) * kTileRows + i)) % rows);
}

#if HOPWELL_HAS_SM100A

template <bool kMulticast>
HOPWELL_DEVICE void gather_tile(const GatherParams& p, GatherStorage& s, int cta, int tile, int stage) {
  const int lane = lane_index();
  if (lane >= 16) return;
  int row[4];
  for (int i = 0; i < 4; ++i) row[i] = gathered_row(cta, tile, 4 * lane + i, p.rows);
  const uint32_t to = shared_address(s.tiles[stage]) + uint32_t(lane) * 512, full = shared_address(&s.full[stage]);
  if constexpr (kMulticast)
    tma_gather4_multicast<1>(to, p.map, tile % kPanels * 64, row, full, 3);
  else
    tma_gather4<1>(to, p.map, tile % kPanels * 64, row, full);
}

HOPWELL_DEVICE void gather_in_turn(const GatherParams& p, GatherStorage& s) {
  for (int tile = warp_index(); tile < p.tiles; tile += p.warps) {
    const int stage = tile % p.in_flight, use = tile / p.in_flight;
    if (use > 0) mbarrier_wait(s.full[stage], uint32_t(use - 1) & 1);
    if (lane_index() == 0) mbarrier_arrive_expect_tx(s.full[stage], kTileWords * 4);
    syncwarp();
    gather_tile<false>(p, s, block_index(), tile, stage);
  }
}

// The same tile by cp.async, 16 bytes a lane. Every lane arrives when what it has copied is there.
HOPWELL_DEVICE void copy_tile(const GatherParams& p, GatherStorage& s, int cta, int tile, int stage) {
  const uint32_t lane = uint32_t(lane_index()), chunk = lane % 8, to = shared_address(s.tiles[stage]);
  HOPWELL_UNROLL
  for (uint32_t row = lane / 8; row < kTileRows; row += 4)
    cp_async(to + row * 128 + (chunk ^ row % 8) * 16,
             p.from + int64_t{gathered_row(cta, tile, int(row), p.rows)} * 288 + tile % kPanels * 32 + 4 * chunk, 16);
  cp_async_mbarrier_arrive_noinc(s.full[stage]);
}

HOPWELL_DEVICE void gather_both_ways(const GatherParams& p, GatherStorage& s) {
  for (int tile = warp_index(); tile < p.tiles; tile += p.warps) {
    const int stage = tile % p.in_flight, use = tile / p.in_flight;
    if (use > 0) mbarrier_wait(s.full[stage], uint32_t(use - 1) & 1);
    if (tile % kPanels >= kPanels - p.copied) {
      copy_tile(p, s, block_index(), tile, stage);
    } else {
      if (lane_index() == 0)
        mbarrier_arrive_expect_tx(s.full[stage], kTileWords * 4);
      else
        mbarrier_arrive(s.full[stage]);
      syncwarp();
      gather_tile<false>(p, s, block_index(), tile, stage);
    }
  }
}

HOPWELL_DEVICE void wait_for_last_tiles(const GatherParams& p, GatherStorage& s) {
  for (int stage = 0; stage < p.in_flight && stage < p.tiles; ++stage)
    mbarrier_wait(s.full[stage], uint32_t((p.tiles - 1 - stage) / p.in_flight) & 1);
}

__global__ void __launch_bounds__(256, 1) gather_kernel(const __grid_constant__ GatherParams p) {
  auto& s = dynamic_smem<GatherStorage>();
  initialise(s.full);
  timed(p.cycles, [&] {
    if (warp_index() < p.warps) gather_in_turn(p, s);
    wait_for_last_tiles(p, s);
  });
  for (int stage = 0; stage < p.in_flight && stage < p.tiles; ++stage)
    add_words(p.sums + block_index(), s.tiles[stage]);
}

// Some of the panels by gather4 and the others by cp.async, in the same warps.
__global__ void __launch_bounds__(256, 1) both_ways_kernel(const __grid_constant__ GatherParams p) {
  auto& s = dynamic_smem<GatherStorage>();
  initialise(s.full, 32);
  timed(p.cycles, [&] {
    if (warp_index() < p.warps) gather_both_ways(p, s);
    wait_for_last_tiles(p, s);
  });
  for (int stage = 0; stage < p.in_flight && stage < p.tiles; ++stage)
    add_words(p.sums + block_index(), s.tiles[stage]);
}

// Every other tile by each CTA of a pair, for both; a round of tiles at a time.
__global__ void __launch_bounds__(256, 1) multicast_kernel(const __grid_constant__ GatherParams p) {
  auto& s = dynamic_smem<GatherStorage>();
  const int rank = int(cluster_rank());
  initialise(s.full);
  cluster_sync();
  timed(p.cycles, [&] {
    for (int round = 0; round < p.tiles / p.in_flight; ++round) {
      for (int stage = warp_index(); stage < p.in_flight && warp_index() < p.warps; stage += p.warps) {
        if (lane_index() == 0) mbarrier_arrive_expect_tx(s.full[stage], kTileWords * 4);
        syncwarp();
        if (stage % 2 == rank) gather_tile<true>(p, s, block_index() & ~1, round * p.in_flight + stage, stage);
      }
      for (int stage = 0; stage < p.in_flight; ++stage) mbarrier_wait_cluster(s.full[stage], uint32_t(round) & 1);
      cluster_sync();
    }
  });
  for (int stage = 0; stage < p.in_flight; ++stage) add_words(p.sums + block_index(), s.tiles[stage]);
}

#endif

inline bool tiles_are_right(const GatherParams& p, const std::vector<uint32_t>& words,
                            const std::vector<uint32_t>& sums, int cta_mask) {
  for (int cta = 0; cta < int(sums.size()); ++cta) {
    uint32_t expected = 0;
    for (int tile = std::max(0, p.tiles - p.in_flight); tile < p.tiles; ++tile)
      for (int i = 0; i < kTileRows; ++i)
        for (int w = 0; w < 32; ++w)
          expected +=
              words[size_t(gathered_row(cta & cta_mask, tile, i, p.rows)) * 288 + size_t(tile % kPanels * 32 + w)];
    if (sums[size_t(cta)] != expected * kLaunches) return false;
  }
  return true;
}

inline GatherParams gather_params(const Memory<uint32_t>& tensor, uint32_t rows, int tiles, int in_flight, int warps,
                                  const Memory<uint64_t>& cycles, const Memory<uint32_t>& sums) {
  return {make_tensor_map({.address = tensor.data(),
                           .element = TensorElement::bf16,
                           .rank = 2,
                           .extent = {576, rows},
                           .stride_bytes = {1152},
                           .box = {64, 1},
                           .swizzle = Swizzle::bytes128}),
          rows,
          tiles,
          in_flight,
          warps,
          0,
          tensor.data(),
          cycles.data(),
          sums.data()};
}

inline void measure_gathers(const Sizes& sizes, std::vector<Measurement>& all) {
  for (const uint32_t rows : {sizes.rows.front(), sizes.rows.back()}) {
    const std::vector<uint32_t> words = some_words(size_t{rows} * 288);
    const Memory<uint32_t> tensor(words);
    for (const int in_flight : {4, 9, kMostTiles})
      for (const int warps : {1, 2, 4, 8})
        for (const bool multicast : {false, true}) {
          const Memory<uint64_t> cycles(size_t(sizes.ctas));
          const Memory<uint32_t> sums(size_t(sizes.ctas));
          const GatherParams p =
              gather_params(tensor, rows, in_flight * (1 + sizes.repeats), in_flight, warps, cycles, sums);
          run(multicast ? multicast_kernel : gather_kernel,
              {{uint32_t(sizes.ctas)}, 256, multicast ? 2U : 1U, sizeof(GatherStorage)}, p);
          all.push_back({std::string("gather4 ") + (multicast ? "multicast to a pair, " : "") + std::to_string(warps) +
                             " warps, " + std::to_string(8 * in_flight) + " KB in flight, " + std::to_string(rows) +
                             " rows",
                         "B", 4.0 * kTileWords * p.tiles, cycles.values(),
                         tiles_are_right(p, words, sums.values(), multicast ? ~1 : ~0)});
        }
  }
}

// How many of a key's nine panels should come by cp.async: none of them in other kernels, two in attention_distribution.
inline void measure_both_ways(const Sizes& sizes, std::vector<Measurement>& all) {
  const uint32_t rows = sizes.rows.front();
  const std::vector<uint32_t> words = some_words(size_t{rows} * 288);
  const Memory<uint32_t> tensor(words);
  for (const int copied : {2, 4, kPanels}) {
    const Memory<uint64_t> cycles(size_t(sizes.ctas));
    const Memory<uint32_t> sums(size_t(sizes.ctas));
    GatherParams p = gather_params(tensor, rows, kMostTiles * (1 + sizes.repeats), kMostTiles, 8, cycles, sums);
    p.copied = copied;
    run(both_ways_kernel, {{uint32_t(sizes.ctas)}, 256, 1, sizeof(GatherStorage)}, p);
    all.push_back({"gather4 but for " + std::to_string(copied) + " of 9 panels by cp.async, 8 warps, " +
                       std::to_string(8 * kMostTiles) + " KB in flight, " + std::to_string(rows) + " rows",
                   "B", 4.0 * kTileWords * p.tiles, cycles.values(), tiles_are_right(p, words, sums.values(), ~0)});
  }
}

// ---- a stream from HBM by bulk copies: stages of an NVFP4 tile, 128 rows by 256 of K with their scales ------------------------

inline constexpr int kStageBytes = 18432, kMostStages = 8;

struct StreamParams {
  const uint32_t* from;  // [CTAs][stages][4608]
  int stages, in_flight;
  uint64_t* cycles;
  uint32_t* sums;  // [CTAs]: of the words of the last stages
};
struct StreamStorage {
  alignas(128) uint32_t stages[kMostStages][kStageBytes / 4];
  mbarrier full[kMostStages];
};

#if HOPWELL_HAS_SM100A
__global__ void __launch_bounds__(256, 1) stream_kernel(const __grid_constant__ StreamParams p) {
  auto& s = dynamic_smem<StreamStorage>();
  initialise(s.full);
  const uint32_t* const own = p.from + int64_t{block_index()} * p.stages * (kStageBytes / 4);
  timed(p.cycles, [&] {
    for (int i = 0; i < p.stages && thread_index() == 0; ++i) {
      const int stage = i % p.in_flight, use = i / p.in_flight;
      if (use > 0) mbarrier_wait(s.full[stage], uint32_t(use - 1) & 1);
      mbarrier_arrive_expect_tx(s.full[stage], kStageBytes);
      bulk_load(shared_address(s.stages[stage]), own + int64_t{i} * (kStageBytes / 4), kStageBytes, s.full[stage]);
    }
    for (int stage = 0; stage < p.in_flight; ++stage)
      mbarrier_wait(s.full[stage], uint32_t((p.stages - 1 - stage) / p.in_flight) & 1);
  });
  for (int stage = 0; stage < p.in_flight; ++stage) add_words(p.sums + block_index(), s.stages[stage]);
}
#endif

inline void measure_stream(const Sizes& sizes, std::vector<Measurement>& all) {
  const size_t stage_words = kStageBytes / 4, own_words = stage_words * sizes.stream_stages;
  const std::vector<uint32_t> words = some_words(own_words * size_t(sizes.ctas));
  const Memory<uint32_t> from(words);
  for (const int in_flight : {2, 4, 6, kMostStages}) {
    const Memory<uint64_t> cycles(size_t(sizes.ctas));
    const Memory<uint32_t> sums(size_t(sizes.ctas));
    run(stream_kernel, {{uint32_t(sizes.ctas)}, 256, 1, sizeof(StreamStorage)},
        StreamParams{from.data(), int(sizes.stream_stages), in_flight, cycles.data(), sums.data()});
    bool right = true;
    for (int cta = 0; cta < sizes.ctas; ++cta) {
      uint32_t expected = 0;
      for (size_t i = own_words - stage_words * size_t(in_flight); i < own_words; ++i)
        expected += words[own_words * size_t(cta) + i];
      right &= sums.values()[size_t(cta)] == expected * kLaunches;
    }
    all.push_back({"stream from HBM, " + std::to_string(in_flight) + " stages of 18 KB in flight", "B",
                   double(kStageBytes) * sizes.stream_stages, cycles.values(), right});
  }
}

// ---- to the other CTA of a pair, both ways at once; rounds of 96 KB, between which the CTAs meet -------------------------------

inline constexpr int kRoundBytes = 98304, kPieces = 6, kPieceBytes = kRoundBytes / kPieces;

struct PeerParams {
  int rounds;
  uint64_t* cycles;
  uint32_t* sums;  // [CTAs]: of the words that came
};
struct PeerStorage {
  alignas(128) uint32_t out[kPieceBytes / 4];
  alignas(128) uint32_t in[kRoundBytes / 4];
  mbarrier full[1];
};

#if HOPWELL_HAS_SM100A

// Word i of `out` is the CTA's number + i.
HOPWELL_DEVICE void send_by_store(PeerStorage& s, uint32_t to, uint32_t full) {
  const uint32_t t = uint32_t(thread_index());
  const Words4 v = load_shared_v4(shared_address(s.out) + t * 16);
  for (uint32_t at = t * 16; at < kRoundBytes; at += 256 * 16) store_async_v4(to + at, v, full);
}
HOPWELL_DEVICE void send_by_copy(PeerStorage& s, uint32_t to, uint32_t full) {
  if (thread_index() != 0) return;
  for (uint32_t piece = 0; piece < kPieces; ++piece)
    bulk_copy_to_cta(to + piece * kPieceBytes, shared_address(s.out), kPieceBytes, full);
}

template <bool kBulk>
__global__ void __launch_bounds__(256, 1) peer_kernel(const __grid_constant__ PeerParams p) {
  auto& s = dynamic_smem<PeerStorage>();
  const uint32_t peer = cluster_rank() ^ 1;
  initialise(s.full);
  for (int i = thread_index(); i < kPieceBytes / 4; i += 256) s.out[i] = uint32_t(block_index() + i);
  fence_proxy_async();
  cluster_sync();
  const uint32_t to = map_to_rank(shared_address(s.in), peer), full = map_to_rank(shared_address(&s.full[0]), peer);
  timed(p.cycles, [&] {
    for (int round = 0; round < p.rounds; ++round) {
      if (thread_index() == 0) mbarrier_arrive_expect_tx(s.full[0], kRoundBytes);
      if constexpr (kBulk)
        send_by_copy(s, to, full);
      else
        send_by_store(s, to, full);
      mbarrier_wait_cluster(s.full[0], uint32_t(round) & 1);
      cluster_sync();
    }
  });
  add_words(p.sums + block_index(), s.in);
}

#endif

inline void measure_messages(const Sizes& sizes, std::vector<Measurement>& all) {
  for (const bool bulk : {false, true}) {
    const Memory<uint64_t> cycles(size_t(sizes.ctas));
    const Memory<uint32_t> sums(size_t(sizes.ctas));
    run(bulk ? peer_kernel<true> : peer_kernel<false>, {{uint32_t(sizes.ctas)}, 256, 2, sizeof(PeerStorage)},
        PeerParams{sizes.repeats, cycles.data(), sums.data()});
    bool right = true;
    for (int cta = 0; cta < sizes.ctas; ++cta) {
      uint32_t expected = 0;  // st.async sends the first 1,024 words again and again, bulk copies all 4,096
      for (uint32_t i = 0; i < kRoundBytes / 4; ++i)
        expected += uint32_t(cta ^ 1) + i % (bulk ? kPieceBytes / 4 : 1024);
      right &= sums.values()[size_t(cta)] == expected * kLaunches;
    }
    all.push_back({std::string("to the peer by ") + (bulk ? "bulk copies" : "st.async"), "B",
                   double(kRoundBytes) * sizes.repeats, cycles.values(), right});
  }
}

// ---- clusterlaunchcontrol.try_cancel: from the request to the answer -----------------------------------------------------------

struct CancelParams {
  uint64_t* cycles;  // [CTAs]: of the last request of a CTA that ran
  uint32_t* counts;  // [2]: CTAs that ran, and those that they took over
};
struct CancelStorage {
  alignas(16) uint32_t response[4];
  mbarrier full[1];
};

#if HOPWELL_HAS_SM100A
__global__ void __launch_bounds__(32, 1) cancel_kernel(const __grid_constant__ CancelParams p) {
  auto& s = dynamic_smem<CancelStorage>();
  initialise(s.full);
  syncwarp();
  if (thread_index() != 0) return;
  red_add(p.counts, 1U);
  bool more = true;
  for (uint32_t use = 0; more; ++use) {
    const uint64_t begin = clock_now();
    mbarrier_arrive_expect_tx(s.full[0], 16);
    clusterlaunchcontrol_try_cancel(shared_address(s.response), s.full[0]);
    mbarrier_wait(s.full[0], use & 1);
    p.cycles[block_index()] = clock_now() - begin;
    more = clusterlaunchcontrol_query_cancel(load_shared_v4(shared_address(s.response))).canceled;
    fence_proxy_async();  // the answer is read before the next one comes
    if (more) red_add(p.counts + 1, 1U);
  }
}
#endif

inline void measure_cancel(const Sizes& sizes, std::vector<Measurement>& all) {
  const uint32_t ctas = uint32_t(sizes.ctas) * 8;
  const Memory<uint64_t> cycles(ctas);
  const Memory<uint32_t> counts(2);
  run(cancel_kernel, {{ctas}, 32, 1, sizeof(CancelStorage)}, CancelParams{cycles.data(), counts.data()});
  std::vector<uint64_t> asked;
  for (const uint64_t some : cycles.values())
    if (some > 0) asked.push_back(some);
  all.push_back({"try_cancel until the answer", "requests", 1, asked,
                 counts.values()[0] + counts.values()[1] == ctas * kLaunches});
}

}  // namespace hopwell::blackwell
