// Case descriptions: inputs, float64 reference, tolerance, FLOPs and bytes of one operator call. The C++ tests,
// `hopwell check` and `hopwell bench` all run these, on every backend there is.
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

namespace hopwell::cases {

// Random numbers of a case: the same seed gives the same inputs on every machine. Nothing of the standard library's: with
// a sanitizer its engines, which are templates, would be those that the tests have compiled for it.
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
  std::optional<double> second_normal_;  // they are made in pairs
};

// A tensor of a case: memory with guard zones around it, any strides. Elements are read and written as double, rounded
// to the dtype, in host memory; a copy on the device comes and goes with to_device and from_device.
class Array {
 public:
  // Row-major unless strides (in elements, non-negative) are given. Gaps between strided elements and the guards hold a
  // pattern.
  Array(std::string name, DType dtype, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides = {});

  [[nodiscard]] Tensor view() const;  // of the copy on the device while there is one
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] const std::vector<std::int64_t>& shape() const { return shape_; }
  [[nodiscard]] std::int64_t size() const { return size_; }  // elements

  // By position in row-major order, whatever the strides; a float4 pair is its byte.
  [[nodiscard]] double get(std::int64_t position) const;
  void set(std::int64_t position, double value);
  [[nodiscard]] std::int64_t offset(std::int64_t position) const;  // in elements, from the first
  std::byte* data();                                               // of the first element
  [[nodiscard]] const std::byte* data() const;

  Array& fill_normal(Random& random, double scale = 1);
  Array& fill(double value);
  void poison();  // NaN, or a pattern no operator writes for integers and bytes
  // All of the memory, guards and gaps included; and whether only the elements differ from such a copy.
  [[nodiscard]] const std::vector<std::byte>& memory() const { return memory_; }
  void restore(const std::vector<std::byte>& memory) { memory_ = memory; }
  [[nodiscard]] bool only_elements_differ(const std::vector<std::byte>& memory) const;

  void to_device();    // copies all of the memory, guards and gaps included, to the device
  void from_device();  // and back, once all work there is done
  void leave_device() { device_.reset(); }

 private:
  std::string name_;
  DType dtype_;
  std::vector<std::int64_t> shape_, strides_;
  std::int64_t size_ = 1, extent_ = 0;  // elements; span from first to last, in elements
  bool row_major_ = false;              // without gaps: a position is its offset
  std::vector<std::byte> memory_;
  std::shared_ptr<std::byte> device_;
};

// The scratch that an operator asked for, with guard zones, where its tensors are; it holds NaN, whatever type it is
// read as.
class Workspace {
 public:
  void* of(std::size_t bytes, bool on_device);
  [[nodiscard]] bool guards_hold();

 private:
  std::unique_ptr<Array> memory_;
  bool on_device_ = false;
};

// Runs an operator with the workspace it asks for.
template <class Args>
void run_with_workspace(void (*op)(const Args&, Stream), std::size_t (*workspace_bytes)(const Args&),
                        Workspace& workspace, Args args, Stream stream) {
  args.workspace_bytes = workspace_bytes(args);
  args.workspace = args.workspace_bytes == 0 ? nullptr : workspace.of(args.workspace_bytes, cuda::runs(args.backend));
  op(args, stream);
}

// How far a result may be from its reference. An element passes if |x - ref| <= max(absolute, relative * |ref|) +
// slack, and the whole if ||x - ref|| <= norm * ||ref|| + ||slack||, where slack = cancelling * (the same sum with
// absolute values), for results that cancel. NaN and +-inf must be at exactly the same places; `exact` compares values
// only. One of norm, absolute and exact must be given; the default is none, which no comparison takes.
struct Tolerance {
  double norm = std::numeric_limits<double>::infinity();
  double absolute = std::numeric_limits<double>::infinity(), relative = 0;
  bool exact = false;
  double cancelling = 0x1p-21;
  [[nodiscard]] bool is_given() const {
    return exact || std::isfinite(absolute) || (std::isfinite(norm) && relative == 0);
  }
};
// Of lse and max_logits on the CPU, and on GPUs.
inline constexpr Tolerance kLogarithm{.absolute = 1e-6, .relative = 1e-6, .cancelling = 0x1p-22};
inline constexpr Tolerance kLogarithmOnGpus{.absolute = 2e-5, .relative = 0x1p-15};

struct Output {
  Array* array = nullptr;
  Tolerance tolerance;
  std::vector<double> expected;           // row-major; filled by Instance::reference
  std::vector<double> magnitude;          // the same sums with absolute values; may stay empty
  bool accumulates = false;               // the operator adds into what is there
  std::optional<Tolerance> on_gpus = {};  // where GPUs, emulated ones too, are granted another one than the CPU
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
  // Judges results that have more than one right value, such as a choice among nearly equal scores: "" or what is
  // wrong. Outputs for which `reference` left no expected values are this function's alone. Optional.
  std::function<std::string(const Instance&)> verify;
  bool repeatable = true;  // same inputs, same bits
  double flops = 0,
         bytes =
             0;  // the operator's work, and the least memory traffic: each input read once, each output written once

  Array& add(Array array) { return arrays.emplace_back(std::move(array)); }
  Output& expect(Array& array, const Tolerance& tolerance) {
    return outputs.emplace_back(Output{&array, tolerance, {}, {}});
  }
  void place_for(const std::string& backend);  // all arrays on the device, or none, as the backend takes them
};

struct Case {
  std::string op, name;
  std::function<Instance(Random& random)> make;
  bool device_only = false;           // so large that only a GPU runs it
  bool emulated = true;               // false: so large that the emulator does not
  bool for_model = false;             // emulated only for the model of time
  std::string_view emulated_on = {};  // such as "emu:sm90": other backends' kernels see nothing special in it
  bool on_cpu = true;                 // false: nor does the CPU, and it takes long
  [[nodiscard]] bool suits(const std::string& backend, bool modelled = false) const {
    if (backend == "cpu" && !on_cpu) return false;
    if (!backend.starts_with("emu:")) return !device_only || cuda::runs(backend);
    return emulated && !device_only && (modelled || !for_model) && (emulated_on.empty() || backend == emulated_on);
  }
};

// `key=value` settings of a benchmark shape.
using Settings = std::map<std::string, std::string>;
std::int64_t number(const Settings& settings, const std::string& key);

// Everything about one operator. `shapes` are named benchmark shapes, `device_shapes` those that want a GPU; `bench`
// makes an instance from complete settings.
struct Suite {
  std::string op;
  std::vector<Case> cases;
  std::vector<std::pair<std::string, Settings>> shapes;
  std::function<Instance(const Settings& settings, Random& random)> bench;
  std::vector<std::pair<std::string, Settings>> device_shapes = {};
};

const std::vector<Suite>& suites();  // all operators, in the order of OPERATORS

// The error of one output against its reference.
struct Comparison {
  std::string output;
  double norm_error = 0;  // ||x - ref|| / ||ref||
  double worst = 0;       // largest |x - ref| as a share of its bound; passes up to 1
  std::string failure;    // "" or what is wrong
};
Comparison compare(const Output& output);

struct Report {
  std::vector<Comparison> comparisons;
  std::vector<std::string> failures;  // all that is wrong, ready to print; empty: the case holds
  bool unsupported = false;           // the backend refused it, and may (refused.hpp); `failures` then says why
};

// A case's inputs, and what is expected of them.
Instance prepare(const Case& c, std::uint64_t seed);
// Runs a case on a backend: outputs poisoned, canaries checked, inputs unchanged, results against float64, twice with
// the same bits. The instance is afterwards what it was before, unless the call fails. `before_second`: done between the
// calls. A caller that chooses schedules chooses another one there: with the same one an emulated call does the same again.
Report run(const Case& c, Instance& instance, const std::string& backend,
           const std::function<void()>& before_second = {});
Report run(const Case& c, const std::string& backend, std::uint64_t seed,
           const std::function<void()>& before_second = {});

}  // namespace hopwell::cases
