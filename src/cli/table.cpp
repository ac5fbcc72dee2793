#include "table.hpp"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace hopwell::cli {

std::string Table::text() const {
  std::vector<std::size_t> widths(rows_.front().size());
  for (const auto& row : rows_)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  const auto is_number = [&](std::size_t column) {
    return rows_.size() > 1 && std::isdigit(static_cast<unsigned char>(rows_[1][column][0])) != 0;
  };
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      line += (i == 0 ? "" : "  ") + (is_number(i) ? padding + row[i] : row[i] + padding);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

std::string format(const char* pattern, double value) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, value);  // NOLINT: the patterns are ours
  return text;
}

void Progress::show(const std::string& line) {
  if (isatty(STDERR_FILENO) == 0) return;
  std::fprintf(stderr, "\r\033[K%s", line.c_str());
  shown_ = true;
}

Progress::~Progress() {
  if (shown_) std::fputs("\r\033[K", stderr);
}

void write_file(const std::string& path, const std::string& content) {
  const std::string neighbour = path + ".part";
  std::ofstream file(neighbour, std::ios::binary);
  file << content << std::flush;
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(neighbour, path, error);
  if (!file || error) {
    std::error_code ignored;
    std::filesystem::remove(neighbour, ignored);
    throw std::runtime_error("cannot write " + path);
  }
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[16];
  std::strftime(text, sizeof text, "%Y-%m-%d", &utc);
  return text;
}

}  // namespace hopwell::cli
