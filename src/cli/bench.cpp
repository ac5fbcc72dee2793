#include <algorithm>
#include <chrono>
#include <cstdio>
#include <hopwell/hopwell.hpp>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "cases/case.hpp"
#include "commands.hpp"
#include "table.hpp"

namespace hopwell::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct Shape {
  std::string name;
  cases::Settings settings;
};

// Named shapes as asked for; settings change the shapes that were named, or the first shape if none was.
std::vector<Shape> chosen_shapes(const cases::Suite& suite, const std::vector<std::string>& asked) {
  std::vector<Shape> shapes;
  cases::Settings changes;
  for (const std::string& word : asked) {
    if (const auto equals = word.find('='); equals != std::string::npos) {
      changes[word.substr(0, equals)] = word.substr(equals + 1);
      continue;
    }
    const auto named = std::find_if(suite.shapes.begin(), suite.shapes.end(), [&](const auto& shape) { return shape.first == word; });
    if (named == suite.shapes.end()) {
      std::string names;
      for (const auto& [name, settings] : suite.shapes) names += (names.empty() ? "" : ", ") + name;
      throw std::invalid_argument(suite.op + " has no shape '" + word + "'; shapes: " + names);
    }
    shapes.push_back({named->first, named->second});
  }
  if (asked.empty()) {
    for (const auto& [name, settings] : suite.shapes) shapes.push_back({name, settings});
  } else if (shapes.empty()) {
    shapes.push_back({suite.shapes.front().first, suite.shapes.front().second});
  }
  for (Shape& shape : shapes) {
    for (const auto& [key, value] : changes) {
      const auto at = shape.settings.find(key);
      if (at == shape.settings.end()) {
        std::string keys;
        for (const auto& [known, unused] : shape.settings) keys += (keys.empty() ? "" : ", ") + known;
        throw std::invalid_argument(suite.op + " has no setting '" + key + "'; settings: " + keys);
      }
      at->second = value;
      shape.name += " " + key + "=" + value;
    }
  }
  return shapes;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Measurement {
  double seconds = 0, spread = 0;         // median; (largest - smallest) / median
  double compute_share = 0, read_share = 0;  // of this machine's matrix product and of its read bandwidth, medians of paired ratios
};

// Times the operator in turns with this machine's two ceilings: machines drift, ratios of neighbours hold.
Measurement measure(const cases::Instance& instance, const std::string& backend) {
  constexpr double kBudgetSeconds = 4, kMatmulFlops = 2.0 * 2048 * 2048 * 2048;
  const auto bytes = static_cast<std::size_t>(instance.bytes);
  const auto once = [&] {
    const auto start = Clock::now();
    instance.call(backend.c_str(), nullptr);
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  once();
  time_cpu_matmul();
  time_cpu_read(bytes);
  std::vector<double> seconds, compute, read;
  const auto start = Clock::now();
  while (seconds.size() < 5 || (std::chrono::duration<double>(Clock::now() - start).count() < kBudgetSeconds && seconds.size() < 200)) {
    const double matmul = time_cpu_matmul(), sum = time_cpu_read(bytes), call = once();
    seconds.push_back(call);
    compute.push_back((instance.flops / call) / (kMatmulFlops / matmul));
    read.push_back(sum / call);
  }
  const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
  const double middle = median(seconds);
  return {middle, (*most - *least) / middle, median(compute), median(read)};
}

}  // namespace

int bench(const BenchOptions& options) {
  const auto& all = cases::suites();
  const cases::Suite& suite = *std::find_if(all.begin(), all.end(), [&](const auto& candidate) { return candidate.op == options.op; });
  std::vector<std::string> on = options.backends;
  if (on.empty()) {
    on = backends();
    std::erase_if(on, [](const std::string& name) { return name.starts_with("emu:"); });
  }
  Table table({options.op, "backend", "median ms", "spread", "GFLOP/s", "GB/s", "of matmul", "of read"});
  nlohmann::json records = nlohmann::json::array();
  {
    Progress progress;
    for (const Shape& shape : chosen_shapes(suite, options.shapes)) {
      cases::Random random(1);
      const cases::Instance instance = suite.bench(shape.settings, random);
      for (const std::string& backend : on) {
        progress.show(options.op + " " + shape.name + " on " + backend);
        const Measurement m = measure(instance, backend);
        table.add({shape.name, backend, format("%.3f", m.seconds * 1e3), format("%.0f %%", m.spread * 100),
                   format("%.1f", instance.flops / m.seconds * 1e-9), format("%.2f", instance.bytes / m.seconds * 1e-9),
                   format("%.1f %%", m.compute_share * 100), format("%.1f %%", m.read_share * 100)});
        records.push_back({{"operator", options.op}, {"shape", shape.name}, {"settings", shape.settings}, {"backend", backend},
                           {"median_seconds", m.seconds}, {"spread", m.spread}, {"flops", instance.flops}, {"bytes", instance.bytes},
                           {"share_of_matmul", m.compute_share}, {"share_of_read", m.read_share}});
      }
    }
  }
  std::fputs(table.text().c_str(), stdout);
  std::puts("of matmul: FLOP/s over those of an fp32 matrix product of 2048^3; of read: the time a plain sum over as many bytes takes,\n"
            "over the operator's; both timed in turns with it, on the same threads");
  if (!options.json.empty()) {
    write_file(options.json,
               nlohmann::json{{"version", version()}, {"date", today()}, {"machine", build_info()}, {"results", records}}.dump(1) + "\n");
  }
  return 0;
}

}  // namespace hopwell::cli
