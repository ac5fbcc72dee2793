#include <algorithm>
#include <cstdio>
#include <fstream>
#include <hopwell/hopwell.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <sstream>
#include <stdexcept>

#include "cases/case.hpp"
#include "commands.hpp"
#include "stopwatch.hpp"
#include "table.hpp"

namespace hopwell::cli {
namespace {

struct Shape {
  std::string name;
  cases::Settings settings;
};

Shape named_shape(const cases::Suite& suite, const std::string& name) {
  auto known = suite.shapes;
  known.insert(known.end(), suite.device_shapes.begin(), suite.device_shapes.end());
  const auto found = std::find_if(known.begin(), known.end(), [&](const auto& shape) { return shape.first == name; });
  if (found != known.end()) return {found->first, found->second};
  std::vector<std::string> names;
  for (const auto& [known_name, settings] : known) names.push_back(known_name);
  throw UsageError(suite.op + " has no shape '" + name + "'; shapes: " + joined(names));
}

void change(Shape& shape, const std::string& op, const std::string& key, const std::string& value) {
  const auto at = shape.settings.find(key);
  if (at == shape.settings.end()) {
    std::vector<std::string> keys;
    for (const auto& [known_key, unused] : shape.settings) keys.push_back(known_key);
    throw UsageError(op + " has no setting '" + key + "'; settings: " + joined(keys));
  }
  at->second = value;
  shape.name += " " + key + "=" + value;
}

// Adds the shapes of one --shape: shape names and settings, separated by commas. A setting changes the shape before it,
// or without one the operator's first shape.
void add_shapes(std::vector<Shape>& shapes, const cases::Suite& suite, const std::string& option) {
  const std::size_t first = shapes.size();
  std::istringstream words(option);
  for (std::string word; std::getline(words, word, ',');) {
    const auto equals = word.find('=');
    if (equals == std::string::npos) {
      shapes.push_back(named_shape(suite, word));
      continue;
    }
    if (shapes.size() == first) shapes.push_back(named_shape(suite, suite.shapes.front().first));
    change(shapes.back(), suite.op, word.substr(0, equals), word.substr(equals + 1));
  }
  if (shapes.size() == first) shapes.push_back(named_shape(suite, option));  // throws: the option is empty
}

// The shapes of the command line. Without any: all named shapes that suit the backends.
std::vector<Shape> chosen_shapes(const cases::Suite& suite, const std::vector<std::string>& options, bool on_device) {
  std::vector<Shape> shapes;
  for (const std::string& option : options) add_shapes(shapes, suite, option);
  if (options.empty()) {
    const auto& suitable = on_device && !suite.device_shapes.empty() ? suite.device_shapes : suite.shapes;
    for (const auto& [name, settings] : suitable) shapes.push_back({name, settings});
  }
  return shapes;
}

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const DeviceInfo& device : cuda_devices()) names.push_back(device.name);
  return names;
}

// Version of the NVIDIA driver; "" without a driver.
std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  std::smatch found;
  return std::regex_search(line, found, std::regex(R"(\d+\.\d+(\.\d+)?)")) ? found.str() : "";
}

// The command that repeats a record.
std::string command(const BenchOptions& options) {
  std::string text = "hopwell bench " + options.op;
  for (const std::string& backend : options.backends)
    text += (&backend == options.backends.data() ? " --backend " : ",") + backend;
  for (const std::string& shape : options.shapes)
    text += " --shape " + (shape.find(' ') == std::string::npos ? shape : "'" + shape + "'");
  return text;
}

// Empty if the backend does not support the problem; `reason` then says why.
std::optional<Measurement> measure_if_supported(Subject& subject, const std::string& backend, std::string& reason) {
  try {
    return measure(subject, backend);
  } catch (const Error& error) {
    if (error.status() != HOPWELL_UNSUPPORTED) throw;
    reason = error.what();
    return std::nullopt;
  }
}

constexpr const char* kHostCeilings =
    "of matmul: FLOP/s over the FLOP/s of an fp32 matrix product of 2048^3; of read: the time a plain sum over as many "
    "bytes takes,\n"
    "over the operator's; both timed in turns with it, on the same threads";
constexpr const char* kDeviceCeilings =
    "of matmul: FLOP/s over the FLOP/s of cuBLAS' bf16 matrix product of 8192^3 (- without libcublas), timed in turns "
    "with "
    "calls that find\na cold L2 cache; of read, for operators bound by their bytes: the time of a kernel that only "
    "reads as many, over the operator's,\nboth in graphs of dependent calls that go round more memory than L2 holds";

}  // namespace

int bench(const BenchOptions& options) {
  const auto& all = cases::suites();
  const cases::Suite& suite =
      *std::find_if(all.begin(), all.end(), [&](const auto& candidate) { return candidate.op == options.op; });
  std::vector<std::string> on = options.backends;
  if (on.empty()) {
    on = backends(options.op);
    std::erase_if(on, [](const std::string& name) { return name.starts_with("emu:"); });
  }
  Table table({options.op, "backend", "median ms", "spread", "GFLOP/s", "GB/s", "of matmul", "of read"});
  nlohmann::json records = nlohmann::json::array(), left_out = nlohmann::json::array();
  const bool on_device = std::all_of(on.begin(), on.end(), cases::cuda::runs);
  const auto share = [](double value) { return value > 0 ? format("%.1f %%", value * 100) : std::string("-"); };
  {
    Progress progress;
    for (const Shape& shape : chosen_shapes(suite, options.shapes, on_device)) {
      Subject subject([&] {
        cases::Random random(1);
        return suite.bench(shape.settings, random);
      });
      for (const std::string& backend : on) {
        progress.show(options.op + " " + shape.name + " on " + backend);
        std::string reason;
        const auto measured = measure_if_supported(subject, backend, reason);
        if (!measured) {
          left_out.push_back({{"shape", shape.name}, {"backend", backend}, {"reason", reason}});
          continue;
        }
        const Measurement& m = *measured;
        const cases::Instance& instance = *subject.copies(1, backend).front();
        table.add({shape.name, backend, format("%.3f", m.seconds * 1e3), format("%.0f %%", m.spread * 100),
                   format("%.1f", instance.flops / m.seconds * 1e-9), format("%.2f", instance.bytes / m.seconds * 1e-9),
                   share(m.compute_share), share(m.read_share)});
        records.push_back({{"operator", options.op},
                           {"shape", shape.name},
                           {"settings", shape.settings},
                           {"backend", backend},
                           {"median_seconds", m.seconds},
                           {"spread", m.spread},
                           {"matmul_flops_per_second", m.matmul_rate},
                           {"flops", instance.flops},
                           {"bytes", instance.bytes},
                           {"share_of_matmul", m.compute_share},
                           {"share_of_read", m.read_share}});
      }
    }
  }
  if (!records.empty()) std::fputs(table.text().c_str(), stdout);
  for (const nlohmann::json& refused : left_out) {
    std::printf("left out: %s on %s: %s\n", refused["shape"].get<std::string>().c_str(),
                refused["backend"].get<std::string>().c_str(), refused["reason"].get<std::string>().c_str());
  }
  if (records.empty()) throw std::runtime_error("nothing of " + options.op + " could be timed");
  std::puts(on_device ? kDeviceCeilings : kHostCeilings);
  if (!options.json.empty()) {
    write_file(options.json, nlohmann::json{{"version", version()},
                                            {"date", today()},
                                            {"commit", HOPWELL_COMMIT},
                                            {"command", command(options)},
                                            {"machine", build_info()},
                                            {"driver", driver_version()},
                                            {"devices", device_names()},
                                            {"results", records},
                                            {"left_out", left_out}}
                                     .dump(1) +
                                 "\n");
  }
  return 0;
}

}  // namespace hopwell::cli
