// The kernels of tests/arch/kernels: correct results compared with fp64, no finding over 50 seeds, and every
// synchronisation call is necessary.
#include "kernels/kernels.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <ctime>
#include <random>
#include <vector>

#include "arch/emu/launch.hpp"
#include "arch/emu/numeric.hpp"
#include "arch/emu/recording.hpp"
#include "arch/emu/work.hpp"
#include "harness.hpp"
#include "mutant.hpp"

namespace hopwell::arch::kernels {
namespace {

std::vector<bf16> random_bf16(std::mt19937& random, size_t count) {
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<bf16> v(count);
  for (bf16& x : v) x.bits = emu::to_bf16_bits(uniform(random));
  return v;
}

/// The larger error; NaN stays NaN.
double worse(double worst, double error) { return std::isnan(worst) || error <= worst ? worst : error; }

/// A kernel with its inputs. run() returns the largest error of its outputs compared with fp64.
struct Subject {
  std::string name;
  std::function<double()> run;
  double tolerance;
};

Subject wgmma_subject() {
  constexpr int m = 128, n = 128, k = 320;
  std::mt19937 random(1);
  const auto a = random_bf16(random, m * k), b = random_bf16(random, n * k);
  return {"wgmma_gemm",
          [a, b] {
            std::vector<float> c(m * n, NAN);
            wgmma_gemm(a.data(), b.data(), c.data(), m, n, k);
            double worst = 0;
            for (int i = 0; i < m; ++i)
              for (int j = 0; j < n; ++j) {
                double sum = 0;
                for (int x = 0; x < k; ++x)
                  sum += double(to_float(a[size_t(i * k + x)])) * to_float(b[size_t(j * k + x)]);
                const double error = std::fabs(sum - double(c[size_t(i * n + j)]));
                worst = worse(worst, error);
              }
            return worst;
          },
          1e-4};
}

Subject gather_subject(int cta_group) {
  constexpr int n = 64, k = 320, keys = 40;
  const int m = 128 * cta_group;
  std::mt19937 random(2);
  const auto a = random_bf16(random, keys * k), b = random_bf16(random, n * k);
  std::vector<int> rows(size_t(m), 0);
  for (int& r : rows) r = int(random() % 44) - 2;  // some out of range: zeros
  return {"tcgen05_gather_gemm, cta_group " + std::to_string(cta_group),
          [=] {
            std::vector<float> c(size_t(m * n), NAN);
            tcgen05_gather_gemm(cta_group, a.data(), keys, rows.data(), b.data(), c.data(), k);
            double worst = 0;
            for (int i = 0; i < m; ++i)
              for (int j = 0; j < n; ++j) {
                double sum = 0;
                const int row = rows[size_t(i)];
                if (row >= 0 && row < keys)
                  for (int x = 0; x < k; ++x)
                    sum += double(to_float(a[size_t(row * k + x)])) * to_float(b[size_t(j * k + x)]);
                const double error = std::fabs(sum - double(c[size_t(i * n + j)]));
                worst = worse(worst, error);
              }
            return worst;
          },
          1e-4};
}

Subject nvfp4_subject() {
  static constexpr int m = 128, n = 64, k = 1024;
  std::mt19937 random(3);
  std::vector<uint8_t> a(m * k / 2), b(n * k / 2), sa(size_t(k / 64 * 512)), sb(size_t(k / 64 * 512));
  for (auto* v : {&a, &b})
    for (uint8_t& x : *v) x = uint8_t(random());
  for (auto* v : {&sa, &sb})
    for (uint8_t& x : *v) x = uint8_t(0x28 + random() % 32);  // scales around one
  const auto decode = [](const std::vector<uint8_t>& codes, const std::vector<uint8_t>& scales, int rows) {
    std::vector<double> values(size_t(rows * k));
    for (int row = 0; row < rows; ++row)
      for (int x = 0; x < k; ++x) {
        const uint8_t byte = codes[size_t(row * k / 2 + x / 2)];
        const size_t scale = size_t(x / 64 * 512 + row % 32 * 16 + row / 32 * 4 + x % 64 / 16);
        values[size_t(row * k + x)] =
            double(emu::from_e2m1(uint8_t(byte >> 4 * (x % 2) & 15))) * double(emu::from_e4m3(scales[scale]));
      }
    return values;
  };
  const std::vector<double> left = decode(a, sa, m), right = decode(b, sb, n);
  std::vector<double> expected(m * n), size(m * n);
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j)
      for (int x = 0; x < k; ++x) {
        const double product = left[size_t(i * k + x)] * right[size_t(j * k + x)];
        expected[size_t(i * n + j)] += product;
        size[size_t(i * n + j)] += std::fabs(product);
      }
  return {"nvfp4_gemm",
          [=] {
            std::vector<float> c(m * n, NAN);
            nvfp4_gemm(a.data(), sa.data(), b.data(), sb.data(), c.data(), k);
            double worst = 0;
            for (size_t i = 0; i < c.size(); ++i) worst = worse(worst, std::fabs(expected[i] - double(c[i])) / size[i]);
            return worst;
          },
          1e-5};
}

struct FlowData {
  static constexpr int keys = 200;
  int blocks;
  std::vector<bf16> q, d_out, kv;
  std::vector<int> indices;
  std::vector<float> lse, delta;
  std::vector<double> dq, dkv;  // expected

  explicit FlowData(int n) : blocks(n) {
    std::mt19937 random(4);
    std::uniform_real_distribution<float> uniform(-1, 1);
    q = random_bf16(random, 64 * 576);
    d_out = random_bf16(random, 64 * 512);
    kv = random_bf16(random, keys * 576);
    for (int i = 0; i < 64 * blocks; ++i) indices.push_back(int(random() % keys));
    indices[5] = -1;
    indices[40] = keys + 3;
    for (int h = 0; h < 64; ++h) lse.push_back(3 + uniform(random)), delta.push_back(uniform(random));
    reference();
  }
  void reference() {
    constexpr double scale = 1.0 / 24;
    dq.assign(64 * 576, 0);
    dkv.assign(keys * 576, 0);
    const auto rounded = [](double x) { return double(emu::from_bf16(emu::to_bf16_bits(float(x)))); };
    for (int key : indices) {
      if (key < 0 || key >= keys) continue;
      const auto k = [&](int d) { return double(to_float(kv[size_t(key * 576 + d)])); };
      for (int h = 0; h < 64; ++h) {
        double s = 0, dp = 0;
        for (int d = 0; d < 576; ++d) s += double(to_float(q[size_t(h * 576 + d)])) * k(d);
        for (int d = 0; d < 512; ++d) dp += double(to_float(d_out[size_t(h * 512 + d)])) * k(d);
        const double p = std::exp2(s * scale * 1.4426950408889634 - double(lse[size_t(h)])),
                     ds = rounded(p * (dp - double(delta[size_t(h)])) * scale);
        for (int d = 0; d < 576; ++d) {
          dq[size_t(h * 576 + d)] += ds * k(d);
          dkv[size_t(key * 576 + d)] += ds * double(to_float(q[size_t(h * 576 + d)])) +
                                        (d < 512 ? rounded(p) * double(to_float(d_out[size_t(h * 512 + d)])) : 0);
        }
      }
    }
  }
  double run() const {
    std::vector<float> got_dq(dq.size(), NAN), got_dkv(dkv.size(), 0);
    mla_backward_flow({q.data(), d_out.data(), kv.data(), indices.data(), lse.data(), delta.data(), got_dq.data(),
                       got_dkv.data(), 1.f / 24, blocks, keys});
    double worst = 0;
    const auto compare = [&](const std::vector<double>& expected, const std::vector<float>& got) {
      for (size_t i = 0; i < got.size(); ++i) {
        const double error = std::fabs(expected[i] - double(got[i]));
        worst = worse(worst, error);
      }
    };
    compare(dq, got_dq);
    compare(dkv, got_dkv);
    return worst;
  }
};

Subject flow_subject(int blocks) {
  return {"mla_backward_flow", [data = FlowData(blocks)] { return data.run(); },
          1e-2};  // a rounding of P or dS to bf16 may differ
}

std::vector<Subject> subjects() {
  return {wgmma_subject(), gather_subject(1), gather_subject(2), nvfp4_subject(), flow_subject(3)};
}

/// One test per kernel, so that they run in parallel.
class Kernels : public testing::TestWithParam<size_t> {};

// 12 seeds; in `make nightly` 50 times HOPWELL_EMULATOR_SCHEDULES.
TEST_P(Kernels, RightAndCleanOverManySeeds) {
  const Subject subject = subjects()[GetParam()];
  const uint64_t seeds = test::schedules(1) > 1 ? test::schedules(50) : 12;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    emu::Session session(test::options_for(seed));
    const double error = subject.run();
    ASSERT_LE(error, subject.tolerance) << subject.name << ", seed " << seed;
    ASSERT_TRUE(session.report.clean()) << subject.name << ", seed " << seed << "\n" << session.report.text();
  }
}

// A block of 64 keys with 384 threads and 116 tensor-core operations. The target is 6 ms on one core.
TEST(BackwardFlow, RightCleanAndFast) {
  constexpr int kBlocks = 6;
  const Subject subject = flow_subject(kBlocks);
  double best = 1e9;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    emu::Session session(test::options_for(seed));
    const std::clock_t start = std::clock();  // of this process only: other load on the machine does not count
    const double error = subject.run();
    best = std::min(best, double(std::clock() - start) * 1e3 / CLOCKS_PER_SEC / kBlocks);
    ASSERT_LE(error, subject.tolerance) << "seed " << seed;
    ASSERT_TRUE(session.report.clean()) << "seed " << seed << "\n" << session.report.text();
  }
  std::printf("mla_backward_flow: %.2f ms of one core a block of 64 keys, checker on\n", best);
}

// Demand of a block of 64 keys: the difference between two launches that differ by one block.
TEST(BackwardFlow, AsksForWhatItsShapesSay) {
  const auto count = [](int blocks) {
    const emu::WorkCount work(emu::kB200);
    emu::Session session({});
    flow_subject(blocks).run();
    return work.total();
  };
  const emu::Work one = count(1), two = count(2);
  EXPECT_EQ(two.products - one.products, 116U);
  EXPECT_EQ(two.operand_bytes - one.operand_bytes, 589824U);
  EXPECT_DOUBLE_EQ(two.tensor_cycles - one.tensor_cycles, 589824.0 / 128);  // operand reads bound every product here
  EXPECT_EQ(two.gathers - one.gathers, 16U * 9);                            // of four rows, for each panel of 64
  EXPECT_EQ(two.copied_bytes - one.copied_bytes, 64U * 576 * 2);
  EXPECT_EQ(two.tmem_loaded - one.tmem_loaded, (2 * 64 + 576) * 64U * 4);  // S, dP, dK
  EXPECT_EQ(two.exponentials - one.exponentials, 64U * 64);
  EXPECT_EQ(two.added_bytes - one.added_bytes + two.added_scalars - one.added_scalars, 576U * 64 * 4);
}

// The times of a recording follow from the kernel's barriers, not from the order in which the emulator ran its threads.
TEST_P(Kernels, HaveTheSameTimelineUnderEverySchedule) {
  const Subject subject = subjects()[GetParam()];
  std::vector<double> ends;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    emu::Options options = test::options_for(seed);
    options.spurious_wakeups = 0;
    emu::Session session(options);
    emu::Recording recording;
    subject.run();
    ends.push_back(recording.launches.at(0).end);
    EXPECT_EQ(ends.back(), ends.front()) << subject.name << ", seed " << seed;
    EXPECT_GT(ends.back(), 100);
  }
}

// Leaves out one synchronisation call of the source at a time. Some seed must detect it, by a finding or by wrong
// results.
TEST_P(Kernels, EverySynchronisationCallIsNeeded) {
  const Subject subject = subjects()[GetParam()];
  std::vector<emu::SynchronisationCount> counts;
  {
    emu::Session session(test::options_for(0));
    subject.run();
    counts = session.report.synchronisation;
  }
  ASSERT_GE(counts.size(), 8u) << subject.name;
  for (const emu::SynchronisationCount& counted : counts) {
    const emu::SynchronisationCall& call = counted.call;
    if (test::is_kept(call.where)) continue;
    const std::string name = call.instruction + " at " + emu::to_string(call.where);
    const test::Verdict mutant = test::in_child([&] {
      bool noticed = false;
      for (uint64_t seed = 0; seed < 6 && !noticed; ++seed) {
        emu::Options options = test::options_for(seed);
        options.leave_out = call;
        emu::Session session(options);
        const double error = subject.run();
        noticed = !session.report.clean() || !(error <= subject.tolerance);
      }
      return noticed;
    });
    EXPECT_TRUE(mutant.noticed) << subject.name << ": " << name << " can be left out unnoticed";
    if (!mutant.how.empty()) std::printf("%s: noticed by %s\n", name.c_str(), mutant.how.c_str());
  }
}

TEST(Mutants, EndNothingButThemselves) {
  EXPECT_FALSE(test::in_child([] { return false; }).noticed);
  const test::Verdict noticed = test::in_child([] { return true; });
  EXPECT_TRUE(noticed.noticed && noticed.how.empty());
  const test::Verdict crash = test::in_child([] { return raise(SIGSEGV) == 0; });
  EXPECT_TRUE(crash.noticed);
  EXPECT_EQ(crash.how, "a crash: Segmentation fault");
  const test::Verdict hang = test::in_child(
      [] {
        volatile bool for_ever = true;
        while (for_ever) {
        }
        return false;
      },
      1);
  EXPECT_TRUE(hang.noticed);
  EXPECT_EQ(hang.how, "a hang");
  EXPECT_EQ(test::in_child([]() -> bool { throw 1; }).how, "an exception");
}

INSTANTIATE_TEST_SUITE_P(Each, Kernels, testing::Range(size_t{0}, size_t{5}));

}  // namespace
}  // namespace hopwell::arch::kernels
