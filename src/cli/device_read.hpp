// A kernel that does nothing but read: the ceiling of operators that are bound by their bytes.
#pragma once

#include <hopwell/hopwell.hpp>

#include <cstddef>

namespace hopwell::cli {

constexpr int kReadVariants = 6;  // more or fewer CTAs, loads in flight: which is fastest depends on the bytes

// Enqueues a read of every whole 16 bytes of device memory; `from` is aligned to them.
void enqueue_device_read(int variant, const void* from, std::size_t bytes, Stream stream);

}  // namespace hopwell::cli
