// Products of the tensor core: cycles of every form, alone, and beside copies into shared memory, loads from tensor memory
// or additions to global memory: what of that shares a port with the products' operands.
//
// Row m of A holds 1 + m mod 3 everywhere, row n of B 1 + n mod 5, so that D is known whatever K is multiplied. A batch of
// products runs, then another of twice as many: what the second takes more is what so many products take.
#pragma once

#include "arch/sm100/tcgen05.hpp"
#include "arch/sm80/convert.hpp"
#include "arch/sm90/bulk_copy.hpp"
#include "arch/sm90/cluster.hpp"
#include "measure.hpp"

namespace hopwell::blackwell {

struct Form {
  int m, n, cta_group;
  bool ws, a_in_tmem, collects;  // collects: the first product fills a collector buffer, the others use it
};

inline constexpr int kProductThreads = 384, kFillBytes = 16384, kFillStages = 2, kFirstBeside = 4;
inline constexpr int kLines = 4096;   // of 128 bytes, that are added to
inline constexpr int kAColumn = 256;  // of A in tensor memory, and of what is loaded beside products

template <int kM, int kN, int kCtaGroup, bool kWs, bool kAInTmem, bool kCollects = false>
struct FormOf {
  static constexpr Form kForm{kM, kN, kCtaGroup, kWs, kAInTmem, kCollects};
};

/// What else goes on during the second batch, and longer, so that it slows all of the products.
struct Beside {
  int fills = 0;      // bulk copies of 16 KB
  int warps = 0;      // so many of them do what follows
  int loads = 0;      // tcgen05.ld.32x32b.x32, 4 KB, each
  int additions = 0;  // red.v4 to four lines, 512 bytes, each
  [[nodiscard]] HOPWELL_HOST_DEVICE bool anything() const { return fills + warps > 0; }
};

struct ProductParams {
  int products;  // of the first batch
  Beside beside;
  const uint32_t* from;
  uint64_t* cycles;  // [CTAs]: of the second batch if anything is beside it, otherwise what it took more than the first
  float* d;          // [2][128][256]: of the first two CTAs
  float* sums;       // [4096][32], each addition adds 1
};
struct ProductStorage {
  alignas(1024) uint32_t a[128][32];  // rows of 128 bytes: K 64
  alignas(1024) uint32_t b[256][32];
  alignas(1024) uint32_t fill[kFillStages][kFillBytes / 4];
  mbarrier done, filled[kFillStages];
  uint32_t tmem;
};

/// Row of A and of D in a lane, and column of D in a column of tensor memory; row −1 where there is none. Lanes are halves
/// (64 rows of A in a CTA: .ws, or a pair's M 128), quarters (.ws, M 32), or the first half of each quarter (plain M 64).
struct Place {
  int row, column;
};
HOPWELL_HOST_DEVICE Place place_of(Form f, int lane, int column) {
  const int rows = f.m / f.cta_group;
  if (rows == 128) return {lane, column};
  if (rows == 64 && !f.ws && f.cta_group == 1)
    return lane % 32 < 16 ? Place{lane / 32 * 16 + lane % 16, column} : Place{-1, 0};
  return {lane % rows, column + lane / rows * (f.n / (128 / rows))};
}
HOPWELL_HOST_DEVICE int columns_of(Form f) {
  const int rows = f.m / f.cta_group;
  return rows == 128 || (rows == 64 && !f.ws && f.cta_group == 1) ? f.n : f.n / (128 / rows);
}
HOPWELL_HOST_DEVICE float a_value(int row) { return float(1 + row % 3); }
HOPWELL_HOST_DEVICE float b_value(int row) { return float(1 + row % 5); }

#if HOPWELL_HAS_SM100A

template <class F>
HOPWELL_DEVICE void meet() {
  if constexpr (F::kForm.cta_group == 2)
    cluster_sync();
  else
    syncthreads();
}

template <class F, CollectorUsage kUsage>
HOPWELL_DEVICE void multiply(const ProductStorage& s, int k, bool accumulate) {
  constexpr uint64_t kOperand = tcgen05_descriptor({Swizzle::bytes128, 16, 1024});
  constexpr uint32_t kInstruction = instruction_descriptor({.m = F::kForm.m, .n = F::kForm.n});
  const uint64_t a = at_address(kOperand, shared_address(s.a)) + uint64_t(2 * k),
                 b = at_address(kOperand, shared_address(s.b)) + uint64_t(2 * k);
  const uint32_t in_tmem = s.tmem + uint32_t(kAColumn + 8 * k);
  if constexpr (F::kForm.ws && F::kForm.a_in_tmem)
    tcgen05_mma_ws_f16_ts<kUsage>(s.tmem, in_tmem, b, kInstruction, accumulate);
  else if constexpr (F::kForm.ws)
    tcgen05_mma_ws_f16<kUsage>(s.tmem, a, b, kInstruction, accumulate);
  else if constexpr (F::kForm.a_in_tmem)
    tcgen05_mma_f16_ts<F::kForm.cta_group, kUsage>(s.tmem, in_tmem, b, kInstruction, accumulate);
  else
    tcgen05_mma_f16<F::kForm.cta_group, kUsage>(s.tmem, a, b, kInstruction, accumulate);
}

// One thread of the CTA, or of the pair.
template <class F>
HOPWELL_DEVICE void issue_batch(ProductStorage& s, int products, bool accumulate) {
  for (int i = 0; i < products; ++i) {
    if constexpr (!F::kForm.collects)
      multiply<F, CollectorUsage::none>(s, i % 4, accumulate || i > 0);
    else if (i == 0)
      multiply<F, CollectorUsage::fill>(s, 0, accumulate);
    else
      multiply<F, CollectorUsage::use>(s, 0, true);
  }
  if constexpr (F::kForm.cta_group == 2)
    tcgen05_commit_multicast<2>(s.done, 3);
  else
    tcgen05_commit<1>(s.done);
}

template <class F>
HOPWELL_DEVICE void write_operands(ProductStorage& s, int rank) {
  const int t = thread_index(), rows = F::kForm.m / F::kForm.cta_group, b_rows = F::kForm.n / F::kForm.cta_group;
  for (int i = t; i < 32 * rows; i += kProductThreads) {
    const float value = a_value(rank * rows + i / 32);
    s.a[i / 32][i % 32] = pack_bf16(value, value);
  }
  for (int i = t; i < 32 * b_rows; i += kProductThreads) {
    const float value = b_value(rank * b_rows + i / 32);
    s.b[i / 32][i % 32] = pack_bf16(value, value);
  }
  if (t < 128) {
    const Place place = place_of(F::kForm, t, 0);
    const float value = place.row < 0 ? 0 : a_value(rank * rows + place.row);
    uint32_t words[32];
    for (uint32_t& word : words) word = pack_bf16(value, value);
    tmem_store<TmemShape::b32x32>(tmem_address(s.tmem, t / 32 * 32, kAColumn), words);
    tmem_wait_store();
  }
  fence_proxy_async();
  tcgen05_fence_before_thread_sync();
}

HOPWELL_DEVICE void fill_shared(const ProductParams& p, ProductStorage& s) {
  for (int i = 0; i < p.beside.fills; ++i) {
    const int stage = i % kFillStages, use = i / kFillStages;
    if (use > 0) mbarrier_wait(s.filled[stage], uint32_t(use - 1) & 1);
    mbarrier_arrive_expect_tx(s.filled[stage], kFillBytes);
    bulk_load(shared_address(s.fill[stage]), p.from, kFillBytes, s.filled[stage]);
  }
  for (int stage = 0; stage < kFillStages && stage < p.beside.fills; ++stage)
    mbarrier_wait(s.filled[stage], uint32_t((p.beside.fills - 1 - stage) / kFillStages) & 1);
}

HOPWELL_DEVICE void work_beside(const ProductParams& p, const ProductStorage& s, int worker) {
  const int lane = lane_index();
  for (int i = 0; i < p.beside.loads; ++i) {
    uint32_t words[32];
    tmem_load<TmemShape::b32x32>(words, tmem_address(s.tmem, worker % 4 * 32, kAColumn));
    tmem_wait_load(words);
  }
  for (int i = 0; i < p.beside.additions; ++i) {
    const int worker_of_all = block_index() * p.beside.warps + worker;
    const uint32_t line = mixed(uint32_t((worker_of_all * p.beside.additions + i) * 4 + lane / 8)) % kLines;
    red_add_v4(p.sums + line * 32 + lane % 8 * 4, 1, 1, 1, 1);
  }
}

template <class F>
HOPWELL_DEVICE void read_result(const ProductParams& p, const ProductStorage& s) {
  const int warp = warp_index(), lane = lane_index();
  float* const d = p.d + block_index() * 128 * 256;
  for (int half = 0; half < 2; ++half) {
    if (place_of(F::kForm, 16 * half, 0).row < 0) continue;
    for (int c = 0; c < columns_of(F::kForm); c += 8) {
      uint32_t words[4];
      tmem_load<TmemShape::b16x256>(words, tmem_address(s.tmem, warp * 32 + 16 * half, c));
      tmem_wait_load(words);
      for (int i = 0; i < 4; ++i)
        d[(warp * 32 + 16 * half + lane / 4 + i / 2 * 8) * 256 + c + lane % 4 * 2 + i % 2] = bit_cast<float>(words[i]);
    }
  }
}

template <class F>
__global__ void __launch_bounds__(kProductThreads, 1) product_kernel(const __grid_constant__ ProductParams p) {
  auto& s = dynamic_smem<ProductStorage>();
  const int t = thread_index(), warp = warp_index(), rank = F::kForm.cta_group == 2 ? int(cluster_rank()) : 0;
  if (t == 0) {
    mbarrier_init(s.done, 1);
    for (mbarrier& barrier : s.filled) mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  if (warp == 0) tmem_allocate<F::kForm.cta_group>(s.tmem, 512);
  syncthreads();
  write_operands<F>(s, rank);
  meet<F>();
  tcgen05_fence_after_thread_sync();
  const bool issues = t == 0 && rank == 0;
  const uint64_t begin = clock_now();
  if (issues) issue_batch<F>(s, p.products, false);
  mbarrier_wait(s.done, 0);
  const uint64_t first = clock_now() - begin;
  tcgen05_fence_after_thread_sync();
  meet<F>();
  const uint64_t again = clock_now();
  if (issues) issue_batch<F>(s, 2 * p.products, true);
  if (t == 32) fill_shared(p, s);
  if (warp >= kFirstBeside && warp < kFirstBeside + p.beside.warps) work_beside(p, s, warp - kFirstBeside);
  mbarrier_wait(s.done, 1);
  if (t == 0) p.cycles[block_index()] = clock_now() - again - (p.beside.anything() ? 0 : first);
  tcgen05_fence_after_thread_sync();
  if (block_index() < 2 && warp < 4) read_result<F>(p, s);
  tcgen05_fence_before_thread_sync();
  meet<F>();
  if (warp == 0) tmem_deallocate<F::kForm.cta_group>(s.tmem, 512);
}

#endif

inline std::string name_of(Form f) {
  return std::string(f.ws               ? ".ws "
                     : f.cta_group == 2 ? "pair "
                                        : "") +
         "M " + std::to_string(f.m) + " N " + std::to_string(f.n) + (f.a_in_tmem ? " TS" : " SS") +
         (f.collects ? " with a collector" : "");
}

inline bool products_are_right(Form f, const std::vector<float>& d, int products) {
  for (int cta = 0; cta < 2; ++cta)
    for (int lane = 0; lane < 128; ++lane)
      for (int column = 0; column < columns_of(f); ++column) {
        const Place place = place_of(f, lane, column);
        if (place.row < 0) continue;
        const int first = f.cta_group == 2 ? cta * f.m / 2 : 0;
        const float expected = 16.0F * 3 * float(products) * a_value(first + place.row) * b_value(place.column);
        if (d[size_t((cta * 128 + lane) * 256 + column)] != expected) return false;
      }
  return true;
}

inline std::string name_of(const Beside& b) {
  std::string name;
  if (b.fills) name += " beside " + std::to_string(b.fills) + " copies of 16 KB";
  if (b.loads) name += " beside " + std::to_string(b.loads) + " loads of 4 KB";
  if (b.additions) name += " beside " + std::to_string(b.additions) + " additions of 512 B";
  return b.warps ? name + " by each of " + std::to_string(b.warps) + " warps" : name;
}

inline bool additions_are_right(const Beside& b, const std::vector<float>& sums, int ctas) {
  double sum = 0;
  for (const float one : sums) sum += one;
  return sum == 128.0 * b.additions * b.warps * ctas * kLaunches;
}

template <class F>
void measure_form(const Sizes& sizes, std::vector<Measurement>& all, const Beside& beside = {}) {
  const Memory<uint64_t> cycles(size_t(sizes.ctas));
  const Memory<float> d(2 * 128 * 256), sums(size_t{kLines} * 32);
  const Memory<uint32_t> from(some_words(kFillBytes / 4));
  const int products = 4 * sizes.repeats;
  const ProductParams p{products, beside, from.data(), cycles.data(), d.data(), sums.data()};
  run(product_kernel<F>,
      {{uint32_t(sizes.ctas)}, kProductThreads, uint32_t(F::kForm.cta_group), sizeof(ProductStorage)}, p);
  all.push_back(
      {name_of(F::kForm) + name_of(beside), "products", double(beside.anything() ? 2 * products : products),
       cycles.values(),
       products_are_right(F::kForm, d.values(), products) && additions_are_right(beside, sums.values(), sizes.ctas)});
}

template <int kM, int kN, int kCtaGroup, bool kWs>
void measure_operands(const Sizes& sizes, std::vector<Measurement>& all) {
  measure_form<FormOf<kM, kN, kCtaGroup, kWs, false>>(sizes, all);
  measure_form<FormOf<kM, kN, kCtaGroup, kWs, true>>(sizes, all);
}

template <int kM, int kCtaGroup, bool kWs>
void measure_widths(const Sizes& sizes, std::vector<Measurement>& all) {
  measure_operands<kM, 64, kCtaGroup, kWs>(sizes, all);
  measure_operands<kM, 128, kCtaGroup, kWs>(sizes, all);
  measure_operands<kM, 256, kCtaGroup, kWs>(sizes, all);
}

inline void measure_products(const Sizes& sizes, std::vector<Measurement>& all) {
  measure_widths<128, 1, false>(sizes, all);
  measure_widths<64, 1, false>(sizes, all);
  measure_widths<256, 2, false>(sizes, all);
  measure_widths<128, 2, false>(sizes, all);
  measure_widths<64, 1, true>(sizes, all);
  measure_widths<32, 1, true>(sizes, all);
  measure_form<FormOf<64, 128, 1, true, false, true>>(sizes, all);
  measure_form<FormOf<32, 128, 1, true, false, true>>(sizes, all);
  measure_form<FormOf<128, 64, 1, true, false, true>>(sizes, all);
  measure_form<FormOf<128, 64, 1, false, false, true>>(sizes, all);
}

/// Is the port of shared memory additive, do loads from tensor memory disturb products, and do additions pass through that
/// port?
inline void measure_products_beside(const Sizes& sizes, std::vector<Measurement>& all) {
  using Narrow = FormOf<128, 64, 1, false, false>;  // bound by its operands
  using Wide = FormOf<128, 256, 1, false, false>;
  using FromTmem = FormOf<128, 64, 1, false, true>;
  const Beside copies{.fills = 4 * sizes.repeats}, additions{.warps = 8, .additions = 8 * sizes.repeats};
  measure_form<Narrow>(sizes, all, copies);
  measure_form<Wide>(sizes, all, copies);
  measure_form<FromTmem>(sizes, all, copies);
  for (const int warps : {4, 8}) measure_form<Wide>(sizes, all, {.warps = warps, .loads = 16 * sizes.repeats});
  measure_form<Narrow>(sizes, all, additions);
  measure_form<FromTmem>(sizes, all, additions);
}

}  // namespace hopwell::blackwell
