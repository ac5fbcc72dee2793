// Certification of wgmma: shared memory is filled with random numbers, so that the result shows which numbers an
// operand reads.
#include "arch/sm90/tma.hpp"
#include "arch/sm90/wgmma.hpp"
#include "cases.hpp"
#include "start.hpp"

namespace hopwell::arch::certify {
namespace {

constexpr int kWords = 16384;  // 64 KiB of operands
struct Shared {
  alignas(1024) uint32_t words[kWords];
};

// Different strides, with which every operand of up to 256 × 16 elements stays inside of the 64 KiB.
HOPWELL_HOST_DEVICE constexpr OperandLayout layout(Swizzle swizzle, Major major, bool b) {
  if (major == Major::k)
    return swizzle == Swizzle::none
               ? OperandLayout{swizzle, b ? 5120u : 2048u, b ? 144u : 256u}
               : OperandLayout{swizzle, 16, (128u << int(swizzle)) + (b ? 0u : 128u << int(swizzle))};
  if (swizzle == Swizzle::none) return {swizzle, b ? 4608u : 2048u, 128};
  return {swizzle, (128u << int(swizzle)) * 2, 128u << int(swizzle)};
}

HOPWELL_DEVICE void fill(Shared& s, const uint32_t* in) {
  for (int i = thread_index(); i < kWords; i += 128) s.words[i] = in[i];
  fence_proxy_async();
  syncthreads();
}

template <int kHalfN>
HOPWELL_DEVICE void write_out(const float (&d)[kHalfN], uint32_t* out) {
  HOPWELL_UNROLL
  for (int i = 0; i < kHalfN; ++i) out[i * 128 + thread_index()] = bit_cast<uint32_t>(d[i]);
}

// Two chained products into one accumulator, in two commit groups. (nvcc takes no structs as template arguments of
// kernels.)
template <int kN, WgmmaType kType, Major kMajorA, Major kMajorB, Swizzle kSwizzleA, Swizzle kSwizzleB, bool kNegateA>
__global__ void __launch_bounds__(128) products_ss(const uint32_t* in, uint32_t* out) {
#if HOPWELL_HAS_SM90A
  constexpr WgmmaOptions kOptions{.type = kType, .a_major = kMajorA, .b_major = kMajorB, .negate_a = kNegateA};
  auto& s = dynamic_smem<Shared>();
  fill(s, in);
  const uint32_t base = shared_address(s.words);
  float d[kN / 2];
  HOPWELL_UNROLL
  for (int i = 0; i < kN / 2; ++i) d[i] = 0.5f;
  const uint64_t a = wgmma_descriptor(layout(kSwizzleA, kOptions.a_major, false)),
                 b = wgmma_descriptor(layout(kSwizzleB, kOptions.b_major, true));
  wgmma_fence();
  wgmma_ss<kOptions>(d, at_address(a, base), at_address(b, base + 16384), true);
  wgmma_commit();
  wgmma_ss<kOptions>(d, at_address(a, base + 8192), at_address(b, base + 32768), true);
  wgmma_commit();
  wgmma_wait<1>();
  wgmma_wait<0>(d);
  write_out(d, out);
#endif
}

// kOffset: byte offset of B from the start of a swizzle pattern.
template <int kN, WgmmaType kType, Major kMajorB, Swizzle kSwizzle, bool kNegateB, int kOffset = 0>
__global__ void __launch_bounds__(128) products_rs(const uint32_t* in, uint32_t* out) {
#if HOPWELL_HAS_SM90A
  constexpr WgmmaOptions kOptions{.type = kType, .b_major = kMajorB, .negate_b = kNegateB};
  auto& s = dynamic_smem<Shared>();
  fill(s, in);
  uint32_t a[4];
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) a[i] = in[thread_index() * 4 + i];
  float d[kN / 2];
  wgmma_fence();
  wgmma_rs<kOptions>(
      d, a,
      at_address(wgmma_descriptor(layout(kSwizzle, kOptions.b_major, true)), shared_address(s.words) + 16384 + kOffset),
      false);
  wgmma_commit();
  wgmma_wait<0>(d);
  write_out(d, out);
#endif
}

// A row of 64 e4m3 is a chain of two products, a row of 32 one product.
template <int kN, Swizzle kSwizzle, bool kNegateA, bool kNegateB, int kSteps>
__global__ void __launch_bounds__(128) products_rs_e4m3(const uint32_t* in, uint32_t* out) {
#if HOPWELL_HAS_SM90A
  constexpr WgmmaOptions kOptions{.type = WgmmaType::e4m3, .negate_a = kNegateA, .negate_b = kNegateB};
  auto& s = dynamic_smem<Shared>();
  fill(s, in);
  uint32_t a[kSteps][4];
  HOPWELL_UNROLL
  for (int i = 0; i < 4 * kSteps; ++i) a[i / 4][i % 4] = in[thread_index() * 8 + i];
  const uint64_t b = at_address(wgmma_descriptor(layout(kSwizzle, Major::k, true)), shared_address(s.words) + 16384);
  float d[kN / 2];
  wgmma_fence();
  HOPWELL_UNROLL
  for (int step = 0; step < kSteps; ++step) wgmma_rs<kOptions>(d, a[step], b + uint64_t(step) * (32 >> 4), step > 0);
  wgmma_commit();
  wgmma_wait<0>(d);
  write_out(d, out);
#endif
}

using Kernel = void (*)(const uint32_t*, uint32_t*);
void add(std::vector<Case>& cases, const std::string& name, Inputs inputs, int n, Kernel kernel) {
  const bool rs = name.starts_with("wgmma_rs"), e4m3 = inputs == Inputs::e4m3_unit || inputs == Inputs::e4m3_special;
  cases.push_back({name,
                   std::string(rs ? "wgmma_rs" : "wgmma_ss") + " wgmma_fence wgmma_commit wgmma_wait pin_registers",
                   inputs, e4m3 ? Compare::accumulation_e4m3 : Compare::accumulation, kWords, size_t(n / 2 * 128),
                   [kernel](uint32_t* in, uint32_t* out) {
                     start(kernel, {.threads = 128, .shared_bytes = sizeof(Shared)}, in, out);
                   }});
}

template <int kN>
void add_every_n(std::vector<Case>& cases) {
  if constexpr (kN > 0) {
    add_every_n<kN - 8>(cases);
    add(cases, "wgmma_ss_n" + std::to_string(kN), Inputs::bf16_unit, kN,
        products_ss<kN, WgmmaType::bf16, Major::k, Major::k, Swizzle::bytes128, Swizzle::bytes128, false>);
    add(cases, "wgmma_rs_n" + std::to_string(kN), Inputs::bf16_unit, kN,
        products_rs<kN, WgmmaType::bf16, Major::k, Swizzle::bytes128, false>);
  }
}

template <WgmmaType kType, Major kA, Major kB, Swizzle kSwizzle>
void add_layout(std::vector<Case>& cases) {
  const char* swizzles[] = {"none", "32", "64", "128"};
  add(cases,
      std::string("wgmma_") + (kType == WgmmaType::bf16 ? "bf16" : "fp16") + (kA == Major::k ? "_ak" : "_amn") +
          (kB == Major::k ? "_bk" : "_bmn") + "_swizzle_" + swizzles[int(kSwizzle)],
      kType == WgmmaType::bf16 ? Inputs::bf16_unit : Inputs::fp16_unit, 64,
      products_ss<64, kType, kA, kB, kSwizzle, kSwizzle, false>);
}
template <WgmmaType kType, Swizzle kSwizzle>
void add_majors(std::vector<Case>& cases) {
  add_layout<kType, Major::k, Major::k, kSwizzle>(cases);
  add_layout<kType, Major::k, Major::mn, kSwizzle>(cases);
  add_layout<kType, Major::mn, Major::k, kSwizzle>(cases);
  add_layout<kType, Major::mn, Major::mn, kSwizzle>(cases);
}
template <WgmmaType kType>
void add_swizzles(std::vector<Case>& cases) {
  add_majors<kType, Swizzle::none>(cases);
  add_majors<kType, Swizzle::bytes32>(cases);
  add_majors<kType, Swizzle::bytes64>(cases);
  add_majors<kType, Swizzle::bytes128>(cases);
}

}  // namespace

void add_wgmma_cases(std::vector<Case>& cases) {
  add_every_n<256>(cases);
  add_swizzles<WgmmaType::bf16>(cases);
  add_swizzles<WgmmaType::fp16>(cases);
  add(cases, "wgmma_negate_a", Inputs::bf16_unit, 32,
      products_ss<32, WgmmaType::bf16, Major::k, Major::k, Swizzle::bytes128, Swizzle::bytes64, true>);
  add(cases, "wgmma_rs_fp16_bmn_negate_b", Inputs::fp16_unit, 128,
      products_rs<128, WgmmaType::fp16, Major::mn, Swizzle::bytes64, true>);
  add(cases, "wgmma_rs_bmn_inside_swizzle", Inputs::bf16_unit, 32,
      products_rs<32, WgmmaType::bf16, Major::mn, Swizzle::bytes128, false, 64>);
  add(cases, "wgmma_ss_bf16_special", Inputs::bf16_special, 64,
      products_ss<64, WgmmaType::bf16, Major::k, Major::k, Swizzle::bytes128, Swizzle::bytes128, false>);
  add(cases, "wgmma_rs_fp16_special", Inputs::fp16_special, 64,
      products_rs<64, WgmmaType::fp16, Major::k, Swizzle::bytes128, false>);
  add(cases, "wgmma_rs_e4m3", Inputs::e4m3_unit, 64, products_rs_e4m3<64, Swizzle::bytes128, false, false, 1>);
  add(cases, "wgmma_rs_e4m3_chained", Inputs::e4m3_unit, 64, products_rs_e4m3<64, Swizzle::bytes128, false, false, 2>);
  add(cases, "wgmma_rs_e4m3_swizzle_64", Inputs::e4m3_unit, 64, products_rs_e4m3<64, Swizzle::bytes64, true, false, 2>);
  add(cases, "wgmma_rs_e4m3_swizzle_32", Inputs::e4m3_unit, 64, products_rs_e4m3<64, Swizzle::bytes32, false, true, 1>);
  add(cases, "wgmma_rs_e4m3_swizzle_none", Inputs::e4m3_unit, 64, products_rs_e4m3<64, Swizzle::none, true, true, 1>);
  add(cases, "wgmma_rs_e4m3_special", Inputs::e4m3_special, 64,
      products_rs_e4m3<64, Swizzle::bytes128, false, false, 2>);
}

}  // namespace hopwell::arch::certify
