// A table on the terminal, columns as wide as their cells.
#pragma once

#include <string>
#include <vector>

namespace hopwell::cli {

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

// Writes a file whole or not at all: to a neighbour first, then renamed. Throws std::runtime_error.
void write_file(const std::string& path, const std::string& content);

std::string today();  // 2026-01-31

}  // namespace hopwell::cli
