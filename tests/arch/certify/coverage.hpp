// Checks that the record of a GPU run covers every function of the sm80 and sm90 layers, and every case.
#pragma once

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>

#include "cases.hpp"

namespace hopwell::arch::certify {

inline std::vector<std::string> lines_of(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in) throw std::runtime_error("cannot read " + file.string());
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// Names of the device functions that a header declares.
inline std::set<std::string> functions_of(const std::filesystem::path& header) {
  static const std::regex declaration(R"(HOPWELL_DEVICE [^(]*?(\w+)\()");
  std::set<std::string> names;
  for (const std::string& line : lines_of(header))
    if (std::smatch match; std::regex_search(line, match, declaration)) names.insert(match[1]);
  return names;
}

/// Prints missing entries of `record`, a report of `certify_device compare`. Returns 0 if it is complete. `arch`:
/// src/arch.
inline int check_coverage(const char* record, const std::filesystem::path& arch) {
  int missing = 0;
  const std::vector<Case> cases = all_cases();
  std::set<std::string> certified;
  const std::vector<std::string> lines = lines_of(record);
  for (const Case& c : cases) {
    const bool agrees = std::any_of(lines.begin(), lines.end(), [&](const std::string& line) {
      return line.find("{\"name\": \"" + c.name + "\"") != std::string::npos &&
             line.find("\"verdict\": \"agrees\"") != std::string::npos;
    });
    if (!agrees) std::printf("case %s has not run on the GPU, or did not agree\n", c.name.c_str()), ++missing;
    std::istringstream functions(c.functions);
    for (std::string function; functions >> function;) certified.insert(function);
  }
  size_t known = 0;
  for (const char* generation : {"sm80", "sm90"})
    for (const auto& file : std::filesystem::directory_iterator(arch / generation)) {
      if (file.path().extension() != ".hpp") continue;
      for (const std::string& name : functions_of(file.path())) {
        ++known;
        if (certified.contains(name)) continue;
        std::printf("%s in %s/%s: no certification case names it\n", name.c_str(), generation,
                    file.path().filename().c_str());
        ++missing;
      }
    }
  std::printf("%zu functions, %zu cases; %d missing\n", known, cases.size(), missing);
  return missing != 0 || known == 0;
}

}  // namespace hopwell::arch::certify
