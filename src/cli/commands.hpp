// The commands of `hopwell`, one file each. They return the exit code.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace hopwell::cli {

// The command line names what there is not, or what does not go together.
struct UsageError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

int info();

struct CheckOptions {
  std::vector<std::string> operators;  // empty: all
  std::string backend;                 // "": every one this machine has
  std::string cases;  // the name of cases, in which * stands for any letters and ? for any one; "": all
  std::uint64_t seeds = 1;
  int device = 0;       // the CUDA device that the backends for one run on; device 0 stays the current one
  bool quick = false;   // a few cases of each operator and backend
  bool checker = true;  // on emulated backends: find races, not only wrong numbers and hangs
  bool model = false;   // on emu:sm90 and emu:sm100: what each launch asks of the units of an SM
  std::string json;     // "": none
};
int check(const CheckOptions& options);

struct BenchOptions {
  std::string op;
  std::vector<std::string> backends;  // empty: every one this machine has, but the emulated
  std::vector<std::string> shapes;    // one --shape each: names and key=value settings; empty: all named shapes
  std::string json;
};
int bench(const BenchOptions& options);

struct EmulateOptions {
  std::string op, backend, name;  // of the case
  std::uint64_t seed = 1;         // of its inputs and of the schedule
  std::string report;             // the file
};
int emulate(const EmulateOptions& options);

}  // namespace hopwell::cli
