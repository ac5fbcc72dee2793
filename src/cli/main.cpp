// hopwell: what is here (info), whether it is right (check), how fast it is (bench).
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <hopwell/hopwell.hpp>

#include "cases/case.hpp"
#include "commands.hpp"

namespace {

std::vector<std::string> operator_names() {
  std::vector<std::string> names;
  for (const auto& suite : hopwell::cases::suites()) names.push_back(suite.op);
  return names;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace hopwell::cli;
  CLI::App app{"Attention-training and low-precision decode kernels: what is here, is it right, how fast is it."};
  app.require_subcommand(1);
  app.set_version_flag("--version", hopwell::version());
  const CLI::IsMember an_operator(operator_names());
  const CLI::IsMember a_backend(hopwell::backends());

  app.add_subcommand("info", "devices, backends and versions; what is missing and how to get it");

  CheckOptions check_options;
  auto* check_command = app.add_subcommand("check", "every operator and corner case against float64, here and now");
  check_command->add_option("OP", check_options.operators, "operators; all by default")->check(an_operator);
  check_command->add_option("--backend", check_options.backend, "one backend; by default all this machine has")
      ->check(a_backend);
  check_command->add_option("--case", check_options.cases,
                            "only cases whose whole name matches this regular expression");
  check_command->add_option("--seeds", check_options.seeds, "random inputs a case; on emu: backends also schedules")
      ->check(CLI::Range(1, 1000000));
  const int last_device = std::max(static_cast<int>(hopwell::cuda_devices().size()) - 1, 0);
  check_command->add_option("--device", check_options.device, "the CUDA device, where there are several")
      ->check(CLI::Range(0, last_device));
  check_command->add_flag_callback(
      "--no-checker", [&] { check_options.checker = false; },
      "emu: backends: numbers and hangs only, no search for races");
  check_command->add_option("--json", check_options.json, "write the results to FILE")->type_name("FILE");

  BenchOptions bench_options;
  auto* bench_command =
      app.add_subcommand("bench", "time an operator: median, spread, rate, share of this machine's ceiling");
  bench_command->add_option("OP", bench_options.op, "the operator")->required()->check(an_operator);
  bench_command->add_option("--backend", bench_options.backends, "backends, separated by commas")
      ->delimiter(',')
      ->check(a_backend);
  bench_command
      ->add_option("--shape", bench_options.shapes,
                   "a named shape, or settings key=value,key=value that change the first one")
      ->delimiter(',');
  bench_command->add_option("--json", bench_options.json, "write the results to FILE")->type_name("FILE");

  CLI11_PARSE(app, argc, argv);
  try {
    if (check_command->parsed()) return check(check_options);
    if (bench_command->parsed()) return bench(bench_options);
    return info();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hopwell: %s\n", error.what());
    return 1;
  }
}
