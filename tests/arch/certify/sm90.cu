// Certification of the sm90 layer except wgmma. Kernels that need a cluster have 2 or 4 CTAs.
#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/convert.hpp"
#include "arch/sm90/make_tensor_map.hpp"
#include "arch/sm90/tma.hpp"
#include "cases.hpp"
#include "start.hpp"

namespace hopwell::arch::certify {
namespace {

struct Shared {
  alignas(1024) uint32_t words[4096];
  mbarrier full[2], empty[2];
};

__global__ void mbarrier_ring(const uint32_t* in, uint32_t* out) {
#if HOPWELL_HAS_SM90
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  if (t == 0) {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(s.full[i], 32);
      mbarrier_init(s.empty[i], 2);
    }
    fence_mbarrier_init();
  }
  syncthreads();
  for (int i = 0; i < 8; ++i) {
    const int stage = i % 2;
    const uint32_t parity = uint32_t(i / 2 % 2);
    if (t < 32) {
      mbarrier_wait(s.empty[stage], parity ^ 1);
      s.words[stage * 32 + t] = in[i * 32 + t];
      mbarrier_arrive(s.full[stage]);
    } else {
      while (!mbarrier_test_wait(s.full[stage], parity)) {
      }
      out[i * 32 + t - 32] = s.words[stage * 32 + 63 - t];
      syncwarp();
      if (t == 32) mbarrier_arrive(s.empty[stage], 2);
    }
  }
  syncthreads();
  if (t == 0) {
    mbarrier_invalidate(s.full[0]);
    mbarrier_init(s.full[0], 1);
    out[256] = mbarrier_test_wait(s.full[0], 1) * 2 + mbarrier_test_wait(s.full[0], 0);
  }
#endif
}

__global__ void cp_async_on_mbarrier(const uint32_t* in, uint32_t* out) {
#if HOPWELL_HAS_SM90
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  if (t == 0) {
    mbarrier_init(s.full[0], 32);
    fence_mbarrier_init();
  }
  syncthreads();
  if (t < 32) {
    for (int i = 0; i < 4; ++i)
      cp_async(shared_address(s.words) + uint32_t(i * 32 + t) * 16, in + 4 * (i * 32 + t), (t + i) % 17);
    cp_async_mbarrier_arrive_noinc(s.full[0]);
  } else {
    mbarrier_wait(s.full[0], 0);
    for (int i = t - 32; i < 512; i += 32) out[i] = s.words[i];
  }
  syncthreads();
#endif
}

// In every CTA of a cluster of two: load, multicast, store, copy to the peer, and stores to the peer.
__global__ void bulk_copies(const uint32_t* in, uint32_t* out) {
#if HOPWELL_HAS_SM90
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t rank = cluster_rank(), peer = rank ^ 1, base = shared_address(s.words);
  if (t == 0) {
    mbarrier_init(s.full[0], 1);
    mbarrier_init(s.full[1], 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  if (t == 0) {
    mbarrier_arrive_expect_tx(s.full[0], 1024 + 512 * 2);
    bulk_load(base, in + rank * 256, 1024, s.full[0]);
    bulk_load_multicast(base + 1024 + rank * 512, in + 512 + rank * 128, 512, s.full[0], 3);
    mbarrier_expect_tx(s.full[1], 256 + 32 * 4 + 32 * 16);
    mbarrier_arrive(s.full[1]);
  }
  mbarrier_wait(s.full[0], 0);
  if (t == 0)
    bulk_copy_to_cta(map_to_rank(base + 4096, peer), base + 256, 256, map_to_rank(shared_address(&s.full[1]), peer));
  const uint32_t peer_bar = map_to_rank(shared_address(&s.full[1]), peer);
  store_async(map_to_rank(base + 4352 + uint32_t(t) * 4, peer), in[t] + rank, peer_bar);
  store_async_v4(map_to_rank(base + 4480 + uint32_t(t) * 16, peer), Words4{{in[t], in[t + 1], in[t + 2], rank}},
                 peer_bar);
  store_cluster(map_to_rank(base + 8192 + uint32_t(t) * 4, peer), in[t + 32] ^ rank);
  mbarrier_wait_cluster(s.full[1], 0);
  fence_proxy_async();  // st.async wrote through the generic proxy; the bulk stores below read
  cluster_sync();
  const uint32_t from_peer = load_cluster(map_to_rank(base + uint32_t(t) * 4, peer));
  const Words4 four_from_peer = load_cluster_v4(map_to_rank(base + uint32_t(t) * 16, peer));
  syncwarp();
  if (t == 0) {
    bulk_store(out + rank * 1536, base, 2048);
    bulk_commit();
    bulk_store(out + rank * 1536 + 512, base + 4096, 896);
    bulk_commit();
    bulk_wait_read<1>();
    bulk_wait<0>();
  }
  out[rank * 1536 + 1024 + uint32_t(t)] = s.words[2048 + t];
  out[rank * 1536 + 1056 + uint32_t(t)] = from_peer;
  out[rank * 1536 + 1088 + uint32_t(t)] = cluster_size() * 16 + cluster_rank();
  for (uint32_t i = 0; i < 4; ++i) out[rank * 1536 + 1120 + 4 * uint32_t(t) + i] = four_from_peer.w[i];
  cluster_sync();
#endif
}

__global__ void remote_arrivals(const uint32_t* in, uint32_t* out) {
#if HOPWELL_HAS_SM90
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t rank = cluster_rank();
  if (t == 0) {
    mbarrier_init(s.full[0], 4 * 32);
    mbarrier_init(s.full[1], 4);
    mbarrier_init(s.empty[0], 4 * 32);
    fence_mbarrier_init();
  }
  cluster_arrive_relaxed();
  cluster_wait();
  cluster_sync();
  for (uint32_t r = 0; r < 4; ++r) {
    store_cluster(map_to_rank(shared_address(s.words + rank * 32 + uint32_t(t)), r), in[rank * 32 + uint32_t(t)]);
    mbarrier_arrive_cluster(map_to_rank(shared_address(&s.full[0]), r));
    if (t == 0) {
      mbarrier_arrive_expect_tx_cluster(map_to_rank(shared_address(&s.full[1]), r), 4);
      store_async(map_to_rank(shared_address(s.words + 128 + rank), r), in[rank] + r,
                  map_to_rank(shared_address(&s.full[1]), r));
    }
  }
  mbarrier_wait_cluster(s.full[0], 0);
  mbarrier_wait_cluster(s.full[1], 0);
  for (int i = t; i < 132; i += 32) out[rank * 264 + uint32_t(i)] = s.words[i];
  fence_proxy_async();  // the arrivals wait for nothing, not even for these loads
  for (uint32_t r = 0; r < 4; ++r) mbarrier_arrive_cluster_relaxed(map_to_rank(shared_address(&s.empty[0]), r));
  mbarrier_wait(s.empty[0], 0);  // all threads have read: the words may be overwritten
  for (uint32_t r = 0; r < 4; ++r)
    store_cluster(map_to_rank(shared_address(s.words + rank * 32 + uint32_t(t)), r), in[rank * 32 + uint32_t(t)] + r);
  fence_acq_rel_cluster();
  cluster_sync();
  for (int i = t; i < 132; i += 32) out[rank * 264 + 132 + uint32_t(i)] = s.words[i];
#endif
}

__global__ void bulk_reductions(const uint32_t* in, uint32_t* out) {
#if HOPWELL_HAS_SM90
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  for (int i = t; i < 128; i += 32) {
    s.words[i] = in[i];  // floats
    s.words[128 + i] = pack_bf16(bit_cast<float>(in[i]), bit_cast<float>(in[127 - i]));
    s.words[256 + i] = in[i] * 2654435761u;  // 64 integers of 64 bits
  }
  fence_proxy_async();
  syncthreads();
  if (t < 2) {  // two threads add the same data
    bulk_reduce_add(reinterpret_cast<float*>(out), shared_address(s.words), 512);
    bulk_reduce_add(reinterpret_cast<bf16*>(out + 128), shared_address(s.words + 128), 512);
    bulk_reduce_add(reinterpret_cast<int64_t*>(out + 256), shared_address(s.words + 256), 512);
    bulk_commit();
    bulk_wait<0>();
  }
  red_add_v2(reinterpret_cast<float*>(out + 384) + 2 * (t % 4), bit_cast<float>(in[t]), bit_cast<float>(in[t + 1]));
  red_add_v4(reinterpret_cast<float*>(out + 392) + 4 * (t % 2), bit_cast<float>(in[t]), bit_cast<float>(in[t + 1]),
             bit_cast<float>(in[t + 2]), 1.f);
  syncthreads();
#endif
}

// Adds two numbers to each of 128 words, which are zero before: their order does not matter.
enum class Sum : int { bulk_f32, bulk_bf16, tensor, v2, v4 };
template <Sum kSum>
__global__ void special_sums(const __grid_constant__ TensorMap map, const uint32_t* in, uint32_t* out) {
#if HOPWELL_HAS_SM90
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  for (int i = t; i < 256; i += 32) s.words[i] = in[i];
  fence_proxy_async();
  syncthreads();
  float* sums = reinterpret_cast<float*>(out);
  if (t < 2) {
    const uint32_t source = shared_address(s.words) + uint32_t(t) * 512;
    if constexpr (kSum == Sum::bulk_f32) bulk_reduce_add(sums, source, 512);
    if constexpr (kSum == Sum::bulk_bf16) bulk_reduce_add(reinterpret_cast<bf16*>(out), source, 512);
    if constexpr (kSum == Sum::tensor) tma_reduce_add(map, {0, 0}, source);
    bulk_commit();
    bulk_wait<0>();
  }
  for (int i = 0; i < 2; ++i) {
    const auto value = [&](int at) { return bit_cast<float>(in[i * 128 + at]); };
    if constexpr (kSum == Sum::v2) {
      red_add_v2(sums + 4 * t, value(4 * t), value(4 * t + 1));
      red_add_v2(sums + 4 * t + 2, value(4 * t + 2), value(4 * t + 3));
    }
    if constexpr (kSum == Sum::v4)
      red_add_v4(sums + 4 * t, value(4 * t), value(4 * t + 1), value(4 * t + 2), value(4 * t + 3));
  }
  syncthreads();
#endif
}

__global__ void stmatrix_all(const uint32_t* in, uint32_t* out) {
#if HOPWELL_HAS_SM90
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t base = shared_address(s.words), row = base + uint32_t((t * 5 + 9) % 32) * 16;
  for (int i = t; i < 1024; i += 32) s.words[i] = 0;
  syncwarp();
  const uint32_t r1[1] = {in[t]}, r2[2] = {in[32 + t], in[64 + t]},
                 r4[4] = {in[96 + t], in[128 + t], in[160 + t], in[192 + t]};
  stmatrix(row, r1);
  stmatrix(row + 512, r2);
  stmatrix(row + 1024, r4);
  stmatrix<Transpose::yes>(row + 1536, r1);
  stmatrix<Transpose::yes>(row + 2048, r2);
  stmatrix<Transpose::yes>(row + 2560, r4);
  syncwarp();
  for (int i = t; i < 1024; i += 32) out[i] = s.words[i];
#endif
}

__global__ void __launch_bounds__(256, 1) registers_and_election(const uint32_t* in, uint32_t* out) {
#if HOPWELL_HAS_SM90A || HOPWELL_HAS_SM100A
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (warpgroup_index() == 0)
    setmaxnreg_dec<40>();
  else
    setmaxnreg_inc<232>();
  const bool first = elect_one(), second = elect_one();
  s.words[t] = uint32_t(first == second) + uint32_t(__builtin_popcount(ballot(first))) * 2;
  out[t] = s.words[t] + in[t];
#endif
}

__global__ void conversions_e4m3(const uint32_t* in, uint32_t* out) {
#if HOPWELL_HAS_SM90
  const int t = thread_index();
  out[t] = pack_e4m3(bit_cast<float>(in[2 * t]), bit_cast<float>(in[2 * t + 1]));
  out[256 + t] = unpack_e4m3(uint16_t(t * 257));                            // every value
  out[512 + t] = pack_e4m3(float(t) * 0x1p-11f, float(t - 128) * 1.0625f);  // subnormals and halfway cases
#endif
}

__global__ void halves(const uint32_t* in, uint32_t* out) {
#if HOPWELL_HAS_SM90
  const int t = thread_index();
  out[t] = max_u16x2(in[t], in[256 + t]);
  out[256 + t] = max_u16x2(in[t], in[t] << 16 | in[256 + t] >> 16);
  out[512 + t] = greater_bf16(in[t], in[256 + t]) ^ greater_bf16(in[t] & 0x7fff7fff, in[t] & 0x7fff0fff);
#endif
}

struct TmaMaps {
  TensorMap in[5], out[5];
};

// One box of every rank: load and store, partly outside of the tensor.
__global__ void tma_ranks(const __grid_constant__ TmaMaps maps, uint32_t* out) {
#if HOPWELL_HAS_SM90
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  if (t == 0) {
    mbarrier_init(s.full[0], 1);
    fence_mbarrier_init();
    for (int i = 0; i < 5; ++i) prefetch_tensor_map(maps.in[i]);
  }
  syncthreads();
  const uint32_t base = shared_address(s.words);
  for (int i = t; i < 4096; i += 32) s.words[i] = 0;
  fence_proxy_async();
  syncthreads();
  if (t == 0) {
    mbarrier_arrive_expect_tx(s.full[0], 64 + 64 * 4 + 64 * 8 + 64 * 16 + 64 * 32);
    tma_load(base, maps.in[0], {-4}, s.full[0]);
    tma_load(base + 1024, maps.in[1], {8, -2}, s.full[0]);
    tma_load(base + 2048, maps.in[2], {4, 3, 2}, s.full[0]);
    tma_load_cached(base + 4096, maps.in[3], {20, 2, 1, 0}, s.full[0], evict_first_policy());
    tma_load(base + 8192, maps.in[4], {0, 1, 1, 1, -1}, s.full[0]);
  }
  mbarrier_wait(s.full[0], 0);
  for (int i = t; i < 4096; i += 32) out[8192 + i] = s.words[i];
  if (t == 0) {
    tma_store(maps.out[0], {4}, base);
    tma_store(maps.out[1], {20, 3}, base + 1024);
    tma_store(maps.out[2], {4, 2, 2}, base + 2048);
    tma_store(maps.out[3], {0, 0, 1, 1}, base + 4096);
    tma_store(maps.out[4], {8, 1, 1, 1, 1}, base + 8192);
    bulk_commit();
    bulk_wait<0>();
  }
  syncthreads();
#endif
}

__global__ void tma_reductions(const __grid_constant__ TensorMap map, const uint32_t* in) {
#if HOPWELL_HAS_SM90
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  for (int i = t; i < 256; i += 32) s.words[i] = in[i];
  fence_proxy_async();
  syncthreads();
  if (t == 0) {
    for (int i = 0; i < 3; ++i) tma_reduce_add(map, {i * 8 + 4, i}, shared_address(s.words));
    bulk_commit();
    bulk_wait<0>();
  }
  syncthreads();
#endif
}

// Each CTA of four loads a quarter of a swizzled tile for all CTAs; every CTA's copy is written out raw.
template <int kMode>
__global__ void tma_swizzled_multicast(const __grid_constant__ TensorMap map, uint32_t* out) {
#if HOPWELL_HAS_SM90
  auto& s = dynamic_smem<Shared>();
  constexpr uint32_t kRowBytes = kMode ? 16u << kMode : 64, kTile = 32 * kRowBytes;
  const int t = thread_index();
  const uint32_t rank = cluster_rank();
  if (t == 0) {
    mbarrier_init(s.full[0], 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  if (t == 0) {
    mbarrier_arrive_expect_tx(s.full[0], kTile);
    tma_load_multicast(shared_address(s.words) + rank * kTile / 4, map, {int(kRowBytes / 2), int(rank * 8) - 2},
                       s.full[0], 15);
  }
  mbarrier_wait(s.full[0], 0);
  for (uint32_t i = uint32_t(t); i < kTile / 4; i += 32) out[rank * 1024 + i] = s.words[i];
  cluster_sync();
#endif
}

TensorMap map_2d(void* address, TensorElement element, uint64_t columns, uint64_t rows, uint32_t box_columns,
                 uint32_t box_rows, Swizzle swizzle) {
  return make_tensor_map({.address = address,
                          .element = element,
                          .rank = 2,
                          .extent = {columns, rows},
                          .stride_bytes = {columns * element_bytes(element)},
                          .box = {box_columns, box_rows},
                          .swizzle = swizzle});
}

TmaMaps maps_of_every_rank(uint32_t* in, uint32_t* out) {
  TmaMaps maps;
  const TensorMapRequest base{.element = TensorElement::f32,
                              .extent = {24, 6, 4, 3, 3},
                              .stride_bytes = {96, 576, 2304, 6912},
                              .box = {16, 4, 2, 2, 2}};
  for (int rank = 1; rank <= 5; ++rank) {
    TensorMapRequest request = base;
    request.rank = rank;
    request.address = in;
    maps.in[rank - 1] = make_tensor_map(request);
    request.address = out;
    maps.out[rank - 1] = make_tensor_map(request);
  }
  return maps;
}

}  // namespace

void add_sm90_cases(std::vector<Case>& cases) {
  const size_t shared = sizeof(Shared);
  const auto add = [&](const char* name, const char* instructions, Inputs inputs, size_t in_words, size_t out_words,
                       void (*kernel)(const uint32_t*, uint32_t*), uint32_t threads, uint32_t cluster) {
    cases.push_back(
        {name, instructions, inputs, Compare::bits, in_words, out_words, [=](uint32_t* in, uint32_t* out) {
           start(kernel, {.grid = {cluster}, .threads = threads, .cluster = cluster, .shared_bytes = shared}, in, out);
         }});
  };
  add("mbarrier_ring",
      "mbarrier_init mbarrier_arrive mbarrier_wait mbarrier_try_wait mbarrier_test_wait mbarrier_invalidate "
      "fence_mbarrier_init",
      Inputs::bits, 256, 257, mbarrier_ring, 64, 1);
  add("cp_async_on_mbarrier", "cp_async_mbarrier_arrive_noinc", Inputs::bits, 512, 512, cp_async_on_mbarrier, 64, 1);
  add("bulk_copies",
      "bulk_load bulk_load_multicast bulk_copy_to_cta bulk_store bulk_commit bulk_wait bulk_wait_read store_async "
      "store_async_v4 load_cluster load_cluster_v4 store_cluster map_to_rank cluster_rank cluster_size cluster_sync "
      "cluster_arrive "
      "cluster_wait mbarrier_arrive_expect_tx mbarrier_expect_tx mbarrier_wait_cluster mbarrier_try_wait_cluster "
      "fence_proxy_async",
      Inputs::bits, 768, 3072, bulk_copies, 32, 2);
  add("remote_arrivals",
      "mbarrier_arrive_cluster mbarrier_arrive_cluster_relaxed mbarrier_arrive_expect_tx_cluster "
      "mbarrier_wait_cluster cluster_arrive_relaxed cluster_wait fence_acq_rel_cluster store_async store_cluster "
      "map_to_rank",
      Inputs::bits, 128, 1056, remote_arrivals, 32, 4);
  add("bulk_reductions", "bulk_reduce_add red_add_v2 red_add_v4", Inputs::integers, 136, 400, bulk_reductions, 32, 1);
  add("stmatrix", "stmatrix", Inputs::bits, 256, 1024, stmatrix_all, 32, 1);
  add("registers_and_election",
      "setmaxnreg_inc setmaxnreg_dec elect_one griddepcontrol_wait griddepcontrol_launch_dependents warpgroup_index",
      Inputs::bits, 256, 256, registers_and_election, 256, 1);
  add("halves", "max_u16x2 greater_bf16", Inputs::bits, 512, 768, halves, 256, 1);
  add("conversions_e4m3", "pack_e4m3 unpack_e4m3", Inputs::float_wide, 512, 768, conversions_e4m3, 256, 1);
  cases.push_back({"tma_ranks", "tma_load tma_load_cached tma_store prefetch_tensor_map", Inputs::bits, Compare::bits,
                   5184, 12288, [=](uint32_t* in, uint32_t* out) {
                     start(tma_ranks, {.threads = 32, .shared_bytes = shared}, maps_of_every_rank(in, out), out);
                   }});
  cases.push_back(
      {"tma_reductions", "tma_reduce_add", Inputs::integers, Compare::bits, 256, 512, [=](uint32_t* in, uint32_t* out) {
         start(tma_reductions, {.threads = 32, .shared_bytes = shared},
               map_2d(out, TensorElement::f32, 32, 16, 16, 16, Swizzle::none), in);
       }});
  const auto add_sums = [&](const char* name, const char* function,
                            void (*kernel)(TensorMap, const uint32_t*, uint32_t*)) {
    cases.push_back({std::string("special_sums_") + name, function, Inputs::float_small, Compare::bits, 256, 128,
                     [=](uint32_t* in, uint32_t* out) {
                       start(kernel, {.threads = 32, .shared_bytes = shared},
                             map_2d(out, TensorElement::f32, 16, 8, 16, 8, Swizzle::none), in, out);
                     }});
  };
  add_sums("bulk_f32", "bulk_reduce_add", special_sums<Sum::bulk_f32>);
  add_sums("bulk_bf16", "bulk_reduce_add", special_sums<Sum::bulk_bf16>);
  add_sums("tensor", "tma_reduce_add", special_sums<Sum::tensor>);
  add_sums("v2", "red_add_v2", special_sums<Sum::v2>);
  add_sums("v4", "red_add_v4", special_sums<Sum::v4>);
  const auto swizzled = [&](const char* name, void (*kernel)(TensorMap, uint32_t*), Swizzle mode,
                            uint32_t row_elements) {
    cases.push_back(
        {name, "tma_load_multicast", Inputs::bits, Compare::bits, 4096, 4096, [=](uint32_t* in, uint32_t* out) {
           start(kernel, {.grid = {4}, .threads = 32, .cluster = 4, .shared_bytes = shared},
                 map_2d(in, TensorElement::bf16, 256, 30, row_elements, 8, mode), out);
         }});
  };
  swizzled("tma_swizzle_none", tma_swizzled_multicast<0>, Swizzle::none, 32);
  swizzled("tma_swizzle_32", tma_swizzled_multicast<1>, Swizzle::bytes32, 16);
  swizzled("tma_swizzle_64", tma_swizzled_multicast<2>, Swizzle::bytes64, 32);
  swizzled("tma_swizzle_128", tma_swizzled_multicast<3>, Swizzle::bytes128, 64);
}

}  // namespace hopwell::arch::certify
