// What the commands put out: tables, progress, files.
#pragma once

#include <string>
#include <vector>

namespace hopwell::cli {

// Columns as wide as their cells.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  [[nodiscard]] std::string text() const;  // columns of numbers to the right, the others to the left

 private:
  std::vector<std::vector<std::string>> rows_;
};

std::string format(const char* pattern, double value);  // printf's pattern for one double

// A line that is overwritten while work goes on; nothing where standard error is no terminal.
class Progress {
 public:
  void show(const std::string& line);
  ~Progress();

 private:
  bool shown_ = false;
};

std::string joined(const std::vector<std::string>& words);  // "a, b, c"

// Writes a file whole or not at all: to a neighbour first, then renamed. What is no file, such as a pipe or a device, is
// written to directly. Throws std::runtime_error.
void write_file(const std::string& path, const std::string& content);
std::string obstacle_to_writing(
    const std::string& path);  // why write_file would fail, as far as one can know; "" if not

std::string today();  // 2026-01-31

}  // namespace hopwell::cli
