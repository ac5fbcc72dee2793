#include "runtime/workspace.hpp"

#include <string>
#include <utility>

#include "runtime/check.hpp"

namespace hopwell::runtime {
namespace {

thread_local WorkspaceAllocator* current = nullptr;

}  // namespace

WorkspaceAllocator::WorkspaceAllocator(void* (*allocate)(void* context, std::size_t bytes), void* context)
    : allocate_(allocate), context_(context), outer_(std::exchange(current, this)) {}
WorkspaceAllocator::~WorkspaceAllocator() { current = outer_; }

void* workspace_of_call(std::string_view operator_name, std::size_t needed, void* given, std::size_t bytes) {
  if (const WorkspaceAllocator* const allocator = std::exchange(current, nullptr)) {
    given = allocator->allocate_(allocator->context_, needed);
    bytes = given == nullptr ? 0 : needed;
  }
  if (needed == 0) return given;
  const Checker check(operator_name);
  check.require(given != nullptr && bytes >= needed, "workspace", std::to_string(needed) + " bytes or more",
                std::to_string(given == nullptr ? 0 : bytes));
  constexpr std::size_t kAlignment = 16;  // size of a vectorised access of the kernels
  check.require(reinterpret_cast<std::uintptr_t>(given) % kAlignment == 0, "workspace", "aligned to 16 bytes",
                "an address that is not");
  return given;
}

}  // namespace hopwell::runtime
