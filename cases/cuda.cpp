#include "cuda.hpp"

#include <dlfcn.h>

#include <cstdint>
#include <utility>

namespace hopwell::cases::cuda {
namespace {

using Address = unsigned long long;  // CUdeviceptr

// Entry points of libcuda.so.1, as in the CUDA Driver API. CUresult 0 is success.
struct Driver {
  int (*init)(unsigned flags);
  int (*device_get)(int* device, int ordinal);
  int (*primary_context)(void** context, int device);
  int (*set_context)(void* context);
  int (*push_context)(void* context);
  int (*pop_context)(void** context);
  int (*synchronize)();
  int (*error_string)(int error, const char** text);
  int (*allocate)(Address* address, std::size_t bytes);
  int (*free)(Address address);
  int (*to_device)(Address to, const void* from, std::size_t bytes);
  int (*to_host)(void* to, Address from, std::size_t bytes);
  int (*copy)(Address to, Address from, std::size_t bytes, void* stream);
  int (*fill)(Address to, unsigned char value, std::size_t bytes, void* stream);
  int (*event_create)(void** event, unsigned flags);
  int (*event_destroy)(void* event);
  int (*event_record)(void* event, void* stream);
  int (*event_elapsed)(float* milliseconds, void* start, void* end);
  int (*stream_create)(void** stream, unsigned flags);
  int (*stream_destroy)(void* stream);
  int (*begin_capture)(void* stream, int mode);
  int (*end_capture)(void* stream, void** graph);
  int (*graph_instantiate)(void** executable, void* graph, unsigned long long flags);
  int (*graph_launch)(void* executable, void* stream);
  int (*graph_destroy)(void* graph);
  int (*executable_destroy)(void* executable);
};

void require(const Driver& driver, int result, const char* what) {
  if (result == 0) return;
  const char* text = nullptr;
  if (driver.error_string(result, &text) != 0 || text == nullptr) text = "unknown error";
  throw Error(HOPWELL_DEVICE_ERROR, std::string(what) + ": " + text);
}

template <class Function>
void look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw Error(HOPWELL_DEVICE_ERROR, std::string("the NVIDIA driver has no ") + name);
}

void* primary_context(const Driver& d, int ordinal) {
  int device = 0;
  void* context = nullptr;
  require(d, d.device_get(&device, ordinal), "cuDeviceGet");
  require(d, d.primary_context(&context, device), "cuDevicePrimaryCtxRetain");
  return context;
}

struct InUse {
  int ordinal = 0;
  void* context = nullptr;
};
InUse& in_use() {
  thread_local InUse device;
  return device;
}

// The initialised driver, with device 0 current in this thread.
const Driver& driver() {
  static const Driver loaded = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw Error(HOPWELL_DEVICE_ERROR, "no NVIDIA driver (libcuda.so.1)");
    Driver d{};
    look_up(library, "cuInit", d.init);
    look_up(library, "cuDeviceGet", d.device_get);
    look_up(library, "cuDevicePrimaryCtxRetain", d.primary_context);
    look_up(library, "cuCtxSetCurrent", d.set_context);
    look_up(library, "cuCtxPushCurrent_v2", d.push_context);
    look_up(library, "cuCtxPopCurrent_v2", d.pop_context);
    look_up(library, "cuCtxSynchronize", d.synchronize);
    look_up(library, "cuGetErrorString", d.error_string);
    look_up(library, "cuMemAlloc_v2", d.allocate);
    look_up(library, "cuMemFree_v2", d.free);
    look_up(library, "cuMemcpyHtoD_v2", d.to_device);
    look_up(library, "cuMemcpyDtoH_v2", d.to_host);
    look_up(library, "cuMemcpyDtoDAsync_v2", d.copy);
    look_up(library, "cuMemsetD8Async", d.fill);
    look_up(library, "cuEventCreate", d.event_create);
    look_up(library, "cuEventDestroy_v2", d.event_destroy);
    look_up(library, "cuEventRecord", d.event_record);
    look_up(library, "cuEventElapsedTime", d.event_elapsed);
    look_up(library, "cuStreamCreate", d.stream_create);
    look_up(library, "cuStreamDestroy_v2", d.stream_destroy);
    look_up(library, "cuStreamBeginCapture_v2", d.begin_capture);
    look_up(library, "cuStreamEndCapture", d.end_capture);
    look_up(library, "cuGraphInstantiateWithFlags", d.graph_instantiate);
    look_up(library, "cuGraphLaunch", d.graph_launch);
    look_up(library, "cuGraphDestroy", d.graph_destroy);
    look_up(library, "cuGraphExecDestroy", d.executable_destroy);
    require(d, d.init(0), "cuInit");
    return d;
  }();
  thread_local const bool ready = [] {
    void* const context = primary_context(loaded, 0);
    require(loaded, loaded.set_context(context), "cuCtxSetCurrent");
    in_use() = {0, context};
    return true;
  }();
  static_cast<void>(ready);
  return loaded;
}

// Makes the device in use current during its lifetime.
class OnDevice {
 public:
  explicit OnDevice(const Driver& d) : driver_(d) { require(d, d.push_context(in_use().context), "cuCtxPushCurrent"); }
  ~OnDevice() {
    void* popped = nullptr;
    static_cast<void>(driver_.pop_context(&popped));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const Driver& driver_;
};

// Calls the driver on the device in use.
template <class Function>
void call(const char* what, Function function) {
  const Driver& d = driver();
  const OnDevice on(d);
  require(d, function(d), what);
}

Address address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

void use_device(int ordinal) { in_use() = {ordinal, primary_context(driver(), ordinal)}; }
int device_in_use() { return in_use().ordinal; }

std::shared_ptr<std::byte> allocate(std::size_t bytes) {
  Address memory = 0;
  call("cuMemAlloc", [&](const Driver& d) { return d.allocate(&memory, bytes == 0 ? 1 : bytes); });
  const auto release = [](std::byte* pointer) { static_cast<void>(driver().free(address(pointer))); };
  return {reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(memory)), release};
}

void copy_to_device(void* device, const void* host, std::size_t bytes) {
  call("cuMemcpyHtoD", [&](const Driver& d) { return d.to_device(address(device), host, bytes); });
}

void copy_to_host(void* host, const void* device, std::size_t bytes) {
  call("cuMemcpyDtoH", [&](const Driver& d) { return d.to_host(host, address(device), bytes); });
}

void copy(void* to, const void* from, std::size_t bytes, Stream stream) {
  call("cuMemcpyDtoDAsync", [&](const Driver& d) { return d.copy(address(to), address(from), bytes, stream); });
}

void fill(void* device, std::byte value, std::size_t bytes, Stream stream) {
  call("cuMemsetD8Async",
       [&](const Driver& d) { return d.fill(address(device), static_cast<unsigned char>(value), bytes, stream); });
}

void synchronize() {
  call("cuCtxSynchronize", [](const Driver& d) { return d.synchronize(); });
}

Event::Event() {
  call("cuEventCreate", [&](const Driver& d) { return d.event_create(&handle_, 0); });
}

Event::~Event() {
  if (handle_ != nullptr) static_cast<void>(driver().event_destroy(handle_));
}

void Event::record(Stream stream) {
  call("cuEventRecord", [&](const Driver& d) { return d.event_record(handle_, stream); });
}

double Event::seconds_since(const Event& start) const {
  float milliseconds = 0;
  call("cuEventElapsedTime", [&](const Driver& d) { return d.event_elapsed(&milliseconds, start.handle_, handle_); });
  return static_cast<double>(milliseconds) * 1e-3;
}

OwnStream::OwnStream() {
  call("cuStreamCreate", [&](const Driver& d) { return d.stream_create(&handle_, 1); });  // CU_STREAM_NON_BLOCKING
}

OwnStream::~OwnStream() { static_cast<void>(driver().stream_destroy(handle_)); }

Graph::Graph(const std::function<void(Stream)>& enqueue) {
  constexpr int kThreadLocal = 1;  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
  const Driver& d = driver();
  const OwnStream stream;
  call("cuStreamBeginCapture", [&](const Driver&) { return d.begin_capture(stream.get(), kThreadLocal); });
  try {
    enqueue(stream.get());
  } catch (...) {
    if (d.end_capture(stream.get(), &graph_) == 0) static_cast<void>(d.graph_destroy(graph_));
    throw;
  }
  call("cuStreamEndCapture", [&](const Driver&) { return d.end_capture(stream.get(), &graph_); });
  try {
    call("cuGraphInstantiateWithFlags", [&](const Driver&) { return d.graph_instantiate(&executable_, graph_, 0); });
  } catch (...) {
    static_cast<void>(d.graph_destroy(graph_));
    throw;
  }
}

Graph::~Graph() {
  if (executable_ != nullptr) static_cast<void>(driver().executable_destroy(executable_));
  if (graph_ != nullptr) static_cast<void>(driver().graph_destroy(graph_));
}

void Graph::launch(Stream stream) const {
  call("cuGraphLaunch", [&](const Driver& d) { return d.graph_launch(executable_, stream); });
}

}  // namespace hopwell::cases::cuda
