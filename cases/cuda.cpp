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

// The driver with device 0's primary context current in the calling thread.
const Driver& driver() {
  static void* context = nullptr;
  static const Driver loaded = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw Error(HOPWELL_DEVICE_ERROR, "no NVIDIA driver (libcuda.so.1)");
    Driver d{};
    look_up(library, "cuInit", d.init);
    look_up(library, "cuDeviceGet", d.device_get);
    look_up(library, "cuDevicePrimaryCtxRetain", d.primary_context);
    look_up(library, "cuCtxSetCurrent", d.set_context);
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
    int device = 0;
    require(d, d.init(0), "cuInit");
    require(d, d.device_get(&device, 0), "cuDeviceGet");
    require(d, d.primary_context(&context, device), "cuDevicePrimaryCtxRetain");
    return d;
  }();
  thread_local const bool current = (require(loaded, loaded.set_context(context), "cuCtxSetCurrent"), true);
  static_cast<void>(current);
  return loaded;
}

Address address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

std::shared_ptr<std::byte> allocate(std::size_t bytes) {
  const Driver& d = driver();
  Address memory = 0;
  require(d, d.allocate(&memory, bytes == 0 ? 1 : bytes), "cuMemAlloc");
  const auto release = [&d](std::byte* pointer) { static_cast<void>(d.free(address(pointer))); };
  return {reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(memory)), release};
}

void copy_to_device(void* device, const void* host, std::size_t bytes) {
  require(driver(), driver().to_device(address(device), host, bytes), "cuMemcpyHtoD");
}

void copy_to_host(void* host, const void* device, std::size_t bytes) {
  require(driver(), driver().to_host(host, address(device), bytes), "cuMemcpyDtoH");
}

void copy(void* to, const void* from, std::size_t bytes, Stream stream) {
  require(driver(), driver().copy(address(to), address(from), bytes, stream), "cuMemcpyDtoDAsync");
}

void fill(void* device, std::byte value, std::size_t bytes, Stream stream) {
  require(driver(), driver().fill(address(device), static_cast<unsigned char>(value), bytes, stream),
          "cuMemsetD8Async");
}

void synchronize() { require(driver(), driver().synchronize(), "cuCtxSynchronize"); }

Event::Event() { require(driver(), driver().event_create(&handle_, 0), "cuEventCreate"); }

Event::~Event() {
  if (handle_ != nullptr) static_cast<void>(driver().event_destroy(handle_));
}

void Event::record(Stream stream) { require(driver(), driver().event_record(handle_, stream), "cuEventRecord"); }

double Event::seconds_since(const Event& start) const {
  float milliseconds = 0;
  require(driver(), driver().event_elapsed(&milliseconds, start.handle_, handle_), "cuEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

Graph::Graph(const std::function<void(Stream)>& enqueue) {
  constexpr int kThreadLocal = 1;  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
  const Driver& d = driver();
  struct Capture {
    const Driver& d;
    void* stream = nullptr;
    ~Capture() { static_cast<void>(d.stream_destroy(stream)); }
  } capture{d};
  require(d, d.stream_create(&capture.stream, 1), "cuStreamCreate");  // CU_STREAM_NON_BLOCKING
  require(d, d.begin_capture(capture.stream, kThreadLocal), "cuStreamBeginCapture");
  try {
    enqueue(capture.stream);
  } catch (...) {
    if (d.end_capture(capture.stream, &graph_) == 0) static_cast<void>(d.graph_destroy(graph_));
    throw;
  }
  require(d, d.end_capture(capture.stream, &graph_), "cuStreamEndCapture");
  if (const int result = d.graph_instantiate(&executable_, graph_, 0); result != 0) {
    static_cast<void>(d.graph_destroy(graph_));
    require(d, result, "cuGraphInstantiateWithFlags");
  }
}

Graph::~Graph() {
  if (executable_ != nullptr) static_cast<void>(driver().executable_destroy(executable_));
  if (graph_ != nullptr) static_cast<void>(driver().graph_destroy(graph_));
}

void Graph::launch(Stream stream) const {
  require(driver(), driver().graph_launch(executable_, stream), "cuGraphLaunch");
}

}  // namespace hopwell::cases::cuda
