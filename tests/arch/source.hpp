// Lines of a test's source file: marks, and comments that explain why a call is kept.
#pragma once

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "arch/emu/report.hpp"

namespace hopwell::arch::test {

/// All lines. A compiler called through a cache may know the file by a name relative to its own folder.
inline std::vector<std::string> source_lines(const std::string& file) {
  const std::filesystem::path path = std::filesystem::path(HOPWELL_COMPILED_IN) / file;
  std::ifstream in(path);
  if (!in) throw std::runtime_error("no source " + path.string());
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

/// Whether the call's line explains why the call stays although no test detects its absence.
inline bool is_kept(const emu::CallSite& call) {
  return source_lines(call.file).at(call.line - 1).find("// kept: ") != std::string::npos;
}

}  // namespace hopwell::arch::test
