// One call from Python: its arrays as DLPack views, its scalars, its backend and stream, and the errors that name them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
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

namespace hopwell::python {

namespace nb = nanobind;

// Given as `backend`, asks for the lines of explain() instead of a run.
struct Explanation {
  std::string text;
};

struct ExchangeApi;    // DLPack's table of C functions that a framework's array type carries
struct ManagedTensor;  // DLPack's tensor that says how to free it

// The UTF-8 of a string, which may have zeros in it; nothing for what is no string and for lone surrogates, which have
// none.
std::optional<std::string_view> utf8(nb::handle string);

// Tells torch that those of a tuple's arrays that are its tensors were written in place: their versions go up, so that a
// backward which needs what they were is an error.
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

// Runs the Python handlers of pending signals, such as Ctrl-C. True if one raised an exception, which is then set.
bool signal_raised();

class Call {
 public:
  Call(const char* operator_name, nb::handle backend, nb::handle stream);

  // Views of arrays: of any type with DLPack's C exchange functions (torch), __array_struct__ (numpy, read-only arrays
  // and the types of ml_dtypes among them) or __dlpack__. None gives null. They are valid as long as the Call and the
  // arrays are.
  const DLTensor* input(const char* name, nb::handle array);
  const DLTensor* output(const char* name, nb::handle array);

  // For an output that the user gave, which may have a past in torch.
  void check_given(const char* name, nb::handle array);

  [[nodiscard]] float real(const char* name, nb::handle value) const;
  [[nodiscard]] std::int64_t integer(const char* name, nb::handle value) const;
  [[nodiscard]] std::int64_t integer(const char* name, nb::handle value, std::int64_t if_none) const;
  [[nodiscard]] bool flag(const char* name, nb::handle value) const;

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

  // Names of the C struct and what Python calls these arguments.
  using Renamed = std::initializer_list<std::pair<const char*, const char*>>;

  // Runs the operator, without Python's global lock, on the stream given or the framework's current one. Errors name
  // arguments as Python does. On the CPU a signal's handler may end it by an exception.
  template <class Args>
  void run(Args& args, void (*function)(const Args&, Stream), std::size_t (*workspace_bytes)(const Args&),
           Renamed renamed = {}) {
    try {
      run_as_named(args, function, workspace_bytes);
    } catch (const Error& error) {
      throw Error(error.status(), with_python_names(error.what(), renamed));
    } catch (const Interrupted&) {
      throw nb::python_error();
    }
  }

  [[noreturn]] void fail(const char* name, const std::string& expected, const std::string& got) const;

 private:
  template <class Args>
  void run_as_named(Args& args, void (*function)(const Args&, Stream), std::size_t (*workspace_bytes)(const Args&)) {
    if (explanation_ != nullptr) {
      explanation_->text = hopwell::explain(args);
      return;
    }
    args.backend = backend_;
    if (may_need_workspace()) {
      if (const std::size_t bytes = workspace_bytes(args); bytes > 0) {
        args.workspace = workspace(bytes);
        args.workspace_bytes = bytes;
      }
    }
    const Stream on = stream();
    const WithoutLock released;
    const InterruptCheck check(signal_raised);
    function(args, on);
  }

  static constexpr std::size_t kMaxArrays = 20;

  const DLTensor* view(const char* name, nb::handle array, bool written);
  Tensor exchanged(const char* name, nb::handle array, const ExchangeApi& api) const;
  Tensor numpy_view(const char* name, nb::handle array, nb::handle interface, bool written) const;
  Tensor dlpack_view(const char* name, nb::handle array, bool written);
  void check_torch(const char* name, nb::handle tensor, const char* if_it_requires_grad);
  static std::string text_of(nb::handle value);
  [[nodiscard]] std::string with_python_names(const std::string& message, Renamed renamed) const;
  [[nodiscard]] bool may_need_workspace() const;
  void* workspace(std::size_t bytes);
  void* allocated(const ExchangeApi& api, std::size_t bytes);
  [[nodiscard]] Stream stream() const;

  const char* operator_;
  const char* backend_ = nullptr;
  Explanation* explanation_ = nullptr;
  nb::handle stream_;
  std::array<std::optional<Tensor>, kMaxArrays> tensors_;
  std::size_t count_ = 0;
  nb::handle first_;  // the first array, which says where outputs and scratch live
  const ExchangeApi* first_api_ = nullptr;
  // What may own the memory of arrays that came through __array_struct__ or __dlpack__, kept until the call is over.
  std::array<nb::object, kMaxArrays> capsules_;
  std::vector<nb::ndarray<nb::ro>> views_;
  std::optional<bool> forward_mode_;  // torch's, asked when there is a tensor of its
  // The workspace: an array, or what the framework's C function allocated.
  nb::object scratch_;
  std::unique_ptr<ManagedTensor, void (*)(ManagedTensor*)> own_scratch_{nullptr, nullptr};
};

}  // namespace hopwell::python
