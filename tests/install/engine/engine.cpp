// Decode steps on the CPU.
#include "decode_step.hpp"

#include <cstdint>
#include <cstdio>
#include <vector>

using namespace engine;

int main() {
  Arena size{nullptr};
  divide(size, {kDLCPU, 0});
  std::vector<std::byte> bytes(reinterpret_cast<std::uintptr_t>(size.end));
  Arena arena{bytes.data()};
  const Memory memory = divide(arena, {kDLCPU, 0});
  fill(memory);

  std::printf("workspace: %zu bytes\n", largest_workspace(memory));  // on the CPU no operator wants one
  const DecodeStep two(memory, 2);
  two.run(nullptr);
  std::printf("y of 2 sequences: %g %g\n", to_float(memory.y[0]), to_float(memory.y[kWidth]));

  memory.context_lens[1] = 32;  // data of the next step: the same views, so the same DecodeStep
  two.run(nullptr);
  std::printf("y of 2 sequences: %g %g\n", to_float(memory.y[0]), to_float(memory.y[kWidth]));
  const bool right = memory.y[0] == to_bfloat16(3) && memory.y[kWidth] == to_bfloat16(6);

  // begin: errors
  DecodeStep wrong(memory, 2);
  wrong.attention.context_lens = Tensor(memory.context_lens, {3});
  try {
    wrong.run(nullptr);
  } catch (const hopwell::Error& error) {
    std::printf("status %d: %s\n", error.status(), error.what());
  }
  // end: errors

  // begin: explain
  std::puts(hopwell::explain(two.attention).c_str());
  // end: explain
  return right ? 0 : 1;
}
