// The decode steps of engine.cpp on a GPU: a CUDA graph for each batch size, replayed with other data.
#include "decode_step.hpp"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace engine;

namespace {

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

// begin: capture
cudaGraphExec_t capture(const DecodeStep& step, cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  step.run(stream);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  check(cudaGraphDestroy(graph));
  return replay;
}
// end: capture

}  // namespace

int main() {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) return std::puts("no GPU: not run"), 0;

  Arena size{nullptr};
  divide(size, {kDLCPU, 0});
  std::vector<std::byte> bytes(reinterpret_cast<std::uintptr_t>(size.end));
  Arena host_arena{bytes.data()};
  const Memory host = divide(host_arena, {kDLCPU, 0});
  fill(host);

  // begin: gpu
  void* base = nullptr;
  check(cudaMalloc(&base, bytes.size()));
  check(cudaMemcpy(base, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  Arena arena{static_cast<std::byte*>(base)};
  const Memory memory = divide(arena, {kDLCUDA, 0});

  const std::size_t workspace_bytes = largest_workspace(memory);
  void* workspace = nullptr;
  check(cudaMalloc(&workspace, workspace_bytes));

  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::vector<cudaGraphExec_t> graphs;
  for (std::int64_t b = 1; b <= kMaxBatch; ++b) {
    DecodeStep step(memory, b);
    step.use_workspace(workspace, workspace_bytes);
    step.run(stream);  // loads the kernels
    graphs.push_back(capture(step, stream));
  }
  // end: gpu

  std::printf("workspace: %zu bytes\n%s\n", workspace_bytes, hopwell::explain(DecodeStep(memory, 2).attention).c_str());
  bool right = true;
  // begin: replay
  for (const std::int32_t length : {5, 32}) {
    host.context_lens[1] = length;
    check(cudaMemcpyAsync(memory.context_lens, host.context_lens, sizeof(std::int32_t) * kMaxBatch,
                          cudaMemcpyHostToDevice, stream));
    check(cudaGraphLaunch(graphs[2 - 1], stream));  // the graph of 2 sequences
    check(cudaMemcpyAsync(host.y, memory.y, sizeof(bfloat16) * 2 * kWidth, cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    std::printf("y of 2 sequences: %g %g\n", to_float(host.y[0]), to_float(host.y[kWidth]));
    right = right && host.y[0] == to_bfloat16(3) && host.y[kWidth] == to_bfloat16(length == 5 ? 5 : 6);
  }
  // end: replay
  for (cudaGraphExec_t graph : graphs) check(cudaGraphExecDestroy(graph));
  check(cudaStreamDestroy(stream));
  check(cudaFree(workspace));
  check(cudaFree(base));
  return right ? 0 : 1;
}
