// Cases: inputs, float64 reference, tolerance, FLOPs and bytes of one operator call. The C++ tests, `hopwell check` and
// `hopwell bench` all run them, on every available backend.
#pragma once

#include <hopwell/hopwell.hpp>

#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cuda.hpp"
#include "runtime/dtype.hpp"
#include "unsupported.hpp"

namespace hopwell::cases {

// Random numbers of a case: the same seed gives the same inputs on every machine. Does not use the standard library's
// engines, because under a sanitizer the linker could pick template instances that the tests have compiled.
class Random {
 public:
  explicit Random(std::uint64_t seed);
  std::uint64_t bits();                                                     // xoshiro256++
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1)
  double normal();                                                          // mean 0, variance 1
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(uniform() * static_cast<double>(n));
  }  // [0, n)

 private:
  std::array<std::uint64_t, 4> state_;
  std::optional<double> second_normal_;  // normal() makes them in pairs
};

// All threads fill inputs with more elements, each part from its own seed.
constexpr std::int64_t kElementsOfOneThread = 1 << 20;

// A tensor of a case: memory with guard zones, any strides. Elements are read and written as double, rounded to the
// dtype, in host memory. to_device and from_device copy to and from device memory.
class Array {
 public:
  // Row-major unless strides (in elements, non-negative) are given. Gaps between strided elements and the guards hold a
  // known pattern.
  Array(std::string name, DType dtype, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides = {});

  [[nodiscard]] Tensor view() const;  // of the device copy while there is one
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] const std::vector<std::int64_t>& shape() const { return shape_; }
  [[nodiscard]] std::int64_t size() const { return size_; }  // elements

  // By position in row-major order, for any strides. A float4 pair is one byte.
  [[nodiscard]] double get(std::int64_t position) const;
  void set(std::int64_t position, double value);
  [[nodiscard]] std::int64_t offset(std::int64_t position) const;  // in elements, from the first one
  std::byte* data();                                               // of the first element
  [[nodiscard]] const std::byte* data() const;

  Array& fill_normal(Random& random, double scale = 1);
  Array& fill(double value);
  void poison();  // fills with NaN, or for integers and bytes with a pattern that no operator writes
  // memory(): all of the memory, including guards and gaps. Below: whether only elements differ from such a copy.
  [[nodiscard]] const std::vector<std::byte>& memory() const { return memory_; }
  void restore(const std::vector<std::byte>& memory) { memory_ = memory; }
  [[nodiscard]] bool only_elements_differ(const std::vector<std::byte>& memory) const;

  void to_device();    // copies all of the memory, including guards and gaps, to the device
  void from_device();  // copies it back after all work there is done
  void leave_device() { device_.reset(); }

 private:
  std::string name_;
  DType dtype_;
  std::vector<std::int64_t> shape_, strides_;
  std::int64_t size_ = 1, extent_ = 0;  // number of elements; span from first to last, in elements
  bool row_major_ = false;              // without gaps: a position equals its offset
  std::vector<std::byte> memory_;
  std::shared_ptr<std::byte> device_;
};

// The workspace that an operator requested, with guard zones, on the device of its tensors. It is filled with bytes
// that are NaN in every type.
class Workspace {
 public:
  void* of(std::size_t bytes, bool on_device);
  [[nodiscard]] bool guards_hold();

 private:
  std::unique_ptr<Array> memory_;
  bool on_device_ = false;
};

// Runs an operator with the workspace that it requests.
template <class Args>
void run_with_workspace(void (*op)(const Args&, Stream), std::size_t (*workspace_bytes)(const Args&),
                        Workspace& workspace, Args args, Stream stream) {
  args.workspace_bytes = workspace_bytes(args);
  args.workspace = args.workspace_bytes == 0 ? nullptr : workspace.of(args.workspace_bytes, cuda::runs(args.backend));
  op(args, stream);
}

// Maximum difference of a result from its reference. An element passes if |x - ref| <= max(absolute, relative * |ref|)
// + slack, and the output passes if ||x - ref|| <= norm * ||ref|| + ||slack||. slack = cancelling * (the same sum with
// absolute values), for results that cancel. NaN and +-inf must be at exactly the same places; `exact` compares values
// only. norm, absolute or exact must be set; a default-constructed tolerance is rejected.
struct Tolerance {
  double norm = std::numeric_limits<double>::infinity();
  double absolute = std::numeric_limits<double>::infinity(), relative = 0;
  bool exact = false;
  double cancelling = 0x1p-21;
  [[nodiscard]] bool is_given() const {
    return exact || std::isfinite(absolute) || (std::isfinite(norm) && relative == 0);
  }
};
// For lse and max_logits on the CPU, and on GPUs.
inline constexpr Tolerance kLogarithm{.absolute = 1e-6, .relative = 1e-6, .cancelling = 0x1p-22};
inline constexpr Tolerance kLogarithmOnGpus{.absolute = 2e-5, .relative = 0x1p-15};

struct Output {
  Array* array = nullptr;
  Tolerance tolerance;
  std::vector<double> expected;           // row-major; filled by Instance::reference
  std::vector<double> magnitude;          // the same sums with absolute values; may stay empty
  bool accumulates = false;               // the operator adds to the existing values
  std::optional<Tolerance> on_gpus = {};  // another tolerance for GPUs, including emulated ones
};

// One operator call on concrete data.
struct Instance {
  Instance() = default;
  Instance(Instance&&) noexcept = default;  // moving keeps the addresses of the arrays; copying would not
  Instance& operator=(Instance&&) noexcept = default;
  std::deque<Array> arrays;  // a deque: outputs and closures point into it
  std::deque<Output> outputs;
  std::unique_ptr<Workspace> workspace = std::make_unique<Workspace>();
  std::function<void(const char* backend, Stream stream)> call;
  std::function<void(Instance&)> reference;  // fills expected and magnitude of every output
  // Checks results that have more than one right value, such as a choice among nearly equal scores. Returns "" or a
  // description of the error. Only this function checks outputs without expected values. Optional.
  std::function<std::string(const Instance&)> verify;
  bool repeatable = true;  // same inputs give the same bits
  double flops = 0,
         bytes =
             0;  // the operator's work, and the minimum memory traffic: each input read once, each output written once

  Array& add(Array array) { return arrays.emplace_back(std::move(array)); }
  Output& expect(Array& array, const Tolerance& tolerance) {
    return outputs.emplace_back(Output{&array, tolerance, {}, {}});
  }
  void place_for(const std::string& backend);  // moves all arrays to device or host memory, as the backend needs
};

struct Case {
  std::string op, name;
  std::function<Instance(Random& random)> make;
  bool device_only = false;           // too large for anything but a GPU
  bool emulated = true;               // false: too large for the emulator
  bool for_model = false;             // emulated only for the time model
  std::string nightly_on = {};        // targets, such as "sm80 sm90", that only `make nightly` emulates, because
                                      // shorter cases reach the same code
  std::string_view emulated_on = {};  // such as "emu:sm90", if the case covers no further code on other backends
  bool on_cpu = true;                 // false: not on the CPU either, which would take long
  [[nodiscard]] bool suits(const std::string& backend, bool modelled = false, bool at_night = false) const {
    if (backend == "cpu" && !on_cpu) return false;
    if (!backend.starts_with("emu:")) return !device_only || cuda::runs(backend);
    return emulated && !device_only && (modelled || !for_model) &&
           (at_night || nightly_on.find(backend.substr(4)) == std::string::npos) &&
           (emulated_on.empty() || backend == emulated_on);
  }
};

// `key=value` settings of a benchmark shape.
using Settings = std::map<std::string, std::string>;
std::int64_t number(const Settings& settings, const std::string& key);

// A kernel, or a few related kernels, and the cases that reach all of its synchronisation calls repeatedly, on the
// emulator. tests/arch/operators_test.cpp leaves out each call once, and a case must notice it.
struct Subject {
  std::string name, backend;
  std::vector<std::string> cases;
  std::uint64_t schedules;
  std::size_t calls;                      // minimum number of synchronisation calls
  std::string folder = "";                // only its calls count, if a case runs another operator's kernels too
  const char* multiprocessors = nullptr;  // of the emulated device, if the usual number is too small
};

// Everything about one operator. `shapes` are named benchmark shapes, `device_shapes` need a GPU. `bench` makes an
// instance from complete settings.
struct Suite {
  std::string op;
  std::vector<Case> cases;
  std::vector<std::pair<std::string, Settings>> shapes;
  std::function<Instance(const Settings& settings, Random& random)> bench;
  std::vector<std::pair<std::string, Settings>> device_shapes = {};
  std::vector<Unsupported> unsupported = {};  // the first row that matches a case has its reason
  // Small cases that together reach every allocation of the operator on the CPU. tests/ops/out_of_memory_test.cpp lets
  // each allocation fail.
  std::vector<std::string> allocating = {};
  std::vector<Subject> subjects = {};                                   // of the kernels that synchronise
  [[nodiscard]] const Case& case_named(const std::string& name) const;  // throws if the suite has no such case
};

// Leaves the cases whose names match a glob to `make nightly`, on the emulated backends of some targets. A glob that
// matches no case is an error.
inline constexpr std::string_view kAllTargets = "sm80 sm90 sm100";
void leave_to_nightly(Suite& suite, const std::vector<std::string>& globs, std::string_view targets = kAllTargets);

const std::vector<Suite>& suites();  // all operators, in the order of src/ops

// The error of one output against its reference.
struct Comparison {
  std::string output;
  double norm_error = 0;  // ||x - ref|| / ||ref||
  double worst = 0;       // largest |x - ref| relative to its bound; passes up to 1
  std::string failure;    // "" or a description of the error
};
Comparison compare(const Output& output);

struct Report {
  std::vector<Comparison> comparisons;
  std::vector<std::string> failures;  // all errors, ready to print; empty: the case passes
  bool unsupported = false;           // the backend does not support it, as recorded; `failures` has the reason
};

// Makes a case's inputs and expected values.
Instance prepare(const Case& c, std::uint64_t seed);
// Runs a case on a backend: outputs poisoned, guards checked, inputs unchanged, results compared with float64, twice
// with the same bits. Afterwards the instance is in its initial state, unless the call fails. `before_second` runs
// between the calls. A caller that chooses schedules must choose another one there, because with the same schedule an
// emulated call repeats itself.
Report run(const Case& c, Instance& instance, const std::string& backend,
           const std::function<void()>& before_second = {});
Report run(const Case& c, const std::string& backend, std::uint64_t seed,
           const std::function<void()>& before_second = {});

}  // namespace hopwell::cases
