// hopwell: shows the installation (info), tests correctness (check), measures speed (bench), shows a kernel's run
// (emulate). The program name `hopwell-emulate` means `hopwell emulate`.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <hopwell/hopwell.hpp>
#include <new>
#include <string_view>

#include "cases/case.hpp"
#include "commands.hpp"
#include "table.hpp"

namespace {

using namespace hopwell::cli;

std::vector<std::string> operator_names() {
  std::vector<std::string> names;
  for (const auto& suite : hopwell::cases::suites()) names.push_back(suite.op);
  return names;
}

std::vector<std::string> option_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    if (!option->get_lnames().empty()) names.push_back("--" + option->get_lnames().front());
  return names;
}

// Error text for a wrong command line. It names the allowed values.
std::string complaint(const CLI::App& app, const CLI::ParseError& error) {
  const auto chosen = app.get_subcommands();
  const bool at_command = !chosen.empty() && app.remaining().empty();
  const CLI::App& command = at_command ? *chosen.front() : app;
  const std::string speaker = at_command ? "hopwell " + command.get_name() : "hopwell";
  const std::vector<std::string> unknown = command.remaining();
  if (!unknown.empty() && unknown.front().starts_with("-")) {
    const std::string option = unknown.front().substr(0, unknown.front().find('='));
    return speaker + ": no option '" + option + "'; options: " + joined(option_names(command));
  }
  if (!unknown.empty() && at_command) return speaker + ": '" + unknown.front() + "' was not expected";
  if (chosen.empty()) {
    std::vector<std::string> names;
    for (const CLI::App* known : app.get_subcommands({})) names.push_back(known->get_name());
    const std::string what = unknown.empty() ? "a command is needed" : "no command '" + unknown.front() + "'";
    return speaker + ": " + what + "; commands: " + joined(names);
  }
  if (error.get_name() == "RequiredError" && std::string_view(error.what()).starts_with("OP "))
    return speaker + ": " + error.what() + "; operators: " + joined(operator_names());
  return speaker + ": " + error.what();
}

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (const auto& backend : hopwell::backend_info()) names.push_back(backend.name);
  return names;
}

// The reason why a named backend cannot run here; "" if it can.
std::string obstacle_to_running(const std::string& name) {
  for (const auto& backend : hopwell::backend_info())
    if (backend.name == name && !backend.missing.empty()) return name + " is not here: " + backend.missing;
  return "";
}

// The words after the program's name, in reverse, because CLI11 reads a vector from its end.
std::vector<std::string> words_of(int argc, char** argv) {
  std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  if (argc > 0 && std::string_view(argv[0]).ends_with("hopwell-emulate")) words.insert(words.begin(), "emulate");
  std::reverse(words.begin(), words.end());
  return words;
}

CLI::IsMember an_operator() { return CLI::IsMember(operator_names()); }
CLI::IsMember a_backend() { return CLI::IsMember(backend_names()); }
CLI::Validator that_runs_here() { return {obstacle_to_running, ""}; }
CLI::Validator a_writable_file() { return {obstacle_to_writing, ""}; }

CLI::App* add_check(CLI::App& app, CheckOptions& options) {
  auto* command = app.add_subcommand("check", "every operator and corner case against float64, here and now");
  command->add_option("OP", options.operators, "operators; by default all")->check(an_operator());
  command->add_flag("--list", options.list,
                    "list the cases, and the reasons of backends that do not support one; run none");
  command->add_flag("--quick", options.quick,
                    "two cases of each operator and backend: half a minute on two busy cores");
  command->add_option("--backend", options.backend, "one backend; by default all this machine has")
      ->check(a_backend())
      ->check(that_runs_here());
  command->add_option("--case", options.cases,
                      "only cases of this name, in which * stands for any letters and ? for any one");
  command
      ->add_option("--seeds", options.seeds,
                   "random inputs a case (default: 1); on emu: backends each under two schedules")
      ->check(CLI::Range(1, 1000000));
  command->add_flag("--nightly", options.nightly,
                    "on emu: backends also the long cases whose code shorter cases reach; --case runs them too");
  const int last_device = std::max(static_cast<int>(hopwell::cuda_devices().size()) - 1, 0);
  command->add_option("--device", options.device, "the CUDA device, where there are several")
      ->check(CLI::Range(0, last_device));
  command->add_flag_callback(
      "--no-checker", [&options] { options.checker = false; },
      "on emu: backends numbers and hangs only, no search for races");
  command->add_flag("--light", options.light,
                    "on emu: backends search for races in the first of a case's two calls only, as make test does");
  command->add_flag(
      "--model", options.model,
      "on emu:sm90 and emu:sm100 cycles by unit of an H200 or B200, the limiting unit, and the fraction of "
      "the matmul rate that it allows");
  command->add_option("--json", options.json, "write the results to FILE")->type_name("FILE")->check(a_writable_file());
  return command;
}

CLI::App* add_bench(CLI::App& app, BenchOptions& options) {
  auto* command =
      app.add_subcommand("bench", "time an operator: median, spread, rate, share of this machine's ceiling");
  command->add_option("OP", options.op, "the operator")->required()->check(an_operator());
  command
      ->add_option("--backend", options.backends,
                   "backends, separated by commas; by default all this machine has, but the emulated")
      ->delimiter(',')
      ->check(a_backend())
      ->check(that_runs_here());
  command->add_option("--shape", options.shapes,
                      "named shapes, each followed by settings key=value that change it, all separated by commas; "
                      "settings without a name change the operator's first shape; may be repeated; by default all "
                      "named shapes");
  command->add_option("--json", options.json, "write the results to FILE")->type_name("FILE")->check(a_writable_file());
  return command;
}

CLI::App* add_emulate(CLI::App& app, EmulateOptions& options) {
  auto* command = app.add_subcommand(
      "emulate", "run a case's kernels on the emulator and write a page about them: waits, timeline and counts");
  std::vector<std::string> emulated = backend_names();
  std::erase_if(emulated, [](const std::string& backend) { return !backend.starts_with("emu:"); });
  command->add_option("OP", options.op, "the operator")->required()->check(an_operator());
  command->add_option("--backend", options.backend, "an emulated backend")
      ->required()
      ->check(CLI::IsMember(emulated))
      ->check(that_runs_here());
  command->add_option("--case", options.name, "the name of a case; the error for a wrong one lists the nearest names")
      ->required();
  command->add_option("--seed", options.seed, "of the inputs and of the schedule (default: 1)")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--report", options.report, "write the page, HTML, to FILE")
      ->type_name("FILE")
      ->required()
      ->check(a_writable_file());
  return command;
}

int run(std::vector<std::string> words) {
  CLI::App app{"Attention-training and low-precision decode kernels: list, check and time them.", "hopwell"};
  app.require_subcommand(1);
  app.set_version_flag("--version", hopwell::version());
  CheckOptions check_options;
  BenchOptions bench_options;
  EmulateOptions emulate_options;
  bool info_json = false;
  app.add_subcommand("info", "devices, backends and versions; what is missing and how to get it")
      ->add_flag("--json", info_json, "as JSON, on standard output");
  const auto* check_command = add_check(app, check_options);
  const auto* bench_command = add_bench(app, bench_options);
  const auto* emulate_command = add_emulate(app, emulate_options);

  try {
    app.parse(words);
  } catch (const CLI::Success& asked) {  // a request for help or for the version
    return app.exit(asked);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "%s\n", complaint(app, error).c_str());
    return 2;
  }
  if (check_command->parsed()) return check(check_options);
  if (bench_command->parsed()) return bench(bench_options);
  if (emulate_command->parsed()) return emulate(emulate_options);
  return info(info_json);
}

}  // namespace

int main(int argc, char** argv) {
  int code = 1;
  try {
    code = run(words_of(argc, argv));
  } catch (const std::bad_alloc&) {
    std::fputs("hopwell: out of memory\n", stderr);
  } catch (const hopwell::cli::UsageError& error) {
    std::fprintf(stderr, "hopwell: %s\n", error.what());
    code = 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hopwell: %s\n", error.what());
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::fprintf(stderr, "hopwell: cannot write to standard output: %s\n", std::strerror(errno));
    return 1;
  }
  return code;
}
