// The workspace of a call: where its memory comes from, and how a plan divides it.
#pragma once

#include <hopwell/hopwell.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace hopwell::runtime {

// Divides a workspace into areas. Offsets are in bytes, and multiples of 256.
struct WorkspaceLayout {
  std::size_t bytes = 0;  // total size

  std::size_t reserve(std::int64_t size) {
    const std::size_t offset = bytes;
    bytes += (static_cast<std::size_t>(size) + 255) / 256 * 256;
    return offset;
  }
};

// An area of a workspace. Null without a workspace: while a call is planned, or if it needs none.
template <class T>
T* at_offset(void* workspace, std::size_t offset) {
  return workspace == nullptr ? nullptr : reinterpret_cast<T*>(static_cast<std::byte*>(workspace) + offset);
}

// For language bindings. While the object lives, the next call of an operator on this thread takes its workspace from
// allocate(bytes). It calls `allocate` once, between plan and launch; bytes is 0 if the plan needs no workspace.
class HOPWELL_API WorkspaceAllocator {
 public:
  template <class Allocate>
  explicit WorkspaceAllocator(Allocate& allocate)
      : WorkspaceAllocator([](void* context, std::size_t bytes) { return (*static_cast<Allocate*>(context))(bytes); },
                           &allocate) {}
  ~WorkspaceAllocator();
  WorkspaceAllocator(const WorkspaceAllocator&) = delete;
  WorkspaceAllocator& operator=(const WorkspaceAllocator&) = delete;

 private:
  friend void* workspace_of_call(std::string_view operator_name, std::size_t needed, void* given, std::size_t bytes);
  WorkspaceAllocator(void* (*allocate)(void* context, std::size_t bytes), void* context);

  void* (*allocate_)(void* context, std::size_t bytes);
  void* context_;
  WorkspaceAllocator* outer_;
};

// The workspace of a call that needs `needed` bytes: of this thread's allocator, or else the given one. Throws if it is
// too small or not aligned.
void* workspace_of_call(std::string_view operator_name, std::size_t needed, void* given, std::size_t bytes);

}  // namespace hopwell::runtime
