// CUDA device support for cases and benchmarks: memory, copies and events, through the driver library, which is looked
// up at run time. Nothing here links to CUDA. Uses the primary contexts, like the CUDA runtime. Every function throws
// hopwell::Error with the driver's message.
#pragma once

#include <hopwell/hopwell.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace hopwell::cases::cuda {

// Whether a backend uses tensors in CUDA device memory. Others, including emulated backends, use host memory.
inline bool runs(const std::string& backend) { return backend.starts_with("sm"); }

// Sets the device for this thread's memory, events and graphs; initially 0. Device 0 stays the current device of every
// thread, so that a test on another device fails if an operator does not switch to it.
void use_device(int ordinal);
int device_in_use();

std::shared_ptr<std::byte> allocate(std::size_t bytes);  // 256-byte aligned; freed with its last owner
void copy_to_device(void* device, const void* host, std::size_t bytes);
void copy_to_host(void* host, const void* device, std::size_t bytes);
void copy(void* to, const void* from, std::size_t bytes, Stream stream);     // on the device, enqueued
void fill(void* device, std::byte value, std::size_t bytes, Stream stream);  // enqueued
void synchronize();  // waits for all work of the device; throws its errors

// An event recorded in a stream.
class Event {
 public:
  Event();
  ~Event();
  Event(Event&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(Stream stream);
  [[nodiscard]] double seconds_since(const Event& start) const;  // after both events have completed

 private:
  void* handle_ = nullptr;
};

class OwnStream {
 public:
  OwnStream();
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  [[nodiscard]] Stream get() const { return handle_; }

 private:
  Stream handle_ = nullptr;
};

// Work of a stream, captured once, which can be launched repeatedly.
class Graph {
 public:
  explicit Graph(const std::function<void(Stream)>& enqueue);
  ~Graph();
  Graph(Graph&& other) noexcept
      : graph_(std::exchange(other.graph_, nullptr)), executable_(std::exchange(other.executable_, nullptr)) {}
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(Stream stream) const;  // enqueued

 private:
  void *graph_ = nullptr, *executable_ = nullptr;
};

}  // namespace hopwell::cases::cuda
