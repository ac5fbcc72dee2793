// Blackwell's copies, conversions and launch control on the emulator, one at a time, compared with plain arithmetic.
#include "sm100_harness.hpp"

#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "arch/emu/numeric.hpp"
#include "arch/sm100/cluster_launch.hpp"
#include "arch/sm100/convert.hpp"
#include "arch/sm100/memory.hpp"
#include "arch/sm100/tcgen05.hpp"
#include "arch/sm100/tma.hpp"
#include "arch/sm90/make_tensor_map.hpp"

namespace hopwell::arch {
namespace {

// ---- copies to tensor memory ----------------------------------------------------------------------------------------

template <CopyShape kShape>
void check_copy() {
  std::vector<uint32_t> got(128 * 8);
  expect_clean(
      shape(128),
      [&] {
        with_tensor_memory<1>(32, [&](Shared& s) {
          const int t = thread_index(), warp = t / 32;
          for (int i = t; i < 2048; i += 128) reinterpret_cast<uint32_t*>(s.a)[i] = uint32_t(i);
          fence_proxy_async();
          syncthreads();
          if (t ==
              0) {  // core matrices of 8 rows × 16 bytes: 128 bytes each, the second column of them 2,048 bytes further
            tcgen05_copy<1, kShape>(s.tmem,
                                    at_address(tcgen05_descriptor({Swizzle::none, 2048, 128}), shared_address(s.a)));
            tcgen05_commit<1>(s.done);
          }
          mbarrier_wait(s.done, 0);
          tcgen05_fence_after_thread_sync();
          uint32_t r[4], more[4] = {};
          tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, 32 * warp, 0));
          tmem_wait_load(r);
          if constexpr (kShape == CopyShape::b128x256) {
            tmem_load<TmemShape::b32x32>(more, tmem_address(s.tmem, 32 * warp, 4));
            tmem_wait_load(more);
          }
          for (int i = 0; i < 4; ++i) got[size_t(t * 8 + i)] = r[i], got[size_t(t * 8 + 4 + i)] = more[i];
        });
      },
      3);
  for (int row = 0; row < emu::copy_rows(kShape); ++row)
    for (int lane : emu::copy_lanes(kShape, row))
      for (int column = 0; lane >= 0 && column < emu::copy_row_bytes(kShape) / 4; ++column)
        EXPECT_EQ(got[size_t(lane * 8 + column)], uint32_t(row * 4 + column % 4 + column / 4 * 512));
}

TEST(Copies, EveryShapeToTensorMemory) {
  check_copy<CopyShape::b128x256>();
  check_copy<CopyShape::b128x128>();
  check_copy<CopyShape::b64x128_02_13>();
  check_copy<CopyShape::b64x128_01_23>();
  check_copy<CopyShape::b32x128_x4>();
}

TEST(Copies, Gather4AndScatter4) {
  std::vector<float> from(32 * 16), to(32 * 16, -1);
  for (size_t i = 0; i < from.size(); ++i) from[i] = float(i);
  const auto map = [](std::vector<float>& v) {
    return make_tensor_map({.address = v.data(),
                            .element = TensorElement::f32,
                            .rank = 2,
                            .extent = {16, 32},
                            .stride_bytes = {64},
                            .box = {8, 1},
                            .swizzle = Swizzle::bytes32});
  };
  const TensorMap in = map(from), out = map(to);
  expect_clean(shape(32), [&] {
    auto& s = dynamic_smem<Shared>();
    if (thread_index() == 0) {
      mbarrier_init(s.full, 1);
      fence_mbarrier_init();
      mbarrier_arrive_expect_tx(s.full, 128);
      tma_gather4<1>(shared_address(s.a), in, 8, {30, 2, -1, 40}, shared_address(&s.full));
      mbarrier_wait(s.full, 0);
      tma_scatter4(out, 0, {5, 6, 7, 99}, shared_address(s.a));
      bulk_commit();
      bulk_wait<0>();
    }
  });
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(to[size_t(5 * 16 + i)], from[size_t(30 * 16 + 8 + i)]);
    EXPECT_EQ(to[size_t(6 * 16 + i)], from[size_t(2 * 16 + 8 + i)]);
    EXPECT_EQ(to[size_t(7 * 16 + i)], 0.f);  // the row outside of the tensor
    EXPECT_EQ(to[size_t(5 * 16 + 8 + i)], -1.f);
  }
}

// Each CTA of a pair gathers four rows for both. With cta_group::2 the even CTA's mbarrier counts the bytes of both
// CTAs.
template <int kCtaGroup>
void check_gather_multicast() {
  std::vector<float> from(32 * 16);
  std::vector<int> wrong(1);
  for (size_t i = 0; i < from.size(); ++i) from[i] = float(i);
  const TensorMap map = make_tensor_map({.address = from.data(),
                                         .element = TensorElement::f32,
                                         .rank = 2,
                                         .extent = {16, 32},
                                         .stride_bytes = {64},
                                         .box = {8, 1}});
  const int rows[2][4] = {{30, 2, -1, 40}, {7, 7, 0, 31}};
  expect_clean(shape(32, 2), [&] {
    auto& s = dynamic_smem<Shared>();
    const uint32_t rank = cluster_rank(), full = shared_address(&s.full);
    if (thread_index() == 0) {
      mbarrier_init(s.full, 1);
      fence_mbarrier_init();
      if (kCtaGroup == 1 || rank == 0) mbarrier_arrive_expect_tx(s.full, 256 * kCtaGroup);
    }
    cluster_sync();
    if (thread_index() == 0) {
      const uint32_t to = shared_address(s.a) + rank * 128;
      if (rank == 0)
        tma_gather4_multicast<kCtaGroup>(to, map, 8, rows[rank], full, 3, evict_last_policy());
      else
        tma_gather4_multicast<kCtaGroup>(to, map, 8, rows[rank], kCtaGroup == 2 ? in_even_cta(full) : full, 3);
    }
    if (kCtaGroup == 1 || rank == 0) mbarrier_wait(s.full, 0);
    cluster_sync();
    for (int i = thread_index(); i < 64; i += 32) {
      const int row = rows[i / 32][i / 8 % 4];
      const float expected = row < 0 || row >= 32 ? 0 : from[size_t(row * 16 + 8 + i % 8)];
      wrong[0] += reinterpret_cast<const float*>(s.a)[i] != expected;
    }
  });
  EXPECT_EQ(wrong[0], 0);
}

TEST(Copies, Gather4Multicast) {
  check_gather_multicast<1>();
  check_gather_multicast<2>();
}

// ---- global memory --------------------------------------------------------------------------------------------------

TEST(Copies, SectorsToGlobalMemory) {
  alignas(32) uint32_t to[32 * 8 + 1] = {};
  const auto store_all = [&](uint32_t* first) {
    Words8 words;
    for (uint32_t i = 0; i < 8; ++i) words.w[i] = 100 * uint32_t(thread_index()) + i;
    store_streaming(first + 8 * thread_index(), words);
  };
  expect_clean(shape(32), [&] { store_all(to); });
  for (uint32_t i = 0; i < 256; ++i) EXPECT_EQ(to[i], i / 8 * 100 + i % 8);
  const emu::Report report = emu::launch(shape(32), test::options_for(0), [&] { store_all(to + 1); });
  EXPECT_NE(report.text().find("must be 32-byte aligned"), std::string::npos) << report.text();
}

// ---- cluster launch control, conversions ----------------------------------------------------------------------------

TEST(ClusterLaunchControl, EveryTileIsDoneOnce) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<int> done(12);
    const emu::Report report = emu::launch(shape(32, 2, 12), test::options_for(seed), [&] {
      auto& s = dynamic_smem<Shared>();
      if (thread_index() != 0) return;
      mbarrier_init(s.full, 1);
      fence_mbarrier_init();
      if (cluster_rank() != 0) return void(++done[size_t(block_index())]);  // the second CTA keeps its own tile
      int tile = block_index();
      for (uint32_t parity = 0;; parity ^= 1) {
        ++done[size_t(tile)];
        mbarrier_arrive_expect_tx(s.full, 16);
        clusterlaunchcontrol_try_cancel(shared_address(s.a), s.full);
        mbarrier_wait(s.full, parity);
        const CancelResponse next = clusterlaunchcontrol_query_cancel(load_shared_v4(shared_address(s.a)));
        if (!next.canceled) break;
        tile = next.x;
        ++done[size_t(tile + 1)];
        fence_proxy_async();
      }
    });
    ASSERT_TRUE(report.clean()) << report.text();
    EXPECT_EQ(done, std::vector<int>(12, 1)) << seed;
  }
}

TEST(Conversions, EveryE4m3AndE2m1ValueRoundTrips) {
  for (int code = 0; code < 256; ++code) {
    const float value = emu::from_e4m3(uint8_t(code));
    if (std::isnan(value)) continue;
    EXPECT_EQ(pack_e4m3(value, value), code * 257);
    EXPECT_EQ(emu::from_fp16(uint16_t(unpack_e4m3(uint16_t(code)))), value);
  }
  for (int code = 0; code < 16; ++code) {
    const float value = emu::from_e2m1(uint8_t(code));
    EXPECT_EQ(pack_e2m1(value, -value), (code ^ 8) << 4 | code);
    for (int place = 0; place < 8; ++place) {  // with different bits in the other positions
      uint32_t pairs[4];
      unpack_e2m1((0x89abcdefu & ~(15u << 4 * place)) | uint32_t(code) << 4 * place, pairs);
      EXPECT_EQ(emu::from_fp16(uint16_t(pairs[place / 2] >> 16 * (place % 2))), value);
    }
  }
}

// Rounding to nearest even compared with the nearest representable value, found by search.
TEST(Conversions, RoundToNearestEven) {
  std::mt19937 random(5);
  for (int i = 0; i < 20000; ++i) {
    const float x = bit_cast<float>(uint32_t(random() & 0x80ffffff) | uint32_t(120 + random() % 20) << 23);
    const auto nearest = [&](int codes, auto decode) {
      int best = 0;
      for (int c = 0; c < codes; ++c) {
        if (std::isnan(decode(c))) continue;
        const double now = std::fabs(double(decode(c)) - double(x)),
                     before = std::fabs(double(decode(best)) - double(x));
        if (now < before || (now == before && c % 2 == 0 && std::signbit(decode(c)) == std::signbit(x))) best = c;
      }
      return decode(best);
    };
    EXPECT_EQ(emu::from_e4m3(emu::to_e4m3_bits(x)), nearest(256, [](int c) { return emu::from_e4m3(uint8_t(c)); }))
        << x;
    EXPECT_EQ(emu::from_e2m1(emu::to_e2m1_bits(x)), nearest(16, [](int c) { return emu::from_e2m1(uint8_t(c)); })) << x;
  }
}

}  // namespace
}  // namespace hopwell::arch
