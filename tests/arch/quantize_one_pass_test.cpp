// The one-pass kernel of nvfp4_quantize, whose CTAs exchange their amax in a workspace of arbitrary contents, while CTA
// 0, which starts the exchange, is late. Then launches it again with the same tag and the workspace of the first
// launch, as a CUDA graph does. The public interface gives every launch its own tag.
#define HOPWELL_TARGET emu_again

#include "ops/nvfp4_quantize/one_pass.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "arch/emu/launch.hpp"
#include "harness.hpp"

namespace hopwell::ops::nvfp4_quantize::HOPWELL_TARGET {
namespace {

// Sized so that every warp of the CTAs has an item.
constexpr uint32_t kCtas = 3, kItems = kCtas * OnePassConfig::kWarps + 5;
constexpr size_t kNumbers = size_t{kItems} * OnePassConfig::kItemNumbers, kBlock = 16;
// Result for the largest number: the largest values of e2m1 and e4m3.
constexpr float kLargestCode = 6, kLargestScale = 448;
constexpr uint8_t kLargestScaleBits = 0x7e, kHalfOfIt = 0x76;

bf16 power_of_two(int exponent) { return {uint16_t((127 + exponent) << 7)}; }

struct Quantized {
  arch::emu::Report report;
  float global_scale = 0;
  std::vector<uint8_t> codes, scales;
};

Quantized launch_late(const std::vector<bf16>& x, const AmaxExchange& exchange, uint64_t seed) {
  Quantized out{{}, 0, std::vector<uint8_t>(kNumbers / 2), std::vector<uint8_t>(kNumbers / kBlock)};
  const OnePassParams<bf16> params{x.data(), out.codes.data(), out.scales.data(), &out.global_scale, kItems, exchange};
  arch::emu::Options options = arch::test::options_for(seed);
  options.late_cta = 0;
  options.max_switches = 3'000'000;  // threads that wait for a failed exchange poll for ever
  out.report =
      arch::emu::launch({{kCtas, 1, 1}, {OnePassConfig::kThreads, 1, 1}, {kCtas, 1, 1}, sizeof(OnePassStorage)},
                        options, [&] { nvfp4_quantize_one_pass<bf16>(params); });
  return out;
}

TEST(QuantizeOnePass, TakesNothingFromTheWorkspaceWithCta0Late) {
  for (uint64_t seed = 0; seed < arch::test::schedules(6); ++seed) {
    // Possible contents from another launch: one more arrival completes the count, no value is as large as the maximum,
    // and half of the tag is the same.
    std::vector<uint32_t> words(AmaxExchange::kWords, ~0u);
    const AmaxExchange exchange{words.data(), {{3, 5}}};
    *exchange.tag_word(0) = exchange.tag.words[0];
    *exchange.amax() = arch::bit_cast<uint32_t>(1e30F), *exchange.arrived() = kCtas - 1;
    // The second launch finds the workspace of the first one, and has a smaller maximum.
    for (const int exponent : {4, -4}) {
      std::vector<bf16> x(kNumbers, power_of_two(exponent - 6));
      for (size_t i = 0; i < kNumbers; i += kBlock) x[i] = power_of_two(exponent - 1);  // of each block
      x[0] = power_of_two(exponent);                                                    // of all; only CTA 0 has it
      const Quantized out = launch_late(x, exchange, seed);
      ASSERT_TRUE(out.report.clean()) << "seed " << seed << ", 2^" << exponent << "\n" << out.report.text();
      const float largest = to_fp32(power_of_two(exponent));
      EXPECT_FLOAT_EQ(out.global_scale, largest / (kLargestCode * kLargestScale));
      std::vector<uint8_t> scales(out.scales.size(), kHalfOfIt);
      scales[0] = kLargestScaleBits;
      EXPECT_EQ(out.scales, scales);
      EXPECT_NE(*exchange.tag_word(0), exchange.tag.words[0]) << "the tag is not erased";
    }
  }
}

}  // namespace
}  // namespace hopwell::ops::nvfp4_quantize::HOPWELL_TARGET
