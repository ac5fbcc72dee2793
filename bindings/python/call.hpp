// One call from Python: its arrays as DLPack views, its scalars, its backend and stream, and errors that name them.
#pragma once

#include <nanobind/nanobind.h>
#include <hopwell/hopwell.hpp>
#include <hopwell/interrupt.hpp>

#include <array>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/workspace.hpp"

namespace hopwell::python {

namespace nb = nanobind;

// If given as `backend`, requests the lines of explain() instead of a run.
struct Explanation {
  std::string text;
};

struct ExchangeApi;    // DLPack's table of C functions, provided by a framework's array type
struct ManagedTensor;  // DLPack's tensor with its deleter

// UTF-8 of a string, which may contain zeros. Empty for an object that is not a string, and for lone surrogates, which
// have no UTF-8.
std::optional<std::string_view> utf8(nb::handle string);

// Tells torch that its tensors among a tuple's arrays were written in place. Their versions increase, so that a
// backward that needs the old values raises an error.
void tell_written(nb::handle arrays);

// Python's global lock is released while it lives.
class WithoutLock {
 public:
  WithoutLock() : state_(PyEval_SaveThread()) {}
  ~WithoutLock();
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;

 private:
  PyThreadState* state_;
};

// Adds the operators' functions to the module. They are generated from src/ops/<operator>/declaration.py.
void define_operators(nb::module_& module);

// Runs the Python handlers of pending signals, such as Ctrl-C. True if one raised an exception, which is then set.
bool signal_raised();

class Call {
 public:
  Call(const char* operator_name, nb::handle backend, nb::handle stream);

  // Views of arrays: any type with DLPack's C exchange functions (torch), __array_struct__ (numpy, including read-only
  // arrays and the types of ml_dtypes) or __dlpack__. None gives an absent tensor. They are valid during the lifetime of
  // the Call and of the arrays.
  Tensor input(const char* name, nb::handle array);
  Tensor output(const char* name, nb::handle array);

  // For an output that the user supplied, which may have an autograd history in torch.
  void check_given(const char* name, nb::handle array);

  [[nodiscard]] float real(const char* name, nb::handle value) const;
  [[nodiscard]] std::int64_t integer(const char* name, nb::handle value) const;
  [[nodiscard]] std::optional<std::int64_t> optional_integer(const char* name, nb::handle value) const;
  [[nodiscard]] bool flag(const char* name, nb::handle value) const;

  // A number or an array of one element, and absence too if the number may be absent.
  void number_or_tensor(const char* name, nb::handle value, Tensor& tensor, std::optional<float>& number);
  void number_or_tensor(const char* name, nb::handle value, Tensor& tensor, float& number);

  template <class Enum>
  using Choices = std::initializer_list<std::pair<const char*, Enum>>;
  template <class Enum>
  [[nodiscard]] Enum choice(const char* name, nb::handle value, Choices<Enum> choices) const {
    const std::optional<std::string_view> given = utf8(value);
    std::string good;
    for (const auto& [text, result] : choices) {
      if (given == text) return result;
      good += (good.empty() ? "'" : " or '") + std::string(text) + "'";
    }
    fail(name, good, text_of(value));
  }

  // Names in the C struct, and Python's names for these arguments.
  using Renamed = std::initializer_list<std::pair<const char*, const char*>>;

  // Runs the operator, and launches it without Python's global lock, on the given stream or the framework's current one. Errors use
  // Python's names of the arguments. On the CPU a signal's Python handler may end the call by an exception.
  template <class Args>
  void run(Args& args, void (*function)(const Args&, Stream), Renamed renamed = {}) {
    try {
      run_as_named(args, function);
    } catch (const Error& error) {
      throw Error(error.status(), with_python_names(error.what(), renamed));
    } catch (const Interrupted&) {
      throw nb::python_error();
    }
  }

  [[noreturn]] void fail(const char* name, const std::string& expected, const std::string& got) const;

 private:
  template <class Args>
  void run_as_named(Args& args, void (*function)(const Args&, Stream)) {
    if (explanation_ != nullptr) {
      explanation_->text = hopwell::explain(args);
      return;
    }
    args.backend = backend_;
    const Stream on = stream();
    std::optional<WithoutLock> released;
    auto allocate = [&](std::size_t bytes) {
      void* const memory = bytes > 0 ? workspace(bytes) : nullptr;
      released.emplace();  // from here on, the operator launches
      return memory;
    };
    const runtime::WorkspaceAllocator allocator(allocate);
    const InterruptCheck check(signal_raised);
    function(args, on);
  }

  static constexpr std::size_t kMaxArrays = 20;

  Tensor view(const char* name, nb::handle array, bool written);
  Tensor exchanged(const char* name, nb::handle array, const ExchangeApi& api) const;
  Tensor numpy_view(const char* name, nb::handle array, nb::handle interface, bool written) const;
  Tensor dlpack_view(const char* name, nb::handle array, bool written);
  template <class Managed>
  const Managed& taken(nb::handle capsule, const char* used_name);
  void check_torch(const char* name, nb::handle tensor, const char* if_it_requires_grad);
  static std::string text_of(nb::handle value);
  [[nodiscard]] std::string with_python_names(const std::string& message, Renamed renamed) const;
  void* workspace(std::size_t bytes);
  void* allocated(const ExchangeApi& api, std::size_t bytes);
  [[nodiscard]] Stream stream() const;

  const char* operator_;
  const char* backend_ = nullptr;
  Explanation* explanation_ = nullptr;
  nb::handle stream_;
  std::size_t count_ = 0;  // of arrays
  nb::handle first_;       // the first array; it determines the device of outputs and workspace
  DLDevice device_{};      // of the first array
  const ExchangeApi* first_api_ = nullptr;
  // Possible owners of the memory of arrays from __array_struct__, kept until the call ends.
  std::array<nb::object, kMaxArrays> capsules_;
  // DLPack's managed tensors that the call owns: from arrays' capsules, and a workspace from the framework's C
  // function. Their deleters run when the call ends.
  std::vector<std::shared_ptr<void>> managed_;
  std::optional<bool> forward_mode_;  // torch's forward mode, queried if there is a torch tensor
  nb::object scratch_;                // the workspace, if it is an array
};

}  // namespace hopwell::python
