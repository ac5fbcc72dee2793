// Misuse that the emulator reports and that the GPU must reject too: each launch ends with an error there.
#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/make_tensor_map.hpp"
#include "arch/sm90/tma.hpp"
#include "cases.hpp"
#include "start.hpp"

namespace hopwell::arch::certify {
namespace {

struct Shared {
  alignas(1024) uint32_t words[2048];
  mbarrier full;
};

enum class Misuse : int {
  load_coordinate,
  store_coordinate,
  negative_store,
  reduce_coordinate,
  negative_reduce,
  tensor_destination,
  tensor_source,
  bulk_destination,
  bulk_source,
  bulk_global,
  cp_async_destination,
  cp_async_source,
  matrix_row,
  stored_matrix_row,
  vector_load,
  vector_sum,
  shared_vector,
};

// Sums all four words, so that no compiler loads fewer.
HOPWELL_DEVICE uint32_t sum(const Words4& v) { return v.w[0] + v.w[1] + v.w[2] + v.w[3]; }

template <Misuse kMisuse>
__global__ void misuse(const __grid_constant__ TensorMap map, uint32_t* in) {
#if HOPWELL_HAS_SM90
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t base = shared_address(s.words);
  for (int i = t; i < 2048; i += 32) s.words[i] = in[i];
  if (t == 0) {
    mbarrier_init(s.full, 1);
    fence_mbarrier_init();
  }
  fence_proxy_async();
  syncthreads();
  const auto load = [&](uint32_t bytes, auto copy) {
    mbarrier_arrive_expect_tx(s.full, bytes);
    copy();
    mbarrier_wait(s.full, 0);
  };
  const auto store = [&](auto copy) {
    copy();
    bulk_commit();
    bulk_wait<0>();
  };
  const auto per_warp = [&] {
    uint32_t r[4] = {1, 2, 3, 4};
    if constexpr (kMisuse == Misuse::matrix_row) ldmatrix(r, base + uint32_t(t) * 16 + 8);
    if constexpr (kMisuse == Misuse::stored_matrix_row) stmatrix(base + uint32_t(t) * 16 + 8, r);
    in[t] = r[0];
  };
  const auto per_thread = [&] {
    if constexpr (kMisuse == Misuse::cp_async_destination) cp_async(base + 8, in);
    if constexpr (kMisuse == Misuse::cp_async_source) cp_async(base, in + 2);
    if constexpr (kMisuse == Misuse::vector_load) in[64] = sum(load_streaming(in + 2));
    if constexpr (kMisuse == Misuse::vector_sum) red_add_v4(reinterpret_cast<float*>(in) + 2, 1, 2, 3, 4);
    if constexpr (kMisuse == Misuse::shared_vector) in[64] = sum(load_shared_v4(base + 8));
    cp_async_wait_all();
  };
  if constexpr (kMisuse == Misuse::matrix_row || kMisuse == Misuse::stored_matrix_row) return per_warp();
  if (t != 0) return;
  if constexpr (kMisuse == Misuse::load_coordinate)
    load(512, [&] { tma_load(base, map, {1, 0}, s.full); });
  else if constexpr (kMisuse == Misuse::tensor_destination)
    load(512, [&] { tma_load(base + 64, map, {0, 0}, s.full); });
  else if constexpr (kMisuse == Misuse::bulk_destination)
    load(64, [&] { bulk_load(base + 8, in, 64, s.full); });
  else if constexpr (kMisuse == Misuse::bulk_global)
    load(64, [&] { bulk_load(base, in + 2, 64, s.full); });
  else if constexpr (kMisuse == Misuse::store_coordinate)
    store([&] { tma_store(map, {1, 0}, base); });
  else if constexpr (kMisuse == Misuse::negative_store)
    store([&] { tma_store(map, {0, -2}, base); });
  else if constexpr (kMisuse == Misuse::negative_reduce)
    store([&] { tma_reduce_add(map, {-4, 0}, base); });
  else if constexpr (kMisuse == Misuse::reduce_coordinate)
    store([&] { tma_reduce_add(map, {1, 0}, base); });
  else if constexpr (kMisuse == Misuse::tensor_source)
    store([&] { tma_store(map, {0, 0}, base + 64); });
  else if constexpr (kMisuse == Misuse::bulk_source)
    store([&] { bulk_store(in, base + 8, 64); });
  else
    per_thread();
#endif
}

template <Misuse kMisuse>
void add(std::vector<Case>& cases, const char* name, const char* function) {
  cases.push_back(
      {std::string("refused_") + name, function, Inputs::bits, Compare::refused, 4096, 1, [](uint32_t* in, uint32_t*) {
         const TensorMap map = make_tensor_map({.address = in,
                                                .element = TensorElement::f32,
                                                .rank = 2,
                                                .extent = {64, 32},
                                                .stride_bytes = {256},
                                                .box = {16, 8}});
         start(misuse<kMisuse>, {.threads = 32, .shared_bytes = sizeof(Shared)}, map, in);
       }});
}

}  // namespace

void add_refused_cases(std::vector<Case>& cases) {
  add<Misuse::load_coordinate>(cases, "load_coordinate", "tma_load");
  add<Misuse::store_coordinate>(cases, "store_coordinate", "tma_store");
  add<Misuse::negative_store>(cases, "negative_store", "tma_store");
  add<Misuse::negative_reduce>(cases, "negative_reduce", "tma_reduce_add");
  add<Misuse::reduce_coordinate>(cases, "reduce_coordinate", "tma_reduce_add");
  add<Misuse::tensor_destination>(cases, "tensor_destination", "tma_load");
  add<Misuse::tensor_source>(cases, "tensor_source", "tma_store");
  add<Misuse::bulk_destination>(cases, "bulk_destination", "bulk_load");
  add<Misuse::bulk_source>(cases, "bulk_source", "bulk_store");
  add<Misuse::bulk_global>(cases, "bulk_global", "bulk_load");
  add<Misuse::cp_async_destination>(cases, "cp_async_destination", "cp_async");
  add<Misuse::cp_async_source>(cases, "cp_async_source", "cp_async");
  add<Misuse::matrix_row>(cases, "matrix_row", "ldmatrix");
  add<Misuse::stored_matrix_row>(cases, "stored_matrix_row", "stmatrix");
  add<Misuse::vector_load>(cases, "vector_load", "load_streaming");
  add<Misuse::vector_sum>(cases, "vector_sum", "red_add_v4");
  add<Misuse::shared_vector>(cases, "shared_vector", "load_shared_v4");
}

}  // namespace hopwell::arch::certify
