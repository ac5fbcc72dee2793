#include "table.hpp"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <numeric>
#include <stdexcept>
#include <utility>

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

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

namespace {

// Levenshtein distance of two words, one row of the table at a time.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest(std::vector<std::string> names, const std::string& word) {
  constexpr std::size_t kMost = 8;
  std::stable_sort(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    return edit_distance(a, word) < edit_distance(b, word);
  });
  names.resize(std::min(names.size(), kMost));
  return joined(names);
}

namespace {

bool is_special(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  return std::filesystem::exists(status) && !std::filesystem::is_regular_file(status);
}

// Follows the symbolic links of a path, so that a write replaces the file and keeps the links.
std::string linked(std::filesystem::path path) {
  constexpr int kMostLinks = 40;  // the limit of the system
  std::error_code error;
  for (int i = 0; i < kMostLinks && std::filesystem::is_symlink(path, error); ++i)
    path = path.parent_path() / std::filesystem::read_symlink(path, error);
  return path.string();
}

// In the same folder, so that it can be renamed; with the process id, so that it does not collide with another file.
std::string neighbour(const std::string& path) { return path + "." + std::to_string(getpid()) + ".part"; }

std::string failed(const std::string& path, int reason) {
  return "cannot write " + path + ": " + std::strerror(reason);
}

}  // namespace

std::string obstacle_to_writing(const std::string& path) {
  std::error_code ignored;
  if (path.empty()) return failed("a file without a name", ENOENT);
  if (std::filesystem::is_directory(path, ignored)) return failed(path, EISDIR);
  if (is_special(path)) return access(path.c_str(), W_OK) == 0 ? "" : failed(path, errno);
  const std::string place = neighbour(linked(path));
  std::FILE* file = std::fopen(place.c_str(), "wbx");
  if (file == nullptr) return failed(path, errno);
  std::fclose(file);
  std::filesystem::remove(place, ignored);
  return "";
}

void write_file(const std::string& path, const std::string& content) {
  const bool directly = is_special(path);
  const std::string target = linked(path), place = directly ? path : neighbour(target);
  std::FILE* file = std::fopen(place.c_str(), directly ? "wb" : "wbx");
  bool written = file != nullptr && std::fwrite(content.data(), 1, content.size(), file) == content.size() &&
                 std::fflush(file) == 0;
  int reason = errno;
  if (file != nullptr && std::fclose(file) != 0 && written) written = false, reason = errno;
  if (written && !directly && std::rename(place.c_str(), target.c_str()) != 0) written = false, reason = errno;
  if (written) return;
  std::error_code ignored;
  if (!directly) std::filesystem::remove(place, ignored);
  throw std::runtime_error(failed(path, reason));
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
