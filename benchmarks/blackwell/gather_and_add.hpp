// Gathers and additions at once: how much of the one comes on top of the other on the way between an SM and L2. On an H200 half
// of a gather's time did (docs/performance/model.md).
#pragma once

#include "additions.hpp"
#include "copies.hpp"

namespace hopwell::blackwell {

inline constexpr int kGatheringWarps = 4;

struct GatherAndAddParams {
  GatherParams gather;
  AdditionParams add;
};
struct GatherAndAddStorage {
  GatherStorage gather;
  AdditionStorage add;
};

#if HOPWELL_HAS_SM100A
__global__ void __launch_bounds__(32 * (kGatheringWarps + kAddingWarps), 1)
    gather_and_add_kernel(const __grid_constant__ GatherAndAddParams p) {
  auto& s = dynamic_smem<GatherAndAddStorage>();
  initialise(s.gather.full);
  timed(p.add.cycles, [&] {
    const int adder = warp_index() - kGatheringWarps;
    if (adder < 0) gather_in_turn(p.gather, s.gather);
    for (int repeat = 0; adder >= 0 && repeat < p.add.repeats; ++repeat)
      add_rows<Addition::lines>(p.add, s.add, adder, repeat);
    wait_for_last_tiles(p.gather, s.gather);
  });
  for (int stage = 0; stage < p.gather.in_flight && stage < p.gather.tiles; ++stage)
    add_words(p.gather.sums + block_index(), s.gather.tiles[stage]);
}
#endif

/// Twice as many bytes are added as gathered, as in the backward: alone, alone, and both.
inline void measure_gather_and_add(const Sizes& sizes, std::vector<Measurement>& all) {
  const uint32_t rows = sizes.rows.front();
  const std::vector<uint32_t> words = some_words(size_t{rows} * 288);
  const Memory<uint32_t> tensor(words);
  constexpr int kTilesARepeat = 36;  // 294,912 B beside 589,824
  for (const bool gathers : {true, false})
    for (const bool adds : {true, false}) {
      if (!gathers && !adds) continue;
      const Memory<uint64_t> cycles(size_t(sizes.ctas));
      const Memory<uint32_t> found(size_t(sizes.ctas));
      const Memory<float> sums(size_t{rows} * kWidth);
      const GatherAndAddParams p{gather_params(tensor, rows, gathers ? kTilesARepeat * sizes.repeats : 0, kMostTiles,
                                               kGatheringWarps, cycles, found),
                                 {sums.data(), rows, adds ? sizes.repeats : 0, cycles.data()}};
      run(gather_and_add_kernel,
          {{uint32_t(sizes.ctas)}, 32 * (kGatheringWarps + kAddingWarps), 1, sizeof(GatherAndAddStorage)}, p);
      all.push_back(
          {std::string(gathers ? "port to L2: gather4" : "port to L2: additions") +
               (gathers && adds ? " and twice as many bytes of additions" : ""),
           "B", 8192.0 * p.gather.tiles + 4.0 * kWidth * kRowsARepeat * kAddingWarps * p.add.repeats, cycles.values(),
           tiles_are_right(p.gather, words, found.values(), ~0) && sums_are_right(p.add, sums.values(), sizes.ctas)});
    }
}

}  // namespace hopwell::blackwell
