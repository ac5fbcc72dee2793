// Runs the tutorials' kernels on the emulator under many schedules: emulator_example [STEP] [--bug | --report FILE]
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include <hopwell/arch/emu/launch.hpp>
#include <hopwell/arch/emu/numeric.hpp>
#include <hopwell/arch/emu/recording.hpp>
#include "steps.hpp"

namespace emu = hopwell::arch::emu;

namespace {

std::mt19937 chances(1);

std::vector<float> random_numbers(size_t n) {
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> numbers(n);
  for (float& x : numbers) x = emu::from_bf16(emu::to_bf16_bits(uniform(chances)));
  return numbers;
}

std::vector<unsigned short> as_bf16(const std::vector<float>& numbers) {
  std::vector<unsigned short> bits;
  for (const float x : numbers) bits.push_back(emu::to_bf16_bits(x));
  return bits;
}

double largest(double error, double worst) { return error <= worst ? worst : error; }  // NaN is the largest

// Each step's largest error.
double reversal(void (*kernel)(const float*, float*, size_t, bool), bool bug) {
  const std::vector<float> in = random_numbers(4096);
  std::vector<float> out(in.size(), NAN);
  kernel(in.data(), out.data(), in.size(), bug);
  double worst = 0;
  for (size_t i = 0; i < in.size(); ++i)
    worst = largest(std::fabs(double(out[i]) - double(in[in.size() - 1 - i])), worst);
  return worst;
}

double tensor_copies(bool bug) {
  constexpr size_t kRows = 64, kColumns = 96;
  const std::vector<float> in = random_numbers(kRows * kColumns);
  std::vector<float> out(in.size(), NAN);
  transpose(in.data(), out.data(), kRows, kColumns, bug);
  double worst = 0;
  for (size_t r = 0; r < kRows; ++r)
    for (size_t c = 0; c < kColumns; ++c)
      worst = largest(std::fabs(double(out[c * kRows + r]) - double(in[r * kColumns + c])), worst);
  return worst;
}

double product(size_t m_rows, size_t k, bool bug) {
  const std::vector<float> a = random_numbers(m_rows * k), b = random_numbers(64 * k);
  std::vector<float> c(m_rows * 64, NAN);
  if (m_rows == 64)
    warpgroup_tile(as_bf16(a).data(), as_bf16(b).data(), c.data(), bug);
  else if (k == 64)
    tensor_core_tile(as_bf16(a).data(), as_bf16(b).data(), c.data(), bug);
  else
    pipelined_gemm(as_bf16(a).data(), as_bf16(b).data(), c.data(), int(k), bug);
  double worst = 0;
  for (size_t m = 0; m < m_rows; ++m)
    for (size_t n = 0; n < 64; ++n) {
      double sum = 0;
      for (size_t i = 0; i < k; ++i) sum += double(a[m * k + i]) * double(b[n * k + i]);
      worst = largest(std::fabs(sum - double(c[m * 64 + n])), worst);
    }
  return worst;
}

double async_copies(bool bug) { return reversal(reverse_by_threads, bug); }
double warpgroup_product(bool bug) { return product(64, 64, bug); }
double copy_engine(bool bug) { return reversal(reverse, bug); }
double tensor_core(bool bug) { return product(128, 64, bug); }
double pipeline(bool bug) { return product(128, 320, bug); }

struct Step {
  const char* name;
  double (*run)(bool bug);
};
constexpr Step kSteps[] = {
    {"async_copies", async_copies}, {"tensor_copies", tensor_copies}, {"warpgroup_product", warpgroup_product},
    {"copy_engine", copy_engine},   {"tensor_core", tensor_core},     {"pipeline", pipeline}};

// Whether 20 schedules give the right numbers and no finding; prints the first that does not.
bool clean(const Step& step, bool bug) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    emu::Session session({.seed = seed, .async = emu::Async(seed % 3)});
    const double worst = step.run(bug);
    if (session.report.clean() && worst < 1e-4) continue;
    std::printf("%s, schedule %u: the numbers are %s\n%s", step.name, seed, worst < 1e-4 ? "right" : "wrong",
                session.report.text().c_str());
    return false;
  }
  std::printf("%s: 20 schedules, right numbers, no findings\n", step.name);
  return true;
}

// One run, recorded: who waited for whom, what was counted.
bool report(const Step& step, const std::string& file) {
  emu::Session session({.seed = 0});
  emu::Recording recording(emu::kB200);
  step.run(false);
  recording.write_html(file);
  std::printf("%s: %s\n", step.name, file.c_str());
  return session.report.clean();
}

}  // namespace

int main(int argc, char** argv) try {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const bool named = !words.empty() && !words[0].starts_with("--");
  const std::string option = words.size() > size_t(named) ? words[named] : "";
  const bool reports = option == "--report" && named && words.size() == 3;
  bool known = false, right = true;
  if (option.empty() || reports || (option == "--bug" && words.size() == 1 + size_t(named)))
    for (const Step& step : kSteps) {
      if (named && words[0] != step.name) continue;
      known = true;
      right = (reports ? report(step, words[2]) : clean(step, option == "--bug")) && right;
    }
  if (!known) std::puts("emulator_example: expected [STEP] [--bug], or STEP --report FILE; steps:");
  for (const Step& step : kSteps)
    if (!known) std::printf("  %s\n", step.name);
  return known ? !right : 2;
} catch (const std::exception& error) {
  std::printf("emulator_example: %s\n", error.what());
  return 2;
}
