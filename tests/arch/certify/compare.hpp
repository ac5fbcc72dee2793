// The GPU side of the certification: runs the cases, compares with the emulator's outputs, writes the report.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>

#include "arch/launch.hpp"
#include "inputs.hpp"

namespace hopwell::arch::certify {

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

inline std::vector<uint32_t> run_on_device(const Case& c) {
  const std::vector<uint32_t> in = make_inputs(c);
  uint32_t *device_in, *device_out;
  std::vector<uint32_t> out(c.out_words);
  check(cudaMalloc(&device_in, in.size() * 4));
  check(cudaMalloc(&device_out, out.size() * 4));
  check(cudaMemcpy(device_in, in.data(), in.size() * 4, cudaMemcpyHostToDevice));
  check(cudaMemset(device_out, 0, out.size() * 4));
  c.run(device_in, device_out);
  check(cudaDeviceSynchronize());
  check(cudaMemcpy(out.data(), device_out, out.size() * 4, cudaMemcpyDeviceToHost));
  check(cudaFree(device_in));
  check(cudaFree(device_out));
  return out;
}

/// Whether the emulator's word and the GPU's word are equivalent.
inline bool agree(Compare compare, uint32_t emulator, uint32_t gpu) {
  if (emulator == gpu) return true;
  const float x = bit_cast<float>(emulator), y = bit_cast<float>(gpu);
  if (compare == Compare::accumulation) {
    // Up to 32 products and an initial value, each at most 1, aligned to 2^-22 of the largest.
    constexpr float kBound = 64 * 0x1p-22f * 2;
    return (std::isnan(x) && std::isnan(y)) || std::fabs(x - y) <= kBound;
  }
  if (compare == Compare::accumulation_e4m3) {
    // Up to two products of k 32, each at most 1. According to publications, Hopper aligns 32 products and the running
    // sum to the largest of them, keeps 13 bits after its leading one, and truncates the new sum alike
    // (arXiv:2511.10909, 2512.07004; "around 14 bits" in DeepSeek-V3, arXiv:2412.19437): at most 34 truncations of
    // 2^-13 of the largest. The largest is 1 in the first product. In the second it is the running sum, which stays
    // below 4 with these inputs.
    constexpr float kCut = 0x1p-13f, kSumSoFar = 4, kBound = 34 * kCut * (1 + kSumSoFar);
    return (std::isnan(x) && std::isnan(y)) || std::fabs(x - y) <= kBound;
  }
  if (compare == Compare::approximate) {
    if (!std::isfinite(x) || !std::isfinite(y)) return false;
    return std::fabs(x - y) <= 0x1p-21f * std::max(1.f, std::fabs(x)) ||
           (std::fabs(x) < 0x1p-125f && std::fabs(y) < 0x1p-125f);
  }
  return false;
}

struct Verdict {
  bool agrees, done;
  size_t different, first;
  uint32_t emulator, gpu;  // of the first word that differs
  char error[128];         // launch error; empty: no error
};

/// Shared by the processes: an error destroys the context, so the following cases run in a new process.
struct Progress {
  size_t next;
  char device[128];
  int runtime;
  Verdict verdicts[1024];
};

inline void judge(const Case& c, const std::vector<uint32_t>& expected, Verdict& verdict) {
  std::vector<uint32_t> got;
  try {
    got = run_on_device(c);
  } catch (const std::exception& error) {
    std::snprintf(verdict.error, sizeof verdict.error, "%s", error.what());
    verdict.agrees = c.compare == Compare::refused;
    return;
  }
  for (size_t w = got.size(); w-- > 0;)
    if (!agree(c.compare, expected[w], got[w])) {
      ++verdict.different;
      verdict.first = w;
      verdict.emulator = expected[w];
      verdict.gpu = got[w];
    }
  verdict.agrees = verdict.different == 0 && c.compare != Compare::refused;
}

/// In a child process: runs cases from progress.next on until a case ends with an error.
[[noreturn]] inline void run_cases(const std::vector<Case>& cases, const std::vector<std::vector<uint32_t>>& expected,
                                   Progress& progress) {
  cudaDeviceProp device{};
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess) _exit(2);
  std::snprintf(progress.device, sizeof progress.device, "%s", device.name);
  cudaRuntimeGetVersion(&progress.runtime);
  while (progress.next < cases.size()) {
    alarm(20);  // ends the process if a kernel hangs; the parent records it and continues
    const size_t i = progress.next;
    judge(cases[i], expected[i], progress.verdicts[i]);
    progress.verdicts[i].done = true;
    progress.next = i + 1;
    if (progress.verdicts[i].error[0]) _exit(1);
  }
  _exit(0);
}

inline void run_all(const std::vector<Case>& cases, const std::vector<std::vector<uint32_t>>& expected,
                    Progress& progress) {
  while (progress.next < cases.size()) {
    const pid_t child = fork();
    if (child < 0) throw std::runtime_error("fork failed");
    if (child == 0) run_cases(cases, expected, progress);
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 2) throw std::runtime_error("no CUDA device");
    if (WIFSIGNALED(status)) {
      Verdict& verdict = progress.verdicts[progress.next++];
      std::snprintf(verdict.error, sizeof verdict.error, "did not end (signal %d)", WTERMSIG(status));
    }
  }
}

inline std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

inline std::string from_environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "unknown";
}

inline void write_report(const char* file, const std::vector<Case>& cases, const Progress& progress, size_t failed) {
  std::ofstream report(file);
  std::map<std::string, bool> functions;
  for (size_t i = 0; i < cases.size(); ++i)
    for (const std::string& function : words_of(cases[i].functions))
      functions.try_emplace(function, true).first->second &= progress.verdicts[i].agrees;
  report << "{\n  \"device\": \"" << progress.device << "\",\n  \"driver\": \"" << from_environment("DRIVER")
         << "\",\n  \"cuda\": " << progress.runtime << ",\n  \"date\": \"" << from_environment("DATE")
         << "\",\n  \"commit\": \"" << from_environment("COMMIT") << "\",\n  \"passed\": " << cases.size() - failed
         << ",\n  \"failed\": " << failed << ",\n  \"functions\": {";
  const char* separator = "\n";
  for (const auto& [function, agrees] : functions) {
    report << separator << "    \"" << function << "\": \"" << (agrees ? "agrees" : "differs") << "\"";
    separator = ",\n";
  }
  report << "\n  },\n  \"cases\": [";
  for (size_t i = 0; i < cases.size(); ++i) {
    const Verdict& v = progress.verdicts[i];
    report << (i ? ",\n" : "\n") << "    {\"name\": \"" << cases[i].name << "\", \"functions\": \""
           << cases[i].functions << "\", \"compared\": \"" << name(cases[i].compare)
           << "\", \"words\": " << cases[i].out_words << ", \"different\": " << v.different;
    if (v.error[0]) report << ", \"error\": \"" << v.error << "\"";
    report << ", \"verdict\": \"" << (v.agrees ? "agrees" : "differs") << "\"}";
  }
  report << "\n  ]\n}\n";
}

inline int compare(const char* recorded, const char* json) {
  std::ifstream in(recorded, std::ios::binary);
  const std::vector<Case> cases = all_cases();
  std::vector<std::vector<uint32_t>> expected;
  for (const Case& c : cases) {
    expected.emplace_back(c.out_words);
    in.read(reinterpret_cast<char*>(expected.back().data()), std::streamsize(c.out_words * 4));
    if (!in) throw std::runtime_error("the recorded file is too short: record it again");
  }
  if (cases.size() > std::size(Progress{}.verdicts)) throw std::runtime_error("more cases than verdicts");
  void* memory = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  Progress& progress = *static_cast<Progress*>(memory);
  run_all(cases, expected, progress);
  size_t failed = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    const Verdict& v = progress.verdicts[i];
    failed += !v.agrees;
    if (v.agrees) continue;
    if (v.error[0])
      std::printf("%-36s %s\n", cases[i].name.c_str(), v.error);
    else if (cases[i].compare == Compare::refused)
      std::printf("%-36s the emulator refuses it, the GPU does not\n", cases[i].name.c_str());
    else
      std::printf("%-36s %zu of %zu words differ, first %zu: emulator %08x, GPU %08x\n", cases[i].name.c_str(),
                  v.different, cases[i].out_words, v.first, v.emulator, v.gpu);
  }
  write_report(json, cases, progress, failed);
  std::printf("%zu cases on %s: %zu agree with the emulator, %zu do not\n", cases.size(), progress.device,
              cases.size() - failed, failed);
  return failed != 0;
}

}  // namespace hopwell::arch::certify
