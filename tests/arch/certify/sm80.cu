// Certification of the sm80 layer. Every kernel is one CTA.
#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/bits.hpp"
#include "arch/sm80/convert.hpp"
#include "arch/sm80/half.hpp"
#include "arch/sm80/matrix.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm80/reduce.hpp"
#include "cases.hpp"
#include "start.hpp"

namespace hopwell::arch::certify {
namespace {

struct Shared {
  alignas(128) uint32_t words[2048];
};

__global__ void ldmatrix_all(const uint32_t* in, uint32_t* out) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  for (int i = t; i < 1024; i += 32) s.words[i] = in[i];
  syncwarp();
  const uint32_t base = shared_address(s.words);
  // Rows in a scrambled order, so that every lane's address matters.
  const uint32_t row = base + uint32_t((t * 7 + 3) % 256) * 16;
  uint32_t r1[1], r2[2], r4[4];
  ldmatrix(r1, row);
  out[t] = r1[0];
  ldmatrix(r2, row);
  for (int i = 0; i < 2; ++i) out[32 + i * 32 + t] = r2[i];
  ldmatrix(r4, row);
  for (int i = 0; i < 4; ++i) out[96 + i * 32 + t] = r4[i];
  ldmatrix<Transpose::yes>(r1, row);
  out[224 + t] = r1[0];
  ldmatrix<Transpose::yes>(r2, row);
  for (int i = 0; i < 2; ++i) out[256 + i * 32 + t] = r2[i];
  ldmatrix<Transpose::yes>(r4, row);
  for (int i = 0; i < 4; ++i) out[320 + i * 32 + t] = r4[i];
}

// Many lanes add to one word. Some add 1, for which there is a special instruction.
__global__ void shared_sums(const uint32_t* in, uint32_t* out) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  if (t < 32) s.words[t] = uint32_t(t);
  syncthreads();
  const uint32_t base = shared_address(s.words);
  red_add_shared(in[t] % 3 != 0, base + 4 * (in[t] / 8 % 16), 1);
  red_add_shared(in[t] % 5 != 0, base + 64 + 4 * (in[t] / 128 % 16), in[t]);
  syncthreads();
  if (t < 32) out[t] = s.words[t];
}

// Many lanes set bits of one word. Which lanes find their bit set depends on timing; the number of these lanes does
// not.
__global__ void shared_bits(const uint32_t* in, uint32_t* out) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  if (t < 32) s.words[t] = 0;
  syncthreads();
  const uint32_t base = shared_address(s.words), bit = 1u << in[t] % 32;
  const bool late = atomic_or_shared(base + 4 * (in[t] / 32 % 4), bit) & bit;
  red_add_shared(late, base + 64, 1);
  syncthreads();
  if (t < 32) out[t] = s.words[t];
}

// Many lanes mark bytes of the same words, and often the same byte.
__global__ void shared_marks(const uint32_t* in, uint32_t* out) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  if (t < 32) s.words[t] = 0;
  syncthreads();
  mark_shared(in[t] % 3 != 0, shared_address(s.words) + in[t] / 8 % 128);
  syncthreads();
  if (t < 32) out[t] = s.words[t];
}

template <bool kBf16>
__global__ void mma(const uint32_t* in, uint32_t* out) {
  const int t = thread_index();
  uint32_t a[4], b[2];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = in[t * 8 + i];
  for (int i = 0; i < 2; ++i) b[i] = in[t * 8 + 4 + i];
  for (int i = 0; i < 4; ++i) d[i] = float(int(in[256 + t * 4 + i] & 0xffff) - 32768) * 0x1p-15f;
  if constexpr (kBf16)
    mma_m16n8k16_bf16(d, a, b);
  else
    mma_m16n8k16_fp16(d, a, b);
  for (int i = 0; i < 4; ++i) out[t * 4 + i] = bit_cast<uint32_t>(d[i]);
}

__global__ void cp_async_sizes(const uint32_t* in, uint32_t* out) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t base = shared_address(s.words);
  cp_async<16>(base + uint32_t(t) * 16, in + 4 * (31 - t), t % 17);
  cp_async<8>(base + 512 + uint32_t(t) * 8, in + 128 + 2 * (31 - t), t % 9);
  cp_async<4>(base + 768 + uint32_t(t) * 4, in + 192 + (31 - t), t % 5);
  cp_async_cached(base + 896 + uint32_t(t) * 16, in + 256 + 4 * t, 16 - t % 3,
                  t % 3 == 0   ? evict_first_policy()
                  : t % 3 == 1 ? evict_last_policy()
                               : evict_normal_policy());
  cp_async_of_line(base + 1408 + uint32_t(t) * 16, in + 256 + 4 * (31 - t), 16 - t % 5);
  cp_async_wait_all();
  syncthreads();
  for (int i = t; i < 480; i += 32) out[i] = s.words[i];
}

__global__ void cp_async_pipeline(const uint32_t* in, uint32_t* out) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t base = shared_address(s.words);
  for (int stage = 0; stage < 2; ++stage) {
    cp_async(base + uint32_t(stage * 2048 + t * 16), in + (stage * 128 + t) * 4);
    cp_async_commit();
  }
  for (int step = 0; step < 6; ++step) {
    cp_async_wait<1>();
    syncthreads();
    for (int i = 0; i < 4; ++i) out[step * 512 + t * 4 + i] = s.words[step % 2 * 512 + (127 - t) * 4 + i];
    syncthreads();
    if (step + 2 < 6) cp_async(base + uint32_t(step % 2 * 2048 + t * 16), in + ((step + 2) * 128 + t) * 4);
    cp_async_commit();
  }
  cp_async_wait_all();
}

__global__ void warp_collectives(const uint32_t* in, uint32_t* out) {
  const int t = thread_index();
  const uint32_t v = in[t];
  out[t] = shuffle(v, int(in[64 + t] & 31));
  out[64 + t] = shuffle_xor(v, 13);
  out[128 + t] = ballot(v & 1);
  out[192 + t] = uint32_t(lane_index() + 32 * warp_index() - thread_index_anew());
}

__global__ void named_barriers(const uint32_t* in, uint32_t* out) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  for (int round = 0; round < 3; ++round) {
    if (t < 32) {
      if (round) barrier_sync(2, 64);
      s.words[t] = in[round * 32 + t];
      barrier_arrive(1, 64);
    } else {
      barrier_sync(1, 64);
      out[round * 32 + t - 32] = s.words[63 - t];
      if (round < 2) barrier_arrive(2, 64);
    }
  }
}

__global__ void reductions(const uint32_t* in, uint32_t* out) {
  const int t = thread_index();
  red_add(reinterpret_cast<float*>(out) + t % 4, bit_cast<float>(in[t]));
  red_add(out + 4 + t % 4, uint32_t(t) * 0x9e3779b9u);
  atomic_add(out + 8, uint32_t(t));
  red_max(out + 9, in[t]);
  red_add(reinterpret_cast<int64_t*>(out + 10), int64_t(uint64_t{in[t]} * 0x9e3779b97f4a7c15u));
}

// Adds two numbers to each word, which is zero before: their order does not matter.
__global__ void special_sums(const uint32_t* in, uint32_t* out) {
  const int t = thread_index();
  for (int i = 0; i < 2; ++i) red_add(reinterpret_cast<float*>(out) + t, bit_cast<float>(in[2 * t + i]));
}

__global__ void grid_indices(const uint32_t*, uint32_t* out) {
  const BlockIndex b = block_index_3d();
  const int cta = (b.z * 2 + b.y) * grid_size() + block_index();
  out[cta * 32 + thread_index()] = uint32_t(block_index_anew() + 10 * b.y + 100 * b.z + 1000 * grid_size());
}

__global__ void conversions(const uint32_t* in, uint32_t* out) {
  const int t = thread_index();
  const float x = bit_cast<float>(in[2 * t]), y = bit_cast<float>(in[2 * t + 1]);
  out[t] = pack_bf16(x, y);
  out[256 + t] = pack_fp16(x, y);
  out[512 + t] = bit_cast<uint32_t>(to_float(fp16{uint16_t(in[t] >> 16)}));
  out[768 + t] = bit_cast<uint32_t>(to_float(to_bf16(x)));
  out[1024 + t] = uint32_t(round_to_int(x));
  out[1280 + t] = bit_cast<uint32_t>(max_nan(x, t % 2 ? y : 0));
}

__global__ void all_fp16(const uint32_t*, uint32_t* out) {
  for (int i = thread_index(); i < 65536; i += 256) out[i] = bit_cast<uint32_t>(to_float(fp16{uint16_t(i)}));
}

__global__ void products_fp16(const uint32_t* in, uint32_t* out) {
  const int t = thread_index();
  out[t] = multiply_fp16(in[t], in[256 + t]);
  out[256 + t] = multiply_fp16(in[t] & 0x83ff87ff, in[256 + t]);  // subnormal and small numbers
}

// Sums that cancel, subnormal sums, and sums near 0 and 1.
__global__ void sums_fp16(const uint32_t* in, uint32_t* out) {
  const int t = thread_index();
  const uint32_t a = in[t], b = in[256 + t], c = in[512 + t], near_one = (c & 0x87ff87ff) | 0x38003800;
  out[t] = fma_fp16(a, b, c);
  out[256 + t] = fma_fp16(a, b, multiply_fp16(a, b) ^ 0x80008000);
  out[512 + t] = fma_fp16(a & 0x83ff87ff, b, c & 0x83ff83ff);
  out[768 + t] = fma_saturated_fp16(a, b, c);
  out[1024 + t] = fma_saturated_fp16(a & 0xbfffbfff, b & 0xbfffbfff, near_one);
  out[1280 + t] = fma_saturated_fp16(a, 0x70007000, multiply_fp16(a, 0x70007000) ^ 0x80008000);
}

__global__ void products_bf16(const uint32_t* in, uint32_t* out) {
  const int t = thread_index();
  out[t] = multiply_bf16(in[t], in[256 + t]);
  out[256 + t] = multiply_bf16(in[t] & 0x81c081c0, (in[256 + t] & 0x83f083f0) | 0x78007800);  // subnormal and large
}

__global__ void bits_and_bytes(const uint32_t* in, uint32_t* out) {
  const int t = thread_index();
  out[t] = select_bits(in[t], in[256 + t], 0x80f0800f) ^ select_bits(in[t], in[256 + t], in[t] >> 3);
  out[256 + t] = permute_bytes<0x7410>(in[t], in[256 + t]);
  out[512 + t] = permute_bytes<0x3265>(in[t], in[256 + t]);
  out[768 + t] = bfind(in[t] >> (in[256 + t] & 31) >> (in[256 + t] >> 5 & 15));
  out[1024 + t] = half_twice<false>(in[t]) ^ half_twice<true>(in[256 + t]);
  out[1280 + t] = permute_signs(in[t], in[256 + t], 0x8888 | (in[t] >> 5 & 0x7777));
}

__global__ void transcendental(const uint32_t* in, uint32_t* out) {
  const int t = thread_index();
  out[t] = bit_cast<uint32_t>(exp2_approx(float(int(in[t] & 0xffff) - 32768) * 0x1p-8f));
  out[256 + t] = bit_cast<uint32_t>(log2_approx(bit_cast<float>((in[256 + t] & 0x3fffffff) + 0x10000000)));
}

// Every kind of float: ex2 of large numbers, lg2 of negative numbers.
__global__ void transcendental_special(const uint32_t* in, uint32_t* out) {
  const int t = thread_index();
  out[t] = bit_cast<uint32_t>(exp2_approx(bit_cast<float>(in[t])));
  out[256 + t] = bit_cast<uint32_t>(log2_approx(bit_cast<float>(in[t])));
}

__global__ void wide_accesses(const uint32_t* in, uint32_t* out) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  prefetch_l2(in + t);
  store_shared_v4(shared_address(s.words) + uint32_t(t) * 16, load_streaming(in + 4 * t));
  syncthreads();
  store_streaming(out + 4 * t, load_shared_v4(shared_address(s.words) + uint32_t(63 - t) * 16));
  store_streaming(out + 256 + 4 * t, load_streaming(in + 4 * t, evict_first_policy()));
  out[512 + t] = load_acquire(in + t) ^ load_relaxed(in + 64 + t);
  store_relaxed_v4(reinterpret_cast<Words4*>(out + 576) + t,
                   load_relaxed_v4(reinterpret_cast<const Words4*>(in) + 63 - t));
  store_vector(out + 832 + 4 * t, load_vector<Words4>(in + 4 * (63 - t)));
}

}  // namespace

void add_sm80_cases(std::vector<Case>& cases) {
  const size_t shared = sizeof(Shared);
  const auto add = [&](const char* name, const char* instructions, Inputs inputs, Compare compare, size_t in_words,
                       size_t out_words, void (*kernel)(const uint32_t*, uint32_t*), uint32_t threads) {
    cases.push_back({name, instructions, inputs, compare, in_words, out_words, [=](uint32_t* in, uint32_t* out) {
                       start(kernel, {.threads = threads, .shared_bytes = shared}, in, out);
                     }});
  };
  add("ldmatrix", "ldmatrix dynamic_smem shared_address thread_index syncwarp", Inputs::bits, Compare::bits, 1024, 448,
      ldmatrix_all, 32);
  const auto add_mma = [&](const char* name, bool bf16, Inputs inputs) {
    add(name, bf16 ? "mma_m16n8k16_bf16" : "mma_m16n8k16_fp16", inputs, Compare::accumulation, 384, 128,
        bf16 ? mma<true> : mma<false>, 32);
  };
  add_mma("mma_bf16", true, Inputs::bf16_unit);
  add_mma("mma_fp16", false, Inputs::fp16_unit);
  add_mma("mma_bf16_special", true, Inputs::bf16_special);
  add_mma("mma_fp16_special", false, Inputs::fp16_special);
  add_mma("mma_bf16_subnormal", true, Inputs::bf16_subnormal);
  add_mma("mma_fp16_subnormal", false, Inputs::fp16_subnormal);
  add("cp_async_sizes",
      "cp_async cp_async_cached cp_async_of_line cp_async_wait_all evict_first_policy evict_last_policy "
      "evict_normal_policy syncthreads",
      Inputs::bits, Compare::bits, 384, 480, cp_async_sizes, 32);
  add("cp_async_pipeline", "cp_async cp_async_commit cp_async_wait", Inputs::bits, Compare::bits, 3072, 3072,
      cp_async_pipeline, 128);
  add("warp_collectives", "shuffle shuffle_xor ballot lane_index warp_index thread_index_anew", Inputs::bits,
      Compare::bits, 128, 256, warp_collectives, 64);
  add("named_barriers", "barrier_sync barrier_arrive", Inputs::bits, Compare::bits, 96, 96, named_barriers, 64);
  add("reductions", "red_add red_max atomic_add", Inputs::integers, Compare::bits, 128, 12, reductions, 128);
  add("shared_sums", "red_add_shared", Inputs::bits, Compare::bits, 128, 32, shared_sums, 128);
  add("shared_bits", "atomic_or_shared red_add_shared", Inputs::bits, Compare::bits, 128, 32, shared_bits, 128);
  add("shared_marks", "mark_shared", Inputs::bits, Compare::bits, 128, 32, shared_marks, 128);
  add("special_sums", "red_add", Inputs::float_small, Compare::bits, 512, 256, special_sums, 256);
  add("conversions", "pack_bf16 pack_fp16 to_float to_bf16 round_to_int max_nan", Inputs::float_wide, Compare::bits,
      512, 1536, conversions, 256);
  add("all_fp16", "to_float", Inputs::bits, Compare::bits, 1, 65536, all_fp16, 256);
  add("products_fp16", "multiply_fp16", Inputs::bits, Compare::bits, 512, 512, products_fp16, 256);
  add("sums_fp16", "fma_fp16 fma_saturated_fp16", Inputs::bits, Compare::bits, 768, 1536, sums_fp16, 256);
  add("products_bf16", "multiply_bf16", Inputs::bits, Compare::bits, 512, 512, products_bf16, 256);
  add("bits_and_bytes", "select_bits permute_bytes permute_signs bfind half_twice", Inputs::bits, Compare::bits, 512,
      1536, bits_and_bytes, 256);
  add("transcendental", "exp2_approx log2_approx", Inputs::bits, Compare::approximate, 512, 512, transcendental, 256);
  add("transcendental_special", "exp2_approx log2_approx", Inputs::float_wide, Compare::approximate, 256, 512,
      transcendental_special, 256);
  add("wide_accesses",
      "prefetch_l2 load_streaming store_streaming load_shared_v4 store_shared_v4 load_acquire load_relaxed "
      "load_relaxed_v4 store_relaxed_v4 load_vector store_vector",
      Inputs::bits, Compare::bits, 256, 1088, wide_accesses, 64);
  cases.push_back({"grid_indices", "block_index block_index_anew block_index_3d grid_size", Inputs::bits, Compare::bits,
                   1, 12 * 32, [=](uint32_t* in, uint32_t* out) {
                     start(grid_indices, {.grid = {3, 2, 2}, .threads = 32, .shared_bytes = shared}, in, out);
                   }});
}

}  // namespace hopwell::arch::certify
