#include "call.hpp"

#include <cxxabi.h>
#include <unistd.h>

#include <cmath>

#include "runtime/float_mode.hpp"

namespace hopwell::python {

// DLPack 1.2, dlpack.h: DLManagedTensorVersioned and DLPackExchangeAPI. Debian's header is older. Members that are not
// used here have no exact type.
struct ManagedTensor {
  std::uint32_t major, minor;
  void* context;
  void (*deleter)(ManagedTensor* self);  // may be null
  std::uint64_t flags;
  DLTensor dl_tensor;  // named as in DLManagedTensor, DLPack's version 0
};
struct ExchangeApi {
  std::uint32_t major, minor;
  ExchangeApi* previous;
  int (*allocate)(DLTensor* prototype, ManagedTensor** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  void (*managed_tensor_from_py_object)();
  void (*managed_tensor_to_py_object)();
  int (*tensor_from_py_object)(PyObject* object, DLTensor* out);  // a view that does not own; may be null
  int (*current_work_stream)(DLDeviceType type, std::int32_t id, void** out);
};

namespace {

// numpy's array interface, C side: https://numpy.org/doc/stable/reference/arrays.interface.html
struct ArrayInterface {
  int two, ndim;
  char kind;
  int item_size, flags;
  Py_ssize_t *shape, *strides;  // strides in bytes
  void* data;
  PyObject* description;
};
constexpr int kNotSwapped = 0x200, kWriteable = 0x400;

constexpr std::uint8_t kDlpackBool = 6;  // newer than some installed dlpack.h
constexpr DLDataType kUnknownType = {kDLOpaqueHandle, 0, 1};

// An attribute, or an invalid object without one. `name` is interned, which makes this several times faster than a C
// string.
nb::object attribute(nb::handle object, PyObject* name) {
  nb::object value = nb::steal(PyObject_GetAttr(object.ptr(), name));
  if (!value.is_valid()) PyErr_Clear();
  return value;
}

// Properties of arrays that follow from their type.
struct ArrayType {
  nb::handle type;  // a strong reference
  const ExchangeApi* api;
  bool is_torch;
};

ArrayType inspected(nb::handle type) {
  static PyObject* const name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  const nb::object capsule = attribute(type, name);
  const ExchangeApi* api = nullptr;
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") != 0)
    api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api != nullptr && api->major != 1) api = api->previous;
  if (api != nullptr && api->tensor_from_py_object == nullptr) api = nullptr;
  const nb::object torch = nb::module_::import_("sys").attr("modules").attr("get")("torch");
  const nb::object tensor = torch.is_none() ? torch : nb::object(torch.attr("Tensor"));
  return {type.inc_ref(), api, !tensor.is_none() && PyObject_IsSubclass(type.ptr(), tensor.ptr()) == 1};
}

// Calls have arrays of few types, such as torch's Tensor and Parameter: the last four are remembered.
ArrayType type_of(nb::handle array) {
  static std::array<ArrayType, 4> known{};  // guarded by the global lock, like `oldest`
  static std::size_t oldest = 0;
  for (const ArrayType& one : known)
    if (one.type.is(array.type())) return one;
  const ArrayType made = inspected(array.type());
  const nb::object forgotten = nb::steal(std::exchange(known[oldest], made).type);
  oldest = (oldest + 1) % known.size();
  return made;
}

bool is_true(nb::handle object, PyObject* method) {
  PyObject* const self = object.ptr();  // PyObject_CallMethodNoArgs, which is not in Python's stable interface
  const nb::object answer = nb::steal(PyObject_VectorcallMethod(method, &self, 1, nullptr));
  if (!answer.is_valid()) PyErr_Clear();
  return answer.ptr() == Py_True;
}

// Whether torch differentiates what happens here. Not below autograd, as in the kernels of hopwell.torch: what there is
// to know of derivatives has been seen to.
bool is_differentiated() {
  const nb::object is_excluded = nb::module_::import_("torch._C").attr("_dispatch_tls_is_dispatch_key_excluded");
  return !nb::cast<bool>(is_excluded("AutogradFunctionality"));
}

// Whether torch's forward mode is on: then tensors may carry tangents. This is the variable that its own functions ask;
// to ask every tensor would cost more than the rest of a small call.
bool is_forward_mode() {
  static PyObject* const current_level = PyUnicode_InternFromString("_current_level");
  static const nb::handle forward_ad = nb::module_::import_("torch.autograd.forward_ad").release();
  const nb::object level = attribute(forward_ad, current_level);
  return level.is_valid() && PyLong_AsLong(level.ptr()) >= 0;
}

bool has_tangent(nb::handle tensor) {
  return !nb::module_::import_("torch.autograd.forward_ad").attr("unpack_dual")(tensor).attr("tangent").is_none();
}

// The types that ml_dtypes adds to numpy. Its float4 keeps one code a byte, which is not what NVFP4 stores: it stays
// unknown.
DLDataType ml_dtype(nb::handle numpy_dtype) {
  struct Entry {
    nb::object dtype;
    DLDataType type;
  };
  static const std::vector<Entry>* const entries = [] {  // never freed: Python may be gone when statics are destroyed
    auto* made = new std::vector<Entry>();
    try {
      const nb::object dtype = nb::module_::import_("numpy").attr("dtype"), types = nb::module_::import_("ml_dtypes");
      made->push_back({dtype(types.attr("bfloat16")), {kDLBfloat, 16, 1}});
      made->push_back({dtype(types.attr("float8_e4m3fn")), {kDlpackFloat8E4m3fn, 8, 1}});
    } catch (nb::python_error&) {  // ml_dtypes is not installed, so no array has its types
    }
    return made;
  }();
  for (const Entry& entry : *entries)
    if (entry.dtype.is(numpy_dtype)) return entry.type;
  for (const Entry& entry : *entries)
    if (entry.dtype.equal(numpy_dtype)) return entry.type;
  return kUnknownType;
}

DLDataType data_type(const ArrayInterface& interface, nb::handle array) {
  const auto bits = static_cast<std::uint8_t>(8 * interface.item_size);
  if ((interface.flags & kNotSwapped) == 0 && interface.item_size > 1) return kUnknownType;
  switch (interface.kind) {
    case 'b':
      return {kDlpackBool, 8, 1};
    case 'i':
      return {kDLInt, bits, 1};
    case 'u':
      return {kDLUInt, bits, 1};
    case 'c':
      return {kDLComplex, bits, 1};
    case 'f':
      if (interface.item_size > 1) return {kDLFloat, bits, 1};
      [[fallthrough]];
    default: {
      static PyObject* const name = PyUnicode_InternFromString("dtype");
      return ml_dtype(attribute(array, name));
    }
  }
}

// What `describe`, such as PyObject_Str, says of the object; its type where that fails.
std::string described(nb::handle object, PyObject* (*describe)(PyObject*)) {
  const nb::object string = nb::steal(describe(object.ptr()));
  PyErr_Clear();
  return std::string(utf8(string).value_or(nb::type_name(object.type()).c_str()));
}

// The first line: torch appends its stack.
std::string message_of(const nb::python_error& error) {
  const std::string text = described(error.value(), PyObject_Str);
  return text.substr(0, text.find('\n'));
}

}  // namespace

std::optional<std::string_view> utf8(nb::handle string) {
  if (!string.is_valid() || !PyUnicode_Check(string.ptr())) return std::nullopt;
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(string.ptr(), &size);
  if (bytes == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return std::string_view(bytes, static_cast<std::size_t>(size));
}

WithoutLock::~WithoutLock() {
  try {
    PyEval_RestoreThread(state_);
  } catch (const abi::__forced_unwind&) {
    // Until Python 3.13, a daemon thread that comes back while Python ends is ended by pthread_exit(), which unwinds the
    // stack. The frames above, nanobind's, must not be unwound: that would abort the process. So the thread sleeps until
    // the process ends, as Python 3.14 has it.
    for (;;) pause();
  }
}

bool signal_raised() {
  if (gettid() != getpid()) return false;  // Python runs handlers on its main thread alone
  const nb::gil_scoped_acquire lock;
  return PyErr_CheckSignals() != 0;
}

Call::Call(const char* operator_name, nb::handle backend, nb::handle stream)
    : operator_(operator_name), stream_(stream) {
  if (backend.is_none()) return;
  if (nb::isinstance<Explanation>(backend)) {
    explanation_ = &nb::cast<Explanation&>(backend);
    return;
  }
  const std::optional<std::string_view> name = utf8(backend);
  if (!name || name->find('\0') != std::string_view::npos) {
    std::string good;
    for (const BackendInfo& info : backend_info()) good += (good.empty() ? "" : ", ") + info.name;
    const bool is_string = nb::isinstance<nb::str>(backend);
    fail("backend", is_string ? "one of " + good : "a name from hopwell.backends() (" + good + ") or None",
         text_of(backend));
  }
  backend_ = name->data();  // ends with a zero, as C strings do
}

void Call::fail(const char* name, const std::string& expected, const std::string& got) const {
  throw Error(HOPWELL_INVALID_ARGUMENT, std::string(operator_) + ": " + name + " must be " + expected + "; got " + got);
}

std::string Call::text_of(nb::handle value) {
  const std::string text = described(value, PyObject_ASCII);
  return text.size() <= 60 ? text : nb::type_name(value.type()).c_str();
}

std::string Call::with_python_names(const std::string& message, Renamed renamed) const {
  const std::string head = std::string(operator_) + ": ";
  for (const auto& [c_name, python_name] : renamed) {
    const std::string start = head + c_name + " ";
    if (message.rfind(start, 0) == 0) return head + python_name + " " + message.substr(start.size());
  }
  return message;
}

Tensor Call::input(const char* name, nb::handle array) { return view(name, array, false); }
Tensor Call::output(const char* name, nb::handle array) { return view(name, array, true); }

Tensor Call::view(const char* name, nb::handle array, bool written) {
  if (array.is_none()) return {};
  static PyObject* const array_struct = PyUnicode_InternFromString("__array_struct__");
  Tensor tensor;
  const ArrayType type = type_of(array);
  if (type.api != nullptr) {
    tensor = exchanged(name, array, *type.api);
  } else if (nb::object& capsule = capsules_.at(count_) = attribute(array, array_struct); capsule.is_valid()) {
    tensor = numpy_view(name, array, capsule, written);
  } else {
    tensor = dlpack_view(name, array, written);
  }
  const bool may_be_lazy = !written && (tensor->dtype.code == kDLFloat || tensor->dtype.code == kDLBfloat);
  if (may_be_lazy && type.is_torch)
    check_torch(name, array,
                "requires grad, which this function does not track: use hopwell.torch, detach() it, or call under"
                " torch.no_grad()");
  if (count_++ == 0) {
    first_ = array;
    first_api_ = type.api;
    device_ = tensor->device;
  }
  return tensor;
}

static Tensor tensor_of(const DLTensor& t) {
  std::array<std::int64_t, Tensor::kMaxDims> dense{};
  const auto ndim = static_cast<std::size_t>(t.ndim);
  std::int64_t stride = 1;
  for (std::size_t i = ndim; i-- > 0; stride *= t.shape[i]) dense[i] = stride;
  const std::int64_t* strides = t.strides != nullptr ? t.strides : dense.data();
  return {t.data == nullptr ? nullptr : static_cast<char*>(t.data) + t.byte_offset,
          t.dtype,
          {t.shape, ndim},
          {strides, ndim},
          t.device};
}

Tensor Call::exchanged(const char* name, nb::handle array, const ExchangeApi& api) const {
  DLTensor t{};
  if (api.tensor_from_py_object(array.ptr(), &t) != 0) {
    const nb::python_error error;
    fail(name, "an array that DLPack can view", message_of(error));
  }
  if (t.ndim > Tensor::kMaxDims) fail(name, "of at most 8 dimensions", std::to_string(t.ndim));
  return tensor_of(t);
}

// Checks properties that a tensor's memory does not show: whether it requires grad, and whether its negative bit is set.
void Call::check_torch(const char* name, nb::handle tensor, const char* if_it_requires_grad) {
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  const auto refuse = [&](const char* why) {
    throw Error(HOPWELL_INVALID_ARGUMENT, std::string(operator_) + ": " + name + " " + why);
  };
  if (attribute(tensor, requires_grad).ptr() == Py_True &&
      nb::cast<bool>(nb::module_::import_("torch").attr("is_grad_enabled")()) && is_differentiated())
    refuse(if_it_requires_grad);
  if (is_true(tensor, is_neg)) refuse("has the negative bit, which its memory does not show: use resolve_neg()");
  if (!forward_mode_) forward_mode_ = is_forward_mode();
  if (*forward_mode_ && is_differentiated() && has_tangent(tensor))
    refuse("carries a tangent, and no operator has a forward-mode derivative");
}

void Call::check_given(const char* name, nb::handle array) {
  if (type_of(array).is_torch)
    check_torch(name, array,
                "requires grad, but the operator writes it in place: detach() it, or call under torch.no_grad()");
}

void tell_written(nb::handle arrays) {
  nb::list tensors;
  for (const nb::handle array : nb::borrow<nb::tuple>(arrays))
    if (type_of(array).is_torch) tensors.append(array);
  if (nb::len(tensors) == 0) return;
  static const nb::handle increment =
      nb::object(nb::module_::import_("torch.autograd.graph").attr("increment_version")).release();
  increment(tensors);
}

Tensor Call::numpy_view(const char* name, nb::handle array, nb::handle capsule, bool written) const {
  const auto* interface = static_cast<const ArrayInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (interface == nullptr) {
    PyErr_Clear();
    fail(name, "an array", nb::type_name(array.type()).c_str());
  }
  if (interface->ndim > Tensor::kMaxDims) fail(name, "of at most 8 dimensions", std::to_string(interface->ndim));
  const DLDataType type = data_type(*interface, array);
  if (type.bits == 0)
    fail(name, "an array of numbers in this machine's byte order",
         "dtype " + text_of(nb::getattr(array, "dtype", nb::none())));
  if (written && (interface->flags & kWriteable) == 0) fail(name, "writable", "a read-only array");
  const auto ndim = static_cast<std::size_t>(interface->ndim);
  std::array<std::int64_t, Tensor::kMaxDims> shape{}, strides{};
  for (std::size_t i = 0; i < ndim; ++i) {
    shape[i] = interface->shape[i];
    strides[i] = interface->strides[i] / interface->item_size;
    if (strides[i] * interface->item_size != interface->strides[i] && shape[i] > 1)
      fail(name, "strided by whole elements", "a stride of " + std::to_string(interface->strides[i]) + " bytes");
  }
  return {interface->data, type, std::span<const std::int64_t>(shape.data(), ndim),
          std::span<const std::int64_t>(strides.data(), ndim)};
}

// The result of __dlpack__, of DLPack's version 1 if the array has it. An invalid object if it raises an exception.
static nb::object exported_capsule(nb::handle array) {
  for (const bool versioned : {true, false}) {
    try {
      const nb::object method = array.attr("__dlpack__");
      return versioned ? method(nb::arg("max_version") = nb::make_tuple(1, 0)) : method();
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_Exception)) throw;  // such as KeyboardInterrupt
      if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_BufferError)) break;
    }
  }
  return {};
}

template <class Managed>
static void free_managed(Managed* tensor) {
  if (tensor->deleter != nullptr) tensor->deleter(tensor);
}

// The managed tensor of a capsule, which the call owns from now on: DLPack's protocol is that a capsule is taken once,
// and renamed, so that its own destructor does nothing.
template <class Managed>
const Managed& Call::taken(nb::handle capsule, const char* used_name) {
  auto* const tensor = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), PyCapsule_GetName(capsule.ptr())));
  if (PyCapsule_SetName(capsule.ptr(), used_name) != 0) throw nb::python_error();
  managed_.push_back(std::shared_ptr<void>(tensor, free_managed<Managed>));
  return *tensor;
}

Tensor Call::dlpack_view(const char* name, nb::handle array, bool written) {
  const bool is_capsule = PyCapsule_CheckExact(array.ptr()) != 0;
  const nb::object capsule = is_capsule ? nb::borrow(array) : exported_capsule(array);
  const char* kind = nullptr;
  if (capsule.is_valid() && PyCapsule_CheckExact(capsule.ptr()) != 0) kind = PyCapsule_GetName(capsule.ptr());
  const std::string_view capsule_name = kind == nullptr ? "" : kind;
  const auto viewed = [&](const DLTensor& tensor) {
    if (tensor.ndim < 0 || tensor.ndim > Tensor::kMaxDims)
      fail(name, "of at most 8 dimensions", std::to_string(tensor.ndim));
    return tensor_of(tensor);
  };
  if (capsule_name == "dltensor") return viewed(taken<DLManagedTensor>(capsule, "used_dltensor").dl_tensor);
  if (capsule_name == "dltensor_versioned") {
    const auto& tensor = taken<ManagedTensor>(capsule, "used_dltensor_versioned");
    constexpr std::uint64_t kReadOnly = 1, kCopied = 2;
    if (tensor.major != 1) fail(name, "an array of DLPack's version 1", "version " + std::to_string(tensor.major));
    if (written && (tensor.flags & kReadOnly) != 0) fail(name, "writable", "a read-only array");
    if (written && (tensor.flags & kCopied) != 0) fail(name, "an array that exports its own memory", "a copy");
    return viewed(tensor.dl_tensor);
  }
  if (capsule_name.starts_with("used_dltensor"))
    fail(name, "an array with a new DLPack capsule for each call", "a capsule that was used before");
  fail(name, "an array (torch, numpy, or anything with __dlpack__)", nb::type_name(array.type()).c_str());
}

float Call::real(const char* name, nb::handle value) const {
  const runtime::DefaultFloatMode mode;  // both conversions use it: numpy's fp32 to double, and double to fp32
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    fail(name, "a number", text_of(value));
  }
  const volatile double exact = number;  // volatile, or the compiler would convert before or after
  const volatile float rounded = static_cast<float>(exact);
  return rounded;
}

std::int64_t Call::integer(const char* name, nb::handle value) const {
  const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  const long long number = index.is_valid() ? PyLong_AsLongLong(index.ptr()) : -1;
  if (number == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    fail(name, "an integer of 64 bits", text_of(value));
  }
  return number;
}

std::optional<std::int64_t> Call::optional_integer(const char* name, nb::handle value) const {
  if (value.is_none()) return std::nullopt;
  return integer(name, value);
}

static constexpr const char* kNumberOrTensor = "a number or a 0-d float32 array";

// Numbers of numpy are numbers too. Whether an object has __dlpack__ is the quicker question.
void Call::number_or_tensor(const char* name, nb::handle value, Tensor& tensor, std::optional<float>& number) {
  if (value.is_none()) return;
  if (PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr()))
    number = real(name, value);
  else if (nb::hasattr(value, "__dlpack__") || PyCapsule_CheckExact(value.ptr()) != 0)
    tensor = input(name, value);
  else if (PyObject_IsInstance(value.ptr(), nb::module_::import_("numbers").attr("Real").ptr()) == 1)
    number = real(name, value);
  else
    fail(name, kNumberOrTensor, text_of(value));
}

void Call::number_or_tensor(const char* name, nb::handle value, Tensor& tensor, float& number) {
  if (value.is_none()) fail(name, kNumberOrTensor, "None");
  std::optional<float> given;
  number_or_tensor(name, value, tensor, given);
  number = given.value_or(number);
}

bool Call::flag(const char* name, nb::handle value) const {
  const int truth = nb::isinstance<nb::str>(value) ? -1 : PyObject_IsTrue(value.ptr());  // "no" would be true
  if (truth < 0) {
    PyErr_Clear();
    fail(name, "True or False", text_of(value));
  }
  return truth != 0;
}

void* Call::workspace(std::size_t bytes) {
  if (first_api_ != nullptr && first_api_->allocate != nullptr) return allocated(*first_api_, bytes);
  scratch_ = nb::module_::import_("hopwell._arrays").attr("workspace")(first_, bytes);
  return view("workspace", scratch_, true)->data;
}

// Scratch of the framework's own allocator, which gives it back to the stream that is current.
void* Call::allocated(const ExchangeApi& api, std::size_t bytes) {
  auto size = static_cast<std::int64_t>(bytes);
  DLTensor prototype{};
  prototype.device = device_;
  prototype.ndim = 1;
  prototype.dtype = {kDLUInt, 8, 1};
  prototype.shape = &size;
  std::string reason = "the framework gave no memory";
  ManagedTensor* made = nullptr;
  const auto keep = [](void* to, const char*, const char* message) { *static_cast<std::string*>(to) = message; };
  if (api.allocate(&prototype, &made, &reason, keep) != 0)
    throw Error(HOPWELL_OUT_OF_MEMORY, std::string(operator_) + ": no workspace: " + reason);
  managed_.push_back(std::shared_ptr<void>(made, free_managed<ManagedTensor>));
  return static_cast<char*>(made->dl_tensor.data) + made->dl_tensor.byte_offset;
}

Stream Call::stream() const {
  if (!stream_.is_none()) {
    for (const char* attribute : {"cuda_stream", "ptr"})  // torch's and cupy's streams
      if (nb::hasattr(stream_, attribute)) return reinterpret_cast<Stream>(integer("stream", stream_.attr(attribute)));
    return reinterpret_cast<Stream>(integer("stream", stream_));
  }
  if (count_ == 0 || first_api_ == nullptr || first_api_->current_work_stream == nullptr) return nullptr;
  void* current = nullptr;
  if (device_.device_type == kDLCUDA && first_api_->current_work_stream(kDLCUDA, device_.device_id, &current) != 0)
    throw nb::python_error();
  return current;
}

}  // namespace hopwell::python
