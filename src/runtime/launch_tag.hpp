// A tag that distinguishes data which CTAs of one launch exchange in a workspace from any other contents of the
// workspace.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>

namespace hopwell::runtime {

struct LaunchTag {
  std::uint32_t words[2];
};

// 64 random bits, not 0, different for each launch.
inline LaunchTag new_launch_tag() {
  static std::atomic<std::uint64_t> state = std::uint64_t{std::random_device{}()} << 32 | std::random_device{}();
  std::uint64_t x = state.fetch_add(0x9e3779b97f4a7c15);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  x ^= x >> 31;
  return {{static_cast<std::uint32_t>(x) | 1, static_cast<std::uint32_t>(x >> 32)}};
}

}  // namespace hopwell::runtime
