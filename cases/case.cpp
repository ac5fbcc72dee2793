#include "case.hpp"

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "tile/cpu/parallel.hpp"
#include "tile/float16.hpp"

namespace hopwell::cases {
namespace {

// Arrays up to 32 MiB are from one heap: Hopper has a kernel for tensors that are not far from each other.
#ifdef __GLIBC__
[[maybe_unused]] const bool one_heap =
    mallopt(M_MMAP_THRESHOLD, 32 << 20) != 0 && mallopt(M_TRIM_THRESHOLD, 64 << 20) != 0;
#endif

constexpr std::int64_t kGuardBytes = 256;
constexpr auto kGuard = std::byte{0xA5};

DLDataType dlpack_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return {kDLFloat, 32, 1};
    case DType::kFloat16:
      return {kDLFloat, 16, 1};
    case DType::kBFloat16:
      return {kDLBfloat, 16, 1};
    case DType::kInt32:
      return {kDLInt, 32, 1};
    case DType::kInt64:
      return {kDLInt, 64, 1};
    case DType::kFloat8E4m3:
      return {kDlpackFloat8E4m3fn, 8, 1};
    case DType::kFloat4E2m1x2:
      return {kDlpackFloat4E2m1fn, 4, 2};
    default:
      return {kDLUInt, 8, 1};
  }
}

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void store(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

}  // namespace

Random::Random(std::uint64_t seed) {
  for (std::uint64_t& word : state_) {  // SplitMix64
    std::uint64_t z = seed += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    word = z ^ z >> 31;
  }
}

std::uint64_t Random::bits() {
  auto& [a, b, c, d] = state_;
  const std::uint64_t result = std::rotl(a + d, 23) + a, shifted = b << 17;
  c ^= a, d ^= b, b ^= c, a ^= d;
  c ^= shifted;
  d = std::rotl(d, 45);
  return result;
}

// Marsaglia's polar method: a point in the unit circle gives two numbers.
double Random::normal() {
  if (second_normal_) return *std::exchange(second_normal_, std::nullopt);
  double x = 0, y = 0, square = 0;
  do {
    x = 2 * uniform() - 1, y = 2 * uniform() - 1;
    square = x * x + y * y;
  } while (square >= 1 || square == 0);
  const double factor = std::sqrt(-2 * std::log(square) / square);
  second_normal_ = y * factor;
  return x * factor;
}

Array::Array(std::string name, DType dtype, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides)
    : name_(std::move(name)), dtype_(dtype), shape_(std::move(shape)), strides_(std::move(strides)) {
  // The settings of a benchmark may be any numbers, and their product may overflow. No machine has this much memory.
  constexpr std::int64_t kMost = std::int64_t{1} << 48;
  for (const std::int64_t n : shape_)
    if (__builtin_mul_overflow(size_, n, &size_) || size_ > kMost)
      throw std::invalid_argument(name_ + " would have more than 2^48 elements");
  std::vector<std::int64_t> row_major(shape_.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape_.size(); i-- > 0; stride *= std::max<std::int64_t>(shape_[i], 1)) row_major[i] = stride;
  if (strides_.empty()) strides_ = row_major;
  row_major_ = strides_ == row_major;
  if (size_ > 0) {
    extent_ = 1;
    for (std::size_t i = 0; i < shape_.size(); ++i) extent_ += (shape_[i] - 1) * strides_[i];
  }
  memory_.assign(static_cast<std::size_t>(2 * kGuardBytes + extent_ * static_cast<std::int64_t>(size_of(dtype_))),
                 kGuard);
}

Tensor Array::view() const {
  if (device_)
    return {device_.get() + kGuardBytes, dlpack_type(dtype_), shape_, strides_, {kDLCUDA, cuda::device_in_use()}};
  return {const_cast<std::byte*>(data()), dlpack_type(dtype_), shape_, strides_};
}

void Array::to_device() {
  if (!device_) device_ = cuda::allocate(memory_.size());
  cuda::copy_to_device(device_.get(), memory_.data(), memory_.size());
}

void Array::from_device() {
  cuda::synchronize();
  cuda::copy_to_host(memory_.data(), device_.get(), memory_.size());
}

std::byte* Array::data() { return memory_.data() + kGuardBytes; }
const std::byte* Array::data() const { return memory_.data() + kGuardBytes; }

std::int64_t Array::offset(std::int64_t position) const {
  if (row_major_) return position;
  std::int64_t offset = 0;
  for (std::size_t i = shape_.size(); i-- > 0; position /= shape_[i]) offset += position % shape_[i] * strides_[i];
  return offset;
}

double Array::get(std::int64_t position) const {
  const std::byte* at = data() + offset(position) * static_cast<std::int64_t>(size_of(dtype_));
  switch (dtype_) {
    case DType::kFloat32:
      return static_cast<double>(load<float>(at));
    case DType::kFloat16:
      return static_cast<double>(to_float(load<float16>(at)));
    case DType::kBFloat16:
      return static_cast<double>(to_float(load<bfloat16>(at)));
    case DType::kInt32:
      return load<std::int32_t>(at);
    case DType::kInt64:
      return static_cast<double>(load<std::int64_t>(at));
    default:
      return load<std::uint8_t>(at);
  }
}

void Array::set(std::int64_t position, double value) {
  std::byte* at = data() + offset(position) * static_cast<std::int64_t>(size_of(dtype_));
  switch (dtype_) {
    case DType::kFloat32:
      return store(at, static_cast<float>(value));
    case DType::kFloat16:
      return store(at, rounded<float16>(static_cast<float>(value)));
    case DType::kBFloat16:
      return store(at, rounded<bfloat16>(static_cast<float>(value)));
    case DType::kInt32:
      return store(at, static_cast<std::int32_t>(value));
    case DType::kInt64:
      return store(at, static_cast<std::int64_t>(value));
    default:
      return store(at, static_cast<std::uint8_t>(value));
  }
}

Array& Array::fill_normal(Random& random, double scale) {
  constexpr std::int64_t kPart = kElementsOfOneThread;
  if (size_ <= kPart) {
    for (std::int64_t i = 0; i < size_; ++i) set(i, scale * random.normal());
    return *this;
  }
  const std::uint64_t seed = random.bits();
  cpu::parallel_for((size_ + kPart - 1) / kPart, [&](std::int64_t item) {
    const std::int64_t first = item * kPart;
    Random part(seed + static_cast<std::uint64_t>(first));
    for (std::int64_t i = first; i < std::min(first + kPart, size_); ++i) set(i, scale * part.normal());
  });
  return *this;
}

Array& Array::fill(double value) {
  constexpr std::int64_t kPart = kElementsOfOneThread;
  cpu::parallel_for((size_ + kPart - 1) / kPart, [&](std::int64_t item) {
    for (std::int64_t i = item * kPart; i < std::min((item + 1) * kPart, size_); ++i) set(i, value);
  });
  return *this;
}

void Array::poison() {
  const bool integral = dtype_ == DType::kInt32 || dtype_ == DType::kInt64;
  const bool bytes = size_of(dtype_) == 1;
  fill(integral ? -0x5A5A5A5A : bytes ? 0x7F : std::numeric_limits<double>::quiet_NaN());
}

bool Array::only_elements_differ(const std::vector<std::byte>& memory) const {
  std::vector<std::byte> expected = memory;
  const std::size_t width = size_of(dtype_);
  for (std::int64_t i = 0; i < size_; ++i) {
    const auto at = static_cast<std::size_t>(kGuardBytes) + static_cast<std::size_t>(offset(i)) * width;
    std::memcpy(expected.data() + at, memory_.data() + at, width);
  }
  return memory_ == expected;
}

void* Workspace::of(std::size_t bytes, bool on_device) {
  const auto size = static_cast<std::int64_t>(bytes);
  if (memory_ == nullptr || memory_->size() < size || on_device_ != on_device) {
    memory_ = std::make_unique<Array>("workspace", DType::kUInt8, std::vector{size});
    std::memset(memory_->data(), 0xFF, bytes);
    if (on_device) memory_->to_device();
    on_device_ = on_device;
  }
  return memory_->view()->data;
}

bool Workspace::guards_hold() {
  if (memory_ == nullptr) return true;
  if (on_device_) memory_->from_device();
  const Array untouched("workspace", DType::kUInt8, memory_->shape());
  return memory_->only_elements_differ(untouched.memory());
}

void Instance::place_for(const std::string& backend) {
  for (Array& array : arrays) cuda::runs(backend) ? array.to_device() : array.leave_device();
}

std::int64_t number(const Settings& settings, const std::string& key) {
  const auto at = settings.find(key);
  if (at == settings.end()) throw std::invalid_argument("shape has no setting '" + key + "'");
  std::size_t used = 0;
  std::int64_t value = -1;
  try {
    value = std::stoll(at->second, &used);
  } catch (const std::logic_error&) {
    used = 0;
  }
  if (used == 0 || used != at->second.size() || value < 0) {
    throw std::invalid_argument("setting '" + key + "' must be a non-negative number; got '" + at->second + "'");
  }
  return value;
}

const Case& Suite::case_named(const std::string& name) const {
  for (const Case& c : cases)
    if (c.name == name) return c;
  throw std::logic_error(op + " has no case " + name);
}

void leave_to_nightly(Suite& suite, const std::vector<std::string>& globs, std::string_view targets) {
  for (const std::string& glob : globs) {
    bool found = false;
    for (Case& c : suite.cases) {
      if (!matches(c.name, glob)) continue;
      (c.nightly_on += c.nightly_on.empty() ? "" : " ") += targets;
      found = true;
    }
    if (!found) throw std::logic_error(suite.op + " has no case " + glob);
  }
}

Comparison compare(const Output& output) {
  Comparison result{.output = output.array->name(), .failure = {}};
  const Array& array = *output.array;
  const auto count = array.size();
  if (static_cast<std::int64_t>(output.expected.size()) != count)
    throw std::logic_error(array.name() + ": reference has the wrong size");
  if (!output.tolerance.is_given()) throw std::logic_error(array.name() + ": no tolerance is given");
  double error2 = 0, reference2 = 0, slack2 = 0;
  const auto fail = [&](std::int64_t i, const auto& words) {  // reports only the first failure
    if (result.failure.empty()) result.failure = array.name() + "[" + std::to_string(i) + "] is " + words();
  };
  for (std::int64_t i = 0; i < count; ++i) {
    const double got = array.get(i), expected = output.expected[static_cast<std::size_t>(i)];
    const auto pair = [&] { return std::to_string(got) + ", expected " + std::to_string(expected); };
    if (std::isnan(got) != std::isnan(expected) || std::isinf(got) != std::isinf(expected) ||
        (std::isinf(got) && got != expected)) {
      fail(i, pair);
    }
    if (output.tolerance.exact && !std::isnan(expected) && got != expected)
      fail(i, [&] { return pair() + " exactly"; });
    if (!std::isfinite(got) || !std::isfinite(expected)) continue;
    const double slack =
        output.magnitude.empty() ? 0 : output.tolerance.cancelling * output.magnitude[static_cast<std::size_t>(i)];
    const double error = std::abs(got - expected);
    const double bound = std::max(output.tolerance.absolute, output.tolerance.relative * std::abs(expected)) + slack;
    if (error > bound)
      fail(i, [&] { return pair() + ": off by " + std::to_string(error) + ", bound " + std::to_string(bound); });
    if (error > 0) result.worst = std::max(result.worst, error / bound);
    error2 += error * error, reference2 += expected * expected, slack2 += slack * slack;
  }
  if (error2 == 0) return result;
  const double error = std::sqrt(error2), bound = output.tolerance.norm * std::sqrt(reference2) + std::sqrt(slack2);
  result.norm_error = reference2 > 0 ? error / std::sqrt(reference2) : std::numeric_limits<double>::infinity();
  result.worst = std::max(result.worst, error / bound);
  if (error > bound && result.failure.empty()) {
    result.failure = array.name() + ": norm-wise error " + std::to_string(result.norm_error) + ", bound " +
                     std::to_string(bound / std::sqrt(reference2));
  }
  return result;
}

namespace {

// While it lives, the host has a floating-point mode other than the default, another one the next time: calls must not
// show it, and must leave it.
class OtherFloatMode {
 public:
  OtherFloatMode() {
    static std::atomic<std::size_t> count{0};
    constexpr std::array kRounding = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    std::fegetenv(&before_);
    std::fesetround(kRounding[count++ % kRounding.size()]);
#ifdef __SSE2__
    constexpr unsigned kSubnormalsAreZero = 0x8040;  // operands and results
    _mm_setcsr(_mm_getcsr() | kSubnormalsAreZero);
#endif
    mode_ = mode();
  }
  ~OtherFloatMode() { std::fesetenv(&before_); }
  OtherFloatMode(const OtherFloatMode&) = delete;
  OtherFloatMode& operator=(const OtherFloatMode&) = delete;
  [[nodiscard]] bool is_kept() const { return mode() == mode_; }

 private:
  static unsigned mode() {
#ifdef __SSE2__
    constexpr unsigned kFlags = 0x3F;
    return _mm_getcsr() & ~kFlags;
#else
    return static_cast<unsigned>(std::fegetround());
#endif
  }
  std::fenv_t before_{};
  unsigned mode_;
};

// Whether unsupported cases of a backend are recorded. GPUs, and an emulated device profile set by the environment,
// have other numbers of SMs, which some backends test.
bool is_recorded(const std::string& backend) {
  return !cuda::runs(backend) && std::getenv("HOPWELL_EMULATOR_SMS") == nullptr &&
         std::getenv("HOPWELL_EMULATOR_DEVICE") == nullptr;
}
std::string recorded_reason(const Case& c, const std::string& backend) {
  if (!backend.starts_with("emu:")) return "";
  for (const Suite& suite : suites())
    if (suite.op == c.op) return reason_of(suite.unsupported, c.name, backend.substr(4));
  return "";
}
// Whether a backend may reject a case as unsupported with these words.
bool may_refuse(const Case& c, const std::string& backend, const std::string& words) {
  if (!is_recorded(backend)) return true;
  const std::string recorded = recorded_reason(c, backend);
  return !recorded.empty() && words.find(recorded) != std::string::npos;
}

}  // namespace

Instance prepare(const Case& c, std::uint64_t seed) {
  Random random(seed);
  Instance instance = c.make(random);
  instance.reference(instance);  // before the call, because outputs with accumulation still hold their initial values
  for (Output& output : instance.outputs)
    if (!output.accumulates) output.array->poison();
  return instance;
}

Report run(const Case& c, const std::string& backend, std::uint64_t seed, const std::function<void()>& before_second) {
  Instance instance = prepare(c, seed);
  return run(c, instance, backend, before_second);
}

Report run(const Case& c, Instance& instance, const std::string& backend, const std::function<void()>& before_second) {
  std::vector<std::vector<std::byte>> before;
  for (const Array& array : instance.arrays) before.push_back(array.memory());
  const auto written = [&](const Array& array) {
    return std::any_of(instance.outputs.begin(), instance.outputs.end(),
                       [&](const Output& output) { return output.array == &array; });
  };

  Report report;
  std::vector<std::vector<std::byte>> first;
  for (const bool again : {false, true}) {
    if (again && before_second) before_second();
    try {
      instance.place_for(backend);
      // The second call runs in another floating-point mode and, on a CUDA device, in a graph.
      const auto call = [&](Stream stream) {
        std::optional<OtherFloatMode> mode;
        if (again) mode.emplace();
        instance.call(backend.c_str(), stream);
        if (mode && !mode->is_kept()) report.failures.emplace_back("the call changed the floating-point mode");
      };
      if (again && cuda::runs(backend))
        cuda::Graph(call).launch(nullptr);
      else
        call(nullptr);
      if (cuda::runs(backend))
        for (Array& array : instance.arrays) array.from_device();
      if (!instance.workspace->guards_hold()) report.failures.emplace_back("memory outside the workspace was written");
    } catch (const Error& error) {
      report.unsupported = error.status() == HOPWELL_UNSUPPORTED && may_refuse(c, backend, error.what());
      report.failures.emplace_back(error.what());
      return report;
    }
    for (std::size_t i = 0; i < instance.arrays.size(); ++i) {
      Array& array = instance.arrays[i];
      if (!written(array)) {
        if (array.memory() != before[i]) report.failures.push_back(array.name() + ": an input was changed");
        continue;
      }
      if (!array.only_elements_differ(before[i]))
        report.failures.push_back(array.name() + ": memory outside the tensor was written");
      if (again && instance.repeatable && array.memory() != first[i]) {
        report.failures.push_back(array.name() + ": a second call gave other bits");
      }
    }
    if (again) {
      for (std::size_t i = 0; i < instance.arrays.size(); ++i) instance.arrays[i].restore(before[i]);
      break;
    }
    if (is_recorded(backend) && !recorded_reason(c, backend).empty())
      report.failures.emplace_back("runs, although its suite records that " + backend + " does not support it");
    if (instance.verify) {
      if (std::string failure = instance.verify(instance); !failure.empty())
        report.failures.push_back(std::move(failure));
    }
    for (Output& output : instance.outputs) {
      if (instance.verify && output.expected.empty()) continue;
      if (backend != "cpu") output.tolerance = output.on_gpus.value_or(output.tolerance);
      report.comparisons.push_back(compare(output));
      if (const std::string& failure = report.comparisons.back().failure; !failure.empty())
        report.failures.push_back(failure);
    }
    for (std::size_t i = 0; i < instance.arrays.size(); ++i) {
      first.push_back(instance.arrays[i].memory());
      instance.arrays[i].restore(before[i]);
    }
  }
  return report;
}

}  // namespace hopwell::cases
