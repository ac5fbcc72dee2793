// The commands of `hopwell`, one file per command. They return the exit code.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace hopwell::cli {

// An unknown name or an invalid combination on the command line.
struct UsageError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

int info(bool json);  // json: for programs, on standard output

struct CheckOptions {
  std::vector<std::string> operators;  // empty: all
  std::string backend;                 // "": all that this machine can run
  std::string cases;                   // glob of case names; "": all
  std::uint64_t seeds = 1;
  int device = 0;        // CUDA device on which CUDA backends run; device 0 stays the current one
  bool quick = false;    // a few cases of each operator and backend
  bool checker = true;   // on emulated backends: find races, not only wrong numbers and hangs
  bool light = false;    // on emulated backends: find races in the first call of a case only
  bool nightly = false;  // on emulated backends: also the cases whose code shorter cases reach
  bool model = false;    // on emu:sm90 and emu:sm100: report the demand of each launch on the units of an SM
  bool list = false;     // list the cases, and which of them a backend does not support, and run none
  std::string json;      // file; "": no file
};
int check(const CheckOptions& options);

struct BenchOptions {
  std::string op;
  std::vector<std::string> backends;  // empty: all that this machine can run, without emulated ones
  std::vector<std::string> shapes;    // one --shape per element: names and key=value settings; empty: all named shapes
  std::string json;
};
int bench(const BenchOptions& options);

struct EmulateOptions {
  std::string op, backend, name;  // name of the case
  std::uint64_t seed = 1;         // seed of its inputs and of the schedule
  std::string report;             // output file
};
int emulate(const EmulateOptions& options);

}  // namespace hopwell::cli
