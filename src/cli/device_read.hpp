// A kernel that only reads: the peak rate for operators that are bound by memory traffic.
#pragma once

#include <hopwell/hopwell.hpp>

#include <cstddef>

namespace hopwell::cli {

constexpr int kReadVariants = 6;  // numbers of CTAs and of loads in flight; the fastest depends on the size

// Enqueues a read of device memory in units of 16 bytes. `from` is 16-byte aligned; a remainder is not read.
void enqueue_device_read(int variant, const void* from, std::size_t bytes, Stream stream);

}  // namespace hopwell::cli
