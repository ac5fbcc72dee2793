// Shared by the emulator's tests: runs a kernel over seeds and policies, and checks that a finding names a line.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <source_location>
#include <string>

#include "arch/emu/launch.hpp"
#include "source.hpp"

namespace hopwell::arch::test {

inline emu::Options options_for(uint64_t seed) {
  emu::Options o;
  o.seed = seed;
  o.async = emu::Async(seed % 3);
  return o;
}

/// Number of seeds of a test: `usual` times HOPWELL_EMULATOR_SCHEDULES (make nightly).
inline uint64_t schedules(uint64_t usual) {
  const char* times = std::getenv("HOPWELL_EMULATOR_SCHEDULES");
  return usual * std::max<uint64_t>(1, times ? std::strtoull(times, nullptr, 10) : 1);
}

/// Expects no finding over `seeds` seeds, which cycle through the three asynchronous policies.
inline void expect_clean(const emu::LaunchShape& shape, const std::function<void()>& kernel, uint64_t seeds = 50) {
  for (uint64_t seed = 0; seed < schedules(seeds); ++seed) {
    const emu::Report report = emu::launch(shape, options_for(seed), kernel);
    ASSERT_TRUE(report.clean()) << "seed " << seed << "\n" << report.text();
  }
}

/// Line of `file` that ends with the comment `// @name`; 0 if there is none.
inline uint32_t marked_line(const std::string& file, const std::string& name) {
  const std::vector<std::string> lines = source_lines(file);
  for (size_t i = 0; i < lines.size(); ++i)
    if (lines[i].ends_with("// @" + name)) return uint32_t(i + 1);
  return 0;
}

inline std::string base_name(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

/// Expects that each of a few seeds gives a finding of this kind whose text contains `words` and that names the marked
/// line: as the place of the finding, as the earlier access, or (hangs) as the place where threads wait.
inline void expect_finding(const emu::LaunchShape& shape, const std::function<void()>& kernel, emu::Kind kind,
                           const std::string& words, const std::string& mark,
                           std::source_location here = std::source_location::current()) {
  const uint32_t line = marked_line(here.file_name(), mark);
  ASSERT_NE(line, 0u) << "no line ends with // @" << mark;
  const std::string place = base_name(here.file_name()) + ":" + std::to_string(line);
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const emu::Report report = emu::launch(shape, options_for(seed), kernel);
    bool found = false;
    for (const emu::Finding& f : report.findings)
      found |= f.kind == kind && f.text.find(words) != std::string::npos &&
               (f.where.line == line || f.other.line == line || f.text.find(place) != std::string::npos);
    EXPECT_TRUE(found) << "line " << here.line() << ", seed " << seed << ": no [" << emu::name(kind) << "] with \""
                       << words << "\" naming line " << line << " in:\n"
                       << report.text();
    if (!found) return;
  }
}

}  // namespace hopwell::arch::test
